"""Checkpoints of several ranks: any layout into any other, and one rank's failure is everybody's error."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import (
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
    verify_checkpoint,
)
from fullshard.core.errors import CheckpointError
from fullshard.engine.parameter import sharded_parameters
from fullshard.features import ShardedParameter, shard_model
from tests.differential import TOLERANCE, is_same_product, products_are_exact
from tests.distributed import run_ranks


class Net(nn.Module):
    """Odd shapes, two dtypes, tied, scalar, empty, frozen and ignored parameters, buffers, dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 5)
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.low = nn.Linear(5, 5, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.ignored = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.frozen(self.inner(self.embed(tokens)) * self.scale)
        logits = self.head(hidden + self.low(hidden.bfloat16()).float())
        return logits + self.ignored.sum()  # its gradient is the same on all ranks, as nobody reduces it


def _job(strategy: str, shard_size: int | None, *, seed: int) -> tuple[Net, torch.optim.Optimizer, Any]:
    net = Net(seed)
    shard_model(net, unit_modules=[net.inner], strategy=strategy, shard_size=shard_size, ignored_params=[net.ignored])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(0, 13, (4,))).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters, buffers and optimizer state, on every rank."""
    whole = full_state_dict(model, rank0_only=False)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name == "nothing":
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            if isinstance(parameter, ShardedParameter):
                state = state.full_tensor()
            whole[f"{name}/{key}"] = state
        if parameter.shape.numel():
            whole[f"{name}/step"] = optimizer.state[parameter]["step"]
    return whole


def _save(directory: str, strategy: str, shard_size: int | None) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = _job(strategy, shard_size, seed=0)
    torch.manual_seed(7 + dist.get_rank())  # ranks draw different data and dropout masks
    _train(model, optimizer, scheduler, steps=2)
    save_checkpoint(
        Path(directory) / "a", model=model, optimizer=optimizer, scheduler=scheduler, extra={"at": torch.tensor(2)}
    )
    return _everything(model, optimizer)


def _load(directory: str, strategy: str, shard_size: int | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model, optimizer, scheduler = _job(strategy, shard_size, seed=1)
    extra = load_checkpoint(Path(directory) / "a", model=model, optimizer=optimizer, scheduler=scheduler)
    assert scheduler.last_epoch == 2
    return _everything(model, optimizer), extra


_LAYOUTS = [
    (2, "FULL_SHARD", None),
    (1, "FULL_SHARD", None),
    (3, "SHARD_GRAD_OP", None),
    (2, "NO_SHARD", None),
    (4, "HYBRID_SHARD", 2),
]


@pytest.mark.parametrize("saved", _LAYOUTS, ids=lambda layout: f"{layout[1]}-{layout[0]}")
def test_every_layout_loads_into_every_other(tmp_path: Path, saved: tuple[int, str, int | None]) -> None:
    """Every parameter, buffer and optimizer value, bit by bit, at other world sizes, strategies and meshes."""
    expected = run_ranks(_save, saved[0], str(tmp_path), *saved[1:])[0]
    found = verify_checkpoint(tmp_path / "a")
    found.raise_if_damaged()
    assert found.manifest is not None
    assert found.manifest.world_size == saved[0]
    for world_size, *layout in _LAYOUTS:
        for whole, extra in run_ranks(_load, world_size, str(tmp_path), *layout):
            assert extra == {"at": 2}
            # Which ranks own nothing of a parameter, and so have no step count to show, depends on the layout.
            keys = {key for key in expected if not key.endswith("/step")}
            assert keys == {key for key in whole if not key.endswith("/step")}
            for name in whole:
                assert torch.equal(whole[name], expected.get(name, torch.tensor(2.0))), (layout, name)


def _stored_elements(directory: str) -> None:
    model, optimizer, scheduler = _job("HYBRID_SHARD", 2, seed=0)
    _train(model, optimizer, scheduler, steps=1)
    save_checkpoint(Path(directory) / "a", model=model, optimizer=optimizer)


def test_copies_are_stored_once(tmp_path: Path) -> None:
    """Only the first replica of a hybrid mesh writes parameters; every rank writes its generators."""
    run_ranks(_stored_elements, 4, str(tmp_path))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    expected = [f"{kind}-rank0000{r}.safetensors" for kind in ("model", "optimizer") for r in (0, 1)]
    expected += [f"state-rank0000{r}.safetensors" for r in range(4)] + ["manifest.json"]
    assert files == sorted(expected)


def _resume(directory: str) -> tuple[list[float], list[float]]:
    model, optimizer, scheduler = _job("FULL_SHARD", None, seed=0)
    torch.manual_seed(7 + dist.get_rank())
    _train(model, optimizer, scheduler, steps=2)
    path = save_checkpoint(Path(directory) / "a", model=model, optimizer=optimizer, scheduler=scheduler)
    expected = _train(model, optimizer, scheduler, steps=3)
    other, other_optimizer, other_scheduler = _job("FULL_SHARD", None, seed=1)
    load_checkpoint(path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    got = _train(other, other_optimizer, other_scheduler, steps=3)
    pairs = zip(sharded_parameters(optimizer), sharded_parameters(other_optimizer), strict=True)
    assert all(is_same_product(one.local, two.local) for one, two in pairs)
    return expected, got


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Also the data and dropout each rank draws for itself."""
    results = run_ranks(_resume, 2, str(tmp_path))
    assert results[0][0] != results[1][0]
    for expected, got in results:
        assert got == expected if products_are_exact() else got == pytest.approx(expected, rel=TOLERANCE)


def _full_states() -> bool:
    model, _, _ = _job("FULL_SHARD", None, seed=0)
    state = full_state_dict(model)
    assert bool(state) == (dist.get_rank() == 0)
    other, _, _ = _job("FULL_SHARD", None, seed=1)
    load_full_state_dict(other, state if dist.get_rank() == 0 else None)
    with pytest.raises(CheckpointError, match="'scale' is missing"):
        load_full_state_dict(other, {k: v for k, v in state.items() if k != "scale"})
    expected = Net(0).state_dict()
    return all(torch.equal(expected[k], v) for k, v in full_state_dict(other, rank0_only=False).items())


def test_a_full_state_dict_on_rank_0_reaches_all() -> None:
    assert run_ranks(_full_states, 2) == [True, True]


class Remembering(nn.Linear):
    """Has state beside its tensors, a tensor of it another one on each rank."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "mean": torch.full((2,), 0.5)}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.mean = state["seen"], state["mean"]


def _remembering() -> Any:
    return shard_model(nn.Sequential(Remembering(3, 2), nn.Linear(2, 2)), unit_modules=[])


def _extra_state() -> Any:
    model, other = (_remembering() for _ in range(2))
    model[0].seen = (dist.get_rank() + 5, {1: "a"})
    state = full_state_dict(model)
    assert load_full_state_dict(other, state) == ([], [])
    assert other[0].mean.tolist() == [0.5, 0.5]
    assert load_full_state_dict(other, {"1.bias": torch.ones(2)}, strict=False)[0][-1] == "0._extra_state"
    partial = {name: value for name, value in state.items() if name != "0._extra_state"}
    with pytest.raises(CheckpointError, match=r"'0\._extra_state' is missing"):
        load_full_state_dict(other, partial)
    with pytest.raises(CheckpointError, match=r"extra state/0\._extra_state is a Remembering, which cannot be stored"):
        load_full_state_dict(other, {**state, "0._extra_state": model[0]})
    with pytest.raises(CheckpointError, match=r"'1\._extra_state' is not in the model"):
        load_full_state_dict(other, {**state, "1._extra_state": 1})
    return other[0].seen


def test_extra_state_on_rank_0_reaches_all() -> None:
    assert run_ranks(_extra_state, 2) == [(5, {1: "a"})] * 2


# -- failures ----------------------------------------------------------------------------------------------------------


def _message(function: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function()
    return str(caught.value)


def _shape_error(directory: str) -> bool:
    save_checkpoint(directory, model=shard_model(nn.Linear(3, 4), unit_modules=[]))
    with pytest.raises(CheckpointError, match=r"failed\nranks 0, 1: the checkpoint does not match") as caught:
        load_checkpoint(directory, model=shard_model(nn.Linear(3, 5), unit_modules=[]))
    return "Traceback" not in "".join(traceback.format_exception(caught.value)[1:])


def test_another_shape_is_one_error(tmp_path: Path) -> None:
    assert run_ranks(_shape_error, 2, str(tmp_path / "saved")) == [True, True]


def _write_error(directory: str) -> str:
    model = shard_model(nn.Linear(300, 300), unit_modules=[])
    save_checkpoint(Path(directory) / "a", model=model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        return _message(lambda: save_checkpoint(Path(directory) / "b", model=model, total_limit=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_fails_on_every_rank_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(_write_error, 2, str(tmp_path))
    assert first == second
    assert "failed\nrank 1: cannot write model-rank00001.safetensors: File too large" in first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert verify_checkpoint(tmp_path / "a").is_valid


def _damage_messages(directory: str) -> list[str]:
    path = Path(directory) / "a"
    model, optimizer, scheduler = _job("FULL_SHARD", None, seed=0)
    _train(model, optimizer, scheduler, steps=1)
    save_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    messages = []
    for name in sorted(p.name for p in path.iterdir()):
        dist.barrier()
        intact = (path / name).read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            (path / name).write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        dist.barrier()
        messages.append(_message(lambda: load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)))
        dist.barrier()
        if dist.get_rank() == 0:
            (path / name).write_bytes(intact)
    dist.barrier()
    load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    return messages


def test_damage_to_any_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_damage_messages, 2, str(tmp_path))
    assert first == second
    assert len(first) == 7
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    for name, message in zip(names, first, strict=True):
        assert name in message


def _diverged(directory: str) -> str:
    model, optimizer, scheduler = _job("FULL_SHARD", None, seed=0)
    _train(model, optimizer, scheduler, steps=1)
    if dist.get_rank() == 1:
        for state in optimizer.state.values():
            state["step"] += 1
    return _message(lambda: save_checkpoint(Path(directory) / "a", model=model, optimizer=optimizer))


def test_ranks_that_disagree_are_not_saved(tmp_path: Path) -> None:
    for message in run_ranks(_diverged, 2, str(tmp_path)):
        assert "/step differs between rank 0 and rank 1" in message
    assert list(tmp_path.iterdir()) == []


def _die_while_saving(rank: int, directory: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    model = shard_model(nn.Linear(64, 64), unit_modules=[])
    path = Path(directory) / "out"
    save_checkpoint(path / "a", model=model, extra={"step": 1})

    def kill(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith("state-rank00001.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        sys.addaudithook(kill)
    message = _message(lambda: save_checkpoint(path / "b", model=model, total_limit=1))
    (Path(directory) / "message").write_text(message)
    os._exit(0)  # the process group cannot be left in order without its other member


def test_a_killed_rank_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """SIGKILL between two files of rank 1: rank 0 gets an error, not a hang, and no half checkpoint stays."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_die_while_saving, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    assert "lost the other ranks while" in (tmp_path / "message").read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".lease.json", "a"]
    assert latest_checkpoint(tmp_path / "out", thorough=True) == tmp_path / "out" / "a"
