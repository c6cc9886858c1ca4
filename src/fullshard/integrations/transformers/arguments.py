"""`TrainingArguments` that check `fsdp` and `fsdp_config`: every key is either supported or an error.

Transformers reads the keys that it supports and ignores the others. Here the arguments are read with the same table as
`fullshard launch --fsdp_config`, as soon as they are created.
"""

import copyreg
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fullshard.api.accelerates import parallelism
from fullshard.api.state import ProcessState, launched_device
from fullshard.comm.mesh import TIMEOUT_SECONDS
from fullshard.config.dialect import Reading, refuse
from fullshard.config.handover import launched, set_variables
from fullshard.config.load import load_fsdp_config
from fullshard.config.origin import Origin
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.transformers import read_fsdp_words
from fullshard.core.errors import ConfigError
from fullshard.launch.environment import read_rank_environment

NO_DEEPSPEED = "write its settings as fsdp_config, or use `fullshard launch` with the file"

_PREPARED: dict[str, Any] = {
    "min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False,
}  # fmt: skip
"""The values that Transformers adds to `fsdp_config` for keys that the user did not set."""


def read_fsdp_arguments(fsdp: Any, fsdp_config: Any) -> Reading:
    """Return the settings that `fsdp` and `fsdp_config` contain. `fsdp_config` has an effect even without `fsdp`."""
    reading = Reading()
    if isinstance(fsdp, list | tuple):  # Transformers also accepts a list of its FSDPOption
        fsdp = " ".join(str(getattr(word, "value", word)) for word in fsdp)
    if isinstance(fsdp, str) and fsdp.strip():
        reading.add(read_fsdp_words(fsdp, Origin.argument("TrainingArguments.fsdp")))
    if fsdp_config:
        if isinstance(fsdp_config, Mapping):
            fsdp_config = {k: v for k, v in fsdp_config.items() if k not in _PREPARED or v != _PREPARED[k]}
        else:
            fsdp_config = Path(fsdp_config)
        reading.add(load_fsdp_config(fsdp_config, "TrainingArguments.fsdp_config"))
    reading.find_contradictions()
    return reading


def resolved_configuration(args: Any) -> Resolved:
    """Return the configuration for training with a Trainer. Its arguments override the launcher's settings."""
    reading = args.__dict__.get("_fullshard_reading")
    if reading is None:  # Transformers' own class
        reading = read_fsdp_arguments(None if args.fsdp is True else args.fsdp, args.fsdp_config)
    return resolve([launched(), reading, parallelism(args.parallelism_config, reading)])


def join_accelerate() -> None:
    """Make Accelerate use the CPU, and find all ranks, if this process was launched without accelerators."""
    is_cpu = read_rank_environment().launched and not torch.accelerator.is_available()
    if is_cpu and "ACCELERATE_USE_CPU" not in os.environ:
        set_variables(ACCELERATE_USE_CPU="true")


class ShardedArguments:
    """A mixin for `TrainingArguments` that reads `fsdp` and `fsdp_config`, and joins the job."""

    def __post_init__(self: Any) -> None:
        if self.deepspeed:  # otherwise, Transformers would require the package
            raise ConfigError("TrainingArguments.deepspeed is not supported", hint=NO_DEEPSPEED)
        if not torch.accelerator.is_available() and launched_device() != "cuda":
            self.use_cpu = True  # Transformers would refuse bf16, although a CPU supports it
        super().__post_init__()  # type: ignore[misc]

    def _process_fsdp_args(self: Any) -> None:
        """Read `fsdp` and `fsdp_config`. Transformers calls this method after it has set all fields."""
        join_accelerate()
        reading = read_fsdp_arguments(self.fsdp, self.fsdp_config)
        refuse(reading.problems)
        self._fullshard_reading = reading
        # Scripts may read it. A run without a launcher has one rank, for which Transformers would refuse it.
        self.fsdp = _as_declared(self, self.fsdp if read_rank_environment().launched else None)
        self.fsdp_config = {**_PREPARED, **_plain(reading)}

    @cached_property
    def _setup_devices(self: Any) -> torch.device:
        """Return this rank's device. Create the process group first: Accelerate's would have no Gloo backend."""
        join_accelerate()
        if read_rank_environment().launched:
            device = "cpu" if self.use_cpu else launched_device()
            ProcessState.start(device=device, timeout_seconds=asked_timeout(self))
        return super()._setup_devices  # type: ignore[misc, no-any-return]

    def __reduce__(self: Any) -> Any:
        # Pickle it as an instance of the class that the module has under this name, so that training_args.bin can be
        # read without fullshard. `fsdp_config` contains all the settings of the reading.
        state = {key: value for key, value in self.__dict__.items() if key != "_fullshard_reading"}
        cls = type(self)
        named = getattr(sys.modules[cls.__module__], cls.__qualname__, cls)
        return copyreg._reconstructor, (named, object, None), state  # type: ignore[attr-defined]


def _as_declared(args: Any, fsdp: Any) -> Any:
    """Convert `fsdp` to the type that Transformers gives it after parsing: a boolean, or a list in Transformers 5.6."""
    declared = (vars(cls).get("__annotations__", {}).get("fsdp") for cls in type(args).__mro__)
    if "list" not in str(next(filter(None, declared))):  # HfArgumentParser changes the type of the field itself
        return bool(fsdp)
    option = sys.modules["transformers.trainer_utils"].FSDPOption
    words = "full_shard" if fsdp is True else fsdp or []
    return [option(str(getattr(w, "value", w)).lower()) for w in (words.split() if isinstance(words, str) else words)]


_WORDS = {"sharding.strategy": "sharding_strategy", "sharding.cpu_offload": "cpu_offload"}


def _plain(reading: Reading) -> dict[str, Any]:
    """Convert a reading back to an equivalent `fsdp_config`, since arguments may be copied field by field."""
    values = {_WORDS[s.path]: s.value for s in reading.settings if s.path in _WORDS}
    return values | {name.removeprefix("fsdp_"): entry.plain for name, entry in reading.entries.items()}


def asked_timeout(args: Any) -> float | None:
    """Return the timeout that the user set in `ddp_timeout`, in seconds. Return None if it has its default value."""
    seconds = float(args.ddp_timeout)
    return None if seconds == TIMEOUT_SECONDS else seconds
