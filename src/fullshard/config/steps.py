"""Keys about an optimizer step, which DeepSpeed and Accelerate's launcher share."""

from __future__ import annotations

from typing import Any

from fullshard.config import values
from fullshard.config.dialect import Key, Settings

AUTO = "auto leaves it to the script"


def is_auto(value: Any) -> bool:
    """Return whether a value is DeepSpeed's `auto`."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def unless_auto(path: str) -> Any:
    """Return a reader for the setting at `path`, which `auto` leaves to the script."""

    def read(value: Any) -> Settings | str:
        return AUTO if is_auto(value) else {path: values.coerce(path, value)}

    return read


def _clipping(value: Any) -> Settings | str:
    if is_auto(value) or values.is_none(value):
        return AUTO
    limit = values.number(value)
    return {"training.gradient_clipping": limit} if limit != 0 else {}  # DeepSpeed's 0 does not clip


STEP_KEYS = (
    Key(
        "gradient_accumulation_steps",
        target="training.gradient_accumulation_steps",
        read=unless_auto("training.gradient_accumulation_steps"),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    Key(
        "gradient_clipping",
        target="training.gradient_clipping",
        read=_clipping,
        variable="ACCELERATE_GRADIENT_CLIPPING",
    ),
)
