"""Substitutes for classes that only recent torch releases provide."""

from dataclasses import dataclass

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # before 2.12

    @dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """The names of the data-parallel axes of a mesh. Several shard or replicate axes act as one axis.

        Attributes:
            shard: axis or axes that parameters are sharded along.
            replicate: axis or axes that parameters are replicated along.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        @property
        def shard_names(self) -> tuple[str, ...]:
            """Return the names of the shard axes as a tuple."""
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """Return the names of the replicate axes as a tuple."""
            return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
