"""Options of an Accelerator that are not part of its configuration: the project directory and Accelerate's handlers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import AutocastKwargs
from accelerate.utils import ProjectConfiguration as Theirs

from fullshard.api.refused import HANDLERS
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_name


@dataclass
class ProjectConfiguration(Theirs):  # type: ignore[misc]
    """Extends Accelerate's class, which sets where `save_state` writes, with asynchronous saving.

    Attributes:
        project_dir: base directory.
        logging_dir: directory that scripts read; defaults to the base directory.
        automatic_checkpoint_naming: number checkpoints under `project_dir/checkpoints`.
        total_limit: number of checkpoints to keep. The oldest is removed after the new one is complete.
        iteration: number of the next checkpoint.
        save_on_each_node: must not be true, because all hosts share the checkpoint's storage.
        async_save: whether training continues while a checkpoint is written. Accelerate does not have this field.
    """

    async_save: bool = False

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            if getattr(self, name) is not None:
                setattr(self, name, local_name(getattr(self, name)))
        self.set_directories(self.project_dir)


_KINDS = ("GradScaler", "Autocast", "InitProcessGroup", "DistributedDataParallel", "Profile", "AORecipe")
_HANDLED = {f"{kind}Kwargs" for kind in _KINDS}


def handlers_by_name(handlers: list[Any] | None) -> dict[str, Any]:
    """Return an Accelerator's `kwargs_handlers`, keyed by class name. The result always has an autocast handler."""
    if not isinstance(handlers, Iterable | None):
        raise ConfigError(
            f"kwargs_handlers: expected a list of handlers, got {type(handlers).__name__}", hint="put it in a list"
        )
    named = [(type(handler).__name__, handler) for handler in handlers or ()]
    given = dict(named)
    if len(given) != len(named):
        raise ConfigError(f"kwargs_handlers has two handlers of the same kind: {', '.join(name for name, _ in named)}")
    for name in given.keys() - _HANDLED:
        raise ConfigError(
            f"the kwargs handler {name} is not supported",
            hint=HANDLERS.get(name, "use GradScalerKwargs, AutocastKwargs and InitProcessGroupKwargs"),
        )
    if (ddp := given.get("DistributedDataParallelKwargs")) is not None:
        _check_no_hook(ddp)
    if (group := given.get("InitProcessGroupKwargs")) is not None:
        _check_process_group(group)
    return {"AutocastKwargs": AutocastKwargs(), **given}


def _check_process_group(handler: Any) -> None:
    if handler.init_method not in (None, "env://"):
        raise ConfigError(
            f"InitProcessGroupKwargs.init_method = {handler.init_method!r} is not supported",
            hint="leave it unset to use the launcher's variables, or create the process group before the Accelerator",
        )
    if handler.backend not in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
        raise ConfigError(
            f"InitProcessGroupKwargs.backend = {handler.backend!r} is not supported",
            hint="leave it unset (nccl on CUDA, gloo on a CPU), or create the process group before the Accelerator",
        )


def _check_no_hook(handler: Any) -> None:
    hooks = [getattr(handler, name, None) for name in ("comm_hook", "comm_wrapper")]
    if any(str(getattr(hook, "value", hook)) not in ("None", "no") for hook in hooks):
        raise ConfigError(
            "DistributedDataParallelKwargs.comm_hook is not supported, because DDP does not reduce the gradients",
            hint="set precision.reduce_as = bfloat16 in the launcher's configuration to send rounded gradients",
        )
