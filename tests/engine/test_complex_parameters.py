"""Complex parameters train, are clipped, saved, loaded and exported like any others.

pytest tests/engine/test_complex_parameters.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.checkpoint import export_hf, full_state_dict, load_checkpoint, save_checkpoint
from fullshard.features import MixedPrecisionPolicy, clip_grad_norm_, no_sync, shard_model
from tests.differential import CLOSE, EPS, compare, optimizer_state
from tests.distributed import run_ranks
from tests.traps import assert_same_parameters, rank_and_size, sharded_parameters, whole_gradient


class Spectral(nn.Module):
    """A filter in frequency space, as Fourier layers have it, between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 9)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.mix = nn.Linear(5, 5, bias=False, dtype=torch.cfloat)
        self.leave = nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.enter(x)) * self.filter
        out: torch.Tensor = self.leave(torch.fft.irfft(self.mix(spectrum), n=9))
        return out


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Spectral(), nn.Linear(2, 6), Spectral())


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank_and_size()[0]))


def check_training(directory: str, strategy: str) -> None:
    """Two micro-batches a step, beside DDP, equal to rounding."""
    reference: nn.Module = made(0)
    ddp = DistributedDataParallel(reference, find_unused_parameters=True)
    model = made(0)
    shard_model(model, unit_modules=[model[0]], strategy=strategy)  # type: ignore[index]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=EPS) for m in (model, reference)]
    for step in range(3):
        for part in range(2):
            with no_sync(model) if not part else torch.enable_grad():
                model(batch(2 * step + part)).square().sum().backward()
            with ddp.no_sync() if not part else torch.enable_grad():
                ddp(batch(2 * step + part)).square().sum().backward()
        expected = dict(reference.named_parameters())
        for name, parameter in sharded_parameters(model).items():
            gradient = whole_gradient(parameter)
            assert gradient is not None and gradient.dtype == expected[name].dtype
            torch.testing.assert_close(gradient, expected[name].grad, **CLOSE)
        norms = clip_grad_norm_(model, 1.0), nn.utils.clip_grad_norm_(list(reference.parameters()), 1.0)
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, 1e-4)
    path = Path(directory)
    save_checkpoint(path / "saved", model=model, optimizer=optimizers[0])
    export_hf(path / "exported", model=model)
    other = made(1)
    shard_model(other, unit_modules=[])
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    load_checkpoint(path / "saved", model=other, optimizer=other_optimizer)
    moments, loaded = optimizer_state(model, optimizers[0]), optimizer_state(other, other_optimizer)
    assert moments and set(compare({"state": loaded}, {"state": moments}).values()) == {0.0}
    whole = full_state_dict(model, rank0_only=False)
    [file] = (path / "exported").glob("*.safetensors")
    for tensors in (full_state_dict(other, rank0_only=False), load_file(file)):
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("strategy", "collectives"),
    [
        ("FULL_SHARD", ""),
        ("NO_SHARD", "gloo"),
        pytest.param("FULL_SHARD", "gloo", marks=pytest.mark.full),
        pytest.param("NO_SHARD", "", marks=pytest.mark.full),
    ],
)
def test_like_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, collectives: str) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", collectives)
    run_ranks(check_training, 2, str(tmp_path), strategy)


def check_precision() -> None:
    """What is complex is neither cast nor rounded; the rest is."""
    model = made(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard_model(model, unit_modules=[], mp_policy=policy)
    for parameter in sharded_parameters(model).values():
        bucket = parameter.bucket
        is_complex = parameter.is_complex()
        assert bucket.compute_dtype == (torch.complex64 if is_complex else torch.bfloat16)
        assert bucket.reduce_dtype == (torch.complex64 if is_complex else torch.bfloat16)


def test_precision_leaves_complex_parameters_as_they_are() -> None:
    run_ranks(check_precision, 1)
