"""Give an optimizer that was made of a model's original parameters the sharded ones in their place."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.core.errors import OptimizerError
from fullshard.engine.lookup import units_of
from fullshard.engine.parameter import sharded_parameter_of
from fullshard.engine.step.hooks import check_optimizer
from fullshard.features.optimizer_state.state_dict import cut_state


def repoint(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Replace original parameters by the sharded ones that stand for them, in place, group by group.

    Hyper-parameters and the order of groups stay. Optimizer state is cut to this rank's interval.

    Args:
        optimizer: made before the model was sharded; others are left as they are.
        model: the model, to check that the optimizer holds something of it.

    Raises:
        OptimizerError: as `check_optimizer`; or nothing in the optimizer belongs to `model`.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            sharded = sharded_parameter_of(parameter)
            if sharded is None or sharded is parameter:
                continue
            group["params"][index] = sharded
            if parameter in optimizer.state:
                optimizer.state[sharded] = cut_state(optimizer.state.pop(parameter), sharded, optimizer=optimizer)
    check_optimizer(optimizer)
    if model is not None:
        own = {id(p) for unit in units_of(model) for bucket in unit.buckets for p in bucket.sharded_parameters}
        own |= {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds no parameter of {type(model).__name__}",
                hint="make the optimizer from this model's parameters",
            )
