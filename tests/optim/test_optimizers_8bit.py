"""Optimizers that keep their state in 8 bits or 4: train, save, resume, at another number of ranks too.

pytest tests/optim/test_optimizers_8bit.py
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fullshard.checkpoint import full_state_dict, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.coded_state import coded_tensors
from fullshard.checkpoint.format import CodedPieceRecord, CodeRecord, StateTensorRecord, read_manifest
from fullshard.checkpoint.offline.source import open_native
from fullshard.core.errors import CheckpointError, OptimizerError
from fullshard.core.layout import Interval
from fullshard.features import ShardedParameter, shard_model
from fullshard.features.local_optimizers.coded import decode, encode
from tests.differential import TOLERANCE
from tests.distributed import run_ranks

BITSANDBYTES = (
    "PagedAdamW8bit", "AdamW8bit", "Adam8bit", "PagedLion8bit", "Lion8bit", "SGD8bit", "RMSprop8bit", "AdEMAMix8bit",
    "PagedAdEMAMix8bit",
)  # fmt: skip
TORCHAO = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit")
WIDTH, ROWS = 96, 12


def optimizer_for(library: str, name: str, model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-4 if "Lion" in name else 1e-3}
    if library == "bitsandbytes":
        bnb: Any = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
        if name == "SGD8bit":
            options["momentum"] = 0.9
        made: torch.optim.Optimizer = getattr(bnb.optim, name)(model.parameters(), **options)
    else:
        torchao: Any = pytest.importorskip("torchao.optim", reason="needs the extra `quant`")
        torch.compiler.set_stance("force_eager")  # the same arithmetic, without minutes of compilation
        made = getattr(torchao, name)(model.parameters(), **options)
    return made


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, 1).tanh()


def session(
    library: str, name: str, steps: tuple[int, int], load: str | None = None, save: str | None = None
) -> tuple[list[float], dict[str, Any], int]:
    """Train; returns the losses of whole batches, the whole weights, and how much state was held as codes."""
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH), nn.LayerNorm(WIDTH))
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    optimizer = optimizer_for(library, name, model)
    if load is not None:
        load_checkpoint(load, model=model, optimizer=optimizer)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(*steps):
        x, y = (part.chunk(size)[rank] for part in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        dist.all_reduce(total)
        losses.append(float(total))
    held = sum(len(coded_tensors(state)[0]) for state in optimizer.state.values())
    empty = [p for p in model.parameters() if isinstance(p, ShardedParameter) and p.interval.numel == 0]
    if library == "bitsandbytes" and size == 2:
        assert empty
        if load is None:
            assert not any(p in optimizer.state for p in empty)  # its CUDA kernels cannot be given nothing to do
    if save is not None:
        save_checkpoint(save, model=model, optimizer=optimizer)
    return losses, full_state_dict(model), held


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """All optimizer state of a checkpoint, as values."""
    with open_native(path) as source:
        return {
            name: source.read(kind, name, Interval(0, record.numel))
            for kind, name, record in source.contents.tensors()
            if isinstance(record, StateTensorRecord) and record.layout == "interval"
        }


def check_resume(directory: Path, library: str, name: str, tolerance: float) -> None:
    first, second = str(directory / "first"), str(directory / "second")
    run_ranks(session, 2, library, name, (0, 4), None, first)
    assert verify_checkpoint(first).is_valid, verify_checkpoint(first)
    manifest = read_manifest(directory / "first")
    assert manifest.optimizer is not None
    pieces = [p for state in manifest.optimizer.state.values() for r in state.values()
              if isinstance(r, StateTensorRecord) for p in r.pieces]  # fmt: skip
    assert {isinstance(piece, CodedPieceRecord) for piece in pieces} == {True, False}  # small ones stay in float32
    coded = sum(p.interval.numel for p in pieces if isinstance(p, CodedPieceRecord))
    plain = sum(p.interval.numel for p in pieces if not isinstance(p, CodedPieceRecord))
    stored = sum(record.nbytes for file, record in manifest.files.items() if file.startswith("optimizer"))
    assert stored < 1.1 * coded + 4 * plain + 30_000  # a byte per value, not four

    # without a stop, and from the checkpoint: bit by bit the same at the same number of ranks
    whole = run_ranks(session, 2, library, name, (0, 7))[0]
    same = run_ranks(session, 2, library, name, (4, 7), first)[0]
    assert same[0] == whole[0][4:] and same[2] == whole[2] > 0
    assert all(torch.equal(value, whole[1][key]) for key, value in same[1].items())

    # at another number, where blocks are cut elsewhere
    saved = state_of(directory / "first")
    for size in (3, 1):
        losses, _, held = run_ranks(session, size, library, name, (4, 7), first)[0]
        # torchao codes only what is a whole number of its blocks long; on 3 ranks no slice is
        assert (held > 0) == (library == "bitsandbytes" or size == 1)
        assert losses == pytest.approx(whole[0][4:], rel=tolerance)
    run_ranks(session, 3, library, name, (0, 0), first, second)
    for key, value in state_of(directory / "second").items():
        assert float((value - saved[key]).abs().mean()) <= tolerance * float(saved[key].abs().mean()), key


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_a_closure_computes_with_the_sharded_parameters(library: str) -> None:
    model = shard_model(nn.Linear(WIDTH, 64), unit_modules=[], device=torch.device("cpu"))
    optimizer = optimizer_for(library, "AdamW8bit", model)

    def closure() -> float:
        loss = model(batch(0)[0]).square().mean()
        loss.backward()
        return float(loss.detach())

    first, second = (optimizer.step(closure) for _ in range(2))
    assert 0 < second < first


def test_codes_are_cut_anew_on_another_number_of_ranks(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(session, 2, "bitsandbytes", "AdamW8bit", (0, 2), None, str(first))
    run_ranks(session, 3, "bitsandbytes", "AdamW8bit", (0, 0), str(first), str(second))
    saved, kept = state_of(first), state_of(second)
    assert saved.keys() == kept.keys()
    for key, value in saved.items():
        assert float((kept[key] - value).abs().mean()) <= 0.02 * float(value.abs().mean()), key


@pytest.mark.full
def test_paged_adamw_8bit(tmp_path: Path) -> None:
    check_resume(tmp_path, "bitsandbytes", "PagedAdamW8bit", 0.02)


@pytest.mark.full
@pytest.mark.parametrize("name", BITSANDBYTES[1:])
def test_bitsandbytes(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, "bitsandbytes", name, 0.02)


@pytest.mark.full
@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quant`")
    check_resume(tmp_path, "torchao", name, 0.15 if "4bit" in name else 0.05 if "Fp8" in name else 0.02)


def paged_on_a_gpu(directory: str) -> None:
    import bitsandbytes as bnb

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8)).cuda()
        shard_model(model, unit_modules=[], device=torch.device("cuda"))
        return model, bnb.optim.PagedAdamW8bit(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, seed: int) -> float:
        x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(seed)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = made()
    for seed in range(3):
        step(model, optimizer, seed)
    save_checkpoint(directory, model=model, optimizer=optimizer)
    expected = [step(model, optimizer, seed) for seed in (3, 4)]
    again, other = made()
    load_checkpoint(directory, model=again, optimizer=other)
    assert any(getattr(state["state1"], "is_paged", False) for state in other.state.values())
    assert [step(again, other, seed) for seed in (3, 4)] == expected


@pytest.mark.gpu
def test_paged_state_stays_paged_on_a_gpu(tmp_path: Path) -> None:
    paged_on_a_gpu(str(tmp_path / "saved"))  # in this process: a server that ranks are forked from may have used CUDA


def uncoded(directory: str, load: bool) -> dict[str, torch.Tensor]:
    """AdEMAMix in 32 bits: one tensor of state holds two averages."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = shard_model(nn.Linear(30, 20), unit_modules=[], device=torch.device("cpu"))
    optimizer = bnb.optim.AdEMAMix(model.parameters(), lr=1e-3, t_alpha=10, t_beta3=10)
    if load:
        load_checkpoint(directory, model=model, optimizer=optimizer)
    for step in range(2, 4) if load else range(4):
        model(torch.randn(2, 30, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            save_checkpoint(directory, model=model, optimizer=optimizer)
    return full_state_dict(model)


@pytest.mark.full
def test_two_averages_in_one_tensor(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    directory = str(tmp_path / "c")
    whole = run_ranks(uncoded, 2, directory, False)[0]
    assert {key.rpartition("/")[2] for key in state_of(tmp_path / "c")} == {"state1.0", "state1.1", "state2"}
    for size in (2, 3, 1):
        again = run_ranks(uncoded, size, directory, True)[0]
        for name, value in whole.items():  # a third of a sum is rounded
            torch.testing.assert_close(again[name], value, rtol=0, atol=TOLERANCE if size == 3 else 0)


def matrices(directory: str) -> str:
    """State that is laid out otherwise than the parameter."""
    model = shard_model(nn.Linear(128, 128), unit_modules=[], device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        optimizer.state[parameter]["rows"] = torch.zeros(2, parameter.shape.numel())
    try:
        save_checkpoint(directory, model=model, optimizer=optimizer)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_state_of_another_form_is_refused(tmp_path: Path) -> None:
    [message] = run_ranks(matrices, 1, str(tmp_path / "c"))
    assert "shape (2, " in message and "hint" in message


BOOKS = {
    8: torch.cat([-torch.logspace(0, -6, 127), torch.zeros(1), torch.logspace(-6, 0, 128)]),
    4: torch.linspace(-0.9, 1, 16),
}


def test_a_code_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 256"):
        CodeRecord(dtype="uint8", bits=8, block=256, book=16)


@given(numel=st.integers(1, 700).map(lambda n: 2 * n), seed=st.integers(0, 99), bits=st.sampled_from([4, 8, "fp8"]))
def test_coding(numel: int, seed: int, bits: Any) -> None:
    book = None if bits == "fp8" else BOOKS[bits]
    form: Any = {"bits": 4 if bits == 4 else 8, "block": 64}
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    values[: numel // 3] = 0
    codes, scales = encode(values, book, **form)
    found = decode(codes, scales, book, **form)
    assert codes.numel() == numel * form["bits"] // 8 and scales.numel() == -(-numel // 64)
    largest = values.abs().max()
    assert (found - values).abs().max() <= largest * (0.11 if bits == 4 else 0.07)
    again = decode(*encode(found, book, **form), book, **form)
    torch.testing.assert_close(again, found, rtol=0.11, atol=float(largest) * 0.11)
    whole = numel // 64 * 64  # zeros that fill up the last block may have no code
    assert torch.equal(again[:whole], found[:whole]), "values of codes are given codes of the same values"


def dcp_session(
    name: str, steps: tuple[int, int], load: str | None, save: str | None, dtype: torch.dtype, full: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, with torch's own checkpoints; returns the losses and the optimizer's state, whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH), nn.LayerNorm(WIDTH)).to(dtype)
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    optimizer = optimizer_for("torchao", name, model)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if load is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        if full:  # out and in again, as whole tensors
            set_optimizer_state_dict(
                model, optimizer, get_optimizer_state_dict(model, optimizer, options=whole), options=whole
            )
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(*steps):
        x, y = (part.chunk(size)[rank].to(dtype) for part in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if save is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=save)
    found: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return losses, {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}


@pytest.mark.parametrize("name", ["AdamW8bit", *(pytest.param(n, marks=pytest.mark.full) for n in TORCHAO[1:3])])
def test_torchao_through_torchs_checkpoints(tmp_path: Path, name: str) -> None:
    """To the bit at the same number of ranks; at another one blocks of the same values begin elsewhere."""
    pytest.importorskip("torchao", reason="needs the extra `quant`")
    saved = str(tmp_path / "a")
    dtype = torch.bfloat16 if name == "AdamW4bit" else torch.float32
    whole = run_ranks(dcp_session, 2, name, (0, 5), None, None, dtype, False)
    first = run_ranks(dcp_session, 2, name, (0, 3), None, saved, dtype, False)
    assert {float(value) for key, value in first[0][1].items() if key.endswith("/step")} == {3.0}
    for full in (False, True):
        again = run_ranks(dcp_session, 2, name, (3, 5), saved, None, dtype, full)
        for before, after in zip(whole, again, strict=True):
            assert after[0] == before[0][3:]
            assert after[1].keys() == before[1].keys()
            assert all(torch.equal(value, before[1][key]) for key, value in after[1].items())
    for size in (1, 3):  # on 3 ranks no interval is coded: torchao keeps it in the parameter's dtype
        for key, value in run_ranks(dcp_session, size, name, (0, 0), saved, None, dtype, False)[0][1].items():
            atol = 0.0 if size == 3 else (0.2 if name == "AdamW4bit" else 0.07) * float(first[0][1][key].abs().max())
            rtol = 2**-8 if size == 3 and dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(value, first[0][1][key], rtol=rtol, atol=atol)


def states_of_rank(name: str) -> None:
    """A rank has codes of its interval, and nothing where that is empty: no state dict could say so."""
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 1))
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    optimizer = optimizer_for("bitsandbytes", name, model)
    assert not optimizer.state_dict()["state"]
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    if dist.get_world_size() == 1:
        assert optimizer.state_dict()["state"]
        return
    for use in (optimizer.state_dict, lambda: get_optimizer_state_dict(model, optimizer)):
        with pytest.raises(
            OptimizerError, match=rf"{name}.state_dict\(\) cannot return the state of 0.weight(?s:.*)save_checkpoint"
        ):
            use()


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_dicts_that_would_be_one_ranks_are_refused(ranks: int) -> None:
    run_ranks(states_of_rank, ranks, "AdamW8bit")
