"""The `fullshard ckpt` commands, which inspect, verify, compare, reshard, and convert checkpoints."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fullshard.cli.options import Dtype, Json, MaxShardSize, Output, Overwrite, path_word
from fullshard.core.errors import CheckpointError, ConfigError, plural, printable
from fullshard.core.sizes import format_count, format_nbytes

if TYPE_CHECKING:
    from fullshard.checkpoint.objects import Location
    from fullshard.checkpoint.offline import Source

DIFFERENT = 1
"""The exit code of `verify` and `diff` if they find problems or differences. Errors have the exit code 2."""

app = typer.Typer(
    name="ckpt",
    help="Inspect, verify, compare, convert and prune checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A checkpoint of any known kind, which is detected and printed; or a fullshard checkpoint's URL."
    ),
]
_Ours = Annotated[str, typer.Argument(help="A fullshard checkpoint or its URL.")]
_OutputOrUrl = Annotated[str, typer.Argument(help="Directory or URL to create. It appears when it is complete.")]
_WorldSize = Annotated[int, typer.Option(min=1, max=65536, help="Number of ranks to reshard for.")]
_ConfigFrom = Annotated[
    Path | None,
    typer.Option(
        help="Directory to copy config.json and the tokenizer from. Default: the checkpoint itself.", parser=path_word
    ),
]


@app.command()
def inspect(
    checkpoint: _Checkpoint,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains without reading weights. --json also lists all tensors and their ranks."""
    with _open(checkpoint) as source:
        facts = _facts(source)
        listed = [
            {
                "kind": kind,
                "name": name,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "pieces": [[piece.rank, piece.start, piece.stop] for piece in record.pieces],
            }
            for kind, name, record in source.contents.tensors()
        ]
    if as_json:
        typer.echo(json.dumps({**facts, "tensors": listed}, indent=2))
        return
    facts |= {"numel": format_count(facts["numel"]), "nbytes": format_nbytes(facts["nbytes"])}
    if "saved_at" in facts:
        facts["saved_at"] = f"{datetime.fromtimestamp(facts['saved_at'], UTC):%Y-%m-%d %H:%M:%S} UTC"
    for name, value in facts.items():
        if value not in (None, [], {}) and name != "config":
            _say(f"{name:<18} {value if isinstance(value, str) else json.dumps(value)}")
    for tensor in listed if tensors else ():
        _say(f"  {tensor['name']:<60} {tensor['dtype']:<10} {tensor['shape']}")


@app.command()
def verify(checkpoint: _Ours, *, as_json: Json = False) -> None:
    """Read every byte of a checkpoint and verify it. The exit code is 0 if it is intact and 1 if it is damaged."""
    from fullshard.checkpoint.format import MANIFEST_NAME, is_data_file, part_paths
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.verify import verify_parts

    where = location(checkpoint)
    if isinstance(where, Path) and not where.exists():
        raise CheckpointError(f"no checkpoint was found at {where}")
    found = verify_parts(where)
    is_valid = all(one.is_valid for one in found)
    if isinstance(where, Path) and not (is_valid or part_paths(where) or (where / MANIFEST_NAME).exists()):
        inside = sorted(str(path.parent) for path in where.glob(f"**/{MANIFEST_NAME}"))
        if inside:
            what = f"{where} is not a checkpoint, but contains {len(inside)}"
            raise CheckpointError(what, hint=f"verify one of them: fullshard ckpt verify {inside[-1]}")
        if not any(is_data_file(path.name) for path in where.rglob("*")):
            what = f"{where} is not a fullshard checkpoint, so there are no checksums to verify"
            raise CheckpointError(what, hint=f"fullshard ckpt import {where} OUT converts those of other programs")
    if as_json:
        problems = [problem for one in found for problem in one.problems]
        typer.echo(json.dumps({"path": str(checkpoint), "valid": is_valid, "problems": problems}, indent=2))
    else:
        for one in found:
            _say(str(one))
    if not is_valid:
        raise typer.Exit(DIFFERENT)


@app.command()
def diff(
    a: _Checkpoint,
    b: Annotated[str, typer.Argument(help="Another checkpoint of any kind.")],
    *,
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave optimizer state out.")] = False,
    as_json: Json = False,
) -> None:
    """Compare the names, shapes, dtypes, and bits of all tensors. The exit code is 0 if they are equal and 1 if not."""
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.offline import compare

    first, second = location(a), location(b)  # check both names before anything is read
    with _open(first, optimizer=not model_only) as one, _open(second, optimizer=not model_only) as other:
        found = list(compare(one, other))
    if as_json:  # JSON has no infinity
        typer.echo(json.dumps([d._asdict() | {"max_abs": min(d.max_abs, sys.float_info.max)} for d in found], indent=2))
    else:
        for difference in found:
            _say(f"{difference.name}: {difference.what}")
        _say(plural(len(found), "difference") if found else "no difference")
    if found:
        raise typer.Exit(DIFFERENT)


@app.command()
def export(
    checkpoint: _Checkpoint,
    output: Output,
    *,
    to: Annotated[
        Literal["hf", "safetensors", "dcp", "torch", "torchtitan"],
        typer.Option(
            help="hf: a Hugging Face directory. safetensors: the tensors, unchanged. dcp: torch's format with the "
            "optimizer, in the layout of Accelerate and Trainer. torch, torchtitan: the same in their layout."
        ),
    ] = "hf",
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    config_from: _ConfigFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint in a format that other programs read.

    At most 16 MiB of a tensor is in memory at a time, unless the source format requires whole tensors to be read.
    """
    from fullshard.checkpoint.offline import write_dcp, write_weights
    from fullshard.checkpoint.shards import parse_dtype

    is_torchs, copied = to not in ("hf", "safetensors"), list[str]()
    if is_torchs and config_from is not None:
        raise ConfigError("--config-from has no effect with torch's format, which does not store a configuration")
    with _open(checkpoint, optimizer=is_torchs) as source:
        if to == "hf" or to == "safetensors":
            copied = write_weights(
                source, output, dtype=dtype, max_shard_size=max_shard_size, config_from=config_from,
                needs_config=to == "hf", overwrite=overwrite,
            )  # fmt: skip
        else:
            layout = "accelerate" if to == "dcp" else to
            write_dcp(source, output, layout=layout, dtype=parse_dtype(dtype), overwrite=overwrite)
    _done(output)
    if copied:
        _say(f"copied: {', '.join(copied)}")


@app.command()
def reshard(checkpoint: _Ours, output: _OutputOrUrl, *, world_size: _WorldSize, overwrite: Overwrite = False) -> None:
    """Rewrite a fullshard checkpoint for another number of ranks.

    The tensors stay identical bit for bit. Loading also reshards, so this step is optional.
    """
    from fullshard.checkpoint.format import MANIFEST_NAME, trainer_state
    from fullshard.checkpoint.objects import location

    ours, where = trainer_state(location(checkpoint)), location(output)
    if not (ours / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{ours} is not a fullshard checkpoint",
            hint="use `fullshard ckpt import` to read checkpoints from other libraries",
        )
    _native(ours, where, world_size=world_size, overwrite=overwrite)


@app.command("import")
def import_(
    checkpoint: _Checkpoint,
    output: _OutputOrUrl,
    *,
    world_size: _WorldSize = 1,
    optimizer: Annotated[
        str | None, typer.Option(help="Class of the optimizer, such as AdamW, if the checkpoint does not name it.")
    ] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave optimizer state out.")] = False,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert another program's checkpoint to fullshard's format.

    Supported are checkpoints of Hugging Face, Accelerate, Trainer, torch, torch_xla, and TorchAcc.
    """
    if optimizer is not None and no_optimizer:
        raise ConfigError(
            "--optimizer has no effect with --no-optimizer, which omits the optimizer", hint="use only one of the two"
        )
    from fullshard.checkpoint.shards import parse_dtype

    _native(
        checkpoint, output, with_optimizer=not no_optimizer, world_size=world_size,
        dtype=parse_dtype(dtype), optimizer_kind=optimizer, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def prune(
    directory: Annotated[str, typer.Argument(help="Directory or URL that checkpoints are saved into.")],
    *,
    keep: Annotated[int, typer.Option(min=1, help="Number of intact checkpoints to keep, the newest ones.")],
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Read every byte before a checkpoint counts as intact.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the oldest checkpoints. Damaged checkpoints are neither counted nor removed."""
    from fullshard.checkpoint.catalog import prune as prune_checkpoints
    from fullshard.checkpoint.objects import location

    root = location(directory)
    if not root.is_dir():
        raise ConfigError(f"{directory} is not a directory of checkpoints: it does not exist, or is a file")
    found = prune_checkpoints(root, keep=keep, thorough=thorough, dry_run=dry_run)
    if not (found.kept or found.removed or found.damaged):
        raise ConfigError(f"{directory} contains no checkpoints", hint="pass the directory that they are saved into")
    if as_json:
        shown = {"dry_run": dry_run, "kept": found.kept, "removed": found.removed, "damaged": found.damaged}
        typer.echo(json.dumps(shown, default=str, indent=2))
        return
    for path in found.removed:
        _say(f"{'would remove' if dry_run else 'removed'} {path}")
    for path, problem in found.damaged:
        _say(f"left alone {path}: {problem}")
    _say(f"kept {plural(len(found.kept), 'intact checkpoint')}")


def _native(checkpoint: str | Location, output: str | Location, *, with_optimizer: bool = True, **options: Any) -> None:
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.offline import write_native

    where = location(output)
    with _open(checkpoint, optimizer=with_optimizer) as source:
        notes = write_native(source, where, **options)
    _done(where)
    for note in notes:
        _say(f"note: {note}")


def _say(text: str, *, err: bool = False) -> None:
    """Print text that may contain untrusted names, with control characters escaped."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err)


@contextlib.contextmanager
def _open(path: str | Location, *, optimizer: bool = True) -> Iterator[Source]:
    from fullshard.checkpoint.offline import open_source

    with open_source(path, optimizer=optimizer) as source:
        _say(f"{path}: {source.title}", err=True)
        yield source


def _done(output: Location) -> None:
    if isinstance(output, Path):
        sizes = [file.stat().st_size for file in output.rglob("*") if file.is_file()]
    else:
        sizes = [*output.beneath().values()]
    _say(f"wrote {output}: {plural(len(sizes), 'file')}, {format_nbytes(sum(sizes))}")


def _facts(source: Source) -> dict[str, Any]:
    """Return a short summary of a checkpoint."""
    contents, manifest, model = source.contents, source.contents.manifest, source.contents.model
    facts: dict[str, Any] = {
        "path": str(source.path),
        "kind": source.title,
        "parameters": len(contents.parameters),
        "buffers": len(contents.buffers),
        "numel": sum(record.numel for record in model.values()),
        "nbytes": contents.nbytes,
        "dtypes": dict(Counter(record.dtype for record in model.values())),
        "not_stored": [name for name, record in model.items() if not record.is_stored],
        "tied": {name: list(record.aliases) for name, record in model.items() if record.aliases},
        "optimizer": None,
        "states": sorted(contents.states),
        "notes": list(contents.notes),
    }
    if contents.optimizer is not None:
        facts["optimizer"] = {
            "kind": contents.optimizer.kind or None,
            "groups": [{"parameters": len(g.parameters), **g.options} for g in contents.optimizer.groups],
            "state": sorted({key for values in contents.optimizer.state.values() for key in values}),
        }
    if isinstance(extra := contents.states.get("extra"), dict):
        is_counted = extra.get("step") or "schedule_steps" not in extra  # `save_state` of a script that counts no steps
        facts |= {"step": extra.get("step") if is_counted else None, "config": extra.get("config")}
    if manifest is not None:
        keys = {"save_id", "saved_at", "world_size", "mesh", "fullshard_version", "torch_version"}
        facts |= manifest.model_dump(include=keys)
    return facts
