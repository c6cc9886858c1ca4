"""Methods of a sharded model that report gradients which are not finite."""

from __future__ import annotations

from typing import cast

from torch import nn

from fullshard.engine.lookup import require_unit
from fullshard.features.nonfinite.guard import NonFiniteGuard


class NonFiniteMethods:
    """Methods of `FSDPModule`."""

    def set_nonfinite_gradients(self, policy: str, *, limit: int = 10) -> None:
        """Set the treatment of a step whose gradients hold NaN or infinity on any rank; for the whole model.

        Args:
            policy: `raise`: a `NonFiniteError` on all ranks, before anything is changed. `skip`: all ranks leave the
                step out and drop the optimizer's gradients. `off`: gradients are not checked.
            limit: how many steps in a row may be left out; one more is the error.

        Raises:
            ConfigError: there is no such policy, or the limit is less than 1.
        """
        NonFiniteGuard.of(require_unit(cast("nn.Module", self)).schedule).choose(policy, limit)
