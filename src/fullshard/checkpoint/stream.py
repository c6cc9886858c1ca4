"""The weights of a model that trains, one after the other, for an inference engine beside it or over the network."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import nn

from fullshard.checkpoint.export import Batch, SavedLayout
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.shards import parse_dtype
from fullshard.checkpoint.tensors import local_tensors
from fullshard.core.errors import CheckpointError

_DOING = "streaming the weights"


def stream_weights(
    model: nn.Module, *, dtype: torch.dtype | str | None = None, rank0_only: bool = False
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield every tensor that `export_hf` would write, under the same name, with the same values. A collective.

        for name, tensor in fullshard.stream_weights(model, dtype="bfloat16"):
            engine.load_weights([(name, tensor)])

    Every rank runs the loop to its end. Parameters are gathered one at a time (where Transformers stores several as
    one, those together), so a device holds one whole parameter besides its shards, and the one that the loop still has.

    A rank that leaves the loop before its end, by an error or by `break`, leaves no other waiting: the others' loops
    end with an error at the same parameter, the model is as it was, and training can go on.

    Args:
        model: sharded or not. Adapters of a PEFT model are merged on the way, as in `export_hf`; the model keeps them.
        dtype: of floating-point tensors; default: as they are, which is float32 for main weights. Cast before they are
            sent.
        rank0_only: the other ranks take part and are given nothing.

    Yields:
        Name and whole tensor on the rank's device, in the model's order. The tensor is the caller's: it shares no
        memory with the model.

    Raises:
        CheckpointError: on every rank: another left its loop or failed; or a model that cannot be exported.
        ConfigError: a `dtype` that cannot be understood.
    """
    cast, ranks = parse_dtype(dtype), Ranks.of(model)
    form = ranks.together(_DOING, lambda: SavedLayout.of(model, cast=cast))
    held = local_tensors(model)
    lent = {local.held.untyped_storage().data_ptr() for local in held if not local.is_sharded}
    is_given = ranks.rank == 0 or not rank0_only
    for batch in form.batches:
        error: Exception | None = None
        name = batch.stored_name or batch.names[0]
        try:
            stored = _make(form, batch, is_given)
            while stored:
                name = next(iter(stored))
                tensor = stored.pop(name)
                yield name, tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor
                del tensor  # or the next would be gathered beside it
        except GeneratorExit:
            with contextlib.suppress(CheckpointError):  # the others are told, and may have left as well
                ranks.fail_together(_DOING, CheckpointError(f"the loop was left at {name!r}"))
            raise
        except Exception as caught:
            error = caught
        ranks.fail_together(f"{_DOING}: {name}", error)


@torch.no_grad()
def _make(form: SavedLayout, batch: Batch, is_given: bool) -> dict[str, torch.Tensor]:
    """Gather a batch, and make what is stored of it if this rank is given it. In a function, so that nothing stays."""
    wholes = form.gather(batch)
    return form(batch, wholes()) if is_given else {}
