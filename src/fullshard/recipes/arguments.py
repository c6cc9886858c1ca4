"""The settings of a training run, each defined once: the command line and the workers read the same fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from fullshard.checkpoint.objects import Location, ObjectPath, location
from fullshard.config import values
from fullshard.config.schema import Device, OnNonFinite, OnReplicas
from fullshard.config.sharding import CheckpointingMode, kept_or_auto
from fullshard.config.trackers import PACKAGES
from fullshard.config.view import View, of_run, step_range
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_text
from fullshard.core.paths import local_name, require_there


def _wrap(written: str | None) -> Mapping[str, Any]:
    if written is None or written.strip().lower() == "auto":
        return {}
    if written.strip().lower() == "none":
        return {"sharding.wrap": "none"}
    return {"sharding.wrap_classes": values.names(written) or (written,)}


class TrainArguments(View):
    """Settings of `fullshard train`."""

    subject: ClassVar[str] = "a training run"

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
    checkpoint_dir: str | None = Field(
        None,
        description="Where the checkpoints go: a directory, or a URL of an object store such as s3://bucket/run. "
        "Default: checkpoints in the output directory",
    )
    overwrite: bool = Field(False, description="Remove the checkpoints of an earlier run (step-*), and begin anew")
    resume: str = Field(
        "auto",
        description="auto: the newest complete checkpoint there is; never; or a checkpoint's path",
    )

    steps: int = Field(300, ge=1, description="Optimizer steps of the whole run, those before a resume included")
    batch_size: int = Field(8, ge=1, description="Sequences per step over all ranks together")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Sequences per forward pass of a rank. Default: the rank's whole part of the batch"
    )
    seq_len: int = Field(128, ge=2, description="Tokens per sequence")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw; or muon for hidden matrices (scaled so that a learning rate of AdamW fits), and adamw for "
        "the rest",
    )
    ema_decay: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Keep a moving average of the weights with this decay, 0.999 for example; the evaluation, the "
        "sample and the export are then of the average",
    )
    lr: float = Field(2e-3, gt=0, description="Highest learning rate")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a part of the highest")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up. Default: a tenth of the steps")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices; vectors are never decayed")
    max_grad_norm: float = Field(
        1.0, ge=0, allow_inf_nan=True, description="Clip the global gradient norm to this; 0 and inf do not clip"
    )
    step_in_backward: bool = of_run(
        "training.step_in_backward",
        help="Update every bucket within backward, so that all gradients never exist at once; "
        "goes with --max-grad-norm 0, and logs no gradient norm",
    )
    held_out: float = Field(
        0.02, ge=0, lt=1, description="Part of the data, at its end, that is kept for the evaluation; 0 for none"
    )
    eval_sequences: int = Field(256, ge=1, description="Sequences of the kept part that are evaluated, at most")

    strategy: str = of_run("sharding.strategy")
    shard_size: int | None = of_run("sharding.shard_size")
    reshard_after_forward: Literal["strategy", "auto"] = of_run(
        "sharding.reshard_after_forward",
        "strategy",
        "strategy: free unsharded parameters after forward as the strategy has it; auto: keep those of as many units "
        "as memory allows",
        read=kept_or_auto,
    )
    unsharded_memory_gib: float | None = of_run("sharding.unsharded_memory_gib")
    wrap: str | None = of_run(
        "sharding.wrap_classes",
        None,
        "Class names, comma-separated, of the modules that are sharded units. Default: found by itself",
        read=_wrap,
    )
    wrap_embeddings: bool = of_run("sharding.wrap_embeddings")
    cpu_offload: bool = of_run("sharding.cpu_offload")
    offload_compute_shards: bool | None = of_run("sharding.offload_compute_shards")
    offload_main_weights: bool | None = of_run("sharding.offload_main_weights")
    offload_optimizer_state: bool | None = of_run("sharding.offload_optimizer_state")
    offload_activations: bool = of_run("sharding.offload_activations")
    precision: Literal["fp32", "bf16", "fp16"] = of_run(
        "precision.mode", "fp32", "What forward and backward compute in; main weights and reductions stay fp32"
    )
    activation_checkpointing: bool = of_run("sharding.activation_checkpointing")
    activation_checkpointing_mode: CheckpointingMode = of_run("sharding.activation_checkpointing_mode")
    loss_chunk: int | None = Field(
        None,
        ge=1,
        description="Compute the loss so many tokens at a time, so that all tokens' logits never exist at once; "
        "costs the head's product once more",
    )
    compile: bool = of_run("sharding.compile")
    device: Device = of_run("launch.device")

    max_restarts: int = of_run("launch.max_restarts")
    grace_period: float = of_run("launch.grace_period")

    seed: int = Field(0, ge=0, lt=2**63, description="Seed of initial weights, data order and dropout")
    vocab_size: int = Field(
        4096, ge=300, description="Tokens of the tokenizer trained on the data, where none is given"
    )
    save_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only after the last step")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed")
    async_save: bool = of_run("checkpoint.async_save")
    max_lost_steps: int | None = of_run("checkpoint.max_lost_steps")
    check_plan: bool = of_run("training.check_plan")
    nonfinite_gradients: OnNonFinite = of_run("training.nonfinite_gradients")
    nonfinite_limit: int = of_run("training.nonfinite_limit")
    replica_check: OnReplicas = of_run("training.replica_check")
    compare_every: int = of_run("training.compare_every")
    log_every: int = Field(10, ge=1, description="Steps between two lines")
    log_with: str | None = Field(
        None,
        description="Trackers, comma-separated: tensorboard, wandb, trackio, mlflow, comet_ml, aim, swanlab, clearml, "
        "dvclive",
    )
    tensorboard: bool = Field(False, description="Write TensorBoard events too: --log-with tensorboard")
    profile: bool = Field(False, description="Profile a few steps: a trace per rank and one of all, for Perfetto")
    profile_steps: str = Field("3-5", description="The steps to profile, counted from the first of this process")
    plot: bool = Field(True, description="Draw the loss curve, and write report.html")
    export: bool = Field(True, description="Write the model as a Hugging Face directory")
    prompt: str = Field("def __init__(self", description="What the sample text begins with")
    sample_tokens: int = Field(100, ge=0, description="Tokens of sample text to generate at the end; 0 for none")
    timeout: float | None = of_run("launch.timeout")

    @classmethod
    def spelled(cls, name: str) -> str:
        """Return the option of a field."""
        return "--" + name.replace("_", "-")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the arguments whose `to_json` a file holds. Raises `ConfigError` if the file holds anything else."""
        try:
            return cls.model_validate_json(read_text(path))
        except (OSError, ValueError) as error:  # of a value, or of text that is no UTF-8
            raise ConfigError(f"{path} does not hold the arguments of a training run: {error}") from None

    def to_json(self) -> str:
        """Return the arguments as text that `read` takes from a file."""
        return self.model_dump_json(indent=2) + "\n"

    @field_validator("checkpoint_dir", "resume", mode="before")
    @classmethod
    def _anywhere(cls, value: Any) -> Any:
        if not isinstance(value, str | os.PathLike):
            return value
        where = location(value)
        return str(where) if isinstance(where, ObjectPath) else local_name(value)

    @field_validator("model", "data", "output_dir", mode="before")
    @classmethod
    def _on_this_host(cls, value: Any) -> Any:
        return local_name(value) if isinstance(value, str | os.PathLike) else value

    @field_validator("model", "data")
    @classmethod
    def _is_there(cls, value: str | None) -> str | None:
        if value is not None:
            require_there(value)
        return value

    def check(self) -> None:
        """Raise `ConfigError` if the fields do not go together."""
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"--warmup-steps {self.warmup_steps} is more than --steps {self.steps}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size} is more than --batch-size {self.batch_size}")
        if self.activation_checkpointing_mode == "selective" and self.compile:
            raise ConfigError("--activation-checkpointing-mode selective looks at operations that --compile hides")
        if self.loss_chunk is not None and self.compile and self.wrap == "none":
            raise ConfigError(
                "--loss-chunk with --compile and --wrap none: the head would be within the compiled graph"
            )
        if self.ema_decay is not None and self.check_plan:
            raise ConfigError(
                "--check-plan with --ema-decay: the plan has no average of the weights, which is one more copy of them",
                hint="leave one of them out",
            )
        if self.step_in_backward and self.optimizer != "adamw":
            raise ConfigError(
                f"--step-in-backward updates one bucket after the other; --optimizer {self.optimizer} needs whole "
                "matrices of all",
                hint="leave one of them out",
            )
        if self.step_in_backward and self.max_grad_norm:
            raise ConfigError(
                f"--step-in-backward uses gradients up before their norm is known, and --max-grad-norm "
                f"{self.max_grad_norm:g} clips it",
                hint="add --max-grad-norm 0",
            )
        if unknown := [name for name in self.trackers if name not in PACKAGES]:
            raise ConfigError(f"--log-with: no tracker {unknown[0]!r}", hint=f"there are {', '.join(PACKAGES)}")
        step_range(self.profile_steps)
        if self.resume not in ("auto", "never") and self.overwrite:
            raise ConfigError("--overwrite removes the checkpoints that --resume wants to continue from")
        super().check()

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers, each once."""
        asked = [*values.names(self.log_with or ""), *(["tensorboard"] if self.tensorboard else [])]
        return list(dict.fromkeys(asked))

    @property
    def checkpoints(self) -> Location:
        """The directory of the checkpoints."""
        return self.output_dir / "checkpoints" if self.checkpoint_dir is None else location(self.checkpoint_dir)
