"""Agreement among the ranks to stop after the same backward, in the message that ends it (`features.preemption`)."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stopping:
    """Whether the script checks for requests to stop, whether this rank has one, and whether all ranks know of one."""

    is_listened_to: bool = False
    is_wanted: bool = False
    is_agreed: bool = False


STOPPING = Stopping()
