"""Format a plan as tables for the terminal, as JSON values, and as a configuration for `fullshard launch`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fullshard.config.schema import RunConfig
from fullshard.core.errors import plural
from fullshard.core.sizes import GIB, format_count, format_nbytes
from fullshard.plan.evaluate import Change, Plan, notes_of
from fullshard.plan.job import Job
from fullshard.plan.memory import CATEGORIES


def as_tables(plan: Plan, changes: Sequence[Change]) -> RenderableType:
    """Return the figures behind a plan as tables to print."""
    parts: list[RenderableType] = [Text(_headline(plan)), _memory_table(plan), _rest_table(plan)]
    if changes:
        table = Table("what would make it fit", "needs, GiB", "time per token", title=None)
        for change in changes:
            table.add_row(change.words, f"{change.plan.memory.needed / GIB:.1f}", f"x {change.cost:.2f}")
        parts.append(table)
    parts += [Text(f"note: {note}") for note in notes_of(plan)]
    return Group(*parts)


def _headline(plan: Plan) -> str:
    job = plan.job
    units, layouts = plan.setting.layout.units, [bucket.layout for bucket in plan.setting.layout.buckets]
    padding = 1 - sum(layout.numel for layout in layouts) / sum(layout.full_numel for layout in layouts)
    trained = "" if plan.trainable == plan.parameters else f", {format_count(plan.trainable)} of them trained"
    shared = f" on {job.shared_by} ranks" * (job.shared_by > 1)
    return (
        f"{plan.model.name}: {format_count(plan.parameters)} parameters{trained}, {plural(len(units), 'unit')}, "
        f"{plural(len(layouts), 'bucket')}, padding {padding:.3%}\n"
        f"{plan.cluster}; {job.strategy}, {job.precision}, {job.optimizer}, {job.method}; micro-batch "
        f"{job.micro_batch} x {job.seq_len} tokens{shared}, {job.accumulation} per step; "
        f"checkpointing {job.checkpointing}"
    )


def _memory_table(plan: Plan) -> Table:
    phases = plan.memory.phases
    table = Table("GiB per rank, at the fullest moment of", *phases)
    for column in table.columns[1:]:
        column.justify = "right"
    for category in CATEGORIES:
        if any(nbytes.get(category) for nbytes in phases.values()):
            cells = (nbytes.get(category, 0) for nbytes in phases.values())
            table.add_row(category, *(f"{cell / GIB:.2f}" if cell else "" for cell in cells))
    table.add_section()
    table.add_row("all", *(f"{sum(nbytes.values()) / GIB:.2f}" for nbytes in phases.values()))
    return table


def _rest_table(plan: Plan) -> Table:
    time, traffic, memory, work = plan.time, plan.traffic, plan.memory, plan.setting.matrices
    groups = {"tensor-parallel": traffic.tiles_nbytes, "context-parallel": traffic.cp_nbytes}
    groups |= {"sequence-parallel": traffic.sp_nbytes, "expert-parallel": traffic.ep_nbytes}
    between = "".join(f", {format_nbytes(sent)} in its {name} group" for name, sent in groups.items() if sent)
    rows = {
        "time": f"{time.total:.3f} s: compute {time.compute:.3f}, exposed communication {time.exposed:.3f}, "
        f"copies {time.copies:.3f}, optimizer {time.optimizer:.3f}",
        "all communication": f"{time.communication:.3f} s, most of it in parallel with computation",
        "speed": f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second / plan.cluster.count:,.0f} per "
        f"device; MFU {time.mfu:.1%} ({time.mfu_unmasked:.1%} with attention counted in full, as in PaLM's appendix B)",
        "each rank sends": f"{format_nbytes(traffic.gather_nbytes)} to unshard ({traffic.gathers} collectives), "
        f"{format_nbytes(traffic.reduce_nbytes)} to reduce ({traffic.reductions}), "
        f"{format_nbytes(traffic.replicate_nbytes)} between replicas{between}",
        "host memory, each host": f"{format_nbytes(memory.host_load)} while fullshard.from_pretrained loads "
        f"(Transformers' own: {format_nbytes(memory.host_load_peers)}), "
        f"{format_nbytes(memory.host_steady)} in steady state",
    }
    if (rest := plan.at_rest) is not None:
        rows[f"{rest.form} at rest"] = (
            f"{format_nbytes(rest.nbytes)} per rank; the largest unit sends {format_nbytes(rest.message)}, takes "
            f"{format_nbytes(rest.whole)} while it is unsharded and {format_nbytes(rest.peak)} while it is decoded; "
            f"all are decoded in {rest.seconds:.3f} s"
        )
    if work is not None:
        rows["matrices"] = (
            f"{work.count} of {format_count(work.numel)} elements on {plural(work.ranks, 'rank')}: the busiest "
            f"computes {work.over_mean:.2f} of the mean; each rank sends {format_nbytes(round(work.sent_nbytes))} to "
            f"owners and back, {format_nbytes(round(work.replicated_nbytes))} to replicas"
        )
    if plan.job.on_host and not plan.cluster.device.is_cpu:
        rows["between host and device"] = (
            f"{format_nbytes(traffic.to_device_nbytes)} to the device, {format_nbytes(traffic.to_host_nbytes)} back "
            f"({plan.job.on_host} on the host)"
        )
    others = "" if plan.job.method == "full" else " with the frozen weights, which Trainer and sft leave out"
    rows["disk, each checkpoint"] = format_nbytes(memory.checkpoint) + others
    table = Table("per optimizer step", "", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def front_table(plans: Sequence[Plan], title: str) -> Table:
    """Return a table with one row for each plan. Settings that are the same in all plans have no column."""
    rows = [_front_row(plan) for plan in plans]
    numbers = ("GiB", "tokens/s", "MFU")
    heads = [head for head in rows[0] if head in numbers or len({row[head] for row in rows}) > 1]
    table = Table(title=title, padding=(0, 1, 0, 0))
    for head in heads:
        longest = max(len(word) for row in [{head: head}, *rows] for word in row[head].split() or [""])
        table.add_column(head, min_width=longest, justify="right" if head in numbers else "left")
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    return table


def _front_row(plan: Plan) -> dict[str, str]:
    job = plan.job
    size = "" if job.shard_size is None else f" {job.shard_size}"
    switches = {"embeddings": job.wrap_embeddings, "step in backward": job.schedule.steps_in_backward}
    switches[f"{plan.kept} kept"] = plan.kept > 0
    switches |= {job.optimizer: job.planned_optimizer.packed_nbytes > 0}
    switches[f"{job.quantize} at rest"] = job.quantize is not None
    switches |= {f"{name} {value}": True for name, value in job.dtypes.sent.items()}
    switches |= {f"--{axis} {size}": True for axis, size in job.axes.items()}
    return {
        "strategy": job.strategy + size,
        "batch": f"{job.micro_batch}" + (f" x {job.accumulation}" if job.accumulation > 1 else ""),
        "recompute": job.checkpointing,
        "on host": str(job.on_host),
        "besides": ", ".join(name for name, is_on in switches.items() if is_on),
        "GiB": f"{plan.memory.needed / GIB:.1f}",
        "tokens/s": f"{plan.time.tokens_per_second:,.0f}",
        "MFU": f"{plan.time.mfu:.1%}",
    }


def as_dict(plan: Plan, changes: Sequence[Change] = (), notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the complete plan as values that can be written to JSON. Sizes are in bytes and times in seconds."""
    return {
        "model": {"name": plan.model.name, **_picked(plan, "parameters trainable")},
        "devices": {"kind": plan.cluster.device.name, "count": plan.cluster.count, "hosts": plan.cluster.hosts},
        "job": plan.job.model_dump(),
        "fits": plan.fits,
        "confidence": plan.confidence,
        "verdict": plan.verdict,
        "memory": {
            **_picked(plan.memory, "needed peak allocated reserved persistent phases"),
            **_picked(plan.memory, "host_load host_load_peers host_steady checkpoint"),
            "available": plan.cluster.device.memory,
            "host_needed": plan.host_needed,
            "host_available": plan.cluster.device.host_memory or None,
            "expected": plan.expected,
        },
        "traffic": _picked(
            plan.traffic,
            "gather=gather_nbytes reduce=reduce_nbytes replicate=replicate_nbytes tiles=tiles_nbytes cp=cp_nbytes "
            "sp=sp_nbytes ep=ep_nbytes gathers reductions to_device=to_device_nbytes to_host=to_host_nbytes",
        ),
        "at_rest": None if plan.at_rest is None else dataclasses.asdict(plan.at_rest),
        "matrices": None
        if plan.setting.matrices is None
        else _picked(
            plan.setting.matrices,
            "count elements=numel over_mean sent=sent_nbytes replicated=replicated_nbytes owned=owned_nbytes",
        ),
        "time": _picked(
            plan.time, "step=total compute exposed copies optimizer communication tokens_per_second mfu mfu_unmasked"
        ),
        "changes": [{"change": c.words, "needed": c.plan.memory.needed, "time_factor": c.cost} for c in changes],
        "notes": [*notes, *notes_of(plan)],
    }


def _picked(thing: object, names: str) -> dict[str, Any]:
    """Return a dict of the attributes in `names`, separated by spaces. `key=attribute` stores one under another key."""
    pairs = (word.partition("=") for word in names.split())
    return {key: getattr(thing, attribute or key) for key, _, attribute in pairs}


def as_run_config(plan: Plan, others: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration with which `fullshard launch` runs this plan. It lacks what `for_the_script` lists."""
    return RunConfig.of_paths(
        {
            # Do not use `auto`: a host without devices would run the same number of processes on its CPUs.
            "launch.device": "cpu" if plan.cluster.device.is_cpu else "cuda",
            **(others or {}),
            **{setting.path: setting.value for setting in plan.job.run_settings()},
            "launch.num_processes": plan.cluster.count,
            "launch.num_machines": plan.cluster.hosts,
        }
    )


def for_the_script(job: Job) -> str:
    """Return text that lists those settings of a plan that the training script itself must make."""
    ours, plain = job.of_the_run(), job.__class__.model_fields
    values = {name: value for name, value in job.model_dump().items() if name not in ours}
    named = {n: v for n, v in values.items() if n in ("micro_batch", "seq_len", "optimizer") or v != plain[n].default}
    return ", ".join(f"{name} = {value}" for name, value in named.items())
