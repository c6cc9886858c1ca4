"""What a process knows about itself: its place in the job, and where in an accumulation and an epoch it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.launch.environment import (
    DEFAULT_TIMEOUT_SECONDS,
    RankEnvironment,
    init_process_group_from_environment,
    rank_device,
    read_rank_environment,
)


class Loader(Protocol):
    """What the gradient state asks of a data loader that is being iterated."""

    end_of_dataloader: bool
    remainder: int | None

    @property
    def total_batch_size(self) -> int:
        """Samples per step over all ranks."""


@dataclass(slots=True)
class GradientState:
    """Where the loop is in the accumulation of gradients and in the epoch.

    Attributes:
        num_steps: micro-batches per optimizer step.
        sync_with_dataloader: the last micro-batch of an epoch always ends a step.
        sync_gradients: whether the current micro-batch ends a step.
        step: micro-batches since the last step that ended an epoch.
        loaders: loaders being iterated, outermost first.
    """

    num_steps: int = 1
    sync_with_dataloader: bool = True
    sync_gradients: bool = True
    step: int = 0
    loaders: list[Loader] = field(default_factory=list)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loop is at its last batch."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    def begin_micro_batch(self) -> None:
        """Count a micro-batch and decide whether it ends a step."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def enter_loader(self, loader: Loader) -> None:
        """Iteration of a loader begins."""
        self.leave_loader(loader)
        self.loaders.append(loader)

    def leave_loader(self, loader: Loader) -> None:
        """Iteration of a loader ended, or was broken off."""
        self.loaders = [other for other in self.loaders if other is not loader]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """This process's place in the job.

    Attributes:
        environment: rank and world size, over all hosts and on this one.
        device: where this rank computes.
    """

    environment: RankEnvironment
    device: torch.device

    @classmethod
    def start(cls, *, device: str = "auto", timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> ProcessState:
        """Join the job: take a device and, if a launcher started this process, the process group.

        Args:
            device: `auto`, `cpu` or `cuda`.
            timeout_seconds: how long a collective waits for the other ranks.
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
            dist.barrier()
