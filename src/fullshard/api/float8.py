"""The precision mode fp8: Accelerate replaces linear layers with torchao's before sharding."""

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import AORecipeKwargs, convert_model_to_fp8_ao, has_ao_layers
from torch import nn

from fullshard.config.schema import PrecisionConfig
from fullshard.core.errors import ConfigError
from fullshard.core.imports import import_extra


def float8_recipe(handlers: Mapping[str, Any], precision: PrecisionConfig) -> Any:
    """Return the `AORecipeKwargs` of a script, which apply in every mode, or of the mode fp8. Otherwise return None."""
    if precision.mode != "fp8" or "AORecipeKwargs" in handlers:
        return handlers.get("AORecipeKwargs")
    import_extra("torchao.float8", extra="quant", purpose="mixed_precision = fp8")
    return AORecipeKwargs(None, None, precision.fp8_pad_inner_dim, precision.fp8_all_gather)


def compute_in_float8(model: nn.Module, recipe: Any, say: Callable[[str], None], *, is_late: bool) -> None:
    """Replace the linear layers that `recipe` selects, if there is one and the script has not replaced any."""
    if recipe is None or has_ao_layers(model):
        return
    if is_late:
        raise ConfigError(
            f"fp8 replaces layers, but the {type(model).__name__} is already sharded",
            hint="call accelerate.utils.convert_model_to_fp8_ao(model) before the model is sharded",
        )
    convert_model_to_fp8_ao(model, config=recipe.config, module_filter_func=recipe.module_filter_func)
    if not has_ao_layers(model):
        say(f"{type(model).__name__}: fp8 has no effect, because it selects no linear layer (never the first and last)")
