"""The optimizer of hidden matrices that `train --optimizer muon` and `sft --optim muon` name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.optim import MatrixRule, Muon


def muon(model: nn.Module, say: Callable[[str], None], **options: Any) -> Muon:
    """Return Muon for a model; say in a line what it updates. Norms and biases are not decayed."""
    rule = MatrixRule.of(model)
    say(f"optimizer: {rule}")
    # scaled so that a learning rate of AdamW fits
    return Muon(rule.groups(decays_vectors=False), adjust_lr_fn="match_rms_adamw", **options)
