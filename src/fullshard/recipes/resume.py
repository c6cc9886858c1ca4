"""Resuming a run: the checkpoint to start from, and checkpoints that do not fit the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fullshard.checkpoint import MemoryCopies, load_checkpoint, whole_checkpoints
from fullshard.checkpoint.decoding import decode_value
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.objects import Location, entries_of, location
from fullshard.checkpoint.storage import OLD_PREFIX
from fullshard.checkpoint.store import store_of
from fullshard.core.errors import ConfigError, DamagedError
from fullshard.launch import run_on_main
from fullshard.launch.environment import is_started_again
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.trainer import Trainer

_STREAM = ("batch_size", "seq_len", "seed", "held_out")
"""Settings that fix which sequences each step sees; a resumed run must keep them."""
_SCHEDULE = ("steps", "warmup_steps", "lr", "min_lr_ratio")
_CHANGEABLE = (*_SCHEDULE, "weight_decay", "max_grad_norm", "ema_decay", "precision")
"""Settings that shape the training and may be others at a resume: they count from there on."""
_DATA = ("data", "text_field", "max_data_mb", "model", "vocab_size")
"""Settings that the tokens of the data may depend on: it may have moved, and still be the same."""
_KEPT = {"step", "data_crc32c", "arguments"}
"""The values that every checkpoint of a run has, in every version."""
_NAME = re.compile(rf"({re.escape(OLD_PREFIX)})?step-(?P<steps>\d+)(?(1)-\w+)")
"""The name of a checkpoint, also of one that was stepping aside for another when a save was killed."""


def find_checkpoints(arguments: TrainArguments) -> list[Location]:
    """Return the checkpoints to go on from, the first that loads; none to start from the beginning. Called on rank 0.

    When a launcher has started the processes again, those that this run has written come first, and none is removed.

    Raises:
        ConfigError: the path that was named is no directory, or the output directory holds an earlier run that would
            be mixed with this one.
    """
    directory = arguments.checkpoints
    named = None if arguments.resume in ("auto", "never") else location(arguments.resume)
    if is_started_again():
        written = whole_in(directory)
        if named is None:
            return written
        return [*(path for path in written if _steps_of(path) > _steps_of(named.resolve())), named]
    entries = entries_of(directory) if directory.is_dir() else []
    of_runs = {path: steps for path in entries if (steps := _steps_of(path)) >= 0 and path.is_dir()}
    if arguments.overwrite:
        for path in of_runs:
            store_of(path).remove(path)
        return []
    if arguments.resume == "auto":
        return whole_in(directory)
    if named is not None:
        if not named.is_dir():
            raise ConfigError(f"--resume {arguments.resume}: no such checkpoint directory")
        real = named.resolve()
        if real.parent == directory.resolve():  # then those before it are this run's
            of_runs = {path: steps for path, steps in of_runs.items() if steps > _steps_of(real)}
    if of_runs:
        raise ConfigError(
            f"{directory} holds checkpoints of an earlier run that this one would be mixed with: "
            f"{', '.join(path.name for path in of_runs)}",
            hint="use another --output-dir, or --resume auto to go on from them; --overwrite removes them",
        )
    return [] if named is None else [named]


def whole_in(directory: Location) -> list[Location]:
    """Return a run's valid checkpoints, the one with most steps behind it first: the newest, whatever clocks say."""

    def steps_in(path: Location) -> int:
        step = (_extra_of(path) or {}).get("step")
        return step if isinstance(step, int) else -1

    return sorted(whole_checkpoints(directory), key=steps_in, reverse=True)


def _extra_of(path: Location) -> dict[str, Any] | None:
    """Return what a checkpoint says of its run, as it is stored; None if it says nothing."""
    extra = read_manifest(path).states.get("extra")
    return extra if isinstance(extra, dict) else None


def _steps_of(path: Location) -> int:
    """Return the steps in a checkpoint's name; -1, before all others, if a user has changed the name."""
    match = _NAME.fullmatch(path.name)
    return int(match["steps"]) if match else -1


def require_same_run(paths: Sequence[Location], arguments: TrainArguments, *, checksum: int | None = None) -> None:
    """Refuse before anything is written, or loaded, what this run cannot go on from. Called on rank 0.

    Args:
        paths: the checkpoints; none is nothing to refuse.
        arguments: of the run.
        checksum: of the data, once that is known.

    Raises:
        CheckpointError: the first of the checkpoints has no manifest that can be read.
        ConfigError: it belongs to another run, or `train` has not written it.
    """
    if paths:
        extra = _extra_of(paths[0]) or {}
        kept = {key: decode_value(extra[key], {}) for key in _KEPT} if extra.keys() >= _KEPT else {}
        _check_same_run(paths[0], kept, arguments, checksum=checksum)


def go_on(paths: Sequence[Location], copies: MemoryCopies | None, trainer: Trainer, say: Callable[[str], None]) -> int:
    """Load what is newest, in host memory or on a disk, and say what it is; the number of steps behind it. Collective.

    Raises:
        CheckpointError: all of them are damaged, or one does not fit the model.
        ConfigError: one belongs to another run.
    """
    if copies is not None:
        newest = run_on_main(trainer.environment, lambda: read_manifest(paths[0]).saved_at if paths else 0.0)
        if (extra := copies.load(newer_than=newest, **trainer.state())) is not None:
            step = _went_back(copies.directory, extra, trainer)
            say(f"resume: from copies in host memory, after step {step}")
            return step
    path, step = load_newest(paths, trainer, say)
    if path is not None:
        say(f"resume: from {path}, after step {step}")
    elif trainer.arguments.resume == "never":
        say("resume: not wanted, starting at step 1")
    else:
        say(f"resume: no complete checkpoint in {trainer.arguments.checkpoints}, starting at step 1")
    return step


def load_newest(paths: Sequence[Location], trainer: Trainer, say: Callable[[str], None]) -> tuple[Location | None, int]:
    """Load the first of some checkpoints that is not damaged, and say which are; (None, 0) if there are none."""
    for number, path in enumerate(paths, start=1):
        try:
            return path, _load(path, trainer, say)
        except DamagedError as error:
            if number == len(paths):
                raise
            say(f"resume: {path} is passed over, because it is damaged: {error}")
    return None, 0


def _load(path: Location, trainer: Trainer, say: Callable[[str], None]) -> int:
    groups = trainer.optimizer.param_groups
    decays = [group["weight_decay"] for group in groups]  # a flag of the run, and the checkpoint has those of before
    try:
        extra = load_checkpoint(path, **trainer.state())
    finally:
        for group, decay in zip(trainer.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    step = _went_back(path, extra, trainer)
    if changed := _differing(_CHANGEABLE, extra["arguments"], trainer.arguments):
        is_scheduled_anew = bool(_differing(_SCHEDULE, extra["arguments"], trainer.arguments))
        schedule = "; the learning rate follows another schedule" * is_scheduled_anew
        say(f"resume: from here on {', '.join(changed)}{schedule}")
    return step


def _went_back(path: Location, extra: dict[str, Any], trainer: Trainer) -> int:
    """Set what is no part of model or optimizer; the number of steps behind it."""
    _check_same_run(path, extra, trainer.arguments, checksum=trainer.checksum)
    trainer.skipped_batches = int(extra.get("skipped_batches", 0))  # older checkpoints have none
    return int(extra["step"])


def _check_same_run(path: Location, extra: dict[str, Any], arguments: TrainArguments, *, checksum: int | None) -> None:
    if not extra.keys() >= _KEPT:
        raise ConfigError(
            f"{path} is no checkpoint of `fullshard train`: its `extra` does not hold {', '.join(sorted(_KEPT))}",
            hint="`fullshard ckpt export` makes weights of it, which --model takes",
        )
    saved = extra["arguments"]
    differing = _differing(_STREAM, saved, arguments)
    averaged = saved.get("ema_decay")  # older checkpoints have none
    if averaged is not None and arguments.ema_decay is None:
        differing.append(f"--ema-decay was {averaged} and is not given, so the average would be lost")
    if checksum is not None and extra["data_crc32c"] != checksum:
        causes = _differing(_DATA, saved, arguments) or ["what --data names, or the tokenizer, has changed since"]
        differing.append(f"the tokens of the data are different ({', '.join(causes)})")
    if differing:
        raise ConfigError(
            f"{path} belongs to another run: {'; '.join(differing)}",
            hint="use the same data and settings, or another --output-dir",
        )
    if extra["step"] > arguments.steps:
        raise ConfigError(f"the checkpoint {path} is {extra['step']} steps in, more than --steps {arguments.steps}")


def _differing(names: Sequence[str], saved: dict[str, Any], arguments: TrainArguments) -> list[str]:
    now = arguments.model_dump(mode="json")
    changed = [name for name in names if saved.get(name) != now[name]]
    return [f"{arguments.spelled(name)} was {saved.get(name)} and is {now[name]}" for name in changed]
