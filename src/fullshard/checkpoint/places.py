"""Find the parameters and buffers of a Transformers model that files fill, and weights that files may lack."""

import copy
import importlib
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import torch_private
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import clean_name, qualified
from fullshard.features.meta_device import meta_parameters


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or persistent buffer of a model, with the name that it has in files."""

    name: str
    module: nn.Module
    attribute: str
    tensor: torch.Tensor


def places_of(model: nn.Module) -> Iterator[Place]:
    """Yield all parameters and persistent buffers. Tied ones are yielded under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = {k: b for k, b in module._buffers.items() if k not in torch_private.non_persistent_buffers(module)}
        for attribute, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None:
                yield Place(qualified(without_wrappers(path), attribute), module, attribute, tensor)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers by name. Tied ones appear under each of their names."""
    return {place.name: place.tensor for place in places_of(model)}


def without_wrappers(path: str) -> str:
    """Return a path without the parts that PEFT (also for its trained copies) and checkpoint wrappers add."""
    path = re.sub(r"(^|\.)modules_to_save\.[^.]+(?=\.|$)", "", clean_name(path))
    return ".".join(part for part in path.split(".") if part not in ("", "base_layer", "original_module"))


def not_ignored(names: Set[str], model: nn.Module, attribute: str) -> set[str]:
    """Return the names that the model's class does not ignore. `attribute` contains its patterns of ignored names."""
    patterns = list(getattr(model, attribute, None) or ())
    if attribute == "_keys_to_ignore_on_load_unexpected":
        # These are buffers that earlier versions stored in every layer.
        buffers = [name for name, _ in model.named_buffers()]
        ends = [end for end in ("rotary_emb.inv_freq", "position_ids") if any(name.endswith(end) for name in buffers)]
        patterns += [rf"(^|\.){re.escape(end)}$" for end in ends]
    return {name for name in names if not any(re.search(pattern, name) for pattern in patterns)}


def new_parts(model: nn.Module, names: Set[str]) -> set[str]:
    """Return the names of weights that the configuration's class lacks, such as a new head, or all outside the base."""
    if not names:
        return set()
    config: Any = getattr(model, "config", None)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    cls: Any = getattr(importlib.import_module("transformers"), architecture, None) if architecture else None
    if architecture == user_class(model).__name__:
        return set()
    try:
        with meta_parameters():
            saved = cls._from_config(copy.deepcopy(config))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError):
        return {name for name in names if not name.startswith(prefix)} if hasattr(model, prefix[:-1]) else set()
    known = {name.removeprefix(f"{saved.base_model_prefix}.") for name in tensors_of(saved)}
    return {name for name in names if name.removeprefix(prefix) not in known}
