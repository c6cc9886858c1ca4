"""Weights for the engine that a trainer of TRL's generates with: vLLM in its own processes, or a server of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch

from fullshard.api import Accelerator
from fullshard.checkpoint import stream_weights

_Weights = Generator[tuple[str, torch.Tensor], None, None]


def stream_into_engines() -> None:
    """Make TRL hand over what `stream_weights` gives.

    By itself it would merge adapters into the weights that train and take them out again, which rounds them each time.
    """
    theirs: Any = getattr(sys.modules.get("trl.generation.vllm_generation"), "VLLMGeneration", None)
    if theirs is None or hasattr(theirs, "of_trl"):
        return
    named, sync = theirs._iter_named_params, theirs.sync_weights

    def _iter_named_params(self: Any) -> Any:
        if not isinstance(self.accelerator, Accelerator):
            return named(self)
        return self.streams.enter_context(_ending(stream_weights(self.model, rank0_only=self.mode == "server")))

    def sync_weights(self: Any) -> None:
        with contextlib.ExitStack() as self.streams:
            sync(self)

    theirs.of_trl, theirs._iter_named_params, theirs.sync_weights = (named, sync), _iter_named_params, sync_weights


@contextlib.contextmanager
def _ending(stream: _Weights) -> Iterator[_Weights]:
    """Give a stream that ends with the block; by an error on all ranks: none waits for a rank whose engine is gone."""
    try:
        yield stream
    except Exception as error:
        next(stream, None)  # one that has not begun would not tell the other ranks
        stream.throw(error)
        raise
    finally:
        stream.close()
