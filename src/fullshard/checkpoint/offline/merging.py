"""A base model with an adapter merged into it, as a source: what `fullshard merge` writes.

The base's tensors are handed out as they are on disk, byte by byte, but for those the adapter changes. These are made
by PEFT itself (see `checkpoint.merging`), on a skeleton of the model without memory, whose layer at hand is filled from
the files. So one layer of the model is held at a time, and the adapter.
"""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import MANIFEST_NAME, TRAINER_STATE, TensorRecord
from fullshard.checkpoint.merging import MergedModel
from fullshard.checkpoint.objects import Location, on_this_host
from fullshard.checkpoint.offline.huggingface import (
    CONFIG_NAME,
    HuggingFaceSource,
    files_beside_weights,
    read_configuration,
    skeleton_of,
)
from fullshard.checkpoint.offline.native import NativeSource
from fullshard.checkpoint.offline.source import Contents, Kind, Source, tensor_record
from fullshard.core.errors import CheckpointError
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval
from fullshard.engine.lookup import clean_name
from fullshard.features.meta_device import meta_parameters

ADAPTER_CONFIG = "adapter_config.json"
_COMPUTED_WITH = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WRAPPING = ("base_layer", "original_module")


class MergedSource(Source):
    """The base model `base` with the adapter in `adapter` merged into it.

    Args:
        base: a source of the base model, whose path is a Hugging Face directory. It is closed with this one.
        adapter: a directory of PEFT's, a checkpoint of Trainer's, or the `training_state` inside one.

    Raises:
        CheckpointError: the adapter does not fit the base, or cannot be merged.
        MissingExtraError: without PEFT.
    """

    title = "base model with an adapter merged into it"

    @property
    def places(self) -> tuple[Location, ...]:
        """The base's and the adapter's."""
        return (self.path, self._adapter)

    def __init__(self, base: Source, adapter: Path) -> None:
        self._base, self._adapter = base, Path(adapter)
        self.path: Path = on_this_host(base.path)
        directory = _config_directory(self._adapter)
        self._weights = _Adapter(self._adapter)
        try:
            self._prepare(directory)
        except BaseException:
            self.close()  # the caller cannot: it has no object to close
            raise

    def _prepare(self, directory: Path) -> None:
        """Find out what the adapter changes."""
        base = self._base
        self._last = "", torch.empty(0)
        # As wide as on disk, whatever the configuration says: a narrower merge would lose bits.
        dtypes = {dtype_of(record) for record in base.contents.parameters.values()}
        wide = functools.reduce(torch.promote_types, dtypes & _COMPUTED_WITH or {torch.float32})
        self._model = _skeleton(self.path, directory, self._weights, wide)
        self._merged = MergedModel(self._model)
        prefix = self._merged.prefix
        by_name = self._weights.by_model_name(self._model, prefix)
        self._stored = {name.removeprefix(prefix): key for name, key in by_name.items() if name.startswith(prefix)}
        self._disk = _disk_names(base.contents.parameters, self._merged.base)
        self._sources = {self._name(source): source for source in self._merged.sources if self._is_changed(source)}
        changed = {
            name: tensor_record(source.shape, source.tensor.dtype, where=name) for name, source in self._sources.items()
        }
        for name, record in changed.items():
            # PEFT may compute in another dtype than the base has on disk; the base's dtype is written.
            if (old := base.contents.parameters.get(name)) is not None:
                changed[name] = record.model_copy(update={"dtype": old.dtype})
        self.contents = Contents(
            parameters={**base.contents.parameters, **changed}, buffers=base.contents.buffers, notes=base.contents.notes
        )

    def read(self, kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        """See `Source.read`."""
        source = self._sources.get(name)
        if source is None:
            return self._base.read(kind, name, interval)
        if name != self._last[0]:  # it is read in pieces
            whole = self._merged.merge(source, self._whole).detach()
            self._last = name, whole.to(dtype_of(self.contents.parameters[name])).reshape(-1)
        return self._last[1][interval.start : interval.stop].contiguous()

    @contextmanager
    def configuration(self) -> Iterator[Path]:
        """Return a directory with the configuration and the tokenizer of the result."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for place in (self.path, _config_directory(self._adapter)):  # the adapter's tokenizer is the newer one
                for file in files_beside_weights(place):
                    if file.name != CONFIG_NAME or place is self.path:
                        shutil.copyfile(file, directory / file.name)
            path = directory / CONFIG_NAME
            config = read_configuration(path)
            final: Any = self._merged.base.config
            if (rows := getattr(final, "vocab_size", None)) is not None:
                config["vocab_size"] = rows
            if config.get("tie_word_embeddings", getattr(final, "tie_word_embeddings", False)):
                config["tie_word_embeddings"] = self._merged.ties_embeddings
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            yield directory

    def close(self) -> None:
        """Close all files."""
        self._base.close()
        self._weights.close()

    def _is_changed(self, source: Any) -> bool:
        if self._merged.is_changed(source):
            return True
        parts = map(self._merged.local, self._merged.parts(source))
        return any(name in self._stored for part in parts for name in part.names)

    def _name(self, source: Any) -> str:
        """Return the name on disk, or the first where the base has none of its names (untied by the adapter)."""
        return next((self._disk[name] for name in source.names if name in self._disk), str(source.name))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter of the skeleton, from the adapter's file or the base's."""
        names = self._merged.local(tensor).names
        stored = next((self._stored[name] for name in names if name in self._stored), None)
        if stored is not None:
            value = self._weights.whole(stored)
        else:
            plain = map(_plain, names)
            disk = next((self._disk[name] for name in plain if name in self._disk), None)
            if disk is None:
                raise CheckpointError(f"neither {self._adapter} nor {self.path} holds {names[0]}")
            value = self._base.whole(disk)
        if value.shape != tensor.shape:
            raise CheckpointError(f"{names[0]} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}")
        return value.to(tensor.dtype)


class _Adapter:
    """The tensors of an adapter, read when asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        file = directory / _ADAPTER_WEIGHTS
        state = next((d for d in (directory, directory / TRAINER_STATE) if (d / MANIFEST_NAME).is_file()), None)
        if file.is_file():
            self._source: Source = HuggingFaceSource(directory, file)
        elif state is not None:
            self._source = NativeSource(state)
        else:
            raise CheckpointError(
                f"{directory} holds neither {_ADAPTER_WEIGHTS} nor a checkpoint", hint="give the adapter's directory"
            )
        records = self._source.contents.parameters
        self.shapes = {name: record.shape for name, record in records.items() if record.is_stored}
        self.close, self.whole = self._source.close, self._source.whole

    def by_model_name(self, model: nn.Module, prefix: str) -> dict[str, str]:
        """Return the names by those that they have in the PEFT model.

        A checkpoint of a model with Transformers' own `add_adapter` lacks the prefix of its base.
        """
        if isinstance(self._source, NativeSource):
            known = model.state_dict().keys()
            return {name if name in known else prefix + name: name for name in self.shapes}
        peft: Any = importlib.import_module("peft")
        stand_ins = {name: torch.empty(0, device="meta") for name in model.state_dict()}
        stored = peft.get_peft_model_state_dict(
            model, state_dict=dict(stand_ins), save_embedding_layers=any(".embed" in name for name in self.shapes)
        )
        names = {id(value): name for name, value in stand_ins.items()}
        places = {key: names[id(value)] for key, value in stored.items() if id(value) in names}
        strangers = sorted(self.shapes.keys() - places.keys() - stand_ins.keys())
        if strangers:
            raise CheckpointError(f"{self._directory} does not fit the base: no place for {', '.join(strangers[:5])}")
        return {places.get(key, key): key for key in self.shapes}


def _config_directory(adapter: Path) -> Path:
    for directory in (adapter, adapter.parent):
        if (directory / ADAPTER_CONFIG).is_file():
            return directory
    raise CheckpointError(
        f"{adapter} holds no {ADAPTER_CONFIG}, which says what the adapter is",
        hint="give a directory that save_model or PEFT wrote, or a checkpoint of Trainer's",
    )


def _skeleton(base: Path, adapter: Path, weights: _Adapter, dtype: torch.dtype) -> nn.Module:
    """Return the PEFT model on the meta device."""
    transformers = import_extra("transformers", extra="hf", purpose="merging an adapter")
    peft = import_extra("peft", extra="sft", purpose="merging an adapter")
    model: Any = skeleton_of(transformers, base, dtype)
    path = adapter / ADAPTER_CONFIG
    read_configuration(path)
    with meta_parameters():
        rows = _table_rows(weights, model.get_input_embeddings().weight.shape)
        if rows is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)
        try:
            adapter_config = peft.PeftConfig.from_pretrained(str(adapter))
            adapter_config.inference_mode = False
            skeleton: nn.Module = peft.get_peft_model(model, adapter_config, low_cpu_mem_usage=True)
        except Exception as error:  # each method checks its fields in its own way
            raise CheckpointError(
                f"{path}: PEFT {peft.__version__} makes no adapter of it for {base}: {type(error).__name__}: {error}",
                hint="it must be the adapter's whole configuration, and the base the model that it was trained on",
            ) from error
    return skeleton


def _table_rows(weights: _Adapter, shape: torch.Size) -> int | None:
    """Return the rows of the embeddings in the adapter, if they were resized."""
    tables = [
        found
        for name, found in weights.shapes.items()
        if len(found) == 2 and found[1] == shape[1] and name.endswith(".weight") and "lora_" not in name
        and any(part.startswith(("embed", "lm_head", "wte", "shared")) for part in name.split("."))
    ]  # fmt: skip
    return next((found[0] for found in tables if found[0] != shape[0]), None)


def _disk_names(on_disk: Mapping[str, TensorRecord], base: nn.Module) -> dict[str, str]:
    """Return the name on disk by the model's name for a tensor: with the prefix of its base model or without."""
    prefix = getattr(base, "base_model_prefix", "")
    known = set(map(_plain, base.state_dict()))
    found = {}
    for key in on_disk:
        for name in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
            if name in known:
                found[name] = key
                break
    return found


def _plain(name: str) -> str:
    """Return the name without what PEFT's layers add."""
    return ".".join(part for part in clean_name(name).split(".") if part not in _WRAPPING)
