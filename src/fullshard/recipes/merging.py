"""`--merge_dir`: after training, the whole model with its adapters merged, in a folder of its own.

The folder is replaced as a whole. So it has to be empty, unless it holds what this run has merged before and nothing
else: `.merged.json` in the output directory has the size and the time of every file that it wrote there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard import checkpoint
from fullshard.checkpoint.offline import HuggingFaceSource, MergedSource, write_weights
from fullshard.checkpoint.weight_files import model_directory
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_json
from fullshard.launch.environment import read_rank_environment, run_on_main
from fullshard.recipes.sft_arguments import ModelArguments

RECORD_NAME = ".merged.json"


def require_room_to_merge(merged: Path, output: Path, *, goes_on: bool) -> None:
    """Refuse a folder to merge into that has something to lose. Called on rank 0.

    Args:
        merged: the folder that will be replaced.
        output: the output directory.
        goes_on: whether this run has run before; then what it has merged may be replaced.

    Raises:
        ConfigError: `merged` is or contains `output`, is a file, or holds what this run has not written.
    """
    if output.resolve().is_relative_to(merged.resolve()):
        raise ConfigError(
            f"--merge_dir {merged} is or contains --output_dir {output}, and the merged model would replace all of it",
            hint=f"for example --merge_dir {output / 'merged'}",
        )
    if not merged.exists():
        return
    held = sorted(path.name for path in merged.iterdir()) if merged.is_dir() else ["a file"]
    if held and not (goes_on and _contents(merged) == _recorded(output)):
        few = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "")
        raise ConfigError(
            f"--merge_dir {merged} is not empty, and the merged model would replace all of it: {few}",
            hint="name a new folder; after training, `fullshard merge` can write one, too",
        )


def merge(arguments: ModelArguments, trainer: Any, *, goes_on: bool) -> None:
    """Write the model with its adapters merged to `merge_dir`. A collective.

    The frozen model in memory may be quantised; then the adapters go into the model as it was, read again.

    Raises:
        ConfigError: see `require_room_to_merge`; hours have passed since it was asked first.
    """
    environment, tokenizer = read_rank_environment(), trainer.processing_class
    merged, output = Path(arguments.merge_dir or ""), Path(trainer.args.output_dir)
    run_on_main(environment, lambda: require_room_to_merge(merged, output, goes_on=goes_on))

    def merge_files() -> None:
        source = HuggingFaceSource(model_directory(arguments.model_name_or_path))
        with MergedSource(source, output) as weights, weights.configuration() as configuration:
            write_weights(weights, merged, config_from=configuration, needs_config=True, overwrite=True)
        tokenizer.save_pretrained(merged)

    if arguments.use_4bit_quantization or arguments.use_8bit_quantization:
        run_on_main(environment, merge_files)
    else:
        checkpoint.export_hf(merged, model=trainer.model, tokenizer=tokenizer, overwrite=True)
    record = output / RECORD_NAME
    run_on_main(environment, lambda: record.write_text(json.dumps(_contents(merged)), encoding="utf-8"))


def _recorded(output: Path) -> Any:
    try:
        return read_json(output / RECORD_NAME)
    except (OSError, ValueError):
        return None


def _contents(directory: Path) -> dict[str, list[int]]:
    """Return size in bytes and time of change in ns of all files in a folder and below, by their paths in it."""
    found = {str(path.relative_to(directory)): path.lstat() for path in directory.rglob("*") if not path.is_dir()}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}
