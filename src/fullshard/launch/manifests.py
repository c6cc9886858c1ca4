"""The output of `--print slurm`, `kubernetes` and `trainjob`: a batch script or a manifest that starts the same run."""

import json
import re
import shlex
from pathlib import Path
from string import Template

from fullshard.config.flags import CommandLine
from fullshard.core.errors import ConfigError
from fullshard.launch.network import DEFAULT_PORT
from fullshard.launch.plan import LaunchPlan

_PLACED_OTHERWISE = (
    *("print", "dry_run", "standalone", "num_machines", "nnodes", "machine_rank", "node_rank", "rdzv_endpoint"),
    *("main_process_ip", "master_addr", "main_process_port", "master_port", "rdzv_backend", "rdzv_id"),
)
"""Flags that get their values from Slurm or Kubernetes."""

_PLACES = {
    "slurm": "",
    # The operator creates a service with the pod's name for every pod, and puts the pod's number into RANK.
    "kubernetes": "--machine_rank $(RANK) --main_process_ip {name}-master-0 --main_process_port {port}",
    # The runtime `torch-distributed` passes each pod its rank in PET_* variables.
    "trainjob": "--machine_rank $(PET_NODE_RANK) --main_process_ip $(PET_MASTER_ADDR)"
    " --main_process_port $(PET_MASTER_PORT)",
}
"""The flags that place a process on one of several hosts, by the kind of manifest."""


def manifest(kind: str, line: CommandLine, plan: LaunchPlan) -> str:
    """Return a batch script (`slurm`), or a manifest of a PyTorchJob (`kubernetes`) or a TrainJob (`trainjob`)."""
    if kind not in _PLACES:
        raise ConfigError(
            f"--print must be slurm, kubernetes or trainjob, got {kind!r}",
            hint="use one of these, for example --print slurm",
        )
    hosts = plan.launch.num_machines
    # Slurm and Kubernetes accept a job name of lower-case letters, digits and dashes.
    name = re.sub(r"[^a-z0-9]+", "-", Path(str(line.target)).stem.lower()).strip("-")[:40] or "fullshard"
    flags = [word for name, words in line.given if name not in _PLACED_OTHERWISE for word in words]
    target = [str(line.target), *line.arguments]
    place = _PLACES[kind].format(name=name, port=plan.launch.main_process_port or DEFAULT_PORT).split()
    command = ["fullshard", "launch", *_literal(flags), *(["--num_machines", str(hosts), *place] if hosts > 1 else [])]
    values = {
        "name": name,
        "hosts": hosts,
        "workers": hosts - 1 or None,
        "gpus": plan.per_host if plan.device == "cuda" else None,
        "where": "where this was written" if plan.device == "cpu" and plan.launch.device == "auto" else None,
        "processors": (plan.launch.num_cpu_threads_per_process or 1) * plan.per_host,
        "line": shlex.join(["fullshard", "launch", *flags, *target]),
        "whole": _yaml([*command, *_literal(target)]),
        "command": _yaml(command),
        "target": _yaml(_literal(target)),
    }
    lines = (Path(__file__).with_name("templates") / kind).read_text(encoding="utf-8").splitlines(keepends=True)
    parts = [Template(text) for text in lines]
    kept = [part for part in parts if all(values[each] is not None for each in part.get_identifiers())]
    return "".join(part.substitute(values) for part in kept)


def _literal(words: list[str]) -> list[str]:
    """Write every $(NAME) as $$(NAME), because Kubernetes would otherwise substitute a variable."""
    return [word.replace("$(", "$$(") for word in words]


def _yaml(value: object) -> str:
    """Return JSON, which is YAML too. Quotes around every string prevent that YAML 1.1 reads `yes` as a boolean."""
    return json.dumps(value, ensure_ascii=False)
