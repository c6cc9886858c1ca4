"""Agreement among the ranks to stop after the same backward, in the message that ends it (`features.preemption`)."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stopping:
    """Whether this process requests to stop, and whether all ranks know of a request.

    Attributes:
        is_listened_to: Whether the script checks for requests to stop, which is the same on every rank.
        is_wanted: Whether this rank requests to stop.
        is_agreed: Whether all ranks know that a rank requests to stop.
    """

    is_listened_to: bool = False
    is_wanted: bool = False
    is_agreed: bool = False


STOPPING = Stopping()
