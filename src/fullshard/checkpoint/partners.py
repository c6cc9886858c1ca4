"""Plan which rank keeps whose files a second time, and how a file gets to its reader. No torch here.

host 0    ranks 0, 1    own files, and those of ranks 4, 5
host 1    ranks 2, 3    own files, and those of ranks 0, 1
host 2    ranks 4, 5    own files, and those of ranks 2, 3
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostGrid:
    """The hosts that ranks run on, seen from one rank: `per_host` ranks on each host, in order."""

    rank: int
    world_size: int
    per_host: int

    @property
    def count(self) -> int:
        """The number of hosts."""
        return self.world_size // self.per_host

    @property
    def local_rank(self) -> int:
        """Return this rank's number among those of its host."""
        return self.rank % self.per_host

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.per_host

    def partner_of(self, rank: int) -> int | None:
        """Return the rank that keeps this one's files a second time, on the next host; None if there is no other."""
        return (rank + self.per_host) % self.world_size if self.count > 1 else None

    def kept_by(self, host: int) -> list[int]:
        """Return the ranks whose files a host has, each as often as it has them."""
        own = [rank for rank in range(self.world_size) if self.host_of(rank) == host]
        partners = [self.partner_of(rank) for rank in range(self.world_size)]
        return own + [rank for rank, partner in enumerate(partners) if partner in own]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file on its way from one rank to another."""

    name: str
    sender: int
    receiver: int


def transfers(wanted: Sequence[Collection[str]], held: Mapping[str, Sequence[int]], hosts: HostGrid) -> list[Transfer]:
    """Return how each host gets the files that its ranks want and it lacks; the same list on every rank.

    `wanted` has names of files by rank, `held` the hosts that have each; at least one.
    """
    found = []
    for host in range(hosts.count):
        ranks = range(host * hosts.per_host, (host + 1) * hosts.per_host)
        lacking = sorted({name for rank in ranks for name in wanted[rank] if host not in held[name]})
        for number, name in enumerate(lacking):
            there = held[name][host % len(held[name])]  # not all from the same one
            local = number % hosts.per_host
            found.append(Transfer(name, there * hosts.per_host + local, ranks[local]))
    return found
