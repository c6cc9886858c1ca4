"""TRL's `BEMACallback`, an average of the weights that corrects its bias, of a sharded model.

By itself it would copy whole weights, which no rank has, and save on the main process alone. Here each rank keeps its
intervals of the average, and all ranks save it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api.saving import save_model
from fullshard.api.sharding import is_sharded
from fullshard.checkpoint.adapters import is_saved_as_adapters
from fullshard.launch.environment import read_rank_environment


def shard_bias_corrected_averages() -> None:
    """Make TRL's callback keep a sharded model's average in parts; with adapters it has none of any model."""
    theirs: Any = getattr(sys.modules.get("trl.trainer.callbacks"), "BEMACallback", None)
    if theirs is None or hasattr(theirs, "of_trl"):
        return
    begin, end = theirs.on_train_begin, theirs.on_train_end

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if not is_sharded(model) or is_saved_as_adapters(model):
            begin(self, args, state, control, model, **kwargs)
            return
        average = _Average(model)
        self.running_model, self.device = average, next(model.parameters()).device
        self.param_names, self.thetat_params = list(average.trained), list(average.trained.values())
        self.theta0_params, self.ema_params = (
            [parameter.detach().clone() for parameter in self.thetat_params] for _ in range(2)
        )

    def on_train_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.running_model, _Average):
            self.running_model.save(Path(args.output_dir) / "bema")
        else:
            end(self, args, state, control, **kwargs)

    theirs.of_trl, theirs.on_train_begin, theirs.on_train_end = (begin, end), on_train_begin, on_train_end


class _Average:
    """The object that the callback writes the average into, in place of a second model.

    Attributes:
        trained: the model's own parameters, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._averages = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield this rank's intervals of the average."""
        yield from self._averages.values()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average for a reference model that follows, which is sharded alike."""
        return dict(self._averages)

    @torch.no_grad()
    def save(self, directory: Path) -> None:
        """Write the model as the average has it; the weights are the trained ones again after it. A collective."""
        own = [parameter.detach().clone() for parameter in self.trained.values()]
        try:
            self._set(self._averages.values())
            save_model(self._model, directory, "5GB", read_rank_environment())
        finally:
            self._set(own)

    def _set(self, values: Any) -> None:
        for parameter, value in zip(self.trained.values(), values, strict=True):
            parameter.copy_(value)
