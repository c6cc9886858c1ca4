"""Transformers' `Trainer` and TRL's trainers, adapted to fullshard's engine.

These are subclasses of the original classes with the mixin `ShardedTraining`. `sharded(cls)` makes one from any class
derived from a Trainer. Under `fullshard launch`, a script that imports the classes from `transformers` and `trl` gets
them without changes, because the launcher calls `install()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.core.imports import on_demand
from fullshard.integrations.transformers.install import install

if TYPE_CHECKING:
    from fullshard.integrations.transformers.classes import (
        DistillationConfig,
        DistillationTrainer,
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        SFTConfig,
        SFTTrainer,
        Trainer,
        TrainingArguments,
        sharded,
    )
    from fullshard.integrations.transformers.ema_callback import EMACallback

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "EMACallback",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "install",
    "sharded",
]

if not TYPE_CHECKING:
    _HOMES = {name: f"{__name__}.classes" for name in __all__ if name != "install"}
    __getattr__, __dir__ = on_demand(__name__, {**_HOMES, "EMACallback": f"{__name__}.ema_callback"})
