"""Read a job's hosts from Slurm's variables: `srun --ntasks-per-node=1 fullshard launch script.py` needs no flags."""

import re
from collections.abc import Mapping

from fullshard.config.dialect import Note, Reading, Setting, Status
from fullshard.config.origin import Origin
from fullshard.core.errors import ConfigError, plural

_FIRST_PORT, _PORTS = 20000, 10000


def read_allocation(environ: Mapping[str, str]) -> Reading:
    """Return the settings that a Slurm allocation determines.

    These are the hosts, this host's rank, the rendezvous address and the number of processes. Outside a Slurm
    allocation, the reading is empty.

    Raises:
        ConfigError: the allocation has several hosts, but not exactly one task was started on each.
    """
    if "SLURM_JOB_ID" not in environ:
        return Reading()
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if in_step else ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    variable, hosts = _number(environ, *names, default=1)
    _, tasks = _number(environ, *(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if in_step else ()), default=1)
    if tasks > hosts:
        raise ConfigError(
            f"$SLURM_NTASKS: srun started {plural(tasks, 'task')} on {plural(hosts, 'host')}, but each task would "
            "start a process per device",
            hint="use `srun --ntasks-per-node=1` to start one task per host",
        )
    if hosts == 1:
        return Reading()
    if not in_step or tasks < hosts:
        raise ConfigError(
            f"${variable}: the allocation has {plural(hosts, 'host')}, but the launcher was started on "
            f"{tasks if in_step else 1} of them",
            hint="start it with `srun --ntasks-per-node=1`, or use `--num_machines 1` to use only this host",
        )
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    rank_variable, rank = _number(environ, "SLURM_PROCID", "SLURM_NODEID", default=0)
    job = environ["SLURM_JOB_ID"]
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    found = {
        "launch.num_machines": (variable, hosts),
        "launch.machine_rank": (rank_variable, rank),
        "launch.main_process_ip": (nodes, first_host(environ.get(nodes, ""))),
        # Two jobs may share a host, so derive the port from the job's number.
        "launch.main_process_port": ("SLURM_JOB_ID", _FIRST_PORT + int(re.sub(r"\D", "", job) or 0) % _PORTS),
        "launch.rdzv_id": ("SLURM_JOB_ID", f"{job}.{step}"),
    }
    reading = Reading()
    for path, (name, value) in found.items():
        reading.settings.append(Setting(path, value, Origin.variable(name), name))
    text = ", ".join(f"{path.partition('.')[2]} = {value}" for path, (_, value) in found.items())
    reading.notes.append(
        Note(Origin.variable("SLURM_JOB_ID"), "the allocation", Status.TRANSLATED, f"is translated to {text}")
    )
    return reading


def devices_per_host(environ: Mapping[str, str]) -> int | None:
    """Return how many accelerators Slurm gave to this task's host, or None if Slurm does not report it."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdigit() else None


def first_host(text: str) -> str:
    """Return the first host in a list such as `gpu[01-03,7],login`."""
    first = re.match(r"((?:[^,\[\]]|\[\d+(?:[,-]\d+)*\])+)(?:,|$)", text.strip())
    if first is None:
        raise ConfigError(
            f"expected a list of hosts, got {text!r}", hint="use `scontrol show hostnames` to expand the list"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def _number(environ: Mapping[str, str], *names: str, default: int) -> tuple[str, int]:
    for name in names:
        if name in environ:
            try:
                return name, int(environ[name])
            except ValueError:
                raise ConfigError(f"${name} must be a whole number, got {environ[name]!r}") from None
    return names[-1] if names else "SLURM_JOB_ID", default
