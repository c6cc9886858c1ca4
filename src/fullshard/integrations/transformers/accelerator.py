"""The Accelerator of a `Trainer`. It adds to fullshard's the few attributes that Trainer and TRL also use."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import nn

from fullshard.api import Accelerator, FullyShardedDataParallelPlugin, collectives
from fullshard.api.accelerates import ParallelismConfig
from fullshard.api.accelerates import tensor_parallel_size as asked_tensor_parallel_size
from fullshard.config.resolve import Resolved
from fullshard.core.errors import ConfigError
from fullshard.integrations.transformers.arguments import NO_DEEPSPEED, asked_timeout

_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


class TrainerAccelerator(Accelerator):
    """The Accelerator of a Trainer. If `shares_losses`, ranks that share sequences compute the same loss."""

    _accumulates = False  # the Trainer accumulates
    _cuts_batches = False  # the Trainer counts tokens first

    def __init__(
        self,
        args: Any,
        resolved: Resolved,
        dataloader_config: Any,
        *,
        tensor_parallel_size: int = 1,
        shares_losses: bool = False,
    ) -> None:
        _refuse(args)
        _check_split(args.parallelism_config, tensor_parallel_size)
        self._tiles, self.shares_losses = tensor_parallel_size, shares_losses
        plugin = FullyShardedDataParallelPlugin()
        plugin.fill(resolved.config)
        self._trainer_steps = args.gradient_accumulation_steps
        timeout = asked_timeout(args)
        super().__init__(
            mixed_precision=args.mixed_precision if args.bf16 or args.fp16 else None,
            cpu=bool(args.use_cpu),
            dataloader_config=dataloader_config,
            fsdp_plugin=plugin,
            # Trainer divides the loss itself
            gradient_accumulation_plugin=GradientAccumulationPlugin(1, sync_each_batch=True),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=None if timeout is None else timedelta(seconds=timeout))],
            dynamo_backend=args.torch_compile_backend if args.torch_compile else None,
            parallelism_config=args.parallelism_config,
        )
        if args.max_grad_norm:
            what = f"TrainingArguments.max_grad_norm = {args.max_grad_norm} clips (1.0 is its default)"
            self._check_clipping(what, "set max_grad_norm=0")
        if not dataloader_config.even_batches and self.num_processes > 1:
            raise ConfigError(
                "accelerator_config: even_batches = False would give some ranks fewer steps, so the others would wait "
                "forever",
                hint="remove it (metrics drop the repeated samples), or set dataloader_drop_last=True",
            )
        # Trainer creates the optimizer before the model is sharded, as for version 2 in Accelerate.
        plugin.fsdp_version = 2
        self._say_what_has_no_effect(args)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard a model as `Accelerator.prepare_model` does."""
        plugin: Any = self.fsdp_plugin
        if _is_pefts_policy(plugin.auto_wrap_policy):
            # It makes every adapter a separate unit, which Accelerate needs because of frozen parameters. Here a unit
            # may contain both kinds.
            self._say("peft's fsdp_auto_wrap_policy: units are the model's layers, adapters included")
            plugin.auto_wrap_policy = plugin.transformer_cls_names_to_wrap or "TRANSFORMER_BASED_WRAP"
            plugin.transformer_cls_names_to_wrap = None
        return super().prepare_model(model, None if evaluation_mode else device_placement, evaluation_mode)

    @property
    def _tensor_parallel_size(self) -> int:
        return self._tiles

    @property
    def parallelism_config(self) -> Any:
        """Return the `ParallelismConfig` if it divides sequences, otherwise None."""
        # Without tensor parallelism, because TRL would divide by its size what `gather_for_metrics` has counted once.
        # `sp_backend` is `fullshard`, because Trainer has a separate loop for DeepSpeed's engine.
        if self._ranks_per_sequence == 1:
            return None
        config = self.state.parallelism_config
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return ParallelismConfig(**fields | {"tp_size": 1, "tp_handler": None, "sp_backend": "fullshard"})

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor from all ranks. Trainer divides the result by the number of ranks with the same batch."""
        return collectives.gather(tensor)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: every micro-batch is reduced into the sharded gradient, so accumulation needs no extra memory."""
        yield

    @property
    def state_dict_type(self) -> str:
        """Return the kind of state dict that the script set on the Accelerator's FSDP plugin."""
        return self._state_dict_type()

    @property
    def writes_torch_format(self) -> bool:
        """Return whether checkpoints are also written in torch's distributed checkpoint format."""
        return self._config.checkpoint.format == "dcp"

    @property
    def _micro_batches_per_step(self) -> int:
        return int(self._trainer_steps)

    def _say_what_has_no_effect(self, args: Any) -> None:
        asked = [name for name in _DDP if getattr(args, name, None) is not None]
        if asked:
            self._say(f"{', '.join(asked)}: no effect, because the model is sharded and not replicated by DDP")
        if self.steps_in_backward:
            self._say("the gradient norm is not logged, because optimizers step in backward and free gradients")
        if self._config.checkpoint.async_save:
            self._say("checkpoint.async_save: no effect, because Trainer waits for its checkpoints")
        if self._config.checkpoint.max_lost_steps is not None:
            raise ConfigError(
                f"checkpoint.max_lost_steps = {self._config.checkpoint.max_lost_steps} is not supported: Trainer does "
                "not keep copies of its state in host memory",
                hint="remove it; save_steps limits how many steps are lost if the job is killed",
            )
        steps = self._config.training.gradient_accumulation_steps
        if steps not in (1, args.gradient_accumulation_steps):
            self._say(
                f"training.gradient_accumulation_steps = {steps}: no effect, because TrainingArguments has "
                f"{args.gradient_accumulation_steps}"
            )


def _refuse(args: Any) -> None:
    refused = {
        "deepspeed": NO_DEEPSPEED,
        "fp16_full_eval": "a sharded model cannot be cast; use fp16=True, which also applies to evaluation",
        "bf16_full_eval": "a sharded model cannot be cast; use bf16=True, which also applies to evaluation",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments.{name} is not supported", hint=reason)
    if args.torch_compile and args.torch_compile_mode:
        raise ConfigError(
            f"TrainingArguments.torch_compile_mode = {args.torch_compile_mode!r} is not supported",
            hint="set sharding.compile_mode in the launcher's configuration",
        )


def _check_split(parallelism_config: Any, tiles: int) -> None:
    """Raise an error if the config's tensor parallel size differs from that of the loaded model."""
    wanted = asked_tensor_parallel_size(parallelism_config)
    if wanted not in (1, tiles):
        raise ConfigError(
            f"TrainingArguments.parallelism_config has tp_size = {wanted}, but the model's layers are "
            + (f"split across {tiles} ranks" if tiles > 1 else "not split"),
            hint="load it with from_pretrained(..., distributed_config=DistributedConfig(tp_size=..., fsdp_size=...))",
        )


def _is_pefts_policy(policy: Any) -> bool:
    """Return whether the policy was made by `peft.utils.other.fsdp_auto_wrap_policy`."""
    if not isinstance(policy, functools.partial):
        return False
    parts = policy.keywords.get("policies", ())
    functions = [part.keywords.get("lambda_fn") for part in parts if isinstance(part, functools.partial)]
    return any(getattr(function, "__module__", "") == "peft.utils.other" for function in functions)
