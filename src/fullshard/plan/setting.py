"""The inputs for predicting a step's memory and time, besides its events."""

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
    """A run to plan: the model, its layout, the job and the device."""

    model: ModelShape
    layout: ModelLayout
    job: Job
    # The device that the run uses. On a CPU, optimizers update one parameter at a time, and a matrix product in half
    # precision briefly needs a float32 copy of its result.
    device: Device
    on_host: Offload = field(default_factory=Offload)  # what is offloaded to host memory, as in the layout
    # How the ranks of a shard group communicate. If they share memory, the main weights themselves, or permanent copies
    # of them in the compute dtype, are used as unsharded parameters. Each rank counts its own part of these copies.
    route: Route = Route.NATIVE
    matrices: MatrixWork | None = None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether gradients are reduced in every micro-batch, and not only in the last one of a step."""
        return self.job.sync_each_micro_batch and not self.layout.keeps_gradients

    def gathered_nbytes(self, unit: UnitLayout) -> int:
        """Return the bytes that are allocated when `unit` is unsharded."""
        return unit.decoded_nbytes if self.route.shares_memory else unit.gathered_nbytes

    def coded_nbytes(self, unit: UnitLayout) -> int:
        """Return the bytes of the messages that carry the codes of `unit`. They are freed after decoding."""
        return 0 if self.route.shares_memory else unit.coded_nbytes

    def collected_dtype(self, bucket: CountedBucket) -> str:
        """Return the dtype in which a bucket's gradient is collected: the sum's if several micro-batches are added."""
        is_added_to = self.job.accumulation > 1 and not self.reduces_each_micro_batch
        return collected(bucket.compute_dtype, bucket.reduce_dtype, widens=self.route.widens and not is_added_to)

    def collected_nbytes(self, bucket: CountedBucket) -> int:
        """Return the bytes of a bucket's unsharded gradient while it is collected."""
        return bucket.layout.full_numel * itemsize(self.collected_dtype(bucket))

    def summing_nbytes(self, bucket: CountedBucket) -> int:
        """Return the additional bytes that a CPU needs while it sums the ranks' gradients of a bucket."""
        is_cast = self.collected_dtype(bucket) != bucket.reduce_dtype
        blocks = sum_blocks(bucket.layout.world_size, is_cast=is_cast) if self.device.is_cpu else 0
        return blocks * min(SUM_BLOCK_NBYTES, bucket.reduced_nbytes)

    def copies_nbytes(self, bucket: CountedBucket) -> int:
        """Return the bytes of a bucket's permanent copies in the compute dtype, which exist if ranks share memory."""
        if not self.route.shares_memory or bucket.dtype == bucket.compute_dtype or bucket.form is not None:
            return 0
        return bucket.layout.shard_numel * itemsize(bucket.compute_dtype)


def of_parameters(setting: PlanSetting, what: Callable[[OptimizerRow, str], float]) -> float:
    """Return the mean total of `what`, a cost per trained element by optimizer and dtype, over a shard group."""
    row, work, buckets = setting.job.planned_optimizer, setting.matrices, setting.layout.buckets
    shard_size, total = setting.layout.shard_size, 0.0
    for bucket in buckets:
        if bucket.trainable:
            total += bucket.layout.numel * what(row, bucket.dtype) * (shard_size // bucket.layout.world_size)
    if row.matrix is None or work is None:
        return total / shard_size
    more = {dtype: what(row.matrix, dtype) - what(row, dtype) for dtype in {bucket.dtype for bucket in buckets}}
    of_matrices = sum(m.numel * more[buckets[m.bucket].dtype] for m in work.dealing.matrices)
    return total / shard_size + of_matrices / shard_size
