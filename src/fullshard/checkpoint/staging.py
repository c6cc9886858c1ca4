"""Host memory that a state is copied into before it is written in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fullshard.core.errors import CheckpointError
from fullshard.features.steps_in_backward.stepper import steps_in_backward

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""
_SPARE_NBYTES = 2**20
"""Bytes of a reserved block for sizes unknown in advance: states of generators, tensors in a script's state."""

Named = Mapping[str, torch.Tensor]


class HostMemory:
    """Copies of tensors in one block per state, which is kept: the pages of a new one cost more than the copy."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._used: list[torch.Tensor] = []
        self._late: list[LateCopies] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: this rank's share of what was saved."""
        return sum(block.numel() for block in (*self._free, *self._used))

    def reuse(self) -> None:
        """Declare all copies unused."""
        self._free += self._used
        self._used.clear()
        while self._late:
            self._late.pop().release()

    def reserve(self, states: Iterable[Iterable[torch.Tensor]]) -> None:
        """Take a block for each state now, and touch its pages. May run in another thread while training goes on."""
        for tensors in map(list, states):
            pinned = any(map(_is_remote, tensors))
            nbytes = sum(_aligned(tensor.nbytes) for tensor in tensors) + _SPARE_NBYTES
            self._free.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(0))

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Named]) -> dict[str, dict[str, torch.Tensor]]:
        """Copy the tensors, by kind of file and name, into one contiguous block of their own."""
        is_remote = any(_is_remote(tensor) for named in tensors.values() for tensor in named.values())
        copies = self._room_for(tensors, pinned=is_remote)
        for kind, named in tensors.items():
            for name, tensor in named.items():
                copies[kind][name].copy_(tensor, non_blocking=True)
        if is_remote:
            torch.accelerator.synchronize()
        return copies

    def copy_before_step(self, state: Named, optimizer: torch.optim.Optimizer) -> LateCopies | None:
        """Return copies of an optimizer's state that are made meanwhile, at the latest when its next step begins.

        Returns:
            None if that cannot be: the state lies on an accelerator, whose own queue orders copies and steps, or the
            optimizer's class does not announce its steps.
        """
        if not is_copied_late(state.values(), optimizer):
            return None
        late = LateCopies(self._room_for({"state": state}, pinned=False)["state"], state, optimizer)
        self._late.append(late)
        return late

    def _room_for(self, tensors: Mapping[str, Named], *, pinned: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors like these in the next block, not filled."""
        nbytes = sum(_aligned(tensor.nbytes) for named in tensors.values() for tensor in named.values())
        block = self._take(nbytes, pinned=pinned)
        room: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in tensors}
        at = 0
        for kind, named in tensors.items():
            for name, tensor in named.items():
                room[kind][name] = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += _aligned(tensor.nbytes)
        return room

    def _take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        fitting = [block for block in self._free if block.numel() >= nbytes and block.is_pinned() == pinned]
        if fitting:
            block = min(fitting, key=torch.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            # Let go of the one that has become too small, so that never both are held.
            small = max((block for block in self._free if block.numel() < nbytes), key=torch.numel, default=None)
            self._free = [other for other in self._free if other is not small]
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used.append(block)
        return block


def is_copied_late(state: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state of `optimizer` is copied by `copy_before_step`."""
    announces_steps = getattr(type(optimizer).step, "hooked", False)  # set by torch.optim.Optimizer
    return announces_steps and not steps_in_backward(optimizer) and not any(map(_is_remote, state))


class LateCopies:
    """Copies of an optimizer's state that are made while training goes on.

    Only a step changes that state. So the thread that writes makes the copies, and a step that comes before they are
    all made helps, and waits for the rest. (Weights are not treated so: scripts change them outside of steps, too.)
    """

    def __init__(self, copies: Named, sources: Named, optimizer: torch.optim.Optimizer) -> None:
        self._copies = copies
        self._pending = deque((name, copies[name], source, source._version) for name, source in sources.items())
        self._left = len(self._pending)
        self._changed: list[str] = []
        self._progress = threading.Condition()
        self._hook: Any = optimizer.register_step_pre_hook(lambda *_: self._make())

    def finish(self) -> Named:
        """Wait for the copies to be made, and return them.

        Raises:
            CheckpointError: something but a step changed the state before it was copied.
        """
        self._make()
        if self._changed:
            raise CheckpointError(
                f"optimizer state {self._changed[0]} ({len(self._changed)} in all) was changed, not by a step, while a "
                "checkpoint was being saved",
                hint="wait for the save (AsyncSaver.wait) before changing or loading optimizer state",
            )
        return self._copies

    def release(self) -> None:
        """Let go of the optimizer. For the thread that trains: no step may be under way."""
        self._hook.remove()
        self._pending.clear()

    @torch.no_grad()
    def _make(self) -> None:
        while True:
            try:
                name, copy, source, version = self._pending.popleft()
            except IndexError:
                break
            copy.copy_(source)
            with self._progress:
                if source._version != version:
                    self._changed.append(name)
                self._left -= 1
                self._progress.notify_all()
        with self._progress:
            self._progress.wait_for(lambda: self._left == 0)


def _is_remote(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
