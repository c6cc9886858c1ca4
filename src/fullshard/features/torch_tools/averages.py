"""diffusers' average of the weights (`EMAModel`), made before its model was sharded.

It holds copies of whole parameters then, the same on every rank. At its first use with the sharded ones each rank
keeps its intervals of the copies, as `fullshard.EMA` does, and those of anything loaded into it later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor

MODULE = "diffusers.training_utils"


def shard_averages(module: ModuleType) -> None:
    """Put ours around the methods of `EMAModel` that compute with its copies and with parameters."""
    kind = module.EMAModel
    kind.step, kind.copy_to = _with_own_parts(kind.step), _with_own_parts(kind.copy_to)
    kind.save_pretrained = _with_wholes(kind.save_pretrained)


def _with_own_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(ema: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        pairs = zip(ema.shadow_params, parameters, strict=False)  # as it takes them itself
        ema.shadow_params[: len(parameters)] = [_own_part(copy, parameter) for copy, parameter in pairs]
        return method(ema, parameters, *args, **options)

    return call


@torch.no_grad()
def _own_part(copy: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(copy, DTensor) or not isinstance(parameter, ShardedParameter) or copy.shape != parameter.shape:
        return copy
    return ShardedTensor(parameter.spec.cut(copy).clone(), parameter.spec)


def _with_wholes(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `save_pretrained`, which scripts call on the main process alone, so that nothing can be gathered."""

    @functools.wraps(save)
    def save_pretrained(ema: Any, *args: Any, **options: Any) -> Any:
        own = ema.shadow_params
        if any(isinstance(copy, ShardedTensor) and not copy.spec.is_whole for copy in own):
            raise LifecycleError(
                "EMAModel.save_pretrained, and each rank has a part of the averages",
                hint="on every rank: ema.store(model.parameters()); ema.copy_to(model.parameters()); unwrapped.save_"
                "pretrained(path, is_main_process=accelerator.is_main_process); ema.restore(model.parameters())",
            )
        ema.shadow_params = [copy.full_tensor() if isinstance(copy, ShardedTensor) else copy for copy in own]
        try:
            return save(ema, *args, **options)
        finally:
            ema.shadow_params = own

    return save_pretrained
