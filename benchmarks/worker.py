"""One rank of one job: `python -m benchmarks.worker JOB_JSON RESULT_PATH`, started by `benchmarks.run`."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.catalog import BACKENDS, BARE
from benchmarks.engines import ENGINES, Engine, TrainStep
from benchmarks.models import build_batches, build_model
from benchmarks.record import JOB, RANK_RESULT, Job, Memory, RankResult

_STATUS = Path("/proc/self/status")
_SMAPS = Path("/proc/self/smaps_rollup")


def measure(job: Job) -> RankResult:
    """Runs the job on this rank and returns what it saw."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine = _import_engine(job)
    gc.collect()
    imports_nbytes = _nbytes(_STATUS, "VmRSS")
    watch = PssPeak() if job.watch_memory else None
    _reset_peak()
    rank = 0
    if job.device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    if job.engine != BARE:
        dist.init_process_group(BACKENDS[job.device])
        rank = dist.get_rank()
    batches = build_batches(job, rank)
    train_step = engine.build(build_model(job), job)
    setup_peak_nbytes = _nbytes(_STATUS, "VmHWM")
    setup_pss_peak_nbytes = watch.take() if watch is not None else 0
    _reset_peak()

    warmup_seconds, warmup_losses = _run_steps(train_step, batches, range(job.warmup))
    if job.engine != BARE:
        dist.barrier()
    step_seconds, losses = _run_steps(train_step, batches, range(job.warmup, job.warmup + job.steps))
    memory = Memory(
        imports_nbytes=imports_nbytes,
        setup_peak_nbytes=setup_peak_nbytes - imports_nbytes,
        steps_peak_nbytes=_nbytes(_STATUS, "VmHWM") - imports_nbytes,
        shared_nbytes=_nbytes(_STATUS, "RssShmem"),
        pss_nbytes=_nbytes(_SMAPS, "Pss"),
        device_peak_nbytes=torch.cuda.max_memory_allocated() if job.device == "cuda" else 0,
        setup_pss_peak_nbytes=setup_pss_peak_nbytes,
        steps_pss_peak_nbytes=watch.take() if watch is not None else 0,
    )
    if job.engine != BARE:
        dist.barrier()
        dist.destroy_process_group()
    return RankResult(
        warmup_seconds=warmup_seconds, step_seconds=step_seconds, losses=warmup_losses + losses, memory=memory
    )


class PssPeak:
    """Samples the proportional size of this process in a thread, because the kernel keeps no peak of it."""

    SECONDS = 0.01

    def __init__(self) -> None:
        self._before = self._peak = _nbytes(_SMAPS, "Pss")
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, _nbytes(_SMAPS, "Pss"))
            time.sleep(self.SECONDS)

    def take(self) -> int:
        """The peak since the last call over what was there at the beginning; it starts anew."""
        peak, self._peak = self._peak, 0
        return max(peak, _nbytes(_SMAPS, "Pss")) - self._before


def _run_steps(train_step: TrainStep, batches: list[Tensor], steps: range) -> tuple[list[float], list[float]]:
    seconds, losses = [], []
    for index in steps:
        start = time.perf_counter()
        loss = train_step(batches[index % len(batches)])
        losses.append(loss.item())  # waits for a device that runs ahead, so it belongs inside the time
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def _import_engine(job: Job) -> Engine:
    engine = ENGINES[job.engine]
    os.environ.update(engine.environment)
    importlib.import_module(engine.package)
    return engine


def _reset_peak() -> None:
    """Makes the kernel's peak of resident memory, and torch's of the accelerator's, start again from what is now."""
    Path("/proc/self/clear_refs").write_text("5")
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def _nbytes(path: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} has no field {field}: memory is measured on Linux only")
    return int(found.group(1)) * 1024


def main(job_json: str, result_path: str) -> None:
    """Writes the result as JSON; an exception is left to Python, whose last line the parent reads."""
    result = measure(JOB.validate_json(job_json))
    Path(result_path).write_bytes(RANK_RESULT.dump_json(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
