"""Trainer's events go to its output directory, with its own count of steps."""

from __future__ import annotations

from typing import Any

from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.stopping import STOPPING
from fullshard.launch.journal import record_events


def note_steps(trainer: Any) -> None:
    """Have a Trainer do so; nothing the second time, or without an output directory."""
    from transformers import TrainerCallback

    class NoteSteps(TrainerCallback):  # type: ignore[misc]
        """Tells the journal which step this is."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin, maybe after a checkpoint."""
            JOURNAL.tell(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """The steps before this one are behind it."""
            JOURNAL.tell(state.global_step + 1)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """All steps are done, unless a signal has ended it."""
            if not state.is_world_process_zero:
                return
            if STOPPING.is_agreed:
                JOURNAL.note(Happening.PREEMPTION, "saved and stopped because of a signal")
            else:
                JOURNAL.note(Happening.END)

    if trainer.args.output_dir is None:
        return
    record_events(trainer.args.output_dir)
    known = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    if NoteSteps.__name__ not in known:
        trainer.add_callback(NoteSteps())
