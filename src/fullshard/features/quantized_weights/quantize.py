"""Quantize the large frozen weights of a model, so that ranks store them as codes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.forms import form_of
from fullshard.features.quantized_weights import at_rest  # noqa: F401 -- it shards what is marked here
from fullshard.features.quantized_weights.marks import MARKS, Mark
from fullshard.features.quantized_weights.scales import is_exact, is_to_be_quantized
from fullshard.plan.quantized import TABLES, is_stacked, shares, why_small

_MATRIX, _STACK = 2, 3
_CODED, _LARGE = "coded already", ("convolutions", "linear layers", "stacked weights")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def mark(module: nn.Module, attribute: str, mark: Mark) -> None:
    """Mark a parameter to be quantized at sharding. Raise `ConfigError` if it is marked with another form."""
    form_of(mark.form)
    before = vars(module).setdefault(MARKS, {}).setdefault(attribute, mark)
    if before.form != mark.form:
        raise ConfigError(
            f"{type(module).__name__}.{attribute} is already marked as {before.form}, not {mark.form}",
            hint="use the same format in quantize, in bitsandbytes' settings and in the files",
        )


@dataclass(slots=True)
class Quantized:
    """The weights that `quantize` has marked or skipped. `str()` returns a one-line summary.

    Attributes:
        form: name of the form.
        marked: number of elements in the marked weights, by type of layer.
        left: number of elements in the skipped weights, by reason.
    """

    form: str
    marked: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        whole = sum(self.marked.values()) + sum(self.left.values())
        marked, left = shares(self.marked, whole), shares(self.left, whole)
        return f"{self.form} at rest: {marked}; left as they are: {left}"


def quantize(model: nn.Module, form: str = "nf4", *, embeddings: bool = False) -> Quantized:
    """Mark all large frozen weights of a model to be quantized when it is sharded, and return a summary.

    Linear layers, convolutions and stacked experts are stored and sent in `form`. While their unit is unsharded they
    are ordinary dense weights, so any layer, kernel or adapter can use them.

    Args:
        model: an unsharded model with its values in memory or yet to be read. Add adapters before this call.
        form: `nf4`, `fp4`, `int8` or another form of `fullshard.core.forms`.
        embeddings: also quantize embeddings and the output head.

    Raises:
        ConfigError: The form does not exist.
        WrapError: No weight can be quantized, usually because all of them are trained.
    """
    found = mark_large(model, form, embeddings=embeddings)
    if not found.marked:
        raise WrapError(
            f"no weight of {type(model).__name__} can be stored as {form}: {found}",
            hint="freeze the weights first with model.requires_grad_(False), or add adapters",
        )
    return found


def mark_large(
    model: nn.Module, form: str, *, embeddings: bool = False, left: tuple[str, ...] = (), freezes: bool = False
) -> Quantized:
    """Mark large weights as `quantize` does, outside modules in `left`: frozen ones, or all if `freezes`."""
    found, seen = Quantized(form_of(form).name), set[int]()
    options: Any = {"embeddings": embeddings, "left": left, "freezes": freezes}
    for module, attribute, parameter, what, reason in weights(model, **options):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        part, key = (found.left, reason) if reason else (found.marked, what)
        part[key] = part.get(key, 0) + parameter.numel()
        if not reason:
            parameter.requires_grad_(False)
            mark(module, attribute, Mark(form))
    return found


def weights(
    model: nn.Module, *, embeddings: bool = False, left: tuple[str, ...] = (), freezes: bool = False
) -> Iterator[tuple[nn.Module, str, nn.Parameter, str, str]]:
    """Yield (module, attribute, parameter, layer type, reason to skip it); the reason is empty for weights to mark."""
    of_head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    embeds = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    tables = {id(p) for m in embeds for p in m.parameters(recurse=False)}
    tables |= set() if of_head is None else set(map(id, of_head.parameters()))
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            what = _what(path, module, attribute, parameter)
            if (id(parameter) in tables or "embed" in attribute) and parameter.dim() >= _MATRIX and what != _CODED:
                what = TABLES
            reason = "" if what in _LARGE or (what == TABLES and embeddings) else what
            if parameter.requires_grad and not freezes and what != _CODED:
                reason = "trained"
            elif path.endswith(left) and what != _CODED:
                reason = "left out"
            yield module, attribute, parameter, what, reason


def _what(path: str, module: nn.Module, attribute: str, parameter: nn.Parameter) -> str:
    """Return the layer type of a weight if it is in `_LARGE`, or else the reason to skip the weight."""
    kind, name, shape = type(module).__name__, f"{path}.{attribute}", tuple(parameter.shape)
    if (
        is_exact(parameter)
        or is_to_be_quantized(parameter)
        or not parameter.is_floating_point()
        or parameter.itemsize == 1
    ):
        return "complex numbers" if parameter.is_complex() else _CODED
    if reason := why_small(name, shape) or ("routers" if "router" in kind.lower() else ""):
        return reason
    if isinstance(module, _CONVOLUTIONS):
        return "convolutions"
    if isinstance(module, (nn.Linear, nn.MultiheadAttention)) or kind == "Conv1D":  # the linear layer of GPT-2
        return "linear layers"
    is_stack = (len(shape) >= _STACK and shape[0] > 1) or is_stacked(name, shape)
    return "stacked weights" if is_stack else f"{kind}.{attribute}"
