"""Stream the weights of a model during training, one tensor at a time, to an inference engine on any host."""

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
    """Yield every tensor that `export_hf` would write, with the same name and values. All ranks must call this.

        for name, tensor in fullshard.stream_weights(model, dtype="bfloat16"):
            engine.load_weights([(name, tensor)])

    Every rank must run the loop to its end. Parameters are gathered one at a time, or together if Transformers stores
    them as one tensor. In addition to its shards, a device therefore holds only one full parameter and the tensor that
    the loop still references.

    If a rank leaves the loop early, because of an error or `break`, the other ranks do not wait for it. Their loops end
    with an error at the same parameter, the model is unchanged, and training can continue.

    Args:
        model: sharded or not. The adapters of a PEFT model are merged into the yielded tensors, as in `export_hf`. The
            model itself does not change.
        dtype: dtype to cast floating-point tensors to before they are sent. By default, they keep their dtype, which is
            float32 for main weights.
        rank0_only: yield tensors on rank 0 only. The other ranks take part but yield nothing.

    Yields:
        Name and full tensor on the rank's device, in the model's order. The tensor belongs to the caller and does not
        share memory with the model.

    Raises:
        CheckpointError: another rank left its loop or failed, or the model cannot be exported. Every rank raises it.
        ConfigError: `dtype` cannot be parsed.
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
                del tensor  # otherwise the next one would be gathered while it is in memory
        except GeneratorExit:
            with contextlib.suppress(CheckpointError):  # tell the other ranks, which may also have left
                ranks.fail_together(
                    _DOING,
                    CheckpointError(f"the loop over the tensors was exited early, at {name!r}; it must run to the end"),
                )
            raise
        except Exception as caught:
            error = caught
        ranks.fail_together(f"{_DOING}: {name}", error)


@torch.no_grad()
def _make(form: SavedLayout, batch: Batch, is_given: bool) -> dict[str, torch.Tensor]:
    """Gather a batch. If `is_given` is set, return the tensors to store, by name; otherwise, return an empty dict."""
    # This is a separate function so that all temporary tensors are released when it returns.
    wholes = form.gather(batch)
    return form(batch, wholes()) if is_given else {}
