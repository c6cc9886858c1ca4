"""Read the metadata file of torch's distributed checkpoints (DCP) without executing code from it.

`.metadata` is a pickle, and a pickle can run arbitrary code. This reader creates only inert stand-ins for the few
classes that DCP itself stores, and raises an error for any other name. It is based on the pure Python version of
Python's own unpickler. That version never allocates memory because of a length that the file merely claims.
"""

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.format import DTYPES
from fullshard.checkpoint.tensor_file import file_beside, nbytes_inside
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError
from fullshard.core.files import read_bytes
from fullshard.core.sizes import MIB

METADATA_NAME = ".metadata"
_MAX_NBYTES = 1024 * MIB
_MODULE = "torch.distributed.checkpoint"
_NAMES = {
    f"{_MODULE}.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_MODULE}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
"""The names that a pickle may load, by module."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, and the bytes of a file that hold it as an archive of `torch.save`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Return the number of elements in the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """An entry of the state dict: a tensor in one or more boxes, or a Python value in one box without sizes."""

    directory: Path
    path: tuple[str | int, ...]
    dtype: str | None
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def name(self) -> str:
        """Return the name of the entry for error messages."""
        return ".".join(map(str, self.path))


def read_metadata(directory: Path) -> list[StoredObject]:
    """Return the entries of a DCP directory. Raise `CheckpointError` if they are damaged or unsafe to unpickle."""
    path = directory / METADATA_NAME
    try:
        nbytes_inside(path)
        data = read_bytes(path, limit_nbytes=_MAX_NBYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        root = _Unpickler(io.BytesIO(data), path).load()
        objects = _objects(directory, root)
    except CheckpointError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {type(error).__name__}: {error}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: it is nested too deeply") from None
    problems = [problem for stored in objects for problem in _problems(stored)]
    if problems:
        raise CheckpointError(f"{directory} is damaged:\n" + "\n".join(problems))
    return objects


class _StandIn:
    """A stand-in for an object in the metadata, which stores the arguments of the constructor and does nothing else."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Unpickler(pickle._Unpickler):
    """An unpickler that creates only stand-ins for objects."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class. This never imports the class."""
        if module == "torch" and name in DTYPES:
            return name
        if name in _NAMES.get(module, ()):
            base: type = {"Size": tuple, "OrderedDict": dict}.get(name, _StandIn)
            # created for each file, because a pickle can modify the classes that it gets
            return self._classes.setdefault((module, name), type(name, (base,), {}))
        raise CheckpointError(
            f"{self._path} refers to {module}.{name}, which does not belong in a checkpoint; nothing was executed",
            hint="do not load this checkpoint with any other program either",
        )

    def get_extension(self, code: int) -> None:
        """Raise an error, because a pickle may not use classes that are registered by number (pickle extensions)."""
        raise CheckpointError(
            f"{self._path} refers to the registered class {code}, which does not belong in a checkpoint"
        )


def _objects(directory: Path, root: Any) -> list[StoredObject]:
    planner = root["planner_data"] or {}
    places: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
    for index, info in root["storage_data"].items():
        offset = index.state.get("offset")
        places.setdefault(index["fqn"], []).append((None if offset is None else tuple(offset), info))
    objects = []
    for name, record in root["state_dict_metadata"].items():
        path = tuple(planner.get(name, (name,)))
        if not isinstance(name, str) or not path or not all(isinstance(part, str | int) for part in path):
            raise ValueError(f"the entry {name!r:.80} does not have a valid name")
        kind = type(record).__name__
        if kind == "BytesStorageMetadata":
            boxes = tuple(_box((), (), info) for _, info in places.get(name, ()))
            objects.append(StoredObject(directory, path, None, (), boxes))
        elif kind == "TensorStorageMetadata":
            found = dict(places.get(name, ()))
            chunks = [(_ints(chunk["offsets"]), _ints(chunk["sizes"])) for chunk in record["chunks"]]
            boxes = tuple(_box(o, s, found[o]) for o, s in chunks if o in found)
            dtype = record["properties"].state
            dtype = dtype["dtype"] if isinstance(dtype, dict) else dtype[0]
            if dtype not in DTYPES:
                raise ValueError(f"the dtype of {name} is unknown")
            objects.append(StoredObject(directory, path, dtype, _ints(record["size"]), boxes))
        else:
            raise ValueError(f"{name} has the unknown type {kind}")
    return objects


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ValueError(f"{values!r:.80} is not a shape")
    return tuple(values)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Box:
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{info['relative_path']} is compressed or encrypted, which is not supported")
    start, nbytes, file = info["offset"], info["length"], info["relative_path"]
    if type(start) is not int or type(nbytes) is not int or not isinstance(file, str):
        raise ValueError("an entry has no location in a file")
    return Box(offsets, sizes, file, start, nbytes)


def _problems(stored: StoredObject) -> list[str]:
    """Return a list of problems with the files and boxes in which an entry is stored."""
    name, problems = stored.name, []
    for box in stored.boxes:
        try:
            size = nbytes_inside(file_beside(stored.directory, box.file, where=name))
        except OSError:
            problems.append(f"{name}: its file {box.file} is missing")
            continue
        except CheckpointError as error:
            return [str(error)]
        if box.start < 0 or box.nbytes < 0 or box.start + box.nbytes > size:
            problems.append(
                f"{name}: bytes {box.start} to {box.start + box.nbytes} are not inside {box.file} of {size} bytes"
            )
        elif stored.dtype and box.numel * itemsize(stored.dtype) > box.nbytes:
            problems.append(
                f"{name}: {box.sizes} elements of {stored.dtype} do not fit in {box.nbytes} bytes of {box.file}"
            )
    if stored.dtype is None:
        return problems if len(stored.boxes) == 1 else [f"{name} is stored {len(stored.boxes)} times"]
    return problems + [f"{name}: {problem}" for problem in _coverage(stored.shape, stored.boxes)]


def _coverage(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> list[str]:
    """Return the reasons why the boxes do not hold each element exactly once, or an empty list if they do."""
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            return [f"a part {box.sizes} at {box.offsets} is not inside {shape}"]
    numel = sum(box.numel for box in boxes)
    if numel != math.prod(shape):
        return [f"{numel} of its {math.prod(shape)} elements are stored"]
    # After sorting by the first dim, a box can only overlap boxes that start before it ends.
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offsets)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if shape and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                return [f"the parts at {box.offsets} and {other.offsets} overlap"]
    return []
