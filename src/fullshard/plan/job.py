"""What is to be planned besides the model and the hardware: each choice once, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fullshard.core.dtypes import COMPUTE, Dtypes
from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.core.strategy import Strategy, parse_strategy
from fullshard.plan.schedule import ScheduleOptions

if TYPE_CHECKING:
    from fullshard.config.schema import RunConfig

Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "sgd", "sgd-momentum", "none"]
Method = Literal["full", "lora", "qlora"]
Checkpointing = Literal["none", "selective", "full"]
Attention = Literal["flash", "sdpa", "eager"]
Loss = Literal["eager", "fused"]
Precision = Literal["no", "fp32", "bf16", "fp16"]
BaseDtype = Literal["float32", "bfloat16", "float16"]
Packing = Literal["int8", "bfloat16"]

STATE_NBYTES = {
    "adamw": 8.0,
    "adamw-fused": 8.0,
    # One byte per state and element, and a float32 scale per block of 256 (bitsandbytes' blockwise 8-bit optimizers).
    "adamw-8bit": 2.0 + 2 * 4 / 256,
    "sgd": 0.0,
    "sgd-momentum": 4.0,
    "none": 0.0,
}
"""Bytes of optimizer state per trained parameter, in float32 main weights."""


class Job(BaseModel):
    """A training run to plan. Build it with `Job.of`, which turns what pydantic finds into a `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: str = Field("FULL_SHARD", description="A row of the strategy table, by name or number")
    shard_size: int | None = Field(None, ge=1, description="Ranks per shard group, for the hybrid strategies")
    reshard_after_forward: Literal["strategy", "auto"] = Field(
        "strategy", description="auto keeps as many units unsharded between forward and backward as fit"
    )
    unsharded_memory_gib: float | None = Field(None, ge=0, description="GiB that auto may use. Default: what is free")
    wrap_embeddings: bool = Field(False, description="The input embedding and the head are units of their own")
    precision: Precision = Field("bf16", description="bf16, fp16, fp32, or no: compute as stored")
    reduce_dtype: BaseDtype | None = Field(None, description="Gradients are summed in this. Default: float32 or wider")
    gather_as: Packing | None = Field(None, description="Weights are rounded to this when sent: int8 or bfloat16")
    reduce_as: Packing | None = Field(None, description="Gradients are rounded to this when sent: int8 or bfloat16")
    optimizer: Optimizer = Field("adamw", description="adamw, adamw-fused, adamw-8bit, sgd, sgd-momentum or none")
    method: Method = Field("full", description="full, lora, or qlora: frozen base in 4 bits")
    lora_rank: int = Field(8, ge=1, description="Rank of the adapters")
    lora_targets: str = Field("all-linear", description="Linear layers that get one: all-linear, or q_proj,v_proj,...")
    base_dtype: BaseDtype = Field("bfloat16", description="In which the frozen base of lora and qlora is stored")
    offload: bool = Field(False, description="The next three in host memory")
    offload_compute_shards: bool | None = Field(None, description="What units are gathered from in host memory")
    offload_main_weights: bool | None = Field(None, description="Main weights there, and updated there")
    offload_optimizer_state: bool | None = Field(None, description="Optimizer state there; alone, it visits the device")
    offload_activations: bool = Field(False, description="What layers keep for backward; checkpointed, their inputs")
    checkpointing: Checkpointing = Field("none", description="Activation checkpointing: none, selective or full")
    reentrant: bool = Field(False, description="Its older implementation; the same memory and events")
    compile: bool = Field(False, description="Each unit's forward is compiled")
    micro_batch: int = Field(1, ge=1, description="Sequences per rank and forward pass")
    seq_len: int = Field(2048, ge=1, description="Tokens per sequence")
    accumulation: int = Field(1, ge=1, description="Micro-batches per optimizer step")
    sync_each_micro_batch: bool = Field(True, description="Reduce gradients after each micro-batch (else: no_sync)")
    step_in_backward: bool = Field(False, description="Each bucket is stepped in backward, its gradient freed at once")
    attention: Attention = Field("flash", description="flash or sdpa, which keep no scores, or eager, which does")
    loss: Loss = Field("eager", description="eager keeps whole logits; fused computes the loss in chunks")
    forward_prefetch: bool = Field(True, description="Gather the next unit while one runs forward")
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = Field(
        "BACKWARD_PRE", description="BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"
    )

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_strategy(cls, value: Any) -> str:
        return parse_strategy(value).name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.reentrant and self.checkpointing != "full":
            raise ConfigError("reentrant is an implementation of checkpointing = full, which is not set")
        if self.unsharded_memory_gib is not None and self.reshard_after_forward != "auto":
            raise ConfigError("unsharded_memory_gib is a budget for reshard_after_forward = auto, which is not set")
        if self.reshard_after_forward == "auto" and not self.row.reshard_after_forward:
            raise ConfigError(
                f"reshard_after_forward = auto decides which units are kept, and {self.strategy} keeps all",
                hint="use FULL_SHARD or HYBRID_SHARD",
            )
        if self.on_host.has_shards and not self.row.shards:
            raise ConfigError(
                f"{self.on_host} on the host: {self.strategy} shards nothing", hint="use FULL_SHARD or SHARD_GRAD_OP"
            )
        self._check_step_in_backward()
        if self.method == "qlora" and self.base_dtype == "float32" and self.precision in ("bf16", "fp16"):
            raise ConfigError("qlora computes in half precision with a float32 base", hint="use base_dtype bfloat16")
        return self

    def _check_step_in_backward(self) -> None:
        if not self.step_in_backward:
            return
        if self.optimizer == "adamw-8bit":
            raise ConfigError("step_in_backward is for torch's own optimizers, and adamw-8bit is none")
        if self.precision == "fp16":
            raise ConfigError("step_in_backward with fp16: all gradients together tell whether a step is left out")
        if self.on_host.optimizer_state:
            raise ConfigError("step_in_backward with main weights or optimizer state on the host is not supported")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A job from its settings.

        Raises:
            ConfigError: an unknown setting, with the one it resembles; or a wrong value.
        """
        for name in values:
            if name not in cls.model_fields:
                from fullshard.config.settings import suggestion  # a fifth of the start-up time

                raise ConfigError(f"unknown setting {name!r} of a plan", hint=suggestion(name, cls.model_fields))
        try:
            return cls(**values)
        except ValidationError as error:
            lines = []
            for item in error.errors():
                where = ".".join(str(part) for part in item["loc"])
                lines.append(f"{where}: {item['msg']}, got {item['input']!r}" if where else str(item["msg"]))
            raise ConfigError("; ".join(lines).replace("Value error, ", "")) from None

    @classmethod
    def from_run(cls, config: RunConfig, **values: Any) -> Self:
        """The job that a run's configuration describes; `values` are what it does not say (batch, sequence, ...)."""
        sharding, precision = config.sharding, config.precision
        said = {
            "strategy": sharding.resolved_strategy().name,
            "shard_size": sharding.shard_size,
            "reshard_after_forward": "auto" if sharding.reshard_after_forward == "auto" else "strategy",
            "wrap_embeddings": sharding.wrap_embeddings,
            "unsharded_memory_gib": sharding.unsharded_memory_gib,
            "precision": precision.mode,
            "reduce_dtype": precision.reduce_dtype,
            "gather_as": precision.gather_as,
            "reduce_as": precision.reduce_as,
            "offload": sharding.cpu_offload,
            "offload_compute_shards": sharding.offload_compute_shards,
            "offload_main_weights": sharding.offload_main_weights,
            "offload_optimizer_state": sharding.offload_optimizer_state,
            "offload_activations": sharding.offload_activations,
            "checkpointing": sharding.activation_checkpointing_mode if sharding.activation_checkpointing else "none",
            "reentrant": sharding.activation_checkpointing_reentrant,
            "compile": sharding.compile,
            "accumulation": config.training.gradient_accumulation_steps,
            "step_in_backward": config.training.step_in_backward,
            "forward_prefetch": sharding.forward_prefetch,
            "backward_prefetch": sharding.backward_prefetch,
        }
        return cls.of({**said, **values})

    @property
    def row(self) -> Strategy:
        """The strategy's row."""
        return parse_strategy(self.strategy)

    @property
    def on_host(self) -> Offload:
        """What lives in host memory, on a device that is not the host itself."""
        return Offload.of(
            self.offload,
            self.offload_compute_shards,
            self.offload_main_weights,
            self.offload_optimizer_state,
            self.offload_activations,
        )

    @property
    def dtypes(self) -> Dtypes:
        """Dtypes by role."""
        return Dtypes(COMPUTE[self.precision], self.reduce_dtype, self.gather_as, self.reduce_as)

    @property
    def compute_dtype(self) -> str:
        """Dtype activations are in."""
        stored = "float32" if self.method == "full" else self.base_dtype
        return COMPUTE[self.precision] or stored

    @property
    def schedule(self) -> ScheduleOptions:
        """What decides the order of work."""
        return ScheduleOptions(
            self.accumulation,
            self.forward_prefetch,
            self.backward_prefetch,
            self.sync_each_micro_batch,
            self.step_in_backward,
            state_nbytes=STATE_NBYTES[self.optimizer],
        )

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.seq_len
