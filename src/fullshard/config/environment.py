"""Reader for settings in environment variables."""

import os
from collections.abc import Mapping

from fullshard.config.accelerate import DYNAMO_KEYS, FLAT, FP8_KEYS, PARALLELISM_KEYS
from fullshard.config.dialect import Note, Problem, Reading, Status
from fullshard.config.fsdp import FSDP_KEYS
from fullshard.config.origin import Entry, Origin
from fullshard.config.settings import closest
from fullshard.config.switches import faults


def accelerates_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nonempty variables that start with one of Accelerate's prefixes, sorted by name."""
    prefixes = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
    return {name: value for name in sorted(environ) if name.startswith(prefixes) and (value := environ[name].strip())}


def load_environment(environ: Mapping[str, str] | None = None) -> Reading:
    """Read the variables of Accelerate's launcher and of users. Unknown ones are problems if they are near misses."""
    environ = os.environ if environ is None else environ
    entries, problems, notes, nobodys = [], [], [], set()
    for name, value in accelerates_variables(environ).items():
        origin = Origin.variable(name)
        if name in VARIABLES:
            entries.append(Entry(VARIABLES[name], value, origin))
            if value.lower() in _EXPORTED.get(name, ()):
                nobodys.add(origin)
        elif name in _IGNORED:
            continue
        elif name.startswith(_REFUSED):
            problems.append(Problem((origin,), f"{name} = {value} is not supported", f"unset {name}"))
        else:
            close = closest(name, VARIABLES, 0.7)
            if close is None and name.startswith("ACCELERATE_"):
                notes.append(Note(origin, name, Status.NO_EFFECT, "has no effect here: nothing reads it"))
                continue
            known = f"unset it; the known variables are {', '.join(sorted(VARIABLES))}"
            hint = f"did you mean {close}?" if close else known
            problems.append(Problem((origin,), f"unknown variable {name} = {value!r}", hint))
    reading = FLAT.read(_wished(entries))
    reading.notes = [note for note in reading.notes if note.origin not in nobodys]
    problems += [Problem((Origin.variable(name),), message, hint) for name, message, hint in faults(environ)]
    reading.add(Reading(notes=notes, problems=problems))
    return reading


def _wished(entries: list[Entry]) -> list[Entry]:
    """Drop entries that the user did not set: Accelerate's launcher exports even settings that do not apply."""
    said = {entry.key: entry.value.upper() for entry in entries}
    strategy, reshard = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    of_version, other = (reshard, strategy) if said.get("fsdp_version") == "2" else (strategy, reshard)
    unread = {other} if of_version in said else set()
    if said.get("fsdp_auto_wrap_policy", "") not in ("SIZE_BASED_WRAP", "SIZED_BASED_WRAP", "2"):
        unread.add("fsdp_min_num_params")
    return [entry for entry in entries if entry.key not in unread]


VARIABLES: dict[str, str] = {
    **{key.variable or key.name.upper(): key.name for key in (*FSDP_KEYS, *PARALLELISM_KEYS)},
    **{f"ACCELERATE_{key.name.upper()}": key.name for key in (*DYNAMO_KEYS, *FP8_KEYS)},
    **{key.variable: key.name for key in FLAT.keys if key.variable},
}
"""The key for each variable."""

_EXPORTED = {"FSDP_VERSION": ("1", "2"), "FSDP_USE_ORIG_PARAMS": ("true",), "PARALLELISM_CONFIG_CP_BACKEND": ("torch",)}
"""Values that the launcher always exports, for keys without effect. They do not produce a note."""

_IGNORED = (
    # These control whether Accelerate reads the other variables, which are always read here.
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    # Read by what scripts import from Accelerate: loggers, tracebacks, `init_empty_weights`, `debug_launcher`.
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH", "ACCELERATE_INIT_INCLUDE_BUFFERS"),
    *("ACCELERATE_DEBUG_RDV_FILE", "ACCELERATE_NUM_PROCESSES"),
    # Accelerate's launcher exports these with every backend, but only Transformer Engine and MS-AMP use them.
    *(f"ACCELERATE_FP8_{name}" for name in ("USE_AUTOCAST_DURING_EVAL", "MARGIN", "INTERVAL", "FORMAT", "OPT_LEVEL")),
    *(f"ACCELERATE_FP8_AMAX_{name}" for name in ("HISTORY_LEN", "COMPUTE_ALGO")),
    *(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD")),
)

_REFUSED = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
