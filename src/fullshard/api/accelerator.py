"""`Accelerator`: Accelerate's interface to fullshard. Its methods validate their arguments and call the engine.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

It improves on Accelerate in four ways: the gradients of every micro-batch are reduced into the sharded gradient, so
accumulation costs no memory; gradients are reduced in float32; units are found automatically; and a checkpoint is
either complete or absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from accelerate.utils import FullyShardedDataParallelPlugin as TheirPlugin
from torch import nn
from torch.utils.data import DataLoader

from fullshard.api import torch_private
from fullshard.api.accelerates import compilation, own_plugin, take_changes
from fullshard.api.accelerator_state import AcceleratorState
from fullshard.api.configure import run_config
from fullshard.api.context_parallel import divided, prepare
from fullshard.api.float8 import compute_in_float8, float8_recipe
from fullshard.api.forwarding import forwarded
from fullshard.api.late_adapters import is_sharded_inside, shard_adapters
from fullshard.api.loaders import Loaders
from fullshard.api.optimizer import AcceleratedOptimizer, check_parameters, refuse_stand_in
from fullshard.api.options import ProjectConfiguration, handlers_by_name
from fullshard.api.plugin import FullyShardedDataParallelPlugin
from fullshard.api.refused import ARGUMENTS, METHODS
from fullshard.api.reporting import Reporting, wanted_trackers
from fullshard.api.scheduler import AcceleratedScheduler
from fullshard.api.sharding import adopt, is_sharded, remove_autocast, shard
from fullshard.api.state import GradientState, ProcessState, accumulation_steps
from fullshard.api.teaching import teach_libraries
from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.lease import let_go
from fullshard.comm import device as devices
from fullshard.config.schema import RunConfig, ShardingConfig
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.paths import local_name
from fullshard.core.stopping import STOPPING
from fullshard.engine.parameter import sharded_parameters
from fullshard.features import clip_grad_norm_, clip_grad_value_, no_sync, repoint, with_sync
from fullshard.features.sequence_parallel import split_sequences
from fullshard.features.steps_in_backward.stepper import step_in_backward
from fullshard.launch import cuda, read_rank_environment
from fullshard.launch.device import name_of
from fullshard.launch.journal import record_events

_RNG_TYPES = {"generator", "torch", "cuda"}


class Accelerator(Loaders, Reporting):
    """Shards a script's models and trains them on any number of ranks.

    Args:
        device_placement: whether to move batches to the device.
        split_batches: whether a loader's batch size counts the samples of all ranks together.
        mixed_precision: `no`, `fp32`, `bf16`, `fp16` or `fp8`. Defaults to the launcher's setting.
        gradient_accumulation_steps: micro-batches per optimizer step; 1 uses the launcher's setting.
        cpu: compute on the CPU even if there is an accelerator.
        dataloader_config: a `DataLoaderConfiguration`; replaces `split_batches`.
        fsdp_plugin: a `FullyShardedDataParallelPlugin` (fullshard's or Accelerate's), a `ShardingConfig` or a dict of
            its settings, or a `RunConfig`, which has every setting. Settings that it omits come from `fullshard
            launch` or from the variables of `accelerate launch`. The default is FULL_SHARD with units found
            automatically.
        log_with: Accelerate's trackers, by name (`all` selects every installed one) or as objects.
        rng_types: generators that all ranks seed identically at the start of every epoch: `torch`, `cuda`. Samplers
            (`generator`) are always seeded.
        project_dir, project_config: where `save_state` writes.
        gradient_accumulation_plugin: a `GradientAccumulationPlugin`; replaces `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: step schedulers with the optimizer, once for each rank unless batches are split.
            If False, step once at every call.
        step_scheduler_once: step schedulers once per optimizer step, on any number of ranks. Accelerate does not have
            this option.
        kwargs_handlers: `GradScalerKwargs`, `AutocastKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`, or
            `AORecipeKwargs`, which selects the layers that compute in 8 bits. `DistributedDataParallelKwargs` have no
            effect; a note reports this.
        dynamo_backend: the `torch.compile` backend that compiles every unit's forward; `no` turns compilation off.
            Defaults to the launcher's setting.
        dynamo_plugin: Accelerate's `TorchDynamoPlugin`, which sets the backend and its options.
        parallelism_config: a `ParallelismConfig`: ranks per replica, replicas, ranks over which sequences are divided
            (`cp_size`, see `maybe_context_parallel`), and ranks over which the script splits layers
            (`parallelize_module(model, accelerator.torch_device_mesh["tp"], ...)`) before it calls `prepare`. Defaults
            to the launcher's sizes.
        deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin, torch_tp_plugin: Accelerate's other arguments. Any
            value except None raises an error that gives the reason.

    Raises:
        ConfigError: a setting is wrong or not supported.
    """

    _accumulates = True

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | ShardingConfig | RunConfig | Mapping[str, Any] | None = None,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: str | None = None,
        parallelism_config: Any = None,
        *,
        step_scheduler_once: bool = False,
        deepspeed_plugin: None = None,
        deepspeed_plugins: None = None,
        megatron_lm_plugin: None = None,
        torch_tp_plugin: None = None,
        dynamo_plugin: Any = None,
    ) -> None:
        others = deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin, torch_tp_plugin
        for (name, reason), value in zip(ARGUMENTS.items(), others, strict=True):
            if value is not None:
                raise ConfigError(f"{name} is not supported", hint=reason)
        self.handlers = handlers_by_name(kwargs_handlers)
        self._notes: list[str] = []
        self._given = {
            "mixed_precision": mixed_precision,
            **compilation(dynamo_plugin, dynamo_backend),
            "use_cpu": cpu or None,
            "gradient_accumulation_steps": None if gradient_accumulation_steps == 1 else gradient_accumulation_steps,
        }
        self._parallelism = parallelism_config
        self._theirs = fsdp_plugin if isinstance(fsdp_plugin, TheirPlugin) else None
        self._told: dict[str, Any] = {}
        plugin = fsdp_plugin if self._theirs is None else own_plugin(self._theirs)
        self.fsdp_plugin = FullyShardedDataParallelPlugin() if plugin is None else plugin
        self._config = self._configured()
        timeout = getattr(self.init_handler, "timeout", None)
        seconds = None if timeout is None else timeout.total_seconds()
        super().__init__(ProcessState.start(device=self._config.launch.device, timeout_seconds=seconds))
        self.gradient_state = self._make_gradient_state(gradient_accumulation_plugin)
        _check_precision(self._config.precision.mode, self.device)
        self.ao_recipe_handler = float8_recipe(self.handlers, self._config.precision)
        sharding = self._config.sharding
        if getattr(parallelism_config, "total_size", 1) == 1:  # `ParallelismConfig()` leaves the sizes to the launcher
            parallelism_config = self._parallelism_of_settings() or parallelism_config
        self.state = AcceleratorState(
            self.process,
            mixed_precision=self._config.precision.mode,
            fsdp_plugin=self.fsdp_plugin,
            dynamo_backend=sharding.compile_backend if sharding.compile else "no",
            parallelism_config=parallelism_config,
        )
        self.state.tell_accelerate()
        if parallelism_config is not None:
            _ = self.torch_device_mesh  # a collective, but a script may read it on one rank only
        if self.ddp_handler is not None:
            self._say("DistributedDataParallelKwargs have no effect: the model is sharded and not replicated by DDP")
        for note in self._notes:
            self._say(note)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        self._has_loader_config = dataloader_config is not None
        self.rng_types = _check_rng_types(rng_types)
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None:  # also for logs, unless the script configures another directory
            self.project_configuration.set_directories(local_name(project_dir))
        if self.project_configuration.project_dir is not None:
            record_events(self.project_configuration.project_dir)
        self.log_with = wanted_trackers(log_with, self.logging_dir)
        self.trackers = []
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.step_scheduler_once = step_scheduler_once
        self.scaler = self._make_scaler()
        teach_libraries()

    def _make_gradient_state(self, plugin: Any) -> GradientState:
        """Create the gradient state. The script's plugin or the settings set the number of micro-batches per step."""
        plugin = plugin or GradientAccumulationPlugin(self._config.training.gradient_accumulation_steps)
        steps = 1 if plugin.num_steps is None else plugin.num_steps
        if self._accumulates:
            steps = accumulation_steps(steps, read_rank_environment())
        state = GradientState()
        earlier, state.plugin_kwargs = state.plugin_kwargs.get("num_steps"), dataclasses.asdict(plugin)
        state.num_steps = steps
        if earlier not in (None, steps):
            self._notes.append(
                f"gradient_accumulation_steps is now {steps} for earlier Accelerators, too (it was {earlier}), as in "
                "Accelerate, because a process counts the micro-batches of only one loop"
            )
        state.begin_run()
        return state

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            # Called only for names that do not exist.
            reason = f" ({METHODS[name]})" if name in METHODS else ""
            raise AttributeError(f"fullshard's Accelerator has no {name!r}{reason}", name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        # A function passed to `datasets.map` or a worker's collate function may refer to the Accelerator. Pickle only
        # its settings and its rank: prepared objects such as a sharded model are useless in another process.
        fields = vars(self) | self._nothing_prepared()
        return fields | {"_theirs": None, "_saver": None, "_copies": None, "scaler": None}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self._saver = AsyncSaver()
        self.scaler = self._make_scaler()

    optimizer_step_was_skipped: bool = forwarded("_optimizers", lambda own: any(each.step_was_skipped for each in own))
    """True if any optimizer skipped its last step due to an overflow in fp16 or a non-finite gradient."""

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models, and adapt the other objects to them. Objects may be passed in any order and in several calls.

        Args:
            objects: models, optimizers, data loaders and schedulers. Other objects are returned unchanged.
            device_placement: for each object, whether the batches of a loader are moved to the device.

        Returns:
            The prepared objects in the same order, or the object itself if there is only one.
        """
        placement = device_placement or [self.device_placement] * len(objects)
        if len(placement) != len(objects):
            raise ConfigError(f"device_placement has {len(placement)} entries, but {len(objects)} objects were passed")
        self.state.check_current()
        prepared = list(objects)
        # Shard models first, then re-point optimizers to them, then wrap schedulers, which depend on optimizers.
        for index, value in enumerate(objects):
            refuse_stand_in(value)
            if isinstance(value, nn.Module):
                prepared[index] = self.prepare_model(value)
            elif isinstance(value, DataLoader):
                prepared[index] = self.prepare_data_loader(value, device_placement=placement[index])
        for index, value in enumerate(objects):
            if isinstance(value, torch.optim.Optimizer):
                prepared[index] = self.prepare_optimizer(value)
                if any(isinstance(other, nn.Module) and is_sharded(other) for other in objects):
                    check_parameters(value, self._models, self._ranks_of_gradients)
        for index, value in enumerate(objects):
            if _is_scheduler(value):
                prepared[index] = self.prepare_scheduler(value)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard a model in place, and re-point optimizers that were prepared earlier. A sharded model stays unchanged.

        Args:
            model: the model.
            device_placement: must not be False, because a sharded model must be on the rank's device.
            evaluation_mode: whether the model is used only for inference. The model is sharded in either case.
        """
        if device_placement is False:
            raise ConfigError("device_placement=False is not supported: a sharded model must be on the device")
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            what = f"the model is wrapped in {type(model).__name__}, but sharding replaces the wrapper"
            raise ConfigError(what, hint="pass the model inside it: model.module")
        if torch_private.inside_compiled(model) is not model:
            raise ConfigError(
                "the model was compiled before sharding, which would put communication into the compiled graph",
                hint="pass the plain model, and use Accelerator(dynamo_backend='inductor') to compile each unit",
            )
        device_map: Any = getattr(model, "hf_device_map", None)
        if device_map and len(set(device_map.values())) > 1:
            raise ConfigError(
                "the model is spread across several devices (device_map)", hint="load it without device_map"
            )
        was_sharded = is_sharded(model)
        if not was_sharded:
            self._take_changes()
        compute_in_float8(model, self.ao_recipe_handler, self._say, is_late=was_sharded or is_sharded_inside(model))
        if not any(model is known for known in self._models):
            self._divide_sequences(model)
        if not was_sharded:
            device_mesh = self.torch_device_mesh if self._tensor_parallel_size > 1 else None
            plugin = self.fsdp_plugin if isinstance(self.fsdp_plugin, FullyShardedDataParallelPlugin) else None
            options = {"plugin": plugin, "autocast": self.autocast_handler, "device_mesh": device_mesh}
            if is_sharded_inside(model):
                shard_adapters(model)
            else:
                model = shard(model, self._config, self.process, self._say, **options)
            for optimizer in self._optimizers:
                repoint(optimizer.optimizer)
                self._step_in_backward(optimizer.optimizer)
        if is_sharded(model):
            tiles = self._tensor_parallel_size
            adopt(model, self._config, self.autocast_handler, self.device, tiles=tiles)
            self._remember(model, self._models)
        teach_libraries()  # of libraries that were imported since
        return model

    def _divide_sequences(self, model: nn.Module) -> None:
        """Make a model compute on this rank's part of each sequence, if the configuration divides them."""
        axes, config = self._config.parallelism, self.state.parallelism_config
        mesh: Any = self.torch_device_mesh
        if axes.cp_size > 1:
            prepare(model, config.cp_handler.cp_comm_strategy, mesh["cp"])
        if axes.sp_size > 1:
            implementation, by_deepspeed = config.sp_handler.sp_attn_implementation, config.sp_backend == "deepspeed"
            group = mesh["sp"].get_group()
            split_sequences(model, group, implementation=implementation, by_deepspeed=by_deepspeed)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Re-point an optimizer to the sharded parameters, and make it step only when an accumulation is complete.

        Raises:
            OptimizerError: the optimizer needs whole matrices, so it would be wrong on slices; or it is configured to
                step in backward but cannot.
            ConfigError: this is a second optimizer in fp16.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer.scaler = self.scaler  # instead of another Accelerator's
            self._remember(optimizer, self._optimizers)
            return optimizer
        if self.scaler is not None and self._optimizers:
            raise ConfigError(
                "fp16 supports only one optimizer, because each step updates the loss scale that all gradients share",
                hint="use bf16, which does not need a loss scale",
            )
        repoint(optimizer)
        self._step_in_backward(optimizer)
        prepared = AcceleratedOptimizer(
            optimizer,
            scaler=self.scaler,
            clipping=self._config.training.gradient_clipping,
            models=self._models,
            ranks=self._ranks_of_gradients,
        )
        self._optimizers.append(prepared)
        teach_libraries()  # of libraries that were imported since
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make a scheduler step whenever the optimizer steps, once for each rank. See `AcceleratedScheduler`."""
        if isinstance(scheduler, AcceleratedScheduler):
            self._remember(scheduler, self._schedulers)
            return scheduler
        held = getattr(scheduler, "optimizer", None)
        own = [o for o in self._optimizers if held is o or held is o.optimizer]
        steps_once = self.step_scheduler_once or self.dataloader_config.split_batches
        prepared = AcceleratedScheduler(
            scheduler,
            optimizers=own or self._optimizers,
            with_optimizer=self.step_scheduler_with_optimizer,
            steps=1 if steps_once else self._data_parallel_size,
        )
        self._schedulers.append(prepared)
        if prepared.steps > 1 and self.step_scheduler_with_optimizer:
            self._say_once(
                f"schedulers step {prepared.steps} times per optimizer step, once for each rank, as in Accelerate. "
                "Give them the number of steps of 1 rank, or use Accelerator(step_scheduler_once=True)."
            )
        return prepared

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch within the block.

        An optimizer step ends after `gradient_accumulation_steps` micro-batches, and at the end of an epoch.
        Each micro-batch's gradients are immediately reduced into the sharded gradient, so accumulation costs no memory.
        `no_sync` trades memory for less communication.

        Args:
            models: not used; accepted for compatibility with Accelerate.
        """
        self.gradient_state.begin_micro_batch()
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep gradients local and unsharded within the block. The first backward after the block reduces the sum."""
        with no_sync(model) if is_sharded(model) else contextlib.nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Make backward reduce gradients within the block, even inside a `no_sync` block."""
        with with_sync(model) if is_sharded(model) else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> Iterator[None]:
        """With context parallelism, run forward and backward in the block on this rank's part of each sequence.

        Args:
            buffers: tensors of the batch, which are cut in place along the sequence.
            buffer_seq_dims: the sequence dim of each buffer.
            no_restore_buffers: buffers that do not get their values back after the block.
        """
        mesh = self.torch_device_mesh if self._config.parallelism.cp_size > 1 else None
        given = buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
        with contextlib.nullcontext() if mesh is None else divided(mesh["cp"], *given):
            yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Divide the loss by the number of accumulation steps, scale it in fp16, and run backward on it.

        Args:
            loss: a scalar, the mean over this rank's micro-batch.
            options: keyword arguments for `Tensor.backward`.
        """
        if self.sync_gradients:
            self._saver.check()
        for model in self._models:
            model.set_is_last_backward(self.sync_gradients)  # type: ignore[operator]
        loss = loss / self.gradient_accumulation_steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale in fp16, at most once per step. Do nothing in other modes."""
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            if not isinstance(one, AcceleratedOptimizer):
                raise OptimizerError(f"{type(one).__name__} was not prepared", hint="pass the one from prepare()")
            one.unscale()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients at the end of a step, so that their norm over all ranks is at most `max_norm`.

        For other micro-batches, only measure the norm.

        Returns:
            The norm before scaling, which is the same on every rank.

        Raises:
            ConfigError: `training.step_in_backward` is set.
        """
        self._check_clipping()
        if not self.sync_gradients:
            # Clipping a partial sum would change the result, and in fp16 the gradients are still scaled.
            return clip_grad_norm_(parameters, float("inf"), norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value] at the end of a step."""
        self._check_clipping()
        if self.sync_gradients:
            self.unscale_gradients()
            clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Enable autocast for computations outside prepared models, if the mode is bf16, fp16 or fp8."""
        options = autocast_handler or self.autocast_handler
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(self.mixed_precision)
        if dtype is None:
            yield
            return
        with torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        ):
            yield

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model itself, because it was sharded in place. On request, remove the wrapper of `torch.compile`.

        Args:
            model: a prepared model, or one inside DataParallel or DistributedDataParallel, which is unwrapped.
            keep_fp32_wrapper: if False, also remove the autocast around the model's forward.
            keep_torch_compile: if False, return the original module instead of the wrapper of `torch.compile`.
        """
        inner = torch_private.inside_compiled(model)
        if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            return self.unwrap_model(inner.module, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper:
            remove_autocast(inner)
        return model if keep_torch_compile else inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects. Return one None per argument, so that callers can overwrite their references."""
        vars(self).update(self._nothing_prepared())
        self.step = 0
        if self.device.type != "cpu" and devices.counts_memory(self.device.type):  # otherwise torch caches no memory
            torch.accelerator.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finish trackers, wait for all ranks and any checkpoint being written, and leave the process group."""
        try:
            for tracker in self.trackers:  # only on the main process, so others must not depend on it
                tracker.finish()
            self.trackers = []
        finally:
            self._saver.wait()
            if self._copies is not None:
                self._copies.close()
            let_go()
            self.wait_for_everyone()
            if self.is_main_process and self.project_dir is not None and not STOPPING.is_agreed:  # it will continue
                JOURNAL.note(Happening.END)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    def _configured(self) -> RunConfig:
        """Return the configuration with the plugin's current values, because scripts can change them at any time."""
        if self._theirs is not None:
            self._told = take_changes(self.fsdp_plugin, self._theirs, self._told)
        return run_config(self.fsdp_plugin, self._given, self._parallelism)

    def _take_changes(self) -> None:
        """Update the configuration with a script's changes to the plugin, as Accelerate's `prepare` does."""
        if (config := self._configured()) == self._config:
            return
        mode = config.precision.mode
        if (mode == "fp16") != (self.scaler is not None):
            raise ConfigError(
                f"mixed_precision_policy: {mode} conflicts with the Accelerator's mixed_precision = "
                f"{self.mixed_precision}: fp16 needs a loss scaler, which is set up when the Accelerator is created",
                hint=f"use Accelerator(mixed_precision={mode!r})",
            )
        _check_precision(mode, self.device)
        self._config = config
        self.ao_recipe_handler = float8_recipe(self.handlers, config.precision)
        self.state.mixed_precision = mode
        self.state.tell_accelerate()

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        if self.mixed_precision != "fp16":
            return None
        options = {} if self.scaler_handler is None else dataclasses.asdict(self.scaler_handler)
        return torch.amp.GradScaler(self.device.type, **options)

    def _step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step during backward if this is configured and any of its parameters is sharded."""
        if self.steps_in_backward and sharded_parameters(optimizer):
            step_in_backward(optimizer)

    steps_in_backward: bool = forwarded("_config.training.step_in_backward")
    """True if optimizers update parameters during backward, so that no gradients remain afterwards."""

    def _check_clipping(
        self, what: str = "gradients cannot be clipped", where: str = "remove clipping from the script"
    ) -> None:
        """Raise an error if optimizers step during backward, which frees gradients before their norm is known."""
        if self.steps_in_backward:
            raise ConfigError(
                f"{what}: training.step_in_backward frees each gradient during backward, before the norm of all "
                "gradients is known",
                hint=f"{where}, or remove step_in_backward from the configuration",
            )

    @property
    def _micro_batches_per_step(self) -> int:
        return self.gradient_accumulation_steps


def _check_precision(mode: str, device: torch.device) -> None:
    if mode == "bf16" and device.type == "cuda" and not cuda.computes_bfloat16(device):
        raise ConfigError(
            f"mixed_precision = bf16 is not supported on {name_of(device)}, which has no bfloat16 arithmetic",
            hint="set mixed_precision to fp16 or no",
        )


def _check_rng_types(rng_types: list[Any] | None) -> set[str]:
    names = {str(getattr(kind, "value", kind)) for kind in rng_types or ()}
    if names - _RNG_TYPES:
        raise ConfigError(
            f"rng_types contains unknown generators: {sorted(names - _RNG_TYPES)}",
            hint=f"use {', '.join(sorted(_RNG_TYPES))}",
        )
    return names


def _is_scheduler(value: Any) -> bool:
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler | AcceleratedScheduler):
        return True
    # Schedulers of other libraries also have an `optimizer`. Weight averages and other objects are not prepared.
    return (
        not isinstance(value, torch.optim.Optimizer | nn.Module | DataLoader)
        and isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer)
        and all(callable(getattr(value, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    )
