"""Read Hugging Face directories as a source, and write any source as one or several safetensors files.

Output for Transformers is written in the form in which Transformers stores a model. For example, each expert has its
own tensors on disk, although Transformers computes with all experts of a layer in one tensor. Training checkpoints
contain the form that is used in memory.
"""

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.conversion import outline_of, saving_rules
from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.offline.source import (
    Contents,
    Kind,
    Source,
    cast_record,
    refuse_around,
    require_values,
    stream,
    tensor_record,
)
from fullshard.checkpoint.shards import divided, parse_dtype, write_index
from fullshard.checkpoint.store import committed_directory
from fullshard.checkpoint.tensor_file import TensorEntry, write_tensor_file
from fullshard.checkpoint.weight_files import TensorSource, json_file, stored_tensors
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval
from fullshard.core.paths import local_path
from fullshard.core.progress import progress
from fullshard.core.sizes import parse_size
from fullshard.engine.precision import dtype_name
from fullshard.features.meta_device import meta_parameters

CONFIG_NAME = "config.json"
_MAX_CONFIG_NBYTES = 2**26
_GROUPS_HELD = 3
"""The number of converted groups to keep: those of one layer, whose tensors are written in turn."""
_COPIED = (
    CONFIG_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "chat_template.json", "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def open_weights(path: Path, stored: Mapping[str, TensorSource] | None = None) -> Source:
    """Open a directory of weights, or only `stored` tensors in it. Raise the errors of `stored_tensors`."""
    stored = dict(stored_tensors(path)) if stored is None else stored

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        out = torch.empty(interval.numel, dtype=stored[name].dtype)
        stored[name].read(interval, out)
        return out

    contents = Contents({n: tensor_record(s.shape, s.dtype, where=n) for n, s in stored.items()})
    return Source("Hugging Face directory", path, contents, read)


def files_beside_weights(directory: Path) -> list[Path]:
    """Return the configuration and tokenizer files in a directory."""
    return [directory / name for name in _COPIED if (directory / name).is_file()]


def skeleton_of(transformers: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model that the configuration in a directory describes, with its parameters on the meta device."""
    path = directory / CONFIG_NAME
    read_configuration(path)  # Transformers' error for invalid JSON does not name the file
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        cls = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        make = getattr(cls, "_from_config", None) or cls.from_config
        with meta_parameters():
            model: nn.Module = make(config, dtype=dtype)
    except Exception as error:  # each model family checks its fields in its own way
        raise CheckpointError(
            f"{path}: Transformers {transformers.__version__} cannot build a model from this file: "
            f"{type(error).__name__}: {error}",
            hint="use the model's complete configuration, and a version of Transformers that supports the model",
        ) from error
    return model


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the configuration of a model or an adapter as a dict."""
    return json_file(path, limit_nbytes=_MAX_CONFIG_NBYTES)


def write_weights(
    source: Source,
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    config_from: str | Path | None = None,
    needs_config: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write a source's parameters and buffers, each once, and copy configuration and tokenizer files.

    Return the names of the copied files. They are copied from `config_from`, by default the source's directory. Set
    `needs_config` if the output is for Transformers. Then tensors are written in the form in which Transformers stores
    them, and a missing configuration is an error.
    """
    limit, cast = parse_size(max_shard_size), parse_dtype(dtype)
    names = require_values(source, hint="merge the adapter into its base model: fullshard merge")
    copied = _configuration(source, config_from, needs_config=needs_config)
    architecture = ""
    if needs_config:
        if adapter := next((name for name in names if ".lora_" in name or ".base_layer." in name), None):
            raise CheckpointError(
                f"{source.path} contains adapters ({adapter!r}), so its tensor names are not those of a plain model",
                hint="merge them with `fullshard merge`, or write the tensors unchanged with `--to safetensors`",
            )
        source, architecture = _in_stored_form(source, copied[0].parent)
    records = {name: cast_record(record, cast) for name, record in source.contents.model.items()}
    entries = [TensorEntry(name, record.dtype, record.shape) for name, record in records.items()]
    files = divided(entries, limit)
    final = local_path(path).absolute()
    refuse_around(source, final)
    total = sum(entry.nbytes for entry in entries)
    with committed_directory(final, overwrite=overwrite) as temp, progress("writing", total):
        for name, members in files.items():
            write_tensor_file(
                temp / name, members, {"format": "pt"},
                lambda entry: stream(source, "model", entry.name, records[entry.name]),
            )  # fmt: skip
        write_index(temp, files)
        for file in copied:
            shutil.copyfile(file, temp / file.name)
        if (temp / CONFIG_NAME).exists():
            _complete_configuration(temp / CONFIG_NAME, cast, architecture)
    return [file.name for file in copied]


def _configuration(source: Source, config_from: str | Path | None, *, needs_config: bool) -> list[Path]:
    """Return the files to copy, starting with `config.json` if it exists."""
    directory = source.path if config_from is None else local_path(config_from)
    hint = "pass the base model's directory as --config-from, or create one: model.config.save_pretrained(DIRECTORY)"
    found = []
    if isinstance(directory, Path):
        if not directory.exists():
            raise ConfigError(f"the directory {directory} does not exist", hint=hint)
        found = files_beside_weights(directory if directory.is_dir() else directory.parent)
    if needs_config and (not found or found[0].name != CONFIG_NAME):
        raise CheckpointError(f"{directory} does not hold a {CONFIG_NAME}, which from_pretrained needs", hint=hint)
    return found


def _complete_configuration(path: Path, dtype: torch.dtype | None, architecture: str) -> None:
    """Write the dtype of converted weights, and the model's class where it is missing, which vLLM needs."""
    config = read_configuration(path)
    completed = dict(config)
    if architecture and not config.get("architectures"):
        completed["architectures"] = [architecture]
    if dtype is not None:
        completed["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype_name(dtype)
    if completed != config:
        path.write_text(json.dumps(completed, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _in_stored_form(source: Source, directory: Path) -> tuple[Source, str]:
    """Return a source with tensors as Transformers stores them, and the model's class, or "" if its names differ."""
    read_configuration(directory / CONFIG_NAME)
    transformers = import_extra("transformers", extra="hf", purpose="the form that it stores a model in")
    try:
        model = skeleton_of(transformers, directory, torch.float32)
    except CheckpointError as error:
        if not isinstance(error.__cause__, (OSError, ValueError)):
            raise
        return source, ""  # of an unknown model
    if source.contents.model.keys() <= model.state_dict().keys():
        # An encoder with a masked-language head has the same names as its causal variant.
        is_encoder = type(model.config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        return stored_form_of(source, model), "" if is_encoder else type(model).__name__
    return source, ""


def stored_form_of(source: Source, model: nn.Module) -> Source:
    """Convert a source with the tensors that `model` has in memory to a source with those that Transformers stores."""
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
