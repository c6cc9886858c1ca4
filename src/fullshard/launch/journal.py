"""Record a job's events in a file. The job's processes choose the file, and their launcher adds its own events."""

import contextlib
import os
from pathlib import Path

from fullshard.config.switches import LAUNCHER_PID, PREEMPTION_DIR
from fullshard.core.journal import JOURNAL, JOURNAL_NAME, TOLD, Happening
from fullshard.core.paths import local_path
from fullshard.launch.environment import read_rank_environment


def record_events(directory: str | os.PathLike[str]) -> Path:
    """Record every failure, restart, skipped step, save, load and preemption in a file in a run's directory.

    `fullshard train`, `sft`, Trainer and `Accelerator(project_dir=...)` call this function for you. A second call with
    the same directory does nothing.

    Args:
        directory: must be the same on every rank. It is created if it does not exist.

    Returns:
        The path of the file `events.jsonl`, which has one line of JSON per event (see `docs/reliability.md`).
    """
    path = local_path(directory).absolute() / JOURNAL_NAME
    if JOURNAL.path == path:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = read_rank_environment()
    JOURNAL.path, JOURNAL.rank = path, environment.rank
    told = PREEMPTION_DIR.read()
    if told and environment.local_rank == 0:
        part = Path(told) / f"{TOLD}-{os.getpid()}"
        with contextlib.suppress(OSError):  # the job may have ended
            part.write_text(str(path), encoding="utf-8")
            part.replace(Path(told) / TOLD)
    if environment.is_main:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        launcher = int(LAUNCHER_PID.read() or 0) or None
        JOURNAL.note(Happening.START, world_size=environment.world_size, attempt=attempt, launcher=launcher)
    return path
