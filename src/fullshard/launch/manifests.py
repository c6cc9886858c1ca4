"""The output of `--print slurm`, `kubernetes` and `trainjob`: a batch script or a manifest that starts the same run."""

import io
import re
import shlex
from pathlib import Path
from typing import Any

from fullshard.config.flags import CommandLine
from fullshard.core.errors import ConfigError
from fullshard.launch.network import DEFAULT_PORT
from fullshard.launch.plan import LaunchPlan

_PLACED_OTHERWISE = (
    *("print", "dry_run", "standalone", "num_machines", "nnodes", "machine_rank", "node_rank", "rdzv_endpoint"),
    *("main_process_ip", "master_addr", "main_process_port", "master_port", "rdzv_backend", "rdzv_id"),
)
"""Flags that get their values from Slurm or Kubernetes."""


def manifest(kind: str, line: CommandLine, plan: LaunchPlan) -> str:
    """Return a batch script (`slurm`), or a manifest of a PyTorchJob (`kubernetes`) or a TrainJob (`trainjob`)."""
    writers = {"slurm": _slurm, "kubernetes": _kubernetes, "trainjob": _trainjob}
    if kind not in writers:
        raise ConfigError(
            f"--print must be slurm, kubernetes or trainjob, got {kind!r}",
            hint="use one of these, for example --print slurm",
        )
    flags = [word for name, words in line.given if name not in _PLACED_OTHERWISE for word in words]
    return writers[kind](flags, [str(line.target), *line.arguments], plan, _name(str(line.target)))


def _name(target: str) -> str:
    """Return a job name that Slurm and Kubernetes accept, made of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", Path(target).stem.lower()).strip("-")[:40] or "fullshard"


def _slurm(flags: list[str], target: list[str], plan: LaunchPlan, name: str) -> str:
    threads = plan.launch.num_cpu_threads_per_process or 1
    devices = [f"#SBATCH --gpus-per-node={plan.per_host}"] if plan.device == "cuda" else []
    if plan.device == "cpu" and plan.launch.device == "auto":
        devices = ["# There is no GPU where this was written; --device cuda --num_processes N asks for some."]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={plan.launch.num_machines}",
            "# One task per host: the launcher starts the processes of its host itself.",
            "#SBATCH --ntasks-per-node=1",
            *devices,
            "# Processors of all processes of a host; add those of their data loaders.",
            f"#SBATCH --cpus-per-task={threads * plan.per_host}",
            "#SBATCH --output=%x-%j.log",
            "",
            "set -euo pipefail",
            "",
            "# srun no longer takes the count of processors from the lines above (Slurm 22.05).",
            'srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\',
            f"    {shlex.join(['fullshard', 'launch', *flags, *target])}",
            "",
        ]
    )


def _kubernetes(flags: list[str], target: list[str], plan: LaunchPlan, name: str) -> str:
    hosts = plan.launch.num_machines
    place = []
    if hosts > 1:
        # The operator creates a service with the pod's name for every pod, and puts the pod's number into RANK.
        place = [
            *("--num_machines", str(hosts), "--machine_rank", "$(RANK)", "--main_process_ip", f"{name}-master-0"),
            *("--main_process_port", str(plan.launch.main_process_port or DEFAULT_PORT)),
        ]
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": _IMAGE,
        "command": ["fullshard", "launch", *_literal(flags), *place, *_literal(target)],
    }
    if plan.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": plan.per_host}}
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    pod = {
        "containers": [container],
        # Data loaders and NCCL need more shared memory than a pod's default of 64 MiB.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}

    roles = {"Master": replicas(1), **({"Worker": replicas(hosts - 1)} if hosts > 1 else {})}
    return _yaml("kubeflow.org/v1", "PyTorchJob", name, {"pytorchReplicaSpecs": roles})


def _trainjob(flags: list[str], target: list[str], plan: LaunchPlan, name: str) -> str:
    """Return a TrainJob for the runtime `torch-distributed`, which passes each pod its rank in PET_* variables."""
    hosts = plan.launch.num_machines
    place = []
    if hosts > 1:
        place = [
            *("--num_machines", str(hosts), "--machine_rank", "$(PET_NODE_RANK)"),
            *("--main_process_ip", "$(PET_MASTER_ADDR)", "--main_process_port", "$(PET_MASTER_PORT)"),
        ]
    trainer: dict[str, Any] = {"image": _IMAGE, "numNodes": hosts}
    if plan.device == "cuda":
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": plan.per_host}}
    trainer["command"] = ["fullshard", "launch", *_literal(flags), *place]
    trainer["args"] = _literal(target)
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _yaml("trainer.kubeflow.org/v1alpha1", "TrainJob", name, spec)


_IMAGE = "REPLACE-WITH-YOUR-IMAGE"


def _literal(words: list[str]) -> list[str]:
    """Write every $(NAME) as $$(NAME), because Kubernetes would otherwise substitute a variable."""
    return [word.replace("$(", "$$(") for word in words]


def _yaml(version: str, kind: str, name: str, spec: dict[str, Any]) -> str:
    from ruamel.yaml import YAML

    content = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.representer.ignore_aliases = lambda *_: True  # the second role repeats the first
    text = io.StringIO()
    yaml.dump(content, text)
    return text.getvalue()
