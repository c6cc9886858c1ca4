"""The Accelerator's methods for saving and loading. `api.saving` defines the contents and layout of a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.api import saving
from fullshard.api.data import ShardedDataLoader
from fullshard.api.facts import Facts
from fullshard.api.optimizer import AcceleratedOptimizer
from fullshard.api.scheduler import AcceleratedScheduler
from fullshard.api.state import ProcessState
from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.full_state import full_state_dict, local_state_dict
from fullshard.checkpoint.objects import ObjectPath, on_this_host
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.core.paths import local_path
from fullshard.launch.environment import run_on_main

if TYPE_CHECKING:
    from fullshard.checkpoint.copies import MemoryCopies


class Checkpointing(Facts):
    """The part of the Accelerator that saves and loads prepared objects."""

    fsdp_plugin: Any
    scaler: Any
    step = 0
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[ShardedDataLoader]
    _configured: Callable[[], RunConfig]
    _copies: MemoryCopies | None = None

    def __init__(self, process: ProcessState) -> None:
        super().__init__(process)
        vars(self).update(self._nothing_prepared())
        self._custom_objects: list[Any] = []
        self._saver = AsyncSaver()
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @staticmethod
    def _nothing_prepared() -> dict[str, Any]:
        return {"_models": [], "_optimizers": [], "_schedulers": [], "_dataloaders": []}

    @staticmethod
    def _remember(value: Any, prepared: list[Any]) -> None:
        """Add an object to the list `prepared` unless it is already there. `free_memory` may have removed it."""
        if not any(value is other for other in prepared):
            prepared.append(value)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make `save_state` and `load_state` include objects that have `state_dict()` and `load_state_dict()`."""
        wrong = [
            f"{type(item).__name__} (Item at index {index})"
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if wrong:
            raise ConfigError(
                f"cannot checkpoint {', '.join(wrong)}: the object must have state_dict() and load_state_dict()"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Make `save_state` call `hook(models, weights, directory)` on every rank.

        The returned handle removes the hook. The hook runs when the checkpoint is complete, and may add files and
        directories to the checkpoint's directory. As with Accelerate's FSDP, `weights` is empty, because the models'
        weights are in the checkpoint.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Make `load_state` call `hook(models, directory)` on every rank before it loads.

        The returned handle removes the hook. As with Accelerate's FSDP, `models` is empty, because the models' weights
        come from the checkpoint.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | ObjectPath | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool | None = None,
    ) -> str:
        """Save models, optimizers, schedulers, scaler, loader positions, random states and registered objects.

        Args:
            output_dir: directory to create, or a URL of an object store (`s3://bucket/run/step-10`). An earlier
                checkpoint there is replaced once the new one is complete. With `automatic_checkpoint_naming`, the
                directory is `project_dir/checkpoints/checkpoint_N` instead.
            safe_serialization: has no effect, as with Accelerate's FSDP, because checkpoints contain no pickles. False
                produces a warning.
            wait: whether training waits until the checkpoint is written. If it does not, a failure is raised later by
                the `backward` that ends a step, the next `save_state` or `end_training`. By default, training waits
                unless `async_save` is set in the project or the configuration.

        Returns:
            The directory.

        Raises:
            ConfigError: no directory was passed, or this way of saving is not supported.
            CheckpointError: saving failed, and no new checkpoint exists.
        """
        if not safe_serialization:
            what = "save_state(safe_serialization=False) has no effect: a checkpoint holds no pickles"
            warnings.warn(what, stacklevel=2)
        config = self.project_configuration
        if config.save_on_each_node:
            raise ConfigError("save_on_each_node is not supported: checkpoints must be in storage that all hosts share")
        is_async = getattr(config, "async_save", False) or self._config.checkpoint.async_save
        awaited = not is_async if wait is None else wait
        if self._save_hooks and not awaited:
            raise ConfigError(
                "a hook registered with register_save_state_pre_hook needs the complete checkpoint, but async_save "
                "writes it later",
                hint="use save_state(wait=True), or remove async_save",
            )
        if awaited:
            self._saver.wait()  # for an earlier background save
        # Only rank 0 checks, because the file system may look different on other ranks for a moment.
        path, overwrite = run_on_main(self.process.environment, lambda: saving.next_path(config, output_dir))
        if self._save_hooks and isinstance(path, ObjectPath):
            raise ConfigError(
                f"a hook registered with register_save_state_pre_hook writes to a local directory, but {path} is not "
                "one",
                hint="save to a local directory and copy it, or remove the hook",
            )
        saving.save(
            path,
            self._training_state(),
            self.process.environment,
            total_limit=config.total_limit if config.automatic_checkpoint_naming else None,
            overwrite=overwrite,
            whole_weights=self._state_dict_type() == "FULL_STATE_DICT",
            form=self._config.checkpoint.format,
            saver=None if awaited else self._saver,
        )
        config.iteration += 1
        if self._save_hooks:
            saving.call_save_hooks(self._save_hooks.values(), list(self._models), on_this_host(path))
        return str(path)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | ObjectPath | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        map_location: Any = None,
    ) -> None:
        """Load the state that `save_state` wrote into the same prepared objects. The number of ranks may differ.

        Args:
            input_dir: the directory. None selects the newest complete checkpoint under `project_dir/checkpoints`.
            load_kwargs: must be empty, because nothing is unpickled and `torch.load` is not called.
            strict: must not be False. A checkpoint with missing or unexpected weights is refused.
            map_location: has no effect. Loaded values go to the device of the prepared object.

        Raises:
            ConfigError: no directory was passed, or `strict=False` or arguments for `torch.load` were passed.
            CheckpointError: the checkpoint is missing or damaged, or belongs to other objects.
        """
        if not strict:
            raise ConfigError(
                "load_state(strict=False) is not supported: weights missing from the checkpoint would silently keep "
                "their current values",
                hint="build the same model that was saved; to load weights into a different model, use from_pretrained",
            )
        if load_kwargs:
            raise ConfigError(
                f"load_state(load_kwargs={load_kwargs}) is not supported, because nothing is unpickled",
                hint="remove load_kwargs",
            )
        config = self.project_configuration
        self._saver.wait()
        path = run_on_main(self.process.environment, lambda: saving.existing_path(config, input_dir))
        if self._load_hooks:
            saving.call_hooks(self._load_hooks.values(), [], str(path))
        self.step = saving.load(path, self._training_state(), self._say)
        if config.automatic_checkpoint_naming:
            config.iteration = saving.number_after(path, config)

    def keep_copy(self, step: int) -> None:
        """Update the copies of the training state in host memory if the setting `max_lost_steps` requests them.

        Call this on every rank after each optimizer step. The copies hold the same state that `save_state` saves.

        Args:
            step: the number of the step that the run has just finished.

        Raises:
            ConfigError: fullshard's launcher did not start this process, or several models are prepared.
            CheckpointError: there is too little memory.
        """
        if (copies := self._memory_copies()) is not None:
            state = self._training_state()
            copies.after_step(step, **saving.only_part(state), extra={"accelerator": state.extra})

    def load_copy(self) -> int | None:
        """After a restart, restore the training state from the copies in host memory.

        Call this on every rank after everything is prepared. Loaders continue at their position, even within an epoch.

        Returns:
            The last step that the copies include, or None if there are no copies.

        Raises:
            ConfigError: see `keep_copy`.
            CheckpointError: the copies belong to other objects.
        """
        copies, state = self._memory_copies(), self._training_state()
        found = None if copies is None else copies.load(**saving.only_part(state))
        if copies is None or found is None:
            return None
        self.step = saving.set_extra(found["accelerator"], state, where=copies.directory)
        return int(found["step"])

    def _memory_copies(self) -> MemoryCopies | None:
        most = self._config.checkpoint.max_lost_steps
        if most is not None and self._copies is None:
            from fullshard.checkpoint.copies import MemoryCopies  # the launcher checks whether a script imported it

            self._copies = MemoryCopies(most)
        return self._copies

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return all unsharded parameters and buffers in host memory on rank 0.

        The other ranks get an empty dict. All ranks must call this.

        With LOCAL_STATE_DICT, return this rank's shards without any communication. They are flat slices, most of them
        empty at large world sizes, and only the same layout can load them.
        """
        if self._state_dict_type() == "LOCAL_STATE_DICT":
            return local_state_dict(model)
        return full_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the unsharded model to a directory. All ranks must call this.

        Args:
            model: a prepared model.
            save_directory: the directory, which may exist.
            max_shard_size: the maximum size of each file, in bytes or as a string such as `5GB`.
            safe_serialization: write safetensors, one tensor at a time, with the model's configuration if it has one.
                If False, write `pytorch_model.bin`, which must fit into the main process's host memory.

        Raises:
            ConfigError: the model has adapters and `safe_serialization=False`.
        """
        directory = local_path(save_directory)
        saving.save_model(model, directory, max_shard_size, self.process.environment, safe=safe_serialization)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file atomically, on the main process.

        If `safe_serialization` is set, the object must be a dict of tensors, which is written as safetensors.
        Otherwise, the object is written by `torch.save`.
        """
        if self.is_main_process:
            saving.save_object(obj, local_path(f), safe=safe_serialization)

    def _state_dict_type(self) -> str:
        """Return the requested kind of state dict. With FULL_STATE_DICT, `save_state` also writes unsharded weights."""
        return self._configured().checkpoint.state_dict_type

    def _training_state(self) -> saving.TrainingState:
        if not (self._models or self._dataloaders or self._custom_objects):
            raise LifecycleError(
                "there is nothing to save or load, because nothing has been prepared",
                hint="call prepare(model, ...) first",
            )
        return saving.TrainingState(
            models=self._models,
            optimizers=[optimizer.optimizer for optimizer in self._optimizers],
            schedulers=[scheduler.scheduler for scheduler in self._schedulers],
            schedule_steps=[scheduler.steps for scheduler in self._schedulers],
            scaler=self.scaler,
            loaders=self._dataloaders,
            objects=self._custom_objects,
            step=self.step,
            config=self._config.model_dump(mode="json"),
        )
