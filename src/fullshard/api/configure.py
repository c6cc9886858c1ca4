"""Combine the settings of a script and its launcher in one `RunConfig`. The script's settings take precedence."""

from collections.abc import Iterator, Mapping
from typing import Any

from fullshard.api.accelerates import parallelism
from fullshard.api.plugin import FullyShardedDataParallelPlugin, say_once, tell_transformers
from fullshard.config.accelerate import FLAT
from fullshard.config.dialect import Note, Reading, Setting, Status, shown
from fullshard.config.handover import launched, whole
from fullshard.config.origin import Origin, entries_of
from fullshard.config.resolve import resolve
from fullshard.config.schema import RunConfig, ShardingConfig
from fullshard.core.errors import ConfigError


def run_config(plugin: Any, arguments: Mapping[str, Any], parallelism_config: Any = None) -> RunConfig:
    """Merge the settings of the launcher, the Accelerator's arguments, the plugin and a `ParallelismConfig`."""
    given = {name: value for name, value in arguments.items() if value is not None}
    accelerator, plugins = FLAT.read(entries_of(given, "Accelerator")), _reading(plugin)
    base: Reading | None = getattr(plugin, "base", None)
    above = parallelism(parallelism_config, plugins if plugins.setting("sharding.strategy") or not base else base)
    below = base or launched()
    resolved = resolve([below, accelerator, plugins, above])
    if isinstance(plugin, FullyShardedDataParallelPlugin):
        plugin.show(resolved.config)
    say_once([*resolved.notes, *_given_way(accelerator, plugins), *_replaced(below, accelerator)])
    if resolved.config.sharding.cpu_ram_efficient_loading:
        tell_transformers()
    return resolved.config


def flat_settings(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return (value, default) of each setting, by its name in a file, such as `sharding.strategy`."""
    values, defaults = config.model_dump(mode="json"), RunConfig().model_dump(mode="json")
    return {f"{at}.{name}": (value, defaults[at][name]) for at, part in values.items() for name, value in part.items()}


def _given_way(accelerator: Reading, plugins: Reading) -> Iterator[Note]:
    """Yield a note for each argument of the Accelerator that a plugin setting overrides."""
    for setting in accelerator.settings:
        other = plugins.setting(setting.path)
        if other is not None and other.value != setting.value:
            text = f"= {shown(setting.value)} is overridden by the plugin's {other.key} = {shown(other.value)}"
            yield Note(setting.origin, setting.key, Status.NO_EFFECT, text)


def _replaced(below: Reading, accelerator: Reading) -> Iterator[Note]:
    """Yield a note if the Accelerator's precision replaces the one that the launcher has printed."""
    theirs, own = below.setting("precision.mode"), accelerator.setting("precision.mode")
    if theirs is not None and own is not None and own.value != theirs.value != "no":  # the default
        text = f"= {shown(own.value)} is used instead of {shown(theirs.value)} from {theirs.origin}"
        yield Note(own.origin, own.key, Status.TRANSLATED, text)


def _reading(plugin: Any) -> Reading:
    if isinstance(plugin, FullyShardedDataParallelPlugin):
        return plugin.reading()
    if isinstance(plugin, RunConfig):
        return whole(plugin, Origin.argument("fsdp_plugin"))
    if plugin is None or isinstance(plugin, ShardingConfig | Mapping):
        config = ShardingConfig.of(plugin)
        origin = Origin.argument("fsdp_plugin")
        names = [name for name in ShardingConfig.model_fields if name in config.model_fields_set]
        return Reading(settings=[Setting(f"sharding.{name}", getattr(config, name), origin, name) for name in names])
    raise ConfigError(
        f"fsdp_plugin has the unsupported type {type(plugin).__module__}.{type(plugin).__name__}",
        hint="use fullshard.FullyShardedDataParallelPlugin, which has the same fields",
    )
