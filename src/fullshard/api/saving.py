"""The contents and locations of the checkpoints that the Accelerator's `save_state` writes and `load_state` reads.

A model with its optimizer is saved as one checkpoint of `fullshard.checkpoint`. Several models or optimizers are saved
in *parts*: a directory of checkpoints, each with a model and the optimizer that holds its parameters. The directory
gets its final name when all parts are complete, so it is either complete or absent, like a single checkpoint. Models
that share an optimizer are saved in one part.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from fullshard.api.data import ShardedDataLoader
from fullshard.checkpoint.adapters import is_saved_as_adapters, save_adapters
from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.catalog import latest_checkpoint
from fullshard.checkpoint.collect import LoadArguments, SaveArguments
from fullshard.checkpoint.export import export_hf
from fullshard.checkpoint.format import MANIFEST_NAME, is_for_others, part_name, part_paths, read_manifest
from fullshard.checkpoint.full_state import full_state_dict
from fullshard.checkpoint.lease import hold_folder
from fullshard.checkpoint.load import load_checkpoint, prove_checkpoint
from fullshard.checkpoint.objects import Location, ObjectPath, location, on_this_host, read_small
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Pending, prepare_parts, prepare_save
from fullshard.checkpoint.store import is_of_a_save
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.files import atomic_file, parse_json
from fullshard.core.imports import import_extra
from fullshard.core.paths import local_path
from fullshard.core.sizes import parse_size
from fullshard.features.averages import EMA
from fullshard.launch.environment import RankEnvironment, run_on_main

_WHOLE = "model"
_HOOKS = "files-of-hooks.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLES = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_AUTOMATIC = re.compile(r"checkpoint_(\d+)")


_FORMATS: dict[str, Callable[[Pending], Pending]] = {}


def register_format(name: str, add: Callable[[Pending], Pending]) -> None:
    """Register a `checkpoint.format`. `add` extends each save, so that it also writes files in that format."""
    _FORMATS[name] = add


class Together(nn.ModuleList):
    """A container for models that share one optimizer. It is saved as one model with name prefixes `0.`, `1.` etc."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The objects that a checkpoint saves, without their wrappers. `config` is saved only for users to read."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    schedule_steps: list[int]  # of each scheduler, per optimizer step
    scaler: Any
    loaders: Sequence[ShardedDataLoader]
    objects: Sequence[Any]
    step: int
    config: Mapping[str, Any]

    def parts(self) -> list[LoadArguments]:
        """Return the arguments for each checkpoint to save or load: a model, its optimizer and the other objects.

        Models that share an optimizer are combined in one `Together`. A model with two optimizers appears twice. The
        first part also contains the schedulers, the registered objects and the scaler. A registered EMA is saved in the
        part of its model.
        """
        pairs: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        covered = set[int]()
        for optimizer in self.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            owners = [model for model in self.models if held & {id(p) for p in model.parameters()}]
            if not owners:
                raise CheckpointError(
                    f"the {type(optimizer).__name__} does not hold any parameters of a prepared model",
                    hint="prepare the model, and create the optimizer from its parameters",
                )
            covered |= set(map(id, owners))
            pairs.append((owners[0] if len(owners) == 1 else Together(owners), optimizer))
        pairs += [(model, None) for model in self.models if id(model) not in covered]
        pairs = pairs or [(nn.Module(), None)]  # only loaders and objects: a checkpoint without weights
        objects: list[list[Any]] = [[] for _ in pairs]
        if len(self.schedulers) != 1:
            objects[0] += self.schedulers
        objects[0] += [each for each in self.objects if not isinstance(each, EMA)]
        for ema in (each for each in self.objects if isinstance(each, EMA)):
            number = next((n for n, (model, _) in enumerate(pairs) if ema.is_of(model)), None)
            if number is None:
                raise CheckpointError(
                    "a registered EMA belongs to a model that has not been prepared",
                    hint="call accelerator.prepare(model) first",
                )
            objects[number].append(ema)
        parts = [LoadArguments(model=m, optimizer=o, objects=each) for (m, o), each in zip(pairs, objects, strict=True)]
        parts[0] |= {"scheduler": self.schedulers[0] if len(self.schedulers) == 1 else None, "scaler": self.scaler}
        return parts

    @property
    def extra(self) -> dict[str, Any]:
        """Return the values that are not separate objects: the step, loader positions and the configuration."""
        loaders = [loader.state_dict() for loader in self.loaders]
        steps = {"step": self.step, "schedule_steps": self.schedule_steps}
        return {**steps, "loaders": loaders, "config": dict(self.config)}


def next_path(config: Any, output_dir: str | os.PathLike[str] | ObjectPath | None) -> tuple[Location, bool]:
    """Return the path to save to, and whether an existing checkpoint at that path may be replaced."""
    if config.automatic_checkpoint_naming:
        if config.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir, but none is set")
        folder = _numbered_folder(config)
        hold_folder(folder)
        return folder / f"checkpoint_{config.iteration}", False
    if output_dir is None:
        raise ConfigError("save_state needs a directory", hint="pass one, or use automatic_checkpoint_naming")
    path = location(output_dir)
    foreign = _foreign_entries(path)
    if foreign:
        raise CheckpointError(
            f"{path} contains files that are not part of a checkpoint ({', '.join(foreign[:3])}), and saving would "
            "remove them",
            hint="save to a separate directory, for example a subdirectory",
        )
    return path, True


def existing_path(config: Any, input_dir: str | os.PathLike[str] | ObjectPath | None) -> Location:
    """Return the path to load from, which is the newest complete checkpoint if `input_dir` is None."""
    if input_dir is not None:
        path = location(input_dir)
        if not path.is_dir():
            newest = latest_checkpoint(path.parent)
            hint = f"{path.parent} holds no checkpoint either; relative paths start at {Path.cwd()}"
            raise CheckpointError(
                f"no checkpoint was found at {path}", hint=f"the newest in this folder is {newest}" if newest else hint
            )
        return path
    if not (config.automatic_checkpoint_naming and config.project_dir):
        raise ConfigError("load_state needs a directory", hint="pass one, or use automatic_checkpoint_naming")
    folder = _numbered_folder(config)
    newest = latest_checkpoint(folder)
    if newest is None:
        raise CheckpointError(f"there is no complete checkpoint in {folder}")
    return newest


def number_after(path: Location, config: Any) -> int:
    """Return the next number of automatic checkpoints, which is larger than the number of `path` if it has one."""
    match = _AUTOMATIC.fullmatch(path.name)
    is_of_project = config.project_dir is not None and isinstance(path, Path)
    if match and is_of_project and path.resolve().parent == _numbered_folder(config).resolve():
        return max(int(config.iteration), int(match[1]) + 1)
    return int(config.iteration)


def _numbered_folder(config: Any) -> Path:
    """Return the folder for the numbered checkpoints of a project."""
    return local_path(config.project_dir) / "checkpoints"


def save(
    path: Location,
    state: TrainingState,
    environment: RankEnvironment,
    *,
    total_limit: int | None,
    overwrite: bool,
    whole_weights: bool = False,
    form: str = "native",
    saver: AsyncSaver | None = None,
) -> None:
    """Save everything. All ranks must call this.

    `whole_weights` also writes each unsharded model to a directory `model` in the checkpoint, for other programs. A
    `form` that was passed to `register_format` also writes its own files. With a `saver`, training continues while the
    checkpoint is written.
    """
    if whole_weights and saver is not None:
        raise ConfigError(
            "FULL_STATE_DICT cannot be saved in the background, because the ranks must gather the weights first",
            hint="use SHARDED_STATE_DICT and `fullshard ckpt export`, or let training wait",
        )
    if isinstance(path, ObjectPath) and (whole_weights or form != "native"):
        what = "FULL_STATE_DICT" if whole_weights else f"checkpoint.format = {form}"
        raise ConfigError(
            f"{what} adds files for other libraries to the checkpoint, which is not possible in {path}",
            hint="save SHARDED_STATE_DICT there; fullshard ckpt export creates such files from it",
        )
    if saver is not None:
        saver.make_room()
    memory = None if saver is None else saver.memory
    parts = [SaveArguments(**part) for part in state.parts()]  # type: ignore[typeddict-item]
    models = [part["model"] for part in parts]
    parts[0]["extra"] = state.extra
    pending: Pending
    if len(parts) == 1:
        parts[0] |= {"total_limit": total_limit, "overwrite": overwrite}
        pending = prepare_save(path, memory, **parts[0])
    else:
        named = {part_name(number): part for number, part in enumerate(parts)}
        pending = prepare_parts(path, named, memory, total_limit=total_limit, overwrite=overwrite)
    if form != "native":
        if any(isinstance(model, Together) for model in models):
            raise ConfigError(
                f"checkpoint.format = {form} supports one model per optimizer, but an optimizer holds parameters of "
                "several models",
                hint="use a separate optimizer for each model, or save in the native format",
            )
        pending = _FORMATS[form](pending)
    if saver is not None:
        saver.begin(pending.destination, pending.complete)
        return
    pending.complete(pending.destination.ranks)
    if whole_weights:
        # Add to the complete checkpoint, because resumed runs must not wait for files that only other programs read.
        for number, model in enumerate(models):
            directory = on_this_host(path)
            part = directory if len(parts) == 1 else directory / part_name(number)
            for place, each in enumerate(model if isinstance(model, Together) else [model]):
                save_model(each, part / (f"{_WHOLE}_{place}" if place else _WHOLE), "10GB", environment)


def call_hooks(hooks: Iterable[Callable[..., Any]], *args: Any) -> None:
    """Call a script's hooks, which may communicate between ranks. All ranks must call this."""

    def call() -> None:
        for hook in list(hooks):
            hook(*args)

    ranks = Ranks()
    if ranks.world_size == 1:
        call()
    else:
        ranks.together("a hook in the script", call)


def call_save_hooks(hooks: Iterable[Callable[..., Any]], models: list[nn.Module], path: Path) -> None:
    """Call the save hooks on all ranks, and record which files they add, so that a later save may replace them."""
    ranks = Ranks()
    before = ranks.on_rank_0(f"reading {path}", lambda: _names(path)) or set()
    call_hooks(hooks, models, [], str(path))

    def note() -> None:
        names = sorted(_names(path) - before)
        if names:
            (path / _HOOKS).write_text(json.dumps(names))

    ranks.on_rank_0(f"writing {path / _HOOKS}", note)


def load(path: Location, state: TrainingState, say: Callable[[str], None]) -> int:
    """Load what `save` wrote, or what an import could write, and return the saved step. All ranks must call this."""
    parts = state.parts()
    saved = len(part_paths(path))
    if max(saved, 1) != len(parts):
        raise CheckpointError(
            f"{path} holds {max(saved, 1)} models with optimizers, but {len(parts)} are prepared",
            hint="prepare the same models and optimizers in the same order as when it was saved",
        )
    for number in range(saved):  # check all of them before loading changes anything
        prove_checkpoint(path / part_name(number))
    places = [path / part_name(number) for number in range(saved)] or [path]
    if "extra" not in (states := read_manifest(places[0]).states):  # converted from another program's checkpoint
        absent = {"scheduler": None, "scaler": None, "objects": ()}.items()
        parts = [part | {name: empty for name, empty in absent if name not in states} for part in parts]  # type: ignore[misc]
        kept = "schedulers, a scaler, registered objects, data loaders and random states that it lacks"
        say(f"{path} was not saved by save_state: {kept} keep their present state")
        parts = [_without_absent_optimizer(part, place, say) for part, place in zip(parts, places, strict=True)]
    extra, *_ = [load_checkpoint(place, **part) for place, part in zip(places, parts, strict=True)]
    if (steps := extra.get("schedule_steps", state.schedule_steps)) != state.schedule_steps:
        now, before = (", ".join(map(str, each)) for each in (state.schedule_steps, steps))
        what = f"the learning rate now changes at another speed: schedules advance by {now} per optimizer step, but by "
        what += f"{before} in the run that saved {path}. Accelerator(step_scheduler_once=True) makes it the same "
        say(f"{what}on any number of ranks; for this checkpoint, see docs/howto/resume.md")
    return set_extra(extra, state, where=path) if "extra" in states else 0


def _without_absent_optimizer(part: LoadArguments, place: Location, say: Callable[[str], None]) -> LoadArguments:
    """Return the part without its optimizer if an import wrote `place` without one, and say so."""
    manifest = read_manifest(place)
    if manifest.optimizer is not None or not manifest.is_import or part.get("optimizer") is None:
        return part
    say(f"{place} was imported without an optimizer: only weights are loaded, and the optimizer keeps its state")
    return part | {"optimizer": None}


def only_part(state: TrainingState) -> LoadArguments:
    """Return the only model with its optimizer. Raise `ConfigError` if several parts would be saved."""
    if len(parts := state.parts()) > 1:
        raise ConfigError(
            f"copies in host memory support only one model with one optimizer, but {len(parts)} are prepared",
            hint="remove max_lost_steps, and save checkpoints",
        )
    return parts[0]


def set_extra(extra: Mapping[str, Any], state: TrainingState, *, where: Location) -> int:
    """Restore the state that is not part of any model, and return the script's counter."""
    positions = extra.get("loaders", [])
    if len(positions) != len(state.loaders):
        raise CheckpointError(
            f"{where} holds the positions of {len(positions)} data loaders, but {len(state.loaders)} are prepared",
            hint="prepare the same data loaders in the same order as when it was saved",
        )
    for loader, position in zip(state.loaders, positions, strict=True):
        loader.load_state_dict(position)
    return int(extra["step"])


def save_model(
    model: nn.Module, directory: Path, max_shard_size: int | str, environment: RankEnvironment, *, safe: bool = True
) -> None:
    """Write the unsharded model, or only its adapters, to a directory. All ranks must call this.

    The directory may contain other files. Weight files that `from_pretrained` would read instead of the new ones are
    removed. See `Accelerator.save_model`.
    """
    if is_saved_as_adapters(model):
        if not safe:
            raise ConfigError("safe_serialization=False is not supported for adapters", hint="remove it")
        save_adapters(directory, model)
        return
    staged, replaced = directory / ".fullshard-export", [_WEIGHTS]
    if not safe:
        limit = parse_size(max_shard_size)
        weights, replaced = full_state_dict(model), [_WEIGHTS, _PICKLES]
        run_on_main(environment, lambda: _write_pickles(weights, staged, limit))
    elif run_on_main(environment, directory.exists):
        export_hf(staged, model=model, max_shard_size=max_shard_size, overwrite=True)
    else:
        export_hf(directory, model=model, max_shard_size=max_shard_size)
        return

    def move() -> None:
        new = {path.name for path in staged.iterdir()}
        for path in directory.iterdir():
            if any(pattern.fullmatch(path.name) for pattern in replaced) and path.name not in new:
                path.unlink()
        # Replace the index last: until then, a reader refuses the weights and never accepts a mixture.
        for name in sorted(new, key=lambda name: (name.endswith(".index.json"), name)):
            (staged / name).replace(directory / name)
        staged.rmdir()

    run_on_main(environment, move)


def _write_pickles(weights: dict[str, Any], directory: Path, max_shard_size: int) -> None:
    hub = import_extra("huggingface_hub", extra="hf", purpose="cutting a state dict into files")
    shutil.rmtree(directory, ignore_errors=True)  # left by a save that was killed
    directory.mkdir(parents=True)
    try:
        hub.save_torch_state_dict(weights, directory, max_shard_size=max_shard_size, safe_serialization=False)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def save_object(obj: Any, path: Path, *, safe: bool) -> None:
    """Write an object to a file atomically: the file appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temp:
        if safe:
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in obj.items()}, temp)
        else:
            torch.save(obj, temp)


def _foreign_entries(path: Location) -> list[str]:
    """Return the names of the entries in a directory that are not part of a fullshard checkpoint."""
    if not path.is_dir():
        return []
    if isinstance(path, ObjectPath):  # may hold files of a killed save
        return [name for name in path.beneath() if name != MANIFEST_NAME and not is_of_a_save(name)]
    names = {entry.name for entry in path.iterdir() if not is_for_others(entry.name)} - _names_of_hooks(path)
    if (path / MANIFEST_NAME).is_file():
        return sorted(names - {MANIFEST_NAME, *read_manifest(path).files})
    return sorted(name for name in names if not (path / name / MANIFEST_NAME).is_file())


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def _names_of_hooks(path: Location) -> set[str]:
    """Return the names of the files that a script's hooks have added to a checkpoint."""
    if not (path / _HOOKS).is_file():
        return set()
    try:
        return {_HOOKS, *map(str, parse_json(read_small(path / _HOOKS)))}
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / _HOOKS} is damaged: {error}") from None
