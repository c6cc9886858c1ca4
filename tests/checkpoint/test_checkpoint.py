"""Save and load on one rank: complete, refused when damaged, safe when killed."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import google_crc32c
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import Accelerator
from fullshard.checkpoint import (
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
    verify_checkpoint,
)
from fullshard.checkpoint.format import read_manifest
from fullshard.core.errors import CheckpointError, ConfigError, DamagedError
from fullshard.features import fully_shard, shard_model, unsharded
from tests.distributed import run_ranks
from tests.launching import run_python


class Net(nn.Module):
    """Tied, scalar, empty and frozen parameters; persistent and other buffers; dropout."""

    def __init__(self, *, seed: int = 0, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 13, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.frozen(self.inner(self.embed(tokens)) * self.scale))


def _sharded(**options: Any) -> Net:
    net = Net(**options)
    return shard_model(net, unit_modules=[net.inner])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 13, (4,))
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _job(**options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = _sharded(**options)
    decayed, plain = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer, scheduler = _job()
    _train(model, optimizer, scheduler, steps=2)
    extra = {"step": 2, "history": torch.arange(3), "path": ("a", None)}
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
    return tmp_path / "a"


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer, scheduler = _job()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _train(model, optimizer, scheduler, steps=2)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    path = save_checkpoint(tmp_path / "a", **parts, extra={"step": 2}, objects=[Counting(5)])
    expected = _train(model, optimizer, scheduler, steps=3)

    other, other_optimizer, other_scheduler = _job(seed=1)
    other_scaler, counting = torch.amp.GradScaler("cpu", init_scale=2.0), Counting(0)
    parts = {"model": other, "optimizer": other_optimizer, "scheduler": other_scheduler, "scaler": other_scaler}
    assert load_checkpoint(path, **parts, objects=[counting]) == {"step": 2}
    assert other_scaler.state_dict() == scaler.state_dict()
    assert counting.count == 5
    assert all(int(state["step"]) == 2 for state in other_optimizer.state.values()), "no dummy step was counted"
    assert _train(other, other_optimizer, other_scheduler, steps=3) == expected
    for name, tensor in full_state_dict(model).items():
        assert torch.equal(full_state_dict(other)[name], tensor), name


def test_state_is_read_into_the_memory_that_it_had(saved: Path) -> None:
    """What is of another dtype is made anew, as it was saved."""
    model, optimizer, scheduler = _job(seed=1)
    _train(model, optimizer, scheduler, steps=1)
    states = list(optimizer.state.values())
    states[0]["exp_avg"] = states[0]["exp_avg"].half()
    before = [state["exp_avg"].local.data_ptr() for state in states]
    load_checkpoint(saved, model=model, optimizer=optimizer, scheduler=scheduler)
    now = [state["exp_avg"].local for state in optimizer.state.values()]
    assert [tensor.data_ptr() for tensor in now][1:] == before[1:]
    assert now[0].dtype is torch.float32


class Counting:
    """A further object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_extra_comes_back_with_its_types(saved: Path) -> None:
    extra = load_checkpoint(saved, model=_sharded())
    assert extra.pop("history").tolist() == [0, 1, 2]
    assert extra == {"step": 2, "path": ("a", None)}


def test_optimizers_of_other_kinds(tmp_path: Path) -> None:
    """Momentum that is None at first, several tensors per parameter, and hyper-parameters that are tensors."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    ]
    for number, make in enumerate(makers):
        model, other = _sharded(), _sharded(seed=1)
        optimizer, other_optimizer = make(model.parameters()), make(other.parameters())
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        path = save_checkpoint(tmp_path / str(number), model=model, optimizer=optimizer)
        load_checkpoint(path, model=other, optimizer=other_optimizer)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            if mine.shape.numel() == 0:
                continue
            assert optimizer.state[mine].keys() == other_optimizer.state[theirs].keys()
            for key, value in optimizer.state[mine].items():
                torch.testing.assert_close(other_optimizer.state[theirs][key], value, rtol=0, atol=0)
        assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_state_that_a_checkpoint_has_not_is_dropped(tmp_path: Path) -> None:
    for is_saved in (True, False):
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=not is_saved)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if is_saved:
            save_checkpoint(tmp_path / "step", model=model, optimizer=optimizer)
    load_checkpoint(tmp_path / "step", model=model, optimizer=optimizer)
    assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_prepared_optimizer_is_the_one_inside(tmp_path: Path) -> None:
    """What `Accelerator.prepare` returned may be passed, and loaded without it."""
    model = nn.Linear(4, 4)
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.optimizer is not None and manifest.optimizer.kind == "AdamW"
    for loads in (optimizer, torch.optim.AdamW(model.parameters())):
        load_checkpoint(tmp_path / "c", model=model, optimizer=loads)
        assert {key for state in loads.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_plain_models_are_saved_too(tmp_path: Path) -> None:
    net = Net()
    path = save_checkpoint(tmp_path / "a", model=net)
    sharded = _sharded(seed=1)
    load_checkpoint(path, model=sharded)
    for name, tensor in net.state_dict().items():
        assert torch.equal(full_state_dict(sharded)[name], tensor), name


def test_memory_layout_does_not_matter(tmp_path: Path) -> None:
    """A transposed parameter is stored in the order of its elements, and loaded into whatever layout is there."""

    def make(*, is_transposed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Module()
        value = torch.randn(4, 3)
        module.weight = nn.Parameter(value.t() if is_transposed else value.t().contiguous())
        optimizer = torch.optim.AdamW(module.parameters(), fused=is_transposed)
        (module.weight * torch.arange(12.0).view(3, 4)).sum().backward()
        return module, optimizer

    model, optimizer = make(is_transposed=True)
    optimizer.step()
    path = save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)
    optimizer.step()
    for is_transposed in (True, False):
        other, other_optimizer = make(is_transposed=is_transposed)
        load_checkpoint(path, model=other, optimizer=other_optimizer)
        assert other_optimizer.param_groups[0]["fused"] is is_transposed, "how to compute stays the caller's choice"
        other_optimizer.step()
        mine, theirs = next(model.parameters()), next(other.parameters())
        assert mine.is_contiguous() is False
        torch.testing.assert_close(mine.detach(), theirs.detach())
        for key, value in optimizer.state[mine].items():
            torch.testing.assert_close(other_optimizer.state[theirs][key], value)


def test_modules_with_extra_state(tmp_path: Path) -> None:
    def make(value: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), WithExtraState(value))
        fully_shard(model)
        return model

    path = save_checkpoint(tmp_path / "a", model=make(3))
    model: Any = make(0)
    load_checkpoint(path, model=model)
    assert model[1].value == 3
    with pytest.raises(CheckpointError, match=r"extra state in the modules \[\], but the checkpoint in \['1'\]"):
        load_checkpoint(path, model=nn.Sequential(nn.Linear(2, 2), nn.Identity()))


class WithExtraState(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


# -- what does not match is refused ----------------------------------------------------------------------------------


def test_all_differences_are_listed_and_nothing_changes(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, model=model, optimizer=torch.optim.SGD(model.parameters()), scaler=Counting(0))
    message = str(caught.value)
    for line in (
        "parameter '0.weight' is not in the checkpoint",
        "parameter 'inner.3.bias' of the checkpoint is not in the model",
        "buffer '1.running_mean' is not in the checkpoint",
        "buffer 'inner.1.running_var' of the checkpoint is not in the model",
        "the optimizer is a SGD, but a AdamW was saved",
        "the optimizer has 1 parameter group, but 2 were saved",
        "scaler was not saved",
    ):
        assert line in message
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_shapes_and_dtypes_are_not_converted(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", model=nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(2, 4\), but was saved with \(2, 3\)"):
        load_checkpoint(path, model=nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=r"'weight' is torch.bfloat16, but was saved as torch.float32"):
        load_checkpoint(path, model=nn.Linear(3, 2).to(torch.bfloat16))


def test_ties_may_differ_only_where_no_value_is_lost(tmp_path: Path) -> None:
    tied = save_checkpoint(tmp_path / "tied", model=_sharded())
    untied = _sharded(seed=1, is_tied=False)
    load_checkpoint(tied, model=untied)
    state = full_state_dict(untied)
    assert torch.equal(state["head.weight"], state["embed.weight"])
    apart = save_checkpoint(tmp_path / "apart", model=_sharded(is_tied=False))
    with pytest.raises(
        CheckpointError, match=r"tied in the model, but was saved separately as 'embed.weight' and 'head.weight'"
    ):
        load_checkpoint(apart, model=_sharded())


def test_an_optimizer_made_before_sharding_is_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shard_model(net, unit_modules=[net.inner])
    with pytest.raises(CheckpointError, match=r"contains \d+ tensors that are not parameters of the model"):
        save_checkpoint(tmp_path / "a", model=net, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_state_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    optimizer.state[weight]["absmax"] = torch.zeros(5)
    with pytest.raises(
        CheckpointError, match=r"'absmax' of 'scale' has shape \(5,\)|'absmax' of '.*' has shape \(5,\)"
    ):
        save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)


def test_unsharded_models_and_bad_limits_are_refused(tmp_path: Path) -> None:
    model = _sharded()
    with unsharded(model), pytest.raises(CheckpointError, match="kept unsharded"):
        save_checkpoint(tmp_path / "a", model=model)
    with pytest.raises(ConfigError, match="total_limit is 0"):
        save_checkpoint(tmp_path / "a", model=model, total_limit=0)
    for move in (save_checkpoint, load_checkpoint):
        with pytest.raises(ConfigError, match="model: expected a module, got OrderedDict"):
            move(tmp_path / "a", model=cast(Any, model.state_dict()))
    assert list(tmp_path.iterdir()) == []


# -- damage ----------------------------------------------------------------------------------------------------------


def _load_all(path: Path) -> None:
    model, optimizer, scheduler = _job(seed=1)
    load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)


_FILES = [f"{kind}-rank00000.safetensors" for kind in ("model", "optimizer", "state")]


@pytest.mark.parametrize("name", [*_FILES, "manifest.json"])
def test_damage_is_refused(saved: Path, name: str) -> None:
    """A flipped bit at the start, in the middle and at the end; a cut; a deletion."""
    _load_all(saved)
    intact = (saved / name).read_bytes()
    for position in (0, len(intact) // 2, len(intact) - 1):
        data = bytearray(intact)
        data[position] ^= 1
        (saved / name).write_bytes(data)
        with pytest.raises(CheckpointError):
            _load_all(saved)
        found = verify_checkpoint(saved)
        assert name in found.problems[0]
        assert latest_checkpoint(saved.parent, thorough=True) is None
    (saved / name).write_bytes(intact[:-3])
    with pytest.raises(CheckpointError):
        _load_all(saved)
    assert latest_checkpoint(saved.parent) is None
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        _load_all(saved)
    assert not verify_checkpoint(saved).is_valid


def _values(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    others = (scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups])
    held = [t.to_local().detach() if isinstance(t, DTensor) else t for t in tensors]
    return [*(t.clone() for t in held), *map(torch.tensor, others), torch.random.get_rng_state()]


@pytest.mark.parametrize("flips", [9, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_refused_load_changes_nothing(saved: Path, flips: int, steps: int) -> None:
    """Wherever one bit is another: neither weights, optimizer, schedule nor random numbers, there before or not."""
    job = _job(seed=1)
    _train(*job, steps=steps)
    before, random_ = _values(*job), random.Random(0)
    for number in range(flips):
        path = saved / _FILES[number % len(_FILES)]
        intact = path.read_bytes()
        data = bytearray(intact)
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            load_checkpoint(saved, model=job[0], optimizer=job[1], scheduler=job[2])
        path.write_bytes(intact)
        after = _values(*job)
        assert len(after) == len(before) and all(map(torch.equal, before, after))
    load_checkpoint(saved, model=job[0], optimizer=job[1], scheduler=job[2])


def _flipped(directory: str, flips: int) -> int:
    """Save, then load with one bit of a random file flipped, `flips` times; how many changed nothing."""
    job = _job(seed=dist.get_world_size())
    _train(*job, steps=2)
    path = Path(directory) / "a"
    save_checkpoint(path, model=job[0], optimizer=job[1], scheduler=job[2])
    _train(*job, steps=1)
    before, random_, refused = _values(*job), random.Random(0), 0
    names = sorted(file.name for file in path.iterdir())
    for _ in range(flips):
        file = path / random_.choice(names)
        position, bit = random_.randrange(file.stat().st_size), random_.randrange(8)
        _flip(file, position, bit)
        with pytest.raises(CheckpointError):
            load_checkpoint(path, model=job[0], optimizer=job[1], scheduler=job[2])
        refused += all(map(torch.equal, before, _values(*job)))
        _flip(file, position, bit)
    load_checkpoint(path, model=job[0], optimizer=job[1], scheduler=job[2])
    return refused


def _flip(file: Path, position: int, bit: int) -> None:
    """Flip one bit, on rank 0, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        with file.open("r+b") as opened:
            opened.seek(position)
            byte = opened.read(1)[0]
            opened.seek(position)
            opened.write(bytes([byte ^ 1 << bit]))
    dist.barrier()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_200_flips_at_every_world_size(tmp_path: Path, world_size: int) -> None:
    """In any file, the manifest included: refused on all ranks, and each has what it had."""
    assert run_ranks(_flipped, world_size, str(tmp_path), 200, timeout=800) == [200] * world_size


def test_files_of_another_save_are_refused(saved: Path) -> None:
    """Same names, same sizes: only the checksums and the save id tell."""
    model, optimizer, scheduler = _job(seed=2)
    _train(model, optimizer, scheduler, steps=2)
    other = saved.parent / "b"
    save_checkpoint(other, model=model, optimizer=optimizer, scheduler=scheduler)
    for name in _FILES[:2]:
        intact = (saved / name).read_bytes()
        assert len(intact) == (other / name).stat().st_size
        shutil.copy(other / name, saved / name)
        with pytest.raises(CheckpointError, match="is damaged between bytes"):
            _load_all(saved)
        (saved / name).write_bytes(intact)
    assert verify_checkpoint(saved).is_valid


def test_verify_reports_everything(saved: Path) -> None:
    assert "is valid: 3 files" in str(verify_checkpoint(saved))
    verify_checkpoint(saved).raise_if_damaged()
    (saved / "notes.txt").write_text("?")
    (saved / _FILES[0]).unlink()
    data = bytearray((saved / _FILES[1]).read_bytes())
    data[-1] ^= 128
    (saved / _FILES[1]).write_bytes(data)
    problems = verify_checkpoint(saved).problems
    assert len(problems) == 3
    with pytest.raises(
        CheckpointError, match=r"is damaged:\n  .*missing(.|\n)*notes.txt is not part of the checkpoint"
    ):
        verify_checkpoint(saved).raise_if_damaged()


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        (("parameters", "inner.0.weight", "dtype"), "x", "'inner.0.weight' has the unknown dtype 'x'"),
        (
            ("optimizer", "groups", 0, "options", "betas", "$"),
            "x",
            "option 'betas' of parameter group 0: the checkpoint contains a value of the unknown kind",
        ),
        (("states", "extra", "step"), {"$": "float", "value": "x"}, "extra: a value of the checkpoint cannot be read"),
        (("states", "extra", "step"), {"$": "set", "items": [[]]}, "extra: a value of the checkpoint cannot be read"),
        (("states", "extra", "step"), {"$": "tensor", "name": "none"}, "lacks 'none'|'none' is not in any file"),
    ],
)
def test_verify_finds_what_load_refuses(saved: Path, where: Any, value: Any, problem: str) -> None:
    fields = json.loads((saved / "manifest.json").read_bytes())["manifest"]
    place = fields
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    body = json.dumps(fields).encode()
    (saved / "manifest.json").write_bytes(b'{"crc32c":"%08x","manifest":%s}\n' % (google_crc32c.value(body), body))
    with pytest.raises(CheckpointError, match=problem):
        verify_checkpoint(saved).raise_if_damaged()
    with pytest.raises(CheckpointError, match=problem):
        _load_all(saved)


# -- several checkpoints ----------------------------------------------------------------------------------------------


def test_latest_falls_back_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _sharded()
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for step in (2, 10, 1):  # the order of saving counts, not the names
        save_checkpoint(tmp_path / f"step-{step}", model=model)
    (tmp_path / "export").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    (tmp_path / "step-1" / _FILES[0]).unlink()
    (tmp_path / "step-10" / "manifest.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-2"
    assert "skipping checkpoint" in caplog.text
    assert f"{_FILES[0]} is missing" in caplog.text
    assert "step-10/manifest.json is not a fullshard manifest" in caplog.text


def test_total_limit_keeps_the_newest_and_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for step in range(4):
        save_checkpoint(tmp_path / f"step-{step}", model=_sharded(), total_limit=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lease.json", "mine", "step-2", "step-3"]


def test_an_existing_checkpoint_is_replaced_only_on_demand(saved: Path) -> None:
    model = _sharded()
    with pytest.raises(CheckpointError, match=r"already exists"):
        save_checkpoint(saved, model=model)
    _load_all(saved)
    save_checkpoint(saved, model=model, overwrite=True)
    assert load_checkpoint(saved, model=model) == {}
    assert sorted(p.name for p in saved.parent.iterdir()) == [".a.lease.json", "a"]


_CRASHES = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from torch import nn
from fullshard.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint

root, scenario = Path(sys.argv[1]), sys.argv[2]
name, options = ("new", {"total_limit": 1}) if scenario == "retain" else ("old", {"overwrite": True})

def model(value):
    made = nn.Linear(3, 2)
    nn.init.constant_(made.weight, value)
    return made

def die_at(count):
    left = count
    def hook(event, args):
        nonlocal left
        if event.split(".")[0] in ("open", "os", "shutil") and args and str(args[0]).startswith(str(work)):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
    sys.addaudithook(hook)

save_checkpoint(root / "start" / "old", model=model(1.0))
seen = []
for count in range(200):
    work = root / str(count)
    shutil.copytree(root / "start", work)
    child = os.fork()
    if child == 0:
        die_at(count)
        save_checkpoint(work / name, model=model(2.0), **options)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    latest = latest_checkpoint(work, thorough=True)
    loaded = model(0.0)
    load_checkpoint(latest, model=loaded)
    seen.append(int(loaded.weight[0, 0]))
    assert (loaded.weight == seen[-1]).all() and verify_checkpoint(latest).is_valid
    save_checkpoint(work / name, model=model(3.0), overwrite=True)
    load_checkpoint(latest_checkpoint(work), model=loaded)
    assert (loaded.weight == 3).all()
    assert not list(work.glob(".old-*")) and not list(work.glob(".tmp-" + name + "-*")), list(work.iterdir())
    if os.waitstatus_to_exitcode(status) == 0:
        break
print(*seen)
"""


@pytest.mark.parametrize("scenario", ["retain", pytest.param("overwrite", marks=pytest.mark.full)])
def test_killed_at_every_step_of_a_save(tmp_path: Path, scenario: str) -> None:
    """SIGKILL before each file operation in turn: there is always one whole checkpoint, the old or the new one."""
    command = [sys.executable, "-c", _CRASHES, str(tmp_path), scenario]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_python(command, tmp_path, environment, 240)
    assert done.returncode == 0, done.stderr
    seen = [int(value) for value in done.stdout.split()]
    assert seen == sorted(seen)
    assert seen.count(1) >= 5, "kills before the commit"
    assert seen.count(2) >= 3, "kills after the commit"


# -- whole tensors -----------------------------------------------------------------------------------------------------


def test_full_state_dict_is_that_of_the_plain_model() -> None:
    net, sharded = Net(), _sharded()
    state = full_state_dict(sharded)
    assert list(state) == list(net.state_dict())
    assert state["head.weight"] is state["embed.weight"]
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    Net(seed=1).load_state_dict(state)


def test_a_module_under_two_names_has_its_buffers_under_both() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, norm)
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    assert load_full_state_dict(shard_model(model, unit_modules=[]), state) == ([], [])
    assert norm.num_batches_tracked == 3 and full_state_dict(model).keys() == state.keys()


def test_load_full_state_dict() -> None:
    net, sharded = Net(), _sharded(seed=1)
    assert load_full_state_dict(sharded, net.state_dict()) == ([], [])
    assert all(torch.equal(full_state_dict(sharded)[name], tensor) for name, tensor in net.state_dict().items())
    partial: dict[str, Any] = {"scale": torch.tensor(7), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"'embed.weight' is missing(.|\n)*'other' is not in the model"):
        load_full_state_dict(sharded, partial)
    missing, unexpected = load_full_state_dict(sharded, partial, strict=False)
    assert unexpected == ["other"]
    assert "embed.weight" in missing
    assert full_state_dict(sharded)["scale"] == 7
    with pytest.raises(CheckpointError, match=r"'scale' has shape \(\), got \(2,\)"):
        load_full_state_dict(sharded, {"scale": torch.zeros(2)}, strict=False)


def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for, a device or a file of any size read for ever."""
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "manifest.json")
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "manifest.json").symlink_to("/dev/zero")
    (tmp_path / "long").mkdir()
    with (tmp_path / "long" / "manifest.json").open("wb") as file:
        file.truncate(2**40)  # takes no room
    for name in ("pipe", "device", "long"):
        problem = verify_checkpoint(tmp_path / name).problems[0]
        assert ("bytes, expected at most" if name == "long" else "expected a regular file") in problem
    with (tmp_path / "long" / "manifest.json").open("wb") as file:
        file.truncate(2**30)
    tracemalloc.start()
    assert "is not a fullshard manifest" in verify_checkpoint(tmp_path / "long").problems[0]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("shape", [[2] * 65, [2**31, 2**32], [10**4000]])
def test_a_manifest_with_sizes_that_no_tensor_has_is_refused(tmp_path: Path, shape: list[int]) -> None:
    save_checkpoint(tmp_path / "a", model=nn.Linear(2, 2))
    fields = json.loads(read_manifest(tmp_path / "a").model_dump_json())
    fields["parameters"]["weight"]["shape"] = shape
    body = json.dumps(fields).encode()
    data = f'{{"crc32c":"{google_crc32c.value(body):08x}","manifest":'.encode() + body + b"}\n"
    (tmp_path / "a" / "manifest.json").write_bytes(data)
    (problem,) = verify_checkpoint(tmp_path / "a").problems
    assert "does not follow the schema" in problem or "does not contain valid JSON" in problem
    assert len(problem) < 1000


def test_another_number_of_objects_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", model=_sharded(), objects=[Counting(1)])
    model = _sharded(seed=1)
    before = full_state_dict(model)
    with pytest.raises(CheckpointError, match="got 2 objects to load, but 1 were saved"):
        load_checkpoint(tmp_path / "a", model=model, objects=[Counting(0), Counting(0)])
    after = full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_no_tensor_is_refused_by_name() -> None:
    model = _sharded()
    state = full_state_dict(model) | {"embed.weight": [1.0]}
    with pytest.raises(CheckpointError, match=r"'embed\.weight' must be a tensor, got a list"):
        load_full_state_dict(model, state)


def test_a_sharded_tensor_belongs_to_a_model() -> None:
    model = _sharded()
    torchs_own = distribute_tensor(torch.ones(2), cast(DTensor, model.embed.weight).device_mesh)
    for tensor in (model.embed.weight, torchs_own):
        with pytest.raises(CheckpointError, match="extra/p is a sharded tensor, and this rank holds only a part"):
            save_checkpoint("unused", model=model, extra={"p": tensor})
    assert not Path("unused").exists()


def test_checkpoints_that_were_moved_behind_links(tmp_path: Path) -> None:
    """Removing one removes the link; saving goes on."""
    model, run, big = _sharded(), tmp_path / "run", tmp_path / "big"
    run.mkdir()
    for number in (1, 2):
        save_checkpoint(big / f"step-{number}", model=model)
        (run / f"step-{number}").symlink_to(big / f"step-{number}")
    save_checkpoint(run / "step-2", model=model, overwrite=True)
    save_checkpoint(run / "step-3", model=model, total_limit=1)
    save_checkpoint(run / "step-4", model=model, total_limit=1)
    assert [path.name for path in run.glob("*step-*[0-9]")] == ["step-4"]
    assert [verify_checkpoint(big / f"step-{number}").is_valid for number in (1, 2)] == [True, True]
