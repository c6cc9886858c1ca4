"""The events that the engine emits and the planner predicts: one for each transition of a unit."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """The kind of transition that a unit makes."""

    UNSHARD_ISSUED = "unshard_issued"
    """the unit's all-gather was launched"""
    UNSHARD_READY = "unshard_ready"
    """the unit's unsharded parameters are bound to the module"""
    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"
    RESHARDED = "resharded"
    """the unit's unsharded parameters were freed"""
    REDUCE_ISSUED = "reduce_issued"
    """the unit's gradient reduction was launched"""
    REDUCE_DONE = "reduce_done"
    """the unit's sharded gradients are set"""
    BUCKET_STEP = "bucket_step"
    """the optimizer has updated one of the unit's buckets within backward, and the gradient was freed"""
    OPTIMIZER_STEP = "optimizer_step"
    PIECES_SENT = "pieces_sent"
    """an optimizer that needs unsharded matrices has sent this rank's part of a bucket or of its updates"""
    TO_DEVICE = "to_device"
    """data of one bucket, or a unit's activations, is copied from the host"""
    TO_HOST = "to_host"
    """data of one bucket, or a unit's activations, is copied to the host"""


@dataclass(frozen=True, slots=True)
class Event:
    """A transition of a unit."""

    kind: EventKind
    unit: str  # the qualified name of the unit's module, which is empty for the root
    nbytes: int = 0  # the size in bytes of the communicated, freed, or copied buffer, or 0 if there is none
    # The data copied to or from the host: `compute shard`, `gradient`, `optimizer state`, or `activations`. For pieces
    # of matrices, the direction: `to owners`, `from owners`, or `to replicas`.
    what: str = ""
    bucket: int = 0  # the index of the bucket in the unit; not used for activations


EventSink = Callable[[Event], None]
"""Receives each event on the thread that caused it; it must be quick and must not raise."""
