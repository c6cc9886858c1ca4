"""Accelerate's functions that save and load a sharded model: `accelerate.utils.save_fsdp_model` and its companions.

They ask torch for the state of the model, which knows nothing of slices. For a model that is sharded here they write
and read the same files by fullshard's own means; for any other they are Accelerate's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fullshard.api import saving
from fullshard.checkpoint.adapters import is_adapted
from fullshard.checkpoint.chunks import fill_local
from fullshard.checkpoint.full_state import full_state_dict, load_full_state_dict, match_names
from fullshard.checkpoint.offline.dcp import open_dcp
from fullshard.checkpoint.offline.source import require_values
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import save_checkpoint
from fullshard.checkpoint.tensors import check_is_plain, local_tensors, rest
from fullshard.checkpoint.torch_files import load_torch_file
from fullshard.checkpoint.torch_format import write_torch_format
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.layout import Interval
from fullshard.core.paths import local_path
from fullshard.launch.environment import run_on_main

_NAME = "pytorch_model_fsdp"
_STAGED = ".fullshard-staged"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights as Accelerate lays them out: `pytorch_model_fsdp_0/`, or one file if FULL. A collective.

    Raises:
        ConfigError: adapters alone, or files per rank.
    """
    directory, environment = local_path(output_dir), accelerator.process.environment
    if _kind(fsdp_plugin, model, adapter_only, use_dcp) == "FULL_STATE_DICT":
        weights = full_state_dict(model)
        run_on_main(environment, lambda: saving.save_object(weights, directory / _file(model_index), safe=False))
        return
    staged = directory / _STAGED
    try:
        save_checkpoint(staged / "model", model=model, overwrite=True)
        run_on_main(environment, lambda: write_torch_format(staged / "model", directory, first=model_index))
    finally:  # a whole copy of the weights that users do not expect
        run_on_main(environment, lambda: shutil.rmtree(staged, ignore_errors=True))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read weights that Accelerate or `save_fsdp_model` wrote, at any number of ranks. A collective.

    Raises:
        ConfigError: adapters alone, or files per rank.
        CheckpointError: there are none, or they are not the model's.
    """
    directory, environment = local_path(input_dir), accelerator.process.environment
    if _kind(fsdp_plugin, model, adapter_only, use_dcp) == "FULL_STATE_DICT":
        whole: dict[str, Any] = {}

        def read() -> None:
            whole.update(load_torch_file(_existing(directory / _file(model_index))))

        run_on_main(environment, read)
        load_full_state_dict(model, whole)
        return
    name = f"{_NAME}_{model_index}"
    path = directory if directory.name == name else directory / name
    Ranks.of(model).together(f"reading {path}", lambda: _read(_existing(path), model))


@torch.no_grad()
def _read(path: Path, model: torch.nn.Module) -> None:
    """Read this rank's part of a model out of torch's distributed format."""
    rest(model)
    locals_ = local_tensors(model)
    check_is_plain(locals_)
    with open_dcp("weights as Accelerate saves them", path, [path], optimizer=False) as source:
        records = require_values(source)
        whole = {name: torch.empty(record.shape, device="meta") for name, record in records.items()}
        names, _, _ = match_names(locals_, whole, strict=True)
        for local, name in zip(locals_, names, strict=True):

            def fill(interval: Interval, out: torch.Tensor, name: str = str(name)) -> None:
                if interval.numel:
                    out.copy_(source.read("model", name, interval))

            fill_local(local, fill)


def refuse_optimizer(fsdp_plugin: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to save optimizer state apart from its model: it is a part of a checkpoint.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "save_fsdp_optimizer and load_fsdp_optimizer are not supported: optimizer state is saved with its model",
        hint="accelerator.save_state and load_state; checkpoint.format = dcp writes Accelerate's layout besides",
    )


def _kind(plugin: Any, model: Any, adapter_only: bool, use_dcp: bool) -> str:
    kind = getattr(plugin.state_dict_type, "name", plugin.state_dict_type) or "SHARDED_STATE_DICT"
    if adapter_only and is_adapted(model):
        raise ConfigError("adapter_only=True is not supported", hint="accelerator.save_model writes adapters alone")
    if kind == "LOCAL_STATE_DICT" or not use_dcp:
        raise ConfigError(
            "files per rank (LOCAL_STATE_DICT, or use_dcp=False) hold no global shapes, and are not supported",
            hint="use SHARDED_STATE_DICT with use_dcp=True, or accelerator.save_state",
        )
    return str(kind)


def _file(model_index: int) -> str:
    return f"{_NAME}.bin" if model_index == 0 else f"{_NAME}_{model_index}.bin"


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"there are no weights at {path}")
    return path
