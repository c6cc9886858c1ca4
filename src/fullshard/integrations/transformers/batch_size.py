"""`auto_find_batch_size` on several ranks. The ranks restart together with smaller batches, or all of them fail.

If only one rank ran out of memory and restarted, it would wait for the others in a different collective from the one in
which they wait. Therefore each rank first checks whether the others ran out of memory too.
"""

import itertools
from datetime import timedelta
from typing import Any

from fullshard.api import collectives
from fullshard.comm import torch_private
from fullshard.core.errors import CommunicationError
from fullshard.engine.module import units_of
from fullshard.features.watchdog import DesyncDetection

WAIT = timedelta(seconds=30)
"""The time that ranks wait for each other after running out of memory."""

_TRIES = itertools.count()


def agree_to_start_again(error: Exception, batch_size: int, model: Any) -> None:
    """Return if all ranks ran out of memory or none did. Raise `CommunicationError` if only some ranks did."""
    from accelerate.utils.memory import should_reduce_batch_size

    own, ranks = collectives.rank(), range(collectives.world_size())
    if len(ranks) == 1 or not should_reduce_batch_size(error):
        return
    store, place = torch_private.default_store(), f"fullshard/out of memory/{next(_TRIES)}"
    store.set(f"{place}/{own}", "")
    try:
        store.wait([f"{place}/{rank}" for rank in ranks], WAIT)
    except RuntimeError:  # the exception depends on the kind of store
        whole = [rank for rank in ranks if not store.check([f"{place}/{rank}"])]
        raise CommunicationError(
            f"auto_find_batch_size: rank {own} ran out of memory with batches of {batch_size}, "
            f"but {'rank' if len(whole) == 1 else 'ranks'} {', '.join(map(str, whole))} did not within "
            f"{WAIT.total_seconds():.0f} s, so the ranks cannot restart together",
            hint=f"use per_device_train_batch_size={max(1, int(batch_size * 0.9))}",
        ) from error
    for schedule in dict.fromkeys(unit.schedule for unit in units_of(model)):
        DesyncDetection.of(schedule).forget_failures()
