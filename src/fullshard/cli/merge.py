"""The `fullshard merge` command, which merges an adapter into its base model."""

from pathlib import Path
from typing import Annotated

import typer

import fullshard.recipes  # noqa: F401  # drops messages of other libraries
from fullshard.cli.options import Dtype, MaxShardSize, Output, Overwrite, path_word
from fullshard.core.errors import ConfigError


def merge(
    base: Annotated[str, typer.Argument(help="The model the adapter was trained on: a directory or a hub name.")],
    adapter: Annotated[
        Path,
        typer.Argument(
            help="The adapter: a PEFT directory, or a Trainer checkpoint that contains one.", parser=path_word
        ),
    ],
    output: Output,
    *,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Merge a LoRA adapter into its base model. Memory holds one layer and the adapter, whatever the model's size."""
    from fullshard.checkpoint.offline.merged import ADAPTER_CONFIG, base_of, write_merged
    from fullshard.checkpoint.weight_files import model_directory

    if (Path(base) / ADAPTER_CONFIG).is_file() and not (adapter / ADAPTER_CONFIG).is_file():
        what = f"{base} is an adapter, but the first argument is the base model"
        raise ConfigError(what, hint=f"use fullshard merge {adapter} {base} {output}")
    directory, trained_on = model_directory(base), base_of(adapter)
    if trained_on not in (None, base) and Path(str(trained_on)).resolve() != directory.resolve():
        message = f"{adapter} was trained on {trained_on}. The result is only correct if {base} has the same weights."
        typer.echo(f"warning: {message}", err=True)
    write_merged(directory, adapter, output, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    typer.echo(f"wrote {output}")
