"""`python -m benchmarks.table RECORD...`: tables of records, in Markdown that also reads well on a terminal.

One record: each row with all engines. Several: one line per row, fullshard against torch FSDP2.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catalog import BARE, ENGINES, REFERENCE, ROWS, SEVERAL_BARE, SHAPES
from benchmarks.record import Record, Run, load

MIB = 2**20
# Largest relative difference between an engine's losses and the reference's that still counts as the same training.
# Engines add the same numbers in different orders; bf16 rounds each of them to 8 bits, and steps amplify it.
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-3, "bf16only": 5e-3}
HEADINGS = ("engine", "step s (range)", "/ FSDP2", "peak MiB", "/ FSDP2", "last loss", "losses = FSDP2")
SUMMARY_HEADINGS = ("row", "step s", "/ FSDP2", "peak MiB", "/ FSDP2", "losses = FSDP2", "repeats")
MEMORY_HEADINGS = ("engine", "building", "training", "/ FSDP2", "PSS building", "PSS training", "/ FSDP2", "/ plan")
OURS = "fullshard"
NONE = "-"
# Share of the machine's CPU time that others may use during an engine's runs before the table says so.
QUIET = 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """One engine on one row over its successful repeats.

    Args:
        step_seconds: per repeat, the median over steps of the slowest rank's time.
        peak_nbytes: per repeat, the largest peak above imports of any rank, set-up included.
        losses: mean over ranks per step, warm-up included; of the first successful repeat.
        repeatable: whether the losses of all repeats are the same numbers.
        disturbance: share of the machine's CPU time that everything else used during these runs.
        error: why there is nothing, or what else went wrong; `None` if all repeats succeeded.
    """

    step_seconds: Mapping[int, float]
    peak_nbytes: Mapping[int, int]
    losses: Sequence[float]
    repeatable: bool
    disturbance: float
    error: str | None


def summarize(runs: Sequence[Run], num_cpus: int) -> Summary:
    """Sums up all runs of one engine on one row."""
    done = [run for run in runs if run.error is None]
    errors = [run.error for run in runs if run.error is not None]
    losses = [_mean_losses(run) for run in done]
    return Summary(
        step_seconds={run.job.repeat: _median_step_seconds(run) for run in done},
        peak_nbytes={run.job.repeat: _peak_nbytes(run) for run in done},
        losses=losses[0] if losses else [],
        repeatable=all(other == losses[0] for other in losses[1:]),
        disturbance=disturbance(runs, num_cpus),
        error=f"{len(errors)} of {len(runs)} runs failed: {errors[0]}" if errors else None,
    )


def disturbance(runs: Sequence[Run], num_cpus: int) -> float:
    """Share of the machine's CPU time that everything else used while these runs were on."""
    available = sum(run.wall_seconds for run in runs) * num_cpus
    return sum(max(run.other_cpu_seconds, 0.0) for run in runs) / available


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the steps; not a number if either has one that is none."""
    pairs = list(zip(losses, reference, strict=True))
    if any(math.isnan(a) or math.isnan(b) for a, b in pairs):
        return math.nan
    return max(abs(a - b) / abs(b) for a, b in pairs)


def render(record: Record) -> str:
    """All tables of a record with the conditions they were measured under."""
    return f"{render_rows(record)}\n\n{conditions(record)}"


def render_rows(record: Record) -> str:
    """All engines, a table per row."""
    by_row: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in record.runs:
        by_row[run.job.row.name][run.job.engine].append(run)
    num_cpus = record.machine.num_cpus
    ordered = sorted(by_row.items(), key=lambda item: list(ROWS).index(item[0]))
    return "\n\n".join(_row_block(runs, num_cpus) for _, runs in ordered)


def render_summary(records: Sequence[Record]) -> str:
    """One line per row of the records that both engines finished; of a row in several records the last one counts."""
    lines: dict[str, tuple[str, ...]] = {}
    for record in records:
        for name in {run.job.row.name for run in record.runs}:
            by_engine = defaultdict(list)
            for run in record.runs:
                if run.job.row.name == name:
                    by_engine[run.job.engine].append(run)
            summaries = {engine: summarize(runs, record.machine.num_cpus) for engine, runs in by_engine.items()}
            if all(engine in summaries and summaries[engine].step_seconds for engine in (OURS, REFERENCE)):
                row = by_engine[OURS][0].job.row
                _, seconds, time_ratio, peak, peak_ratio, _, same = _cells(OURS, summaries, row.dtype)
                title = f"{row.model.upper()} {row.dtype}, {row.sequences}x{row.tokens} tokens"
                repeats = str(len(summaries[OURS].step_seconds))
                lines[name] = (title, seconds.split(" ")[0], time_ratio, peak, peak_ratio, same, repeats)
    ordered = [lines[name] for name in ROWS if name in lines]
    return "\n".join(align([SUMMARY_HEADINGS, *ordered]))


def render_memory(records: Sequence[Record]) -> str:
    """Peaks of resident memory: a line per row and engine of records that watched it."""
    lines = []
    for record in records:
        by_row: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
        for run in record.runs:
            by_row[run.job.row.name][run.job.engine].append(run)
        lines += [
            (name, *_memory_cells(engine, by_engine))
            for name, by_engine in by_row.items()
            for engine in ENGINES
            if engine in by_engine
        ]
    return "\n".join(align([("row", *MEMORY_HEADINGS), *lines]))


def _row_block(by_engine: Mapping[str, Sequence[Run]], num_cpus: int) -> str:
    summaries = {engine: summarize(by_engine[engine], num_cpus) for engine in ENGINES if engine in by_engine}
    job = next(iter(by_engine.values()))[0].job
    shape = SHAPES[job.row.model]
    lines = [
        f"`{job.row.name}`: {shape.family} shape of {job.row.model.upper()}, {shape.layers} layers of {shape.hidden}, "
        f"{job.row.dtype}, {job.row.sequences}x{job.row.tokens} tokens per rank",
        "",
        *align([HEADINGS, *(_cells(engine, summaries, job.row.dtype) for engine in summaries)]),
    ]
    if any(run.job.watch_memory for runs in by_engine.values() for run in runs):
        lines += [
            "",
            "Peak MiB above imports, of the largest rank; PSS: a page that ranks share counts in parts that make one.",
            "",
            *align([MEMORY_HEADINGS, *(_memory_cells(engine, by_engine) for engine in summaries)]),
        ]
    for engine, summary in summaries.items():
        if summary.error:
            lines += ["", f"{ENGINES[engine]}: {summary.error}"]
        if not summary.repeatable:
            lines += ["", f"{ENGINES[engine]}: losses differ between repeats."]
        if summary.disturbance > QUIET:
            lines += ["", f"{ENGINES[engine]}: others used {summary.disturbance:.0%} of the CPU time meanwhile."]
    return "\n".join(lines)


def _cells(engine: str, summaries: Mapping[str, Summary], dtype: str) -> tuple[str, ...]:
    summary, reference = summaries[engine], summaries.get(REFERENCE)
    if not summary.step_seconds:
        return (ENGINES[engine], "failed", *[NONE] * (len(HEADINGS) - 2))
    seconds, peaks = summary.step_seconds, summary.peak_nbytes
    time_ratio = peak_ratio = same = NONE
    if reference is not None and seconds.keys() & reference.step_seconds.keys():
        time_ratio = f"{paired_ratio(seconds, reference.step_seconds):.2f}"
        peak_ratio = f"{paired_ratio(peaks, reference.peak_nbytes):.2f}"
        if engine not in (BARE, SEVERAL_BARE, REFERENCE):  # a bare process sees the data of one rank only
            difference = loss_difference(summary.losses, reference.losses)
            same = f"{'yes' if difference <= TOLERANCES[dtype] else 'NO'} ({difference:.0e})"
    return (
        ENGINES[engine],
        f"{statistics.median(seconds.values()):.3f} ({min(seconds.values()):.3f}-{max(seconds.values()):.3f})",
        time_ratio,
        f"{statistics.median(peaks.values()) / MIB:.0f}",
        peak_ratio,
        f"{summary.losses[-1]:.6f}",
        same,
    )


def _memory_cells(engine: str, by_engine: Mapping[str, Sequence[Run]]) -> tuple[str, ...]:
    """Peaks of resident memory, medians over the repeats; building and training together against FSDP2 and the plan."""
    runs = {run.job.repeat: run for run in by_engine[engine] if run.error is None}
    if not runs:
        return (ENGINES[engine], "failed", *[NONE] * (len(MEMORY_HEADINGS) - 2))
    theirs = {run.job.repeat: run for run in by_engine.get(REFERENCE, ()) if run.error is None}
    cells = [ENGINES[engine]]
    for building, training in (
        ("setup_peak_nbytes", "steps_peak_nbytes"),
        ("setup_pss_peak_nbytes", "steps_pss_peak_nbytes"),
    ):
        both = [_largest(runs, name) for name in (building, training)]
        cells += [f"{statistics.median(peaks.values()) / MIB:.0f}" for peaks in both]
        mine, reference = (
            {repeat: max(_largest(of, name)[repeat] for name in (building, training)) for repeat in of}
            for of in (runs, theirs)
        )
        cells.append(f"{paired_ratio(mine, reference):.2f}" if mine.keys() & reference.keys() else NONE)
    planned = next(iter(runs.values())).planned_nbytes
    cells.append(f"{statistics.median(mine.values()) / planned:.2f}" if planned else NONE)
    return tuple(cells)


def _largest(runs: Mapping[int, Run], name: str) -> dict[int, int]:
    """Per repeat the largest of what the ranks measured."""
    return {repeat: max(getattr(rank.memory, name) for rank in run.ranks) for repeat, run in runs.items()}


def paired_ratio(mine: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Median of the ratios within a repeat: what slows a whole repeat down cancels out."""
    return statistics.median(mine[repeat] / reference[repeat] for repeat in mine.keys() & reference.keys())


def _median_step_seconds(run: Run) -> float:
    steps = zip(*(rank.step_seconds for rank in run.ranks), strict=True)
    slowest: list[float] = [max(step) for step in steps]
    return statistics.median(slowest)


def _peak_nbytes(run: Run) -> int:
    """On the accelerator if there is one, else resident on the host."""
    memories = [rank.memory for rank in run.ranks]
    return max(m.device_peak_nbytes or max(m.setup_peak_nbytes, m.steps_peak_nbytes) for m in memories)


def _mean_losses(run: Run) -> list[float]:
    return [statistics.fmean(step) for step in zip(*(rank.losses for rank in run.ranks), strict=True)]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if not index else cell.rjust(width)
                 for index, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    rule = [f"{'-' * (width - 1)}{'-' if not index else ':'}" for index, width in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return lines


def conditions(record: Record) -> str:
    """Where and how a record was made."""
    machine, job = record.machine, record.runs[0].job
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.packages.items())
    commit = "no commit" if record.commit is None else record.commit[:12]
    ranks, host = max(run.job.ranks for run in record.runs), f"{machine.num_cpus} x {machine.cpu}"
    return "\n".join(
        [
            f"{ranks} ranks on {', '.join([*machine.accelerators, host])}, {machine.memory_nbytes / 2**30:.0f} GiB; "
            f"bf16 instructions: {', '.join(machine.bf16_instructions) or 'none, emulated'}; "
            f"{machine.system}; Python {machine.python}; {packages}.",
            f"`{record.command}` at {record.created}, {commit}{' with changes' if record.dirty else ''}; "
            f"{len({run.job.repeat for run in record.runs})} repeats of {job.steps} steps after {job.warmup}; "
            f"others used {disturbance(record.runs, machine.num_cpus):.0%} of the CPU time meanwhile.",
            "Step: median over repeats of the median step of the slowest rank (lowest-highest repeat). Peak: resident",
            "memory above imports of the largest rank, set-up included; on accelerators what torch allocated from the",
            "first warm-up step on. Ratios: median of the ratios within a repeat.",
            f"Losses: largest relative difference over all steps, at most {TOLERANCES['fp32']:g} (fp32) or "
            f"{TOLERANCES['bf16']:g} (bf16).",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Prints the tables of the records named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files such as benchmarks/results/cpu-2ranks.json")
    records = [load(path) for path in parser.parse_args(arguments).records]
    print(render(records[0]) if len(records) == 1 else render_summary(records))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
