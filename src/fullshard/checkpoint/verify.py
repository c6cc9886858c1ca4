"""Verify every file, byte and element of a checkpoint, without a process group or a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.checkpoint.format import (
    DTYPES,
    MANIFEST_NAME,
    Manifest,
    PieceRecord,
    StateTensorRecord,
    StateValueRecord,
    TensorRecord,
    is_for_others,
    part_paths,
    read_manifest,
    stored_as,
    trainer_state,
)
from fullshard.checkpoint.objects import Location, ObjectPath, entries_of, location, sizes_in
from fullshard.checkpoint.tensor_file import TensorFileReader, size_problem
from fullshard.checkpoint.values import AnyTensor, decode_value
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError, plural
from fullshard.core.sizes import format_nbytes


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify_checkpoint`. `str()` returns a readable report.

    Attributes:
        path: the checkpoint.
        problems: one line for each problem; empty if the checkpoint is valid.
        num_files, nbytes: number and total size of the data files.
        manifest: its manifest, or None if the manifest itself is damaged.
    """

    path: Location
    problems: tuple[str, ...]
    num_files: int
    nbytes: int
    manifest: Manifest | None

    @property
    def is_valid(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raise `CheckpointError` with all problems, if there are any."""
        if self.problems:
            raise CheckpointError(str(self))

    def __str__(self) -> str:
        if self.manifest is None or self.problems:
            return f"{self.path} is damaged:\n" + "\n".join(f"  {problem}" for problem in self.problems)
        return (
            f"{self.path} is valid: {plural(self.num_files, 'file')}, {format_nbytes(self.nbytes)}, "
            f"{plural(len(self.manifest.parameters), 'parameter')}, saved by {plural(self.manifest.world_size, 'rank')}"
        )


def verify_checkpoint(path: str | Location) -> Verification:
    """Read every byte of a checkpoint and list all problems.

    Args:
        path: the checkpoint directory.

    Returns:
        The result. Damage does not raise an error here; see `Verification.raise_if_damaged`.
    """
    directory = location(path)
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return Verification(directory, (str(error),), 0, 0, None)
    problems = structure_problems(manifest)
    for name in manifest.files:
        problems += problems_of_file(directory / name, manifest)
    for entry in entries_of(directory):
        if entry.name not in {MANIFEST_NAME, *manifest.files} and not is_for_others(entry.name):
            problems.append(f"{entry} is not part of the checkpoint")
    nbytes = sum(record.nbytes for record in manifest.files.values())
    return Verification(directory, tuple(problems), len(manifest.files), nbytes, manifest)


def verify_parts(path: str | Location) -> list[Verification]:
    """Verify a checkpoint of one model, or each part of a checkpoint of several, also in a Trainer's `checkpoint-N`."""
    directory = trainer_state(location(path))
    found = [verify_checkpoint(part) for part in part_paths(directory) or [directory]]
    problems = part_problems([(one.path, one.manifest) for one in found if one.manifest is not None])
    return [*found, Verification(directory, tuple(problems), 0, 0, None)] if problems else found


def part_problems(parts: Sequence[tuple[Location, Manifest]]) -> list[str]:
    """Return a problem if parts of a checkpoint of several models are missing, because all parts are needed."""
    names = {part.name for part, _ in parts}
    return [
        f"{part} was saved as one of {manifest.parts} parts, but {len(parts)} exist: {', '.join(sorted(names))}"
        for part, manifest in parts[:1]
        if manifest.parts != len(parts)
    ]


def quick_problems(directory: Location, manifest: Manifest) -> list[str]:
    """Return the problems found without reading data: contradictory records, and missing or truncated files."""
    files = manifest.files
    if isinstance(directory, ObjectPath):  # one request is enough if all files are intact
        there = sizes_in(directory, files)
        files = {name: record for name, record in files.items() if there.get(name) != record.nbytes}
    found = (size_problem(directory / name, r, chunk_nbytes=manifest.chunk_nbytes) for name, r in files.items())
    return structure_problems(manifest) + [problem for problem in found if problem is not None]


def structure_problems(manifest: Manifest) -> list[str]:
    """Return contradictions in a manifest, such as elements in no file or in two, or unknown dtypes or parameters."""
    problems = []
    held: dict[str, int] = {}
    for file, tensor, record in manifest.tensors():
        if record.dtype not in DTYPES:
            problems.append(f"{tensor!r} has the unknown dtype {record.dtype!r}")
            continue
        for piece in record.pieces:
            name = manifest.file_name(file, piece.rank)
            parts = stored_as(tensor, record.dtype, piece).values()
            held[name] = held.get(name, 0) + sum(numel * itemsize(dtype) for dtype, numel in parts)
        files = dict.fromkeys(manifest.file_name(file, piece.rank) for piece in record.pieces)
        problems += [f"{tensor!r}: its file {f} is not in the manifest" for f in files if f not in manifest.files]
        problems += [f"{tensor!r}: {problem}" for problem in coverage_problems(pieces_of(record), record.numel)]
    problems += [
        # detected before memory is allocated for the sizes in the manifest
        f"{name} has {manifest.files[name].nbytes} bytes, but should hold {nbytes} bytes of tensors"
        for name, nbytes in held.items()
        if name in manifest.files and nbytes > manifest.files[name].nbytes
    ]
    if manifest.optimizer is not None:
        problems += _optimizer_problems(manifest)
    return problems + _value_problems(manifest, AnyTensor())


def pieces_of(record: TensorRecord) -> list[PieceRecord]:
    """Return the pieces of a tensor, sorted by start."""
    return sorted(record.pieces, key=lambda piece: piece.start)


def coverage_problems(pieces: Sequence[PieceRecord], numel: int) -> list[str]:
    """Return the reasons why `pieces`, sorted by start, do not hold each of `numel` elements exactly once."""
    problems = []
    end, last = 0, -1
    for piece in pieces:
        start, stop = piece.start, piece.stop
        if start < 0 or stop > numel or start >= stop:
            problems.append(f"rank {piece.rank} holds elements [{start}, {stop}), but the tensor has {numel}")
        if start > end:
            problems.append(f"elements [{end}, {start}) are in no file")
        elif start < end and last >= 0:
            problems.append(f"elements [{start}, {min(stop, end)}) are held by rank {last} and by rank {piece.rank}")
        if stop > end:
            end, last = stop, piece.rank
    if end < numel:
        problems.append(f"elements [{end}, {numel}) are in no file")
    return problems


def _optimizer_problems(manifest: Manifest) -> list[str]:
    optimizer = manifest.optimizer
    assert optimizer is not None  # noqa: S101 -- the caller checked
    grouped = [name for group in optimizer.groups for name in group.parameters]
    unknown = sorted({*grouped, *optimizer.state} - manifest.parameters.keys())
    problems = [f"the optimizer contains {name!r}, which is not a parameter" for name in unknown]
    for name, state in optimizer.state.items():
        for key, value in state.items() if name in manifest.parameters else ():
            shape = manifest.parameters[name].shape
            if isinstance(value, StateTensorRecord) and value.layout == "interval" and value.shape != shape:
                what = f"optimizer state {name}/{key}"
                problems.append(f"{what} has shape {value.shape}, but its parameter has {shape}")
    return problems


def _value_problems(manifest: Manifest, named: AnyTensor) -> list[str]:
    """Return the problems of values that cannot be decoded. Add the names of tensors in other values to `named`."""
    values = dict(manifest.states)
    if (optimizer := manifest.optimizer) is not None:
        for number, group in enumerate(optimizer.groups):
            values |= {f"option {key!r} of parameter group {number}": value for key, value in group.options.items()}
        for name, state in optimizer.state.items():
            plain = {key: record.value for key, record in state.items() if isinstance(record, StateValueRecord)}
            values |= {f"optimizer state {name}/{key}": value for key, value in plain.items()}
    problems = []
    for where, value in values.items():
        try:
            decode_value(value, named)
        except CheckpointError as error:
            problems.append(f"{where}: {str(error).partition(chr(10))[0]}")
    return problems


def problems_of_file(path: Location, manifest: Manifest) -> list[str]:
    """Read every byte of one data file and return its problems."""
    record = manifest.files[path.name]
    if problem := size_problem(path, record, chunk_nbytes=manifest.chunk_nbytes):
        return [problem]
    try:
        with TensorFileReader(path, record, chunk_nbytes=manifest.chunk_nbytes, save_id=manifest.save_id) as reader:
            problems = []
            for start, stop in reader.damaged_chunks():
                hit = [name for name, t in reader.tensors.items() if t.start < stop and start < t.stop] or ["no tensor"]
                problems.append(f"{path} is damaged between bytes {start} and {stop}, in {', '.join(hit)}")
            return problems + _content_problems(path, reader, manifest)
    except CheckpointError as error:
        return [str(error)]


def _content_problems(path: Location, reader: TensorFileReader, manifest: Manifest) -> list[str]:
    """Return the differences between the tensors of a file and those that the manifest lists for it."""
    kind, _, rank = path.name.partition(".")[0].rpartition("-rank")
    if kind == "state" and int(rank) == 0:
        _value_problems(manifest, named := AnyTensor())
        return [f"{path} lacks {name!r}, which the manifest names" for name in sorted(named.keys() - reader.tensors)]
    if kind not in ("model", "optimizer"):
        return []
    problems, expected = [], set()
    for file, name, record in manifest.tensors():
        for piece in record.pieces if file == kind and record.dtype in DTYPES else ():
            if piece.rank != int(rank):
                continue
            for part, (dtype, numel) in stored_as(name, record.dtype, piece).items():
                expected.add(part)
                try:
                    reader.find(part, dtype, numel)
                except CheckpointError as error:
                    problems.append(str(error))
    extra = sorted(reader.tensors.keys() - expected)
    return problems + [f"{path} holds {name!r}, which is not in the manifest" for name in extra]
