"""Moving averages of the weights in Trainer: the callback that updates them, and the functions that Trainer calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import ConfigError
from fullshard.optim import EMA


class KeepsAverage:
    """A callback that updates a moving average of the weights after each step.

    Args:
        decay, device, key: See `fullshard.EMA`.
        evaluates: Whether Trainer evaluates and predicts with the average instead of the trained weights.

    Attributes:
        ema: The average, or None before training.
        is_saved: Whether the callback belongs to one of fullshard's Trainers, which save the average.
    """

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        *,
        evaluates: bool = True,
        device: torch.device | str | None = None,
        key: str = "average",
    ) -> None:
        self.evaluates, self.is_saved = evaluates, False
        self._decay, self._device, self._key = decay, device, key
        self._model: nn.Module | None = None
        self.ema: EMA | None = None

    def average_of(self, model: nn.Module) -> EMA:
        """Return the moving average of a model's weights, and create it on the first call."""
        if self.ema is None or self._model is not model:
            self._model, self.ema = model, EMA(model, self._decay, device=self._device, key=self._key)
        return self.ema

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the average unless it was loaded. Other Trainers raise `ConfigError`: they would not save it."""
        if not self.is_saved:
            raise ConfigError(
                "EMACallback requires fullshard's Trainer, because this Trainer would not save the average",
                hint="import Trainer from fullshard.integrations.transformers, or use fullshard launch",
            )
        self.average_of(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the average with the current weights."""
        self.average_of(kwargs["model"]).update()


def averages_of(trainer: Any) -> list[EMA]:
    """Return the moving averages that a Trainer's callbacks keep."""
    return [each.average_of(trainer.model) for each in _callbacks(trainer)]


def announce_averages(trainer: Any) -> None:
    """Tell callbacks that their averages will be saved. TRL's `BEMACallback` does not support sharded weights."""
    if any(cls.__name__ == "BEMACallback" for each in trainer.callback_handler.callbacks for cls in type(each).__mro__):
        raise ConfigError(
            "TRL's BEMACallback copies unsharded weights, but each rank only has a part of them",
            hint="use EMACallback from fullshard.integrations.transformers",
        )
    for each in _callbacks(trainer):
        each.is_saved = True


@contextlib.contextmanager
def averaged(trainer: Any) -> Iterator[None]:
    """Replace the model's weights by their average within the block, if a callback requests this for evaluation."""
    emas = [each.ema for each in _callbacks(trainer) if each.evaluates and each.ema is not None]
    if len(emas) > 1:
        raise ConfigError(
            f"{len(emas)} callbacks request evaluation with their averages, but only one may",
            hint="set EMACallback(..., evaluates=False) for the others",
        )
    with emas[0].swapped() if emas else contextlib.nullcontext():
        yield


def _callbacks(trainer: Any) -> list[KeepsAverage]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, KeepsAverage)]
