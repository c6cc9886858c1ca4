"""The `fullshard merge` command, which merges an adapter into its base model."""

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.options import Dtype, MaxShardSize, Output, Overwrite, path_word


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
    from fullshard.checkpoint.offline.merged import write_merged

    write_merged(base, adapter, output, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    typer.echo(f"wrote {output}")
