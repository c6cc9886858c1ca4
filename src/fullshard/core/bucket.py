"""Plans of buckets, with the same rules for the engine and the planner. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import NamedTuple, Self

from fullshard.core.dtypes import FLOATING, Dtypes, itemsize, packed, wider
from fullshard.core.forms import FORMS, StoredForm
from fullshard.core.layout import ALIGNMENT_NBYTES, BucketLayout, ParameterSpec
from fullshard.core.offload import Offload
from fullshard.core.sizes import round_up


class BucketKey(NamedTuple):
    """The properties that a bucket's parameters share. With the dtypes of the run, they determine the bucket's dtypes.

    `exact` parameters are bytes that are never cast and never rounded for sending. `form` is the name of the stored
    form in which the parameters are kept as bytes, or an empty string if they are stored as numbers.
    """

    dtype: str
    compute_dtype: str
    trainable: bool
    exact: bool
    form: str = ""

    @classmethod
    def of(
        cls, dtypes: Dtypes, dtype: str, *, trainable: bool, exact: bool, statistics: str | None, form: str = ""
    ) -> Self:
        """Return the key of a parameter's bucket. `Dtypes.compute` explains `exact` and `statistics`."""
        compute = dtypes.compute(dtype, exact=exact, statistics=statistics)
        return cls("uint8" if form else dtype, compute, trainable, exact or bool(form), form)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of a bucket. Make it with `BucketPlan.of`."""

    layout: BucketLayout  # which rank owns which elements. Each parameter is named by its index.
    dtype: str  # of stored parameters
    compute_dtype: str  # of unsharded parameters
    reduce_dtype: str  # of reduced gradients
    trainable: bool
    weights_as: str | None = None  # the dtype to which intervals are packed for sending, or None if they are not packed
    gradients_as: str | None = None  # the same for gradients
    offload: Offload = field(default_factory=Offload)  # the parts that are kept in host memory
    full_dtype: str | None = None  # the dtype of the gathered parameter, if the parameter's class determines it
    form: StoredForm | None = None  # how the bucket is stored and sent, or None if it is stored as numbers

    @classmethod
    def of(
        cls,
        key: BucketKey,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Dtypes,
        *,
        world_size: int,
        offload: Offload,
        by_rows: bool = False,
        is_packed: bool = True,
    ) -> Self:
        """Plan the bucket of parameters with these shapes, in definition order, for `world_size` ranks.

        With `by_rows`, the bucket has a single parameter, and each rank owns complete rows of it. With `is_packed`,
        weights may be rounded for sending if the run requests it.
        """
        reduce, form = dtypes.reduce(key.dtype), FORMS[key.form] if key.form else None
        atom = form.atom if form is not None else prod(shapes[0][1:]) if by_rows else None
        itemsizes = [itemsize(key.dtype), itemsize(key.compute_dtype)]
        if key.dtype in FLOATING:
            itemsizes.append(itemsize(reduce))
        return cls(
            _layout(tuple(shapes), min(itemsizes), world_size, atom),
            key.dtype,
            key.compute_dtype,
            reduce,
            key.trainable,
            packed(dtypes.gather_as, key.compute_dtype) if is_packed and not key.exact else None,
            packed(dtypes.reduce_as, reduce),
            offload,
            form=form,
        )

    @property
    def main_numel(self) -> int:
        """Return the number of elements in this rank's stored interval, or of bytes if it is stored in a form."""
        numel = self.layout.shard_numel
        return numel if self.form is None else round_up(self.form.nbytes(numel), ALIGNMENT_NBYTES)

    @property
    def main_is_on_host(self) -> bool:
        """Return whether this rank's stored interval is in host memory. A frozen bucket stores only a compute shard."""
        return self.offload.main_weights if self.trainable else self.offload.compute_shards

    @property
    def is_gathered_from_host(self) -> bool:
        """Return whether the input of every gather is first copied from host memory."""
        return self.main_is_on_host and self.offload.compute_shards

    @property
    def state_visits_device(self) -> bool:
        """Return whether optimizer state is kept on the host but copied to the device for every update."""
        return self.offload.optimizer_state and not self.main_is_on_host

    @property
    def compute_shard_dtype(self) -> str:
        """Return the dtype of a gather's input if it is separate from the stored interval on the device.

        If weights are packed, this is the stored dtype, because packing takes exact values and is done on the device.
        """
        return self.compute_dtype if self.weights_as is None and self.form is None else self.dtype

    @property
    def compute_shard_is_main(self) -> bool:
        """Return whether the gather's input is the stored interval itself."""
        if not self.main_is_on_host:
            return True
        return self.is_gathered_from_host and self.compute_shard_dtype == self.dtype

    @property
    def may_hold_main(self) -> bool:
        """Return whether this rank's stored interval could be a view of the unsharded bucket."""
        return self.dtype == self.compute_dtype and not self.main_is_on_host and self.full_dtype is None

    @property
    def main_gradient_dtype(self) -> str:
        """Return the dtype in which gradients are accumulated over micro-batches."""
        return wider(self.reduce_dtype, self.dtype)


@cache
def _layout(shapes: tuple[tuple[int, ...], ...], narrowest: int, world_size: int, atom: int | None) -> BucketLayout:
    """Return the layout for these shapes. It is cached, because most layers of a model have the same shapes."""
    specs = [ParameterSpec(str(index), shape) for index, shape in enumerate(shapes)]
    return BucketLayout.build(specs, itemsize=narrowest, world_size=world_size, atom=atom)
