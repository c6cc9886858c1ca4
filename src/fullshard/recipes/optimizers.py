"""The optimizers of hidden matrices that `train --optimizer` and `sft --optim` name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.optim import SOAP, MatrixRule, Muon, Shampoo
from fullshard.optim.with_adamw import MatricesWithAdamW

_CLASSES: dict[str, tuple[type[MatricesWithAdamW], dict[str, Any]]] = {
    "muon": (Muon, {"adjust_lr_fn": "match_rms_adamw"}),  # with which a learning rate of AdamW fits
    "soap": (SOAP, {}),
    "shampoo": (Shampoo, {}),
}


def matrix_optimizer(name: str, model: nn.Module, say: Callable[[str], None], **options: Any) -> MatricesWithAdamW:
    """Return a matrix optimizer for a model; say in a line what it updates. Norms and biases are not decayed."""
    cls, own = _CLASSES[name]
    rule = MatrixRule.of(model, cls.__name__)
    say(f"optimizer: {rule}")
    return cls(rule.groups(decays_vectors=False), **own, **options)
