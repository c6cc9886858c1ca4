"""The form in which a sharded tensor goes to another process: this rank's part, to be written into a checkpoint there.

`torch.distributed.checkpoint.async_save` with processes sends state dicts to one. That process has no
ranks of the model, so it cannot compute with the tensor.
"""

from __future__ import annotations

import types
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch

from fullshard.comm import torch_private
from fullshard.core.boxes import IntervalBox
from fullshard.engine.sharded_tensor import ShardedTensor


class SentPart(torch.Tensor):
    """A rank's interval of a tensor of shape `shape`, with the methods that `torch.distributed.checkpoint` calls.

    Attributes:
        whole: shape of the tensor.
        parts: this rank's interval as boxes of it.
        label: the name of the tensor that the values belong to.
        spec: whether it is by rows.
    """

    whole: torch.Size
    parts: list[IntervalBox]
    label: str
    spec: types.SimpleNamespace

    @classmethod
    def of(cls, local: torch.Tensor, parts: list[IntervalBox], whole: torch.Size, name: str, is_by_rows: bool) -> Self:
        """Put one around the sent value."""
        made = local.as_subclass(cls)
        made.whole, made.parts, made.label = whole, parts, name
        made.spec = types.SimpleNamespace(is_by_rows=is_by_rows)
        return made

    @property
    def local(self) -> torch.Tensor:
        """As a sharded tensor's."""
        return self.as_subclass(torch.Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The whole's."""
        return self.whole

    @property
    def name(self) -> str:
        """As a sharded tensor's."""
        return self.label

    def boxes(self) -> list[IntervalBox]:
        """Return the interval boxes, as a sharded tensor does."""
        return self.parts

    __create_write_items__: Any = ShardedTensor.__create_write_items__
    __create_chunk_list__: Any = ShardedTensor.__create_chunk_list__
    __get_tensor_shard__: Any = ShardedTensor.__get_tensor_shard__


def send_parts() -> None:
    """Have other processes be sent these for sharded tensors. `pickle` and `torch.save` are refused as before."""
    ForkingPickler.register(ShardedTensor, _reduce)


def _reduce(tensor: ShardedTensor) -> Any:
    if torch_private.has_own_dispatch(type(tensor.local)):
        tensor.__reduce_ex__(2)  # an error: it is composed of several
    return SentPart.of, (tensor.local, tensor.boxes(), tensor.shape, tensor.name, tensor.spec.is_by_rows)
