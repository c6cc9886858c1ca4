"""Adapters read back into a sharded model, and the names that go with them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Container
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.checkpoint.adapters import (
    adapter_directories,
    is_adapted,
    is_saved_as_adapters,
    prompts_whole,
    wanted_weights,
)
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.tensors import local_parameters, rest
from fullshard.core.errors import CheckpointError
from fullshard.engine.lookup import clean_name


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
    """Load the adapters that `save_adapters` or PEFT wrote into those of the same names. Every rank reads.

    Raises:
        CheckpointError: an adapter is not there, or not all of it.
    """
    ranks = Ranks.of(model)
    wanted = wanted_weights(model, ranks)
    peft: Any = importlib.import_module("peft")
    rest(model)

    def read(directory: Path, adapter: object) -> Any:
        if not (directory / "adapter_config.json").is_file():
            raise CheckpointError(f"{directory} holds no adapter", hint=f"expected the adapter {adapter!r} there")
        return peft.load_peft_weights(str(directory), device="cpu")

    for adapter, directory in adapter_directories(Path(path), model).items():
        config: Any = model.peft_config[adapter]  # type: ignore[index]
        weights = ranks.together(f"reading {directory}", functools.partial(read, directory, adapter))
        if not is_adapted(model):  # names in files begin with PEFT's module, which it lacks
            weights = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
        with prompts_whole(model, writeback=True):
            result = peft.set_peft_model_state_dict(model, weights, adapter_name=adapter)
        if result.unexpected_keys and not config.is_prompt_learning:  # PEFT has put it into the encoder
            raise CheckpointError(f"{directory}: no place for {', '.join(result.unexpected_keys)}")
        own = {name for name in wanted[adapter] if adapter in name.split(".")}  # the rest is the base's
        if missing := sorted(own.intersection(map(clean_name, result.missing_keys))):
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of the {len(own)} tensors of the adapter {adapter!r}: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
                hint="it was saved of other target_modules; make the adapters as they were",
            )
