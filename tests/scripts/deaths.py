"""Ranks that save in a loop and are killed at random moments; afterwards everything that is accepted is checked.

    deaths.py DIRECTORY COUNT SEED

One process imports torch and forks the ranks of every trial, which takes milliseconds instead of seconds. The state
is a function of the step, so that whoever finds a checkpoint can tell what has to be in it. The last line of the output
counts what happened, as JSON; anything unexpected is an exception.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import AsyncSaver, latest_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.core.errors import CheckpointError
from fullshard.features import ShardedParameter, ShardedTensor, shard_model

WORLD_SIZE = 2
KEEP = 3
PATIENCE_SECONDS = 20.0


def _job(*, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(61, 83), nn.Linear(83, 61), nn.Linear(61, 7, bias=False))
    if sharded:
        shard_model(model, unit_modules=[model[0]])
    return model, torch.optim.AdamW(model.parameters())


def _values(start: int, stop: int, step: int, salt: int) -> torch.Tensor:
    """What elements [start, stop) of a tensor are at a step: exact in fp32, and no two steps alike."""
    return ((torch.arange(start, stop) * 31 + step * 1009 + salt * 7) % 65521).float()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, int, int]]:
    """Every local tensor with its first element's place in the whole, and a number of its own."""
    found = []
    for number, parameter in enumerate(model.parameters()):
        start = parameter.interval.start if isinstance(parameter, ShardedParameter) else 0
        found.append((_local(parameter), start, 3 * number))
        state = optimizer.state[parameter]
        found += [
            (_local(state[key]), start, 3 * number + i) for i, key in enumerate(("exp_avg", "exp_avg_sq"), start=1)
        ]
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach()


def _check(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint and compare all of it with what its step says."""
    step: int = load_checkpoint(path, model=model, optimizer=optimizer)["step"]
    assert path.name == f"step-{step:06d}", (path, step)
    for tensor, start, salt in _tensors(model, optimizer):
        expected = _values(start, start + tensor.numel(), step, salt)
        assert torch.equal(tensor.reshape(-1), expected), (path, step, salt)
    return step


def _rank(rank: int, root: Path, store: Path, report: int) -> None:
    """Resume from the newest checkpoint, and save one step after the other until killed."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=10)
    )
    model, optimizer = _job(sharded=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = [latest_checkpoint(root) if rank == 0 else None]
    dist.broadcast_object_list(found)
    step = 0 if found[0] is None else _check(found[0], model, optimizer)
    saver = AsyncSaver() if int(store.name) % 2 else None

    def say(what: str) -> None:
        if rank == 0:
            os.write(report, f"{what} {step}\n".encode())

    while True:
        step += 1
        for tensor, start, salt in _tensors(model, optimizer):
            tensor.copy_(_values(start, start + tensor.numel(), step, salt).view(tensor.shape))
        say("begin")
        save = save_checkpoint if saver is None else saver.save
        save(root / f"step-{step:06d}", model=model, optimizer=optimizer, extra={"step": step}, total_limit=KEEP)
        if saver is not None:
            optimizer.step()  # what training does meanwhile
            for tensor, _, _ in _tensors(model, optimizer):
                tensor.zero_()
            saver.wait()
        say("done")


def _fork(rank: int, root: Path, store: Path, report: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _rank(rank, root, store, report)
    except CheckpointError:
        os._exit(3)  # what a survivor is to get
    except BaseException:
        traceback.print_exc()
    os._exit(4)


def _wait(child: int) -> int:
    """The exit code of a rank that is dead or to learn soon that another one is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a survivor did not notice in time that the other rank was killed")


def _trial(root: Path, store: Path, chance: random.Random, pause: float) -> tuple[int, bool, float]:
    """Start the ranks, kill in one of their first saves; the last step known to be saved, whether a save was cut, and
    the duration of the last save seen whole."""
    read, write = os.pipe()
    children = [_fork(rank, root, store, write) for rank in range(WORLD_SIZE)]
    os.close(write)
    target = chance.randint(2, 4)
    lines, began, seconds = os.fdopen(read), time.monotonic(), pause
    last, done, begun = "", 0, 0
    for line in iter(lines.readline, ""):
        last, step = line.split()[0], int(line.split()[1])
        if last == "done":
            done, seconds = step, time.monotonic() - began
            continue
        began, begun = time.monotonic(), begun + 1
        if begun == target:
            break
    assert begun == target, "the ranks ended before they were killed"
    time.sleep(chance.uniform(0, 1.3 * seconds))
    victims = chance.choice([children, children[:1], children[1:]])
    for child in victims:
        os.kill(child, signal.SIGKILL)
    codes = {child: _wait(child) for child in children}
    for child, code in codes.items():
        assert code in ((-signal.SIGKILL,) if child in victims else (3,)), (codes, victims)
    for line in lines:  # what was saved before the ranks were gone
        last, step = line.split()[0], int(line.split()[1])
        done = step if last == "done" else done
    return done, last == "begin", seconds


def main(root: Path, count: int, seed: int) -> None:
    """Kill `count` times."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    model, optimizer = _job(sharded=False)
    counts: Counter[str] = Counter()
    stores, root = root / "stores", root / "checkpoints"
    stores.mkdir(parents=True)
    saved, seconds = 0, 0.05
    for trial in range(count):
        done, was_cut, seconds = _trial(root, stores / str(trial), chance, seconds)
        saved = max(saved, done)
        accepted = {}
        for directory in sorted(root.iterdir()):
            if directory.is_dir() and not directory.name.startswith(".tmp-") and verify_checkpoint(directory).is_valid:
                accepted[_check(directory, model, optimizer)] = directory
            else:
                assert directory.name == ".lease.json" or directory.name.startswith(".tmp-"), directory
        assert saved in accepted, (trial, saved, sorted(accepted))
        newest = latest_checkpoint(root, thorough=True)
        assert newest == accepted[max(accepted)], (trial, newest, accepted)
        counts["deaths"] += 1
        counts["in the middle of a save"] += was_cut
        counts["committed nevertheless"] += max(accepted) > saved
        counts["checkpoints accepted and compared"] += len(accepted)
        saved = max(accepted)
        left = [path.name for path in root.iterdir() if path.name.startswith(".tmp-")]
        counts["temporary directories left"] += len(left)
        assert len(left) <= 2, left  # the next save removes those of the one before
    print(json.dumps({**counts, "steps": saved}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
