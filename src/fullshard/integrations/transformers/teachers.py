"""Teachers of TRL's trainers, whose head is used apart from them."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from fullshard.api.sharding import is_sharded
from fullshard.features import unsharded


def teachers_head(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Gather a teacher's head for a step: TRL multiplies with its weight itself, outside of the teacher's forward."""
    teacher = getattr(trainer, "teacher_model", None)
    if not isinstance(teacher, nn.Module) or not hasattr(trainer, "_forward_redirection") or not is_sharded(teacher):
        return contextlib.nullcontext()
    return unsharded(teacher.get_output_embeddings(), recurse=False)  # type: ignore[operator]
