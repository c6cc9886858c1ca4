"""Planning for a model object. Its shapes are read from its modules, so the model can be on the meta device."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
from torch import nn

from fullshard.api.plugin import configured_policy
from fullshard.config.schema import Dtype, RunConfig
from fullshard.core.dtypes import main_dtype
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.sizes import format_nbytes
from fullshard.engine.lookup import units_of
from fullshard.engine.precision import dtype_name
from fullshard.engine.unit import Unit
from fullshard.features.quantized_weights.marks import form_at
from fullshard.features.quantized_weights.scales import is_exact
from fullshard.features.unit_selection import unit_modules
from fullshard.launch import RankEnvironment, cuda
from fullshard.launch.device import name_of
from fullshard.optim import Muon
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.families import FAMILIES, from_config
from fullshard.plan.hardware import find_device, parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block, ModelShape, ParameterShape, UnitShape
from fullshard.wrap.partition import Slot, UnitPlan, partition

_SAME_MEMORY = 0.15
"""The fraction of a device's memory that its driver may reserve."""

_OF_PEFT = "base_model.model."
"""The prefix that PEFT's wrapper adds to the names of a model's parameters."""


def model_shape(model: nn.Module, *, policy: object = None) -> ModelShape:
    """Return the units into which the engine would divide `model`, with the dtypes and `requires_grad` of parameters.

    If the model is sharded, these are its units and the dtypes of its sharded parameters.
    The operations of a layer are known for the families in `fullshard.plan.families`, which are identified by the
    model's `config`. For other models, activations are not predicted. `policy` is the `policy` argument of
    `fullshard.features.unit_selection.unit_modules`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    plans = [_held_by(unit) for unit in units_of(model)] or partition([model], unit_modules(model, policy))
    order = {id(module): position for position, module in enumerate(model.modules())}
    first = min((order[id(plan.modules[0])] for plan in plans[:-1]), default=0)
    config, family = getattr(model, "config", None), None
    if getattr(config, "model_type", None) in FAMILIES:
        family = from_config(config.to_dict(), where=f"{type(model).__name__}.config")[0]  # type: ignore[union-attr]
    blocks = {} if family is None else {unit.name: unit.block for unit in family.units}
    folded = _folded_ranks(model)
    units = tuple(
        _unit(
            plan,
            names,
            block=blocks.get(names[id(plan.modules[0])].removeprefix(_OF_PEFT)),
            first=first,
            order=order,
            folded=folded,
        )
        for plan in plans
    )
    # In `plans` an inner unit precedes its outer unit, although its forward begins later.
    calls = sorted(plans[:-1], key=lambda plan: order[id(plan.modules[0])])
    shape = dataclasses.replace(
        family or ModelShape("", ()),  # has the vocabulary, width and head
        name=type(model).__name__,
        units=units,
        calls=tuple(names[id(plan.modules[0])] for plan in calls),
    )
    dropouts = (module for name, module in model.named_modules() if ".lora_dropout." in name)  # PEFT's
    return shape.with_adapters(dropout=any(isinstance(module, nn.Dropout) and module.p > 0 for module in dropouts))


def plan_model(
    model: nn.Module, devices: str, *, hosts: int | None = None, policy: object = None, **settings: Any
) -> Plan:
    """Predict the memory, traffic and time of training `model`, with its current dtypes and `requires_grad`.

    Args:
        model: a model that is not sharded, preferably on the meta device.
        devices: number and type of the devices, for example `8xH100`.
        hosts: the number of hosts. By default, as few hosts as these devices need.
        policy: selects the modules that become units.
        settings: fields of `fullshard.plan.job.Job`, except `method`, `lora_*` and `base_dtype`, which are read from
            the model.

    Raises:
        ConfigError: `model` is not a model, the hardware or a setting is unknown, or a setting is determined by the
            model.
        WrapError: the policy does not fit the model.
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        what = "one without parameters" if isinstance(model, nn.Module) else repr(model)
        raise ConfigError(f"plan: expected a model, got {what}", hint="for a name, use fullshard plan --model")
    decided = sorted(name for name in settings if name == "method" or name.startswith(("lora_", "base_")))
    if decided:
        raise ConfigError(
            f"the settings {', '.join(decided)} cannot be passed, because the model determines them",
            hint="remove them, or plan from a config.json",
        )
    shape = dataclasses.replace(model_shape(model, policy=policy), is_final=True)
    job = Job.of({"base_dtype": base_dtype(shape), **settings})
    shape = shape.map(
        lambda _, p: [dataclasses.replace(p, dtype=main_dtype(p.dtype, trainable=p.trainable, mode=job.precision))]
    )
    return evaluate(shape, job, parse_cluster(str(devices), hosts))


def plan_run(
    model: nn.Module,
    config: RunConfig,
    environment: RankEnvironment,
    device: torch.device,
    say: Callable[[str], None],
    **job: Any,
) -> Plan | None:
    """Predict a run of `model` that starts now, on the hardware of this rank.

    If the planner does not support the run, report the reason and return None. `job` contains the fields of a job that
    are not in the configuration. `say` is called with one line of text for the user.
    """
    hosts = max(1, environment.world_size // max(1, environment.local_world_size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sharding reports the same warnings
        try:
            devices = f"{environment.world_size}x{planned_device(device)}"
            settings = Job.from_run(config, **job).model_dump(exclude={"method", "base_dtype"})
            settings = {name: value for name, value in settings.items() if not name.startswith("lora_")}
            return plan_model(model, devices, hosts=hosts, policy=configured_policy(config.sharding), **settings)
        except (ConfigError, WrapError) as error:  # not fatal: sharding raises its own errors
            say(f"plan: this run cannot be planned: {str(error).splitlines()[0]}")
            return None


def planned_device(device: torch.device) -> str:
    """Return the planner's name for a device."""
    if device.type == "cpu":
        return "CPU"
    if device.type != "cuda":
        raise ConfigError(f"the planner has no data for devices of type {device.type}")
    name, nbytes = name_of(device), cuda.memory_nbytes(device)
    row = find_device(name)
    if abs(row.memory / nbytes - 1) >= _SAME_MEMORY:
        raise ConfigError(
            f"{name} has {format_nbytes(nbytes)}, but the planner assumes {format_nbytes(row.memory)} for {row.name}"
        )
    return row.name


def base_dtype(model: ModelShape) -> str:
    """Return the most common storage dtype of the weights. Only dtypes that a job supports are considered."""
    numels: Counter[str] = Counter()
    for parameter in model.parameters:
        numels[parameter.dtype] += parameter.numel
    dtypes: tuple[str, ...] = get_args(Dtype)
    return max(dtypes, key=lambda dtype: numels[dtype])


def _folded_ranks(model: nn.Module) -> dict[tuple[int, str], int]:
    """Return the ranks of PEFT adapters on bare parameters, keyed by (id of the owning module, parameter name)."""
    adapted: list[Any] = [m for m in model.modules() if hasattr(m, "parameter_name") and hasattr(m, "lora_A")]
    return {
        (id(module.get_base_layer()), module.parameter_name): sum(module.r.get(name, 0) for name in module.lora_A)
        for module in adapted
    }


def _held_by(unit: Unit) -> UnitPlan:
    """Return what a unit was made from, with its sharded parameters."""
    entries: Iterable[tuple[Slot, Any]] = unit.entries
    return UnitPlan(unit.modules, [dataclasses.replace(slot, parameter=held) for slot, held in entries])


def _unit(
    plan: UnitPlan,
    names: dict[int, str],
    *,
    block: Block | None,
    first: int,
    order: dict[int, int],
    folded: dict[tuple[int, str], int],
) -> UnitShape:
    name, position = names[id(plan.modules[0])], order[id(plan.modules[0])]
    embeds = block is None and (not name or position == first)  # not the position tables inside a layer

    def role_of(slot: Slot) -> str:
        module = slot.owners[0][0]
        if embeds and any(isinstance(owner, nn.Embedding) for owner, _ in slot.owners):
            return "embedding"
        if not name and order[id(module)] < first:
            return "input"
        is_matrix = isinstance(module, nn.Linear) and slot.parameter.ndim == 2
        return ("matrix" if name else "head") if is_matrix else "other"

    def shape_of(slot: Slot) -> ParameterShape:
        (module, attribute), parameter = slot.owners[0], slot.parameter
        path = names[id(module)]
        return ParameterShape(
            f"{path}.{attribute}" if path else attribute,
            tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad,
            exact=is_exact(parameter),
            form=form_at(module, attribute),
            statistics=None if slot.statistics_dtype is None else dtype_name(slot.statistics_dtype),
            role=role_of(slot),
            folded_rank=folded.get((id(module), attribute), 0),
        )

    return UnitShape(name, tuple(map(shape_of, plan.slots)), block)


def planned_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the planner's name for `optimizer`, or None if the planner has no formula for its state."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    if isinstance(optimizer, Muon):
        return "muon"
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd-momentum" if any(group["momentum"] for group in groups) else "sgd"
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and not any(group["amsgrad"] for group in groups):
        return "adamw-fused" if any(group["fused"] for group in groups) else "adamw"
    return "adamw-8bit" if name in ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit") else None
