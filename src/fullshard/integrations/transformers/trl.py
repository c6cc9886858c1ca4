"""Changes to TRL, which uses parameters outside the forwards of its trainers, where all ranks must gather them."""

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
    """Gather the weight of the teacher's head during a step, because TRL multiplies by it outside a forward."""
    teacher = getattr(trainer, "teacher_model", None)
    if not isinstance(teacher, nn.Module) or not hasattr(trainer, "_forward_redirection") or not is_sharded(teacher):
        return contextlib.nullcontext()
    return unsharded(teacher.get_output_embeddings(), recurse=False)  # type: ignore[operator]


def generate_in_step() -> None:
    """Make TRL's callbacks that log completions run for the same number of batches on every rank."""
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
        missing = (math.ceil(len(most) / size) - 1) * size + 1 - len(own)  # up to the first prompt of the last round
        call.arguments["prompts"] = own + (own or most)[-1:] * missing
        return theirs(*call.args, **call.kwargs)[: len(own)]

    _generate_completions.of_trl = theirs  # type: ignore[attr-defined]
    home._generate_completions = _generate_completions


def stream_into_engines() -> None:
    """Make TRL pass weights to vLLM with `stream_weights`, because merging adapters would round the weights."""
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
    """Yield a stream of weights, and end it on all ranks after the block, even if one rank raises an error."""
    try:
        yield stream
    except Exception as error:
        next(stream, None)  # a stream that has not started would not notify the other ranks
        stream.throw(error)
        raise
    finally:
        stream.close()
