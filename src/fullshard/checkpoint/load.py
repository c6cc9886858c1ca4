"""Load a checkpoint at any world size. Every rank reads and verifies only the bytes that it will own.

A load that fails its checks changes nothing: values change only after the manifest has been compared with the model,
and every file verified by one rank. The files are then read and verified again, usually from the page cache.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fullshard.checkpoint.coded_state import CodedTensor, coded_tensors, fresh_state, rows_of
from fullshard.checkpoint.collect import RUN_STEP, LoadArguments, objects_of
from fullshard.checkpoint.elements import dtype_of, stored_dtype
from fullshard.checkpoint.format import (
    MANIFEST_NAME,
    GroupRecord,
    Manifest,
    StateTensorRecord,
    StateValueRecord,
    TensorRecord,
    decode_manifest,
    read_manifest,
    read_manifest_bytes,
)
from fullshard.checkpoint.objects import Location, location
from fullshard.checkpoint.optimizer_state import AVERAGES, average_records, averages_in, group_parameters, unwrapped
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.readers import Readers, plan_reads
from fullshard.checkpoint.rng import RNG_PREFIX, restore_rng
from fullshard.checkpoint.stamps import note_stamp
from fullshard.checkpoint.storage import replaced_directories
from fullshard.checkpoint.tensor_file import order_key
from fullshard.checkpoint.tensors import (
    LocalTensor,
    check_is_plain,
    device_of,
    local_buffers,
    local_parameters,
    modules_with_extra_state,
    rest,
)
from fullshard.checkpoint.values import decode_value
from fullshard.checkpoint.verify import pieces_of, problems_of_file, quick_problems
from fullshard.core.boxes import UNCUT, Chunking
from fullshard.core.errors import CheckpointError, DamagedError, plural
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.layout import Interval
from fullshard.core.progress import advance, progress
from fullshard.engine.lookup import units_of
from fullshard.engine.shard_spec import CodedShard
from fullshard.engine.step.plain_tensors import as_local
from fullshard.features.averages import EMA
from fullshard.features.matrices import MatrixOptimizer
from fullshard.features.optimizer_state import as_sharded

logger = logging.getLogger(__name__)

Weights = Literal["all", "stored", "none"]
"""Which parameters and buffers a load reads."""

_NO_OPTIMIZER = "the optimizer was not saved"
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that select an implementation. They keep the values that the caller chose."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor on this rank that a load fills with the elements in `interval`, counted in the order of `chunking`."""

    kind: str
    name: str
    record: TensorRecord  # also the dtype of the tensor
    interval: Interval
    tensor: torch.Tensor | CodedTensor
    chunking: Chunking = UNCUT


def load_checkpoint(
    path: str | Location,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    objects: Sequence[Any] = (),
    weights: Weights = "all",
    rng: bool = True,
) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, at any world size, strategy and mesh. All ranks must call this.

    Only the requested parts are read. They must exist in the checkpoint, and the model must have exactly the parameters
    and persistent buffers of the checkpoint, with the same shapes and dtypes.

    Args:
        path: a checkpoint directory that every rank can read.
        model: sharded or not.
        optimizer: an optimizer with the same parameter groups as the saved one. Its state is replaced.
        scheduler: an object whose `load_state_dict` is called with the saved state.
        scaler: as `scheduler`, except that nothing is loaded if the saved scaler was disabled.
        objects: further objects like `scheduler`, in the order in which they were saved.
        weights: which parameters and buffers to read. `all` requires the checkpoint to hold all of them; `stored` reads
            those that it holds; `none` reads none. The others keep their values.
        rng: restore the random number generators.

    Returns:
        The `extra` of `save_checkpoint`, or an empty dict if there was none.

    Raises:
        CheckpointError: a rank found that the checkpoint does not match the model; the message lists all differences.
            Every rank raises it, and nothing has changed.
        DamagedError: a subclass of `CheckpointError`, raised if the bytes are not those that were saved.
    """
    directory, ranks = location(path).absolute(), Ranks.of(model)
    data = _opened(directory, ranks)

    def prove(manifest: Manifest, kinds: Sequence[str], files: Set[str]) -> None:
        prove_files(directory, manifest, ranks, kinds)

    parts = LoadArguments(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, objects=objects)
    return load_proved(directory, data, ranks, prove, parts, weights=weights, rng=rng)


def load_proved(
    directory: Location,
    data: bytes,
    ranks: Ranks,
    prove: Callable[[Manifest, Sequence[str], Set[str]], None],
    parts: LoadArguments,
    *,
    weights: Weights = "all",
    rng: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint from files that `prove` verifies first. All ranks must call this.

    `data` is the manifest. All ranks call `prove` with the manifest, the kinds of files to read, and the names of the
    files that this rank reads. `prove` also fetches files that only other hosts have. If it raises an error, nothing
    has changed.
    """
    load = ranks.together(f"matching {directory} with the model", lambda: _Load(directory, data, ranks, parts, weights))
    prove(load.manifest, ["state", *dict.fromkeys(target.kind for target in load.targets)], load.files())
    stored = ranks.together(f"reading {directory}", load.read)
    extra = ranks.together(f"restoring {directory}", lambda: load.restore(stored, rng=rng))
    if load.optimizer is not None and isinstance(saved := load.manifest.states.get(RUN_STEP), int):
        done = next((unit.schedule.steps for unit in units_of(load.model)), 0)
        JOURNAL.before = saved - done
        JOURNAL.count(done)
    if ranks.rank == 0:
        before, now, is_whole = load.manifest.world_size, ranks.world_size, load.optimizer is not None
        JOURNAL.note(Happening.LOAD, path=str(directory), optimizer=is_whole, saved_by=before)
        if before != now and is_whole:
            kind = Happening.SHRINK if now < before else Happening.GROWTH
            JOURNAL.note(kind, f"from {plural(before, 'rank')} to {now}", before=before, now=now)
    return extra


def prove_files(directory: Location, manifest: Manifest, ranks: Ranks, kinds: Sequence[str]) -> None:
    """Read and verify every byte of the files of these kinds, each file on one rank. All ranks must call this."""

    def prove() -> None:
        names = sorted(name for name in manifest.files if name.rpartition("-rank")[0] in kinds)
        own = names[ranks.rank :: ranks.world_size]
        if found := [problem for name in own for problem in problems_of_file(directory / name, manifest)]:
            raise DamagedError("\n".join(found))

    ranks.together(f"reading {directory}", prove, kind=DamagedError)


def prove_checkpoint(path: str | Location) -> None:
    """Read and verify every byte of a checkpoint. All ranks must call this, and divide the files among themselves.

    `verify_checkpoint` runs in one process and reports more details.

    Raises:
        DamagedError: a byte differs from the saved one. Every rank raises it.
    """
    directory, ranks = location(path).absolute(), Ranks()
    manifest = decode_manifest(_opened(directory, ranks), where=str(directory / MANIFEST_NAME))
    prove_files(directory, manifest, ranks, ("model", "optimizer", "state"))


class _Load:
    """One rank's part of a load. The constructor finds all differences from the saved state and changes nothing."""

    def __init__(self, directory: Location, data: bytes, ranks: Ranks, parts: LoadArguments, weights: Weights) -> None:
        self.directory, self.ranks = directory, ranks
        self.manifest = manifest = decode_manifest(data, where=str(directory / MANIFEST_NAME))
        note_stamp(manifest.saved_at)
        self.model, self.optimizer = model, optimizer = parts["model"], unwrapped(parts.get("optimizer"))
        self._wanted = objects_of(parts)
        objects, saved_objects = self._wanted.get("objects", []), manifest.states.get("objects")
        if objects and isinstance(saved_objects, list) and len(saved_objects) != len(objects):
            raise CheckpointError(f"got {plural(len(objects), 'object')} to load, but {len(saved_objects)} were saved")
        rest(model)
        self.parameters = local_parameters(model)
        check_is_plain(self.parameters)
        self._primary = {n: name for name, r in manifest.parameters.items() for n in (name, *r.aliases)}
        self._state: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._saved_groups: Sequence[GroupRecord] = ()
        problems: list[str] = []
        buffers = local_buffers(model)
        # An imported checkpoint lists buffers as parameters, because other formats do not distinguish them.
        names = {name for buffer in buffers for name in buffer.names}
        saved_buffers = manifest.buffers | {n: r for n, r in manifest.parameters.items() if n in names}
        saved_parameters = {n: r for n, r in manifest.parameters.items() if n not in names}
        self.targets = _match("parameter", self.parameters, saved_parameters, problems)
        self.targets += _match("buffer", buffers, saved_buffers, problems)
        if weights == "all":
            absent = [name for name, r in (manifest.parameters | manifest.buffers).items() if not r.is_stored]
            problems += [f"the values of {name!r} are not in this checkpoint" for name in absent]
        self.targets = [t for t in self.targets if weights != "none" and t.record.is_stored]
        problems += [f"{name} was not saved" for name in sorted(self._wanted.keys() - manifest.states.keys())]
        module_extra = manifest.states.get("module_extra")
        saved_modules = module_extra if isinstance(module_extra, dict) else {}
        modules, saved = sorted(modules_with_extra_state(model)), sorted(saved_modules)
        if modules != saved:
            problems.append(f"the model has extra state in the modules {modules}, but the checkpoint in {saved}")
        if optimizer is not None:
            problems += self._match_groups(optimizer)
        for average in averages_in(objects):
            found = average_records(average, self.parameters, manifest, self._primary, problems)
            self.targets += [_Target("optimizer", n, r, p.interval, held, p.chunking) for n, p, r, held in found]
        if problems:
            places = "1 place" if len(problems) == 1 else f"{len(problems)} places"
            hint = "create the model and the optimizer as they were when the checkpoint was saved"
            if problems == [_NO_OPTIMIZER]:
                hint = f"to load weights only: fullshard.checkpoint.load_checkpoint({str(directory)!r}, model=model)"
            raise CheckpointError(f"the checkpoint does not match in {places}:\n" + "\n".join(problems), hint=hint)
        if optimizer is not None:
            self._allocate_state(optimizer)

    def read(self) -> dict[str, torch.Tensor]:
        """Fill all targets. Return the stored tensors that do not belong to the model or the optimizer."""
        readers, total = Readers(self.directory, self.manifest), sum(target.interval.numel for target in self.targets)
        with contextlib.closing(readers), progress("loading", total):
            # in file order, so that each file is read from front to back
            for target in sorted(self.targets, key=lambda t: (t.kind, order_key(t.record.dtype, t.record.shape))):
                _fill(target, readers)
                advance(target.interval.numel)
            stored = readers.rank_state(0)
            if self.ranks.rank:
                stored = {name: t for name, t in stored.items() if not name.startswith(RNG_PREFIX)}
                if self.ranks.rank < self.manifest.world_size:
                    stored |= readers.rank_state(self.ranks.rank)
        return stored

    def files(self) -> set[str]:
        """Return the names of the files that `read` reads."""
        manifest = self.manifest
        names = {manifest.file_name("state", 0), manifest.file_name("state", self.ranks.rank)} & manifest.files.keys()
        for target in self.targets:
            pieces = target.record.pieces
            if target.record.chunking == target.chunking:
                pieces = tuple(piece for piece in pieces if piece.interval.intersect(target.interval).numel)
            names |= {manifest.file_name(target.kind, piece.rank) for piece in pieces}
        return names

    def restore(self, stored: Mapping[str, torch.Tensor], *, rng: bool) -> dict[str, Any]:
        """Restore all objects from the tensors that `read` returned, without calling `step()`, and return `extra`."""
        if self.optimizer is not None:  # the constructor raised an error if it was not saved
            for group, record in zip(self.optimizer.param_groups, self._saved_groups, strict=True):
                options = {key: decode_value(value, stored) for key, value in record.options.items()}
                group.update({key: value for key, value in options.items() if key not in _IMPLEMENTATION})
            self.optimizer.state.clear()
            for parameter, state in self._state:
                self.optimizer.state[parameter] = as_sharded(self.optimizer, parameter, state)
        saved = self.manifest.states.get("module_extra")
        if isinstance(saved, dict):
            for path, module in modules_with_extra_state(self.model).items():
                module.set_extra_state(decode_value(saved[path], stored))
        for name, source in self._wanted.items():
            state = decode_value(self.manifest.states[name], stored)
            if state or name != "scaler":  # a disabled scaler has an empty state, which an enabled one rejects
                _load_state_dict(source, state)
        extra = decode_value(self.manifest.states.get("extra"), stored)
        # last, because a load_state_dict() may draw random numbers
        if rng:
            self._restore_rng(stored)
        return extra or {}

    def _restore_rng(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Restore the random number generators if the checkpoint holds their state for this rank."""
        saved_by, why = self.manifest.world_size, ""
        if self.ranks.world_size != saved_by:
            why = f"saved by {plural(saved_by, 'rank')}, loaded by {self.ranks.world_size}"
        elif not any(name.startswith(RNG_PREFIX) for name in stored):
            why = "the checkpoint holds none"
        if why:
            if self.ranks.rank == 0 and not self.manifest.is_import:
                logger.warning("fullshard: random number generators are not restored: %s", why)
            return
        for name in restore_rng(stored, device_of(self.model)):
            logger.warning(
                "fullshard: the random number generator of %r is not restored, because the kind of device differs", name
            )

    def _match_groups(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the differences between the optimizer's groups and the saved ones."""
        saved = self.manifest.optimizer
        if saved is None:
            return [_NO_OPTIMIZER]
        problems = []
        if saved.kind != type(optimizer).__name__:
            problems.append(f"the optimizer is a {type(optimizer).__name__}, but a {saved.kind} was saved")
        groups = group_parameters(optimizer, self.parameters)
        if len(groups) != len(saved.groups):
            has = plural(len(groups), "parameter group")
            problems.append(f"the optimizer has {has}, but {len(saved.groups)} were saved")
        names = [{self._primary.get(local.name, local.name) for _, local in members} for members in groups]
        self._saved_groups = _in_order_of(names, saved.groups)
        for number, (mine, record) in enumerate(zip(names, self._saved_groups, strict=False)):
            theirs = set(record.parameters)
            problems += [f"parameter group {number} lacks {name!r}, which was saved in it" for name in theirs - mine]
            problems += [f"parameter group {number} has {name!r}, which was not saved in it" for name in mine - theirs]
        return sorted(problems)

    def _allocate_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate optimizer state as the manifest describes it, and add a target for each tensor to fill."""
        assert self.manifest.optimizer is not None  # noqa: S101 -- _match_groups refused it
        groups = group_parameters(optimizer, self.parameters)
        averaged = self.manifest.states.get(AVERAGES) or ()
        assert isinstance(averaged, list | tuple)  # noqa: S101 -- as it was written
        for number, members in enumerate(groups):
            group = optimizer.param_groups[number]
            on_device = bool(group.get("capturable") or group.get("fused"))
            for index, (parameter, local) in enumerate(members):
                name = self._primary[local.name]
                records = self.manifest.optimizer.state.get(name)
                if records is None:
                    continue
                fresh = fresh_state(optimizer, number, index)
                there = as_local(optimizer.state.get(parameter, {})) if fresh is None else fresh
                coded, parts = coded_tensors(there)
                rows = rows_of(optimizer, there)
                kept = {*coded, *parts, *(key.rpartition(".")[0] for key in rows)}
                state = {key: value for key, value in there.items() if key in kept}
                places: dict[str, Any] = {**coded, **rows}
                for key, record in records.items():
                    if key in averaged or not _is_wanted(optimizer, parameter, key):
                        continue
                    if key in places and isinstance(record, StateTensorRecord):
                        where, place = f"{name}/{key}", places[key]
                        self.targets.append(_Target("optimizer", where, record, local.interval, place, local.chunking))
                    else:
                        state[key] = self._allocate(name, key, record, local, there.get(key), on_device=on_device)
                self._state.append((parameter, state))

    def _allocate(
        self,
        name: str,
        key: str,
        record: StateTensorRecord | StateValueRecord,
        local: LocalTensor,
        there: Any,
        *,
        on_device: bool,
    ) -> Any:
        """Return a value of optimizer state, or a tensor to fill, which is `there` if it fits, to save time."""
        if isinstance(record, StateValueRecord):
            return decode_value(record.value, {})
        dtype = dtype_of(record)
        if record.layout == "interval":
            # with the parameter's strides: fused optimizers iterate over the memory of both and ignore strides
            like, own = local.held, there if isinstance(there, torch.Tensor) else torch.empty(0)
            fits = (own.device, own.shape, own.stride(), own.dtype) == (like.device, like.shape, like.stride(), dtype)
            tensor = own if fits else torch.empty_like(like, dtype=dtype)
            interval, chunking = local.interval, local.chunking
        else:
            # fused and capturable optimizers need the step count on the device, others where it was
            on_host = record.is_on_host and not (on_device and key == "step")
            tensor = torch.empty(record.shape, dtype=dtype, device="cpu" if on_host else local.tensor.device)
            interval, chunking = Interval(0, record.numel), UNCUT
        self.targets.append(_Target("optimizer", f"{name}/{key}", record, interval, tensor, chunking))
        return tensor


@torch.no_grad()
def _fill(target: _Target, readers: Readers) -> None:
    """Fill one target with elements from the files."""
    if isinstance(target.tensor, CodedTensor):
        readers.fill_coded(target.tensor, target.name, target.record, target.interval, target.chunking)
        return
    if isinstance(target.tensor, CodedShard):
        readers.fill_parts(target.tensor, target.name, target.record, target.interval)
        return
    tensor = target.tensor.detach()
    in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
    staging = tensor if in_place else torch.empty(tensor.shape, dtype=tensor.dtype)
    readers.fill(staging, target.kind, target.name, target.record, target.interval, chunking=target.chunking)
    if in_place:
        torch.autograd.graph.increment_version(tensor)  # no other operation records the change
    else:
        tensor.copy_(staging)


def _in_order_of(names: Sequence[set[str]], saved: Sequence[GroupRecord]) -> Sequence[GroupRecord]:
    """Return saved groups in the optimizer's order, which flattened formats lose, or unchanged if they do not match."""
    found = [next((record for record in saved if set(record.parameters) == mine), None) for mine in names]
    ordered = [record for record in found if record is not None]
    is_permutation = len(ordered) == len(saved) == len({id(record) for record in ordered})
    return ordered if is_permutation else saved


def _match(
    what: str, known: Sequence[LocalTensor], saved: Mapping[str, TensorRecord], problems: list[str]
) -> list[_Target]:
    """Return a target for each of the model's parameters or buffers. Append all differences to `problems`."""
    by_name = {n: (name, record) for name, record in saved.items() for n in (name, *record.aliases)}
    targets, used = [], set()
    for local in known:
        found = [by_name[name] for name in local.names if name in by_name]
        used |= {name for name, _ in found}
        if not found:
            problems.append(f"{what} {local.name!r} is not in the checkpoint")
            continue
        if len({name for name, _ in found}) > 1:
            names = " and ".join(repr(name) for name, _ in found)
            problems.append(f"{what} {local.name!r} is tied in the model, but was saved separately as {names}")
            continue
        name, record = found[0]
        if record.shape != local.shape:
            problems.append(f"{what} {local.name!r} has shape {local.shape}, but was saved with {record.shape}")
        elif local.form is not None and record.form != local.form:
            problems.append(
                f"{what} {local.name!r} is stored as {local.form}, but was saved as {record.form or record.dtype}"
            )
        elif local.form is not None and not _is_cut_alike(record, local):
            problems.append(f"{what} {local.name!r} was encoded in blocks that do not match this tensor parallelism")
        elif record.dtype != stored_dtype(local.tensor, where=local.name) and local.form is None:
            problems.append(f"{what} {local.name!r} is {local.tensor.dtype}, but was saved as torch.{record.dtype}")
        else:
            targets.append(_Target("model", name, record, local.interval, local.held, local.chunking))
    problems += [f"{what} {name!r} of the checkpoint is not in the model" for name in saved if name not in used]
    return targets


def _is_cut_alike(record: TensorRecord, local: LocalTensor) -> bool:
    """Return whether the pieces of a weight that this rank reads begin and end between blocks of its codes."""
    assert local.form is not None  # noqa: S101 -- the caller asked
    both = record.chunking, local.chunking
    if both[0] != both[1] and not all(chunking.is_row_by_row for chunking in both):
        return False
    reads = plan_reads(pieces_of(record), local.interval)
    return not any(place.start % local.form.block for read in reads for place in (read.source, read.target))


def _opened(directory: Location, ranks: Ranks) -> bytes:
    """Check the manifest and file sizes, on rank 0 only, and return the manifest. All ranks must call this."""

    def look() -> bytes:
        if isinstance(directory, Path) and not directory.exists() and (old := replaced_directories(directory)):
            raise DamagedError(
                f"{directory} is missing because a save was killed while replacing it",
                hint=f"use its old contents, which are in {old[0]}",
            )
        if problems := quick_problems(directory, read_manifest(directory)):
            raise DamagedError(f"{directory} is damaged:\n" + "\n".join(problems))
        return read_manifest_bytes(directory)

    return ranks.broadcast_bytes(ranks.on_rank_0(f"opening {directory}", look, kind=DamagedError) or b"")


def _is_wanted(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> bool:
    """Return whether this rank needs the optimizer state under `key`. It does not if another rank owns the matrix."""
    if not (isinstance(optimizer, MatrixOptimizer) and optimizer.is_owned(key)):
        return True
    return int(key.rpartition(".")[2]) in optimizer.owned(parameter)


def _load_state_dict(source: Any, state: Any) -> None:
    if not isinstance(source, list):
        source.load_state_dict(state)
        return
    for one, part in zip(source, state, strict=True):
        if isinstance(one, EMA) and "updates" in part:
            one.updates = int(part["updates"])  # its tensors have been filled already
        else:
            one.load_state_dict(part)
