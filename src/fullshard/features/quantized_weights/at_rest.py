"""Store and send weights as codes and scales, and decode them to plain values while their unit is unsharded.

    main        this rank's bytes, part by part: codes, scales, scales of scales
    message     the bytes gathered from all ranks; freed as soon as they are decoded
    full        the values in the compute dtype, as in any other bucket

All marked weights of a unit that have the same form and compute dtype share one bucket, so a unit sends codes and
scales in one message. A bucket is split between ranks only at atom boundaries of the form. Every block therefore stays
intact, and the decoded values are the same for any number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, Self, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm.base import FullBuffer, Work, WorkOf
from fullshard.comm.mesh import Mesh
from fullshard.core.boxes import IntervalBox
from fullshard.core.errors import LifecycleError, WrapError
from fullshard.core.forms import StoredForm, ranks_at_once
from fullshard.core.layout import Interval
from fullshard.engine.bucket import Bucket
from fullshard.engine.kinds import DataAxes, ParameterKind, kind_of, register_kinds
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.shard_spec import Name, RaggedShard, ReductionSettings, ShardSpec
from fullshard.features.quantized_weights.codecs import Codec, DoubleFourBits, codec
from fullshard.features.quantized_weights.coded import CodedInterval, cut, parts_in
from fullshard.features.quantized_weights.marks import mark_of, put_mark, stamp
from fullshard.wrap.partition import Slot, Values, names_in

_PIECE_NUMEL = 2**22
"""Number of elements to read and encode at a time; a multiple of every atom."""


@runtime_checkable
class CodedValues(Values, Protocol):
    """A source of values that can also supply codes for some of its weights."""

    def read_parts(self, slot: Slot, interval: Interval, form: StoredForm, parts: Mapping[str, torch.Tensor]) -> bool:
        """Read the codes and scales of the elements in `interval` into `parts`, whose keys are part names.

        The interval begins at an atom boundary of the form and counts elements in block order. The tensors in `parts`
        are on the device or in host memory. Return False if the source has no codes for this weight.
        """


class DecodedBuffer(FullBuffer):
    """The memory for the decoded weights, and the message buffer in which their codes arrive."""

    def __init__(self, message: FullBuffer, full: torch.Tensor, ranks: int, how: Codec) -> None:
        self._message, self.full, self._ranks, self._codec = message, full, ranks, how
        self.main, self.shared_number = message.main, message.shared_number
        self._storage, self._full_nbytes = full.untyped_storage(), full.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory for the values, plus those of the message while it is in flight."""
        return self._storage.nbytes() + self._message.nbytes

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Start the all-gather of the codes. Waiting for the returned work also decodes them."""
        return WorkOf(partial(self._decode, self._message.gather(main, tag=tag, is_unchanged=is_unchanged)))

    @torch.no_grad()
    def _decode(self, gathered: Work) -> torch.Tensor:
        gathered.wait()
        if self._storage.nbytes() != self._full_nbytes:  # otherwise the memory would move
            self._storage.resize_(self._full_nbytes)
        numel = self.full.numel() // self._ranks
        many = ranks_at_once(numel, self._ranks, is_cpu=self.full.device.type == "cpu")
        rows = self._message.full.view(self._ranks, -1).split(many)
        for coded, values in zip(rows, self.full.split(many * numel), strict=True):
            parts = parts_in(coded, self._codec.form, numel).values()
            self._codec.decode([part.contiguous().view(-1) for part in parts], values)  # a copy, if of several ranks
        self._message.free()
        return self.full

    def free(self, *, keeps_memory: bool = False) -> None:
        """Free the memory of the values, unless `keeps_memory` is set."""
        if not keeps_memory:
            self._storage.resize_(0)

    def wait_for_readers(self) -> None:
        """Wait for ranks that are still reading this rank's codes; see `FullBuffer`."""
        self._message.wait_for_readers()


class CodedParameter(ShardedParameter):
    """A sharded parameter that this rank stores as codes and scales. It cannot be trained."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise an error if training is requested, because codes cannot be trained."""
        if requires_grad:
            self.bucket.originals.parameters[self._index].requires_grad_(False)
            raise LifecycleError(
                f"rank {self.mesh.rank}: {self.name} is stored as codes, which no optimizer can update",
                hint="train an adapter for it, or leave it unquantized",
            )
        return self


class CodedBucket(Bucket):
    """A bucket of weights that are stored as codes. It takes the same arguments as `Bucket`."""

    buffer: DecodedBuffer
    parameter_type = CodedParameter

    @property
    def _form(self) -> StoredForm:
        assert self.plan.form is not None  # noqa: S101 -- the kind of these parameters says so
        return self.plan.form

    def make_buffer(self) -> FullBuffer:
        """Allocate memory for the values and for the messages that contain their codes."""
        mesh, plan = self.mesh, self.plan
        message = mesh.gather.full_buffer(
            plan.main_numel * mesh.shard_size, torch.uint8, mesh.device, holds_main=not plan.main_is_on_host
        )
        full = torch.empty(self.layout.full_numel, dtype=self.compute_dtype, device=mesh.device)
        return DecodedBuffer(message, full, mesh.shard_size, codec(self._form.name))

    def weights(self, index: int) -> torch.Tensor:
        """Return this rank's part of parameter `index` as a tensor that decodes itself in torch operations."""
        numel = self.layout.interval(index, self.mesh.shard_rank).numel
        like = torch.empty(numel, dtype=self.compute_dtype, device="meta")
        return CodedInterval(self._form, self._parts(index), like)

    def _parts(self, index: int) -> dict[str, torch.Tensor]:
        """Return the codes and scales of this rank's part of parameter `index`, by part name, as views of `main`."""
        own = self.slices[index]
        return cut(parts_in(self.main, self._form, self.layout.shard_numel), self._form, own.start, own.stop)

    def _fill(self, weights: Values | None) -> None:
        """Fill this rank's part of each parameter: read the codes if the source has them, or else encode the values."""
        for index, slot in enumerate(self.slots):
            parameter, device = slot.parameter, self.mesh.device
            source = weights if parameter.is_meta else None
            if source is None:
                self._encode(index, _pieces_of(self.kinds[index].plain(parameter)))
                continue
            interval = self.layout.interval(index, self.mesh.shard_rank)
            parts = self._parts(index)
            if not (isinstance(source, CodedValues) and source.read_parts(slot, interval, self._form, parts)):
                self._encode(index, _read_by(source, slot, device))
            empty = torch.empty(0, dtype=parameter.dtype, device=device)
            slot.make_real(self.kinds[index].like(parameter, empty))
            put_mark(slot.parameter, mark_of(parameter))

    def _encode(self, index: int, values: Callable[[Interval], torch.Tensor]) -> None:
        """Encode this rank's interval of parameter `index` piece by piece. `values` returns any interval of it."""
        how, parts = codec(self._form.name), self._parts(index)
        interval, scales = self.layout.interval(index, self.mesh.shard_rank), [torch.empty(0, device=self.mesh.device)]
        for start in range(0, interval.numel, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, interval.numel)
            piece = values(Interval(start, stop).shift(interval.start))
            if not bool(piece.isfinite().all()):
                raise _not_finite(self.slots[index])
            own = cut(parts, self._form, start, stop)
            if isinstance(how, DoubleFourBits):
                encoded, of_piece = how.plain.encode(piece)
                scales.append(of_piece)
                own["codes"].copy_(encoded)
            else:
                _copy(how.encode(piece), own.values())
        if isinstance(how, DoubleFourBits):
            own_scales = torch.cat(scales)
            _copy(how.compress(own_scales, self._mean_of(own_scales, index)), list(parts.values())[1:])

    def _mean_of(self, scales: torch.Tensor, index: int) -> torch.Tensor:
        """Return the mean of the scales of parameter `index` over all ranks. All ranks must call this."""
        block, layout = self._form.block, self.layout
        placement = RaggedShard(layout.shard_numel // block, layout.offsets[index] // block)
        spec = ShardSpec(self.mesh, (-(-layout.specs[index].numel // block),), placement, Name())
        return spec.gather(scales).mean()

    def write_back(self) -> None:
        """Raise an error if a weight was changed in place, because changes cannot be written back to codes."""
        if changed := self.originals.take_changes():
            names = ", ".join(str(self.sharded_parameters[index].name) for index in changed)
            raise LifecycleError(
                f"rank {self.mesh.rank}, {self.owner}: {names} changed in place inside unsharded(), but "
                f"weights that are stored as {self._form.name} cannot be changed",
                hint="merge adapters with `fullshard merge`, or change the weights before the model is sharded",
            )


def _copy(made: Iterable[torch.Tensor], places: Iterable[torch.Tensor]) -> None:
    for tensor, place in zip(made, places, strict=True):
        place.copy_(tensor)


def _not_finite(slot: Slot) -> WrapError:
    places = ", ".join(f"{type(module).__name__}.{attribute}" for module, attribute in slot.owners)
    return WrapError(
        f"{places} {tuple(slot.parameter.shape)} cannot be stored as codes: its values are missing, NaN or infinite",
        hint="load values before sharding, for example with fullshard.from_pretrained; or, after sharding on the meta "
        "device, with load_state_dict(..., assign=True)",
    )


def _read_by(source: Values, slot: Slot, device: torch.device) -> Callable[[Interval], torch.Tensor]:
    """Return a function that reads an interval of a flattened parameter from `source`."""

    def piece(wanted: Interval) -> torch.Tensor:
        values = torch.empty(wanted.numel, dtype=slot.parameter.dtype, device=device)
        source.read(slot, wanted, values)
        return values

    return piece


def _pieces_of(plain: torch.Tensor) -> Callable[[Interval], torch.Tensor]:
    """Return a function that reads an interval of a flattened tensor without copying the complete tensor."""
    if plain.is_contiguous():
        return lambda wanted: plain.view(-1)[wanted.start : wanted.stop]
    matrix = math.prod(plain.shape[-2:])
    stack = plain.flatten(0, -3) if plain.dim() > 2 else plain[None]

    def piece(wanted: Interval) -> torch.Tensor:
        first, last = wanted.start // matrix, -(-wanted.stop // matrix)
        return stack[first:last].reshape(-1)[wanted.start - first * matrix : wanted.stop - first * matrix]

    return piece


class Transposed(ShardSpec):
    """Mixin for the spec of a weight with blocks along its second-to-last dim. Elements count in block order."""

    is_row_by_row = False

    @property
    def sharded_shape(self) -> torch.Size:
        """Return the shape with the last two dims swapped, in block order."""
        *others, rows, columns = super().sharded_shape
        return torch.Size((*others, columns, rows))

    def is_like(self, other: ShardSpec) -> bool:
        """Return whether each rank holds the same elements under both specs."""
        return isinstance(other, Transposed) and super().is_like(other)

    def moved(self, shape: Sequence[int], placement: RaggedShard) -> ShardSpec:
        """Return this spec unchanged, because a tensor of another shape does not have its elements in this order."""
        return self

    def boxes(self) -> Iterator[IntervalBox]:
        """Yield boxes that cover this rank's elements in the unsharded tensor."""
        for box in super().boxes():
            offsets, sizes, strides = (
                (*dims[:-2], dims[-1], dims[-2]) for dims in (box.offsets, box.sizes, box.strides)
            )
            yield IntervalBox(offsets, sizes, box.start, strides)

    def to_sharded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor in block order."""
        return super().to_sharded(whole).mT

    def to_full(self, sharded: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its dims in their original order, which undoes `to_sharded`."""
        return super().to_full(sharded.mT.contiguous())


class Coded(ParameterKind):
    """The kind of a marked weight, plain or a DTensor. It delegates to the kind that applies without the mark."""

    bucket_type = CodedBucket
    why_no_cast = "that are stored as codes"

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a marked parameter."""
        return mark_of(tensor) is not None

    def form(self, parameter: torch.Tensor) -> str:
        """Return the name of the form in the parameter's mark, or an empty string if it is not marked."""
        mark = mark_of(parameter)
        return "" if mark is None else mark.form

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Copy the marks from the modules to their parameters."""
        stamp(model)

    def why_not(self, parameter: torch.Tensor) -> str:
        """Return the reason why a parameter cannot be sharded, or an empty string if it can."""
        return kind_of(parameter, beneath=self).why_not(parameter)

    def check(self, slots: Sequence[Slot], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None) -> None:
        """Refuse marked weights that are trainable or whose blocks are split. The kinds beneath check their own."""
        trained = {id(slot.parameter) for slot in slots if slot.parameter.requires_grad}
        if trained:
            raise WrapError(
                f"{names_in(roots, trained)}: trainable weights are marked to be stored as codes, which no optimizer "
                "can update",
                hint="freeze them with requires_grad_(False), or call fullshard.quantize after adapters are added",
            )
        turned = {id(s.parameter) for s in slots if _is_turned(s.parameter) and not _has_matrices(s.parameter)}
        if turned:
            raise WrapError(
                f"{names_in(roots, turned)}: the blocks should run along the second-to-last dim, but the weight is a "
                "vector, or tensor parallelism splits its matrices",
                hint="remove it from the tensor-parallel plan, mark it without is_transposed, or load it with "
                "dequantize=True",
            )
        beneath: dict[ParameterKind, list[Slot]] = {}
        for slot in slots:
            beneath.setdefault(kind_of(slot.parameter, beneath=self), []).append(slot)
        for kind, those in beneath.items():
            kind.check(those, roots, mesh, data)

    def why_no_rows(self, slot: Slot) -> str:
        """Return the reason why the weight is not split between rows."""
        return "it is stored as codes, which are split between blocks"

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter, which sharding splits further, with its dims in block order."""
        return _turned(parameter, kind_of(parameter, beneath=self).plain(parameter))

    def moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return a copy of a parameter on another device, with the same mark."""
        return put_mark(super().moved(parameter, device), mark_of(parameter))

    def outline(self, parameter: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a parameter without memory, from which buckets are built for a unit on the meta device."""
        made = kind_of(parameter, beneath=self).outline(parameter, requires_grad=requires_grad)
        return put_mark(made, mark_of(parameter))

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Make a parameter use the memory of `plain`, which has its dims in block order."""
        kind_of(parameter, beneath=self).set_plain(parameter, _turned(parameter, plain))

    def like(self, parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `parameter`, for example a DTensor, that wraps `plain`."""
        return kind_of(parameter, beneath=self).like(parameter, _turned(parameter, plain))

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return the spec of a parameter; its name is not set yet."""
        if not _is_turned(slot.parameter):
            return kind_of(slot.parameter, beneath=self).spec(slot, mesh, shape, placement, reduction)
        spec = kind_of(slot.parameter, beneath=self).spec(slot, mesh, slot.parameter.shape, placement, reduction)
        spec.__class__ = type(f"Transposed{type(spec).__name__}", (Transposed, type(spec)), {})
        return spec


def _has_matrices(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds complete matrices, so that their dims can be swapped."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    are_kept = (type(p) is Replicate or (type(p) is Shard and p.dim < parameter.dim() - 2) for p in placements)
    return parameter.dim() > 1 and all(are_kept)


def _is_turned(parameter: torch.Tensor) -> bool:
    mark = mark_of(parameter)
    return mark is not None and mark.is_transposed


def _turned(parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return `plain`, with its last two dims swapped if the blocks of `parameter` run along the second-to-last dim."""
    return plain.mT if _is_turned(parameter) and plain.dim() > 1 else plain


register_kinds(Coded(), first=True)  # before the kinds it can delegate to
