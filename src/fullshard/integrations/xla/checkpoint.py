"""fullshard's checkpoints, written by one process and read whole: a run moves between PyTorch/XLA and the engine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import format as records
from fullshard.checkpoint.decoding import decode_value
from fullshard.checkpoint.elements import write_tensors
from fullshard.checkpoint.stamps import next_stamp, note_stamps_in
from fullshard.checkpoint.storage import committed_directory, write_file
from fullshard.checkpoint.tensor_file import TensorFileReader
from fullshard.checkpoint.values import encode_plain
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError
from fullshard.core.paths import local_path
from fullshard.core.version import __version__
from fullshard.integrations.xla.model import full_state_dict, load_full_state_dict, sharded_state


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    overwrite: bool = False,
) -> None:
    """Write what `fullshard.checkpoint.load_checkpoint` reads on any number of ranks, and `load_checkpoint` here.

    Args:
        path: directory to create; it appears when it is complete.
        model: one that `prepare` has sharded.
        optimizer: its optimizer, if that is to be saved.
        extra: numbers, text, and lists, tuples and dicts of them.
        overwrite: replace `path` if it exists.

    Raises:
        CheckpointError: what cannot be stored, or a disk that refuses; nothing is left at `path`.
    """
    sharded_state(model)
    whole = full_state_dict(model)
    aliases = _aliases(model)
    parameters = {name: whole[name] for name in aliases}
    tied = {other for names in aliases.values() for other in names}
    buffers = {name: value for name, value in whole.items() if name not in parameters.keys() | tied}
    save_id = uuid.uuid4().hex[:16]
    final = local_path(path).absolute()
    note_stamps_in(final.parent)
    with committed_directory(final, save_id, overwrite=overwrite) as temp:
        files = {}
        record, state = (None, {}) if optimizer is None else _optimizer_record(optimizer, model)
        for kind, tensors in (("model", {**parameters, **buffers}), ("optimizer", state)):
            if tensors:
                name = records.rank_file_name(kind, 0)
                files[name] = _write(temp / name, tensors, save_id)
        manifest = records.Manifest(
            save_id=save_id,
            saved_at=next_stamp(),
            fullshard_version=__version__,
            torch_version=str(torch.__version__),
            world_size=1,
            mesh=records.MeshRecord(replicate=1, shard=1),
            files=files,
            parameters={n: records.TensorRecord(**_stored(t), aliases=aliases[n]) for n, t in parameters.items()},
            buffers={name: records.TensorRecord(**_stored(tensor)) for name, tensor in buffers.items()},
            optimizer=record,
            states={} if extra is None else {"extra": encode_plain(extra, where="extra")},
        )
        write_file(temp / records.MANIFEST_NAME, records.encode_manifest(manifest))


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load what `save_checkpoint` or fullshard's engine has saved, by any number of ranks. Returns `extra`.

    Raises:
        CheckpointError: damaged, not of this model and optimizer, or stored in tiles or codes.
    """
    sharded, directory = sharded_state(model), local_path(path).absolute()
    manifest = records.read_manifest(directory)
    with ExitStack() as stack:
        reader = _Reader(directory, manifest, stack)
        whole: dict[str, torch.Tensor] = {}
        for name, record in {**manifest.parameters, **manifest.buffers}.items():
            whole |= dict.fromkeys((name, *record.aliases), reader.read("model", name, record))
        state, saved = {}, manifest.optimizer
        if optimizer is not None:
            if saved is None or saved.kind != type(optimizer).__name__:
                kind = "no optimizer" if saved is None else saved.kind
                raise CheckpointError(f"{directory} holds {kind}, expected {type(optimizer).__name__}")
            state = {name: dict(_read_state(reader, name, values)) for name, values in saved.state.items()}
            named = dict(model.named_parameters())
            groups = [[named.get(name) for name in group.parameters] for group in saved.groups]
            if [list(map(id, group)) for group in groups] != [
                list(map(id, group["params"])) for group in optimizer.param_groups
            ]:
                raise CheckpointError(f"the parameter groups in {directory} are not those of the optimizer")
        load_full_state_dict(model, whole)
        if optimizer is not None and saved is not None:
            for group, stored in zip(optimizer.param_groups, saved.groups, strict=True):
                group.update({key: decode_value(value, {}) for key, value in stored.options.items()})
            optimizer.state.clear()
            for name, values in state.items():
                optimizer.state[named[name]] = {
                    key: sharded.place_parameter(value) if isinstance(value, torch.Tensor) and not on_host else value
                    for key, (value, on_host) in values.items()
                }
    extra = manifest.states.get("extra")
    return None if extra is None else decode_value(extra, {})


class _Reader:
    """Whole tensors out of the files of all ranks."""

    def __init__(self, directory: Path, manifest: records.Manifest, stack: ExitStack) -> None:
        self._directory, self._manifest, self._stack = directory, manifest, stack
        self._open: dict[str, TensorFileReader] = {}

    def read(self, kind: str, name: str, record: records.TensorRecord) -> torch.Tensor:
        coded = [piece for piece in record.pieces if isinstance(piece, records.CodedPieceRecord)]
        if record.tiles is not None or coded or not record.is_stored:
            raise CheckpointError(
                f"{name} is stored in tiles or codes, or elsewhere",
                hint="save it without, or have `fullshard ckpt reshard` write it anew",
            )
        whole = torch.empty(record.numel, dtype=getattr(torch, record.dtype))
        elements = whole.view(torch.uint8).numpy() if record.numel else whole.numpy()
        size = itemsize(record.dtype)
        for piece in record.pieces:
            file = self._file(self._manifest.file_name(kind, piece.rank))
            stored = file.find(name, record.dtype, piece.interval.numel)
            file.read_into(stored.start, elements[piece.start * size : piece.stop * size])
        return whole.reshape(record.shape)

    def _file(self, name: str) -> TensorFileReader:
        if name not in self._open:
            saved = self._manifest
            reader = TensorFileReader(
                self._directory / name, saved.files[name], chunk_nbytes=saved.chunk_nbytes, save_id=saved.save_id
            )
            self._open[name] = self._stack.enter_context(reader)
        return self._open[name]


def _read_state(
    reader: _Reader, name: str, values: Mapping[str, records.StateTensorRecord | records.StateValueRecord]
) -> Iterator[tuple[str, tuple[Any, bool]]]:
    """Return the keys of a parameter's state, each with its value and whether that belongs into host memory."""
    for key, record in values.items():
        if isinstance(record, records.StateValueRecord):
            yield key, (decode_value(record.value, {}), True)
        else:
            yield key, (reader.read("optimizer", f"{name}/{key}", record), record.is_on_host)


def _optimizer_record(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[records.OptimizerRecord, dict[str, torch.Tensor]]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        state[name] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value.detach().cpu()
                state[name][key] = records.StateTensorRecord(
                    **_stored(value),
                    layout="interval" if value.shape == parameter.shape and value.dim() else "replicated",
                    is_on_host=value.device.type == "cpu",
                )
            else:
                state[name][key] = records.StateValueRecord(value=encode_plain(value, where=f"{name}/{key}"))
    groups = tuple(
        records.GroupRecord(
            parameters=tuple(names[parameter] for parameter in group["params"]),
            options={key: encode_plain(value, where=key) for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
    )
    return records.OptimizerRecord(kind=type(optimizer).__name__, groups=groups, state=state), tensors


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return names of parameters, each with the further names of the same one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def _stored(tensor: torch.Tensor) -> dict[str, Any]:
    pieces = (records.PieceRecord(rank=0, start=0, stop=tensor.numel()),) if tensor.numel() else ()
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "pieces": pieces}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], save_id: str) -> records.FileRecord:
    # As ranks write them: slices of flattened tensors, and scalars in their shape.
    kept = {name: t.reshape(-1) if t.dim() else t for name, t in tensors.items() if t.numel()}
    return write_tensors(path, kept, records.rank_metadata(save_id, 0))
