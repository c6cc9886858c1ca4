"""A moving average of the weights, sharded in the same way as the weights.

each rank      averages its own intervals element by element, without communication
swapped()      temporarily replaces the weights with the averages, for an evaluation or an export
a checkpoint   stores the averages next to the optimizer state, and can be loaded on any number of ranks
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import ConfigError, LifecycleError, OptimizerError
from fullshard.engine.lookup import clean_name, refuse_pinned, require_module, units_of
from fullshard.engine.parameter import ShardedParameter, are_same, sharded_parameter_of
from fullshard.engine.sharded_tensor import ShardedTensor

_HALF = (torch.bfloat16, torch.float16)
_ANEW = "create fullshard.EMA(model, ...) after the model is sharded and its trainable parameters are unfrozen"


class EMA:
    """An exponential moving average of the trainable parameters. It works with any optimizer.

        ema = fullshard.EMA(model, decay=0.999)         # a sharded model
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.swapped():                             # on every rank
            evaluate(model)

    `save_checkpoint(..., objects=[ema])`, `load_checkpoint` and `Accelerator.register_for_checkpointing(ema)` accept
    it, on any number of ranks. The results are the same as those of `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn(decay)`.

    Args:
        model: a model that is already sharded, will be sharded, or runs in one process. Frozen parameters and buffers
            are not averaged.
        decay: the fraction of the old average that an update keeps, from 0 to 1. The first update copies the weights.
            It can also be a function of the number of earlier updates: `lambda t: t / (t + 1)` computes the plain
            mean, and `lambda t: min(0.9999, (1 + t) / (10 + t))` warms up.
        device: device of the averages, for example `cpu`; by default, the device of the weights.
        key: name of the averages in a checkpoint, needed if one model has several averages.

    Attributes:
        updates: number of updates so far.

    Raises:
        ConfigError: `model` is not a module, or the decay is below 0 or above 1.
        LifecycleError: The model is on the meta device, or has no trainable parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        device: torch.device | str | None = None,
        key: str = "average",
    ) -> None:
        require_module(model)
        self.updates, self.key = 0, key
        self._model, self._decay, self._is_swapped = model, decay, False
        if not callable(decay):
            _check_decay(decay)
        self._names, self._parameters = _trained(model)
        if not self._parameters:
            raise LifecycleError(f"EMA: {type(model).__name__} has no trainable parameters", hint=_ANEW)
        on_meta = next((name for name, p in zip(self._names, self._parameters, strict=True) if p.is_meta), None)
        if on_meta is not None:
            raise LifecycleError(f"EMA: {on_meta} is on the meta device and has no values to average", hint=_ANEW)
        weights = [_local(p).detach() for p in self._parameters]
        # bfloat16 has eight significant bits, too few for an update of one part in a thousand.
        wider = [torch.float32 if weight.dtype in _HALF else weight.dtype for weight in weights]
        placed = zip(weights, wider, strict=True)
        self._averages = [weight.to(device or weight.device, dtype, copy=True) for weight, dtype in placed]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights. Call this after each optimizer step. It is not a collective.

        Raises:
            LifecycleError: Other parameters are trainable than at construction, or the averages are swapped in.
            ConfigError: `decay` did not return a number from 0 to 1.
        """
        if self._is_swapped:
            raise LifecycleError(
                "EMA.update() was called inside `with ema.swapped()`, where the averages replace the weights"
            )
        self._check_model()
        decay = self._decay(self.updates) if callable(self._decay) else self._decay if self.updates else 0.0
        _check_decay(decay)
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            weights = _local(parameter).to(average.device, average.dtype)
            if decay:
                average.lerp_(weights, 1 - decay)
            else:
                average.copy_(weights)
        self.updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the weights with the averages, rounded to the dtype of the weights, inside the block.

        Every rank must enter and leave the block. The block needs memory for a second copy of this rank's intervals.

        Raises:
            LifecycleError: The block is nested in itself or in `unsharded(model)`, or the weights were changed inside
                it. Such changes are lost.
        """
        if self._is_swapped:
            raise LifecycleError("ema.swapped() was entered inside another ema.swapped()")
        self._check_model()
        weights = [_local(parameter) for parameter in self._parameters]
        self._rest()
        held = [weight.clone() for weight in weights]
        _copy_all(weights, self._averages)
        versions, self._is_swapped = [weight._version for weight in weights], True
        try:
            yield
        finally:
            self._is_swapped = False
            changed = [n for n, w, v in zip(self._names, weights, versions, strict=True) if w._version != v]
            self._rest()
            _copy_all(weights, held)
        if changed:
            raise LifecycleError(
                f"{changed[0]} ({len(changed)} in all) was changed inside `with ema.swapped()`; the change is lost",
                hint="train, load and step outside the block",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict for DCP with the number of updates, and the averages keyed by parameter name."""
        self._check_model()
        averages = {
            name: ShardedTensor(average, parameter.spec) if isinstance(parameter, ShardedParameter) else average
            for name, parameter, average in zip(self._names, self._parameters, self._averages, strict=True)
        }
        return {"updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that `state_dict` returned for this model, whether the model was sharded or not.

        Raises:
            OptimizerError: Names or shapes do not match. The averages are left unchanged.
        """
        self._check_model()
        averages = state_dict["averages"]
        problems = [f"{name} is missing" for name in self._names if name not in averages]
        problems += [f"{name} is not trainable in this model" for name in averages if name not in self._names]
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name in averages and averages[name].shape != parameter.shape:
                problems.append(f"{name} has shape {tuple(averages[name].shape)}, expected {tuple(parameter.shape)}")
        if problems:
            raise OptimizerError("EMA: the state dict does not match the model:\n" + "\n".join(problems))
        for name, parameter, average in zip(self._names, self._parameters, self._averages, strict=True):
            average.copy_(_own(averages[name], parameter))
        self.updates = int(state_dict["updates"])

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this object averages the parameters of `model`."""
        own = {id(p) for p in model.parameters()}
        return not own.isdisjoint(self.by_parameter)

    @property
    def by_parameter(self) -> dict[int, torch.Tensor]:
        """Return this rank's part of each average, of shape (n,) if sharded, keyed by the id of its parameter."""
        self._check_model()
        return {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this rank's part of each average by parameter, in the form of an optimizer's state, for `park`."""
        return {p: {"average": average} for p, average in zip(self._parameters, self._averages, strict=True)}

    def _check_model(self) -> None:
        refuse_pinned(units_of(self._model), "EMA", "leave `with unsharded(model)` first")
        names, parameters = _trained(self._model)
        if are_same(parameters, self._parameters):
            return
        if are_same(parameters, [sharded_parameter_of(p) for p in self._parameters]):  # created before sharding
            self._averages = [_own(a, p).clone() for a, p in zip(self._averages, parameters, strict=True)]
            self._parameters = parameters
        else:
            others = sorted(set(names) ^ set(self._names)) or names
            raise LifecycleError(
                "EMA: the trainable parameters are not the ones that the EMA was created with: "
                f"{', '.join(others[:3])} ({len(others)} in all)",
                hint=_ANEW,
            )

    def _rest(self) -> None:
        """Reshard all units, because the values of the weights are about to change."""
        units = units_of(self._model)
        for unit in units:
            unit.reshard()
        for schedule in dict.fromkeys(unit.schedule for unit in units):
            schedule.settle()


def _trained(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = [(clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [p for _, p in named]


def _check_decay(decay: float) -> None:
    if not 0 <= decay <= 1:
        raise ConfigError(
            f"EMA: decay is {decay}, expected a number from 0 to 1",
            hint="use 0.999 to average about the last thousand steps",
        )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.local if isinstance(parameter, ShardedTensor) else parameter.detach()


@torch.no_grad()
def _copy_all(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _own(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds of a tensor with the parameter's shape."""
    if not isinstance(parameter, ShardedParameter):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return parameter.interval_of(value, "average")
    return parameter.spec.cut(value)
