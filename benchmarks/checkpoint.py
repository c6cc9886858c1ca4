"""Saving and loading a training state: fullshard against Accelerate and plain DCP, on ranks of this machine.

    python -m benchmarks.checkpoint --dir DIRECTORY                       # 125 million parameters
    python -m benchmarks.checkpoint --dir DIRECTORY --millions 1000 --repeats 1

Every engine saves and loads the same model with Adam's state (12 bytes per parameter), in turn in one run, each to a
directory of its own that is removed after the turn. All of them flush their files to the disk before they report
success. Files are read back while they are in the page cache. Numbers are medians over the turns; the first turn of
each engine, which pays for fresh memory, is recorded and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
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
        from fullshard.engine import shard_model

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


def _worker(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_WORLD_SIZE=str(arguments.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = round(arguments.millions * 10**6 / _WIDTH**2)
    measured = {name: Measured() for name in arguments.engines}
    for turn in range(arguments.repeats + 1):
        for name in arguments.engines:
            # One engine at a time has its state in memory, so that a billion parameters fit.
            engine = _CLASSES[name](layers)
            _measure(engine, Path(arguments.dir) / f"{name}-{turn}", measured[name])
            del engine
            if rank == 0:
                print(name, {key: round(seconds[-1], 3) for key, seconds in measured[name].seconds.items()}, flush=True)
    if rank == 0:
        _record(arguments, layers, measured)
    dist.destroy_process_group()


def _measure(engine: _Engine, path: Path, into: Measured) -> None:
    def note(what: str, seconds: float) -> None:
        into.seconds.setdefault(what, []).append(seconds)

    engine.save(path)  # memory and imports that only the first save pays for
    _remove(path)
    note("save", _timed(lambda: engine.save(path)))
    into.nbytes_on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds, peak = _peak_nbytes(lambda: engine.load(path))
    note("load", seconds)
    into.load_peak_nbytes.append(peak)
    _remove(path)
    if isinstance(engine, _Fullshard):
        for what in ("async first blocks", "async blocks"):
            dist.barrier()
            began = time.perf_counter()
            engine.saver.save(path, model=engine.model, optimizer=engine.optimizer)
            note(what, time.perf_counter() - began)
            engine.saver.wait()
            _remove(path)


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def _record(arguments: argparse.Namespace, layers: int, measured: dict[str, Measured]) -> None:
    numel = layers * _WIDTH**2
    medians = {
        name: {what: statistics.median(seconds[1:] or seconds) for what, seconds in one.seconds.items()}
        for name, one in measured.items()
    }
    record: dict[str, Any] = {
        "numel": numel,
        "state_nbytes": 12 * numel,
        "largest_tensor_nbytes": 4 * _WIDTH**2,
        "ranks": arguments.ranks,
        "repeats": arguments.repeats,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "medians": medians,
        "measured": {name: asdict(one) for name, one in measured.items()},
    }
    if "fullshard" in medians:
        record["async_share_of_save"] = medians["fullshard"]["async blocks"] / medians["fullshard"]["save"]
    everything = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    everything[f"{numel / 1e6:.0f}M"] = record
    arguments.output.write_text(json.dumps(everything, indent=1) + "\n")
    print(json.dumps({"medians": medians, "share": record.get("async_share_of_save")}, indent=1))


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, type=Path, help="directory on the disk to be measured")
    parser.add_argument("--millions", type=float, default=125, help="parameters, in millions")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, after one that does not")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoint.json", help="record to add to")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(_worker, args=(arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
