"""Saving and loading a training state: fullshard against Accelerate and plain DCP, on ranks of this machine.

    python -m benchmarks.checkpoint --dir DIRECTORY                       # 125 million parameters
    python -m benchmarks.checkpoint --dir DIRECTORY --millions 1000 --repeats 1 --checksum-repeats 0 --without-async

Every engine saves and loads the same model with Adam's state (12 bytes per parameter), in turn in one run and each time
in fresh processes, to a directory that is removed after the turn. All of them flush their files to the disk before they
report success. Each saves once before it is measured. Files are read back while they are in the page cache. Numbers are
medians over the turns.

A save in the background is measured by how long training stands still, in the call. *First* is the first save of a
process, which touches its memory for the first time. Shares are medians over the turns of what a turn's own save took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.record import RESULTS

ENGINES = ("fullshard", "dcp", "accelerate")
_WIDTH = 2236  # 25 matrices of this width are 125 million parameters
_SAVES = ("first", "later", "later", "later")


@dataclass(slots=True)
class Measured:
    """What one engine took.

    Attributes:
        seconds: of every turn, by what was done.
        load_peak_nbytes: how far rank 0's memory rose while it loaded into a model and an optimizer that were there.
        nbytes_on_disk: of one checkpoint.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    load_peak_nbytes: list[int] = field(default_factory=list)
    nbytes_on_disk: int = 0

    def note(self, what: str, seconds: float) -> None:
        """Add one measurement."""
        self.seconds.setdefault(what, []).append(seconds)

    def add(self, turn: Measured) -> None:
        """Add all of another turn."""
        for what, seconds in turn.seconds.items():
            self.seconds.setdefault(what, []).extend(seconds)
        self.load_peak_nbytes += turn.load_peak_nbytes
        self.nbytes_on_disk = turn.nbytes_on_disk or self.nbytes_on_disk


_COMMAND = """
import atexit, pathlib
from fullshard.cli.main import main
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: print(next(line for line in status.read_text().splitlines() if "VmHWM" in line)))
main()
"""
"""`fullshard`, which says at its end how much memory it had at most. What the kernel tells a parent begins with the
parent's own."""


class _Engine:
    """A sharded model with an optimizer that has made a step."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self.optimizer: torch.optim.Optimizer
        self.shard()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shard(self) -> None:
        """Shard the model and make the optimizer."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Save everything and return when it is on the disk."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Load it into the same objects."""
        raise NotImplementedError


class _Fullshard(_Engine):
    def shard(self) -> None:
        from fullshard.checkpoint import AsyncSaver
        from fullshard.features import shard_model

        shard_model(self.model, unit_modules=list(self.model.children()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.saver = AsyncSaver()

    def save(self, path: Path) -> None:
        from fullshard.checkpoint import save_checkpoint

        save_checkpoint(path, model=self.model, optimizer=self.optimizer)

    def load(self, path: Path) -> None:
        from fullshard.checkpoint import load_checkpoint

        load_checkpoint(path, model=self.model, optimizer=self.optimizer)


class _Dcp(_Engine):
    def shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in self.model.children():
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class _Accelerate(_Dcp):
    """Accelerate's own functions on FSDP2; on processors it does not shard by itself, so its state is told to."""

    def shard(self) -> None:
        import accelerate

        super().shard()
        self.plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
        )
        self.accelerator = accelerate.Accelerator(cpu=True)
        state: Any = self.accelerator.state
        state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, self.plugin

    def save(self, path: Path) -> None:
        from accelerate.utils import fsdp_utils

        fsdp_utils.save_fsdp_model(self.plugin, self.accelerator, self.model, str(path))
        fsdp_utils.save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(path))

    def load(self, path: Path) -> None:
        from accelerate.utils import fsdp_utils

        fsdp_utils.load_fsdp_model(self.plugin, self.accelerator, self.model, str(path))
        fsdp_utils.load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(path))


_CLASSES: dict[str, type[_Engine]] = {"fullshard": _Fullshard, "dcp": _Dcp, "accelerate": _Accelerate}


def _timed(do: Callable[[], object]) -> float:
    """Seconds until all ranks are through."""
    dist.barrier()
    began = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - began


def _peak_nbytes(do: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and how far this rank's resident memory rose above what it was before."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    seconds = _timed(do)
    return seconds, status("VmHWM") - before


def _worker(rank: int, arguments: argparse.Namespace, what: str, port: int, output: Path) -> None:
    """One engine's turn, or the measurement of the checksums, on one rank; rank 0 writes what it measured."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_WORLD_SIZE=str(arguments.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = _CLASSES["fullshard" if what == "checksums" else what](_layers(arguments))
    path = Path(arguments.dir) / what
    engine.save(path)  # memory and imports that only the first save pays for
    _remove(path)
    into = Measured()
    if what == "checksums":
        _compare_checksums(engine, path, into, arguments.checksum_repeats)
    else:
        _measure(engine, path, into)
        if isinstance(engine, _Fullshard) and not arguments.without_async:
            _measure_async(engine, path, into)
    if rank == 0:
        output.write_text(json.dumps(asdict(into)))
    dist.destroy_process_group()


def _measure(engine: _Engine, path: Path, into: Measured) -> None:
    into.note("save", _timed(lambda: engine.save(path)))
    into.nbytes_on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds, peak = _peak_nbytes(lambda: engine.load(path))
    into.note("load", seconds)
    into.load_peak_nbytes.append(peak)
    _remove(path)


def _measure_async(engine: _Fullshard, path: Path, into: Measured) -> None:
    """What training waits for."""
    for kind in _SAVES:
        time.sleep(0.5)  # the disk is quiet again
        dist.barrier()
        began = time.perf_counter()
        engine.saver.save(path, model=engine.model, optimizer=engine.optimizer)
        into.note(f"async save, {kind}", time.perf_counter() - began)
        engine.saver.wait()
        _remove(path)


def _compare_checksums(engine: _Engine, path: Path, into: Measured, repeats: int) -> None:
    """The same save with and without its checksums, in turn."""
    from fullshard.checkpoint import tensor_file

    class Absent:
        extend = staticmethod(lambda crc, data: crc)

    real: Any = tensor_file.google_crc32c
    for turn in range(2 * repeats):
        is_with = turn % 2 == 0
        tensor_file.google_crc32c = real if is_with else Absent
        into.note("with checksums" if is_with else "without checksums", _timed(lambda: engine.save(path)))
        _remove(path)
    tensor_file.google_crc32c = real


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def _offline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of the whole process of `fullshard ckpt`, beside the largest file it wrote."""
    from fullshard.checkpoint import save_checkpoint

    root, base = Path(arguments.dir), Path(arguments.dir) / "config"
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_layers(arguments))]
    save_checkpoint(root / "kept", model=nn.Sequential(*layers))
    del layers
    base.mkdir()
    (base / "config.json").write_text("{}")
    found = {}
    for name, words in {
        "inspect": ["inspect", root / "kept"],
        "consolidate": ["export", root / "kept", root / "out", "--to", "safetensors"],
        "export": ["export", root / "kept", root / "out", "--config-from", base],
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, "ckpt", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
        )
        out = root / "out"
        largest = max((file.stat().st_size for file in out.iterdir()), default=0) if out.is_dir() else 0
        found[name] = {"peak_nbytes": int(done.stdout.split()[-2]) * 1024, "largest_file_nbytes": largest}
        shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(root / "kept")
    shutil.rmtree(base)
    return found


def _layers(arguments: argparse.Namespace) -> int:
    millions: float = arguments.millions
    return round(millions * 10**6 / _WIDTH**2)


def _key(arguments: argparse.Namespace) -> str:
    """Under which name the result is recorded."""
    return f"{_layers(arguments) * _WIDTH**2 / 1e6:.0f}M"


def _earlier(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record that turns are added to, if there is one and that is wanted."""
    everything = json.loads(arguments.output.read_text()) if arguments.add and arguments.output.exists() else {}
    found: dict[str, Any] = everything.get(_key(arguments), {})
    return found


def _record(arguments: argparse.Namespace, measured: dict[str, Measured], offline: dict[str, Any]) -> None:
    numel = _layers(arguments) * _WIDTH**2
    medians = {
        name: {what: statistics.median(seconds) for what, seconds in one.seconds.items()}
        for name, one in measured.items()
    }
    record: dict[str, Any] = {
        "numel": numel,
        "state_nbytes": 12 * numel,
        "largest_tensor_nbytes": 4 * _WIDTH**2,
        "ranks": arguments.ranks,
        "repeats": {name: len(one.seconds.get("save", ())) for name, one in measured.items() if name in ENGINES},
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "medians": medians,
        "measured": {name: asdict(one) for name, one in measured.items()},
        "offline": offline,
    }
    ours = medians.get("fullshard", {})
    for kind in dict.fromkeys(_SAVES):
        if f"async save, {kind}" in ours:
            record[f"async share of save, {kind}"] = _share(measured["fullshard"].seconds, kind)
    if "checksums" in medians:
        with_, without = (medians["checksums"][f"{word} checksums"] for word in ("with", "without"))
        record["checksum_share_of_save"] = 1 - without / with_
    everything = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    everything[_key(arguments)] = record
    arguments.output.write_text(json.dumps(everything, indent=1) + "\n")
    shown = {key: value for key, value in record.items() if key != "measured"}
    print(json.dumps(shown, indent=1))


def _share(seconds: dict[str, list[float]], kind: str) -> float:
    """How much of a save that waits training waits for one in the background, the median over the turns."""
    saves, calls = seconds["save"], seconds[f"async save, {kind}"]
    each = len(calls) // len(saves)
    blocked = [statistics.median(calls[i : i + each]) for i in range(0, len(calls), each)]
    return statistics.median(one / save for one, save in zip(blocked, saves, strict=True))


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, type=Path, help="directory on the disk to be measured")
    parser.add_argument("--millions", type=float, default=125, help="parameters, in millions")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine")
    parser.add_argument("--checksum-repeats", type=int, default=6, help="saves with and without checksums; 0: none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--without-async", action="store_true", help="leave out what needs the state in memory twice")
    parser.add_argument("--add", action="store_true", help="add turns to those in the record")
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoint.json", help="record to add to")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    output = arguments.dir / "measured.json"
    turns = [name for _ in range(arguments.repeats) for name in arguments.engines]
    earlier = _earlier(arguments)
    measured = {name: Measured(**one) for name, one in earlier.get("measured", {}).items()}
    for what in [*turns, *(["checksums"] if arguments.checksum_repeats else [])]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        mp.spawn(_worker, args=(arguments, what, port, output), nprocs=arguments.ranks)
        turn = Measured(**json.loads(output.read_text()))
        print(what, {key: [round(s, 3) for s in seconds] for key, seconds in turn.seconds.items()}, flush=True)
        measured.setdefault(what, Measured()).add(turn)
    output.unlink()
    _record(arguments, measured, earlier.get("offline") or _offline(arguments))


if __name__ == "__main__":
    main()
