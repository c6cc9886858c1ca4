"""Transformers' `Trainer` and TRL's `SFTTrainer` on fullshard's engine.

    from fullshard.integrations.transformers import Trainer, TrainingArguments        instead of transformers'
    from fullshard.integrations.transformers import SFTTrainer                        instead of trl's

They are the real classes with `ShardedTraining` in front. A script that imports from `transformers` and `trl` gets the
same without a change under `fullshard launch`, which calls `install()` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullshard.integrations.transformers.install import install

if TYPE_CHECKING:
    from fullshard.integrations.transformers.classes import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        SFTConfig,
        SFTTrainer,
        Trainer,
        TrainingArguments,
    )

__all__ = [
    "SFTConfig",
    "SFTTrainer",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "install",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fullshard.integrations.transformers import classes

    value = getattr(classes, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
