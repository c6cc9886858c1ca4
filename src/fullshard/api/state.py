"""The state of a process: its rank in the job, and its position in the gradient accumulation and in the epoch."""

import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate.state import GradientState as Theirs

from fullshard.comm.waiting import waiting_for_all
from fullshard.config.handover import launched
from fullshard.config.switches import elastic_ranks
from fullshard.core.errors import ConfigError, plural
from fullshard.features.watchdog.watchdog import meet
from fullshard.launch.environment import (
    RankEnvironment,
    init_process_group_from_environment,
    rank_device,
    read_rank_environment,
)


class GradientState(Theirs):  # type: ignore[misc]
    """Holds the position of the training loop in the gradient accumulation and in the epoch.

    This class extends Accelerate's. All instances in a process share their state.

    Attributes:
        step: number of micro-batches since the counter was last reset at the end of an epoch.
        updates: number of optimizer updates due so far.
        has_optimizer: whether an optimizer was prepared in this run.
    """

    plugin_kwargs: dict[str, Any]
    step, updates, has_optimizer = 0, 0, False  # of the class, where Accelerate has made the fields
    is_xla_gradients_synced = True  # gradients are reduced after every backward

    @property
    def num_steps(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return int(self.plugin_kwargs.get("num_steps", 1))

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"gradient_accumulation_steps must be at least 1, got {steps}")
        self.plugin_kwargs = {**self.plugin_kwargs, "num_steps": steps}

    @property
    def remainder(self) -> int:
        """Return how many samples of the innermost loop's current step are real, or -1 if none of them is repeated."""
        found = getattr(self.active_dataloader, "remainder", None)
        return -1 if found is None else int(found)

    @property
    def dataloader_references(self) -> list[Any]:
        """Return a list of None and the loaders that are being iterated, from the outermost to the innermost."""
        return [None, *(loader for held in self._dataloader_references_ref if held and (loader := held()) is not None)]

    @dataloader_references.setter
    def dataloader_references(self, loaders: list[Any]) -> None:
        self._dataloader_references_ref = [None if loader is None else weakref.ref(loader) for loader in loaders]

    def _remove_dataloader(self, dataloader: Any) -> None:
        loaders = self.dataloader_references
        # Of nested loops, remove the inner one.
        if places := [place for place, each in enumerate(loaders) if each is dataloader]:
            del loaders[places[-1]]
            self.dataloader_references = loaders

    def __reduce__(self) -> Any:
        return type(self), ()  # the place is the process's

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def begin_run(self) -> None:
        """Reset the position that an earlier Accelerator's loop has left, unless a loop is still running."""
        if not self.in_dataloader:
            self.step, self.sync_gradients, self.has_optimizer = 0, True, False

    def begin_micro_batch(self) -> None:
        """Count a micro-batch and decide whether it ends a step."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0


def launched_device() -> str:
    """Return the device type that a launcher set, or `auto`. Other settings of the launcher are not validated."""
    setting = launched().setting("launch.device")
    return "auto" if setting is None else str(setting.value)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Holds the rank information and the device of a process."""

    environment: RankEnvironment
    device: torch.device

    @classmethod
    def start(cls, *, device: str = "auto", timeout_seconds: float | None = None) -> Self:
        """Join the job: select a device and, if a launcher started this process, create the process group."""
        environment = read_rank_environment()
        if not environment.launched and dist.is_initialized():
            # The script made its own process group without setting the variables (mp.spawn with an init_method).
            rank, size = dist.get_rank(), dist.get_world_size()
            environment = RankEnvironment(rank, size, rank, size, launched=True)
        place = rank_device(environment, device)
        init_process_group_from_environment(place, timeout_seconds=timeout_seconds)
        return cls(environment, place)

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None  # noqa: S101 -- it is initialized
            meet(dist.group.WORLD, self.device, "the end of a barrier")
            with waiting_for_all("the end of a barrier"):
                dist.barrier()


def accumulation_steps(steps: int, environment: RankEnvironment) -> int:
    """Return the micro-batches per step that match the global batch of `steps` on the maximum number of ranks."""
    span = elastic_ranks()
    if span is None:
        return steps
    least, most = span
    allowed = range(least, most + 1, environment.local_world_size)
    for ranks in allowed:
        if steps * most % ranks:
            fewest = next(n for n in range(1, 10**6) if not any(n * most % each for each in allowed))
            raise ConfigError(
                f"gradient_accumulation_steps = {steps} on {plural(most, 'rank')} makes a batch of {steps * most} "
                f"micro-batches, which cannot be divided evenly among {ranks} ranks",
                hint=f"use a multiple of {fewest}, or a different number of hosts",
            )
    return steps * most // environment.world_size
