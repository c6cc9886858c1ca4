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
    from fullshard.checkpoint.offline import open_merged, write_weights
    from fullshard.checkpoint.weight_files import model_directory

    with open_merged(model_directory(base), adapter) as (merged, configuration):
        write_weights(
            merged, output, dtype=dtype, max_shard_size=max_shard_size, config_from=configuration, needs_config=True,
            overwrite=overwrite,
        )  # fmt: skip
    typer.echo(f"wrote {output}")
