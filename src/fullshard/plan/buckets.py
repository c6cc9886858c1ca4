"""The planner's description of buckets: the engine's bucket plans, with the number of bytes that each bucket needs."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from fullshard.core.bucket import BucketPlan
from fullshard.core.dtypes import itemsize
from fullshard.core.forms import CPU_PIECE_NUMEL, DEVICE_PIECE_NUMEL, ranks_at_once
from fullshard.core.sizes import packed_nbytes


@dataclass(frozen=True, slots=True)
class CountedBucket(BucketPlan):
    """A bucket plan with byte counts. Create it with `CountedBucket.of`, or from a `BucketPlan` with `like`."""

    @classmethod
    def like(cls, plan: BucketPlan, **changes: Any) -> Self:
        """Return a copy of a bucket plan with some fields changed."""
        return cls(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)} | changes)

    @property
    def shares_main(self) -> bool:
        """Return whether one rank stores the complete bucket in the compute dtype, and uses it as the unsharded one."""
        return self.layout.world_size == 1 and self.may_hold_main

    @property
    def main_nbytes(self) -> int:
        """The size of this rank's interval in its stored form, in bytes."""
        return self.main_numel * itemsize(self.dtype)

    @property
    def scale_nbytes(self) -> int:
        """The bytes of the scales within `main_nbytes`, or 0 if the interval is not stored as codes."""
        if self.form is None:
            return 0
        return self.main_nbytes - self.form.parts[0].numel(self.layout.shard_numel) * itemsize(self.form.parts[0].dtype)

    @property
    def compute_shard_nbytes(self) -> int:
        """The size of the all-gather's input in bytes."""
        return self.main_numel * itemsize(self.compute_shard_dtype)

    @property
    def device_nbytes(self) -> int:
        """The bytes of this rank's interval that are on the device between steps."""
        if not self.main_is_on_host:
            return self.main_nbytes
        return 0 if self.is_gathered_from_host else self.compute_shard_nbytes

    @property
    def host_buffers(self) -> tuple[int, ...]:
        """The bytes of each buffer in host memory: main weights and, in another dtype, the all-gather's input."""
        if not self.main_is_on_host:
            return ()
        has_copy = self.is_gathered_from_host and not self.compute_shard_is_main
        return (self.main_nbytes, self.compute_shard_nbytes) if has_copy else (self.main_nbytes,)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the unsharded bucket."""
        return self.layout.full_numel * itemsize(self.full_dtype or self.compute_dtype)

    @property
    def coded_nbytes(self) -> int:
        """The bytes of all ranks' codes before decoding, or 0 for a single rank, which decodes its codes directly."""
        has_own = self.layout.world_size == 1 and not self.main_is_on_host
        return 0 if self.form is None or has_own else self.main_nbytes * self.layout.world_size

    def decoding_nbytes(self, *, is_cpu: bool) -> int:
        """Return the bytes of the temporaries while the bucket is decoded, piece by piece."""
        if self.form is None:
            return 0
        value = itemsize(self.compute_dtype)
        each = {"mxfp4": 2 + value, "fp8": 8 if is_cpu else 4}.get(self.form.name, value if is_cpu else 0)
        many = ranks_at_once(self.layout.shard_numel, self.layout.world_size, is_cpu=is_cpu)
        numel = min(CPU_PIECE_NUMEL if is_cpu else DEVICE_PIECE_NUMEL, self.layout.shard_numel * many)
        return each * numel + (self.main_nbytes * many if many > 1 else 0)

    @property
    def value_itemsize(self) -> int:
        """Bytes of an element when a single parameter is unsharded. Codes are decoded to the compute dtype."""
        return itemsize(self.dtype if self.form is None else self.compute_dtype)

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the unsharded gradient in the dtype of the reduction."""
        return self.layout.full_numel * itemsize(self.reduce_dtype)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of this rank's interval of the gradient in the dtype of the reduction."""
        return self.layout.shard_numel * itemsize(self.reduce_dtype)

    @property
    def main_gradient_nbytes(self) -> int:
        """Bytes of the accumulated gradient."""
        return self.layout.shard_numel * itemsize(self.main_gradient_dtype)

    @property
    def gather_message_nbytes(self) -> int:
        """The size of the message in which a rank sends its interval of the weights, in bytes."""
        if self.form is not None:
            return self.main_nbytes
        return _message_nbytes(self.layout.shard_numel, self.full_dtype or self.compute_dtype, self.weights_as)

    @property
    def reduce_message_nbytes(self) -> int:
        """The size of the message in which a rank sends one interval of its gradient, in bytes."""
        return _message_nbytes(self.layout.shard_numel, self.reduce_dtype, self.gradients_as)


def _message_nbytes(numel: int, dtype: str, sent_as: str | None) -> int:
    return numel * itemsize(dtype) if sent_as is None else packed_nbytes(numel, itemsize(sent_as))
