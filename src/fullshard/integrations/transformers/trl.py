"""Have every rank take part in what TRL does outside its trainers' forwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.api import Accelerator, collectives
from fullshard.api.sharding import is_sharded
from fullshard.checkpoint import stream_weights
from fullshard.features import unsharded

_Weights = Generator[tuple[str, torch.Tensor], None, None]


def teachers_head(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Gather a teacher's head for a step: TRL multiplies with its weight itself, outside of the teacher's forward."""
    teacher = getattr(trainer, "teacher_model", None)
    if not isinstance(teacher, nn.Module) or not hasattr(trainer, "_forward_redirection") or not is_sharded(teacher):
        return contextlib.nullcontext()
    return unsharded(teacher.get_output_embeddings(), recurse=False)  # type: ignore[operator]


def generate_in_step() -> None:
    """Make ranks with fewer batches of prompts than others repeat their last one: callbacks log completions.

    A rank that is done would leave the others waiting for its part of the parameters; what it repeats is left out.
    """
    home: Any = sys.modules.get("trl.trainer.callbacks")
    theirs = getattr(home, "_generate_completions", None)
    if theirs is None or hasattr(theirs, "of_trl"):
        return
    parameters = inspect.signature(theirs)

    @functools.wraps(theirs)
    def _generate_completions(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        if not isinstance(call.arguments["accelerator"], Accelerator):
            return theirs(*args, **kwargs)
        own, size = list(call.arguments["prompts"]), call.arguments["batch_size"]
        most = max(collectives.all_gather_object(own), key=len)
        missing = (math.ceil(len(most) / size) - 1) * size + 1 - len(own)  # to the first prompt of the last round
        call.arguments["prompts"] = own + (own or most)[-1:] * missing
        return theirs(*call.args, **call.kwargs)[: len(own)]

    _generate_completions.of_trl = theirs  # type: ignore[attr-defined]
    home._generate_completions = _generate_completions


def stream_into_engines() -> None:
    """Make TRL hand to vLLM, in its own processes or a server, what `stream_weights` gives.

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
