"""A callback for Trainer that checks disk space, records events and steps, and stops the run after a signal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.stopping import STOPPING
from fullshard.launch.environment import run_on_main
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listen, should_stop


def follow_run(trainer: Any, complete: Callable[[Path], list[Path]]) -> None:
    """Add the callback to a Trainer that does not have it yet.

    `complete` is a function that returns the complete checkpoints of earlier runs. Events and steps are recorded in the
    output directory, if there is one. After a signal to any rank, all ranks save and stop at the same step, unless
    Transformers' own handling of signals is requested.
    """
    from transformers import TrainerCallback

    has_output = trainer.args.output_dir is not None
    listens = not getattr(trainer.args, "enable_jit_checkpoint", False)

    class FollowRun(TrainerCallback):  # type: ignore[misc]
        """A callback that reports each step to the journal and tells Trainer when to stop."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Start to listen for signals and to record steps, and check that checkpoints will fit on the disk."""
            if listens:
                listen()
            if has_output:
                _look_for_room(trainer, args, state, complete, kwargs.get("optimizer"))
                JOURNAL.tell(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Record that all steps before this one are done."""
            if has_output:
                JOURNAL.tell(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Stop after this step if a rank has received a signal."""
            if listens and should_stop():
                control.should_save = control.should_training_stop = True

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Record that all steps are done, or that a signal has ended the run."""
            if has_output and state.is_world_process_zero and STOPPING.is_agreed:
                JOURNAL.note(Happening.PREEMPTION, "saved and stopped because of a signal")
            elif has_output and state.is_world_process_zero:
                JOURNAL.note(Happening.END)

    if has_output:
        record_events(trainer.args.output_dir)
    if all(type(each).__name__ != FollowRun.__name__ for each in trainer.callback_handler.callbacks):
        trainer.add_callback(FollowRun())  # `train` may be called several times


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
