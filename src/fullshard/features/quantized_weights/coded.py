"""A rank's interval of a weight stored as codes and scales. In torch operations it acts as a tensor of the values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullshard.core.errors import LifecycleError
from fullshard.core.forms import StoredForm
from fullshard.engine.precision import map_tensors, torch_dtype
from fullshard.engine.shard_spec import CodedShard
from fullshard.features.quantized_weights import torch_private
from fullshard.features.quantized_weights.codecs import codec


class CodedInterval(CodedShard):
    """A read-only tensor of values that are stored as codes. Copying the same values into it does nothing."""

    def __new__(cls, form: StoredForm, parts: Mapping[str, torch.Tensor], like: torch.Tensor) -> Any:
        """Create the tensor without any memory, with the shape and dtype of `like`."""
        return torch_private.wrapper(cls, like, next(iter(parts.values())).device)

    def __init__(self, form: StoredForm, parts: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        self.form, self.parts, self._like = form, parts, like
        vars(self).update(parts)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.parts), None

    def decoded(self) -> torch.Tensor:
        """Return the decoded values in a new plain tensor."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        codec(self.form.name).decode(list(self.parts.values()), values)
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as a plain tensor of the decoded values."""
        return self.decoded().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.decoded()})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch operation on the decoded values. Raise `LifecycleError` if it would change them."""
        first = args[0] if args else None
        if type(first) is CodedInterval and func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return CodedInterval(first.form, first.parts, first._like)
        if isinstance(first, cls) and func is torch.ops.aten.copy_.default and first._stands_for(args[1]):
            return first  # for example, this model's own state dict
        if torch_private.writes(func) and isinstance((kwargs or {}).get("out", first), cls):
            raise LifecycleError(
                f"`{func.overloadpacket.__name__}` would change a weight that is stored as codes",
                hint="train an adapter for it, which export_hf merges; load codes with load_checkpoint, and load other "
                "values before the model is sharded",
            )
        args, kwargs = (map_tensors(_plain, each) for each in (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        return map_tensors(_Seen, result) if torch_private.is_view(func) else result

    def _stands_for(self, values: torch.Tensor) -> bool:
        """Return whether `values` are equal to the decoded values."""
        own = self.decoded()
        return values.shape == own.shape and torch.equal(own, _plain(values).to(own.device, own.dtype))


class _Seen(CodedInterval):
    """A read-only tensor that torch returns as a view of a weight stored as codes. It holds the decoded values."""

    def __new__(cls, values: torch.Tensor) -> Any:
        """Create the tensor with the shape, dtype and device of `values`."""
        return torch_private.wrapper(cls, values, values.device)

    def __init__(self, values: torch.Tensor) -> None:
        self._seen = values

    def decoded(self) -> torch.Tensor:
        """Return the values."""
        return self._seen


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.decoded() if isinstance(tensor, CodedInterval) else tensor


def parts_in(stored: torch.Tensor, form: StoredForm, numel: int) -> dict[str, torch.Tensor]:
    """Return the parts of `numel` elements of a weight, by part name, as views of its stored bytes, shape (..., n)."""
    parts, start = {}, 0
    for part in form.parts:
        dtype = torch_dtype(part.dtype)
        stop = start + part.numel(numel) * dtype.itemsize
        parts[part.name] = stored[..., start:stop].view(dtype)
        start = stop
    return parts


def cut(parts: Mapping[str, torch.Tensor], form: StoredForm, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the parts of the elements from `start` to `stop`. `start` must be at an atom boundary."""
    return {part.name: parts[part.name][part.numel(start) : part.numel(stop)] for part in form.parts}
