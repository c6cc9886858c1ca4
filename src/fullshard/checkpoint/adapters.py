"""Save and load the adapters of a PEFT model in PEFT's format, without the base model, and list their parameter names.

PEFT decides which tensors belong to an adapter and what they are called in a file. To find out, PEFT is called with
empty tensors in place of the weights. Then only the tensors that it selects are gathered, one at a time.
"""

import contextlib
import functools
import importlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.full_state import full_tensor
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.tensors import LocalTensor, local_parameters, local_tensors, rest
from fullshard.core.errors import CheckpointError
from fullshard.engine.lookup import clean_name
from fullshard.features import unsharded


def is_adapted(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model, that is, a base model with adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_saved_as_adapters(model: nn.Module) -> bool:
    """Return whether only adapters are saved, as for a PEFT model or a Transformers model with `add_adapter`."""
    adds_itself = hasattr(model, "get_adapter_state_dict") and getattr(model, "_hf_peft_config_loaded", False)
    return is_adapted(model) or adds_itself  # PEFT's `inject_adapter_in_model` does not set the flag


def carries_adapters(model: nn.Module) -> bool:
    """Return whether a model contains adapters but is not a `PeftModel`, like the inference-only `PeftMixedModel`."""
    return hasattr(model, "peft_config") and not is_adapted(model)


HOW_TO_SAVE_INNER = (
    "add them with peft.get_peft_model, so that they are merged during the save; or save the result of "
    "get_peft_model_state_dict(model, state_dict=fullshard.checkpoint.full_state_dict(model))"
)
"""Hint for models that contain adapters but are not PEFT models."""


def save_adapters(path: str | Path, model: nn.Module) -> None:
    """Write every adapter as `save_pretrained` of the unsharded model would. All ranks must call this.

    Adapters other than `default` go into their own subdirectories. For a Transformers model that called `add_adapter`,
    only the active adapter is written.
    """
    rest(model)
    ranks = Ranks.of(model)
    state: dict[str, torch.Tensor] = {}
    by_name = _by_name(model)
    for name in dict.fromkeys(name for stored in wanted_weights(model, ranks).values() for name in stored):
        whole = full_tensor(by_name[name])
        if ranks.rank == 0:
            state[name] = whole.detach().cpu()

    def write() -> None:
        model.save_pretrained(str(path), state_dict=state)  # type: ignore[operator]

    with prompts_whole(model):
        ranks.on_rank_0(f"writing adapters to {path}", write)


def wanted_weights(model: nn.Module, ranks: Ranks) -> dict[str, list[str]]:
    """Return the names of tensors that PEFT stores, by adapter. All ranks must call this, but only rank 0 asks PEFT."""
    stand_ins = {name: torch.empty(0, device="meta") for name in _by_name(model)}

    def ask() -> dict[str, list[str]]:
        peft: Any = importlib.import_module("peft")
        found = {}
        for adapter, config in model.peft_config.items():  # type: ignore[union-attr, operator]
            with contextlib.ExitStack() as after:
                if pruned := getattr(config, "rank_pattern", None):
                    config.rank_pattern = None  # so that PEFT returns all ranks of an AdaLoRA adapter
                    after.callback(setattr, config, "rank_pattern", pruned)
                chosen = peft.get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
            kept = {id(value) for value in chosen.values()}
            found[str(adapter)] = [name for name, value in stand_ins.items() if id(value) in kept]
        return found

    with prompts_whole(model):
        asked = ranks.on_rank_0("asking PEFT for the tensors of the adapters", ask)
    wanted: dict[str, list[str]] = ranks.broadcast(asked)
    return wanted


def _by_name(model: nn.Module) -> dict[str, LocalTensor]:
    """Return the model's parameters and buffers, keyed by each of their names in the state dict."""
    return {name: local for local in local_tensors(model) for name in local.names}


@contextlib.contextmanager
def prompts_whole(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Unshard PEFT's prompt encoders in the block, so that rank 0 can compute their state. All ranks must enter it."""
    encoders = getattr(model, "prompt_encoder", None)
    with contextlib.ExitStack() as whole:
        for module in () if encoders is None else encoders.modules():
            whole.enter_context(unsharded(module, writeback=writeback, recurse=False))
        yield


def adapter_parameter_names(model: nn.Module) -> Container[str]:
    """Return the names of adapter and other trained parameters if a model has adapters. All ranks must call this."""
    if not is_saved_as_adapters(model):
        return ()
    names = {name for stored in wanted_weights(model, Ranks.of(model)).values() for name in stored}
    trained = (local for local in local_parameters(model) if local.tensor.requires_grad)
    return names | {name for local in trained for name in local.names}


def load_adapters(path: str | Path, model: nn.Module) -> None:
    """Load files of `save_adapters` or PEFT into the model's adapters of the same names. Every rank reads them."""
    ranks = Ranks.of(model)
    wanted = wanted_weights(model, ranks)
    peft: Any = importlib.import_module("peft")
    rest(model)

    def read(directory: Path, adapter: object) -> Any:
        if not (directory / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{directory} does not contain an adapter", hint=f"use a directory that holds the adapter {adapter!r}"
            )
        return peft.load_peft_weights(str(directory), device="cpu")

    names: Any = model.peft_config if is_adapted(model) else model.active_adapters()  # type: ignore[operator]
    for adapter in map(str, names):
        directory = Path(path) if adapter == "default" or not is_adapted(model) else Path(path) / adapter
        config: Any = model.peft_config[adapter]  # type: ignore[index]
        weights = ranks.together(f"reading {directory}", functools.partial(read, directory, adapter))
        if not is_adapted(model):  # names in files start with PEFT's module, which this model does not have
            weights = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
        with prompts_whole(model, writeback=True):
            result = peft.set_peft_model_state_dict(model, weights, adapter_name=adapter)
        if result.unexpected_keys and not config.is_prompt_learning:  # PEFT has already put it into the encoder
            raise CheckpointError(
                f"{directory}: the model has no parameters for the tensors {', '.join(result.unexpected_keys)}"
            )
        own = {name for name in wanted[adapter] if adapter in name.split(".")}  # the rest is the base's
        if missing := sorted(own.intersection(map(clean_name, result.missing_keys))):
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of the {len(own)} tensors of the adapter {adapter!r}: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
                hint="create the adapter with the same target_modules as when it was saved",
            )
