"""Define the manifest, which describes the contents of a checkpoint directory. This module does not import torch.

    step-1000/
      manifest.json                       this schema, with its own checksum
      model-rank00000.safetensors         one file per rank that owns a part: 1-D tensors under parameter names
      optimizer-rank00000.safetensors     the same for optimizer state, under `PARAMETER/KEY`
      state-rank00000.safetensors         random number generators of the rank, tensors found in `extra` and the like

Every file of one save contains the same `save_id`. The manifest contains the size of each file and one crc32c checksum
per chunk of it. A file that is torn, corrupted, swapped or from another save is therefore always detected. Checksums
cover chunks rather than complete files, because a rank that loads a part must be able to verify that part without
reading the rest.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import from_json

from fullshard.checkpoint.objects import Location, ObjectPath, read_small
from fullshard.core.boxes import UNCUT, Chunking
from fullshard.core.errors import CheckpointError
from fullshard.core.files import open_regular
from fullshard.core.forms import FORMS, Part
from fullshard.core.layout import Interval

FORMAT_VERSION = 4
"""The newest version that can be read; all older ones can be read too. A save writes the oldest sufficient version: 2
for tensors split by tensor parallelism, 3 for file names with the id of the save, 4 for weights stored as codes."""

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_NBYTES = 2**30
"""The limit of the memory that a reader allocates for a manifest."""
TRAINER_STATE = "training_state"
"""Directory in a Trainer `checkpoint-N` that contains the fullshard checkpoint for resuming the training."""

_PART_PREFIX = "part_"
"""Prefix of the directories `part_0`, `part_1`, ..., each with the checkpoint of one of several models."""
_DATA_FILE = re.compile(r"(model|optimizer|state)-rank[0-9]{5,}(\.[0-9a-f]{16})?\.safetensors")
_FOR_OTHERS = re.compile(r"model|(pytorch_model_fsdp|optimizer)_[0-9]+")
_YEAR_9000 = 221_845_392_000.0
"""Seconds since 1970. Later times cannot be formatted as a date on every system."""
CHUNK_NBYTES = 4 * 2**20
"""Bytes per checksum: small, because a rank reads a full chunk to verify one element, but not too many per terabyte."""

DTYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's dtype name -> its name in safetensors."""

NAMES = {code: name for name, code in DTYPES.items()} | {"F8_E8M0": "float8_e8m0fnu"}
"""safetensors name -> torch's dtype name. The last entry, for scales that are powers of two, is only read."""

_PREFIX, _MIDDLE, _SUFFIX = b'{"crc32c":"', b'","manifest":', b"}\n"
Kind = Literal["model", "optimizer"]
"""The kind of a data file."""
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]  # strict: `true` is not a number
_Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
_Few = Annotated[int, Field(strict=True, ge=1, le=2**20)]
_Shape = Annotated[tuple[_Natural, ...], Field(max_length=64)]


class _Record(BaseModel):
    """Base class of the parts of a manifest. Records are immutable and reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """The size of a data file, and one checksum per chunk of `Manifest.chunk_nbytes` bytes or less."""

    nbytes: _Natural
    crc32c: tuple[_Natural, ...]


class PieceRecord(_Record):
    """A piece of a flattened tensor: the elements from `start` to `stop`, which one rank stores in its file."""

    rank: _Natural
    start: _Natural
    stop: _Natural

    @property
    def interval(self) -> Interval:
        """Return the interval of the tensor that this piece stores."""
        return Interval(self.start, self.stop)


class CodeRecord(_Record):
    """The way in which optimizer state is stored as 4-bit or 8-bit codes, with one scale per `block` codes.

    A value is `book[code] * scale`, or `code * scale` if there is no book. `book` is the length of the book, or 0. The
    parts are stored in the file as NAME.codes, NAME.scales and NAME.book (the last two in float32). Blocks are counted
    from the start of the piece, and the last one may be shorter. Two 4-bit codes share a byte, the first one in its
    upper half.
    """

    dtype: Literal["uint8", "float8_e4m3fn"]
    bits: Literal[4, 8]
    block: Annotated[_Positive, Field(multiple_of=2)]
    book: _Natural

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts that store the codes and the scales."""
        return Part("codes", self.dtype, 8 // self.bits), Part("scales", "float32", self.block)

    @model_validator(mode="after")
    def _every_code_has_a_value(self) -> Self:
        expected = 2**self.bits if self.dtype == "uint8" else 0
        if self.book != expected:
            raise ValueError(f"the book has {self.book} values for codes of {self.bits} bits, expected {expected}")
        return self


class FormRecord(_Record):
    """The form in which a weight is stored as codes and scales. It is one of those in `core.forms`.

    The parts are stored in the file as NAME.codes, NAME.scales and so on. Pieces start at a multiple of the form's
    atom, and blocks are counted from the start of the tensor. If `is_transposed` is set, elements are counted with the
    last two dims swapped.
    """

    book: ClassVar[int] = 0
    form: str
    is_transposed: bool = Field(default=False, exclude_if=lambda value: not value)

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.form not in FORMS:
            raise ValueError(f"the form {self.form!r} is unknown")
        return self

    def __str__(self) -> str:
        return self.form + ", transposed" * self.is_transposed

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the form."""
        return FORMS[self.form].parts

    @property
    def block(self) -> int:
        """Return the number of elements in an atom of the form, which is the smallest unit that can be decoded."""
        return FORMS[self.form].atom


class CodedPieceRecord(PieceRecord):
    """A piece whose values are stored as codes."""

    coding: CodeRecord | FormRecord


def stored_as(name: str, dtype: str, piece: PieceRecord) -> dict[str, tuple[str, int]]:
    """Return the tensors in a file that store this piece of tensor `name`, as name -> (dtype, number of elements)."""
    numel = piece.interval.numel
    if not isinstance(piece, CodedPieceRecord):
        return {name: (dtype, numel)}
    parts = {f"{name}.{part.name}": (part.dtype, part.numel(numel)) for part in piece.coding.parts}
    return parts | ({f"{name}.book": ("float32", piece.coding.book)} if piece.coding.book else {})


class ChunkingRecord(_Record):
    """A record of how tensor parallelism has split a tensor. See `core.boxes.Chunking`."""

    dim: _Natural
    parts: Annotated[_Few, Field(ge=2)]
    groups: _Positive = 1


class TensorRecord(_Record):
    """A tensor that is stored in pieces."""

    shape: _Shape  # global shape; `()` is a scalar
    dtype: str  # torch's name, such as `bfloat16`; for coded pieces, the dtype of the decoded values
    pieces: tuple[CodedPieceRecord | PieceRecord, ...]  # the elements that each rank stores, without empty pieces
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied parameters)
    is_stored: bool = True  # whether its elements are in this checkpoint; if not, only its shape and dtype are recorded
    # The chunking that defines the order in which elements are counted; None if they are counted row by row.
    tiles: ChunkingRecord | None = Field(default=None, exclude_if=lambda tiles: tiles is None)

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        tiles = self.tiles
        if self.numel >= 2**63:
            raise ValueError(f"{self.numel} elements")
        if tiles is not None and (tiles.dim >= len(self.shape) or self.shape[tiles.dim] % tiles.groups):
            groups = f"{tiles.groups} groups of tiles along dim {tiles.dim}"
            raise ValueError(f"a tensor of shape {self.shape} cannot be divided into {groups}")
        return self

    @property
    def form(self) -> FormRecord | None:
        """Return the form in which a weight is stored as codes, or None if it is stored as ordinary values."""
        coding = next((piece.coding for piece in self.pieces if isinstance(piece, CodedPieceRecord)), None)
        return coding if isinstance(coding, FormRecord) else None

    @property
    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def chunking(self) -> Chunking:
        """Return the chunking that defines the order in which elements are counted."""
        return UNCUT if self.tiles is None else Chunking(self.tiles.dim, self.tiles.parts, self.tiles.groups)


def chunking_record(chunking: Chunking) -> ChunkingRecord | None:
    """Return the record of a chunking, or None if elements are counted row by row."""
    if chunking.is_row_by_row:
        return None
    return ChunkingRecord(dim=chunking.dim, parts=chunking.chunks, groups=chunking.groups)


class StateTensorRecord(TensorRecord):
    """A tensor of optimizer state."""

    # `interval` if it is sharded like its parameter, `replicated` if every rank has all of it.
    layout: Literal["interval", "replicated"]
    is_on_host: bool = False  # can differ from the device of its parameter (Adam's `step`)


class StateValueRecord(_Record):
    """A value of optimizer state that is not a tensor, as encoded by `values.encode_value`."""

    value: JsonValue


class GroupRecord(_Record):
    """A parameter group: the names of its parameters and its hyperparameters."""

    parameters: tuple[str, ...]
    options: dict[str, JsonValue]


class OptimizerRecord(_Record):
    """An optimizer: its class, its parameter groups in order, and its state by parameter name and state key."""

    kind: str
    groups: tuple[GroupRecord, ...]
    state: dict[str, dict[str, StateTensorRecord | StateValueRecord]]


class MeshRecord(_Record):
    """The sizes of the device mesh at the save. They are recorded for information, and loading does not use them."""

    replicate: _Positive
    shard: _Positive


class Manifest(_Record):
    """The contents of a checkpoint, except the bytes of its tensors."""

    format: Literal["fullshard"] = "fullshard"  # marks the file as a fullshard manifest
    format_version: _Positive = 1  # version of this schema
    save_id: str  # unique id of the save, repeated in every data file
    # Seconds since the epoch by the clock of rank 0, but always later than the timestamps that rank 0 has seen. See
    # `stamps`.
    saved_at: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=_YEAR_9000)]
    fullshard_version: str
    torch_version: str
    world_size: _Few  # number of ranks that saved. Random number generators are restored only at this world size.
    mesh: MeshRecord
    parts: _Few = 1  # number of checkpoints that were saved together, one per model. They are valid only together.
    chunk_nbytes: _Positive = CHUNK_NBYTES
    files: dict[_FileName, FileRecord]
    parameters: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord]
    optimizer: OptimizerRecord | None = None
    states: dict[str, JsonValue] = {}  # encoded values: scheduler, scaler, extra, objects, run_step ...
    # Whether the names of the data files contain `save_id`. This is the case if the checkpoint replaced another one in
    # a store that cannot rename, where the files of both must exist at the same time.
    own_names: bool = Field(default=False, exclude_if=lambda own_names: not own_names)

    @property
    def is_import(self) -> bool:
        """Return whether an import of another program's checkpoint wrote it. It holds no rank's random state."""
        return not self.states and self.file_name("state", 0) not in self.files

    def tensors(self) -> Iterator[tuple[Kind, str, TensorRecord]]:
        """Yield (kind of file, name in that file, record) for every stored tensor."""
        return stored_tensors(self.parameters | self.buffers, self.optimizer)

    def file_name(self, kind: str, rank: int) -> str:
        """Return the name of one rank's data file of the given kind."""
        return rank_file_name(kind, rank, self.save_id if self.own_names else "")


def stored_tensors(
    model: Mapping[str, TensorRecord], optimizer: OptimizerRecord | None
) -> Iterator[tuple[Kind, str, TensorRecord]]:
    """Yield (kind of file, name in that file, record) for every tensor of the model and optimizer that is stored."""
    for name, record in model.items():
        if record.is_stored:
            yield "model", name, record
    for name, state in optimizer.state.items() if optimizer is not None else ():
        for key, value in state.items():
            if isinstance(value, StateTensorRecord):
                yield "optimizer", f"{name}/{key}", value


def is_for_others(name: str) -> bool:
    """Return whether a directory inside a checkpoint is for other programs, so that loading does not need it."""
    return _FOR_OTHERS.fullmatch(name) is not None


def trainer_state(directory: Location) -> Location:
    """Return the checkpoint in a Trainer `checkpoint-N` directory. Return any other directory unchanged."""
    inside = directory / TRAINER_STATE
    return inside if (inside / MANIFEST_NAME).is_file() and not (directory / MANIFEST_NAME).exists() else directory


def part_paths(directory: Location) -> list[Location]:
    """Return the checkpoints in a directory of several models, in order, or [] if it is a checkpoint itself."""
    found = [path for path in directory.glob(f"{_PART_PREFIX}*") if is_part(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PART_PREFIX)))


def part_name(number: int) -> str:
    """Return the directory name for one of several models that are saved together."""
    return f"{_PART_PREFIX}{number}"


def is_part(name: str) -> bool:
    """Return whether a directory name is one that `part_name` returns."""
    return name.startswith(_PART_PREFIX) and name.removeprefix(_PART_PREFIX).isdigit()


def rank_file_name(kind: str, rank: int, save_id: str = "") -> str:
    """Return the name of a rank's `model`, `optimizer` or `state` file. For `save_id`, see `Manifest.own_names`."""
    return f"{kind}-rank{rank:05d}{'.' * bool(save_id)}{save_id}.safetensors"


def rank_metadata(save_id: str, rank: int) -> dict[str, str]:
    """Return the metadata for the header of one rank's data file."""
    return {"format": "pt", "save_id": save_id, "rank": str(rank)}


def is_data_file(name: str) -> bool:
    """Return whether a rank writes a data file of this name."""
    return _DATA_FILE.fullmatch(name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the contents of a manifest file: valid JSON that includes a checksum of the manifest's own bytes."""
    body = manifest.model_dump_json().encode()
    try:
        from_json(body)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint could not be read back: {error}",
            hint="use fewer levels of nested lists, tuples and dicts in `extra` and in state_dict()",
        ) from None
    return _PREFIX + f"{google_crc32c.value(body):08x}".encode() + _MIDDLE + body + _SUFFIX


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Parse the bytes that `encode_manifest` returned. Raise `CheckpointError` if they are damaged or invalid."""
    match = re.match(re.escape(_PREFIX) + rb"([0-9a-f]{8})" + re.escape(_MIDDLE), data)
    if match is None or not data.endswith(_SUFFIX):
        raise CheckpointError(f"{where} is not a fullshard manifest, or it is damaged")
    body = data[match.end() : -len(_SUFFIX)]
    expected, got = int(match[1], 16), google_crc32c.value(body)
    if got != expected:
        raise CheckpointError(f"{where} is damaged: its crc32c is {got:08x}, expected {expected:08x}")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where} does not contain valid JSON") from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version!r}, but this version of fullshard reads 1 to {FORMAT_VERSION}",
            hint="update fullshard",
        )
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise CheckpointError(f"{where} does not follow the schema: {error}") from None


def read_manifest(directory: Location) -> Manifest:
    """Read and parse the manifest of a checkpoint directory."""
    return decode_manifest(read_manifest_bytes(directory), where=str(directory / MANIFEST_NAME))


def read_manifest_bytes(directory: Location) -> bytes:
    """Return the bytes of the manifest file. Raise `CheckpointError` if it is missing or cannot be a manifest."""
    path = directory / MANIFEST_NAME
    try:
        if isinstance(path, ObjectPath):
            return read_small(path, limit_nbytes=MAX_MANIFEST_NBYTES)
        with open_regular(path, limit_nbytes=MAX_MANIFEST_NBYTES) as file:
            begin = file.read(len(_PREFIX))
            if begin != _PREFIX:  # before all of it is
                raise CheckpointError(f"{path} is not a fullshard manifest, or it is damaged")
            return begin + file.read()
    except OSError as error:
        hint = f"latest_checkpoint(parent) finds the newest valid checkpoint; `fullshard ckpt import {directory} OUT`"
        hint += " converts the checkpoint of another program"
        inside = list(directory.glob(f"[!.]*/{MANIFEST_NAME}")) if isinstance(directory, Path) else []
        if inside:
            hint = f"it contains a checkpoint: {max(inside, key=lambda file: file.stat().st_mtime).parent}"
        raise CheckpointError(
            f"{directory} does not hold a complete checkpoint: {MANIFEST_NAME} cannot be read ({error.strerror})",
            hint=hint,
        ) from None
