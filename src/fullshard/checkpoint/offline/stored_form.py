"""A model's tensors in the form that Transformers stores, made of those it has in memory: what `ckpt export` writes.

Other programs read that form: each expert on its own, where Transformers 5 computes with all experts of a layer in one
tensor. A checkpoint of training holds what is in memory.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

from fullshard.checkpoint.conversion import outline_of, saving_rules
from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.offline.huggingface import CONFIG_NAME, read_configuration, skeleton_of
from fullshard.checkpoint.offline.source import Contents, Kind, Source, tensor_record
from fullshard.core.errors import CheckpointError
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval

_GROUPS_HELD = 3
"""The groups of a layer, whose tensors are written in turn; more are made again."""


def in_stored_form(source: Source, directory: Path) -> Source:
    """Return a source as Transformers stores its model, or `source` if its names are not those of a model in memory."""
    read_configuration(directory / CONFIG_NAME)
    transformers = import_extra("transformers", extra="hf", purpose="the form that it stores a model in")
    try:
        model = skeleton_of(transformers, directory, torch.float32)
    except CheckpointError as error:
        if not isinstance(error.__cause__, (OSError, ValueError)):
            raise
        return source  # of no model that it knows
    return _stored_form(source, model) if source.contents.model.keys() <= model.state_dict().keys() else source


def _stored_form(source: Source, model: nn.Module) -> Source:
    held = source.contents.model
    metas = {name: torch.empty(record.shape, dtype=dtype_of(record), device="meta") for name, record in held.items()}
    outline = outline_of(model, metas)
    as_it_is, groups = saving_rules(model, outline).save(held)
    names = {stored: name for name, stored in as_it_is.items()}
    records = {stored: held[name] for stored, name in names.items()}
    numbers: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name, tensor in group.convert_meta(metas, outline).items():
            numbers[name] = number
            records[name] = tensor_record(tensor.shape, tensor.dtype, where=name)

    @functools.lru_cache(_GROUPS_HELD)
    def made(number: int) -> dict[str, torch.Tensor]:
        return {name: t.reshape(-1) for name, t in groups[number].convert(source.whole, outline).items()}

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        if name in names:
            return source.read(kind, names[name], interval)
        return made(numbers[name])[name][interval.start : interval.stop]

    return Source(source.title, source.path, Contents(records, notes=source.contents.notes), read, source.places)
