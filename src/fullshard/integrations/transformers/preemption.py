"""Trainer saves and ends at one step of all ranks when any of them gets a signal."""

from __future__ import annotations

from typing import Any

from fullshard.launch.preemption import listen, should_stop


def stop_on_signals(trainer: Any) -> None:
    """Have a Trainer do so; nothing the second time, or where Transformers' own way is asked for."""
    from transformers import TrainerCallback

    class StopOnSignals(TrainerCallback):  # type: ignore[misc]
        """Saves, and ends training, after the step in which the ranks have agreed to."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin to listen."""
            listen()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Look whether there was a signal."""
            if should_stop():
                control.should_save = control.should_training_stop = True

    known = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    if StopOnSignals.__name__ not in known and not getattr(trainer.args, "enable_jit_checkpoint", False):
        trainer.add_callback(StopOnSignals())
