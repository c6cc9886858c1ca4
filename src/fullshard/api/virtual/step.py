"""Runs steps of a sharded model on the virtual device, and returns the times of the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.api import torch_private
from fullshard.api.virtual.clock import DEVICE
from fullshard.api.virtual.device import VirtualDevice
from fullshard.api.virtual.timeline import Slice, Timeline, joined, length
from fullshard.core.errors import ConfigError, FullshardError

STEPS = 2
"""The first makes the optimizer's state and learns the order of units; the second is like all that follow."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Token ids of one micro-batch, and how often it comes in a step."""

    sequences: int
    tokens: int
    accumulation: int = 1

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Run a forward of a causal language model and return its loss.

        Raises:
            ConfigError: the model does not run on this device.
        """
        ids = torch.zeros(self.sequences, self.tokens, dtype=torch.long, device="meta")
        places = torch.arange(self.tokens, device="meta")[None]
        try:
            logits = model(input_ids=ids, position_ids=places).logits
        except FullshardError:
            raise
        except Exception as error:  # of a model's own code, or of a kernel that knows no such dtype
            raise ConfigError(
                f"the forward of {type(model).__name__} does not run in virtual time: {error}",
                hint="ask fullshard plan, which runs nothing",
            ) from error
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def last_step(device: VirtualDevice, model: nn.Module, optimizer: torch.optim.Optimizer, batch: TokenBatch) -> Timeline:
    """Train for `STEPS` steps, each of which begins when the one before is over, as if the loss were read."""
    for step in range(STEPS):
        if step == STEPS - 1:
            device.begin_record()
        for _ in range(batch.accumulation):
            with device.at("forward"):
                loss = batch.loss(model)
            with device.at("backward"):
                loss.backward()
            del loss
        with device.at("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        launched = device.clock.host
        blocked = device.clock.blocked
        device.clock.block_all()
    return _timeline(device, launched, blocked)


def _timeline(device: VirtualDevice, launched: float, blocked: float) -> Timeline:
    begin = device.begin
    clock, memory = device.clock, device.memory
    slices = [
        Slice(s.name, t.name, t.phase, t.resource, t.launched - begin.time, t.start - begin.time, t.end - begin.time)
        for s in clock.streams
        for t in s.tasks
        if t.resource and t.launched >= begin.time
    ]
    kernels = joined((s.start, s.end) for s in slices if s.resource == DEVICE)
    sent = joined((s.start, s.end) for s in slices if s.resource != DEVICE)
    return Timeline(
        seconds=clock.host - begin.time,
        compute=length(kernels),
        communication=length(sent),
        exposed=length(joined([*kernels, *sent])) - length(kernels),
        host=launched - begin.time - (blocked - begin.blocked),
        blocked=blocked - begin.blocked,
        launches=device.launches - begin.launches,
        collectives=device.collectives - begin.collectives,
        peak_allocated=memory.peak_allocated,
        peak_reserved=memory.peak_reserved,
        state=begin.allocated,
        capacity=int(memory.capacity),
        slices=slices,
        memory=[(moment - begin.time, nbytes) for moment, nbytes in device.curve],
    )


@contextlib.contextmanager
def fused_optimizers() -> Iterator[None]:
    """Let torch's optimizers be fused on the meta device within the block, as on the device it stands for."""
    place = torch_private.fused_devices
    setattr(place.owner, place.name, lambda: [*place.torchs(), "meta"])
    try:
        yield
    finally:
        setattr(place.owner, place.name, place.torchs)


@contextlib.contextmanager
def fused_dropout() -> Iterator[None]:
    """Run dropout as one kernel with a mask of bytes, as accelerators do; on the meta device torch has three."""
    torchs = nn.functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p and not inplace else torchs(input, p, training)

    nn.functional.dropout = dropout
    try:
        yield
    finally:
        nn.functional.dropout = torchs
