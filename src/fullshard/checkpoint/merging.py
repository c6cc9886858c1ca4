"""Merge adapters into their base model while it is sharded, one layer at a time.

PEFT's own code merges each layer, on a copy of that layer with unsharded parameters, so the result is bit-identical to
PEFT's. The caller supplies the parameters, from the shards of a running job (here) or from files (`offline.merged`).
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import torch_private
from fullshard.checkpoint.tensors import LocalTensor, local_tensors
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import clean_name
from fullshard.features import ShardedParameter
from fullshard.features.quantized_weights.scales import is_exact

Whole = Callable[[torch.Tensor], torch.Tensor]
"""Returns the full tensor of a parameter or buffer."""


class MergedModel:
    """A description of the model that `PeftModel.merge_and_unload` would create, which does not create that model.

    The units of the given model must be resharded. `base` is the model without adapters, with the class and
    configuration of the result. `sources` lists the tensors of the result, in its order and with its names. If the
    adapters do not change a tensor, its source contains the model's own tensor; otherwise, it contains a tensor on the
    meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        check_mergeable(model)
        self.base: nn.Module = model.get_base_model()  # type: ignore[operator]
        self._local = {id(local.tensor): local for local in local_tensors(self.base, on_meta=True)}
        self._layers: dict[int, list[nn.Module]] = {}
        self._last: tuple[list[nn.Module], dict[str, torch.Tensor]] = ([], {})
        self._paths: dict[int, str] = {}
        self.sources = self._find_sources()

    def parts(self, source: LocalTensor) -> list[torch.Tensor]:
        """Return the model's own tensors from which the given tensor of the result is computed."""
        layers = self._layers.get(id(source.tensor))
        if layers is None:
            return [source.tensor]
        found = {id(t): t for layer in layers for t in (*layer.parameters(), *layer.buffers()) if id(t) in self._local}
        return list(found.values())

    def local(self, tensor: torch.Tensor) -> LocalTensor:
        """Return the `LocalTensor` for one of the model's own tensors."""
        return self._local[id(tensor)]

    def merge(self, source: LocalTensor, whole: Whole) -> torch.Tensor:
        """Return a tensor of the result. `whole` returns the full tensor for one of the model's own tensors."""
        layers = self._layers.get(id(source.tensor))
        if layers is None:
            return whole(source.tensor)
        if self._last[0] != layers:  # weight and bias are requested one after the other
            made: dict[int, torch.Tensor] = {}
            results: dict[str, torch.Tensor] = {}
            for layer in layers:
                unloaded = _unload(copy_module(layer, lambda t: whole(t).clone() if id(t) in self._local else t, made))
                results |= dict(_named_tensors(unloaded, self._paths[id(layer)]))
            self._last = (layers, results)
        return self._last[1][source.name]

    def is_changed(self, source: LocalTensor) -> bool:
        """Return whether adapters change a tensor of the result."""
        return id(source.tensor) in self._layers

    @property
    def ties_embeddings(self) -> bool:
        """Return whether an embedding appears under two names in the result, because it is tied to the head."""
        getters = (getattr(self.base, f"get_{which}_embeddings", None) for which in ("input", "output"))
        tables = [get() for get in getters if get is not None]
        names = [name for name, module, _ in _walk(self.base) if any(module is table for table in tables)]
        return any(sum(name.startswith(f"{path}.") for path in names for name in s.names) > 1 for s in self.sources)

    def _find_sources(self) -> list[LocalTensor]:
        """Merge on the meta device to find names and shapes of the result, and which of its tensors are tied."""
        stand_ins: dict[int, torch.Tensor] = {}
        named: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for path, module, is_adapted_here in _walk(self.base):
            copied = copy_module(module, self._stand_in, stand_ins, deep=is_adapted_here)
            if is_adapted_here:
                self._paths[id(module)] = path
                copied = _unload(copied)
            for name, tensor in _named_tensors(copied, path, recurse=is_adapted_here):
                named.setdefault(id(tensor), (tensor, []))[1].append(name)
                if is_adapted_here and module not in self._layers.setdefault(id(tensor), []):
                    self._layers[id(tensor)].append(module)
        originals = {id(stand_ins[key]): local.tensor for key, local in self._local.items() if key in stand_ins}
        return [
            LocalTensor(
                tuple(names), made if key in self._layers else originals[key], tuple(made.shape),
                Interval(0, made.numel()), is_writer=True,
            )
            for key, (made, names) in named.items()
        ]  # fmt: skip

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        local = self._local.get(id(tensor))
        shape = tensor.shape if local is None else local.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


def check_mergeable(model: nn.Module) -> None:
    """Raise `CheckpointError` if the adapters do not change weights, or if the base model is quantized."""
    check = getattr(model.base_model, "_check_merge_allowed", None)
    if check is None:
        raise CheckpointError(
            f"{type(model).__name__}: its adapters do not change weights, so they cannot be merged",
            hint="save only the adapters, with save_model",
        )
    check()
    for path, layer, is_adapted_here in _walk(model.get_base_model()):  # type: ignore[operator]
        if is_adapted_here and any(_is_quantized(p) for p in layer.parameters()):
            raise CheckpointError(
                f"{path} is quantized, so merging would round its adapter to the precision of the quantized weights",
                hint="save the adapter, and merge it into the unquantized base: `fullshard merge BASE ADAPTER OUT`",
            )


def _is_quantized(parameter: torch.Tensor) -> bool:
    if isinstance(parameter, ShardedParameter):
        return parameter.bucket.kinds[0].is_exact  # a bucket has only such parameters, or none
    return is_exact(parameter)


def _walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name in the merged model, module, whether adapters are active in it) for each module."""
    wraps = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
    yield path, module, wraps
    if not wraps:
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, clean_name(f"{path}.{name}" if path else name))


def _unload(layer: Any) -> nn.Module:
    """Merge the adapters of one PEFT layer, and return the plain module that PEFT creates for it."""
    options = {"safe_merge": False, "adapter_names": None}
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, **options)  # type: ignore[no-any-return]
    layer.merge(**options)
    return layer.get_base_layer()  # type: ignore[no-any-return]


def copy_module(
    module: nn.Module,
    replace: Callable[[torch.Tensor], torch.Tensor],
    made: dict[int, torch.Tensor],
    *,
    deep: bool = True,
) -> nn.Module:
    """Return a copy of `module` without hooks, with `made[id(tensor)]`, or else `replace(tensor)`, for each tensor."""

    def tensor(old: torch.Tensor | None) -> torch.Tensor | None:
        if old is None:
            return None
        if id(old) not in made:
            new = replace(old)
            made[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    cls: type[nn.Module] = user_class(module)
    twin: nn.Module = cls.__new__(cls)
    for key, value in module.__dict__.items():
        if key.endswith(torch_private.HOOK_NAMES):
            value = OrderedDict()
        elif key == "_modules":
            value = {n: m if m is None or not deep else copy_module(m, replace, made) for n, m in value.items()}
        elif key in ("_parameters", "_buffers"):
            value = {name: tensor(old) for name, old in value.items()}
        elif isinstance(value, list | dict | set):
            value = copy.copy(value)  # PEFT records merged adapters in them
        twin.__dict__[key] = value
    return twin


def _named_tensors(module: nn.Module, path: str, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each parameter and persistent buffer."""
    for inner_path, inner in module.named_modules() if recurse else [("", module)]:
        for name, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None and name not in torch_private.non_persistent_buffers(inner):
                yield ".".join(part for part in (path, clean_name(inner_path), name) if part), tensor
