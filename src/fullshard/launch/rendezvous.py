"""The rendezvous between the launchers of a job's hosts, which implements torchelastic's interface.

torch's own rendezvous listens on every interface of the host. This one creates a store on a socket that is bound to a
single address: the loopback address if the job has one host, and otherwise the address at which the hosts reach one
another.
"""

import errno
import socket
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.launch.rendezvous_server import HostAssignment, RendezvousClient, RendezvousServer

LOOPBACK = "127.0.0.1"

REACH_SECONDS = 30.0
"""Seconds that a host waits for the first host's store. It does not handle signals while it waits."""


def open_store(address: str, port: int = 0) -> TCPStore:
    """Open a store that listens only on `address`. Port 0 picks a free port. Raise `ConfigError` if it is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {port} on {address} is already in use",
            hint="choose a different --main_process_port, or omit the option",
        ) from None
    port = listening.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def reach_store(address: str, port: int) -> TCPStore:
    """Connect to the store that another host has just opened. Raise `CommunicationError` if it does not answer."""
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=REACH_SECONDS))
    except DistError as error:
        raise CommunicationError(
            f"the first host's store at {address}:{port} did not answer within {REACH_SECONDS:g} seconds: "
            + str(error).partition("\n")[0],
            hint="check whether that host has failed, and open all ports between the hosts",
        ) from None
    store.set_timeout(timedelta(minutes=5))  # torch's default, for later operations
    return store


class OneHostRendezvous(StaticTCPRendezvous):
    """A rendezvous for a job with one host. Each attempt gets a new store, without keys of the previous attempt."""

    def __init__(self, run_id: str, port: int) -> None:
        super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id=run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store for the next attempt."""
        return _information(HostAssignment(0, 1, LOOPBACK, 0), open_store(LOOPBACK, self.master_port))


class MultiHostRendezvous(OneHostRendezvous):
    """A rendezvous for several hosts, which meet at a server in the launcher of one of them, perhaps this one."""

    def __init__(self, run_id: str, client: RendezvousClient, server: RendezvousServer | None) -> None:
        super().__init__(run_id, 0)
        self.client, self._server = client, server

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all hosts have joined. Raises the same errors as `RendezvousClient.join`."""
        self.client.connect()
        # Rank 0 is on the server's host, so the store can be opened before the ranks are assigned.
        store = None if self._server is None else open_store(self.client.address)
        start = self.client.join(0 if store is None else store.port)
        return _information(start, store or reach_store(start.address, start.port))

    def shutdown(self) -> bool:
        """Leave the job. The server keeps running until the other hosts have left or a few seconds have passed."""
        self.client.close()
        if self._server is not None:
            self._server.close()
        return True


def _information(start: HostAssignment, store: TCPStore) -> RendezvousInfo:
    # This keeps torchelastic's keys separate from the workers' keys.
    place = RendezvousStoreInfo(start.address, start.port or store.port)
    return RendezvousInfo(PrefixStore("fullshard.launch", store), start.rank, start.hosts, place)
