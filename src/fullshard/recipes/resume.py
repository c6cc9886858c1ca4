"""Saving a run and going on from where it stopped."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fullshard.checkpoint import AsyncSaver, MemoryCopies, load_checkpoint, save_checkpoint, whole_checkpoints
from fullshard.checkpoint.decoding import decode_value
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.objects import Location, entries_of, location
from fullshard.checkpoint.storage import OLD_PREFIX
from fullshard.checkpoint.store import store_of
from fullshard.core.errors import ConfigError, DamagedError
from fullshard.launch import run_on_main
from fullshard.launch.environment import is_started_again
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.loop import Trainer

_STREAM = ("batch_size", "seq_len", "seed", "held_out")
"""Settings that fix which sequences each step sees; a resumed run must keep them."""

_SCHEDULE = ("steps", "warmup_steps", "lr", "min_lr_ratio")
_CHANGEABLE = (*_SCHEDULE, "weight_decay", "max_grad_norm", "ema_decay", "precision")
"""Settings that shape the training and may be others at a resume: they count from there on."""

_DATA = ("data", "text_field", "max_data_mb", "model", "vocab_size")
"""Settings that the tokens of the data may depend on: it may have moved, and still be the same."""

_KEPT = {"step", "data_crc32c", "arguments"}
"""The values that `state_after` puts into every checkpoint, in every version."""

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
    if is_started_again():
        return _of_this_run(arguments)
    if arguments.overwrite:
        for path in _of_runs(directory):
            store_of(path).remove(path)
        return []
    if arguments.resume == "auto":
        return _whole(directory)
    mixed = _of_runs(directory)
    named = None if arguments.resume == "never" else location(arguments.resume)
    if named is not None:
        if not named.is_dir():
            raise ConfigError(f"--resume {arguments.resume}: no such checkpoint directory")
        real = named.resolve()
        if real.parent == directory.resolve():  # then those before it are this run's
            mixed = {path: steps for path, steps in mixed.items() if steps > _steps_of(real)}
    if mixed:
        raise ConfigError(
            f"{directory} holds checkpoints of an earlier run that this one would be mixed with: "
            f"{', '.join(path.name for path in mixed)}",
            hint="use another --output-dir, or --resume auto to go on from them; --overwrite removes them",
        )
    return [] if named is None else [named]


def _whole(directory: Location) -> list[Location]:
    """Return a run's valid checkpoints, the one with most steps behind it first: the newest, whatever clocks say."""
    return sorted(whole_checkpoints(directory), key=_steps_in, reverse=True)


def _steps_in(path: Location) -> int:
    """Return the number of steps behind a checkpoint, as it says itself; -1 if `train` has not written it."""
    extra = read_manifest(path).states.get("extra")
    step = extra.get("step") if isinstance(extra, dict) else None
    return step if isinstance(step, int) else -1


def _of_runs(directory: Location) -> dict[Location, int]:
    """Return the checkpoints of runs in a directory, whole or not, each with the steps behind it."""
    entries = entries_of(directory) if directory.is_dir() else []
    return {path: steps for path in entries if (steps := _steps_of(path)) >= 0 and path.is_dir()}


def _steps_of(path: Location) -> int:
    """Return the steps in a checkpoint's name; -1, before all others, if a user has changed the name."""
    match = _NAME.fullmatch(path.name)
    return int(match["steps"]) if match else -1


def _of_this_run(arguments: TrainArguments) -> list[Location]:
    """Return the checkpoints that the run has written, and the one that it was told to begin with."""
    written = _whole(arguments.checkpoints)
    if arguments.resume in ("auto", "never"):
        return written
    first = location(arguments.resume)
    return [*(path for path in written if _steps_of(path) > _steps_of(first.resolve())), first]


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
    if not paths:
        return
    extra = read_manifest(paths[0]).states.get("extra")
    kept: dict[str, Any] = {}
    if isinstance(extra, dict) and extra.keys() >= _KEPT:
        kept = {key: decode_value(extra[key], {}) for key in _KEPT}
    _check_same_run(paths[0], kept, arguments, checksum=checksum)


def load_newest(paths: Sequence[Location], trainer: Trainer, say: Callable[[str], None]) -> tuple[Location | None, int]:
    """Load the first of some checkpoints that is not damaged, and say which are. Collective.

    Returns:
        Its path, and the number of steps it has behind it; (None, 0) if there are none.

    Raises:
        CheckpointError: all of them are damaged, or one does not fit the model.
        ConfigError: one belongs to another run.
    """
    for number, path in enumerate(paths, start=1):
        try:
            return path, load(path, trainer, say)
        except DamagedError as error:
            if number == len(paths):
                raise
            say(f"resume: {path} is passed over, because it is damaged: {error}")
    return None, 0


def load_copy(copies: MemoryCopies, paths: Sequence[Location], trainer: Trainer) -> int | None:
    """Load a copy in host memory if there is one that is newer than these checkpoints; its step. Collective.

    Raises:
        CheckpointError, ConfigError: as for `load_newest`.
    """
    newest = run_on_main(trainer.environment, lambda: read_manifest(paths[0]).saved_at if paths else 0.0)
    extra = copies.load(newer_than=newest, **_state(trainer))
    return None if extra is None else _went_back(copies.directory, extra, trainer)


def save(trainer: Trainer, step: int, saver: AsyncSaver) -> Location:
    """Write the checkpoint after `step` steps, by the `saver` if training is to go on meanwhile. Collective."""
    path = trainer.arguments.checkpoints / f"step-{step:06d}"
    (saver.save if trainer.arguments.async_save else save_checkpoint)(
        path,
        **state_after(trainer, step),
        total_limit=trainer.arguments.keep_checkpoints,
        # Only an incomplete or damaged one can be there: `find_checkpoints` has refused to begin before a whole one.
        overwrite=True,
    )
    return path


def state_after(trainer: Trainer, step: int) -> dict[str, Any]:
    """Return the values saved for a run that has made `step` steps."""
    extra = {
        "step": step,
        "skipped_batches": trainer.skipped_batches,
        "data_crc32c": trainer.checksum,
        "arguments": trainer.arguments.model_dump(mode="json"),
    }
    return {**_state(trainer), "extra": extra}


def load(path: Location, trainer: Trainer, say: Callable[[str], None]) -> int:
    """Load the checkpoint at `path`; the number of steps it has behind it. Collective.

    Raises:
        CheckpointError: it is damaged or does not fit the model.
        ConfigError: it belongs to a run on other data, or with other settings that the order of the data depends on.
    """
    with _own_weight_decay(trainer.optimizer.optimizer):
        extra = load_checkpoint(path, **_state(trainer))
    step = _went_back(path, extra, trainer)
    if changed := _differing(_CHANGEABLE, extra["arguments"], trainer.arguments):
        is_scheduled_anew = bool(_differing(_SCHEDULE, extra["arguments"], trainer.arguments))
        schedule = "; the learning rate follows another schedule" * is_scheduled_anew
        say(f"resume: from here on {', '.join(changed)}{schedule}")
    return step


@contextlib.contextmanager
def _own_weight_decay(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the run's own weight decay, as its other flags: a load inside brings the options of parameter groups."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    yield
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def _went_back(path: Location, extra: dict[str, Any], trainer: Trainer) -> int:
    """Set what is no part of model or optimizer; the number of steps behind it."""
    _check_same_run(path, extra, trainer.arguments, checksum=trainer.checksum)
    trainer.skipped_batches = int(extra.get("skipped_batches", 0))  # older checkpoints have none
    return int(extra["step"])


def roll_back(trainer: Trainer, step: int, say: Callable[[str], None]) -> int | None:
    """Return to the newest checkpoint and skip the data since; give its step, or None if there is none. Collective.

    Args:
        trainer: whose step `step`, the one after the last whole one, had gradients that are not finite.
        step: counted from 1.
        say: told of damaged ones.
    """
    paths = run_on_main(trainer.environment, lambda: _whole(trainer.arguments.checkpoints))
    trainer.optimizer.zero_grad()
    batches = step + trainer.skipped_batches
    path, back = load_newest(paths, trainer, say)
    if path is None:
        return None
    trainer.skipped_batches = batches - back
    return back


def _state(trainer: Trainer) -> dict[str, Any]:
    # A checkpoint has a scaler whatever the precision is, so that a run may go on in another one.
    scaler = trainer.accelerator.scaler or torch.amp.GradScaler(trainer.device.type, enabled=False)
    objects = [] if trainer.ema is None else [trainer.ema]
    return {"model": trainer.model, "optimizer": trainer.optimizer.optimizer, "scaler": scaler, "objects": objects}


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
    return [
        f"{arguments.spelled(name)} was {saved.get(name)} and is {now[name]}"
        for name in names
        if saved.get(name) != now[name]
    ]
