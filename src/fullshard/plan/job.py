"""The planner's inputs other than the model and the hardware, defined once for the command line and for Python."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from fullshard.config import values
from fullshard.config.schema import Dtype, Packing, PrecisionMode, RunConfig
from fullshard.config.sharding import BackwardPrefetch, Form, kept_or_auto
from fullshard.config.view import View, of_run
from fullshard.core.dtypes import AUTOCAST, COMPUTE, Dtypes, main_dtype
from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.core.strategy import Strategy, parse_strategy
from fullshard.plan.optimizers import OPTIMIZERS, OptimizerRow
from fullshard.plan.schedule import ScheduleOptions

Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "muon", "sgd", "sgd-momentum", "none"]
Method = Literal["full", "lora", "qlora"]
Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["eager", "plain", "kernel", "fused"]
Experts = Literal["grouped", "eager", "kernel"]
Kernel = Literal["flash", "flash3", "flash4", "sdpa", "eager"]


BALANCE = 1.25
"""The assumed imbalance of expert parallelism: the capacity factor with which ST-MoE trains, above which it drops the
tokens of an expert (arXiv 2202.08906). It is not a measurement of any router."""

KEEP_WHAT_FITS = {"reshard_after_forward": "auto"}
"""The value for keeping as many units unsharded after forward as memory allows."""


def token_count(value: Any) -> Any:
    """Convert a text such as `128k` to a number of tokens, where k means 1024. Return other values unchanged."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+)\s*k\s*", value, re.IGNORECASE)
    return int(found[1]) * 1024 if found else values.integer(value)


def _checkpointing(kind: str) -> Mapping[str, Any]:
    return {
        "sharding.activation_checkpointing": kind != "none",
        "sharding.activation_checkpointing_mode": "selective" if kind == "selective" else "full",
    }


class Job(View):
    """A training run to plan."""

    subject: ClassVar[str] = "a plan"

    strategy: str = of_run("sharding.strategy")
    shard_size: int | None = of_run("sharding.shard_size")
    reshard_after_forward: Literal["strategy", "auto"] = of_run(
        "sharding.reshard_after_forward",
        "strategy",
        "auto keeps as many units unsharded between forward and backward as fit",
        read=kept_or_auto,
    )
    unsharded_memory_gib: float | None = of_run("sharding.unsharded_memory_gib")
    wrap_embeddings: bool = of_run("sharding.wrap_embeddings")
    precision: PrecisionMode = of_run("precision.mode", "bf16", "bf16, fp16, fp32, fp8 (as bf16), or no (as stored)")
    reduce_dtype: Dtype | None = of_run("precision.reduce_dtype")
    gather_as: Packing | None = of_run("precision.gather_as")
    reduce_as: Packing | None = of_run("precision.reduce_as")
    tp: int = Field(
        1, ge=1, description="Ranks of a tensor-parallel group, which split each layer; the rest shard what they have"
    )
    cp: int = of_run("parallelism.cp_size", 1, "Ranks that share each sequence by ring attention (context parallelism)")
    sp: int = of_run("parallelism.sp_size", 1, "Ranks that share each sequence by its heads (Ulysses)")
    ep: int = Field(1, ge=1, description="Ranks that divide the experts of each layer (expert parallelism)")
    ep_imbalance: float = Field(
        BALANCE, ge=1, description="Tokens of the busiest expert-parallel rank, divided by the average of its group"
    )
    optimizer: Optimizer = Field("adamw", description="adamw, adamw-fused, adamw-8bit, muon, sgd, sgd-momentum or none")
    method: Method = Field(
        "full",
        description="full, lora, or qlora: frozen base in 4 bits, by bitsandbytes' layers and, for experts, at rest",
    )
    quantize: Form | None = of_run("sharding.quantize")
    lora_rank: int | None = Field(None, ge=1, description="Rank of the adapters of lora and qlora. Default: 8")
    lora_targets: str | None = Field(
        None, description="Linear layers that get one: all-linear, or q_proj,v_proj,... Default: all-linear"
    )
    lora_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout of what adapters read, each of which then keeps a copy. Default: 0"
    )
    base_dtype: Dtype | None = Field(
        None,
        description="In which the weights come. Default: bfloat16 for the frozen base of lora and qlora, else float32. "
        "With full training and precision no they are trained in it; in other precisions main weights are float32",
    )
    offload: bool = of_run("sharding.cpu_offload")
    offload_compute_shards: bool | None = of_run("sharding.offload_compute_shards")
    offload_main_weights: bool | None = of_run("sharding.offload_main_weights")
    offload_optimizer_state: bool | None = of_run("sharding.offload_optimizer_state")
    offload_activations: bool = of_run("sharding.offload_activations")
    checkpointing: Checkpointing = of_run(
        "sharding.activation_checkpointing",
        "none",
        "Activation checkpointing: none, selective or full",
        read=_checkpointing,
    )
    reentrant: bool = of_run("sharding.activation_checkpointing_reentrant")
    compile: bool = of_run("sharding.compile")
    micro_batch: int = Field(1, ge=1, description="Sequences per rank and forward pass")
    seq_len: Annotated[int, BeforeValidator(token_count)] = Field(
        2048, ge=1, description="Tokens per sequence, such as 4096 or 128k"
    )
    accumulation: int = of_run("training.gradient_accumulation_steps")
    sync_each_micro_batch: bool = Field(True, description="Reduce gradients after each micro-batch (else: no_sync)")
    step_in_backward: bool = of_run("training.step_in_backward")
    attention: Kernel = Field(
        "flash",
        description="flash (version 2), flash3 (Hopper), flash4 (Blackwell) or sdpa, which keep no scores, or eager, "
        "which does",
    )
    experts: Experts = Field(
        "grouped",
        description="How experts compute: grouped (one product, Transformers' default), eager (a loop over experts) or "
        "kernel (kernels for experts, and DeepEP with ep)",
    )
    loss: Loss = Field(
        "eager",
        description="eager is Transformers' own, in float32; plain is torch's cross_entropy without a cast; kernel is "
        "one kernel on whole logits, not in float32; fused computes the loss in chunks",
    )
    loss_chunk: int | None = Field(
        None, ge=1, description="Tokens that the fused loss computes at a time. Default: 1024"
    )
    keeps_outputs: bool = Field(
        False, description="The loop keeps the model's outputs, logits among them, until backward is over"
    )
    async_save: bool = of_run("checkpoint.async_save")
    max_lost_steps: int | None = of_run("checkpoint.max_lost_steps")
    forward_prefetch: bool = of_run("sharding.forward_prefetch")
    backward_prefetch: BackwardPrefetch = of_run("sharding.backward_prefetch")

    def check(self) -> None:
        """Raise `ConfigError` if the fields are inconsistent, or if the planner does not support their combination."""
        # Plans may compile what this engine cannot compile, so that they can be compared with other engines.
        self.run_config(compile=False)
        if self.step_in_backward and not self.planned_optimizer.is_torchs:
            raise ConfigError(f"step_in_backward requires one of torch's own optimizers, got {self.optimizer}")
        if self.step_in_backward and self.on_host.optimizer_state:
            raise ConfigError("step_in_backward cannot be combined with main weights or optimizer state on the host")
        if self.method == "full" and (
            said := [n for n in ("lora_rank", "lora_targets", "lora_dropout") if getattr(self, n) is not None]
        ):
            raise ConfigError(
                f"full training does not use adapters, so {' and '.join(said)} cannot be set",
                hint="set method to lora or qlora, or remove the setting",
            )
        if self.loss_chunk is not None and self.loss != "fused":
            raise ConfigError(
                f"loss_chunk requires loss fused, but loss is {self.loss}, which computes all logits together",
                hint="set loss to fused",
            )
        if self.planned_optimizer.matrix and self.on_host.optimizer_state and not self.on_host.main_weights:
            raise ConfigError(
                f"the planner does not support {self.optimizer} with only its optimizer state on the host",
                hint="offload main weights as well, or plan with adamw",
            )
        self._check_parts()
        besides = {
            "method qlora": self.method == "qlora",  # PEFT splits no adapter of a 4-bit layer
            f"optimizer {self.optimizer}": self.planned_optimizer.matrix is not None,
            "wrap_embeddings": self.wrap_embeddings,
        }
        if self.tp > 1 and (wrong := [name for name, is_there in besides.items() if is_there]):
            raise ConfigError(
                f"the planner does not support tp together with {wrong[0]}", hint="remove one of the two settings"
            )
        if self.method == "qlora" and self.base_dtype == "float32" and self.precision in AUTOCAST:
            raise ConfigError(
                "qlora computes in half precision, but base_dtype is float32", hint="set base_dtype to bfloat16"
            )

    def _check_parts(self) -> None:
        """Raise `ConfigError` if the sequence or the experts cannot be divided as the fields say."""
        chunks = self.shared_by * (2 if self.cp > 1 else 1)
        if self.seq_len % chunks:
            raise ConfigError(
                f"seq_len {self.seq_len} cannot be divided evenly among cp {self.cp} x sp {self.sp} ranks"
                + (", each of which has two chunks in a ring" if self.cp > 1 else ""),
                hint=f"use a multiple of {chunks}",
            )
        if self.shared_by > 1 and self.attention == "eager":
            raise ConfigError(
                f"attention eager cannot be combined with cp {self.cp} and sp {self.sp}, which need one kernel",
                hint="use attention sdpa or flash",
            )
        besides = {"tp": self.tp > 1, f"optimizer {self.optimizer}": self.planned_optimizer.matrix is not None}
        if self.ep > 1 and (wrong := [name for name, is_there in besides.items() if is_there]):
            raise ConfigError(
                f"the planner does not support ep together with {wrong[0]}", hint="remove one of the two settings"
            )
        if self.ep == 1 and self.ep_imbalance != BALANCE:
            raise ConfigError("ep_imbalance requires ep", hint="add ep, or remove ep_imbalance")

    @classmethod
    def from_run(cls, config: RunConfig, **values: Any) -> Self:
        """Build the job from a run's configuration and from `values`, which it lacks, such as the batch size."""
        sharding = config.sharding
        said = {name: config.value(row.target) for name, row in cls.of_the_run().items() if row.read is None} | {
            "strategy": sharding.resolved_strategy().name,
            "reshard_after_forward": "auto" if sharding.keeps_what_fits else "strategy",
            "checkpointing": sharding.activation_checkpointing_mode if sharding.activation_checkpointing else "none",
        }
        return cls.of({**said, **values})

    @property
    def row(self) -> Strategy:
        """The strategy that `strategy` names."""
        return parse_strategy(self.strategy)

    @property
    def keeps_what_fits(self) -> bool:
        """Return whether as many units stay unsharded between forward and backward as fit in memory."""
        return self.reshard_after_forward == "auto"

    @property
    def planned_optimizer(self) -> OptimizerRow:
        """Return the properties of the optimizer that `optimizer` names."""
        return OPTIMIZERS[self.optimizer]

    @property
    def on_host(self) -> Offload:
        """Return the kinds of data that are offloaded to host memory. On a CPU, nothing is."""
        return Offload.of(
            self.offload,
            self.offload_compute_shards,
            self.offload_main_weights,
            self.offload_optimizer_state,
            self.offload_activations,
        )

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes for computation and for messages."""
        return Dtypes(COMPUTE[self.precision], self.reduce_dtype, self.gather_as, self.reduce_as)

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations."""
        return COMPUTE[self.precision] or self.stored_dtype

    @property
    def stored_dtype(self) -> str:
        """The dtype in which the weights are loaded. With adapters, this is the dtype of the frozen base model."""
        return self.base_dtype or ("float32" if self.method == "full" else "bfloat16")

    @property
    def main_dtype(self) -> str:
        """The dtype of the main weights in full training."""
        return main_dtype(self.stored_dtype, trainable=True, mode=self.precision)

    @property
    def adapter_rank(self) -> int:
        """The rank of the LoRA adapters, which is 8 unless it is set."""
        return self.lora_rank or 8

    @property
    def schedule(self) -> ScheduleOptions:
        """Return the options that determine the order of operations."""
        return ScheduleOptions(
            self.accumulation,
            self.forward_prefetch,
            self.backward_prefetch,
            self.sync_each_micro_batch,
            self.step_in_backward,
            optimizer=self.planned_optimizer,
        )

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes, except sharding axes, that have more than one rank, with their sizes."""
        return {axis: size for axis in ("tp", "cp", "sp", "ep") if (size := getattr(self, axis)) > 1}

    @property
    def shared_by(self) -> int:
        """Number of ranks that share each sequence, by context and by sequence parallelism."""
        return self.cp * self.sp

    @property
    def load(self) -> float:
        """The tokens of the busiest rank's experts, divided by the average over all ranks."""
        return self.ep_imbalance if self.ep > 1 else 1.0

    @property
    def tokens(self) -> int:
        """Number of tokens in one rank's part of a micro-batch."""
        return self.micro_batch * self.seq_len // self.shared_by

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in one chunk of the fused loss."""
        return min(self.loss_chunk or 1024, self.tokens)
