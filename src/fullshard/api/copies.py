"""Copies of an Accelerator's state in host memory: `checkpoint.max_lost_steps`."""

from __future__ import annotations

from fullshard.api.saving import TrainingState, set_extra
from fullshard.checkpoint.collect import LoadArguments
from fullshard.checkpoint.copies import MemoryCopies
from fullshard.core.errors import ConfigError


class StateCopies:
    """Keep copies of the state of an Accelerator in host memory, from which a run goes on after a kill.

    Args:
        most: steps that a kill may undo at most.
    """

    def __init__(self, most: int) -> None:
        self._copies = MemoryCopies(most)

    def keep(self, state: TrainingState, step: int) -> None:
        """Renew them after a step of the run, if that is due. A collective."""
        self._copies.after_step(step, **_only_part(state), extra={"accelerator": state.extra})

    def load(self, state: TrainingState) -> tuple[int, int] | None:
        """Load one; return the run's step and the counter that the script keeps. A collective.

        Raises:
            CheckpointError: it is of other objects than those in `state`.
        """
        found = self._copies.load(**_only_part(state))
        if found is None:
            return None
        return int(found["step"]), set_extra(found["accelerator"], state, where=self._copies.directory)

    def close(self) -> None:
        """Keep no more."""
        self._copies.close()


def _only_part(state: TrainingState) -> LoadArguments:
    """Return the saved part of a single model with its optimizer. Raises `ConfigError` if there are several."""
    if len(parts := state.parts()) > 1:
        raise ConfigError(
            f"copies in host memory are of one model with one optimizer, and {len(parts)} are prepared",
            hint="leave max_lost_steps out, and save checkpoints",
        )
    return parts[0]
