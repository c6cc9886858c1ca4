"""Determine which weights are quantized: by bitsandbytes or, if large and not supported by it, at rest."""

import math
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fullshard.features.quantized_weights.marks import MARKS, form_at
from fullshard.features.quantized_weights.quantize import mark_large, weights
from fullshard.features.quantized_weights.scales import is_exact, is_to_be_quantized
from fullshard.plan.quantized import Conversion, is_stacked


def conversion_of(model: nn.Module) -> Conversion:
    """Count the quantized and unquantized parameters, without adapters, of a model that is not sharded yet."""
    config, seen, adapters = _quantization_config(model), set[int](), adapter_modules(model)
    found = Conversion(is_asked_for=config is not None)
    adapted = {id(module.get_base_layer()) for module in _adapted(model) if hasattr(module, "base_layer")}
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    skipped = tuple(getattr(config, "llm_int8_skip_modules", None) or ())
    reasons = {id(p): reason or what for _, _, p, what, reason in weights(model, left=skipped)}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or id(module) in adapters:
                continue
            seen.add(id(parameter))
            shape = _shape(module, parameter)
            if shape is not None:
                found.converted += math.prod(shape)
            elif form := form_at(module, name):
                shape = tuple(parameter.shape)
                found.form, found.at_rest = form, found.at_rest + parameter.numel()
            elif is_exact(parameter):
                continue  # scales
            else:
                shape = tuple(parameter.shape)
                is_table, is_accepted = isinstance(module, nn.Embedding) or module is head, path.endswith(skipped)
                reason = reasons[id(parameter)]
                found.add_whole(f"{path}.{name}", shape, reason, is_table=is_table, is_accepted=is_accepted)
            is_frozen_stack = not parameter.requires_grad and is_stacked(f"{path}.{name}", shape)
            if adapters and is_frozen_stack and id(module) not in adapted:
                found.unadapted += math.prod(shape)
    return found


def quantize_rest(model: nn.Module, *, freezes: bool = False) -> None:
    """Mark frozen large weights, or all if `freezes`, for quantization if bitsandbytes has no layer for them."""
    config = _quantization_config(model)
    if config is None:
        return
    form = "int8"
    if config.load_in_4bit:
        form = config.bnb_4bit_quant_type + "-double" * config.bnb_4bit_use_double_quant
    modules = model.named_modules()
    marked = (path for path, m in modules if path and any(one.form != form for one in vars(m).get(MARKS, {}).values()))
    mark_large(model, form, left=(*(config.llm_int8_skip_modules or ()), *marked), freezes=freezes)


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of all modules of adapters of any kind. The base model's files do not contain their parameters."""
    found: set[int] = set()
    for module in _adapted(model):
        for kind in module.adapter_layer_names:
            holder = getattr(module, kind, None)
            if isinstance(holder, nn.Module) and kind != "modules_to_save":  # those are copies of the model's
                found |= {id(part) for part in holder.modules()}
    return found


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names")]


def _quantization_config(model: nn.Module) -> Any:
    """Return the model's bitsandbytes settings, or None if its layers were converted individually."""
    quantizers = (module.__dict__.get("hf_quantizer") for module in model.modules())
    return next((q.quantization_config for q in quantizers if q is not None and "bnb" in type(q).__module__), None)


def _shape(module: nn.Module, parameter: Any) -> tuple[int, ...] | None:
    """Return the unquantized shape of a weight that bitsandbytes quantizes, now or on a device, or None."""
    holder = module[0] if isinstance(module, ParametrizationList) else parameter
    state = getattr(holder, "quant_state", None)
    if state is not None:
        return tuple(state.shape)
    is_8bit = hasattr(parameter, "SCB") and not parameter.has_fp16_weights
    return tuple(parameter.shape) if is_8bit or is_to_be_quantized(parameter) else None
