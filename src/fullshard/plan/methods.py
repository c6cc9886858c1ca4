"""Apply a training method to the shapes of a model: dtypes, frozen parameters, adapters and quantization."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

from fullshard.core.errors import ConfigError
from fullshard.plan.job import Job
from fullshard.plan.quantized import TABLES, Conversion, is_stacked, why_small
from fullshard.plan.shapes import ModelShape, ParameterShape, UnitShape

EXPERTS_FORM = "nf4-double"
"""The form of weights for which bitsandbytes has no 4-bit layer."""

_OF_EXPERTS = ("mxfp4",)
"""The forms that published files use for stacked experts only; the others are used for linear layers, too."""

NF4_BLOCK, NESTED_BLOCK = 64, 256
"""Elements per scale, and scales per scale of scales (QLoRA, arXiv 2305.14314, section 3)."""


def apply_method(model: ModelShape, job: Job) -> ModelShape:
    """Return the shapes of `model` as they are during the training that `job` describes.

    In full training, main weights are float32. With precision `no`, they have their stored dtype. LoRA freezes the base
    model in its own dtype, and adds two float32 matrices to every target layer, as PEFT does. QLoRA also packs the
    weights of linear layers into 4 bits with double-quantized scales, and quantizes stacked experts to the form
    `EXPERTS_FORM`. With `quantize`, all large weights are quantized to that form.
    """
    if model.is_final:
        return _quantized(model, job.quantize) if job.quantize else model
    if job.method == "full" and job.quantize:
        raise ConfigError(
            "method full trains all weights, so quantize cannot be used with it",
            hint="set method to lora, or remove quantize",
        )
    if job.method == "full":
        dtype = job.main_dtype
        if all(p.exact or p.dtype == dtype for p in model.parameters):
            return model
        return model.map(lambda unit, p: [p] if p.exact else [dataclasses.replace(p, dtype=dtype)])
    wanted, folded = _targets(model, job)
    if folded and job.lora_dropout:
        raise ConfigError(
            f"lora_dropout {job.lora_dropout}: PEFT has no dropout for adapters of stacked experts",
            hint="remove lora_dropout, or set lora_targets to layers that are not experts",
        )

    def change(unit: UnitShape, parameter: ParameterShape) -> Iterator[ParameterShape]:
        frozen = dataclasses.replace(parameter, dtype=job.stored_dtype, trainable=False)
        is_matrix = _is_matrix(model, unit, parameter)
        rank = job.adapter_rank * next((n for name, n in folded.items() if parameter.name.endswith(f".{name}")), 0)
        if form := _form(model, unit, parameter, job):
            yield dataclasses.replace(frozen, form=form, folded_rank=rank)
        elif rank:
            yield dataclasses.replace(frozen, folded_rank=rank)
        else:
            yield from _packed(frozen) if is_matrix and job.method == "qlora" and not job.quantize else [frozen]
        if is_matrix and parameter.name.split(".")[-2] in wanted:
            stem = parameter.name.removesuffix(".weight")
            rows, columns = parameter.shape
            yield ParameterShape(f"{stem}.lora_A.default.weight", (job.adapter_rank, columns), role="adapter")
            yield ParameterShape(f"{stem}.lora_B.default.weight", (rows, job.adapter_rank), role="adapter")
        if rank:
            *experts, rows, columns = parameter.shape
            rank *= math.prod(experts)
            stem = parameter.name.rpartition(".")[0] + ".base_layer" * parameter.name.endswith("gate_up_proj")
            yield ParameterShape(f"{stem}.lora_A.default.weight", (rank, columns), role="adapter")
            yield ParameterShape(f"{stem}.lora_B.default.weight", (rows, rank), role="adapter")

    return model.map(change).with_adapters(dropout=bool(job.lora_dropout))


def _targets(model: ModelShape, job: Job) -> tuple[set[str], dict[str, int]]:
    """Return the targets of adapters: names of linear layers, and names of expert parameters with factors for the rank.

    Like PEFT, apply the published names of experts' projections and the router to the parameters into which
    Transformers converts them, even if other layers have these names. A parameter that merges two projections has twice
    the rank.
    """
    names = {p.name.split(".")[-2] for unit in model.units[:-1] for p in unit.parameters if p.role == "matrix"}
    converted = dict(model.converted_targets)
    targets = job.lora_targets or "all-linear"
    wanted = names | converted.keys() if targets == "all-linear" else {t.strip() for t in targets.split(",")}
    if unknown := sorted(wanted - names - converted.keys()):
        raise ConfigError(
            f"lora_targets: {model.name} has no linear layer named {', '.join(unknown)}",
            hint=f"use {', '.join(sorted(names | converted.keys()))}, or all-linear",
        )
    found = Counter(converted[name] for name in wanted & converted.keys())
    if parts := [name for name in found if 0 < found[name] < Counter(converted.values())[name]]:
        needed = " and ".join(name for name in converted if converted[name] == parts[0])
        raise ConfigError(
            f"lora_targets: {model.name} stores {needed} in one parameter, {parts[0]}",
            hint=f"target {needed} together, or none of them",
        )
    return wanted - converted.keys(), dict(found)


def form_of_files(model: ModelShape, job: Job) -> str:
    """Return the form of the published files if LoRA keeps its frozen weights in it, or an empty string."""
    return model.published_as if job.method == "lora" and job.quantize is None and job.base_dtype is None else ""


def _quantized(model: ModelShape, form: str) -> ModelShape:
    """Return the model with its large frozen weights quantized, as `fullshard.quantize` would do it."""

    def change(unit: UnitShape, parameter: ParameterShape) -> Iterator[ParameterShape]:
        is_free = not (parameter.trainable or parameter.exact or parameter.form)
        is_coded = is_free and _is_reached(parameter, is_matrix=_is_matrix(model, unit, parameter))
        yield dataclasses.replace(parameter, form=form) if is_coded else parameter

    return model.map(change)


def conversion_of(model: ModelShape, job: Job) -> Conversion:
    """Count the elements of a model that a job quantizes, and those of stacked experts that have no adapter."""
    found, (_, folded) = (
        Conversion(is_asked_for=True, form=job.quantize or form_of_files(model, job) or EXPERTS_FORM),
        _targets(model, job),
    )
    for unit in model.units:
        for parameter in unit.parameters:
            name, shape = parameter.name, parameter.shape
            is_matrix = _is_matrix(model, unit, parameter)
            if _form(model, unit, parameter, job):
                found.at_rest += parameter.numel
            elif is_matrix and not job.quantize:
                found.converted += parameter.numel
            else:
                is_table = parameter.role in ("embedding", "head")
                reason = TABLES if is_table else why_small(name, shape) or "others"
                found.add_whole(name, shape, reason, is_table=is_table)
            if not is_matrix and not any(name.endswith(f".{target}") for target in folded):
                found.unadapted += parameter.numel * is_stacked(name, shape)
    return found


def _form(model: ModelShape, unit: UnitShape, parameter: ParameterShape, job: Job) -> str:
    """Return the form in which fullshard stores a quantized weight, or "" if fullshard does not quantize it."""
    is_matrix = _is_matrix(model, unit, parameter)
    if not _is_reached(parameter, is_matrix=is_matrix):
        return ""
    if job.quantize or job.method == "qlora":
        return job.quantize or ("" if is_matrix else EXPERTS_FORM)
    return form_of_files(model, job) if not is_matrix or model.published_as not in _OF_EXPERTS else ""


def _is_reached(parameter: ParameterShape, *, is_matrix: bool) -> bool:
    """Return whether a parameter is quantized: a large weight of a linear layer or convolution, or a stack of them."""
    name, shape = parameter.name, parameter.shape
    is_stack = parameter.role == "other" and ((len(shape) > 2 and shape[0] > 1) or is_stacked(name, shape))
    return (is_matrix or is_stack) and not why_small(name, shape)


def _is_matrix(model: ModelShape, unit: UnitShape, parameter: ParameterShape) -> bool:
    return parameter.role == "matrix" and unit is not model.root


def _packed(weight: ParameterShape) -> Iterator[ParameterShape]:
    """Yield the tensors in which bitsandbytes stores a 4-bit weight: packed values, scales, and scales of scales."""
    scales = math.ceil(weight.numel / NF4_BLOCK)
    packed = dataclasses.replace(weight, shape=(math.ceil(weight.numel / 2), 1), dtype="uint8", exact=True)
    yield packed
    yield dataclasses.replace(packed, name=f"{weight.name}.absmax", shape=(scales,), role="scale")
    nested = (math.ceil(scales / NESTED_BLOCK),)
    yield dataclasses.replace(packed, name=f"{weight.name}.nested_absmax", shape=nested, dtype="float32", role="scale")
