"""How the launcher gives the resolved configuration to its workers: one file, named by one variable."""

from __future__ import annotations

from pathlib import Path

from fullshard.config.dialect import Reading, Setting
from fullshard.config.load import load_environment
from fullshard.config.origin import Origin, Precedence
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.switches import CONFIG
from fullshard.core.errors import ConfigError


def hand_over(config: RunConfig, path: Path) -> dict[str, str]:
    """Write `config` to `path`, and give the variables that tell a worker of it."""
    path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return {CONFIG.name: str(path)}


def handed_over() -> RunConfig | None:
    """The configuration that a launcher handed to this process; None if none did.

    Raises:
        ConfigError: the file is gone or holds anything else.
    """
    path = CONFIG.read()
    if not path:
        return None
    try:
        return RunConfig.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of text that is no UTF-8, too
        raise ConfigError(
            f"${CONFIG.name} = {path} holds no resolved configuration: {error}",
            hint="start the script with `fullshard launch`, or unset the variable",
        ) from None


def launched() -> Reading:
    """What the launcher handed over; without one what the environment says, as `accelerate launch` leaves it."""
    config = handed_over()
    if config is None:
        return load_environment()
    return whole(config, Origin(Precedence.ENVIRONMENT, "fullshard launch"))


def whole(config: RunConfig, origin: Origin) -> Reading:
    """Every setting of a configuration, as said by `origin`."""
    return Reading(settings=[Setting(path, config.value(path), origin, path.split(".")[1]) for path in SETTINGS])
