"""Directories of weights as Hugging Face's `save_pretrained` writes them, and of what lies beside those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.offline.source import Contents, Kind, Source, tensor_record
from fullshard.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME, json_file, stored_tensors, tensors_of
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.features.meta_device import meta_parameters

CONFIG_NAME = "config.json"
_MAX_CONFIG_NBYTES = 2**26
_COPIED = (
    CONFIG_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "chat_template.json", "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def open_weights(path: Path, file: Path | None = None) -> Source:
    """Open a directory of weights, or only `file` of it, whatever its name. Raises as `stored_tensors` does."""
    stored = dict(stored_tensors(path) if file is None else tensors_of(file))

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        out = torch.empty(interval.numel, dtype=stored[name].dtype)
        stored[name].read(interval, out)
        return out

    contents = Contents({n: tensor_record(s.shape, s.dtype, where=n) for n, s in stored.items()})
    return Source("Hugging Face directory", path, contents, read)


def has_safetensors(directory: Path) -> bool:
    """Return whether the directory holds weights in safetensors files."""
    return (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).is_file()


def files_beside_weights(directory: Path) -> list[Path]:
    """Return the configuration and tokenizer files in a directory."""
    return [directory / name for name in _COPIED if (directory / name).is_file()]


def skeleton_of(transformers: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model that the configuration in a directory describes, with its parameters on the meta device.

    Raises:
        CheckpointError: there is no configuration, it is damaged, or Transformers makes no model of it.
    """
    path = directory / CONFIG_NAME
    read_configuration(path)  # Transformers' error for a file that is no JSON names no file
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        cls = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        make = getattr(cls, "_from_config", None) or cls.from_config
        with meta_parameters():
            model: nn.Module = make(config, dtype=dtype)
    except Exception as error:  # each family checks its fields in its own way
        raise CheckpointError(
            f"{path}: Transformers {transformers.__version__} makes no model of it: {type(error).__name__}: {error}",
            hint="it must be the model's whole configuration, and Transformers new enough to know the model",
        ) from error
    return model


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the values of a configuration, of a model or of an adapter.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    return json_file(path, limit_nbytes=_MAX_CONFIG_NBYTES)
