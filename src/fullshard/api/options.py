"""The options of an Accelerator besides its configuration: the project's place, and Accelerate's handlers."""

from __future__ import annotations

import dataclasses
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
    """The place that `save_state` writes to: Accelerate's, and whether training goes on while it writes.

    Attributes:
        project_dir: base directory.
        logging_dir: kept for scripts that read it; the base directory by default.
        automatic_checkpoint_naming: number checkpoints under `project_dir/checkpoints`.
        total_limit: checkpoints to keep; the oldest goes after the new one is complete.
        iteration: number of the next checkpoint.
        save_on_each_node: must not be true: a checkpoint lives in storage that all hosts share.
        async_save: training goes on while `save_state` writes; not in Accelerate.
    """

    async_save: bool = False

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            if getattr(self, name) is not None:
                setattr(self, name, local_name(getattr(self, name)))
        self.set_directories(self.project_dir)


@dataclass(frozen=True, slots=True)
class Handlers:
    """The `kwargs_handlers` of an Accelerator, by the names of their classes, and what they come to.

    Attributes:
        scaler: arguments for the loss scaler.
        autocast: whether the model and `autocast()` use autocast, and its weight cache.
        timeout_seconds: of the process group; None: the default.
    """

    given: dict[str, Any]
    scaler: dict[str, Any]
    autocast: Any
    timeout_seconds: float | None

    @classmethod
    def of(cls, handlers: list[Any] | None) -> Handlers:
        """Sort handlers by the name of their class."""
        if not isinstance(handlers, Iterable | None):
            raise ConfigError(
                f"kwargs_handlers: expected a list of handlers, got {type(handlers).__name__}",
                hint="put it into a list",
            )
        named = [(type(handler).__name__, handler) for handler in handlers or ()]
        given = dict(named)
        if len(given) != len(named):
            raise ConfigError(f"kwargs_handlers has two of one kind: {', '.join(name for name, _ in named)}")
        for name in given:
            if name not in (*_READ, "ProfileKwargs"):
                raise ConfigError(
                    f"kwargs handler {name} has no meaning here",
                    hint=HANDLERS.get(name, "GradScalerKwargs, AutocastKwargs and InitProcessGroupKwargs are used"),
                )
        scaler, autocast, group, ddp = map(given.get, _READ)
        if ddp is not None:
            _check_no_hook(ddp)
        if group is not None:
            _check_process_group(group)
        timeout = None if group is None or group.timeout is None else group.timeout.total_seconds()
        return cls(given, {} if scaler is None else dataclasses.asdict(scaler), autocast or AutocastKwargs(), timeout)


_READ = ("GradScalerKwargs", "AutocastKwargs", "InitProcessGroupKwargs", "DistributedDataParallelKwargs")


def _check_process_group(handler: Any) -> None:
    if handler.init_method not in (None, "env://"):
        raise ConfigError(
            f"InitProcessGroupKwargs.init_method = {handler.init_method!r} is not supported",
            hint="ranks meet where the launcher's variables say; or make the process group before the Accelerator",
        )
    if handler.backend not in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
        raise ConfigError(
            f"InitProcessGroupKwargs.backend = {handler.backend!r} is not supported",
            hint="CUDA gets nccl and a CPU gloo; or make the process group before the Accelerator",
        )


def _check_no_hook(handler: Any) -> None:
    hooks = [getattr(handler, name, None) for name in ("comm_hook", "comm_wrapper")]
    if any(str(getattr(hook, "value", hook)) not in ("None", "no") for hook in hooks):
        raise ConfigError(
            "DistributedDataParallelKwargs.comm_hook: gradients are not reduced by DDP",
            hint="precision.reduce_as = bfloat16 in the launcher's configuration rounds what is sent",
        )
