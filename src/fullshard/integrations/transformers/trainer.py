"""`ShardedTraining`, a mixin with which Transformers' `Trainer`, or a class derived from it, uses fullshard's engine.

It replaces the creation of the Accelerator, saving, and loading. The training loop remains Trainer's.

    OUTPUT/checkpoint-10/
        config.json, tokenizer, ...     as Trainer writes them
        model.safetensors               with FULL_STATE_DICT: the weights, for from_pretrained
        adapter_model.safetensors       for a PEFT model: the adapters, with either type
        training_state/                 optimizer, schedule, and with SHARDED_STATE_DICT the weights: a checkpoint of
                                        fullshard that any number of ranks can load
        rng_state_0.pth, ...            as Trainer writes them
        pytorch_model_fsdp_0/, ...      with `checkpoint.format: dcp`: torch's format, in Accelerate's layout
        trainer_state.json              written last: a directory that contains it is complete

`save_model(directory)` always writes a model that `from_pretrained` reads.
"""

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration

from fullshard import checkpoint
from fullshard.api.plugin import say_once
from fullshard.api.sharding import is_sharded
from fullshard.api.state import accumulation_steps
from fullshard.checkpoint.adapters import adapter_parameter_names, is_saved_as_adapters, load_adapters
from fullshard.checkpoint.format import MANIFEST_NAME, TRAINER_STATE
from fullshard.checkpoint.full_state import whole_in_state_dicts
from fullshard.checkpoint.lease import lease
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.torch_format import write_torch_format
from fullshard.checkpoint.weight_files import has_safetensors
from fullshard.comm.waiting import PROGRESS
from fullshard.core.errors import CheckpointError, ConfigError, DamagedError, plural
from fullshard.core.paths import local_name, local_path
from fullshard.core.user_class import user_class
from fullshard.engine.module import units_of
from fullshard.integrations.transformers.accelerator import TrainerAccelerator
from fullshard.integrations.transformers.arguments import join_accelerate, resolved_configuration
from fullshard.integrations.transformers.averaging import announce_averages, averaged, averages_of
from fullshard.integrations.transformers.batch_size import agree_to_start_again
from fullshard.integrations.transformers.callbacks import follow_run, tokens_in
from fullshard.integrations.transformers.trl import generate_in_step, stream_into_engines, teachers_head
from fullshard.launch.environment import read_rank_environment, run_on_main
from fullshard.optim import OnOwners

_COMPLETE = "trainer_state.json"
_DATALOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
_TOKEN_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer")
"""The modules whose `compute_loss` also takes parts of sequences."""
_KNOWN = ("transformers.", "peft.")
"""The packages whose `save_pretrained` writes the same as `export_hf`."""


class ShardedTraining:
    """A mixin for `Trainer` classes that makes them use fullshard's engine."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: TrainerAccelerator
    _divides_sequences = False
    memory_before_model: int | None = None  # in bytes, what this process used before the model was built

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Create the Accelerator, and mark the model as sharded for Trainer."""
        args = self.args
        if args.output_dir is not None:
            local_path(args.output_dir)  # Transformers would create a folder `s3:`
        self._sums = {"began": time.perf_counter(), "waited": 0.0}
        join_accelerate()
        stream_into_engines()
        resolved = resolved_configuration(args)
        say_once(resolved.notes)
        chosen = args.accelerator_config.to_dict()
        accumulation = dict(chosen.pop("gradient_accumulation_kwargs", None) or {})
        if "num_steps" in accumulation:
            if args.gradient_accumulation_steps > 1:
                raise ConfigError(
                    "accelerator_config and gradient_accumulation_steps both set the number of micro-batches per step",
                    hint="keep only gradient_accumulation_steps",
                )
            args.gradient_accumulation_steps = accumulation["num_steps"]
        asked = vars(args).setdefault("_steps_on_all_hosts", args.gradient_accumulation_steps)
        args.gradient_accumulation_steps = accumulation_steps(asked, read_rank_environment())
        loader = DataLoaderConfiguration(
            **{name: chosen[name] for name in _DATALOADER},
            data_seed=args.data_seed,
            non_blocking=chosen.get("non_blocking", False),
        )
        tiles = getattr(self.model, "_tp_size", None) or 1
        home = next(cls for cls in type(self).__mro__ if "compute_loss" in vars(cls)).__module__
        shares_losses = home not in _TOKEN_LOSSES
        self.accelerator = TrainerAccelerator(
            args, resolved, loader, tensor_parallel_size=tiles, shares_losses=shares_losses
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )
        self.is_deepspeed_enabled, self.is_fsdp_enabled = False, True
        if self.accelerator.fsdp_plugin.activation_checkpointing and args.activation_checkpointing:
            raise ConfigError(
                "fsdp_config and TrainingArguments both request activation checkpointing, which would recompute "
                "activations twice",
                hint="remove activation_checkpointing (gradient_checkpointing) from one of them",
            )

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the model. `resume_from_checkpoint=True` resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            newest = _newest_whole(Path(self.args.output_dir), self.accelerator)
            if newest is None:
                raise CheckpointError(
                    f"there is no complete checkpoint in {self.args.output_dir}",
                    hint="remove resume_from_checkpoint to start from the beginning",
                )
            resume_from_checkpoint = str(newest)
        elif resume_from_checkpoint:
            resume_from_checkpoint = local_name(resume_from_checkpoint)
        if self.accelerator.writes_torch_format and not self._keeps_weights_in_state():
            raise ConfigError(
                "checkpoint.format = dcp stores weights and optimizer state, but the checkpoints of this run contain "
                "adapters or weights in from_pretrained's format",
                hint="set checkpoint.format to native, or train all weights with SHARDED_STATE_DICT",
            )
        announce_averages(self)
        generate_in_step()
        with self._own_output():
            follow_run(self, complete_checkpoints)
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _own_output(self: Any) -> Iterator[None]:
        """Keep other jobs from saving to the output directory during the block. All ranks must enter the block."""
        with contextlib.ExitStack() as held:
            if self.args.output_dir is not None and self.args.save_strategy != "no":
                output = local_path(self.args.output_dir)
                run_on_main(self.accelerator.process.environment, lambda: held.enter_context(lease(output)))
            yield

    def _validate_args(self: Any) -> None:
        # A custom optimizer is updated to use the sharded parameters, so it need not be refused.
        self.is_fsdp_enabled = False
        try:
            super()._validate_args()  # type: ignore[misc]
        finally:
            self.is_fsdp_enabled = True

    def _inner_training_loop(self: Any, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(batch_size, *args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            if self.args.auto_find_batch_size:
                agree_to_start_again(error, self._train_batch_size, self.model)
            # For example, this is an error in a callback, after which other ranks continue.
            for unit in units_of(self.model)[-1:]:
                PROGRESS.watcher.failed([unit.mesh.control_group], "Trainer's loop", error)
            raise

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step, or none if all are done: a resumed Trainer would do one step more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        self._sums = {"began": time.perf_counter()}  # of this rank's micro-batches, for the step's metrics
        batches = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._sums["waited"] = time.perf_counter() - self._sums["began"]
        return batches

    def _get_num_items_in_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the number of labels that count toward the loss, exactly. In bf16, a division would round it."""
        count = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        return count.round().long() if isinstance(count, torch.Tensor) else count

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one micro-batch."""
        sums, tokens = self._sums, tokens_in(inputs)
        with teachers_head(self):
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        sums |= {"loss": sums.get("loss", 0.0) + loss.detach(), "tokens": sums.get("tokens", 0) + tokens}
        if self.accelerator._config.parallelism.cp_size > 1 and not self._divides_sequences:
            what = f"{type(self).__name__} computes on whole sequences on every rank, so cp_size has no effect"
            raise ConfigError(what, hint="remove cp_size")
        return loss

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate one batch, with whole sequences if the caller needs predictions."""
        self.accelerator.shares_losses |= not prediction_loss_only
        with teachers_head(self):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: Any) -> Any:
        axes = self.accelerator._config.parallelism
        self._divides_sequences = True
        if axes.ranks_per_sequence == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)  # type: ignore[misc]
        if not isinstance(inputs, Mapping):
            raise ConfigError(
                f"{type(self).__name__} generates its batches, which sequence and context parallelism do not support: "
                "the ranks of a group would generate different texts",
                hint="remove sp_size and cp_size from parallelism_config and from the launcher's settings",
            )
        is_whole = self._needs_whole_sequences or inputs.get("labels") is None
        if axes.sp_size > 1:
            return contextlib.nullcontext, inputs if is_whole else self.accelerator._cut_batch(inputs)
        if not is_whole:
            return super()._prepare_context_parallel_inputs(model, inputs)  # type: ignore[misc]
        lengths = [value.shape[1] for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() > 1]
        parts = 2 * axes.cp_size
        positions = torch.arange(-(-max(lengths) // parts) * parts, device=self.accelerator.device)
        return functools.partial(self.accelerator.maybe_context_parallel, [positions], [0], {positions}), inputs

    @property
    def _needs_whole_sequences(self: Any) -> bool:
        """Return whether the loss is not a sum over tokens with labels, so that the model cuts the sequences itself."""
        has_own_loss = self.compute_loss_func is not None or self.label_smoother is not None
        return has_own_loss or self.accelerator.shares_losses or not self.model_accepts_loss_kwargs

    def get_tp_size(self: Any) -> int:
        """Return the number of ranks that compute the same loss."""
        tiles = getattr(self.model, "_tp_size", None) or 1
        is_shared = self.accelerator._ranks_per_sequence > 1 and self._needs_whole_sequences
        return int(tiles * (self.accelerator._ranks_per_sequence if is_shared else 1))

    def get_cp_size(self: Any) -> int:
        """Return the number of ranks that compute on parts of one batch, also with sequence parallelism."""
        return int(self.accelerator._ranks_per_batch // self.get_tp_size())

    def get_sp_size(self: Any) -> int:
        """Return 1, because ranks that share sequences get the same batch. DeepSpeed's adapter gives each its own."""
        return 1

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Create Transformers' optimizer. With Adafactor, one rank owns and updates each unsharded parameter."""
        from transformers.optimization import Adafactor

        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if type(self.optimizer) is not Adafactor:
            return made
        groups, options = self.optimizer.param_groups, self.optimizer.defaults
        self.optimizer = OnOwners(groups, Adafactor, whole_parameters=True, **options)
        return self.optimizer

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation or prediction, with the averaged weights if an `EMACallback` requests them."""
        shares_losses = self.accelerator.shares_losses
        try:
            with averaged(self):
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.accelerator.shares_losses = shares_losses

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        # Trainer logs the norm even if it does not clip.
        return None if self.accelerator.steps_in_backward else super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def floating_point_ops(self: Any, inputs: Any) -> int:
        """Return 6 x tokens x parameters for the unsharded model, excluding embeddings."""
        name = getattr(self.model, "main_input_name", "input_ids")
        main_input = inputs.get(name) if isinstance(inputs, Mapping) else None  # TRL's inputs may be lists of samples
        if main_input is None or not hasattr(self.model, "num_parameters"):
            return 0
        tables = {id(p) for m in self.model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
        counted: int = sum(p.numel() for p in self.model.parameters() if id(p) not in tables)
        return 6 * int(main_input.numel()) * counted

    def _get_train_sampler(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _of_global_batches(
            super()._get_train_sampler(*args, **kwargs),  # type: ignore[misc]
            self.accelerator._data_parallel_size,
        )

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the tokenizer and the model, or a PEFT model's adapters. All ranks must call this.

        The directory can be loaded with `from_pretrained`.

        In a checkpoint with sharded weights, write only the configuration, because the checkpoint already contains the
        weights.

        A custom `_save` of a class derived from Trainer, or a `save_pretrained` from outside Transformers and PEFT, is
        called on the main process. During that call, every `state_dict()` contains unsharded tensors, all of which are
        in host memory.
        """
        directory = local_path(output_dir or self.args.output_dir)
        if _saves_its_own_way(self):
            whole = checkpoint.full_state_dict(self.model)

            def save() -> None:
                with whole_in_state_dicts(self.model, whole):
                    self._save(str(directory), state_dict=whole)

            run_on_main(self.accelerator.process.environment, save)
        else:
            is_beside = _internal_call and self._keeps_weights_in_state()
            if not is_beside:
                self.accelerator.save_model(self.model, directory)
            Ranks().together(f"writing {directory}", lambda: self._save_the_rest(directory, with_config=is_beside))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        if self.args.should_save:
            _bring_back_from_the_future(Path(self._get_output_dir(trial=trial)))
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_the_rest(self: Any, directory: Path, *, with_config: bool) -> None:
        if not self.args.should_save:
            return
        directory.mkdir(parents=True, exist_ok=True)
        config: Any = getattr(self.model, "config", None)
        if with_config and hasattr(config, "save_pretrained"):
            config.save_pretrained(directory)
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        torch.save(self.args, directory / "training_args.bin")

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        checkpoint.save_checkpoint(
            Path(output_dir) / TRAINER_STATE,
            model=self.model,
            optimizer=self.optimizer.optimizer,
            scheduler=self.lr_scheduler,
            objects=averages_of(self),
            weights=None if self._keeps_weights_in_state() else adapter_parameter_names(self.model),
            extra={"samples_per_step": _samples_per_step(self)},
            overwrite=True,
        )
        if self.accelerator.writes_torch_format:
            directory = Path(output_dir)
            run_on_main(
                self.accelerator.process.environment, lambda: write_torch_format(directory / TRAINER_STATE, directory)
            )

    def _keeps_weights_in_state(self: Any) -> bool:
        """Return whether checkpoints have the weights in the training state, not in files for `from_pretrained`."""
        if self.args.save_only_model or is_saved_as_adapters(self.model):
            return False
        if _saves_its_own_way(self):
            return True  # its files cannot be read here
        if self.accelerator.state_dict_type != "FULL_STATE_DICT":
            return True
        # Weights that Transformers stores and computes with in different forms cannot be read in slices.
        return not checkpoint.is_exported_as_it_is(self.model)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        directory = Path(resume_from_checkpoint)
        if not is_sharded(model):
            # Trainer's own code is for models that are loaded before they are sharded.
            raise CheckpointError(f"{directory} cannot be loaded because the model is not sharded yet")
        has_state = _has_state(directory)
        if has_state:
            checkpoint.load_checkpoint(directory / TRAINER_STATE, model=model, weights="stored", rng=False)
            if _saves_its_own_way(self) and self._keeps_weights_in_state():
                return
        if is_saved_as_adapters(model):
            if not has_state:
                load_adapters(directory, model)
        elif has_safetensors(directory):
            checkpoint.load_pretrained(directory, model)
        elif not has_state:
            raise _unreadable(directory)

    def _load_optimizer_and_scheduler(self: Any, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is None:
            return
        self.accelerator._say(f"resume: from {checkpoint_dir}, after step {self.state.global_step}")
        if not _has_state(Path(checkpoint_dir)):
            raise CheckpointError(
                f"{checkpoint_dir} has no {TRAINER_STATE}, so the optimizer and the schedule cannot be resumed",
                hint="load it with from_pretrained; it was saved by another library or with save_only_model",
            )
        extra = checkpoint.load_checkpoint(
            Path(checkpoint_dir) / TRAINER_STATE,
            model=self.model,
            optimizer=self.optimizer.optimizer,
            scheduler=self.lr_scheduler,
            objects=averages_of(self),
            weights="none",
        )
        before, now = extra.get("samples_per_step"), _samples_per_step(self)  # older checkpoints do not have it
        if before not in (None, now):
            self.accelerator._say(
                f"{checkpoint_dir}: its steps had {plural(before, 'sample')} but now have {now}. Trainer resumes by "
                "the number of steps, so samples of this epoch are repeated or skipped, and the schedule changes\n"
                "hint: keep per_device_train_batch_size x gradient_accumulation_steps x processes unchanged"
            )

    def _load_best_model(self: Any) -> None:
        best = self.state.best_model_checkpoint
        self._load_from_checkpoint(best, self.model)
        if averages := averages_of(self):  # the evaluations that selected the best model used them
            checkpoint.load_checkpoint(
                Path(best) / TRAINER_STATE, model=self.model, objects=averages, weights="none", rng=False
            )


def _samples_per_step(trainer: Any) -> int:
    """Return the number of samples per step over all ranks."""
    ranks = trainer.accelerator._data_parallel_size
    return int(trainer._train_batch_size * trainer.args.gradient_accumulation_steps * ranks)


def _saves_its_own_way(trainer: Any) -> bool:
    """Return whether the user's Trainer class or model class has its own way of saving the model."""
    save = next(cls for cls in type(trainer).__mro__ if "_save" in vars(cls))
    save_pretrained = next((cls for cls in user_class(trainer.model).__mro__ if "save_pretrained" in vars(cls)), None)
    is_models_own = save_pretrained is not None and not save_pretrained.__module__.startswith(_KNOWN)
    return save.__module__ != "transformers.trainer" or is_models_own


def _of_global_batches(sampler: Any, world_size: int) -> Any:
    """Make a sampler order the samples of all ranks, which the loader then distributes, and return it."""
    match type(sampler).__name__:
        case "LengthGroupedSampler":
            sampler.batch_size *= world_size  # lengths are similar within a step for any number of ranks
        case "BatchRebalanceSampler":
            cls = type(sampler)

            def every_rank(self: Any, indices: list[int]) -> Iterator[list[int]]:
                batches = self._assign(indices, [self.lengths[i] for i in indices])
                for micro_batch in range(self.grad_accum):
                    for rank in range(self.dp_size):
                        yield batches[rank][micro_batch]

            members = {"_yield_global_batch": every_rank, "__len__": lambda self: cls.__len__(self) * self.dp_size}
            sampler.__class__ = type(cls.__name__, (cls,), members)
    return sampler


def _has_state(directory: Path) -> bool:
    """Return whether a `checkpoint-N` directory contains the state to resume training."""
    return (directory / TRAINER_STATE / MANIFEST_NAME).is_file()


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in an output directory, newest first."""
    numbered = [(path.name.removeprefix("checkpoint-"), path) for path in directory.glob("checkpoint-*")]
    found = [(int(n), path) for n, path in numbered if n.isdigit() and (path / _COMPLETE).is_file()]
    return [path for _, path in sorted(found, reverse=True)]


def _bring_back_from_the_future(directory: Path) -> None:
    """Set times of checkpoints in the future, from before the clock was set back, to times in the past."""
    now = time.time()
    late = [path for path in complete_checkpoints(directory) if path.stat().st_mtime > now]
    for seconds, path in enumerate(late, start=1):
        os.utime(path, (now - seconds, now - seconds))


def _newest_whole(directory: Path, accelerator: TrainerAccelerator) -> Path | None:
    """Return the newest complete checkpoint whose training state is undamaged. All ranks must call this."""
    paths = run_on_main(accelerator.process.environment, lambda: complete_checkpoints(directory))
    for number, path in enumerate(paths, start=1):
        try:
            if run_on_main(accelerator.process.environment, functools.partial(_has_state, path)):
                checkpoint.prove_checkpoint(path / TRAINER_STATE)
            return path
        except DamagedError as error:
            if number == len(paths):
                raise
            accelerator._say(f"resume: {path} is passed over, because it is damaged: {error}")
    return None


def _unreadable(directory: Path) -> CheckpointError:
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if any(name.startswith("pytorch_model_fsdp") for name in names):
        return CheckpointError(f"{directory} was saved by Accelerate", hint="convert it with `fullshard ckpt import`")
    return CheckpointError(f"{directory} does not contain weights; it contains {', '.join(names[:8]) or 'nothing'}")
