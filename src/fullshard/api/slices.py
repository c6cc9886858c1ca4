"""The slices of a step's batch that this rank runs, where training is deterministic across world sizes.

What is the same at any number of ranks is told in `core.virtual_ranks`; here is which slice a micro-batch is, and which
random numbers it draws: those of (seed, step, slice), wherever it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullshard.api.collectives import all_gather_object, broadcast_object
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.core.virtual_ranks import rounds_of
from fullshard.launch.environment import RankEnvironment


class Slices:
    """Counts steps and rounds. Making it is a collective, and fixes the number of threads that kernels use.

    Args:
        virtual_ranks: slices of a step.
        environment: this process's place in the job.
        device: where it computes.
        threads: of each process; kernels add up in another order with others.

    Attributes:
        count: slices of a step.
        rounds: of a step: slices that this rank runs.
        step: steps so far, those before a resume included.
        current: the slice that is being run; None outside of all.

    Raises:
        ConfigError: the ranks do not divide the slices, or have other processors or versions than one another.
    """

    def __init__(self, virtual_ranks: int, environment: RankEnvironment, device: torch.device, *, threads: int) -> None:
        self.count, self.rounds = virtual_ranks, rounds_of(virtual_ranks, environment.world_size)
        self.step = 0
        self.current: int | None = None
        self._round = 0
        self._has_backward = False
        self._seed: int | None = None
        self._environment = environment
        if device.type != "cpu":
            raise ConfigError(
                f"deterministic = across_world_sizes on {device.type}: its kernels add up in orders of their own",
                hint="use CPUs (cpu=True, --device cpu), or leave deterministic out",
            )
        torch.set_num_threads(threads)
        self._kernels = {
            "torch": str(torch.__version__),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
        if environment.world_size > 1:
            for rank, theirs in enumerate(all_gather_object(self._kernels)):
                if theirs != self._kernels:
                    raise ConfigError(
                        f"deterministic = across_world_sizes: rank {environment.rank} computes with {self._kernels}, "
                        f"rank {rank} with {theirs}: bits would depend on who computes what",
                        hint="use hosts of one kind with the same versions",
                    )

    def __str__(self) -> str:
        threads, size = self._kernels["threads"], self._environment.world_size
        return (
            f"deterministic across world sizes: {self.count} virtual ranks, {self.rounds} on each of {size} "
            f"rank{'s' * (size != 1)}, with {threads} thread{'s' * (threads != 1)}"
        )

    @property
    def is_last(self) -> bool:
        """Return whether this rank's last slice of a step is being run, or comes next."""
        return self._round == self.rounds - 1

    def of_rank(self) -> list[int]:
        """Return this rank's slices, round by round."""
        return [self._slice(number) for number in range(self.rounds)]

    def _slice(self, number: int) -> int:
        return number * self._environment.world_size + self._environment.rank

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the next slice: random numbers are its own inside, and those of the script again afterwards.

        Raises:
            LifecycleError: it had no backward.
        """
        if self._seed is None:
            self._seed = broadcast_object(torch.initial_seed())
        self.current, self._has_backward = self._slice(self._round), False
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed_of(self._seed, self.step, self.current))
        try:
            yield
        finally:
            self.current = None
            torch.set_rng_state(before)
        if not self._has_backward:
            raise LifecycleError(
                f"step {self.step + 1}, slice {self._slice(self._round)}: no accelerator.backward within accumulate()",
                hint="deterministic = across_world_sizes has one for each slice, with a loss of 0 if need be",
            )
        self._round = (self._round + 1) % self.rounds
        self.step += not self._round

    def note_backward(self) -> None:
        """Note that the slice's backward begins.

        Raises:
            LifecycleError: outside of all slices, or a second one of the same.
        """
        if self.current is None or self._has_backward:
            where = "outside of accumulate()" if self.current is None else f"a second time in slice {self.current}"
            raise LifecycleError(
                f"accelerator.backward {where}: with deterministic = across_world_sizes a slice has one backward",
                hint="`with accelerator.accumulate(model):` around each batch of a prepared loader, and one loss in it",
            )
        self._has_backward = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Raises:
            LifecycleError: in the middle of a step, of which a checkpoint would lose the gradients.
        """
        if self._round:
            raise LifecycleError(
                f"a checkpoint after {self._round} of {self.rounds} slices of a step, whose gradients it would lose",
                hint="save after optimizer.step()",
            )
        return {"virtual_ranks": self.count, "step": self.step, "seed": self._seed, **self._kernels}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, at any number of ranks.

        Raises:
            CheckpointError: bits would be others: of another number of virtual ranks, or made with other kernels.
        """
        now = {"virtual_ranks": self.count, **self._kernels}
        differing = [
            f"{name.replace('_', ' ')} {None if state is None else state.get(name)}, now {value}"
            for name, value in now.items()
            if state is None or state.get(name) != value
        ]
        if state is None or differing:
            raise CheckpointError(
                "deterministic = across_world_sizes cannot go on from this checkpoint: it was saved with "
                + "; ".join(differing),
                hint="resume as it was saved, or without deterministic",
            )
        self.step, self._seed, self._round = int(state["step"]), state["seed"], 0


def seed_of(seed: int, step: int, number: int) -> int:
    """Return the seed of a slice's random numbers: a hash, so that no two slices of a run draw alike."""
    digest = hashlib.blake2b(f"{seed}/{step}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
