"""A callback for Trainer that checks disk space, records a run for reports, and stops it after a signal."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.api.collectives import all_gather_object, gather
from fullshard.api.configure import flat_settings
from fullshard.api.planning import plan_run, planned_optimizer
from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.stopping import STOPPING
from fullshard.launch.environment import run_on_main
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listen, should_stop
from fullshard.observe import JsonlSink, StepMetrics, memory_nbytes, reset_memory_peak
from fullshard.observe.metrics import describe_run, run_facts

_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "eval_loss": "held_out_loss"}
"""The names of metrics in Trainer's logs and in `StepMetrics`."""


class FollowRun:
    """A callback that records each step, and tells Trainer when to stop."""

    metrics: dict[str, Any] | None = None
    sink: JsonlSink | None = None

    def __init__(self, trainer: Any, complete: Callable[[Path], list[Path]]) -> None:
        self.trainer, self.complete = trainer, complete
        self.has_output = trainer.args.output_dir is not None
        self.listens = not getattr(trainer.args, "enable_jit_checkpoint", False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to listen for signals and to record steps, and check that checkpoints will fit on the disk."""
        if self.listens:
            listen()
        if self.has_output:
            _look_for_room(self.trainer, args, state, self.complete, kwargs.get("optimizer"))
            JOURNAL.tell(state.global_step)
            _describe(self.trainer, args, state, **kwargs)
            if state.is_world_process_zero:
                self.sink = JsonlSink(Path(args.output_dir) / "metrics.jsonl", last_step=state.global_step)
            reset_memory_peak(self.trainer.accelerator.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that all steps before this one are done."""
        if self.has_output:
            JOURNAL.tell(state.global_step + 1)
            self.write()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the step on all ranks, and stop after it if a rank has received a signal."""
        if self.has_output:
            self.metrics = {"step": state.global_step} | _measured(self.trainer)
        if self.listens and should_stop():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Add what only Trainer knows about the step. It logs an evaluation later than the step."""
        found = {name: float(logs[key]) for key, name in _LOGGED.items() if logs.get(key) is not None}
        if found:
            known = self.metrics or {"step": state.global_step, "memory_nbytes": ()}
            self.metrics = found | {name: value for name, value in known.items() if value is not None}

    def on_evaluate(self, *about: Any, **further: Any) -> None:
        """Write an evaluation, also if it comes after training."""
        self.write()

    def write(self) -> None:
        """Write what is known about the last step."""
        if self.sink is not None and self.metrics is not None:
            self.sink.write(StepMetrics.known(**self.metrics))
        self.metrics = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that all steps are done, or that a signal has ended the run."""
        self.write()
        if self.has_output and state.is_world_process_zero and STOPPING.is_agreed:
            JOURNAL.note(Happening.PREEMPTION, "saved and stopped because of a signal")
        elif self.has_output and state.is_world_process_zero:
            JOURNAL.note(Happening.END)


def follow_run(trainer: Any, complete: Callable[[Path], list[Path]]) -> None:
    """Add the callback that records steps, and saves and stops all ranks after a signal, to a Trainer without it."""
    from transformers import TrainerCallback

    class FollowRunCallback(FollowRun, TrainerCallback):  # type: ignore[misc]
        """The same as Transformers expects it, which is imported only here."""

    if trainer.args.output_dir is not None:
        record_events(trainer.args.output_dir)
    if not any(isinstance(each, FollowRun) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(FollowRunCallback(trainer, complete))  # `train` may be called several times


def tokens_in(inputs: Any) -> Any:
    """Return the number of tokens in a micro-batch, without padding. It is 0 if the inputs are not token ids."""
    names = ("input_ids", "attention_mask")
    ids, mask = (inputs.get(name) if isinstance(inputs, Mapping) else None for name in names)
    if not isinstance(ids, torch.Tensor):
        return 0
    return mask.sum() if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else ids.numel()


def _measured(trainer: Any) -> dict[str, Any]:
    """Return the metrics of a step over all ranks, by name. All ranks must call this."""
    accelerator, sums = trainer.accelerator, trainer._sums
    own = sums.get("loss", 0.0), sums.get("tokens", 0), sums["waited"], memory_nbytes(accelerator.device)
    row = torch.tensor([[*map(float, own)]], dtype=torch.float64, device=accelerator.device)
    rows, seconds = gather(row).cpu(), time.perf_counter() - sums["began"]
    return {
        "loss": float(rows[:, 0].mean()) if "loss" in sums else None,
        "step_seconds": seconds,
        "tokens_per_second": float(rows[:, 1].sum()) / accelerator._ranks_per_batch / seconds or None,
        "data_wait_seconds": float(rows[:, 2].mean()),
        "memory_nbytes": tuple(map(int, rows[:, 3].tolist())),
    }


def _describe(trainer: Any, args: Any, state: Any, *, optimizer: Any, train_dataloader: Any, **others: Any) -> None:
    """Write the settings, the plan and the environment of the run. All ranks must call this."""
    accelerator, length = trainer.accelerator, getattr(args, "max_length", None)
    hosts = ", ".join(sorted(set(all_gather_object(socket.gethostname()))))
    kind = planned_optimizer(getattr(optimizer, "optimizer", optimizer))

    def write() -> None:
        here, said, plan = (accelerator.process.environment, accelerator.device), list[str](), None
        if length is None or kind is None:
            said.append(f"the planner does not know the {'length of the sequences' if kind else 'optimizer'}")
        else:
            job: dict[str, Any] = {"seq_len": length, "micro_batch": trainer._train_batch_size, "optimizer": kind}
            job |= {"checkpointing": "full"} if args.gradient_checkpointing else {}
            job["accumulation"] = args.gradient_accumulation_steps
            try:
                plan = plan_run(trainer.model, accelerator._config, *here, said.append, **job)
            except Exception as error:  # a class of model that the planner was not made for must not end the run
                said.append(f"the planner failed with {type(error).__name__}: {error}")
        facts = run_facts(trainer.model, plan, "".join(said), *here, trainer.memory_before_model)
        facts |= {"hosts": hosts, "total_steps": state.max_steps, "resumed_after": state.global_step}
        if plan is not None:
            facts["planned for"] = f"micro-batches of {trainer._train_batch_size} x {length} tokens"
        with contextlib.suppress(TypeError, RuntimeError):  # an iterable dataset has no length
            facts["steps_per_pass"] = len(train_dataloader) / args.gradient_accumulation_steps
        defaults = {field.name: field.default for field in dataclasses.fields(args)}
        values = {name: value for name, value in args.to_dict().items() if not name.endswith("_token")}
        settings = {name: (value, defaults.get(name)) for name, value in values.items()}
        describe_run(Path(args.output_dir), settings | flat_settings(accelerator._config), facts, "not the default")

    run_on_main(accelerator.process.environment, write)


def _look_for_room(trainer: Any, args: Any, state: Any, complete: Callable[[Path], list[Path]], optimizer: Any) -> None:
    """Check on rank 0 that the disk has room for a checkpoint, and raise an error on all ranks if it does not."""
    saves = {"steps": state.max_steps // max(1, state.save_steps), "epoch": state.num_train_epochs}
    count, limit = saves.get(str(args.save_strategy.value), 0), args.save_total_limit
    accelerator, output = trainer.accelerator, Path(args.output_dir)

    def look() -> None:
        there = len(complete(output))
        most = count if limit is None else min(count, limit + 1 - min(there, limit))
        nbytes = checkpoint_nbytes(trainer.model_wrapped, None if args.save_only_model else optimizer)
        check_room(output, nbytes, most, accelerator._say)

    run_on_main(accelerator.process.environment, look)
