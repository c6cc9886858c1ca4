"""A Trainer's further callbacks: note its events and steps, and end it when any rank gets a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.stopping import STOPPING
from fullshard.launch.environment import run_on_main
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listen, should_stop


def note_steps(trainer: Any) -> None:
    """Write events to its output directory, if there is one, with its own count of steps."""
    from transformers import TrainerCallback

    class NoteSteps(TrainerCallback):  # type: ignore[misc]
        """Tells the journal which step this is."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin, maybe after a checkpoint."""
            JOURNAL.tell(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Note that the steps before this one are done."""
            JOURNAL.tell(state.global_step + 1)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Note that all steps are done, unless a signal has ended the run."""
            if not state.is_world_process_zero:
                return
            if STOPPING.is_agreed:
                JOURNAL.note(Happening.PREEMPTION, "saved and stopped because of a signal")
            else:
                JOURNAL.note(Happening.END)

    if trainer.args.output_dir is not None:
        record_events(trainer.args.output_dir)
        _add_once(trainer, NoteSteps())


def stop_on_signals(trainer: Any) -> None:
    """Make all ranks save and end at one step after a signal to any, unless Transformers' own way is asked for."""
    from transformers import TrainerCallback

    class StopOnSignals(TrainerCallback):  # type: ignore[misc]
        """Saves, and ends training, after the step in which the ranks have agreed to."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin to listen."""
            listen()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Check for a signal."""
            if should_stop():
                control.should_save = control.should_training_stop = True

    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        _add_once(trainer, StopOnSignals())


def look_for_room(trainer: Any, complete: Callable[[Path], list[Path]]) -> None:
    """Check the disk once model and optimizer are there; `complete` finds checkpoints of earlier runs."""
    from transformers import TrainerCallback

    class LookForRoom(TrainerCallback):  # type: ignore[misc]
        """Says beforehand that checkpoints will not fit."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Check the disk on rank 0, and end all ranks if there is no room for one checkpoint."""
            saves = {"steps": state.max_steps // max(1, state.save_steps), "epoch": state.num_train_epochs}
            count, limit = saves.get(str(args.save_strategy.value), 0), args.save_total_limit
            optimizer = None if args.save_only_model else kwargs.get("optimizer")
            accelerator, output = trainer.accelerator, Path(args.output_dir)

            def look() -> None:
                there = len(complete(output))
                most = count if limit is None else min(count, limit + 1 - min(there, limit))
                check_room(output, checkpoint_nbytes(trainer.model_wrapped, optimizer), most, accelerator._say)

            run_on_main(accelerator.process.environment, look)

    if trainer.args.output_dir is not None:
        _add_once(trainer, LookForRoom())


def _add_once(trainer: Any, callback: Any) -> None:
    """Add a callback unless there is one like it: `train` may be called several times."""
    known = {type(each).__name__ for each in trainer.callback_handler.callbacks}
    if type(callback).__name__ not in known:
        trainer.add_callback(callback)
