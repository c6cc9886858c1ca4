"""Small option classes under Accelerate's names. Accelerate's own classes are accepted in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from fullshard.api.refused import HANDLERS
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_name


class DistributedType(str, Enum):  # noqa: UP042  as text it is `DistributedType.FSDP`, as Accelerate's
    """The way a model is distributed; scripts compare with it. Here it is always FSDP."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


@dataclass(slots=True)
class DataLoaderConfiguration:
    """The division of data loaders over the ranks.

    Attributes:
        split_batches: a loader's batch size is that of all ranks together, not of each.
        dispatch_batches: rank 0 reads the batches of all ranks and sends each its own. Default: for iterable datasets,
            which may give every rank another order; with False every rank reads its own, so all must read the same.
        even_batches: fill up an incomplete last step, so that all ranks have as many batches. Not filled up they are
            for `join_uneven_inputs`, or for loops without a sharded model.
        use_seedable_sampler: no choice: samplers are always seeded with seed + epoch.
        data_seed: base seed of shuffling; by default torch's initial seed on rank 0.
        non_blocking: copy batches to the device without waiting.
        use_stateful_dataloader: no choice: loaders always have `state_dict` and `load_state_dict`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """The way gradients are accumulated.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: no choice: schedulers step with the optimizer.
        sync_with_dataloader: end the step at the end of an epoch, however many micro-batches it has.
        sync_each_batch: no choice: every micro-batch is reduced into the sharded gradient.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass(slots=True)
class ProjectConfiguration:
    """The place that `save_state` writes to.

    Attributes:
        project_dir: base directory.
        logging_dir: kept for scripts that read it; the base directory by default.
        automatic_checkpoint_naming: number checkpoints under `project_dir/checkpoints`.
        total_limit: checkpoints to keep; the oldest goes after the new one is complete.
        iteration: number of the next checkpoint.
        save_on_each_node: must not be true: a checkpoint lives in storage that all hosts share.
        async_save: training goes on while `save_state` writes; not in Accelerate.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.project_dir is not None:
            self.project_dir = local_name(self.project_dir)
        self.logging_dir = self.project_dir if self.logging_dir is None else local_name(self.logging_dir)


@dataclass(slots=True)
class GradScalerKwargs:
    """Arguments of the loss scaler for fp16; see `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(slots=True)
class AutocastKwargs:
    """Arguments of the autocast around the model; `enabled=False` leaves only the dtypes of the precision policy."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(slots=True)
class InitProcessGroupKwargs:
    """Arguments of the process group.

    Attributes:
        timeout: how long a collective waits for the other ranks.
        backend: no choice: CUDA has `nccl` and a CPU `gloo`, whichever of these is named. Another one is an error.
        init_method: must be None or `env://`: the launcher's variables say where to meet.
    """

    timeout: timedelta | None = None
    backend: str | None = None
    init_method: str | None = None


@dataclass(slots=True)
class DistributedDataParallelKwargs:
    """Arguments for torch's DDP. They have no effect, which is said: a model is sharded and not replicated by DDP."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass
class ParallelismConfig:
    """The number of ranks that share a model, and of its replicas.

    Attributes:
        dp_replicate_size: replicas of the model.
        dp_shard_size: ranks over which a replica is sharded.
        tp_size: ranks over which the script has split parameters before, by tensor parallelism. The three together are
            all ranks; neighbouring ranks are those of one tensor-parallel group.
        cp_size, sp_size: must be 1: context and sequence parallelism are not supported.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks with batches of their own."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that compute on the same batch."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def total_size(self) -> int:
        """All ranks."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes of `Accelerator.torch_device_mesh` along which batches differ."""
        return self._several("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which they are the same."""
        return self._several("tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes that are `dp_shard_cp`, over which a replica is sharded."""
        return self._several("dp_shard")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes that are `dp_cp`, over which losses are averaged."""
        return self.dp_dim_names

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes over which a model is sharded and replicated."""
        return [*self._several("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes of several ranks."""
        return self.dp_dim_names + self.non_dp_dim_names

    def to_json(self) -> dict[str, int]:
        """Return the sizes; Transformers puts them among its arguments in a log."""
        return dataclasses.asdict(self)

    def _several(self, *axes: str) -> list[str]:
        return [axis for axis in axes if getattr(self, f"{axis}_size") > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether there are several replicas."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether a replica is sharded."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether there is tensor parallelism."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Return whether context parallelism is asked for."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Return whether sequence parallelism is asked for."""
        return self.sp_size > 1


@dataclass(slots=True)
class ProfileKwargs:
    """Arguments of torch's profiler for `Accelerator.profile`; see `torch.profiler.profile`.

    Attributes:
        activities: `cpu`, `cuda`, ...; None: all there are.
        schedule_option: arguments of `torch.profiler.schedule`.
        on_trace_ready: called with the profiler when a cycle of the schedule ends.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: what is recorded.
        output_trace_dir: every rank leaves a trace here.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The `kwargs_handlers` of an Accelerator, sorted out.

    Attributes:
        scaler: arguments for the loss scaler.
        autocast: whether the model and `autocast()` use autocast, and its weight cache.
        timeout_seconds: of the process group; None: the default.
        given: the handlers, by the names of their classes.
        notes: what has no effect, and why.
    """

    scaler: dict[str, Any]
    autocast: AutocastKwargs
    timeout_seconds: float | None
    given: dict[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, handlers: list[Any] | None) -> Handlers:
        """Sort handlers by the name of their class, so that Accelerate's own serve as well.

        Raises:
            ConfigError: a handler, or a value of one, that nothing here uses; two of one kind.
        """
        if not isinstance(handlers, Iterable | None):
            raise ConfigError(
                f"kwargs_handlers: expected a list of handlers, got {type(handlers).__name__}",
                hint="put it into a list",
            )
        named = [(type(handler).__name__, handler) for handler in handlers or ()]
        given = dict(named)
        if len(given) != len(named):
            raise ConfigError(f"kwargs_handlers has two of one kind: {', '.join(name for name, _ in named)}")
        scaler: dict[str, Any] = {}
        autocast, timeout, notes = AutocastKwargs(), None, []
        for name, handler in given.items():
            match name:
                case "GradScalerKwargs":
                    scaler = {
                        field.name: getattr(handler, field.name) for field in dataclasses.fields(GradScalerKwargs)
                    }
                case "AutocastKwargs":
                    autocast = AutocastKwargs(handler.enabled, handler.cache_enabled)
                case "InitProcessGroupKwargs":
                    _check_process_group(handler)
                    timeout = handler.timeout.total_seconds() if handler.timeout is not None else None
                case "DistributedDataParallelKwargs":
                    _check_no_hook(handler)
                    notes.append(f"{name}: no effect, the model is sharded and not replicated by DDP")
                case "ProfileKwargs":
                    pass  # read by `Accelerator.profile`
                case _:
                    raise ConfigError(
                        f"kwargs handler {name} has no meaning here",
                        hint=HANDLERS.get(name, "GradScalerKwargs, AutocastKwargs and InitProcessGroupKwargs are used"),
                    )
        return cls(scaler, autocast, timeout, given, tuple(notes))


def _check_process_group(handler: Any) -> None:
    if handler.init_method not in (None, "env://"):
        raise ConfigError(
            f"InitProcessGroupKwargs.init_method = {handler.init_method!r} is not supported",
            hint="ranks meet where the launcher's variables say; or make the process group before the Accelerator",
        )
    if handler.backend not in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
        raise ConfigError(
            f"InitProcessGroupKwargs.backend = {handler.backend!r} is not supported",
            hint="CUDA gets nccl and a CPU gloo; or make the process group before the Accelerator",
        )


def _check_no_hook(handler: Any) -> None:
    hooks = [getattr(handler, name, None) for name in ("comm_hook", "comm_wrapper")]
    if any(str(getattr(hook, "value", hook)) not in ("None", "no") for hook in hooks):
        raise ConfigError(
            "DistributedDataParallelKwargs.comm_hook: gradients are not reduced by DDP",
            hint="precision.reduce_as = bfloat16 in the launcher's configuration rounds what is sent",
        )
