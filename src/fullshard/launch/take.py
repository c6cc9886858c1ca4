"""Give a program this package's `fully_shard` under the names that it imports from torch, if the user asks for it.

`fullshard launch --take fully_shard` and `python -m fullshard.take` do so before the first line of the program.
"""

import contextlib
import os
from importlib import import_module

from fullshard.config.switches import TAKE
from fullshard.core.errors import ConfigError, tell
from fullshard.launch import torch_private

HOME = "torch.distributed.fsdp"
NAMES = (
    *("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
)
"""The names that are replaced. `DataParallelMeshDims` is torch's class here, too."""


def take() -> None:
    """Replace the names in torch's modules if the environment asks for it, and say so on rank 0.

    Modules that import the names later get this package's objects. Nothing else in torch changes.

    Raises:
        ConfigError: The variable has an unknown value, or torch lacks one of the names.
    """
    if TAKE.read() != "fully_shard":
        return
    from fullshard import features

    for user in torch_private.USERS_OF_FULLY_SHARD:  # these need the engine that they were written for
        with contextlib.suppress(ModuleNotFoundError):
            import_module(user)
    home = import_module(HOME)
    if missing := [name for name in NAMES if not hasattr(home, name)]:
        raise ConfigError(
            f"{HOME} of torch {import_module('torch').__version__} has no {', '.join(missing)}, so --take cannot "
            "replace it",
            hint="use a version of torch that docs/compatibility.md lists, or run the program without --take",
        )
    theirs = {name: getattr(home, name) for name in NAMES}
    for place in (HOME, *torch_private.HOMES_OF_FULLY_SHARD):
        with contextlib.suppress(ModuleNotFoundError):  # what torch has moved, the program cannot import either
            module = import_module(place)
            for name, original in theirs.items():
                if getattr(module, name, None) is original:
                    setattr(module, name, getattr(features, name))
    if os.environ.get("RANK", "0") == "0":
        tell(f"fullshard: in this program, these names of {HOME} are fullshard's: {', '.join(NAMES)}")
