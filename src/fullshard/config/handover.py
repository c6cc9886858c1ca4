"""Passes the resolved configuration from the launcher to its workers, in a file named by an environment variable.

A script may set Accelerate's variables afterwards. They take precedence over the file, as they do in Accelerate, where
the plugin reads the variables when it is created. The file also contains the variables as the launcher found them, so
that a worker does not apply the same values a second time.
"""

import json
import os
from pathlib import Path

from fullshard.config.dialect import Note, Reading, Setting, Status, shown
from fullshard.config.environment import accelerates_variables, load_environment
from fullshard.config.origin import Origin, Precedence
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.switches import CONFIG
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_object

_ENVIRONMENT = "environment"
_own = {("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")}
"""Variables and values that users did not choose, set here for Transformers or by Accelerate for each plugin."""


def hand_over(config: RunConfig, path: Path) -> dict[str, str]:
    """Write `config` and Accelerate's variables to `path`. Return the variables that tell workers where it is."""
    document = {**json.loads(config.model_dump_json()), _ENVIRONMENT: accelerates_variables(os.environ)}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return {CONFIG.name: str(path)}


def handed_over() -> RunConfig | None:
    """Return the configuration that a launcher handed to this process, or None if there is none."""
    found = _read()
    return None if found is None else found[0]


def _read() -> tuple[RunConfig, dict[str, str]] | None:
    path = CONFIG.read()
    if not path:
        return None
    try:
        document = read_object(Path(path))
        environment = document.pop(_ENVIRONMENT)
        return RunConfig.model_validate_json(json.dumps(document)), environment
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:  # also for text that is not UTF-8
        raise ConfigError(
            f"${CONFIG.name} = {path} does not contain a resolved configuration: {error}",
            hint="start the script with `fullshard launch`, or unset the variable",
        ) from None


def launched() -> Reading:
    """Read the launcher's file (or the variables of `accelerate launch`), and what the script has set since."""
    found = _read()
    if found is None:
        return load_environment()
    config, before = found
    reading = whole(config, Origin(Precedence.FILE, "fullshard launch"))
    now = accelerates_variables(os.environ)
    changed = {Origin.variable(name) for name, value in now.items() - before.items() - _own}
    if changed:
        said_now = load_environment()
        reading.settings += [setting for setting in said_now.settings if setting.origin in changed]
        reading.notes += [note for note in said_now.notes if note.origin in changed]
        reading.problems += [problem for problem in said_now.problems if changed & set(problem.origins)]
        for setting in reading.settings[len(SETTINGS) :]:
            if setting.value != (said := config.value(setting.path)):
                instead = "the default" if said is None else shown(said)
                text = f"= {shown(setting.value)}, set by the script, replaces {instead}"
                reading.notes.append(Note(setting.origin, setting.key, Status.TRANSLATED, text))
    return reading


def set_variables(**variables: str) -> None:
    """Set environment variables for other libraries. They must only repeat what the configuration contains."""
    os.environ.update(variables)
    _own.update(variables.items())


def whole(config: RunConfig, origin: Origin) -> Reading:
    """Return a reading of all settings of a configuration, with `origin` as their source."""
    return Reading(settings=[Setting(path, config.value(path), origin, path.split(".")[1]) for path in SETTINGS])
