"""The text that `--dry_run` prints: the command and the environment of every process, on every host."""

import shlex

from fullshard.config.dialect import shown
from fullshard.config.flags import CommandLine
from fullshard.core.errors import filled
from fullshard.launch.network import DEFAULT_PORT
from fullshard.launch.plan import LaunchPlan

_PER_HOST = ("machine_rank", "node_rank", "dry_run")


def describe(line: CommandLine, plan: LaunchPlan) -> str:
    """Return the text that `--dry_run` prints."""
    launch, hosts = plan.launch, plan.launch.num_machines
    lines = [filled(plan.summary()), "", "settings that differ from their defaults, and where they come from:"]
    lines += _settings(plan) or ["  none"]
    for host in range(hosts):
        ranks = range(host * plan.per_host, (host + 1) * plan.per_host)
        shown_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        lines += ["", filled(f"host {host} of {hosts}: {shown_ranks}" + (_meeting(plan) if hosts > 1 else ""))]
        if hosts > 1:
            flags = [word for name, words in line.given if name not in _PER_HOST for word in words]
            rank = [] if launch.machine_rank is None else ["--machine_rank", str(host)]
            command = ["fullshard", "launch", *flags, *rank, str(line.target), *line.arguments]
            lines.append(f"  start with:  {shlex.join(command)}")
        variables = {**plan.variables, "WORLD_SIZE": str(plan.world_size), "LOCAL_WORLD_SIZE": str(plan.per_host)}
        words = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(filled(f"  environment: {' '.join(words)}"))
        for local_rank, rank_number in enumerate(ranks):
            lines.append(f"  RANK={rank_number} LOCAL_RANK={local_rank} {shlex.join(plan.command)}")
    return "\n".join(lines) + "\n"


def _meeting(plan: LaunchPlan) -> str:
    launch = plan.launch
    order = "by machine rank" if launch.machine_rank is not None else "in the order in which they arrive"
    return f" ({order}; all meet at {launch.main_process_ip} port {launch.main_process_port or DEFAULT_PORT})"


def _settings(plan: LaunchPlan) -> list[str]:
    return [
        filled(f"  {row['path']} = {shown(row['value'])}  ({row['source']})")
        for row in plan.resolved.explained()
        if row["value"] != row["default"]
    ]
