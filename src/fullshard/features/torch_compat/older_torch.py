"""Substitutes, for older releases, for functions that only torch's latest releases have."""

from __future__ import annotations

from dataclasses import dataclass

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # before 2.12

    @dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Which axes of a mesh are for data parallelism, by name. One name, or several that count as one axis.

        Attributes:
            shard: along which parameters are cut.
            replicate: along which they are copied.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        @property
        def shard_names(self) -> tuple[str, ...]:
            """As a tuple."""
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """As a tuple."""
            return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
