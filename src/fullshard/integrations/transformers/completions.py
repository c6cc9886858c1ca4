"""Completions that TRL's callbacks log: every rank generates as often as the one with the most prompts does.

A rank that is done with its own would leave the others waiting for its part of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from typing import Any

from fullshard.api import Accelerator, collectives


def generate_in_step() -> None:
    """Make ranks with fewer batches of prompts repeat their last one, and leave out what they make of it."""
    home: Any = sys.modules.get("trl.trainer.callbacks")
    theirs = getattr(home, "_generate_completions", None)
    if theirs is None or hasattr(theirs, "of_trl"):
        return
    parameters = inspect.signature(theirs)

    @functools.wraps(theirs)
    def _generate_completions(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        if not isinstance(call.arguments["accelerator"], Accelerator):
            return theirs(*args, **kwargs)
        own, size = list(call.arguments["prompts"]), call.arguments["batch_size"]
        most = max(collectives.all_gather_object(own), key=len)
        missing = (math.ceil(len(most) / size) - 1) * size + 1 - len(own)  # to the first prompt of the last round
        call.arguments["prompts"] = own + (own or most)[-1:] * missing
        return theirs(*call.args, **call.kwargs)[: len(own)]

    _generate_completions.of_trl = theirs  # type: ignore[attr-defined]
    home._generate_completions = _generate_completions
