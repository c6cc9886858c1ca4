"""Accelerate's YAML and JSON files, which group its keys in sections."""

from fullshard.config.accelerate import CLUSTER_KEYS, PARALLELISM_KEYS, finish_parallelism
from fullshard.config.deepspeed import DEEPSPEED_SHORT, STAGES
from fullshard.config.dialect import Dialect, Key, Note, Problem, Reading, Setting, Status
from fullshard.config.fsdp import FSDP_KEYS, finish_fsdp
from fullshard.config.xla import XLA_KEYS


def _finish(reading: Reading) -> None:
    finish_parallelism(reading)
    kind = reading.entries.get("distributed_type")
    name = str(kind.value).strip().upper() if kind is not None else ""
    for section, wanted in (("fsdp_config", ("FSDP", "XLA")), ("deepspeed_config", ("DEEPSPEED",))):
        entry = reading.entries.get(section)
        if kind is not None and entry is not None and entry.value and name not in wanted:
            message = f"distributed_type = {kind.value} and {section} contradict each other"
            hint = f"write distributed_type: {wanted[0]}, or remove {section}"
            reading.problems.append(Problem((kind.origin, entry.origin), message, hint))
    if name == "NO":
        _finish_one_process(reading)
    named = reading.setting("sharding.strategy") or "deepspeed_config_file" in reading.entries
    if kind is not None and name == "DEEPSPEED" and not named:
        strategy = STAGES[2]
        reading.settings.append(Setting("sharding.strategy", strategy, kind.origin, kind.key))
        text = f"is translated to sharding.strategy = {strategy} (no zero_stage is given, and 2 is the default)"
        reading.notes.append(Note(kind.origin, kind.key, Status.TRANSLATED, text))


def _finish_one_process(reading: Reading) -> None:
    """Ignore `num_processes` if `distributed_type` is `NO`, because Accelerate then starts a single process."""
    for setting in [s for s in reading.settings if s.path == "launch.num_processes" and s.key == "num_processes"]:
        reading.settings.remove(setting)
        if setting.value != 1:
            text = f"= {setting.value} has no effect: distributed_type = NO starts one process"
            reading.notes.append(Note(setting.origin, setting.key, Status.NO_EFFECT, text))


ACCELERATE = Dialect(
    "an Accelerate configuration",
    (
        *CLUSTER_KEYS,
        Key("fsdp_config", section=Dialect("fsdp_config", (*FSDP_KEYS, *XLA_KEYS), prefix="fsdp_", finish=finish_fsdp)),
        Key("deepspeed_config", section=DEEPSPEED_SHORT),
        Key(
            "parallelism_config", section=Dialect("parallelism_config", PARALLELISM_KEYS, prefix="parallelism_config_")
        ),
        *XLA_KEYS,
    ),
    finish=_finish,
)
