"""A bucket apart from its memory: dtypes by role, and what is on the host. No torch.

The engine makes its buckets from these plans and the planner counts with them, so neither has rules of its own.
"""

from __future__ import annotations

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
    """The common properties of a bucket's parameters; with the dtypes of the run they fix all dtypes.

    `exact`: they are bytes that are never cast, and never rounded to be sent. `form`: the name of the stored form in
    which they are kept at rest, as bytes; empty: they are stored as numbers.
    """

    dtype: str
    compute_dtype: str
    trainable: bool
    exact: bool
    form: str = ""

    @classmethod
    def of(
        cls, dtypes: Dtypes, dtype: str, *, trainable: bool, exact: bool, statistics: str | None, form: str = ""
    ) -> BucketKey:
        """Return the key of one parameter; see `Dtypes.compute`."""
        compute = dtypes.compute(dtype, exact=exact, statistics=statistics)
        return cls("uint8" if form else dtype, compute, trainable, exact or bool(form), form)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket. Make it with `BucketPlan.of`.

    Attributes:
        layout: which rank owns what; parameters are called by their numbers.
        dtype, compute_dtype, reduce_dtype: stored, unsharded, and of the gradient's sum.
        weights_as, gradients_as: dtypes in which an interval is sent, in either direction, if they differ.
        offload: what lives in host memory.
        whole_dtype: dtype in which it is gathered and stays, if its parameter asks for that and casts it no further.
        form: the form in which it is stored and sent; None: as numbers.
    """

    layout: BucketLayout
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    trainable: bool
    weights_as: str | None = None
    gradients_as: str | None = None
    offload: Offload = field(default_factory=Offload)
    whole_dtype: str | None = None
    form: StoredForm | None = None

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
        """Plan the bucket of parameters with these shapes, in definition order, shared by `world_size` ranks.

        `by_rows`: each rank owns whole rows of the one parameter. `is_packed`: what is sent may be rounded, if the run
        asks for it.
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
        """Elements of this rank's interval as it is stored: its bytes, if that is in a form."""
        numel = self.layout.shard_numel
        return numel if self.form is None else round_up(self.form.nbytes(numel), ALIGNMENT_NBYTES)

    @property
    def main_is_on_host(self) -> bool:
        """Return whether this rank's stored interval is in host memory; a frozen bucket has nothing else there."""
        return self.offload.main_weights if self.trainable else self.offload.compute_shards

    @property
    def is_gathered_from_host(self) -> bool:
        """Return whether the gather's input is copied from host memory before every gather."""
        return self.main_is_on_host and self.offload.compute_shards

    @property
    def state_visits_device(self) -> bool:
        """Return whether its optimizer state, if any, lives on the host and is updated on the device."""
        return self.offload.optimizer_state and not self.main_is_on_host

    @property
    def compute_shard_dtype(self) -> str:
        """Dtype of the gather's input, if that is not the stored interval itself on the device.

        Packing is done on the device, from exact values.
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
        """Return whether the unsharded bucket could contain this rank's stored interval."""
        return self.dtype == self.compute_dtype and not self.main_is_on_host and self.whole_dtype is None

    @property
    def main_gradient_dtype(self) -> str:
        """Dtype in which gradients are accumulated over micro-batches."""
        return wider(self.reduce_dtype, self.dtype)


@cache
def _layout(shapes: tuple[tuple[int, ...], ...], narrowest: int, world_size: int, atom: int | None) -> BucketLayout:
    """Build the layout, or return the cached one: layers repeat, so most calls find it."""
    specs = [ParameterSpec(str(index), shape) for index, shape in enumerate(shapes)]
    return BucketLayout.build(specs, itemsize=narrowest, world_size=world_size, atom=atom)
