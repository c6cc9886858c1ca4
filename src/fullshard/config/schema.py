"""The settings of a run as validated data. This module does not import torch, so dtypes and classes are given by name.

    RunConfig
    ├── launch      LaunchConfig      processes, hosts, rendezvous, logs
    ├── sharding    ShardingConfig    how a model is divided over the ranks
    ├── parallelism AxesConfig        how sequences are divided over the ranks
    ├── precision   PrecisionConfig   dtypes
    ├── training    TrainingConfig    the training loop around the engine
    └── checkpoint  CheckpointConfig  the contents of checkpoints

An unknown field, a value of the wrong type, or an unsupported combination raises a `ConfigError`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from fullshard.config.axes import AxesConfig
from fullshard.config.settings import ANY_CASE, CombinationError, Settings, plain_message, setting
from fullshard.config.sharding import ShardingConfig
from fullshard.core.dtypes import AUTOCAST, COMPUTE, saves
from fullshard.core.errors import ConfigError
from fullshard.core.paths import check_path

PrecisionMode = Literal["no", "fp32", "bf16", "fp16", "fp8"]
Dtype = Literal["float32", "bfloat16", "float16"]
Packing = Literal["int8", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
RendezvousBackend = Literal["c10d", "static"]
StateDictType = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]
CheckpointFormat = Literal["native", "dcp"]
OnNonFinite = Literal["raise", "skip", "off"]
OnReplicas = Literal["raise", "off"]


_DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


class PrecisionConfig(Settings):
    """The dtypes of a run. Main weights and optimizer state are float32 in every mode except `no`.

    | mode | main weights | compute | gradients reduced in |
    |---|---|---|---|
    | `no` | the model's dtype | the model's dtype | float32, or the model's dtype if it is wider |
    | `fp32` | float32 | float32 | float32 |
    | `bf16` | float32 | bfloat16 | float32 |
    | `fp16` | float32 | float16, scaled loss | float32 |
    | `fp8` | float32 | bfloat16, products of linear layers in 8 bits by torchao | float32 |
    """

    mode: PrecisionMode = setting(
        "no",
        ask="Which precision?",
        answers={
            "bf16": "bf16: computes in bfloat16, keeps float32 weights and optimizer state",
            "fp16": "fp16: computes in float16 with a scaled loss; for GPUs without bfloat16",
            "fp32": "fp32: everything in float32",
            "fp8": "fp8: as bf16, but torchao multiplies in 8 bits in linear layers; for recent GPUs",
            "no": "no: keep the model's dtypes",
        },
    )
    """The dtype in which forward and backward compute. Main weights are float32, except with `no`, which keeps the
    model's dtypes. With fp16, the loss is scaled. With fp8, inner linear layers multiply in 8 bits."""

    param_dtype: Dtype | None = None
    """Compute dtype of parameters and inputs. None: the mode's dtype."""

    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced over the ranks. None: the mode's dtype."""

    gather_as: Packing | None = None
    """Dtype to which weights are rounded before they are gathered, which takes a quarter or half the bytes of float32.
    Every rank computes with the rounded weights, but main weights and checkpoints stay exact. It has no effect between
    ranks that share memory, because nothing is sent. None: weights are sent in the compute dtype."""

    reduce_as: Packing | None = None
    """Dtype to which gradients are rounded before they are sent along the shard axis. They are still summed in
    `reduce_dtype`. None: gradients are sent in `reduce_dtype`."""

    output_dtype: Dtype | None = None
    """Dtype to which the model's floating-point outputs are cast. None: float32 in the modes bf16, fp16 and fp8."""

    buffer_dtype: Dtype | None = None
    """Dtype to which floating-point buffers are cast. None: no cast, which is right for rotary tables and norms."""

    cast_inputs: bool = True
    """Whether floating-point inputs of each unit are cast to the compute dtype."""

    fp8_all_gather: bool = True
    """Whether the weights of layers that compute in 8 bits are also gathered in 8 bits, with one scale per weight."""

    fp8_pad_inner_dim: bool = True
    """Whether torchao pads the operands of products in 8 bits whose inner dimension is no multiple of 16."""

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_alias(cls, value: object) -> object:
        # YAML reads an unquoted `no` as false.
        if value is None or value is False:
            return "no"
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator(
        "param_dtype", "reduce_dtype", "gather_as", "reduce_as", "output_dtype", "buffer_dtype", mode="before"
    )
    @classmethod
    def _dtype_alias(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        name = value.strip().lower().removeprefix("torch.")
        return _DTYPE_ALIASES.get(name, name)

    @model_validator(mode="after")
    def _packs(self) -> Self:
        for name, sent_as, other, dtype in (
            ("gather_as", self.gather_as, "param_dtype", self.compute_dtype),
            ("reduce_as", self.reduce_as, "reduce_dtype", self.reduce_dtype),
        ):
            if sent_as is not None and dtype is not None and not saves(sent_as, dtype):
                what = f"{name} = {sent_as} has no benefit because without it, messages are sent in {dtype}"
                raise CombinationError(what, name, other, hint=f"remove {name}")
        if self.mode != "fp8" and not (self.fp8_all_gather and self.fp8_pad_inner_dim):
            off = "fp8_pad_inner_dim" if self.fp8_all_gather else "fp8_all_gather"
            raise CombinationError(f"{off} = false applies to the mode fp8 only", "mode", off, hint=f"remove {off}")
        return self

    @property
    def compute_dtype(self) -> str | None:
        """Return the dtype to which parameters are cast for compute, or None if they keep the dtype of the model."""
        return self.param_dtype or COMPUTE[self.mode]

    @property
    def result_dtype(self) -> Dtype | None:
        """Return the dtype to which the model's outputs are cast, or None if they are not cast."""
        return self.output_dtype or ("float32" if self.mode in AUTOCAST else None)


class LaunchConfig(Settings):
    """Settings for where and how the processes of a job are started."""

    num_processes: int | None = setting(
        None, ge=1, le=10**6, ask="How many processes over all hosts? (empty: one per device, when the job starts)"
    )
    """Total number of processes over all hosts. None: one per device, or on CPUs 2 per host if it has 2 cores."""

    num_machines: int = setting(1, ge=1, le=10**6, ask="How many hosts?")
    """Number of hosts."""

    min_machines: int | None = Field(default=None, ge=1, le=10**6)
    """Minimum number of hosts with which the job continues when others are lost (`--nnodes MIN:MAX`). It grows again
    when hosts return. None: all hosts."""

    machine_rank: int | None = Field(default=None, ge=0)
    """Rank of this host, from 0. The static rendezvous on several hosts requires it."""

    main_process_ip: str | None = setting(
        None, ask="Address of the first host? (empty: set by --main_process_ip or by Slurm)"
    )
    """Address of the host with machine rank 0. Required on several hosts."""

    main_process_port: int | None = setting(
        None, ge=0, le=65535, ask="Port of the first host that the other hosts can reach?"
    )
    """Port of the rendezvous on the main host. 0 (only for a single host) selects a free port. None: 29500 on several
    hosts, else 0."""

    rdzv_backend: RendezvousBackend | None = None
    """How hosts find each other: `static` by machine rank, `c10d` in any order and after restarts. None: `static` if
    `machine_rank` is set, else `c10d`."""

    rdzv_id: str | None = None
    """Name of the job, which must be the same on every host."""

    rdzv_conf: str = ""
    """Seconds to wait for other hosts: `join_timeout=600,last_call_timeout=30`. The first is for the minimum number of
    hosts, and the second for further hosts after these have joined."""

    max_restarts: int = Field(default=0, ge=0, le=10**6)
    """Maximum number of times that all processes are restarted after one has failed."""

    monitor_interval: float = Field(default=0.1, gt=0, le=10**9)
    """Seconds between two checks of the processes."""

    grace_period: float = Field(default=25.0, gt=0, le=10**9)
    """Seconds that processes have to save and exit after the launcher receives SIGTERM, SIGINT, SIGUSR1 or SIGUSR2."""

    timeout: float | None = Field(default=None, gt=0, le=10**9)
    """Seconds that a rank waits for another before it fails. None: 120 after the first step, or longer if steps are
    slow; 1800 before that, in saves, and while another rank saves or compiles."""

    device: Device = setting(
        "auto",
        ask="What will the job run on?",
        answers={
            "cuda": "NVIDIA GPUs",
            "cpu": "processors",
            "auto": "the devices that the machine has when the job starts",
        },
    )
    """Device to compute on; `auto` prefers an accelerator and falls back to the CPU."""

    gpu_ids: tuple[str, ...] | None = None
    """Accelerators of this host to use. None: all accelerators."""

    num_cpu_threads_per_process: int | None = Field(default=None, ge=1, le=10**6)
    """Number of threads per process. None: the host's processors divided by the number of processes."""

    log_dir: str | None = None
    """Directory for each rank's standard output and error."""

    role: str = "default"
    """Name of the processes, which is set as ROLE_NAME."""

    debug: bool = False
    """Whether collectives are compared between ranks at run time (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""

    @property
    def is_elastic(self) -> bool:
        """Return whether hosts may join and leave the job while it runs."""
        return self.min_machines is not None and self.min_machines < self.num_machines

    @field_validator("device", mode="before")
    @classmethod
    def _is_no_tpu(cls, value: object) -> object:
        if value == "tpu":
            raise ValueError("tpu is not supported because PyTorch/XLA's own launcher starts TPU jobs; see docs/xla.md")
        return value

    @field_validator("log_dir")
    @classmethod
    def _is_local(cls, value: str | None) -> str | None:
        if value is not None:
            check_path(value)  # passed on as written, because `~` is the home on the host that starts the processes
        return value

    @field_validator("gpu_ids", mode="before")
    @classmethod
    def _split_ids(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str):
            value = None if value.strip().lower() == "all" else value.split(",")
        if not isinstance(value, list | tuple):
            return value
        ids = tuple(str(item).strip() for item in value)
        if twice := [name for name in ids if ids.count(name) > 1]:
            raise ValueError(f"gpu_ids contains {twice[0]} twice, but each process needs a separate device")
        return ids

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.machine_rank is not None and self.machine_rank >= self.num_machines:
            raise CombinationError(
                f"machine_rank is {self.machine_rank}, but num_machines is {self.num_machines}",
                "machine_rank",
                "num_machines",
                hint="use a machine rank from 0 to num_machines - 1",
            )
        if self.num_processes is not None and self.num_processes % self.num_machines:
            raise CombinationError(
                f"num_processes = {self.num_processes} is not a multiple of num_machines = {self.num_machines}",
                "num_processes",
                "num_machines",
                hint="set num_processes, the total over all hosts, to a multiple of num_machines",
            )
        if self.min_machines is not None and self.min_machines > self.num_machines:
            raise CombinationError(
                f"min_machines = {self.min_machines} is more than num_machines = {self.num_machines}",
                "min_machines",
                "num_machines",
                hint="set num_machines to the maximum number of hosts",
            )
        if self.is_elastic and (self.machine_rank is not None or self.rdzv_backend == "static"):
            raise CombinationError(
                "a job with a variable number of hosts cannot have a fixed machine rank",
                "min_machines",
                "rdzv_backend" if self.machine_rank is None else "machine_rank",
                hint="remove it; ranks follow the order in which hosts join",
            )
        if self.num_machines > 1 and self.main_process_port == 0:
            what = "with main_process_port = 0, one host would choose a port that the others do not know"
            raise CombinationError(what, "main_process_port", "num_machines", hint="set a port, for example 29500")
        if self.rdzv_backend == "static" and self.num_machines > 1 and self.machine_rank is None:
            raise CombinationError(
                "the static rendezvous of several hosts requires machine_rank",
                "rdzv_backend",
                "machine_rank",
                hint="set --machine_rank on each host, or use rdzv_backend: c10d",
            )
        return self


class TrainingConfig(Settings):
    """Settings for the training loop around the engine."""

    gradient_accumulation_steps: int = setting(1, ge=1, ask="Micro-batches per optimizer step? (gradient accumulation)")
    """Micro-batches per optimizer step."""

    gradient_clipping: float | None = Field(default=None, gt=0, allow_inf_nan=True)
    """Norm to which the gradients of an optimizer are clipped before its step; infinity disables clipping. None: the
    script decides."""

    step_in_backward: bool = False
    """Whether the optimizer updates every bucket within backward as soon as its gradient is final, and then frees the
    gradient, so that the gradients of all buckets never exist at the same time. Only for torch's element-wise
    optimizers, without clipping or fp16."""

    nonfinite_gradients: OnNonFinite = "raise"
    """What happens to an optimizer step if gradients on any rank contain NaN or infinity: `raise` raises an error on
    all ranks before anything changes, `skip` skips the step, and `off` disables the check. With a loss scale, overflows
    are left to the scaler."""

    nonfinite_limit: int = Field(default=10, ge=1)
    """Number of consecutive steps that may be skipped before an error is raised."""

    replica_check: OnReplicas = "raise"
    """What happens if the weights of replicas (NO_SHARD, HYBRID_SHARD) differ, for example because of a bit flip:
    `raise` raises an error on all ranks that names rank, host and parameter, and `off` disables the check."""

    compare_every: int = Field(default=100, ge=0)
    """Number of steps between comparisons of the ranks, which check that replicas hold the same weights and find ranks
    slower than 0.7 of the median. Replicas are also compared before each save. 0: never."""


class CheckpointConfig(Settings):
    """Settings for the contents of checkpoints."""

    state_dict_type: Annotated[StateDictType, ANY_CASE] = setting(
        "SHARDED_STATE_DICT",
        ask="How should a model be saved?",
        answers={
            "SHARDED_STATE_DICT": "one part per rank: fast, and loads at any number of ranks",
            "LOCAL_STATE_DICT": "the same, but get_state_dict returns the part of each rank",
            "FULL_STATE_DICT": "also unsharded weights: gathered on rank 0, slower, needs memory there",
        },
    )
    """Whether a model is saved as one part per rank (SHARDED, LOCAL, which differ in `get_state_dict`) or unsharded."""

    format: CheckpointFormat = "native"
    """Whether torch's distributed format, in Accelerate's layout, is also written, for tools that expect it."""

    async_save: bool = False
    """Whether training continues while a checkpoint is written from a copy in host memory."""

    max_lost_steps: int | None = Field(default=None, ge=1)
    """Maximum number of steps that a kill may lose. Copies of the state in the memory of this host and the next one are
    updated twice as often, and restarts continue from them. None: no copies."""


class RunConfig(Settings):
    """All settings of a run."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """Processes, hosts, rendezvous, logs."""

    sharding: ShardingConfig = Field(default_factory=ShardingConfig)
    """Division of a model over the ranks."""

    parallelism: AxesConfig = Field(default_factory=AxesConfig)
    """Division of sequences over the ranks."""

    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """Dtypes."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """Training loop around the engine."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Contents of checkpoints."""

    @model_validator(mode="after")
    def _steps_in_backward(self) -> Self:
        training, precision = self.training, self.precision
        of_float16 = "precision.mode" if precision.mode == "fp16" else "precision.param_dtype"
        clips, skips = training.gradient_clipping is not None, training.nonfinite_gradients == "skip"
        for other, is_set, why in (
            ("training.gradient_clipping", clips, "the norm of all gradients is known"),
            ("training.nonfinite_gradients", skips, "it is decided whether to skip the step"),
            (of_float16, precision.compute_dtype == "float16", "overflows in float16 are known"),
        ):
            if training.step_in_backward and is_set:
                what = f"step_in_backward consumes each gradient before {why}"
                raise CombinationError(what, "training.step_in_backward", other, hint="remove one of the two")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        row = self.sharding.resolved_strategy()
        for name in ("gather_as", "reduce_as"):
            if getattr(self.precision, name) is not None and not row.shards:
                raise CombinationError(
                    f"{name} rounds messages along the shard axis, but {self.sharding.strategy} has no shard axis",
                    f"precision.{name}",
                    "sharding.strategy",
                    hint=f"use FULL_SHARD or SHARD_GRAD_OP, or remove {name}",
                )
        size, launch = self.sharding.shard_size, self.launch
        if row.is_hybrid and size is None and launch.num_machines == 1 and launch.num_processes:
            raise CombinationError(
                f"{self.sharding.strategy} on one host without shard_size would form a single shard group with no "
                "replicas",
                "sharding.strategy",
                "sharding.shard_size",
                hint="set shard_size to the number of ranks per shard group, or use FULL_SHARD",
            )
        if launch.num_processes is not None:
            per_host = launch.num_processes // launch.num_machines
            try:
                _, size = row.mesh_shape(launch.num_processes, self.sharding.resolved_shard_size(per_host))
                self.parallelism.check_shards(size)
            except ConfigError as error:
                names = getattr(error, "settings", ("sharding.shard_size", "launch.num_processes"))
                raise CombinationError(plain_message(error), *names, hint=error.hint) from None
        return self

    def value(self, path: str) -> Any:
        """Return the value of the setting at `path`."""
        group, name = path.split(".")
        return getattr(getattr(self, group), name)

    @classmethod
    def of_paths(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from a mapping of paths (`group.name`) to values, or raise `SettingsError`."""
        groups: dict[str, Any] = {group: model(**settings_of(group, values)) for group, model in GROUPS.items()}
        return cls(**groups)


GROUPS = {name: cast("type[Settings]", field.annotation) for name, field in RunConfig.model_fields.items()}
"""The groups of a `RunConfig`."""

SETTINGS: dict[str, FieldInfo] = {
    f"{group}.{name}": field for group, model in GROUPS.items() for name, field in model.model_fields.items()
}
"""Every setting in the order of the schema, by its path, `group.name`."""


def settings_of(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that belong to one group, by setting name. `values` is keyed by path."""
    return {path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{group}.")}
