"""Read elements of tensors from the files of a checkpoint, whichever ranks have stored them."""

import functools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.chunks import read_across, read_transposed
from fullshard.checkpoint.coded_state import CodedTensor
from fullshard.checkpoint.elements import dtype_of, tensor_bytes
from fullshard.checkpoint.format import (
    NAMES,
    CodedPieceRecord,
    FormRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    stored_as,
)
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.tensor_file import TensorFileReader
from fullshard.checkpoint.verify import pieces_of
from fullshard.core.boxes import UNCUT, Chunking
from fullshard.core.dtypes import itemsize
from fullshard.core.layout import Interval
from fullshard.engine.precision import torch_dtype
from fullshard.engine.shard_spec import CodedShard
from fullshard.features.local_optimizers.coded import decode
from fullshard.features.quantized_weights.codecs import codec

_MAX_OPEN_FILES = 16


class Readers:
    """The readers of a checkpoint's data files, of which only a few are open at a time."""

    def __init__(self, directory: Location, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._open: OrderedDict[str, TensorFileReader] = OrderedDict()

    def close(self) -> None:
        """Close all files."""
        for reader in self._open.values():
            reader.close()

    def __getitem__(self, name: str) -> TensorFileReader:
        reader = self._open.pop(name, None)
        if reader is None:
            reader = TensorFileReader(
                self._directory / name,
                self._manifest.files[name],
                chunk_nbytes=self._manifest.chunk_nbytes,
                save_id=self._manifest.save_id,
            )
        self._open[name] = reader
        if len(self._open) > _MAX_OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
        return reader

    def fill(
        self,
        out: torch.Tensor,
        kind: str,
        name: str,
        record: TensorRecord,
        interval: Interval,
        *,
        chunking: Chunking = UNCUT,
    ) -> None:
        """Read the elements in `interval`, counted in the order of `chunking`, into `out`, which is in host memory."""
        read = functools.partial(self._read_pieces, kind, name, record)
        if record.form is not None and record.form.is_transposed:
            read = functools.partial(read_transposed, read, record.shape)
        read_across(read, out.view(-1), shape=record.shape, source=record.chunking, target=chunking, wanted=interval)

    def _read_pieces(self, kind: str, name: str, record: TensorRecord, interval: Interval, out: torch.Tensor) -> None:
        """Read the elements in `interval` of a tensor from files of one kind. The interval follows the stored order."""
        data, width = tensor_bytes(out), itemsize(record.dtype)
        for read in plan_reads(pieces_of(record), interval):
            reader, piece = self[self._manifest.file_name(kind, read.piece.rank)], read.piece
            part = data[read.target.start * width : read.target.stop * width]
            if isinstance(piece, CodedPieceRecord):
                values = self._decoded(kind, name, record.dtype, piece, read.source)
                part[:] = tensor_bytes(values.to(dtype_of(record)))
                continue
            stored = reader.find(name, record.dtype, piece.interval.numel)
            reader.read_into(stored.start + read.source.start * width, part)

    def fill_coded(
        self, out: CodedTensor, name: str, record: TensorRecord, interval: Interval, chunking: Chunking
    ) -> None:
        """Read state that the optimizer keeps as codes. Values saved with another coding are encoded again."""
        pieces = record.pieces if record.chunking == chunking else ()
        same = [p for p in pieces if p.interval == interval and getattr(p, "coding", None) == out.record]
        if same and isinstance(same[0], CodedPieceRecord):
            parts = self._coded_parts("optimizer", name, record.dtype, same[0], Interval(0, interval.numel))
            mine = out.parts
            if "book" not in mine or torch.equal(parts["book"], mine["book"].cpu()):
                for part in ("codes", "scales"):
                    mine[part].copy_(parts[part])
                return
        values = torch.empty(interval.numel, dtype=dtype_of(record))
        self.fill(values, "optimizer", name, record, interval, chunking=chunking)
        out.write(values)

    def fill_parts(self, out: CodedShard, name: str, record: TensorRecord, interval: Interval) -> None:
        """Read the codes and scales of a weight without decoding them. Blocks are the same at every world size."""
        for read in plan_reads(pieces_of(record), interval):
            assert isinstance(read.piece, CodedPieceRecord)  # noqa: S101 -- it has been compared with the model
            parts = self._coded_parts("model", name, record.dtype, read.piece, read.source)
            for part in out.form.parts:
                stored, start = parts[part.name], part.numel(read.target.start)
                out.parts[part.name][start : start + stored.numel()].copy_(stored)

    def _decoded(self, kind: str, name: str, dtype: str, piece: CodedPieceRecord, wanted: Interval) -> torch.Tensor:
        """Return decoded values of a piece. `wanted` is counted from the start of the piece."""
        coding, block = piece.coding, piece.coding.block
        start = wanted.start // block * block
        whole = Interval(start, min(-(-wanted.stop // block) * block, piece.interval.numel))
        parts = self._coded_parts(kind, name, dtype, piece, whole)
        if isinstance(coding, FormRecord):
            values = torch.empty(whole.numel, dtype=torch_dtype(dtype))
            codec(coding.form).decode(list(parts.values()), values)
        else:
            values = decode(parts["codes"], parts["scales"], parts.get("book"), bits=coding.bits, block=block)
        return values[wanted.start - start : wanted.stop - start]

    def _coded_parts(
        self, kind: str, name: str, dtype: str, piece: CodedPieceRecord, blocks: Interval
    ) -> dict[str, torch.Tensor]:
        """Return the codes and scales of a range of complete blocks of a piece, and the codebook if there is one."""
        reader, result = self[self._manifest.file_name(kind, piece.rank)], {}
        cut = {part.name: (part.numel(blocks.start), part.numel(blocks.stop)) for part in piece.coding.parts}
        for part, (stored_dtype, numel) in stored_as(name, dtype, piece).items():
            ending = part.rpartition(".")[2]
            start, stop = cut.get(ending, (0, numel))
            result[ending] = torch.empty(stop - start, dtype=torch_dtype(stored_dtype))
            stored = reader.find(part, stored_dtype, numel)
            reader.read_into(stored.start + start * itemsize(stored_dtype), tensor_bytes(result[ending]))
        return result

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that one rank saved for itself, in host memory, or an empty dict if it saved none."""
        name = self._manifest.file_name("state", rank)
        if name not in self._manifest.files:
            return {}
        result = {}
        for key, stored in self[name].tensors.items():
            tensor = torch.empty(stored.shape, dtype=torch_dtype(NAMES[stored.dtype]))
            self[name].read_into(stored.start, tensor_bytes(tensor))
            result[key] = tensor
        return result


@dataclass(frozen=True, slots=True)
class Read:
    """A range to copy. `source` counts from the start of a piece, `target` from the start of the wanted interval."""

    piece: PieceRecord
    source: Interval
    target: Interval


def plan_reads(pieces: Sequence[PieceRecord], wanted: Interval) -> list[Read]:
    """Return the ranges to read for the wanted elements. The pieces must be sorted and without `coverage_problems`."""
    if wanted.numel == 0:
        return []
    first = max(0, bisect_right(pieces, wanted.start, key=lambda piece: piece.start) - 1)
    reads = []
    for piece in pieces[first:]:
        if piece.start >= wanted.stop:
            break
        common = wanted.intersect(piece.interval)
        if common.numel:
            reads.append(Read(piece, common.shift(-piece.start), common.shift(-wanted.start)))
    return reads
