"""Sharded subclasses of the classes of Transformers and TRL."""

import sys
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.imports import import_extra
from fullshard.integrations.transformers.arguments import ShardedArguments
from fullshard.integrations.transformers.trainer import ShardedTraining

_SINCE = (5, 0)
_TRL = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation")
_HOMES = {
    **dict.fromkeys(("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments"), "transformers"),
    **{f"{name}{kind}": "trl" for name in _TRL for kind in ("Trainer", "Config")},
}


def sharded(original: type) -> type:
    """Return a subclass of a trainer or of training arguments that uses fullshard's engine.

    The subclass has the same name as the original.

    Raises:
        ConfigError: If the version of Transformers is too old.
    """
    mixin = ShardedArguments if "Argument" in original.__name__ or "Config" in original.__name__ else ShardedTraining
    if issubclass(original, mixin):
        return original
    _check_version()
    # The module stays the same, so that training_args.bin can be unpickled with or without fullshard.
    return type(original.__name__, (mixin, original), {"__module__": original.__module__, "__doc__": original.__doc__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = _HOMES[name]
    extra = "sft" if package == "trl" else "hf"
    module = import_extra(package, extra=extra, purpose=f"{name} on fullshard's engine")
    value = sharded(getattr(module, name))
    globals()[name] = value
    return value


def _check_version() -> None:
    version = sys.modules["transformers"].__version__
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _SINCE:
        raise ConfigError(
            f"Transformers {version} is too old to run its Trainer on fullshard's engine, which requires 5.0 or later",
            hint="pip install -U transformers",
        )
