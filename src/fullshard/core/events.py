"""The engine's own account of its work: one event per unit and transition. The engine emits, others consume.

The planner produces the same events for a step it only imagines, so "predicted schedule == observed schedule" is a
comparison of two lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """The kind of a unit's transition."""

    UNSHARD_ISSUED = "unshard_issued"
    """its all-gather was launched"""
    UNSHARD_READY = "unshard_ready"
    """its parameters are whole and bound"""
    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"
    RESHARDED = "resharded"
    """its unsharded parameters were freed"""
    REDUCE_ISSUED = "reduce_issued"
    """its gradient reduction was launched"""
    REDUCE_DONE = "reduce_done"
    """its sharded gradients are set"""
    BUCKET_STEP = "bucket_step"
    """the optimizer has updated one of its buckets within backward, and the gradient was freed"""
    OPTIMIZER_STEP = "optimizer_step"
    PIECES_SENT = "pieces_sent"
    """an optimizer that needs whole matrices has sent what this rank has of one bucket's, or of their updates"""
    TO_DEVICE = "to_device"
    """something of one bucket, or a unit's activations, is copied from the host"""
    TO_HOST = "to_host"
    """the same there"""


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one unit.

    Attributes:
        kind: what happened.
        unit: the unit's name (the module's qualified name; empty for the root).
        nbytes: bytes of the communicated, freed or copied buffer, 0 where none is involved.
        what: the data copied to or from the host: `compute shard`, `gradient`, `optimizer state` or `activations`; for
            pieces of matrices their direction: `to owners`, `from owners` or `to replicas`.
        bucket: of all but activations, which bucket of the unit it belongs to.
    """

    kind: EventKind
    unit: str
    nbytes: int = 0
    what: str = ""
    bucket: int = 0


EventSink = Callable[[Event], None]
"""Receives each event on the thread that caused it; it must be quick and must not raise."""
