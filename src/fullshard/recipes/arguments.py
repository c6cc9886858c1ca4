"""Define each setting of a training run once, for both the command line and the processes of the run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from fullshard.checkpoint.objects import Location, location
from fullshard.config import values
from fullshard.config.document import read_document
from fullshard.config.load import load_file, recipe_arguments
from fullshard.config.resolve import resolve
from fullshard.config.schema import Device, OnNonFinite, OnReplicas, RunConfig
from fullshard.config.settings import suggestion
from fullshard.config.sharding import CheckpointingMode, kept_or_auto
from fullshard.config.view import View, of_run
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_name, require_there


def _own(default: Any, description: str, **rules: Any) -> Any:
    return Field(default, description=description, **rules)


def _wrap(written: str | None) -> Mapping[str, Any]:
    if written is None or written.strip().lower() == "auto":
        return {}
    if written.strip().lower() == "none":
        return {"sharding.wrap": "none"}
    return {"sharding.wrap_classes": values.names(written) or (written,)}


class TrainArguments(View):
    """The settings of `fullshard train`."""

    subject: ClassVar[str] = "a training run"

    model: str | None = _own(None, "A config.json, a Hugging Face directory or a hub name. Default: a small Llama")
    data: str | None = _own(None, "A file, directory or hub name with text, JSON or Parquet. Default: Python's sources")
    text_field: str = _own("text", "The field or column of JSON, Parquet and hub data with the text")
    max_data_mb: float | None = _own(None, "Stop reading the data after this many MB (10**6 bytes)", gt=0)
    output_dir: Path = _own(Path("out/train"), "The directory for all output files")
    checkpoint_dir: str | None = _own(
        None, "The place for checkpoints, such as s3://bucket/run. Default: the output directory"
    )

    steps: int = _own(1000, "Optimizer steps of the whole run, including those before a resume", ge=1)
    batch_size: int = _own(16, "Sequences per step, summed over all ranks", ge=1)
    micro_batch_size: int | None = _own(None, "Sequences per forward pass. Default: the rank's part of the batch", ge=1)
    seq_len: int = _own(128, "Tokens per sequence", ge=2)
    optimizer: Literal["adamw", "muon"] = _own(
        "muon", "muon for hidden matrices and adamw for the rest, or adamw for all"
    )
    ema_decay: float | None = _own(
        None, "Keep an average of the weights with this decay, such as 0.999, and evaluate and export it", ge=0, le=1
    )
    lr: float = _own(3e-3, "Highest learning rate", gt=0)
    min_lr_ratio: float = _own(0.1, "Final learning rate, as a fraction of the highest", ge=0, le=1)
    warmup_steps: int | None = _own(None, "Steps of linear warm-up. Default: a tenth of the steps", ge=0)
    weight_decay: float = _own(0.1, "Weight decay of matrices; vectors have none", ge=0)
    max_grad_norm: float = _own(
        1.0, "Clip the gradient norm to this value. 0 or inf: do not clip", ge=0, allow_inf_nan=True
    )
    step_in_backward: bool = of_run(
        "training.step_in_backward",
        help="Update each bucket during backward. Requires --max-grad-norm 0 --optimizer adamw",
    )
    held_out: float = _own(0.02, "Fraction of the data to hold out for evaluation, from its end. 0: none", ge=0, lt=1)
    eval_sequences: int = _own(256, "Maximum number of held-out sequences to evaluate", ge=1)

    strategy: str = of_run("sharding.strategy")
    shard_size: int | None = of_run("sharding.shard_size")
    reshard_after_forward: Literal["strategy", "auto"] = of_run(
        "sharding.reshard_after_forward",
        "strategy",
        "Free unsharded parameters after forward as the strategy says, or keep as many as fit (auto)",
        read=kept_or_auto,
    )
    unsharded_memory_gib: float | None = of_run("sharding.unsharded_memory_gib")
    wrap: str | None = of_run(
        "sharding.wrap_classes",
        None,
        "Classes of the modules that become units, comma-separated. Default: found automatically",
        read=_wrap,
    )
    wrap_embeddings: bool = of_run("sharding.wrap_embeddings")
    cpu_offload: bool = of_run("sharding.cpu_offload")
    offload_compute_shards: bool | None = of_run("sharding.offload_compute_shards")
    offload_main_weights: bool | None = of_run("sharding.offload_main_weights")
    offload_optimizer_state: bool | None = of_run("sharding.offload_optimizer_state")
    offload_activations: bool = of_run("sharding.offload_activations")
    precision: Literal["fp32", "bf16", "fp16"] = of_run(
        "precision.mode", "fp32", "Dtype of forward and backward. Main weights and reductions stay in fp32"
    )
    activation_checkpointing: bool = of_run("sharding.activation_checkpointing")
    activation_checkpointing_mode: CheckpointingMode = of_run("sharding.activation_checkpointing_mode")
    loss_chunk: int | None = _own(
        None, "Compute the loss this many tokens at a time, which saves memory for logits", ge=1
    )
    compile: bool = of_run("sharding.compile")
    device: Device = of_run("launch.device")

    max_restarts: int = of_run("launch.max_restarts")
    grace_period: float = of_run("launch.grace_period")

    seed: int = _own(0, "Seed of initial weights, data order and dropout", ge=0, lt=2**63)
    vocab_size: int = _own(
        2048, "Vocabulary of the tokenizer that is trained on the data if the model has none", ge=300
    )
    save_every: int = _own(100, "Steps between checkpoints. 0: save only after the last step", ge=0)
    keep_checkpoints: int = _own(2, "Number of checkpoints to keep", ge=1)
    max_lost_steps: int | None = of_run("checkpoint.max_lost_steps")
    nonfinite_gradients: OnNonFinite = of_run("training.nonfinite_gradients")
    nonfinite_limit: int = of_run("training.nonfinite_limit")
    replica_check: OnReplicas = of_run("training.replica_check")
    compare_every: int = of_run("training.compare_every")
    log_every: int = _own(10, "Steps between two log lines", ge=1)
    log_with: str | None = _own(None, "Accelerate's trackers, comma-separated, such as tensorboard,wandb")
    profile: bool = _own(False, "Profile steps 3 to 5 and write a Perfetto trace for each rank")
    plot: bool = _own(True, "Write report.html with plots of loss, speed and memory")
    export: bool = _own(True, "Write the model as a Hugging Face directory")
    sample_tokens: int = _own(100, "Tokens of sample text to generate at the end, at most one sequence. 0: none", ge=0)
    timeout: float | None = of_run("launch.timeout")

    @classmethod
    def spelled(cls, name: str) -> str:
        """Return the command-line option for a field."""
        return "--" + name.replace("_", "-")

    @field_validator("model", "data", "output_dir", mode="before")
    @classmethod
    def _on_this_host(cls, value: Any, about: ValidationInfo) -> Any:
        value = local_name(value) if isinstance(value, str | os.PathLike) else value
        if isinstance(value, str) and about.field_name != "output_dir":
            require_there(value)
        return value

    def check(self) -> None:
        """Raise `ConfigError` if the values of some fields are incompatible."""
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"--warmup-steps {self.warmup_steps} is more than --steps {self.steps}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size} is more than --batch-size {self.batch_size}")
        if self.loss_chunk is not None and self.compile and self.wrap == "none":
            raise ConfigError(
                "--loss-chunk cannot be used with --compile and --wrap none: the head would be part of the compiled "
                "graph"
            )
        if self.step_in_backward and self.max_grad_norm:
            what = f"--step-in-backward consumes gradients before their norm is clipped to {self.max_grad_norm:g}"
            raise ConfigError(what, hint="add --max-grad-norm 0 --optimizer adamw")
        if self.step_in_backward and self.optimizer == "muon":
            raise ConfigError("--step-in-backward requires an optimizer of torch's", hint="add --optimizer adamw")
        _ = self.checkpoints  # refuses a URL of an unknown store
        super().check()

    @property
    def warmup(self) -> int:
        """Return the number of linear warm-up steps."""
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps

    @property
    def trackers(self) -> list[str]:
        """Return the names of the trackers without duplicates."""
        return list(dict.fromkeys(values.names(self.log_with or "")))

    @property
    def checkpoints(self) -> Location:
        """Return the directory of the checkpoints."""
        return self.output_dir / "checkpoints" if self.checkpoint_dir is None else location(self.checkpoint_dir)


def read_recipe(path: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], RunConfig]:
    """Return the arguments in a recipe, of which those in `given` are replaced, and the configuration of its run.

    Raises:
        ConfigError: If the file is not a recipe for this command, or has a setting that this command does not have.
    """
    entries = read_document(path)
    own = recipe_arguments(entries, "train")
    if own is None:
        raise ConfigError(f"{path} has no section 'train'", hint="write a recipe with fullshard plan --write FILE.yaml")
    resolved = resolve([load_file(path)])
    fields = {row.target: name for name, row in TrainArguments.of_the_run().items()}
    values: dict[str, Any] = {"reshard_after_forward": "auto"} if resolved.config.sharding.keeps_what_fits else {}
    for target, setting in resolved.settings.items():
        if target in fields and fields[target] not in ("reshard_after_forward", "wrap"):
            values[fields[target]] = setting.value
        elif target not in _OF_THE_PROCESSES and target not in fields:
            raise ConfigError(f"{setting.origin}: fullshard train has no setting {target}", hint="remove it")
    for entry in own:
        if entry.key not in TrainArguments.model_fields:
            near = suggestion(entry.key, TrainArguments.model_fields)
            raise ConfigError(f"{entry.origin}: fullshard train has no argument {entry.key!r}", hint=near)
        values[entry.key] = entry.plain
    return {**values, **given}, resolved.config


_OF_THE_PROCESSES = {"launch.num_processes", "launch.num_machines", "training.gradient_accumulation_steps"}
"""Settings that the command takes from elsewhere: the sizes of batch and micro-batch give the accumulation."""
