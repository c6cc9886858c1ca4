"""Refuse DistributedDataParallel and DataParallel around units: they would replicate this rank's intervals."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.core.errors import LifecycleError
from fullshard.core.user_class import user_class
from fullshard.engine.module import FSDPModule
from fullshard.engine.sharded_tensor import ShardedTensor


def replicated(module: object, wrapper: str) -> LifecycleError:
    """Return the error for a wrapper around a module that is or holds a unit."""
    return LifecycleError(
        f"{wrapper} around a sharded {user_class(module).__name__} would make replicas of this rank's intervals",
        hint="leave it out: the units reduce gradients over all ranks themselves",
    )


@functools.cache
def check_data_parallel() -> None:
    """Have DistributedDataParallel refuse sharded parameters, unless it is told to ignore them."""
    init: Any = DistributedDataParallel.__init__

    @functools.wraps(init)
    def checked(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for path, inner in module.named_modules():
            if isinstance(inner, FSDPModule):
                own = inner.named_parameters(path)
                if not all(name in ignored for name, parameter in own if isinstance(parameter, ShardedTensor)):
                    raise replicated(inner, "DistributedDataParallel")
        init(self, module, *args, **options)

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]
