"""Agreement of the ranks to stop: one wants to, and all learn of it at the end of the same backward.

The request travels in the message that ends every backward (`features.preemption`), so it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stopping:
    """The stop request of this process.

    Attributes:
        is_listened_to: the script asks whether to stop; the same on every rank.
        is_wanted: this rank wants to stop.
        is_agreed: all ranks know that one wants to stop.
    """

    is_listened_to: bool = False
    is_wanted: bool = False
    is_agreed: bool = False


STOPPING = Stopping()
