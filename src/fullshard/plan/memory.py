"""Predict the memory of one rank during a step, by category, by replaying the predicted events on a ledger.

Each event changes the ledger in the way in which it changes memory in the engine (`engine/bucket`, `engine/gradient`,
`engine/unsharded_gradient`):

    unshard issued      the unit's `full` is allocated, unless ranks share memory         + gathered
                        for coded weights, the message is also allocated                  + codes
    unshard ready       codes are decoded into `full`; then the message is freed          + gathered, - codes
    resharded           `full` is freed                                                   - gathered
    forward end         the tensors saved by autograd stay                                + activations (root: + logits)
                        at the root, also the inputs of the last norm and the head        + logits
    to host             activations are copied out, and the previous ones are freed       - activations
    to device           activations come back before their unit's backward                + activations
    backward begin      recomputed activations, the reduce input, one parameter's grad    + activations, reduce buffers
    reduce issued       the previous reduction shrinks to this rank's interval            + gradients, - reduce buffers
    reduce done         intervals are added to the main gradient, if not added before     gradients
    optimizer step      the optimizer's temporaries                                       + optimizer temporaries
    bucket step         the same within backward; then the bucket's gradient is freed     - gradients
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.core.dtypes import itemsize
from fullshard.core.events import Event, EventKind
from fullshard.core.schedule import launched_until_over
from fullshard.core.sizes import LONG_NBYTES
from fullshard.plan.activations import LayerActivations, layer_activations
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.host import many_page_locked_nbytes, page_locked_nbytes
from fullshard.plan.layout import UnitLayout
from fullshard.plan.losses import cached_nbytes, kept_beside_nbytes, kept_logits_nbytes, logits_nbytes
from fullshard.plan.optimizers import OptimizerRow
from fullshard.plan.setting import PlanSetting, of_parameters

CATEGORIES = (
    "sharded parameters",
    "main weights",
    "quantization scales",
    "optimizer state",
    "gradients",
    "gathered units",
    "reduce buffers",
    "activations",
    "logits",
    "optimizer temporaries",
    "framework",
)
"""Categories in the order of the tables. Permanent memory comes first."""

PERSISTENT = CATEGORIES[:4]

FRAGMENTATION, FRAGMENTS = 0.1, 3 * 2**29
"""Memory that PyTorch's caching allocator holds in blocks too small for other tensors: a tenth of the temporary memory,
and on several devices at least 1.5 GiB, because a block is only used again by the stream that it was allocated for
(c10/cuda/CUDACachingAllocator.cpp), and messages have their own streams.

Answer.AI published the allocated and the reserved memory of two runs (Llama-2-7B LoRA, 2 x 3090): 8.28 and 10.24 GiB,
and 9.16 and 10.22 GiB. With QLoRA, reserved memory grows by 1.62 GiB per sequence, and its tensors by 1.51 GiB. The
rest is the block of the bfloat16 logits, in which no float32 tensor fits after they have been cast and freed.
"""


def fragments_nbytes(transient: int, *, is_alone: bool) -> int:
    """Return how many bytes fragmentation adds if a step allocates and frees up to `transient` bytes."""
    return max(0 if is_alone else FRAGMENTS, round(FRAGMENTATION * transient))


class Moment(NamedTuple):
    """The state of the ledger immediately after an event."""

    event: Event
    nbytes: dict[str, int]

    @property
    def total(self) -> int:
        """The sum over all categories in bytes."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's device memory, a host's memory, and the size of a checkpoint."""

    phases: dict[str, dict[str, int]]  # the peak of each phase (load, forward, backward, optimizer, save), by category
    timeline: list[Moment]
    host_load: int  # bytes of host memory per host while `fullshard.from_pretrained` reads the weights
    host_load_peers: int  # bytes of host memory per host if every process calls Transformers' `from_pretrained` instead
    host_steady: int  # bytes of host memory per host during training
    checkpoint: int  # bytes on disk for one checkpoint of the whole job
    is_alone: bool  # whether there is a single device, which sends no messages
    # The peak of the loss's backward, with the block of the logits in the compute dtype that the allocator keeps. It is
    # at most the device's memory, because a full device makes the allocator give the block back.
    loss_reserved: int

    @property
    def persistent(self) -> int:
        """Bytes that stay allocated between steps, without the framework's own memory."""
        return sum(self.phases["load"].get(name, 0) for name in PERSISTENT)

    @property
    def peak(self) -> int:
        """The peak over all phases."""
        return max(map(self.peak_of, self.phases))

    @property
    def needed(self) -> int:
        """The peak plus the memory that the allocator loses to fragmentation."""
        framework = self.phases["load"].get("framework", 0)
        if not framework:  # on a CPU, memory is returned to the system
            return self.peak
        return self.peak + fragments_nbytes(self.peak - self.persistent - framework, is_alone=self.is_alone)

    @property
    def allocated(self) -> int:
        """The peak of the tensors alone, as `torch.cuda.max_memory_allocated` reports it."""
        return self.peak - self.phases["load"].get("framework", 0)

    @property
    def reserved(self) -> int:
        """The peak of what the allocator holds, as `torch.cuda.max_memory_reserved` reports it."""
        framework = self.phases["load"].get("framework", 0)
        return max(self.needed, self.loss_reserved if framework else 0) - framework

    def peak_of(self, phase: str) -> int:
        """Return the peak of one phase."""
        return sum(self.phases[phase].values())

    @property
    def peak_of_step(self) -> int:
        """The peak during a step, which includes neither loading nor saving."""
        return max(moment.total for moment in self.timeline)


def memory_of(events: Sequence[Event], setting: PlanSetting, *, ranks_per_host: int) -> Memory:
    """Return the memory that a rank needs in a step, by replaying the step's events."""
    root = setting.layout.root.name
    micro_batches = sum(event.kind is EventKind.FORWARD_BEGIN and event.unit == root for event in events)
    ledger = _Ledger(setting, micro_batches)
    phases = {"load": _load_peak(setting, ledger.nbytes)}
    fullest = {"forward": -1, "backward": -1, "optimizer": -1}
    timeline = []
    phase = "forward"
    for event in events:
        if event.kind is EventKind.FORWARD_BEGIN and event.unit == root:
            phase = "forward"
        elif event.kind is EventKind.OPTIMIZER_STEP:
            phase = "optimizer"
        for nbytes in ledger.apply(event):
            if (total := sum(nbytes.values())) > fullest[phase]:
                fullest[phase], phases[phase] = total, nbytes
            timeline.append(Moment(event, nbytes))
        if event.kind is EventKind.FORWARD_END and event.unit == root:
            phase = "backward"
        elif event.kind is EventKind.REDUCE_DONE and not setting.job.schedule.steps_in_backward:
            phase = "optimizer"  # or forward of the next micro-batch
    # Shards are written from their own memory; a state dict gathers one parameter at a time.
    largest = max(b.layout.largest_numel * b.value_itemsize for b in setting.layout.buckets)
    phases["save"] = {**ledger.rest, "gathered units": largest}
    is_alone = setting.layout.shard_size == setting.layout.replicate_size == setting.job.tp == 1
    at_loss = ledger.loss_peak + cached_nbytes(setting.model, setting.job) + fragments_nbytes(0, is_alone=is_alone)
    return Memory(
        {phase: {name: held[name] for name in CATEGORIES if held.get(name)} for phase, held in phases.items()},
        timeline,
        *_host(setting, ranks_per_host),
        checkpoint=_checkpoint(setting),
        is_alone=is_alone,
        loss_reserved=min(at_loss, setting.device.memory),
    )


def persistent_of(setting: PlanSetting) -> dict[str, int]:
    """Return the bytes that one rank keeps on the device between steps, by category."""
    buckets, on_host = setting.layout.buckets, setting.on_host
    scales = sum(p.nbytes for p in setting.model.parameters if p.role == "scale") // setting.layout.shard_size
    scales += sum(bucket.scale_nbytes for bucket in buckets)
    scales = 0 if on_host.compute_shards else scales
    main = sum(bucket.main_nbytes for bucket in buckets if bucket.trainable and not bucket.main_is_on_host)
    copies = sum(map(setting.copies_nbytes, buckets))
    return {
        "sharded parameters": sum(bucket.device_nbytes for bucket in buckets) - main - scales + copies,
        "main weights": main,
        "quantization scales": scales,
        "optimizer state": 0 if on_host.optimizer_state else _state_nbytes(setting),
    }


def _state_nbytes(setting: PlanSetting) -> int:
    return round(of_parameters(setting, OptimizerRow.state_nbytes))


@dataclass(slots=True)
class _Gradient:
    """The gradient of one bucket, from the buffer that is reduced to the main gradient."""

    bucket: CountedBucket
    extra: int
    is_shrunk: bool = False
    is_added: bool = False


class _Ledger:
    def __init__(self, setting: PlanSetting, micro_batches: int) -> None:
        self.setting, self.micro_batches = setting, micro_batches
        self.now = Counter(framework=setting.device.framework, **persistent_of(setting))
        self.rest = self.nbytes
        self.units = {unit.name: unit for unit in setting.layout.units}
        self.root = setting.layout.root
        blocks = {unit.name: unit.block for unit in setting.layout.units if unit.block is not None}
        each = {block: layer_activations(block, setting.job, setting.device) for block in set(blocks.values())}
        self.layers = {name: each[block] for name, block in blocks.items()}
        self.logits = logits_nbytes(setting.model, setting.job)
        self.beside = kept_beside_nbytes(setting.model, setting.job)
        self.kept_logits = kept_logits_nbytes(setting.model, setting.job)
        self.launched: list[_Gradient] = []
        self.backward_of: str | None = None
        self.collecting: set[str] = set()
        self.leaving = self.leaving_page = self.micro_batch = self.tied_nbytes = self.loss_peak = 0
        self.has_main_gradient = False
        self.stepping: CountedBucket | None = None

    @property
    def nbytes(self) -> dict[str, int]:
        return dict(self.now)

    def apply(self, event: Event) -> list[dict[str, int]]:
        """Apply an event and return the resulting states of the ledger. The first may be a short-lived peak."""
        unit = self.units[event.unit]
        match event.kind:
            case EventKind.UNSHARD_ISSUED:
                plain = self.setting.gathered_nbytes(unit) - unit.decoded_nbytes
                self.now["gathered units"] += plain + self.setting.coded_nbytes(unit)
            case EventKind.UNSHARD_READY if unit.coded:
                self.now["gathered units"] += unit.decoded_nbytes
                pieces = [bucket.decoding_nbytes(is_cpu=self.setting.device.is_cpu) for bucket in unit.coded]
                moments = self._for_a_moment({"gathered units": max(pieces)})
                self.now["gathered units"] -= self.setting.coded_nbytes(unit)
                return [moments[0], self.nbytes]
            case EventKind.RESHARDED:
                self.now["gathered units"] -= self.setting.gathered_nbytes(unit)
            case EventKind.FORWARD_BEGIN if unit is self.root:
                self.now["logits"] = 0
            case EventKind.FORWARD_END:
                return self._end_forward(unit)
            case EventKind.TO_HOST if event.what == "activations":
                self._give_up_page()
                self.leaving_page = event.nbytes
            case EventKind.TO_DEVICE if event.what == "activations":
                self._leave_backward()
                self.now["activations"] += event.nbytes
            case EventKind.BACKWARD_BEGIN:
                return self._begin_backward(unit)
            case EventKind.BACKWARD_END:
                self._leave_backward()
            case EventKind.REDUCE_ISSUED:
                return self._launch(unit)
            case EventKind.REDUCE_DONE if self._steps_in_backward:
                self._finish_one(unit)
            case EventKind.REDUCE_DONE:
                return self._finish()
            case EventKind.BUCKET_STEP:
                return self._bucket_step(event.nbytes)
            case EventKind.OPTIMIZER_STEP:
                self._leave_backward()
                return self._optimizer_step()
        return [self.nbytes]

    def _end_forward(self, unit: UnitLayout) -> list[dict[str, int]]:
        if unit is self.root:
            self.now["logits"] += self.logits.forward + self.beside
            fullest = self.nbytes
            self._give_up_page()
            return [fullest, self.nbytes]
        if unit.name in self.layers:
            layer = self.layers[unit.name]
            self.now["activations"] += layer.kept
            return self._for_a_moment({"activations": self._temporary(unit, layer)})
        return [self.nbytes]

    def _give_up_page(self) -> None:
        """Free the activations whose copy from the device to the host has finished."""
        self.now["activations"] -= self.leaving_page
        self.leaving_page = 0

    def _begin_backward(self, unit: UnitLayout) -> list[dict[str, int]]:
        self._leave_backward()
        if unit.is_head:
            return [*self._leave_loss(), *self._collect(unit)]
        if unit is self.root:
            moments = self._leave_loss()
            # The head's gradient arrives first and the embedding's last. One buffer holds both until then.
            if any(p.trainable and p.role in ("head", "other") for p in self.setting.model.root.parameters):
                moments += self._collect(unit)
            return moments
        self.now["logits"] = self.kept_logits
        self.backward_of = unit.name
        layer = self.layers.get(unit.name)
        if layer is None:
            return self._collect(unit)
        self.now["activations"] += layer.recomputed
        working, in_product = self._temporary(unit, layer), layer.in_product + self._dequantized(unit)
        first = max(working, layer.weighting)
        moments = [*self._for_a_moment({"activations": first}), *self._collect(unit, in_product)]
        return moments + self._for_a_moment({"activations": working})

    def _leave_loss(self) -> list[dict[str, int]]:
        """Return the memory peak of the loss's backward, and reduce the ledger to what remains after it."""
        self.now["logits"] = self.logits.loss + self.beside
        moments = [self.nbytes]
        self.loss_peak = max(self.loss_peak, sum(self.now.values()))
        self.now["logits"] = self.logits.head + self.beside
        return moments

    def _temporary(self, unit: UnitLayout, layer: LayerActivations) -> int:
        """Return the bytes of a layer's largest temporaries: between products, or while a 4-bit weight is unpacked."""
        return max(layer.working, layer.in_product + self._dequantized(unit))

    def _dequantized(self, unit: UnitLayout) -> int:
        """Return the bytes of the unit's largest 4-bit weight, two elements per byte, unpacked to the compute dtype."""
        packed = [b.layout.largest_numel for b in unit.buckets if b.dtype == "uint8" and b.form is None]
        return 2 * max(packed, default=0) * itemsize(self.setting.job.compute_dtype)

    def _collect(self, unit: UnitLayout, working: int = 0) -> list[dict[str, int]]:
        """Allocate the buffers for a unit's gradients. Its first gradient is in memory at the same time."""
        if not unit.trainable:
            return [self.nbytes]
        is_first = unit.name not in self.collecting
        if is_first:
            self.collecting.add(unit.name)
            self.now["reduce buffers"] += sum(self.setting.collected_nbytes(bucket) for bucket in unit.trainable)
        if self.setting.device.is_cpu:
            halves = (b.layout.largest_numel for b in unit.trainable if itemsize(b.compute_dtype) == 2)
            working += 4 * max(halves, default=0)
        largest = max(bucket.layout.largest_numel * itemsize(bucket.compute_dtype) for bucket in unit.trainable)
        moments = self._for_a_moment({"reduce buffers": largest, "activations": working})
        if is_first and unit is self.root and self.setting.model.tied:
            # Autograd holds the head's gradient until the embedding's gradient arrives, and adds the two.
            self.tied_nbytes = largest
            self.now["reduce buffers"] += largest
        return moments

    def _leave_backward(self) -> None:
        """Free the activations of the unit whose backward pass has just ended."""
        if self.backward_of is not None:
            layer = self.layers.get(self.backward_of)
            if layer is not None:
                self.now["activations"] -= layer.kept + layer.recomputed
            self.backward_of = None

    def _launch(self, unit: UnitLayout) -> list[dict[str, int]]:
        moments = []
        if unit is self.root:
            self._leave_backward()
        if unit.name not in self.collecting:
            moments = self._collect(unit)
        if self.tied_nbytes and unit is self.root:
            # The embedding's gradient, and the sum.
            moments += self._for_a_moment({"reduce buffers": 2 * self.tied_nbytes})
            self.now["reduce buffers"] -= self.tied_nbytes
            self.tied_nbytes = 0
        waiting = [g for g in self.launched if not g.is_shrunk]
        done = {id(g.bucket) for g in self.launched}
        bucket = next(bucket for bucket in unit.trainable if id(bucket) not in done)  # they are launched in order
        others = bucket.layout.world_size - 1
        extra = bucket.reduced_nbytes * others if self.setting.route.receives_apart else 0
        self.now["reduce buffers"] += extra
        self.launched.append(_Gradient(bucket, extra))
        moments.append(self.nbytes)
        for gradient in waiting:
            moments += self._shrink(gradient)
        return moments + self._accumulate_early()

    def _accumulate_early(self) -> list[dict[str, int]]:
        """Add completed gradients to the main gradient, if there is one, without waiting for the end of backward."""
        if not self.has_main_gradient or self._steps_in_backward:
            return []
        layout, moments = self.setting.layout, []
        younger = launched_until_over(layout.shard_size, layout.replicate_size)
        for gradient in self.launched[: len(self.launched) - younger]:
            if not gradient.is_added and not gradient.bucket.main_is_on_host:
                moments += self._accumulate(gradient)
                gradient.is_added = True
        return moments

    def _shrink(self, gradient: _Gradient) -> list[dict[str, int]]:
        """Reduce a gradient's memory to this rank's interval, which is copied out or stays in the buffer."""
        bucket = gradient.bucket
        summing = {"reduce buffers": self.setting.summing_nbytes(bucket)}
        moments = self._for_a_moment(summing)[:1]
        self.now["reduce buffers"] -= gradient.extra
        self.now["gradients"] += self._held_nbytes(bucket)
        if not (gradient.extra or bucket.layout.world_size == 1 or self._stays(bucket)):
            moments = self._for_a_moment(summing)[:1]  # the sum needs new memory
        self.now["reduce buffers"] -= self.setting.collected_nbytes(bucket)
        if bucket.main_is_on_host:  # the previous gradient has been copied to the host
            self.now["gradients"] -= self.leaving
            self.leaving = bucket.reduced_nbytes
        gradient.is_shrunk = True
        return moments

    def _stays(self, bucket: CountedBucket) -> bool:
        """Return whether the unsharded gradient stays allocated, because it was summed in place in shared memory."""
        is_cast = self.setting.collected_dtype(bucket) != bucket.reduce_dtype
        return self.setting.route.shares_memory and bucket.reduced_nbytes >= LONG_NBYTES and not is_cast

    def _held_nbytes(self, bucket: CountedBucket) -> int:
        """Return the bytes that stay allocated for a bucket's reduced gradient."""
        return bucket.reduce_nbytes if self._stays(bucket) else bucket.reduced_nbytes

    @property
    def _steps_in_backward(self) -> bool:
        """Return whether the optimizer steps during this backward pass, which must be the last one of the step."""
        job = self.setting.job
        is_last = not self.setting.reduces_each_micro_batch or self.micro_batch == self.micro_batches - 1
        return job.schedule.steps_in_backward and is_last

    def _finish(self) -> list[dict[str, int]]:
        """Finish all running reductions, at the first event after which all of them are known to be complete."""
        self._leave_backward()
        moments = [moment for gradient in self.launched for moment in self._accumulate(gradient)]
        self.now["gradients"] -= self.leaving
        self.leaving = 0
        if self.launched:
            self.launched = []
            self.collecting.clear()
            self.has_main_gradient = True
            self.micro_batch += 1
        return [*moments, self.nbytes]

    def _finish_one(self, unit: UnitLayout) -> None:
        """Finish the oldest reduction of the unit. Other reductions may still be running."""
        gradient = next((g for g in self.launched if any(g.bucket is bucket for bucket in unit.trainable)), None)
        if gradient is None:  # the previous micro-batch's reductions all ended with its first one
            return
        self.launched.remove(gradient)
        self._accumulate(gradient)
        self.stepping = gradient.bucket

    def _accumulate(self, gradient: _Gradient) -> list[dict[str, int]]:
        """Add the reduced gradient to the main gradient, or make it the main gradient if there is none."""
        if gradient.is_added:
            return []
        moments = [] if gradient.is_shrunk else self._shrink(gradient)
        bucket = gradient.bucket
        if bucket.main_is_on_host:
            return moments
        if self.has_main_gradient:
            self.now["gradients"] -= self._held_nbytes(bucket)
            return moments
        if bucket.main_gradient_dtype != bucket.reduce_dtype:
            self.now["gradients"] += bucket.main_gradient_nbytes - self._held_nbytes(bucket)
        if bucket.main_gradient_dtype != bucket.dtype:  # `.grad` is a copy in the stored dtype
            self.now["gradients"] += bucket.main_nbytes
        return moments

    def _bucket_step(self, nbytes: int) -> list[dict[str, int]]:
        """Update the bucket whose reduction was the last to finish, and free its gradient."""
        bucket = self.stepping
        assert bucket is not None  # noqa: S101 -- a reduction was done before
        moments = self._for_a_moment({"optimizer temporaries": self._temporaries([bucket])})
        self.now["gradients"] -= nbytes
        if bucket.main_gradient_dtype == bucket.reduce_dtype:
            self.now["gradients"] -= self._held_nbytes(bucket) - bucket.reduced_nbytes
        if bucket.main_gradient_dtype != bucket.dtype:
            self.now["gradients"] -= bucket.main_nbytes
        return [*moments, self.nbytes]

    def _optimizer_step(self) -> list[dict[str, int]]:
        if self.setting.job.schedule.steps_in_backward:
            return [self.nbytes]
        on_host = self.setting.on_host
        trained = [bucket for bucket in self.setting.layout.buckets if bucket.trainable]
        temporaries = 0 if on_host.main_weights else self._temporaries(trained)
        visiting = _state_nbytes(self.setting) if on_host.optimizer_state and not on_host.main_weights else 0
        return self._for_a_moment({"optimizer temporaries": temporaries, "optimizer state": visiting})

    def _temporaries(self, buckets: Sequence[CountedBucket]) -> int:
        """Return the bytes of temporaries that the optimizer needs to update these buckets on the device."""
        if not self.setting.job.planned_optimizer.has_temporaries:
            return 0
        matrices = self.setting.matrices
        if matrices is not None:
            pieces = max(bucket.main_nbytes for bucket in buckets)  # one bucket's pieces, received and sent back
            return matrices.owned_nbytes + matrices.working_nbytes + pieces
        if not self.setting.device.is_cpu:
            # torch: "uses ~ sizeof(params) more peak memory than the for-loop version".
            return sum(bucket.main_nbytes for bucket in buckets)
        # One parameter at a time: the square root of its second moment, and the scaled square root.
        slices = (
            bucket.layout.interval(index, 0).numel * itemsize(bucket.dtype)
            for bucket in buckets
            for index in range(len(bucket.layout.specs))
        )
        return 2 * max(slices, default=0)

    def _for_a_moment(self, extra: dict[str, int]) -> list[dict[str, int]]:
        fullest = self.nbytes
        for name, nbytes in extra.items():
            fullest[name] = fullest.get(name, 0) + nbytes
        return [fullest, self.nbytes]


def _load_peak(setting: PlanSetting, at_rest: dict[str, int]) -> dict[str, int]:
    """Return the bytes at the peak of loading. Units are materialized one at a time, and the root last."""
    nbytes = dict(at_rest)  # the first step creates the optimizer's state, but a resumed run already has it
    whole = max(sum(b.layout.full_numel * b.value_itemsize for b in unit.buckets) for unit in setting.layout.units)
    if setting.layout.shard_size > 1:
        nbytes["gathered units"] = whole
    return nbytes


def _host(setting: PlanSetting, ranks_per_host: int) -> tuple[int, int, int]:
    """Return a host's bytes for loading with fullshard, for loading with Transformers, and for training."""
    buckets, base = setting.layout.buckets, itemsize(setting.job.stored_dtype)
    whole = sum(b.layout.numel * (itemsize(b.dtype) if b.form is None else base) for b in buckets)
    largest = max(
        b.layout.largest_numel * 2 * base  # two elements in a byte
        if b.dtype == "uint8" and b.form is None
        else b.layout.largest_numel * (itemsize(b.dtype) if b.form is None else base) // b.layout.world_size
        for b in buckets
    )
    on_host = [nbytes for bucket in buckets for nbytes in bucket.host_buffers]
    shards, locked_shards = sum(on_host), sum(map(page_locked_nbytes, on_host))
    steady = locked_shards
    if setting.on_host.optimizer_state:  # created next to main weights, or page-locked because it is copied
        state = _state_nbytes(setting)
        steady += state if setting.on_host.main_weights else many_page_locked_nbytes(state)
    # All pages except the last, which never leaves the device. The page of a
    # checkpointed layer only holds its input.
    locked = many_page_locked_nbytes if setting.job.checkpointing == "none" else page_locked_nbytes
    steady += sum(locked(unit.page_nbytes) for unit in setting.layout.calls[:-1])
    # Gradients of a later micro-batch need their own buffers before they are added.
    times = 2 if setting.job.accumulation > 1 else 1
    steady += sum(times * page_locked_nbytes(b.reduced_nbytes) for b in buckets if b.trainable and b.main_is_on_host)
    # Parts of an unsharded model are freed before all shards exist, which outweighs rounding.
    loads = largest + locked_shards, whole + shards
    return loads[0] * ranks_per_host, loads[1] * ranks_per_host, steady * ranks_per_host


def _checkpoint(setting: PlanSetting) -> int:
    """Return the size of a checkpoint: all parameters in their stored dtypes, and the optimizer's state."""
    stored = sum(parameter.nbytes * parameter.tiles for parameter in setting.model.parameters)
    trained = [parameter for parameter in setting.model.parameters if parameter.trainable]
    own = sum(p.numel * (p.tiles if p.of_experts else 1) for p in trained)  # whose state is divided among all ranks
    tiles = setting.model.trainable_numel / own if own else 1.0
    return stored + round(of_parameters(setting, OptimizerRow.state_nbytes) * setting.layout.shard_size * tiles)
