"""Checkpoints for PyTorch/XLA: torch files with unsharded tensors, which `fullshard ckpt import` can convert."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import CheckpointError
from fullshard.core.files import atomic_file
from fullshard.core.paths import local_path
from fullshard.integrations.xla.model import full_state_dict, load_full_state_dict, mapped, sharded_state


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write a model and its optimizer's state, keyed by parameter names. An existing file is replaced atomically.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    sharded_state(model)
    content = {"model": full_state_dict(model), "extra": extra}
    if optimizer is not None:
        state, names = optimizer.state_dict(), _names(model, optimizer)
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
        values = {names[number]: value for number, value in state["state"].items()}
        content["optimizer"] = {"state": mapped(values, torch.Tensor.cpu), "param_groups": groups}
    target = local_path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a file from `save_checkpoint` on any number of devices, and return its `extra`.

    Raises:
        CheckpointError: If the file does not exist or does not match the model and optimizer.
    """
    sharded = sharded_state(model)
    try:
        content = torch.load(local_path(path), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, Mapping) or "model" not in content:
        raise CheckpointError(f"{path} does not contain a model")
    saved: Any = content.get("optimizer")
    if optimizer is not None:
        if saved is None:
            raise CheckpointError(f"{path} does not contain an optimizer")
        if [name for group in saved["param_groups"] for name in group["params"]] != _names(model, optimizer):
            raise CheckpointError(f"the optimizer in {path} has different parameters from this one")
    load_full_state_dict(model, content["model"])
    if optimizer is not None:
        optimizer.load_state_dict(saved)
        for values in optimizer.state.values():  # moved to the devices but not divided yet
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.device.type == "xla":
                    values[key] = sharded.place_parameter(value)
    return content.get("extra")


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in the order in which the optimizer holds them."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
