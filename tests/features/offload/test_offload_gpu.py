"""Shards on the host beside an accelerator: page-locked, copied on streams, and the same training.

make test-gpu ARGS=test_offload_gpu.py         # needs an accelerator; memory is in test_plan_gpu.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.config.switches import OFFLOAD
from fullshard.features import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    shard_model,
    units_of,
)
from fullshard.features.offload import ActivationOffload

WIDTH = 1024

POLICIES = {
    "everything": CPUOffloadPolicy(),
    "not pinned": CPUOffloadPolicy(pin_memory=False),
    "main weights": OffloadPolicy(main_weights=True),
    "optimizer state": OffloadPolicy(optimizer_state=True),
    "frozen": OffloadPolicy(compute_shards=True),
    "activations": OffloadPolicy(activations=True),
    "everything and activations": OffloadPolicy(compute_shards=True, main_weights=True, activations=True),
    "activations, not pinned": OffloadPolicy(activations=True, pin_memory=False),
}


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    if found is None:
        pytest.fail("no accelerator: these tests are for machines that have one")
    return torch.device(found.type, torch.accelerator.current_device_index())


def made(policy: OffloadPolicy | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    model[2].requires_grad_(False)
    return shard_model(
        model,
        unit_modules=list(model),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=policy,
        device=device(),
    )


def trained(policy: OffloadPolicy | None) -> list[torch.Tensor]:
    """Losses, norms and weights of six steps of two micro-batches."""
    model = made(policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2**-4, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(6):
        for _ in range(2):
            x = torch.randn(64, WIDTH, generator=generator).to(device())
            loss = model(x).float().square().mean()
            loss.backward()
        found += [loss.detach().cpu(), clip_grad_norm_(model, 0.5).cpu()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
def test_training_is_the_same_with_and_without_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without streams bit for bit; against no offload as far as the host's kernels add up in another order."""
    plain, streams = trained(None), trained(POLICIES[name])
    monkeypatch.setenv(OFFLOAD.name, "in-turn")
    in_turn = trained(POLICIES[name])
    assert all(map(torch.equal, streams, in_turn))
    for value, expected in zip(streams, plain, strict=True):
        if name in ("optimizer state", "frozen") or name.startswith("activations"):
            assert torch.equal(value, expected)
        else:
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_what_is_on_the_host_is_page_locked_and_takes_nothing_of_the_device() -> None:
    model = made(CPUOffloadPolicy())
    for unit in units_of(model):
        for bucket in unit.buckets:
            assert bucket.main.is_pinned() and bucket.buffer.nbytes == 0
    model.to(device())  # where it computes already
    model(torch.randn(8, WIDTH, device=device())).float().mean().backward()  # what kernels take for good, too
    model.zero_grad()
    before = torch.accelerator.memory_allocated()
    model(torch.randn(8, WIDTH, device=device())).float().mean().backward()
    assert all(p.grad is None or p.grad.is_pinned() for p in model.parameters())
    assert torch.accelerator.memory_allocated() - before < WIDTH * WIDTH  # no shard of a layer has stayed


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [None, OffloadPolicy(activations=True)])
def test_activations_leave_the_device_for_page_locked_memory(policy: OffloadPolicy | None) -> None:
    """Of twelve layers two pages stay, and what is on the host is page-locked; without offload all of them stay."""
    rows, nbytes = 4096, 4096 * WIDTH * 4
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(12)]
    model = nn.Sequential(*layers)
    shard_model(model, unit_modules=layers, offload_policy=policy, device=device())
    x = torch.randn(rows, WIDTH, device=device())
    model(x).mean().backward()  # what is there from the first step on
    model.zero_grad()
    before = torch.accelerator.memory_allocated()
    loss = model(x).mean()
    after_forward = torch.accelerator.memory_allocated() - before
    kept = ActivationOffload.of(units_of(model)[-1].schedule)._pages
    if policy is None:
        assert kept is None and after_forward >= 22 * nbytes
        return
    assert kept is not None
    on_host = [block.on_host for page in kept._pages for block in page.blocks if block.on_host is not None]
    assert len(on_host) == 21  # eleven pages of two tensors, without the batch, which the caller holds
    assert all(tensor.is_pinned() for tensor in on_host)
    assert after_forward < 5 * nbytes
    torch.accelerator.reset_peak_memory_stats()
    loss.backward()
    peak = torch.accelerator.max_memory_allocated() - before
    assert peak < 10 * nbytes + 4 * sum(p.nbytes for p in layers[0].parameters()) + sum(
        p.nbytes for p in model.parameters()
    )


@pytest.mark.gpu
def test_copies_overlap_with_computing_and_do_not_disturb_it() -> None:
    """Fifty steps whose temporaries take the memory that pages give up, at once: a copy that came late would differ."""

    def losses(policy: OffloadPolicy | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(16)]
        model = nn.Sequential(*layers)
        shard_model(model, unit_modules=layers, offload_policy=policy, device=device())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        found = []
        for step in range(50):
            x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(step)).to(device())
            loss = model(x).square().mean()
            junk = [torch.full((2048, 2048), float("nan"), device=device()) for _ in range(4)]
            del junk
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [loss.cpu() for loss in found]

    assert all(map(torch.equal, losses(OffloadPolicy(activations=True)), losses(None)))
