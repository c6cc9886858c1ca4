"""Determine the processes that a resolved configuration starts, on this host and on the others."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.config.dialect import Note, Reading, Setting, Status, shown
from fullshard.config.flags import CommandLine
from fullshard.config.hardware import usable_cpu_count
from fullshard.config.origin import Origin, Precedence
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.schema import SETTINGS, LaunchConfig, RunConfig
from fullshard.config.settings import plain_message
from fullshard.config.switches import TAKE, TIMEOUT
from fullshard.core.errors import ConfigError, plural
from fullshard.core.requirements import version_of
from fullshard.launch import bootstrap
from fullshard.launch.processes import check_count, worker_variables
from fullshard.launch.rendezvous_server import JOIN_SECONDS, LAST_CALL_SECONDS
from fullshard.launch.slurm import devices_per_host

DETECTED = Origin(Precedence.DEFAULT, "found on this host")

_MOST_SECONDS = 10**9


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes of a job and their settings."""

    resolved: Resolved  # with the number of processes filled in
    device: str
    per_host: int  # processes
    join_timeout: float  # seconds to wait for the other hosts
    last_call: float  # seconds to wait for more hosts than are required
    variables: dict[str, str]  # in addition to inherited ones and those that torchelastic sets
    command: tuple[str, ...]

    @property
    def launch(self) -> LaunchConfig:
        """The settings for processes, hosts, rendezvous and logs."""
        return self.resolved.config.launch

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.per_host * self.launch.num_machines

    def handed_over(self) -> RunConfig:
        """Return the configuration for the processes. On GPUs, it fixes the device, so that no process uses a CPU."""
        config = self.resolved.config
        if self.device != "cuda":
            return config
        return config.model_copy(update={"launch": config.launch.model_copy(update={"device": "cuda"})})

    def mesh(self) -> tuple[int, int]:
        """Return the number of replicas and the number of ranks per shard group."""
        sharding = self.resolved.config.sharding
        return sharding.resolved_strategy().mesh_shape(self.world_size, sharding.resolved_shard_size(self.per_host))

    def summary(self) -> str:
        """Return one line that describes how many processes start, where they start, and how they shard the model."""
        hosts = self.launch.num_machines
        fewest = f"{self.launch.min_machines} to " if self.launch.is_elastic else ""
        where = "this host" if hosts == 1 else f"{fewest}{hosts} hosts ({self.per_host} each)"
        backend = f"{self.device} ({_BACKENDS.get(self.device, self.device)})"
        replicas, shards = self.mesh()
        strategy = self.resolved.config.sharding.resolved_strategy().name
        precision = self.resolved.config.precision
        computing = " (the model's dtypes unless the script sets it)" if precision.mode == "no" else ""
        computing = f" (param_dtype {precision.param_dtype})" if precision.param_dtype else computing
        return (
            f"starting {plural(self.world_size, 'process')} on {where}, {backend}, "
            f"{strategy}: {plural(replicas, 'replica')} x {plural(shards, 'shard')}, "
            f"precision {precision.mode}{computing}"
        )


def make_plan(
    line: CommandLine, readings: Sequence[Reading], environ: Mapping[str, str], *, elsewhere: bool = False
) -> LaunchPlan:
    """Make and check the plan of a launch. `elsewhere` means that it runs on hosts whose devices are unknown."""
    said = resolve(readings)
    launch = said.config.launch
    if launch.is_elastic and elsewhere:
        raise ConfigError(
            f"--print needs a fixed number of hosts, got {launch.min_machines} to {launch.num_machines}",
            hint="set a single number of hosts",
        )
    if elsewhere and launch.device == "cuda" and launch.num_processes is not None:
        device, devices = "cuda", launch.num_processes // launch.num_machines
    else:
        device, devices = _devices(said, environ)
    per_host = min(2, usable_cpu_count()) if device == "cpu" else devices
    found = Reading(
        settings=[Setting("launch.num_processes", per_host * launch.num_machines, DETECTED, "devices")],
        notes=[*_without_effect(said, device)],
    )
    resolved = resolve([found, *readings])
    launch = resolved.config.launch
    per_host = (launch.num_processes or 1) // launch.num_machines
    if device != "cpu" and per_host > devices:
        what = "GPU" if device == "cuda" else device.upper()
        raise ConfigError(
            f"{resolved.origin('launch.num_processes')}: {per_host} processes per host need as many devices, "
            f"but this host has {plural(devices, what)}",
            hint=f"use {devices * launch.num_machines}, or --cpu",
        )
    if device == "cpu" and not elsewhere:
        check_count(per_host, f"{resolved.origin('launch.num_processes')}: ")
    if launch.num_machines > 1 and launch.main_process_ip is None and not elsewhere:
        raise ConfigError(
            f"{resolved.origin('launch.num_machines')}: {launch.num_machines} hosts need main_process_ip, which is "
            "not set",
            hint="on every host, set --main_process_ip to the address of the host with machine rank 0",
        )
    _check_every_size(resolved, per_host)
    return LaunchPlan(
        resolved,
        device,
        per_host,
        *_rendezvous_seconds(launch.rdzv_conf),
        {**worker_environment(launch, device, per_host, environ), **_taken(line)},
        (sys.executable, bootstrap.__file__, line.kind, str(line.target), *line.arguments),
    )


def _taken(line: CommandLine) -> dict[str, str]:
    """Return the variable that tells a process which names of torch to replace."""
    if (entry := line.options.get("take")) is None:
        return {}
    if entry.value not in TAKE.values:
        raise ConfigError(
            f"{entry.origin} has the invalid value {entry.value!r}", hint=f"use {' or '.join(TAKE.values)}"
        )
    if line.kind == "program":
        raise ConfigError(
            f"{entry.origin} has no effect on a program other than Python",
            hint="start Python inside the program with `python -m fullshard.take script.py`",
        )
    return {TAKE.name: str(entry.value)}


def _without_effect(said: Resolved, device: str) -> Iterator[Note]:
    """Yield a note for each of the user's settings that has no effect in combination with the other settings."""
    launch = said.config.launch
    idle = {
        "gpu_ids": device == "cpu" and "the processes run on processors",
        "main_process_ip": launch.num_machines == 1 and "there is one host",
        "rdzv_conf": launch.num_machines == 1 and "there is one host",
    }
    for name, why in idle.items():
        setting = said.settings.get(f"launch.{name}")
        if why and setting is not None and setting.value and setting.origin.precedence is not Precedence.DEFAULT:
            yield Note(setting.origin, name, Status.NO_EFFECT, f"has no effect here: {why}")


def _check_every_size(resolved: Resolved, per_host: int) -> None:
    """If hosts may join and leave, check that the model can be sharded over every possible number of hosts."""
    launch, sharding = resolved.config.launch, resolved.config.sharding
    for hosts in range(launch.min_machines or launch.num_machines, launch.num_machines):
        try:
            sharding.resolved_strategy().mesh_shape(per_host * hosts, sharding.resolved_shard_size(per_host))
        except ConfigError as error:
            raise ConfigError(
                f"{resolved.origin('launch.min_machines')}: the job cannot run on {hosts} of {launch.num_machines} "
                f"hosts: {plain_message(error)}",
                hint=error.hint,
            ) from None


_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""Backends for collectives by kind of device."""


def worker_environment(launch: LaunchConfig, device: str, per_host: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the settings define for a process."""
    variables = worker_variables(per_host, environ)
    if launch.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    if launch.gpu_ids is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpu_ids)
    if launch.timeout is not None:
        variables[TIMEOUT.name] = f"{launch.timeout:g}"
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if launch.debug:
        variables |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_SHOW_CPP_STACKTRACES": "1"}
    return variables


def shared_settings(config: RunConfig) -> dict[str, str]:
    """Return the values that must be equal on all hosts, by name: versions, and all settings outside `launch`."""
    found = {f"version of {name}": str(version_of(name)) for name in ("fullshard", "torch")}
    return found | {path: shown(config.value(path)) for path in SETTINGS if not path.startswith("launch.")}


def _devices(said: Resolved, environ: Mapping[str, str]) -> tuple[str, int]:
    launch = said.config.launch
    if launch.device == "cpu":
        return "cpu", 0
    if launch.gpu_ids is not None:
        return "cuda", len(launch.gpu_ids)
    if (count := devices_per_host(environ)) is not None:
        kind = "cuda"
    else:
        from fullshard.comm import device as devices
        from fullshard.launch.device import kind_of

        kind = kind_of(launch.device)
        count = 0 if kind == "cpu" else devices.count(kind)
    if count == 0 and launch.device == "cuda":
        raise ConfigError("device is cuda, but this host has no GPU that torch can use", hint="use --cpu")
    return (kind, count) if count else ("cpu", 0)


def _rendezvous_seconds(text: str) -> tuple[float, float]:
    """Read from torchrun's `rdzv_conf` how many seconds to wait for the required hosts, and for additional ones."""
    seconds = {"join_timeout": JOIN_SECONDS, "last_call_timeout": LAST_CALL_SECONDS}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = item.partition("=")
        name = "join_timeout" if name == "timeout" else name
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in seconds or not 0 < number < _MOST_SECONDS:
            raise ConfigError(
                f"rdzv_conf must contain join_timeout=SECONDS or last_call_timeout=SECONDS, got {item!r}",
                hint="remove the other settings, because they belong to rendezvous backends that are not used here",
            )
        seconds[name] = number
    return seconds["join_timeout"], seconds["last_call_timeout"]


def script_exists(line: CommandLine) -> None:
    """Raise `ConfigError` if no script was named, or if the script does not exist."""
    if not line.target:  # an empty shell variable does not name a script either
        flag, *value = line.given[-1][1] if line.given else [""]
        taken = f": {flag} takes {value[0]} as its value" if value and value[0].endswith(".py") else ""
        raise ConfigError(
            f"no script was given{taken}", hint="run `fullshard launch [flags] script.py [script arguments]`"
        )
    path = Path(line.target)
    if line.kind == "script" and not path.exists():
        close = sorted(file.name for file in Path(path.parent).glob("*.py"))[:8] if path.parent.is_dir() else []
        hint = "check the path, or use `-m` to run a module"
        if close:
            hint = f"choose a script in {path.parent}: {', '.join(close)}"
        raise ConfigError(f"the script {line.target} does not exist", hint=hint)
    if line.kind == "script" and path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(
            f"the directory {line.target} does not contain a __main__.py", hint="pass the path of a script"
        )
