"""Write the model of any source as safetensors: one file, or several with an index. No model, no process group.

With a configuration beside them they are a Hugging Face directory. One chunk of one tensor is held at a time.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import torch

from fullshard.checkpoint.offline.huggingface import CONFIG_NAME, files_beside_weights, read_configuration
from fullshard.checkpoint.offline.source import (
    Progress,
    Source,
    cast_record,
    refuse_around,
    require_values,
    silent,
    stream,
)
from fullshard.checkpoint.offline.stored_form import in_stored_form
from fullshard.checkpoint.shards import file_names, file_numbers, parse_dtype, parse_size, write_index
from fullshard.checkpoint.storage import committed_directory
from fullshard.checkpoint.tensor_file import TensorEntry, TensorFileWriter, storage_order
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.paths import local_path
from fullshard.engine.precision import dtype_name


def write_weights(
    source: Source,
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    config_from: str | Path | None = None,
    needs_config: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> list[str]:
    """Write parameters and buffers, each once; copy configuration and tokenizer if there are any. Return those names.

    They are copied from `config_from`, by default the source's directory. With `needs_config` what is written is for
    Transformers: in the form that it stores, and refused without a configuration.
    """
    limit, cast = parse_size(max_shard_size), parse_dtype(dtype)
    names = require_values(source, hint="merge the adapter into its base model: fullshard merge")
    copied = _configuration(source, config_from, needs_config=needs_config)
    if needs_config:
        if adapter := next((name for name in names if ".lora_" in name or ".base_layer." in name), None):
            raise CheckpointError(
                f"{source.path} carries adapters ({adapter!r}), whose names no plain model has",
                hint="merge them into the base model: fullshard merge; or take the tensors as they are: consolidate",
            )
        source = in_stored_form(source, copied[0].parent)
    records = {name: cast_record(record, cast) for name, record in source.contents.model.items()}
    entries = [TensorEntry(name, record.dtype, record.shape) for name, record in records.items()]
    numbers = file_numbers((entry.nbytes for entry in entries), limit)
    files = {
        name: storage_order([e for e, n in zip(entries, numbers, strict=True) if n == number])
        for number, name in enumerate(file_names(max(numbers, default=0) + 1))
    }
    final = local_path(path).absolute()
    refuse_around(source, final)
    with committed_directory(final, uuid.uuid4().hex[:16], overwrite=overwrite) as temp:
        for name, members in files.items():
            with TensorFileWriter(temp / name, members, {"format": "pt"}) as writer:
                for entry in members:
                    parts = stream(source, "model", entry.name, records[entry.name], progress=progress)
                    writer.write_parts(entry.name, parts)
                writer.finish()
        write_index(temp, files)
        for file in copied:
            shutil.copyfile(file, temp / file.name)
        if cast is not None and (temp / CONFIG_NAME).exists():
            _set_dtype(temp / CONFIG_NAME, cast)
    return [file.name for file in copied]


def _configuration(source: Source, config_from: str | Path | None, *, needs_config: bool) -> list[Path]:
    """Return the files to copy, `config.json` first if there is one."""
    directory = source.path if config_from is None else local_path(config_from)
    hint = "name the directory of the model that training started from: --config-from DIRECTORY"
    found = []
    if isinstance(directory, Path):
        if not directory.exists():
            raise ConfigError(f"there is no directory {directory}", hint=hint)
        found = files_beside_weights(directory if directory.is_dir() else directory.parent)
    if needs_config and (not found or found[0].name != CONFIG_NAME):
        raise CheckpointError(
            f"{directory} holds no {CONFIG_NAME}, without which from_pretrained reads nothing", hint=hint
        )
    return found


def _set_dtype(path: Path, cast: torch.dtype) -> None:
    """Let the configuration say the dtype that the files now have."""
    config = read_configuration(path)
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype_name(cast)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
