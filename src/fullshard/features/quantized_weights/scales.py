"""Turn the scales of quantized weights into parameters, so that they are sharded like the weights.

A weight quantized by bitsandbytes keeps its scales as plain tensors in a Python attribute, outside the module tree. A
sharding engine that looks only at parameters leaves a full copy of them on every rank (1 GiB for a 4-bit 70B model).
Here each scale tensor becomes a frozen parameter of the same module as its weight. It has the name that bitsandbytes
uses in state dicts. Kernels read this same object, so no other code has to change.

| layer | weight | scales that become parameters |
|---|---|---|
| `Linear4bit`, `Embedding4bit` | packed values, any `quant_storage` | `weight.absmax`, `weight.nested_absmax` |
| `Linear8bitLt`, `Embedding8bit` | int8 | `SCB` |

Only tensors whose size does not depend on the layer stay on every rank: the code books and, with double quantization,
one offset, which becomes a buffer so that checkpoints include it. Kernels read them by address, so they must be on the
device of the weight. Weights and scales are *exact*: their bytes are gathered unchanged under any precision policy.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import WrapError
from fullshard.core.forms import Part, StoredForm
from fullshard.engine.kinds import ParameterKind
from fullshard.features.quantized_weights import torch_private
from fullshard.features.quantized_weights.codecs import FourBits, bitsandbytes

_EXACT = "_fullshard_exact"
_ALIASES = "_fullshard_aliases"


def is_exact(tensor: torch.Tensor) -> bool:
    """Return whether the tensor holds encoded bytes, which are never cast or computed with."""
    return getattr(tensor, _EXACT, False)


def aliases(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return other tensors that kernels read in place of the parameter, and that must use the same memory."""
    return getattr(parameter, _ALIASES, ())


def expose_scales(model: nn.Module) -> None:
    """Turn the scales of all quantized weights in `model` into frozen parameters, in place, unless they are already."""
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        for name, holder, attribute in _scales(path, module, weight):
            scale = getattr(holder, attribute)
            if not isinstance(scale, nn.Parameter):
                scale = nn.Parameter(scale.detach(), requires_grad=False)
                setattr(holder, attribute, scale)
            _mark(scale)
            _mark(weight)
            # register_parameter does not allow the dot in the names of bitsandbytes' state dicts.
            module._parameters[name] = scale
        _keep_in_place(module, weight)


def place_tables(module: nn.Module, device: torch.device) -> None:
    """Move the code books and the offset, which are not sharded, to the compute device if they are elsewhere."""
    weight: Any = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    if state is None or not is_exact(weight) or state.code.is_meta:
        return
    state.code = state.code.to(device)
    if state.nested:
        state.state2.code = state.state2.code.to(device)
    if state.offset is not None:
        state.offset = module._buffers["weight.nested_offset"] = state.offset.to(device)
        _mark(state.offset)


def _keep_in_place(module: nn.Module, weight: Any) -> None:
    """Keep bitsandbytes from copying or replacing the layer's weight, and make its offset a buffer."""
    if not is_exact(weight):
        return
    # With DoRA on a CPU, PEFT "moves" the weight to its own device in every forward, and bitsandbytes would copy it.
    weight.to = partial(_moved, weight)
    if hasattr(weight, "quant_state"):
        # On some CPUs the first forward in eval mode would replace the weight by a copy in another layout.
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        offset = weight.quant_state.offset
        if offset is not None:
            _mark(offset)
            module._buffers["weight.nested_offset"] = offset
    else:
        # bitsandbytes keeps the int8 values under a second name, which would hold all of them in memory.
        holder: Any = weight if weight.CB is not None else module.state
        holder.CB = weight.detach()
        setattr(weight, _ALIASES, (holder.CB,))


def _moved(weight: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Return `weight.to(...)`, or the weight itself if its device and dtype would stay the same."""
    device, dtype, *_ = torch_private.parse_to(*args, **options)
    if device in (None, weight.device) and dtype in (None, weight.dtype):
        return weight  # type: ignore[no-any-return]
    return type(weight).to(weight, *args, **options)  # type: ignore[no-any-return]


def _scales(path: str, module: nn.Module, weight: nn.Parameter) -> Iterator[tuple[str, Any, str]]:
    """Yield `(parameter name, object, attribute)` for each scale tensor of `module`, an attribute of the object."""
    if hasattr(weight, "quant_state"):  # 4 bits
        state = weight.quant_state or getattr(module, "quant_state", None)
        if state is None:
            raise _not_quantized(path, module)
        weight.quant_state = state
        if getattr(state, "packing_format_for_cpu", False):
            raise WrapError(
                f"the weight of {path or type(module).__name__} has bitsandbytes' layout for inference on a CPU",
                hint="shard the model before it runs in eval mode",
            )
        yield "weight.absmax", state, "absmax"
        if state.nested:
            yield "weight.nested_absmax", state.state2, "absmax"
    elif hasattr(weight, "SCB") and not weight.has_fp16_weights:  # type: ignore[attr-defined]
        if weight.SCB is None and getattr(getattr(module, "state", None), "SCB", None) is None:
            raise _not_quantized(path, module)
        yield "SCB", weight if weight.SCB is not None else module.state, "SCB"


def _mark(tensor: torch.Tensor) -> None:
    setattr(tensor, _EXACT, True)


def _not_quantized(path: str, module: nn.Module) -> WrapError:
    return WrapError(
        f"the weight of {path or type(module).__name__}, a {type(module).__name__}, is not quantized yet",
        hint="first move the model to its device, even to the CPU (model.to('cpu')): bitsandbytes quantizes it then",
    )


def outline(model: nn.Module) -> None:
    """Give meta weights that bitsandbytes will quantize the shape and the scales that they will have then."""
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if is_to_be_quantized(weight) and weight.is_meta:
            if hasattr(weight, "quant_state"):
                # Transformers has cast it to the storage dtype of the codes.
                weight.data = weight.data.float()
            weight._quantize("meta")
            # PEFT copies layers to make DoRA's magnitudes, and bitsandbytes cannot copy a weight without memory.
            weight.__deepcopy__ = lambda _, outlined=weight: outlined
    # bitsandbytes caches its code tables on the device that first requested them.
    tables: Any = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
    for name in [name for name, table in tables.items() if table.is_meta]:
        del tables[name]


def is_to_be_quantized(weight: Any) -> bool:
    """Return whether bitsandbytes will quantize this weight, but has not done so yet."""
    if hasattr(weight, "quant_state"):
        return not weight.bnb_quantized
    return hasattr(weight, "SCB") and not weight.has_fp16_weights and weight.SCB is None and weight.CB is None


def whole_shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return the unquantized shape of a module's weight that `outline` has changed, or None for any other module."""
    weight: Any = module._parameters.get("weight")
    if weight is None or not weight.is_meta:
        return None
    if getattr(weight, "quant_state", None) is not None:
        return tuple(weight.quant_state.shape)
    return tuple(weight.shape) if hasattr(weight, "SCB") and weight.dtype is torch.int8 else None


def quantize(module: nn.Module, values: torch.Tensor) -> None:
    """Replace a weight that `outline` has prepared with the quantized one, computed from `values` on their device."""
    outlined: Any = module._parameters["weight"]
    if hasattr(outlined, "quant_state"):
        packed, state = _quantize_4bit(values, outlined)
        weight = type(outlined)(
            packed,
            requires_grad=False,
            quant_state=state,
            blocksize=outlined.blocksize,
            compress_statistics=outlined.compress_statistics,
            quant_type=outlined.quant_type,
            quant_storage=outlined.quant_storage,
            module=module,
            bnb_quantized=True,
        )
        module.quant_state = state
    else:
        weight = type(outlined)(values, requires_grad=False, has_fp16_weights=False)._quantize(values.device)
    module._parameters["weight"] = weight
    expose_scales(module)


def dequantized(module: nn.Module) -> torch.Tensor:
    """Return the dequantized weight of a module. The weight must be unsharded."""
    functional = bitsandbytes()
    weight: Any = module._parameters["weight"]
    is_4bit = hasattr(weight, "quant_state")
    dequantize = functional.dequantize_4bit if is_4bit else functional.int8_vectorwise_dequant
    values: torch.Tensor = dequantize(weight.data, weight.quant_state if is_4bit else module._parameters["SCB"])
    return values


def _quantize_4bit(values: torch.Tensor, outlined: Any) -> tuple[torch.Tensor, Any]:
    """Return `(packed values, quant_state)` as `bitsandbytes.functional.quantize_4bit` does, bit for bit, in pieces."""
    functional = bitsandbytes()
    parts = Part("codes", "uint8", 2), Part("scales", "float32", outlined.blocksize)
    codes, scales = FourBits(StoredForm(outlined.quant_type, parts)).encode(values.view(-1))
    state = functional.QuantState(
        scales,
        shape=values.shape,
        dtype=values.dtype,
        code=functional.get_4bit_type(outlined.quant_type, device=values.device),
        blocksize=outlined.blocksize,
        quant_type=outlined.quant_type,
    )
    if outlined.compress_statistics:
        state.offset = scales.mean()
        state.absmax, state.state2 = functional.quantize_blockwise(scales - state.offset, blocksize=256)
        state.nested = True
    return codes.view(outlined.quant_storage)[:, None], state


class QuantizedWeight(ParameterKind):
    """The kind of weights that bitsandbytes has quantized, and of their scales."""

    is_exact = True

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a quantized weight or one of its scales."""
        return is_exact(tensor)

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Turn the scales of quantized weights into parameters."""
        if is_read_later:  # weights not yet read from files have no scales
            outline(model)
        expose_scales(model)

    def to_device(self, module: nn.Module, device: torch.device) -> None:
        """Move the code books of a module's quantized weight to the device."""
        place_tables(module, device)

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Make a weight use the memory of `plain`, together with the other tensors that kernels read in its place."""
        for tensor in (parameter, *aliases(parameter)):
            super().set_plain(tensor, plain)
