"""Models that a trainer of TRL's only asks: the policy's reference, teachers, reward models."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from torch import nn

from fullshard.api import Accelerator
from fullshard.api.sharding import is_sharded
from fullshard.engine import unsharded


def shard_reference_models() -> None:
    """Have TRL shard such models on fullshard's engine. By itself it would use torch's, on the root alone.

    TRL's trainers and scripts hold its function under a name of their own, so it is replaced wherever it is held.
    """
    theirs = getattr(sys.modules.get("trl.models.utils"), "prepare_fsdp", None)
    if theirs is None or hasattr(theirs, "of_trl"):
        ours, theirs = theirs, getattr(theirs, "of_trl", None)
    else:
        ours = _preparing(theirs)
    if theirs is None:
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("prepare_fsdp") is theirs:
            module.prepare_fsdp = ours  # type: ignore[attr-defined]


def _preparing(theirs: Any) -> Any:
    def prepare_fsdp(model: Any, accelerator: Any) -> Any:
        if isinstance(accelerator, Accelerator):
            return accelerator.prepare_model(model, evaluation_mode=True).eval()
        return theirs(model, accelerator)

    prepare_fsdp.of_trl = theirs  # type: ignore[attr-defined]
    return prepare_fsdp


def teachers_head(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Around a step: TRL multiplies with the weight of a teacher's head itself, outside of the teacher's forward."""
    teacher = getattr(trainer, "teacher_model", None)
    if not isinstance(teacher, nn.Module) or not hasattr(trainer, "_forward_redirection") or not is_sharded(teacher):
        return contextlib.nullcontext()
    return unsharded(teacher.get_output_embeddings(), recurse=False)  # type: ignore[operator]
