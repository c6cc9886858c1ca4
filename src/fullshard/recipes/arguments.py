"""What a training run can be told, each setting once: the command line and the workers read the same fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.core.paths import local_name
from fullshard.core.strategy import parse_strategy


class TrainArguments(BaseModel):
    """Settings of `fullshard train`.

    Build it with `TrainArguments.parse`, which turns what pydantic finds into a `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        description="A config.json, a local Hugging Face directory (its weights are used if it has any) or a hub name. "
        "Default: a small Llama made from a configuration",
    )
    data: str | None = Field(
        None,
        description="Text, .jsonl or .parquet: a file, a directory of such files, or the name of a hub dataset. "
        "Default: the source code of this Python's standard library",
    )
    text_field: str = Field("text", description="The field or column of .jsonl, .parquet and hub data with the text")
    max_data_mb: float | None = Field(None, gt=0, description="Stop reading the data after this many MB (10**6 bytes)")
    output_dir: Path = Field(Path("out/train"), description="Where everything is written")
    overwrite: bool = Field(False, description="Remove the checkpoints of an earlier run in the output directory")
    resume: str = Field(
        "auto",
        description="auto: the newest complete checkpoint of the output directory; never; or a checkpoint's path",
    )

    steps: int = Field(300, ge=1, description="Optimizer steps of the whole run, those before a resume included")
    batch_size: int = Field(8, ge=1, description="Sequences per step over all ranks together")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Sequences per forward pass of a rank. Default: the rank's whole part of the batch"
    )
    seq_len: int = Field(128, ge=2, description="Tokens per sequence")
    lr: float = Field(2e-3, gt=0, description="Highest learning rate")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a part of the highest")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up. Default: a tenth of the steps")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices; vectors are never decayed")
    max_grad_norm: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0 does not clip")
    step_in_backward: bool = Field(
        False,
        description="Update every bucket within backward, so that all gradients never exist at once; "
        "goes with --max-grad-norm 0, and logs no gradient norm",
    )
    held_out: float = Field(
        0.02, ge=0, lt=1, description="Part of the data, at its end, that is kept for the evaluation; 0 for none"
    )
    eval_sequences: int = Field(256, ge=1, description="Sequences of the kept part that are evaluated, at most")

    strategy: str = Field("FULL_SHARD", description="FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, ...")
    shard_size: int | None = Field(None, ge=1, description="Ranks per shard group, for the hybrid strategies")
    reshard_after_forward: Literal["strategy", "auto"] = Field(
        "strategy",
        description="strategy: free unsharded parameters after forward as the strategy has it; auto: keep those of as "
        "many units as memory allows",
    )
    unsharded_memory_gib: float | None = Field(
        None, ge=0, description="GiB per rank that auto may use. Default: what is free after two steps"
    )
    wrap: str | None = Field(
        None,
        description="Class names, comma-separated, of the modules that are sharded units. Default: found by itself",
    )
    wrap_embeddings: bool = Field(False, description="The input embedding and the head are units of their own")
    cpu_offload: bool = Field(
        False, description="Compute shards, main weights and optimizer state in host memory: the next three at once"
    )
    offload_compute_shards: bool | None = Field(
        None, description="What units are gathered from in host memory, before each gather copied to the device"
    )
    offload_main_weights: bool | None = Field(
        None, description="Main weights in host memory, with gradients and optimizer state, and updated there"
    )
    offload_optimizer_state: bool | None = Field(
        None, description="The optimizer's state in host memory; alone, it visits the device for each step"
    )
    offload_activations: bool = Field(
        False, description="What autograd saves in host memory until backward; checkpointed, the units' inputs"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="What forward and backward compute in; main weights and reductions stay fp32"
    )
    activation_checkpointing: bool = Field(False, description="Recompute each unit's activations in backward")
    activation_checkpointing_mode: Literal["full", "selective"] = Field(
        "full", description="Recompute all of it, or (selective) all but attention and every second matrix product"
    )
    loss_chunk: int | None = Field(
        None,
        ge=1,
        description="Compute the loss so many tokens at a time, so that all tokens' logits never exist at once; "
        "costs the head's product once more",
    )
    compile: bool = Field(False, description="Compile each unit with torch.compile")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="What to compute on; auto prefers CUDA")

    seed: int = Field(0, ge=0, lt=2**63, description="Seed of initial weights, data order and dropout")
    vocab_size: int = Field(
        4096, ge=300, description="Tokens of the tokenizer trained on the data, where none is given"
    )
    save_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only after the last step")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed")
    async_save: bool = Field(
        False, description="Go on training while a checkpoint is written, from a copy of the state"
    )
    check_plan: bool = Field(
        False, description="Compare the third step of this run with what `fullshard plan` says, by category"
    )
    log_every: int = Field(10, ge=1, description="Steps between two lines")
    tensorboard: bool = Field(False, description="Write TensorBoard events too")
    plot: bool = Field(True, description="Draw the loss curve")
    export: bool = Field(True, description="Write the model as a Hugging Face directory")
    prompt: str = Field("def __init__(self", description="What the sample text begins with")
    sample_tokens: int = Field(100, ge=0, description="Tokens of sample text to generate at the end; 0 for none")
    timeout: float = Field(1800.0, gt=0, description="Seconds a rank waits for the others before it fails")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check the values of a command line or a file.

        Raises:
            ConfigError: a name is unknown or a value is wrong; every problem is listed with its option.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(item) for item in error.errors())) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """The arguments whose `to_json` a file holds. Raises `ConfigError` if the file holds anything else."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path} does not hold the arguments of a training run: {error}") from None

    def to_json(self) -> str:
        """The arguments as text that `read` takes from a file."""
        return self.model_dump_json(indent=2) + "\n"

    @field_validator("model", "data", "resume", "output_dir", mode="before")
    @classmethod
    def _on_this_host(cls, value: Any) -> Any:
        return local_name(value) if isinstance(value, str | os.PathLike) else value

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        return parse_strategy(value).name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"--warmup-steps {self.warmup_steps} is more than --steps {self.steps}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size} is more than --batch-size {self.batch_size}")
        if self.activation_checkpointing_mode != "full" and not self.activation_checkpointing:
            raise ConfigError(
                "--activation-checkpointing-mode without --activation-checkpointing recomputes nothing",
                hint="add --activation-checkpointing",
            )
        if self.activation_checkpointing_mode == "selective" and self.compile:
            raise ConfigError("--activation-checkpointing-mode selective looks at operations that --compile hides")
        if self.unsharded_memory_gib is not None and self.reshard_after_forward != "auto":
            raise ConfigError("--unsharded-memory-gib is a budget for --reshard-after-forward auto, which is not set")
        if self.reshard_after_forward == "auto" and not parse_strategy(self.strategy).reshard_after_forward:
            raise ConfigError(
                f"--reshard-after-forward auto decides which units are kept, and {self.strategy} keeps all",
                hint="use FULL_SHARD or HYBRID_SHARD",
            )
        if self.offload.has_shards and not parse_strategy(self.strategy).shards:
            raise ConfigError(
                f"{self.offload} on the host, and {self.strategy} shards nothing that could be there",
                hint="use FULL_SHARD or SHARD_GRAD_OP",
            )
        if self.loss_chunk is not None and self.compile and self.wrap == "none":
            raise ConfigError(
                "--loss-chunk with --compile and --wrap none: the head would be within the compiled graph"
            )
        if self.step_in_backward and self.max_grad_norm:
            raise ConfigError(
                f"--step-in-backward uses gradients up before their norm is known, and --max-grad-norm "
                f"{self.max_grad_norm:g} clips it",
                hint="add --max-grad-norm 0",
            )
        if self.step_in_backward and self.precision == "fp16":
            raise ConfigError(
                "--step-in-backward uses gradients up before it is known whether one overflows in fp16",
                hint="use --precision bf16",
            )
        if self.resume not in ("auto", "never") and self.overwrite:
            raise ConfigError("--overwrite removes the checkpoints that --resume wants to continue from")
        return self

    @property
    def offload(self) -> Offload:
        """What lives in host memory."""
        return Offload.of(
            self.cpu_offload,
            self.offload_compute_shards,
            self.offload_main_weights,
            self.offload_optimizer_state,
            self.offload_activations,
        )

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps

    @property
    def checkpoint_dir(self) -> Path:
        """Where the checkpoints are."""
        return self.output_dir / "checkpoints"


def _problem(item: Any) -> str:
    option = "--" + "-".join(str(part) for part in item["loc"]).replace("_", "-") if item["loc"] else ""
    if raised := item.get("ctx", {}).get("error"):  # one of our own, which says what it got
        return f"{option}: {raised}" if option else str(raised)
    return f"{option}: {item['msg']} (got {item['input']!r})"
