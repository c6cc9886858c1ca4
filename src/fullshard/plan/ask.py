"""Ask the planner: read a question in words, as the command line and the page have it, and answer it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.dialect import Reading, shown
from fullshard.config.document import read_document
from fullshard.config.load import load_file, recipe_arguments
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.values import integer
from fullshard.core.errors import ConfigError, filled, plural
from fullshard.core.sizes import GIB
from fullshard.plan.answer import PlanQuestion, as_text
from fullshard.plan.evaluate import MARGIN, Change, Plan, changes_that_fit, evaluate, without_room
from fullshard.plan.hardware import Cluster, parse_cluster, split_devices
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.report import as_dict
from fullshard.plan.search import closest, pareto, search
from fullshard.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Answer:
    """The planner's answer: the plan, whether it fits, what would make it fit, and the plans that --auto proposes."""

    question: PlanQuestion
    plan: Plan
    fits: bool
    changes: list[Change]
    front: list[Plan]
    notes: list[str]

    def text(self) -> str:
        """Return the lines that answer the question."""
        notes = [filled(f"note: {note}") for note in self.notes]
        return "\n".join([as_text(self.plan, self.changes, self.question, fits=self.fits), *notes])

    def values(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        price, front = self.question.price, {"pareto": list(map(as_dict, self.front))} if self.front else {}
        cost = {} if price is None else {"cost": self.plan.cost_of(price)}
        return as_dict(self.plan, self.changes, self.notes) | front | cost


def ask(
    model: str,
    devices: str | None,
    given: dict[str, Any],
    *,
    auto: bool = False,
    margin: float | None = None,
    price: float | None = None,
    hosts: int | None = None,
    config: Path | None = None,
    host_memory: int | None = None,
) -> Answer:
    """Answer a question to the planner. `given` holds the fields of a `Job` that the user has set.

    Raises:
        ConfigError: Part of the question is unknown, invalid or missing.
    """
    part = MARGIN if margin is None else margin / 100
    described, notes = load_model(model)
    given = dict(given)
    notes += _within_positions(described, given)
    if str(given.get("strategy")).lower() == "auto":
        auto = True
        del given["strategy"]
    job, cluster, more = _question(given, devices, hosts, config, host_memory)
    if job.precision == "fp8":
        more.append("fp8 is planned as bf16: products and gathers in 8 bits are not in the figures")
    front: list[Plan] = []
    if auto:
        front = pareto(search(described, job, cluster, fixed=given, margin=part))
        if not front:
            least = {name: value for name, value in closest(job, given).items() if value != getattr(job, name)}
            given, job = given | least, Job.of(job.model_dump() | least)
            more.append(
                f"no plan fits into {part:.0%} of the memory (--margin); this one is shown because it needs little"
            )
    chosen = front[0] if front else evaluate(described, job, cluster)
    fits = chosen.is_within(part if auto else 1.0)
    changes = [] if fits else changes_that_fit(chosen, margin=part)
    if not fits and not chosen.job.on_host and (short := without_room(chosen, part)):
        has, needs = (f"{nbytes / GIB:,.0f} GiB" for nbytes in (cluster.device.host_memory, short.host_needed))
        assumed = " that are assumed" if host_memory is None else ""
        more.append(
            f"the {has}{assumed} per host (--host-memory) rule out offloading: with {short.setting.on_host} on the "
            f"host, {needs} are needed"
        )
    asked = {name: getattr(job, name) for name in Job.model_fields if name in given}
    options = {
        "--model": model,
        "--devices": devices,
        "--hosts": hosts,
        "--config": config,
        "--host-memory": host_memory and f"{host_memory / GIB:.12g}GiB",
    }
    return Answer(PlanQuestion(options, asked, price), chosen, fits, changes, front, notes + more)


def _within_positions(model: ModelShape, given: dict[str, Any]) -> list[str]:
    """Reduce the default length to what the model supports, and return a note. Raise if the user chose the length."""
    seq_len = Job.of({name: given[name] for name in ("seq_len",) if name in given}).seq_len
    if model.positions is None or seq_len <= model.positions:
        return []
    if "seq_len" in given:
        raise ConfigError(
            f"{model.name} supports sequences of up to {model.positions} tokens, got {seq_len}",
            hint=f"use a seq_len of at most {model.positions}",
        )
    given["seq_len"] = model.positions
    return [f"{model.name} supports sequences of up to {model.positions} tokens, so the plan uses that many"]


def _question(
    given: dict[str, Any], devices: str | None, hosts: int | None, config: Path | None, host_memory: int | None = None
) -> tuple[Job, Cluster, list[str]]:
    """Return the job, the cluster, and notes for the user. Flags take precedence over the configuration file."""
    if devices is None:
        raise ConfigError(
            "the option --devices is required", hint="pass the number and type of devices, for example --devices 8xH100"
        )
    if config is None:
        return Job.of(given), parse_cluster(devices, hosts, host_memory), []

    resolved = resolve([reading := load_file(config)])
    batch, recipe = _micro_batch_of(reading), recipe_arguments(entries := read_document(config), "plan")
    said = {} if batch is None else {"micro_batch": batch}
    sft: Any = next((entry.value for entry in entries if entry.key == "sft"), None) or ()
    said |= {e.key: e.plain for e in recipe or () if e.key in Job.model_fields}
    said |= {_OF_SFT[e.key]: e.plain for e in sft if e.key in _OF_SFT and e.plain is not None}
    given |= {name: value for name, value in said.items() if name not in given}
    job = Job.from_run(resolved.config, **given)
    notes = [str(note) for note in resolved.notes if batch is None or note.key != _MICRO_BATCH] + _unplanned(resolved)
    if recipe is not None:
        of_sft = f", with {', '.join(_OF_SFT)} of its section sft" if sft else ""
        notes.append(f"{config} is planned as its section plan says{of_sft}")
    if "precision" not in given and "precision.mode" not in resolved.settings:
        notes.append(f"{config} does not set the precision: planned in {job.compute_dtype}, as the model is stored")
    processes = resolved.config.launch.num_processes
    number = split_devices(devices)[0]
    if processes is not None and number is None:
        devices = f"{processes}x{devices}"  # the file sets the number, the flag the kind
    elif processes not in (None, number):
        notes.append(f"{config} starts {plural(processes, 'process')}: start {number} with --num_processes {number}")
        return job, parse_cluster(devices, hosts, host_memory), notes
    return job, parse_cluster(devices, hosts or resolved.config.launch.num_machines, host_memory), notes


_OF_SFT = {
    "max_length": "seq_len",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "lora_r": "lora_rank",
}
"""Arguments of `fullshard sft` in a recipe that a plan uses, and their fields of a `Job`."""


def section_plan(config: Path | None) -> dict[str, Any]:
    """Return the values in a recipe's section `plan`, or nothing for other files."""
    recipe = None if config is None else recipe_arguments(read_document(config), "plan")
    return {entry.key: entry.plain for entry in recipe or ()}


_UNPLANNED = {
    "sharding.wrap": "planned with a unit per layer; larger units need more memory",
    "sharding.wrap_classes": "planned as the model's layers; other units need other memory and traffic",
    "sharding.ignored_modules": "planned as sharded, but every rank holds all of them",
    "parallelism.cp_comm_strategy": "planned as allgather, which holds all keys and values at a time",
    "precision.param_dtype": "planned with the dtypes of precision.mode only",
}
"""Settings that affect a run but not a plan, and the consequences for the plan's figures."""


def _unplanned(resolved: Resolved) -> list[str]:
    """Return a line for each setting of the configuration file that affects the run but that the planner ignores."""
    found = []
    for path, meaning in _UNPLANNED.items():
        setting = resolved.settings.get(path)
        if setting is not None and setting.value not in (None, "auto", "class", "allgather", ()):
            found.append(f"{setting.origin}: {setting.key} ({path} = {shown(setting.value)}): {meaning}")
    return found


_MICRO_BATCH = "train_micro_batch_size_per_gpu"


def _micro_batch_of(reading: Reading) -> int | None:
    """Return the micro-batch size from a DeepSpeed file, or None if the file does not set it to a number."""
    entry = reading.entries.get(_MICRO_BATCH)
    if entry is None or entry.value is None or str(entry.value).strip().lower() == "auto":
        return None
    return integer(entry.value)
