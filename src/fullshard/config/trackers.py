"""Experiment trackers and the packages they need."""

import importlib.util
from collections.abc import Iterable

from fullshard.core.errors import ConfigError

PACKAGES = {
    "tensorboard": ("tensorboard", "track"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
    "comet_ml": ("comet_ml", "comet"),
    "aim": ("aim", "aim"),
    "swanlab": ("swanlab", "swanlab"),
    "clearml": ("clearml", "clearml"),
    "dvclive": ("dvclive", "dvclive"),
}
"""Each tracker's package and the extra that installs it, by Accelerate's name for the tracker."""


def require_trackers(names: Iterable[str], said: str) -> None:
    """Refuse known trackers that are not installed, before a long run starts. `said` is the flag that named them."""
    for name in names:
        package, extra = PACKAGES.get(name, (None, ""))
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{said}: the tracker {name!r} is not installed", hint=f"pip install 'fullshard[{extra}]'"
            )
