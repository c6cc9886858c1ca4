"""Pushing to the hub, last of all: a hub that is out of reach costs neither the training nor what it made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from fullshard.core.errors import HubError
from fullshard.launch.environment import read_rank_environment, run_on_main


@contextlib.contextmanager
def pushing_later(training: Any) -> Iterator[None]:
    """Keep a Trainer from looking for the hub while it is made, where that would end the run."""
    wanted, training.push_to_hub = training.push_to_hub, False
    try:
        yield
    finally:
        training.push_to_hub = wanted


class Hub:
    """The hub as one run uses it. All ranks make one and call its methods together.

    Args:
        trainer: its arguments say whether to push, where to, and how often.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_wanted = trainer, bool(trainer.args.push_to_hub)
        if self._is_wanted and (problem := self._open()) is not None:
            say(f"the hub is out of reach: {problem}; training goes on, and at the end it is tried again")
            self.hold()

    def hold(self) -> None:
        """Stop pushing until `push`."""
        self._trainer.args.push_to_hub = False

    def push(self) -> None:
        """Push what is in the output directory, if that was asked for.

        Raises:
            HubError: it was not pushed; on rank 0, the others are done.
        """
        if not self._is_wanted:
            return
        trainer, problem = self._trainer, self._open()
        if problem is None:
            try:
                trainer.push_to_hub(commit_message="End of training", revision=trainer.args.hub_revision)
            except Exception as error:  # whatever the network and the hub come up with
                problem = _one_line(error)
        if problem is not None and read_rank_environment().is_main:
            directory = trainer.args.output_dir
            name = trainer.args.hub_model_id or "USER/NAME"
            raise HubError(
                f"the model is saved in {directory}, whole, but it is not on the hub: {problem}",
                hint=f"push it later: hf upload {name} {directory}",
            )

    def _open(self) -> str | None:
        """Make the repository, on rank 0; returns what went wrong, on every rank."""

        def open_repository() -> str | None:
            try:
                self._trainer.init_hf_repo()
            except Exception as error:
                return _one_line(error)
            return None

        return run_on_main(read_rank_environment(), open_repository)


def say(message: str) -> None:
    """Print one line for the user, on the main rank."""
    if read_rank_environment().is_main:
        sys.stderr.write(f"fullshard: {message}\n")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")
