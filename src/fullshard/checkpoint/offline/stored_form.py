"""A model's tensors in the form that Transformers stores, made of those it has in memory: what `ckpt export` writes.

Other programs read that form: each expert on its own, where Transformers 5 computes with all experts of a layer in one
tensor. A checkpoint of training holds what is in memory.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

from fullshard.checkpoint.conversion import Group, outline_of, saving_rules
from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.offline.huggingface import CONFIG_NAME, read_configuration, skeleton_of
from fullshard.checkpoint.offline.source import Contents, Kind, Source, tensor_record
from fullshard.core.errors import CheckpointError
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval

_GROUPS_HELD = 3
"""The groups of a layer, whose tensors are written in turn; more are made again."""


def in_stored_form(source: Source, directory: Path) -> Source:
    """Return a source as Transformers stores its model, or `source` if its names are not those of a model in memory.

    Raises:
        CheckpointError: the configuration is damaged.
        MissingExtraError: without Transformers.
    """
    read_configuration(directory / CONFIG_NAME)
    transformers = import_extra("transformers", extra="hf", purpose="the form that it stores a model in")
    try:
        model = skeleton_of(transformers, directory, torch.float32)
    except CheckpointError as error:
        if not isinstance(error.__cause__, (OSError, ValueError)):
            raise
        return source  # of no model that it knows
    return StoredSource(source, model) if source.contents.model.keys() <= model.state_dict().keys() else source


class StoredSource(Source):
    """The contents of `held`, a Transformers model, by the names and in the shapes of its files. Closed with `held`."""

    title = "model in the form that Transformers stores"

    @property
    def places(self) -> tuple[Location, ...]:
        """The places of the tensors that it is made of."""
        return self._held.places

    def __init__(self, held: Source, model: nn.Module) -> None:
        self.path, self._held = held.path, held
        held_records = held.contents.model
        metas = {
            name: torch.empty(record.shape, dtype=dtype_of(record), device="meta")
            for name, record in held_records.items()
        }
        self._outline = outline_of(model, metas)
        as_it_is, groups = saving_rules(model, self._outline).save(held_records)
        self._names = {stored: name for name, stored in as_it_is.items()}
        self._groups: dict[str, int] = {}
        records = {stored: held_records[name] for stored, name in self._names.items()}
        for number, group in enumerate(groups):
            for name, tensor in group.convert_meta(metas, self._outline).items():
                self._groups[name] = number
                records[name] = tensor_record(tensor.shape, tensor.dtype, where=name)
        self._made = functools.lru_cache(_GROUPS_HELD)(lambda number: self._make(groups[number]))
        self.contents = Contents(records, notes=held.contents.notes)

    def read(self, kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        """See `Source.read`."""
        if name in self._names:
            return self._held.read(kind, self._names[name], interval)
        return self._made(self._groups[name])[name][interval.start : interval.stop]

    def _make(self, group: Group) -> dict[str, torch.Tensor]:
        made = group.convert(self._held.whole, self._outline)
        return {name: tensor.reshape(-1) for name, tensor in made.items()}
