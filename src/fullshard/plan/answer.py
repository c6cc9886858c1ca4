"""Answer a question to the planner in a few lines: whether the run fits, how fast it is, and the command to run."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.config.schema import SETTINGS
from fullshard.core.errors import filled
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Change, Plan
from fullshard.plan.hardware import split_devices
from fullshard.plan.report import as_run_config, for_the_script

WIDTH = 80
"""Columns of the answer."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Hold a question to the planner: the options of the command line."""

    options: Mapping[str, Any]  # the options besides the job's, such as --model
    given: Mapping[str, Any]  # the fields of the job that the user set
    price: float | None = None  # of a device and hour, in any currency

    def command(self) -> str:
        """Return the command that asks this question."""
        words = [str(word) for option, value in self.options.items() if value is not None for word in (option, value)]
        return shlex.join(["fullshard", "plan", *words, *_options(self.given)])

    def with_change(self, change: Change, asked: Plan) -> str:
        """Return the command that asks again with a change to the job or to the number of devices."""
        options, cluster = dict(self.options), change.plan.cluster
        if cluster != asked.cluster:
            options["--devices"] = f"{cluster.count}x{split_devices(str(options['--devices']))[1]}"
            options["--hosts"] = cluster.hosts if options["--hosts"] is not None else None
        before, after = asked.job.model_dump(), change.plan.job.model_dump()
        changed = {name: value for name, value in after.items() if value != before[name]}
        return PlanQuestion(options, {**self.given, **changed}).command()


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of `fullshard plan` that set fields of a job."""
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield from (f"--{flag}", str(value))


def launch_command(plan: Plan) -> str:
    """Return the command that starts a script with the settings of a plan."""
    config = as_run_config(plan)
    words = ["fullshard", "launch"]
    for path, setting in SETTINGS.items():
        value = config.value(path)
        if value == setting.default or path == "launch.device":
            continue
        name = {"precision.mode": "mixed_precision"}.get(path, path.rpartition(".")[2])
        words += [f"--{name}"] if value is True else [f"--{name}", str(value).lower() if value is False else str(value)]
    return shlex.join([*words, "SCRIPT.py"])


def as_text(plan: Plan, changes: Sequence[Change], question: PlanQuestion, *, fits: bool) -> str:
    """Return the answer as lines of at most 80 columns. Commands are continued with a backslash."""
    lines = [*map(filled, (_headline(plan), _verdict(plan), _speed(plan)))]
    if said := _host(plan):
        lines.append(filled(said))
    if question.price is not None:
        kind = plan.cluster.device.name
        lines.append(
            f"cost: {plan.cost_of(question.price):,.0f} per billion tokens, at {question.price:g} per {kind}-hour"
        )
    if fits:
        lines += [continued("run:", launch_command(plan)), filled(f"the script must use {for_the_script(plan.job)}")]
    elif changes:
        lines.append("what would make it fit, cheapest first, more devices last:")
        for change in changes:
            time = "time" if change.plan.cluster.count == plan.cluster.count else "device time"
            needs = f"{change.plan.memory.needed / GIB:.1f} GiB, {change.cost:.2f} times the {time} per token"
            lines += [filled(f"* {change.words}: {needs}"), continued(" ", question.with_change(change, plan))]
    else:
        lines.append("no change of settings makes it fit: use a smaller model, or devices with more memory")
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    job = plan.job
    times = f" x {job.accumulation}" if job.accumulation > 1 else ""
    return (
        f"{plan.model.name} on {plan.cluster}: {job.method}, {job.precision}, {job.strategy}, "
        f"{job.micro_batch} x {job.seq_len:,} tokens{times}"
    )


def _verdict(plan: Plan) -> str:
    least, most = (nbytes / GIB for nbytes in plan.expected)
    device = plan.cluster.device
    needs = f"needs {plan.memory.needed / GIB:.1f} of {device.memory / GIB:.1f} GiB per {device.name}"
    host = "" if plan.fits_host() else ", and too much of each host"
    return f"{plan.confidence}: {needs} (80%: {least:.1f} to {most:.1f}){host}"


def _host(plan: Plan) -> str:
    memory, limit = plan.memory, plan.cluster.device.host_memory
    parts = [str(plan.setting.on_host)] if plan.setting.on_host else []
    parts += ["copies for saves"] if plan.job.async_save or plan.job.max_lost_steps else []
    what = " and ".join(parts) or "loading"
    of = f" of {limit / GIB:,.0f}" if limit else ""
    return f"host: needs {plan.host_needed / GIB:,.1f}{of} GiB per host, for {what}" if memory.host_load else ""


def _speed(plan: Plan) -> str:
    least, most = plan.expected_speed
    return (
        f"speed: {plan.time.total:.3g} s per step, {plan.time.tokens_per_second:,.0f} tokens/s "
        f"(80%: {least:,.0f} to {most:,.0f}), MFU {plan.time.mfu:.0%}"
    )


def continued(label: str, command: str) -> str:
    """Return a labeled command, continued on lines that a shell can read."""
    lines = textwrap.wrap(command, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
    return f"{label} " + " \\\n    ".join(lines)
