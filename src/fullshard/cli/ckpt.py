"""`fullshard ckpt`: look into checkpoints, prove, compare, cut anew, and turn those of others into ours and back."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.options import Dtype, MaxShardSize, Output, Overwrite, path_word
from fullshard.core.errors import CheckpointError, ConfigError, printable
from fullshard.core.sizes import format_count, format_nbytes

if TYPE_CHECKING:
    from fullshard.checkpoint.objects import Location
    from fullshard.checkpoint.offline import Contents, Source

DIFFERENT = 1
"""Exit code of `verify` and `diff` when there is something to report; errors have 2."""

app = typer.Typer(
    name="ckpt",
    help="Inspect, verify, compare, convert and prune checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_Checkpoint = Annotated[
    str,
    typer.Argument(help="A checkpoint of any known kind; the kind is found out and printed. Of ours the URL, too."),
]
_Ours = Annotated[str, typer.Argument(help="A checkpoint of ours, or its URL.")]
_OutputOrUrl = Annotated[str, typer.Argument(help="Directory or URL to create. It appears when it is complete.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_WorldSize = Annotated[int, typer.Option(min=1, max=65536, help="Ranks to cut it for.")]
_ShardSize = Annotated[int | None, typer.Option(min=1, help="Ranks of a shard group (hybrid). Default: all.")]
_Index = Annotated[int, typer.Option(min=0, help="Which model of an Accelerate checkpoint with several.")]
_ConfigFrom = Annotated[
    Path | None,
    typer.Option(
        help="Directory to copy config.json and the tokenizer from. Default: the checkpoint itself.", parser=path_word
    ),
]


class Target(StrEnum):
    """What `export` writes."""

    HF = "hf"
    DCP = "dcp"
    TORCH = "torch"
    TORCHTITAN = "torchtitan"


@app.command()
def inspect(
    checkpoint: _Checkpoint,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    index: _Index = 0,
    as_json: _Json = False,
) -> None:
    """Say what a checkpoint holds, and draw which rank owns what. Reads no weights."""
    with _open(checkpoint, index=index) as source:
        facts = _facts(source)
        if as_json:
            facts["tensors"] = _tensor_facts(source.contents)
            typer.echo(json.dumps(facts, indent=2))
            return
        _print_facts(facts, source.contents)
        if tensors:
            for tensor in _tensor_facts(source.contents):
                _say(f"  {tensor['name']:<60} {tensor['dtype']:<10} {tensor['shape']}")


@app.command()
def verify(
    checkpoint: _Ours,
    *,
    as_json: _Json = False,
) -> None:
    """Read every byte and prove it. Exit code 0: whole; 1: damaged, with all that is wrong."""
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.verify import verify_parts

    where = location(checkpoint)
    if isinstance(where, Path) and not where.exists():
        raise CheckpointError(f"there is no checkpoint at {where}")
    found = verify_parts(where)
    is_valid = all(one.is_valid for one in found)
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
    b: Annotated[str, typer.Argument(help="Another one, of any kind.")],
    *,
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave optimizer state out.")] = False,
    as_json: _Json = False,
) -> None:
    """Compare names, shapes, dtypes and every bit. Exit code 0: the same; 1: different."""
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.offline import compare

    paths = location(a), location(b)
    with _open(paths[0], optimizer=not model_only) as one, _open(paths[1], optimizer=not model_only) as other:
        total = _total(one.contents)
        with _progress("comparing", total) as tick:
            found = [
                difference
                for difference in compare(one, other, progress=tick)
                if not (model_only and difference.kind == "optimizer")
            ]
    if as_json:
        typer.echo(json.dumps([_plain(difference) for difference in found], indent=2))
    else:
        for difference in found:
            _say(str(difference))
        _say(f"{len(found)} differences" if found else "no difference")
    if found:
        raise typer.Exit(DIFFERENT)


@app.command()
def consolidate(
    checkpoint: _Checkpoint,
    output: Output,
    *,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    config_from: _ConfigFrom = None,
    index: _Index = 0,
    overwrite: Overwrite = False,
) -> None:
    """Put the model together in safetensors files. Holds 16 MiB of a tensor at a time."""
    options = {"dtype": dtype, "max_shard_size": max_shard_size, "config_from": config_from, "overwrite": overwrite}
    _weights(checkpoint, output, index, **options)


@app.command()
def export(
    checkpoint: _Checkpoint,
    output: Output,
    *,
    to: Annotated[
        Target,
        typer.Option(
            help="hf: a Hugging Face directory. dcp: torch's format as Accelerate and Trainer lay it out; with the "
            "optimizer. torch, torchtitan: the same as plain torch and torchtitan lay it out."
        ),
    ] = Target.HF,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    config_from: _ConfigFrom = None,
    index: _Index = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint for other programs. Holds 16 MiB of a tensor at a time; more where it is stored otherwise."""
    if to is Target.HF:
        options = {"dtype": dtype, "max_shard_size": max_shard_size, "config_from": config_from, "overwrite": overwrite}
        _weights(checkpoint, output, index, needs_config=True, **options)
        return
    if config_from is not None:
        raise ConfigError("--config-from has no effect with torch's format, which holds no configuration")
    from fullshard.checkpoint.offline import write_dcp
    from fullshard.checkpoint.shards import parse_dtype

    layout: Any = "accelerate" if to is Target.DCP else to.value
    with _open(checkpoint, index=index) as source:
        with _progress("writing", _total(source.contents)) as tick:
            write_dcp(source, output, layout=layout, dtype=parse_dtype(dtype), overwrite=overwrite, progress=tick)
        _done(output)


@app.command()
def reshard(
    checkpoint: _Ours,
    output: _OutputOrUrl,
    *,
    world_size: _WorldSize,
    shard_size: _ShardSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Cut a checkpoint of ours for another number of ranks. Bit by bit the same; loading does this too, as it reads."""
    from fullshard.checkpoint.format import MANIFEST_NAME, trainer_state
    from fullshard.checkpoint.objects import location

    ours, where = trainer_state(location(checkpoint)), location(output)
    if not (ours / MANIFEST_NAME).is_file():
        raise ConfigError(f"{ours} is no checkpoint of ours", hint="fullshard ckpt import takes those of others")
    _native(ours, where, world_size=world_size, shard_size=shard_size, overwrite=overwrite)


@app.command("import")
def import_(
    checkpoint: _Checkpoint,
    output: _OutputOrUrl,
    *,
    world_size: _WorldSize = 1,
    shard_size: _ShardSize = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Class of the optimizer, where the checkpoint does not say, such as AdamW.")
    ] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave optimizer state out.")] = False,
    dtype: Dtype = None,
    index: _Index = 0,
    overwrite: Overwrite = False,
) -> None:
    """Make a checkpoint of ours out of another program's.

    Hugging Face, Accelerate, Trainer, torch, torch_xla or TorchAcc.
    """
    if optimizer is not None and no_optimizer:
        raise ConfigError("--optimizer names the class of what --no-optimizer leaves out", hint="give one of them")
    from fullshard.checkpoint.shards import parse_dtype

    _native(
        checkpoint, output, index=index, with_optimizer=not no_optimizer, world_size=world_size, shard_size=shard_size,
        dtype=parse_dtype(dtype), optimizer_kind=optimizer, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def prune(
    directory: Annotated[str, typer.Argument(help="Directory or URL that checkpoints are saved into.")],
    *,
    keep: Annotated[int, typer.Option(min=1, help="How many whole checkpoints to keep, the newest.")],
    thorough: Annotated[bool, typer.Option("--thorough", help="Read every byte before one counts as whole.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
) -> None:
    """Remove the oldest checkpoints. Those that are damaged do not count, and are left alone."""
    from fullshard.checkpoint.catalog import prune as prune_checkpoints
    from fullshard.checkpoint.objects import location

    root = location(directory)
    if not root.is_dir():
        raise ConfigError(f"there is no directory {directory}")
    found = prune_checkpoints(root, keep=keep, thorough=thorough, dry_run=dry_run)
    for path in found.removed:
        _say(f"{'would remove' if dry_run else 'removed'} {path}")
    for path, problem in found.damaged:
        _say(f"left alone {path}: {problem}")
    _say(f"{len(found.kept)} whole checkpoints are kept")


def _weights(checkpoint: str, output: Path, index: int, **options: Any) -> None:
    from fullshard.checkpoint.offline import write_weights

    with _open(checkpoint, optimizer=False, index=index) as source:
        with _progress("writing", _total(source.contents, model_only=True)) as tick:
            copied = write_weights(source, output, progress=tick, **options)
        _done(output)
        if copied:
            _say(f"copied: {', '.join(copied)}")


def _native(
    checkpoint: str | Location, output: str | Location, *, index: int = 0, with_optimizer: bool = True, **options: Any
) -> None:
    from fullshard.checkpoint.objects import location
    from fullshard.checkpoint.offline import write_native

    where = location(output)
    with _open(checkpoint, optimizer=with_optimizer, index=index) as source:
        with _progress("writing", _total(source.contents)) as tick:
            notes = write_native(source, where, progress=tick, **options)
        _done(where)
        for note in notes:
            _say(f"note: {note}")


def _say(text: str, *, err: bool = False) -> None:
    """Print lines that may hold names chosen by others."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err)


@contextlib.contextmanager
def _open(path: str | Location, *, optimizer: bool = True, index: int = 0) -> Iterator[Source]:
    from fullshard.checkpoint.offline import open_source

    with open_source(path, optimizer=optimizer, index=index) as source:
        _say(f"{path}: {source.title}", err=True)
        yield source


@contextlib.contextmanager
def _progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)


def _total(contents: Contents, *, model_only: bool = False) -> int:
    from fullshard.checkpoint.offline.source import nbytes_of

    return sum(nbytes_of(record) for kind, _, record in contents.tensors() if kind == "model" or not model_only)


def _done(output: Location) -> None:
    if isinstance(output, Path):
        sizes = [file.stat().st_size for file in output.rglob("*") if file.is_file()]
    else:
        sizes = [*output.beneath().values()]
    _say(f"wrote {output}: {len(sizes)} files, {format_nbytes(sum(sizes))}")


def _plain(difference: Any) -> dict[str, Any]:
    fields = {name: getattr(difference, name) for name in ("kind", "name", "what", "a", "b", "max_abs", "count")}
    return {**fields, "max_abs": str(difference.max_abs)} if difference.max_abs == float("inf") else fields


def _facts(source: Source) -> dict[str, Any]:
    """Return a short summary of a checkpoint."""
    from fullshard.checkpoint.offline.source import nbytes_of

    contents, manifest = source.contents, source.contents.manifest
    model = {**contents.parameters, **contents.buffers}
    facts: dict[str, Any] = {
        "path": str(source.path),
        "kind": source.title,
        "parameters": len(contents.parameters),
        "buffers": len(contents.buffers),
        "numel": sum(record.numel for record in model.values()),
        "nbytes": sum(nbytes_of(record) for _, _, record in contents.tensors()),
        "dtypes": dict(Counter(record.dtype for record in model.values())),
        "not_stored": [name for name, record in model.items() if not record.is_stored],
        "tied": {name: list(record.aliases) for name, record in model.items() if record.aliases},
        "optimizer": None,
        "states": sorted(contents.states),
        "notes": list(contents.notes),
    }
    if contents.optimizer is not None:
        keys = sorted({key for values in contents.optimizer.state.values() for key in values})
        facts["optimizer"] = {
            "kind": contents.optimizer.kind or None,
            "groups": [{"parameters": len(g.parameters), **g.options} for g in contents.optimizer.groups],
            "state": keys,
        }
    extra = contents.states.get("extra")
    if isinstance(extra, dict):
        facts["step"] = extra.get("step")
        facts["config"] = extra.get("config")
    if manifest is not None:
        facts |= {
            "save_id": manifest.save_id,
            "saved_at": manifest.saved_at,
            "world_size": manifest.world_size,
            "mesh": manifest.mesh.model_dump(),
            "fullshard_version": manifest.fullshard_version,
            "torch_version": manifest.torch_version,
        }
    return facts


def _tensor_facts(contents: Contents) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "name": name,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "pieces": [[piece.rank, piece.start, piece.stop] for piece in record.pieces],
        }
        for kind, name, record in contents.tensors()
    ]


def _print_facts(facts: dict[str, Any], contents: Contents) -> None:
    import datetime

    def line(name: str, text: str) -> None:
        _say(f"{name:<12} {text}")

    line("kind", facts["kind"])
    dtypes = ", ".join(f"{name} x{count}" for name, count in facts["dtypes"].items())
    line("model", f"{format_count(facts['numel'])} elements in {facts['parameters']} parameters ({dtypes})")
    if facts["buffers"]:
        line("buffers", str(facts["buffers"]))
    if facts["not_stored"]:
        line("not stored", f"{len(facts['not_stored'])} tensors, first {facts['not_stored'][0]}")
    for name, aliases in facts["tied"].items():
        line("tied", f"{name} = {', '.join(aliases)}")
    if facts["optimizer"]:
        optimizer = facts["optimizer"]
        kind = optimizer["kind"] or "of unknown class"
        line(
            "optimizer", f"{kind}, {len(optimizer['groups'])} groups, state {', '.join(optimizer['state']) or 'empty'}"
        )
    line("size", format_nbytes(facts["nbytes"]))
    if facts.get("step") is not None:
        line("step", str(facts["step"]))
    if contents.manifest is not None:
        when = datetime.datetime.fromtimestamp(facts["saved_at"]).isoformat(sep=" ", timespec="seconds")
        line("saved", f"{when} by fullshard {facts['fullshard_version']}, torch {facts['torch_version']}")
        mesh = facts["mesh"]
        line("ranks", f"{facts['world_size']} ({mesh['replicate']} replicate x {mesh['shard']} shard)")
    if facts["states"]:
        line("also", ", ".join(facts["states"]))
    if facts.get("config") is not None:
        changed = _changed_settings(facts["config"])
        line("config", f"{len(changed)} settings that are not the default (--json has all)")
        for name, value in changed.items():
            line("", f"{name} = {json.dumps(value)}")
    for note in facts["notes"]:
        line("note", note)
    if contents.manifest is not None:
        _print_picture(contents)


def _changed_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a run by their dotted names, without those that have the default."""
    from fullshard.config.schema import RunConfig

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix.rstrip("."): value}
        return {name: inner for key, part in value.items() for name, inner in flat(part, f"{prefix}{key}.").items()}

    usual = flat(RunConfig().model_dump(mode="json"))
    return {name: value for name, value in flat(config).items() if name not in usual or usual[name] != value}


def _print_picture(contents: Contents) -> None:
    from fullshard.checkpoint.offline.picture import ownership

    lines = ownership({name: record for kind, name, record in contents.tensors() if kind == "model"})
    if lines:
        width = max(len(part) for part, _ in lines)
        _say("\nwho stores what (one letter per share, 0-9 a-z A-Z are ranks):")
        for part, owners in lines:
            _say(f"  {part:<{width}} |{owners}|")
