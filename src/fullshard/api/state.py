"""The process's view of itself: its place in the job, in an accumulation and in an epoch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.waiting import waiting_for_all
from fullshard.config.handover import launched
from fullshard.core.errors import ConfigError
from fullshard.features.watchdog.meeting import meet
from fullshard.launch.environment import (
    RankEnvironment,
    init_process_group_from_environment,
    rank_device,
    read_rank_environment,
)


class Loader(Protocol):
    """The attributes of a data loader that the gradient state reads while it is iterated."""

    end_of_dataloader: bool

    @property
    def remainder(self) -> int | None:
        """Real samples of the current step if it was filled up, else None."""


class GradientState:
    """The place of the loop in the accumulation of gradients and in the epoch, under Accelerate's names.

    What it knows lies in the fields that Accelerate's class of this name has, so that both can share them.

    Args:
        num_steps: micro-batches per optimizer step.
        sync_with_dataloader: the last micro-batch of an epoch always ends a step.
        adjust_scheduler: kept for scripts that read it; schedulers step with the optimizer, whatever it says.
        sync_each_batch: no choice: every micro-batch is reduced into the sharded gradient.

    Raises:
        ConfigError: `num_steps` below 1.

    Attributes:
        plugin_kwargs: the arguments.
        sync_gradients: whether the current micro-batch ends a step.
        step: micro-batches since the last step that ended an epoch.
        updates: how often an optimizer was to step.
        has_optimizer: whether one was prepared, in this run.
    """

    updates, has_optimizer = 0, False  # of the class, for fields that Accelerate's has made lack them
    initialized = True
    is_xla_gradients_synced = True  # every backward leaves reduced gradients

    def __init__(
        self,
        num_steps: int = 1,
        sync_with_dataloader: bool = True,
        adjust_scheduler: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self.plugin_kwargs: dict[str, Any] = {
            "adjust_scheduler": adjust_scheduler,
            "sync_with_dataloader": sync_with_dataloader,
            "sync_each_batch": sync_each_batch,
        }
        self.num_steps = num_steps
        self.sync_gradients = True
        self.step = 0
        self._dataloader_references_ref: list[weakref.ref[Loader] | None] = [None]
        self._is_xla_gradients_synced = False

    def __getstate__(self) -> dict[str, Any]:
        # No loop goes along with a copy.
        return {**vars(self), "_dataloader_references_ref": [None]}

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return int(self.plugin_kwargs["num_steps"])

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"gradient_accumulation_steps must be at least 1, got {steps}")
        self.plugin_kwargs["num_steps"] = steps

    @property
    def sync_with_dataloader(self) -> bool:
        """Return whether the last micro-batch of an epoch always ends a step."""
        return bool(self.plugin_kwargs["sync_with_dataloader"])

    @property
    def adjust_scheduler(self) -> bool:
        """Return whether schedulers count micro-batches that do not end a step."""
        return bool(self.plugin_kwargs["adjust_scheduler"])

    @property
    def dataloader_references(self) -> list[Loader | None]:
        """None, then the loaders being iterated, outermost first."""
        return [None, *(loader for held in self._dataloader_references_ref if held and (loader := held()) is not None)]

    @property
    def active_dataloader(self) -> Loader | None:
        """The loader of the innermost loop."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Return whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the innermost loop is at its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the innermost loop's current step if it was filled up, else -1."""
        loader = self.active_dataloader
        return -1 if loader is None or loader.remainder is None else loader.remainder

    def join(self, earlier: GradientState) -> None:
        """Share the state of an earlier Accelerator: both see every loop and every step, counted as this one says."""
        fields = vars(earlier)
        fields["plugin_kwargs"] = self.plugin_kwargs
        if not earlier.in_dataloader:  # the loop of an earlier run is over
            fields.update(step=self.step, sync_gradients=self.sync_gradients, has_optimizer=False)
        self.__dict__ = fields

    def begin_micro_batch(self) -> None:
        """Count a micro-batch and decide whether it ends a step."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def enter_loader(self, loader: Loader) -> list[weakref.ref[Loader] | None]:
        """Note that iteration of a loader begins. Returns the loops before it, for `resume_loops`."""
        before = self._dataloader_references_ref
        self.leave_loader(loader)
        self._dataloader_references_ref.append(weakref.ref(loader))
        return before

    def leave_loader(self, loader: Loader) -> None:
        """Note that iteration of a loader ended, or was broken off."""
        self._dataloader_references_ref = [
            held for held in self._dataloader_references_ref if held is None or held() not in (None, loader)
        ]

    def resume_loops(self, before: list[weakref.ref[Loader] | None], loader: Loader) -> None:
        """Resume the loops `before` a look at `loader` within a loop over it; leave out those that are over."""
        self.leave_loader(loader)
        left = self._dataloader_references_ref
        self._dataloader_references_ref = [
            *(held for held in before if held in left or (held is not None and held() is loader)),
            *(held for held in left if held not in before),
        ]


def launched_device() -> str:
    """Return the kind of device that fullshard's or Accelerate's launcher says, `auto` if neither does.

    Of the rest nothing is judged: a process that shards no model may have been told what is refused.
    """
    setting = launched().setting("launch.device")
    return "auto" if setting is None else str(setting.value)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process's place in the job.

    Attributes:
        environment: rank and world size, over all hosts and on this one.
        device: where this rank computes.
    """

    environment: RankEnvironment
    device: torch.device

    @classmethod
    def start(cls, *, device: str = "auto", timeout_seconds: float | None = None) -> ProcessState:
        """Join the job: take a device and, if a launcher started this process, the process group.

        Args:
            device: `auto`, `cpu` or `cuda`.
            timeout_seconds: how long a rank waits for the others; see `init_process_group_from_environment`.
        """
        environment = read_rank_environment()
        if not environment.launched and dist.is_initialized():
            # The script made its own process group without setting the variables (mp.spawn with an init_method).
            rank, size = dist.get_rank(), dist.get_world_size()
            environment = RankEnvironment(rank, size, rank, size, launched=True)
        place = rank_device(environment, device)
        init_process_group_from_environment(place, timeout_seconds=timeout_seconds)
        return cls(environment, place)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None  # noqa: S101 -- it is initialised
            meet(dist.group.WORLD, self.device, "the end of a barrier")
            with waiting_for_all("the end of a barrier"):
                dist.barrier()
