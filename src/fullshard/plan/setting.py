"""The inputs of a step's memory and time besides its events: the run, its model's layout, and the ranks' places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fullshard.core.dtypes import collected, itemsize
from fullshard.core.offload import Offload
from fullshard.core.sizes import SUM_BLOCK_NBYTES, sum_blocks
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, UnitLayout
from fullshard.plan.matrices import MatrixWork
from fullshard.plan.optimizers import OptimizerRow
from fullshard.plan.route import Route
from fullshard.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """A run that is planned.

    Attributes:
        device: the device it runs on. On a CPU optimizers update one parameter after the other, and a product in half
            precision has a float32 copy of its result for a moment.
        on_host: what lives in host memory beside the device's, as the layout has it.
        route: how the ranks of a shard group reach one another. Where they share memory, unsharded parameters are
            main weights, or copies of those that last, in the dtype they compute in. Each rank counts its own part.
    """

    model: ModelShape
    layout: ModelLayout
    job: Job
    device: Device
    on_host: Offload = field(default_factory=Offload)
    route: Route = Route.NATIVE
    matrices: MatrixWork | None = None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether no gradient stays whole from one micro-batch to the next."""
        return self.job.sync_each_micro_batch and not self.layout.keeps_gradients

    def gathered_nbytes(self, unit: UnitLayout) -> int:
        """Return the bytes that unsharding `unit` takes."""
        return unit.decoded_nbytes if self.route.shares_memory else unit.gathered_nbytes

    def coded_nbytes(self, unit: UnitLayout) -> int:
        """Return the bytes of `unit`'s codes, which messages bring before they are decoded."""
        return 0 if self.route.shares_memory else unit.coded_nbytes

    def collected_dtype(self, bucket: CountedBucket) -> str:
        """Return the dtype that collects the unsharded gradient; if several backwards add to it, that of the sum."""
        is_added_to = self.job.accumulation > 1 and not self.reduces_each_micro_batch
        return collected(bucket.compute_dtype, bucket.reduce_dtype, widens=self.route.widens and not is_added_to)

    def collected_nbytes(self, bucket: CountedBucket) -> int:
        """Return the bytes of the unsharded gradient as it is collected."""
        return bucket.layout.full_numel * itemsize(self.collected_dtype(bucket))

    def summing_nbytes(self, bucket: CountedBucket) -> int:
        """Return what summing the ranks' gradients takes in addition, on a CPU."""
        is_cast = self.collected_dtype(bucket) != bucket.reduce_dtype
        blocks = sum_blocks(self.layout.shard_size, is_cast=is_cast) if self.device.is_cpu else 0
        return blocks * min(SUM_BLOCK_NBYTES, bucket.reduced_nbytes)

    def copies_nbytes(self, bucket: CountedBucket) -> int:
        """Return the bytes of a bucket's lasting copies in its compute dtype, besides its main weights."""
        if not self.route.shares_memory or bucket.dtype == bucket.compute_dtype or bucket.form is not None:
            return 0
        return bucket.layout.shard_numel * itemsize(bucket.compute_dtype)


def of_parameters(setting: PlanSetting, what: Callable[[OptimizerRow, str], float]) -> float:
    """Return one rank's optimizer figure `what`, given per trained element of a dtype: the mean of a shard group.

    Padding has no state.
    """
    row, work, buckets = setting.job.planned_optimizer, setting.matrices, setting.layout.buckets
    total = sum(bucket.layout.numel * what(row, bucket.dtype) for bucket in buckets if bucket.trainable)
    if row.matrix is None or work is None:
        return total / setting.layout.shard_size
    more = {dtype: what(row.matrix, dtype) - what(row, dtype) for dtype in {bucket.dtype for bucket in buckets}}
    of_matrices = sum(m.numel * more[buckets[m.bucket].dtype] for m in work.dealing.matrices)
    return total / setting.layout.shard_size + of_matrices / setting.layout.shard_size
