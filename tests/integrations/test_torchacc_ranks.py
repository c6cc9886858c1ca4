"""`fullshard.torchacc` on two and four real ranks: the example, its checkpoint, shard groups, saving, float16.

pytest tests/integrations/test_torchacc_ranks.py
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard.torchacc as torchacc
from fullshard.core.errors import CheckpointError, CommunicationError, ConfigError
from fullshard.features import describe
from tests.differential import TOLERANCE
from tests.distributed import end_workers, run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torchacc_gpt2.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("torchacc_gpt2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(*words: str) -> dict[str, Any]:
    """The example on this rank, with what it read and the weights it began with."""
    example = _example()
    seen: list[int] = []
    read = example.Text.__getitem__

    def noting(self: Any, index: int) -> Any:
        seen.append(index)
        return read(self, index)

    example.Text.__getitem__ = noting
    started: list[float] = []
    accelerate = torchacc.accelerate

    def spoiled(model: nn.Module, loader: Any, config: Any) -> Any:
        # Without a seed every rank would draw weights of its own; rank 0's must win.
        if torchacc.dist.rank() > 0:
            torch.nn.init.normal_(next(model.parameters()))
        model, loader = accelerate(model, loader, config)
        started.extend(float(value.full_tensor().sum()) for value in model.state_dict().values())
        return model, loader

    example.torchacc.accelerate = spoiled
    try:
        losses = example.train(example.parse(words))
    finally:
        example.torchacc.accelerate = accelerate
    return {"losses": losses, "seen": seen, "started": started}


SMALL = ("--fp32", "--pieces", "64", "--length", "32", "--schedule", "40")


@pytest.mark.full
def test_the_example_divides_the_data_and_gives_the_losses_of_one_process() -> None:
    ranks = run_ranks(_train, 2, *SMALL, "--batch-size", "4", "--steps", "16")
    [alone] = run_ranks(_train, 1, *SMALL, "--batch-size", "8", "--steps", "16")
    assert ranks[0]["started"] == ranks[1]["started"]
    # Two epochs of 8 steps: in each, every piece is read once, by one rank.
    for epoch in (slice(0, 32), slice(32, 64)):
        assert sorted(ranks[0]["seen"][epoch] + ranks[1]["seen"][epoch]) == list(range(64))
    means = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert means[-1] < means[0] - 1
    assert ranks[0]["losses"] != ranks[1]["losses"], "each rank has data of its own"


@pytest.mark.full
def test_a_resumed_run_gives_the_same_losses_bit_for_bit(tmp_path: Path) -> None:
    options = (*SMALL, "--batch-size", "4")
    whole = run_ranks(_train, 2, *options, "--steps", "12")
    first = run_ranks(_train, 2, *options, "--steps", "5", "--save", str(tmp_path))
    end_workers()  # the second half runs in new processes
    second = run_ranks(_train, 2, *options, "--steps", "7", "--load", str(tmp_path))
    for rank in range(2):
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["rank-0-of-2.pth", "rank-1-of-2.pth"]
    assert set(torch.load(tmp_path / "consolidated.pth")) == {"model"}


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    whole = run_ranks(_train, 2, *SMALL, "--batch-size", "4", "--steps", "8")
    run_ranks(_train, 2, *SMALL, "--batch-size", "4", "--steps", "5", "--save", str(tmp_path))
    [alone] = run_ranks(_train, 1, *SMALL, "--batch-size", "8", "--steps", "3", "--load", str(tmp_path))
    means = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in whole), strict=True)]
    assert alone["losses"] == pytest.approx(means[5:], rel=TOLERANCE)


@pytest.mark.full
def test_the_example_runs_under_torchrun() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(EXAMPLE), "--steps", "20", "--schedule", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss: (\d+\.\d+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.6
    assert "GPT2LMHeadModel: sharded over 2 ranks (FULL_SHARD, 1 x 2)" in done.stderr
    assert "/128" in done.stderr, "tqdm shows the length of this rank's loader"


# -- a script as published   -------------------------------------------------------------------------------


class Growing(nn.Module):
    """Scales by a parameter and by a buffer that counts the calls."""

    calls: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(self.training)
        return x * self.scale * (1 + self.calls / 8)


def _published_loop(directory: str) -> dict[str, Any]:
    """The loop and the checkpoint as TorchAcc's documentation writes them, autocast for CUDA included."""
    os.chdir(directory)
    model: Any = nn.Sequential(nn.Linear(8, 8), Growing(8), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    config = torchacc.Config()
    config.compute.bf16 = True
    config.dist.fsdp.size = 2
    config.dist.fsdp.wrap_layer_cls = {"Linear"}
    model, loader = torchacc.accelerate(model, DataLoader(TensorDataset(x), batch_size=2), config)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)

    def losses(steps: int) -> list[float]:
        result = []
        model.train()
        for (batch,) in itertools.islice(loader, steps):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, on a machine without CUDA
                with torch.cuda.amp.autocast(dtype=torch.bfloat16):
                    loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            result.append(loss.item())
        return result

    losses(3)
    torchacc.dist.rendezvous("saving_model")
    torchacc.dist.mark_step()
    torchacc.save(
        {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}, "ckpt.pth", master_only=False
    )
    torchacc.dist.rendezvous("saving_optimizer_states")
    torchacc.save(optimizer.state_dict(), "optimizer.pth")
    torchacc.save(scheduler.state_dict(), "scheduler.pth")
    expected = losses(3)

    if torchacc.dist.is_master_ordinal(local=False):
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints("ckpt.pth", "_rank-*-of-*.pth")
    torchacc.dist.rendezvous("ckpt_consolidation")
    model.load_state_dict(torch.load("consolidated.pth")["model"])
    optimizer.load_state_dict(torch.load("optimizer.pth"))
    scheduler.load_state_dict(torch.load("scheduler.pth"))
    again = losses(3)
    return {"expected": expected, "again": again, "names": sorted(path.name for path in Path().iterdir())}


def test_the_published_loop_and_checkpoint(tmp_path: Path) -> None:
    for result in run_ranks(_published_loop, 2, str(tmp_path)):
        assert result["again"] == result["expected"]
        assert len(result["again"]) == 3
    names = ["ckpt_rank-0-of-2.pth", "ckpt_rank-1-of-2.pth", "consolidated.pth", "optimizer.pth", "scheduler.pth"]
    assert result["names"] == names


# -- shard groups -----------------------------------------------------------------------------------------------


def _groups(size: int) -> list[Any]:
    config = torchacc.Config.of({"dist": {"fsdp": {"size": size, "wrap_layer_cls": ["Linear"]}}})
    torch.manual_seed(0)
    model = torchacc.accelerate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config=config)
    model(torch.full((1, 4), float(torchacc.dist.rank()))).sum().backward()
    sharding = describe(model)
    return [sharding.replicate_size, sharding.shard_size, float(model.clip_grad_norm_(1e9))]


def test_sizes_are_shard_groups_and_replicas() -> None:
    results = {size: run_ranks(_groups, 4, size) for size in (1, 2, 4)}
    assert [results[size][0][:2] for size in (1, 2, 4)] == [[4, 1], [2, 2], [1, 4]]
    norms = [result[2] for ranks in results.values() for result in ranks]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=TOLERANCE), "the same gradient however it is sharded"
    assert norms[0] > 0


def _wrong_size() -> str:
    try:
        torchacc.accelerate(nn.Linear(2, 2), config={"dist": {"fsdp": {"size": 3}}})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_size_that_does_not_divide_the_world() -> None:
    for message in run_ranks(_wrong_size, 2):
        assert message.startswith("config.dist.fsdp: dist.fsdp.size = 3 does not divide the world size of 2")
        assert "use one of 1, 2" in message


# -- saving -----------------------------------------------------------------------------------------------------


def _trained() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    config = torchacc.Config.of({"dist": {"fsdp": {"size": 2}}})
    model = torchacc.accelerate(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3) * (1 + torchacc.dist.rank())).sum().backward()
    optimizer.step()
    return model, optimizer


def _saves(directory: str) -> dict[str, Any]:
    model, optimizer = _trained()
    path = Path(directory)
    torchacc.save({"model": model.state_dict(), "all": [optimizer.state_dict()]}, path / "whole.pth")
    whole = torch.load(path / "whole.pth")
    shapes = {name: tuple(value.shape) for name, value in whole["model"].items()}
    moments = [tuple(state["exp_avg"].shape) for state in whole["all"][0]["state"].values()]

    restored = torch.optim.AdamW(model.parameters(), lr=0.1)
    restored.load_state_dict(whole["all"][0])
    same = all(
        torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
        for a, b in zip(optimizer.state.values(), restored.state.values(), strict=True)
    )
    torchacc.save(restored.state_dict(), path / "loaded.pth")  # never stepped
    loaded = torch.load(path / "loaded.pth")["state"]
    same = same and all(torch.equal(loaded[i]["exp_avg"], s["exp_avg"]) for i, s in whole["all"][0]["state"].items())

    full = model.full_optim_state_dict(optimizer)
    sent = model.optim_state_dict_to_load(restored, full)
    restored.load_state_dict(sent)
    problems = []
    torchacc.save(copy.deepcopy(optimizer.state_dict()), path / "copy.pth")  # its tensors know whose slices they are
    again = torch.load(path / "copy.pth")["state"]
    same = same and all(torch.equal(again[i]["exp_avg"], s["exp_avg"]) for i, s in whole["all"][0]["state"].items())
    torchacc.save(whole["all"][0], path / "plain.pth")  # whole already
    again = torch.load(path / "plain.pth")["state"]
    same = same and all(torch.equal(again[i]["exp_avg"], s["exp_avg"]) for i, s in whole["all"][0]["state"].items())
    torchacc.dist.rendezvous("saved")
    other = optimizer.state_dict()
    if torchacc.dist.rank() == 1:
        other["state"].pop(0)
    for value, target, options in (
        (other, "other.pth", {}),
        (1, "", {}),
        ({"model": model.state_dict()}, "blocked/x.pth", {"master_only": False}),
        ((lambda: 0) if torchacc.dist.rank() else 0, "one.pth", {"master_only": False}),
    ):
        (path / "blocked").touch()
        try:
            torchacc.save(value, path / target, **options)
        except CheckpointError as error:
            problems.append(str(error))
    rank = torchacc.dist.rank()
    torchacc.save({"rank": rank}, path / f"mine-{rank}.pth", master_only=False)
    return {
        "shapes": shapes, "moments": moments, "same": same, "problems": problems, "kept": len(full.get("state", {})),
        "mine": torch.load(path / f"mine-{rank}.pth")["rank"],
    }  # fmt: skip


def test_what_rank_0_saves_is_whole(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_saves, 2, str(tmp_path))):
        assert result["shapes"] == {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (1, 5), "1.bias": (1,)}
        assert result["moments"] == [(5, 3), (5,), (1, 5), (1,)]
        assert result["same"]
        assert result["kept"] == (4 if rank == 0 else 0)
        assert result["mine"] == rank
        other, directory, blocked, one = result["problems"]
        assert "state for different parameters" in other
        assert "Is a directory" in directory
        assert "rank 0: cannot write" in blocked
        assert "rank 1: cannot write" in blocked
        assert "\nrank 1: " in one and "pickle" in one and "rank 0" not in one


def _shards(directory: str) -> None:
    model, _ = _trained()
    checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torchacc.save(checkpoint, directory, master_only=False)


def test_consolidation_refuses_what_is_not_one_save(tmp_path: Path) -> None:
    run_ranks(_shards, 2, str(tmp_path))
    consolidate = torchacc.dist.fsdp.consolidate_sharded_model_checkpoints
    target = tmp_path / "out.pth"
    whole, path = consolidate(tmp_path, "*.pth", target)
    assert (path, set(whole)) == (str(target), {"0.weight", "0.bias", "1.weight", "1.bias"})
    assert consolidate(tmp_path, "*.pth", target)[0].keys() == whole.keys(), "its own output is no rank's file"

    one, two = tmp_path / "rank-0-of-2.pth", tmp_path / "rank-1-of-2.pth"
    content = two.read_bytes()
    two.unlink()
    with pytest.raises(CheckpointError, match="files of ranks 0 of 2; expected every rank"):
        consolidate(tmp_path)
    two.write_bytes(one.read_bytes())
    with pytest.raises(CheckpointError, match="files of ranks 0 of 2, 0 of 2; expected"):
        consolidate(tmp_path)
    two.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"rank-1-of-2\.pth was not written by torch\.save, .* damaged"):
        consolidate(tmp_path)
    changed = torch.load(one)
    changed["shard_metadata"]["world_size"] = 4
    torch.save(changed, tmp_path / "rank-0-of-4.pth")
    two.write_bytes(content)
    with pytest.raises(CheckpointError, match="files of ranks 0 of 2, 0 of 4, 1 of 2;"):
        consolidate(tmp_path)
    short = torch.load(two)
    short["model"]["0.weight"] = short["model"]["0.weight"][:-1]
    torch.save(short, two)
    with pytest.raises(CheckpointError, match=r"0\.weight has 15 elements, but its shards"):
        consolidate(tmp_path, "*-of-2.pth")


# -- meeting, float16 -------------------------------------------------------------------------------------------


def _meeting() -> list[Any]:
    rank = torchacc.dist.rank()
    results: list[Any] = [torchacc.dist.rendezvous("a", f"from {rank}".encode(), replicas=[0, 1])]
    results.append([torchacc.dist.is_master_ordinal(), torchacc.dist.is_master_ordinal(local=False)])
    try:
        torchacc.dist.rendezvous("left" if rank else "right")
    except CommunicationError as error:
        results.append(str(error))
    return results


def test_rendezvous() -> None:
    for rank, (payloads, master, message) in enumerate(run_ranks(_meeting, 2)):
        assert payloads == [b"from 0", b"from 1"]
        assert master == [rank == 0] * 2
        assert "'left'" in message
        assert "'right'" in message


def _float16() -> list[Any]:
    torch.manual_seed(0)
    config = torchacc.Config.of({"compute": {"fp16": True}, "dist": {"fsdp": {"size": 2}}})
    model = torchacc.accelerate(nn.Linear(4, 2), config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torchacc.amp.GradScaler(init_scale=2.0**10)
    history = []
    for step in range(3):
        # An overflow on rank 1 alone, in the second step.
        factor = 1e8 if step == 1 and torchacc.dist.rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(2, 4)) * factor).float().sum()).backward()
        before = model.weight.full_tensor()
        scaler.step(optimizer)
        scaler.update()
        history.append([not torch.equal(before, model.weight.full_tensor()), scaler.get_scale()])
    return history


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for history in run_ranks(_float16, 2):
        assert history == [[True, 1024.0], [False, 512.0], [True, 512.0]]
