"""The adapters of a PEFT model: saved whole and alone, in PEFT's format, and loaded from it; and their names.

PEFT decides what belongs to an adapter and how it is called in a file; it is asked with stand-ins for the weights, so
only what it wants is gathered, one parameter at a time.
"""

from __future__ import annotations

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
    """Return whether `model` is a PEFT model: a base with adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_saved_as_adapters(model: nn.Module) -> bool:
    """Return whether a save of `model` stores its adapters: a PEFT model, or one with Transformers' `add_adapter`."""
    adds_itself = hasattr(model, "get_adapter_state_dict") and getattr(model, "_hf_peft_config_loaded", False)
    return is_adapted(model) or adds_itself  # PEFT's `inject_adapter_in_model` tells it nothing


def carries_adapters(model: nn.Module) -> bool:
    """Return whether a model that is no PEFT model has adapters, or one for inference alone (`PeftMixedModel`)."""
    return hasattr(model, "peft_config") and not is_adapted(model)


HOW_TO_SAVE_INNER = (
    "add them with peft.get_peft_model, whose model is merged on the way; or save what "
    "get_peft_model_state_dict(model, state_dict=fullshard.checkpoint.full_state_dict(model)) gives"
)
"""Adapters that a model carries inside."""


def save_adapters(path: str | Path, model: nn.Module) -> None:
    """Write every adapter as `save_pretrained` of the unsharded model would. A collective.

    Adapters other than `default` go into directories of their own. Of a model with Transformers' own `add_adapter` the
    one at work is written.
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
    """Return, for each adapter, the names in the model of the tensors that PEFT stores for it.

    Rank 0 asks: PEFT may look at the hub to see whether the embeddings were resized.
    """
    stand_ins = {name: torch.empty(0, device="meta") for name in _by_name(model)}

    def ask() -> dict[str, list[str]]:
        peft: Any = importlib.import_module("peft")
        found = {}
        for adapter in model.peft_config:  # type: ignore[union-attr]
            with _unpruned(model.peft_config[adapter]):  # type: ignore[index]
                chosen = peft.get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
            kept = {id(value) for value in chosen.values()}
            found[str(adapter)] = [name for name, value in stand_ins.items() if id(value) in kept]
        return found

    with prompts_whole(model):
        asked = ranks.on_rank_0("asking PEFT what belongs to the adapters", ask)
    wanted: dict[str, list[str]] = ranks.broadcast(asked)
    return wanted


def _by_name(model: nn.Module) -> dict[str, LocalTensor]:
    """Return all parameters and buffers, under all their names in a state dict: layers share VeRA's buffers."""
    return {name: local for local in local_tensors(model) for name in local.names}


@contextlib.contextmanager
def _unpruned(config: Any) -> Iterator[None]:
    """Return the state without the ranks that AdaLoRA has given up, which PEFT cuts out of what it stores."""
    ranks = getattr(config, "rank_pattern", None)
    if ranks:
        config.rank_pattern = None
    try:
        yield
    finally:
        if ranks:
            config.rank_pattern = ranks


@contextlib.contextmanager
def prompts_whole(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Hold the encoders of PEFT's prompt learning whole: PEFT computes their state, on rank 0 alone. A collective."""
    encoders = getattr(model, "prompt_encoder", None)
    with contextlib.ExitStack() as whole:
        for module in () if encoders is None else encoders.modules():
            whole.enter_context(unsharded(module, writeback=writeback, recurse=False))
        yield


def adapter_parameter_names(model: nn.Module) -> Container[str]:
    """Return the names of adapter parameters of `model`, and of all others that are trained; none without adapters.

    A collective.
    """
    if not is_saved_as_adapters(model):
        return ()
    names = {name for stored in wanted_weights(model, Ranks.of(model)).values() for name in stored}
    trained = (local for local in local_parameters(model) if local.tensor.requires_grad)
    return names | {name for local in trained for name in local.names}


def load_adapters(path: str | Path, model: nn.Module) -> None:
    """Load the adapters that `save_adapters` or PEFT wrote into those of the same names. Every rank reads."""
    ranks = Ranks.of(model)
    wanted = wanted_weights(model, ranks)
    peft: Any = importlib.import_module("peft")
    rest(model)

    def read(directory: Path, adapter: object) -> Any:
        if not (directory / "adapter_config.json").is_file():
            raise CheckpointError(f"{directory} holds no adapter", hint=f"expected the adapter {adapter!r} there")
        return peft.load_peft_weights(str(directory), device="cpu")

    names: Any = model.peft_config if is_adapted(model) else model.active_adapters()  # type: ignore[operator]
    for adapter in map(str, names):
        directory = Path(path) if adapter == "default" or not is_adapted(model) else Path(path) / adapter
        config: Any = model.peft_config[adapter]  # type: ignore[index]
        weights = ranks.together(f"reading {directory}", functools.partial(read, directory, adapter))
        if not is_adapted(model):  # names in files begin with PEFT's module, which it lacks
            weights = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
        with prompts_whole(model, writeback=True):
            result = peft.set_peft_model_state_dict(model, weights, adapter_name=adapter)
        if result.unexpected_keys and not config.is_prompt_learning:  # PEFT has put it into the encoder
            raise CheckpointError(f"{directory}: the model has no place for {', '.join(result.unexpected_keys)}")
        own = {name for name in wanted[adapter] if adapter in name.split(".")}  # the rest is the base's
        if missing := sorted(own.intersection(map(clean_name, result.missing_keys))):
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of the {len(own)} tensors of the adapter {adapter!r}: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
                hint="it was saved with other target_modules; make the adapters as they were",
            )
