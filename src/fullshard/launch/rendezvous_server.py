"""The rendezvous server of a job with several hosts, and the client through which each host tracks the others.

One launcher runs the server. Every launcher, including that one, keeps one connection to it as long as the job runs.
If a connection closes or is silent for too long, the server treats its host as lost. Each message is a JSON object on
one line.

    to the server      hello         who I am, and my settings
                       join          I am ready for the next attempt
                       failed        one of my ranks failed: its report, and how long ago (the hosts' clocks differ)
                       done          all my ranks succeeded
                       leave         I will not come back
                       keep_alive    nothing new
    from the server    start         all hosts have joined: your rank, and the address of the store
                       waiting       another host wants to join, and hosts may come and go
                       root_cause    the attempt has failed: where it failed first, and that rank's report
                       done          all hosts have succeeded
                       refused       why you cannot take part, or no longer can
                       keep_alive    nothing new

When a rank ends, all ranks that are connected to it fail too. The server therefore waits a moment for other reports
before it names the first failure. Strangers cannot end the job: a launcher answers the server's challenge with an HMAC
that is keyed with the job's token, and the server never waits for a single connection.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.errors import CommunicationError, ConfigError, printable
from fullshard.core.files import parse_object

KEEP_ALIVE_SECONDS = 1.0  # between the keep-alive messages that each side sends
TIMEOUT_SECONDS = 30.0  # silence after which a host counts as lost; TCP retransmits after 12.6 s and 25 s
PROOF_SECONDS = 10.0  # for a new connection to identify itself
ROOT_CAUSE_SECONDS = 1.0  # the server collects reports after a failure, unless all hosts have failed
JOIN_SECONDS = 600.0  # a host waits for the required number of hosts
LAST_CALL_SECONDS = 30.0  # a job with enough hosts waits for more before its first start
REGROUP_SECONDS = 1.0  # the same before a restart, once all remaining hosts have joined
CHALLENGE_SECONDS = 5.0  # a launcher waits for the server's challenge before it reconnects
FIRST_SAID_SECONDS = 5.0  # a launcher waits before it prints that it waits

_FIRST = (-1.0,)
"""The order of a lost host. It comes first, because other hosts only report their lost connections to it."""

_PROOF_NBYTES = 64  # length of a challenge and of the answer
_MOST_STRANGERS = 128  # unidentified connections, beyond two per host; more are closed immediately
_LONGEST_NBYTES = 1 << 20  # length of a message; a peer that leaves more unread counts as lost
_CHUNK_NBYTES = 1 << 13  # read at a time, so that a busy sender does not block the others
_LONGEST_HELLO_NBYTES = 1 << 16
_LONGEST_SHOWN = 300  # characters of a host's text that are passed on to other hosts


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """The server's message to a host when all hosts have joined: its rank, and the address of the workers' store."""

    rank: int
    hosts: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RootCause:
    """The cause of a failed attempt: the host that failed first, and the report to print."""

    host: str
    text: str
    here: bool = False  # whether the failure was on this host
    lost: bool = False  # whether the host was lost instead of reporting a failure
    gone: bool = False  # whether the lost host is the one where the others meet


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.new(b"fullshard" + token.encode(), challenge, "sha256").hexdigest().encode()


class Connection:
    """A socket between a launcher and the server. Data that the peer has not read yet stays in a buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_proved = False
        self._challenge = b""
        self._received, self._unsent = bytearray(), bytearray()
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(TIMEOUT_SECONDS)

    def send(self, kind: str, **content: Any) -> None:
        """Send one message. If the connection is closed, the next `receive` reports it."""
        self._send(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def flush(self) -> bool:
        """Send the buffered data. Return whether so much is left that the peer must have stopped reading."""
        self._send(b"")
        return len(self._unsent) > _LONGEST_NBYTES

    def challenge(self) -> None:
        """Ask the peer to prove that it knows the job's token."""
        self._challenge = secrets.token_hex(_PROOF_NBYTES // 2).encode()
        self._send(self._challenge)

    def prove(self, token: str) -> None:
        """Answer the challenge. Raise `OSError` if none arrives."""
        challenge = b""
        self.socket.settimeout(CHALLENGE_SECONDS)
        while len(challenge) < _PROOF_NBYTES:
            if not (chunk := self.socket.recv(_PROOF_NBYTES - len(challenge))):
                raise ConnectionError("the server closed the connection")
            challenge += chunk
        self.socket.settimeout(TIMEOUT_SECONDS)
        self._send(_proof(token, challenge))

    def take_proof(self, token: str) -> bool:
        """Read as much of the answer as has arrived. Return False if it is wrong or the connection is closed."""
        try:
            chunk = self.socket.recv(_PROOF_NBYTES - len(self._received))
        except OSError:
            return False
        self._received += chunk
        if len(self._received) < _PROOF_NBYTES:
            return bool(chunk)
        self.is_proved = hmac.compare_digest(bytes(self._received), _proof(token, self._challenge))
        self._received.clear()
        return self.is_proved

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the peer has left or does not use this protocol."""
        try:
            chunk = self.socket.recv(_CHUNK_NBYTES)
            self._received += chunk
            *lines, rest = bytes(self._received).split(b"\n")
            self._received[:] = rest
            messages = [parse_object(line) for line in lines]
        except (OSError, ValueError):
            return None
        valid = all(isinstance(message.get("kind"), str) for message in messages)
        return messages if chunk and valid and len(rest) < _LONGEST_NBYTES else None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _send(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._unsent += data
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]


@dataclass(slots=True, eq=False)
class _Peer:
    """Holds what the server knows about one host's launcher."""

    connection: Connection
    address: str
    heard: float
    hello: dict[str, Any] = field(default_factory=dict)
    admitted: bool = False
    joined: int | None = None  # port of the store it has opened; 0 if there is none
    since: float = 0.0
    running: bool = False
    done: bool = False
    told: bool = False  # whether it knows that another host is waiting
    rank: int | None = None

    @property
    def name(self) -> str:
        where = f"{self.hello.get('host', '?')} ({self.address})"
        return where if self.rank is None else f"host {self.rank}, {where},"


class RendezvousServer(threading.Thread):
    """The server at which `least` to `hosts` hosts of a job meet. It runs as a thread in one host's launcher."""

    def __init__(
        self,
        listening: socket.socket,
        hosts: int,
        token: str = "",
        least: int | None = None,
        last_call: float = LAST_CALL_SECONDS,
    ) -> None:
        super().__init__(name="fullshard-rendezvous", daemon=True)
        self._listening, self._hosts, self._token = listening, hosts, token
        self._least, self._last_call = least or hosts, last_call
        self._peers: list[_Peer] = []
        self._failures: list[tuple[tuple[float, ...], _Peer, str]] = []
        self._announce_at: float | None = None
        self._over: str | None = None
        self._has_started = False
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop the server when every peer has left, or after five seconds at the latest."""
        self._closing.set()
        self.join(timeout=5)

    def run(self) -> None:
        """Serve until the server is closed."""
        said = 0.0
        while not (self._closing.is_set() and not self._peers):
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._peers:
                    self._receive(key.data)
            now = time.monotonic()
            if now - said > KEEP_ALIVE_SECONDS:
                said = now
                self._broadcast([peer for peer in self._peers if peer.hello], "keep_alive")
            for peer in [peer for peer in self._peers if peer.connection.flush()]:
                self._drop(peer, "does not read its messages")
            self._check_deadlines(now)
            if self._closing.is_set() and self._over is None:
                self._end("the host that ran the rendezvous has ended")
        self._listening.close()

    def _accept(self) -> None:
        try:
            opened, address = self._listening.accept()
            connection = Connection(opened)
        except OSError:  # the peer has left, or this process has no free file descriptor
            time.sleep(0.01)
            return
        if sum(not peer.running for peer in self._peers) >= _MOST_STRANGERS + 2 * self._hosts:
            opened.close()
            return
        opened.setblocking(False)
        connection.challenge()
        peer = _Peer(connection, address[0], time.monotonic())
        self._peers.append(peer)
        self._selector.register(opened, selectors.EVENT_READ, peer)

    def _check_deadlines(self, now: float) -> None:
        for peer in list(self._peers):
            limit = TIMEOUT_SECONDS if peer.hello else PROOF_SECONDS
            if now - peer.heard > limit:
                self._drop(peer, f"has sent nothing for {limit:.0f} seconds")
        if self._announce_at is not None and now >= self._announce_at:
            self._announce_root_cause()
        if self._is_elastic:
            self._start_if_ready()

    def _end(self, text: str) -> None:
        """End the job: refuse all hosts that join from now on."""
        self._over = text
        self._refuse([peer for peer in self._peers if peer.joined is not None], text, "job")

    def _broadcast(self, peers: list[_Peer], kind: str, **content: Any) -> None:
        for peer in peers:
            peer.connection.send(kind, **content)

    def _refuse(self, peers: list[_Peer], text: str, error: str) -> None:
        for peer in peers:
            peer.joined = None
        self._broadcast(peers, "refused", text=text, error=error)

    def _receive(self, peer: _Peer) -> None:
        if not peer.connection.is_proved:
            if not peer.connection.take_proof(self._token):
                text = f"the job's token ($FULLSHARD_TOKEN) or fullshard's version differs from that of {peer.address}"
                self._refuse([peer], text, "settings")
                self._forget(peer)
            return
        messages = peer.connection.receive()
        if messages is None:
            self._drop(peer, "is gone: its launcher was killed, or the network between the hosts failed")
            return
        if messages:  # an incomplete message does not count as a sign of life
            peer.heard = time.monotonic()
        try:
            for message in messages:
                self._handle(peer, message.pop("kind"), message)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            if peer not in self._peers:
                return
            self._drop(peer, "sent an invalid message; check that the versions of fullshard are the same")

    def _handle(self, peer: _Peer, kind: str, message: dict[str, Any]) -> None:
        if kind == "hello":
            peer.hello = _checked_hello(message)
        elif not peer.hello:
            raise ValueError(f"received {kind} before hello")
        elif kind == "join":
            if type(port := message["port"]) is not int or not 0 <= port < 1 << 16:
                raise ValueError("invalid port")
            peer.joined, peer.since, peer.done = port, time.monotonic(), False
            peer.running &= not self._is_elastic  # it restarts, with or without the others
            if self._over is not None:
                self._refuse([peer], self._over, "job")
            elif self._fits(peer):
                if self._is_elastic:
                    self._tell_of_waiting()
                self._start_if_ready()
        elif kind == "failed":
            if peer.running:
                urgency, seconds = map(float, message["order"])
                self._fail(peer, (urgency, time.monotonic() + seconds), str(message["text"]))
        elif kind == "done":
            peer.done = True
            running = [other for other in self._peers if other.running]
            if all(other.done for other in running):
                self._broadcast(running, "done")
                if self._is_elastic:
                    self._end("the job has ended")
        elif kind == "leave":
            has_failed = bool(message["failed"])
            self._forget(peer)
            is_known = peer.rank is not None or not any(other.running for other in self._peers)
            if has_failed and is_known:
                self._end(f"{peer.name} has ended and has no restarts left")
            elif peer.running and not peer.done:
                self._fail(peer, _FIRST, f"{peer.name} was stopped by a signal\n")

    def _fits(self, peer: _Peer) -> bool:
        """Return whether a host's settings match. If not, refuse it and the other host, unless that one is running."""
        peer.admitted = True
        given = {"machine_rank given": peer.hello["machine_rank"] is not None, **peer.hello["same"]}
        for other in self._peers:
            there = {"machine_rank given": other.hello.get("machine_rank") is not None, **other.hello.get("same", {})}
            if not other.admitted or there == given:
                continue
            name = min(name for name in given.keys() | there.keys() if given.get(name) != there.get(name))
            here, others = (printable(str(values.get(name)), _LONGEST_SHOWN) for values in (given, there))
            text = f"{printable(name, _LONGEST_SHOWN)}: {here} on {peer.name}, {others} on {other.name}"
            peer.admitted = False
            self._refuse([peer] if other.running else [peer, other], text, "settings")
            return False
        return True

    def _tell_of_waiting(self) -> None:
        """Tell the running hosts that another host has joined and that they should restart, if there is room for it."""
        running = [peer for peer in self._peers if peer.running]
        untold = [peer for peer in running if not peer.told and len(running) < self._hosts]
        self._broadcast(untold, "waiting")
        for peer in untold:
            peer.told = True

    def _start_if_ready(self) -> None:
        joined = [peer for peer in self._peers if peer.joined is not None]
        # Wait while an attempt is running, and until the server's host has joined: only that host has opened a store.
        if any(peer.running for peer in self._peers) or not any(peer.joined for peer in joined):
            return
        if len(joined) < self._hosts and not self._is_last_call_over(joined):
            return
        joined.sort(key=lambda peer: (not peer.joined, peer.hello["machine_rank"] or 0))
        count = min(len(joined), self._hosts)
        ranks = [peer.hello["machine_rank"] for peer in joined[:count]]
        if None not in ranks and ranks != list(range(self._hosts)):
            text = f"the hosts' machine ranks must be consecutive numbers from 0, got {', '.join(map(str, ranks))}"
            self._refuse(joined, text, "settings")
            return
        first, port = joined[0].address, joined[0].joined
        for rank, peer in enumerate(joined[:count]):
            peer.rank, peer.running, peer.joined, peer.told = rank, True, None, False
            peer.connection.send("start", rank=rank, hosts=count, address=first, port=port)
        self._failures, self._announce_at, self._has_started = [], None, True

    @property
    def _is_elastic(self) -> bool:
        """Return whether hosts may join and leave."""
        return self._least < self._hosts

    def _is_last_call_over(self, joined: list[_Peer]) -> bool:
        wait = REGROUP_SECONDS if self._has_started else self._last_call
        is_everybody = len(joined) == sum(peer.admitted for peer in self._peers)
        return len(joined) >= self._least and is_everybody and time.monotonic() > wait + max(p.since for p in joined)

    def _fail(self, peer: _Peer, order: tuple[float, ...], text: str) -> None:
        if not any(other.running for other in [peer, *self._peers]):
            return  # the root cause has been announced
        self._failures.append((order, peer, text))
        heard = [failed for _, failed, _ in self._failures]
        if order == _FIRST or all(other in heard for other in self._peers if other.running):
            self._announce_at = time.monotonic()  # a later failure would not change the result
        elif self._announce_at is None:
            self._announce_at = time.monotonic() + ROOT_CAUSE_SECONDS

    def _drop(self, peer: _Peer, how: str) -> None:
        self._forget(peer)
        if peer.running and not peer.done:
            self._fail(peer, _FIRST, f"{peer.name} {how}\n")

    def _forget(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.connection.socket)
        peer.connection.close()

    def _announce_root_cause(self) -> None:
        self._announce_at = None
        order, first, text = min(self._failures, key=lambda failure: failure[0])
        for peer in [peer for peer in self._peers if peer.running]:
            peer.connection.send("root_cause", host=first.name, text=text, here=peer is first, lost=order[0] < 0)
            peer.running = False
        self._start_if_ready()


def _checked_hello(message: dict[str, Any]) -> dict[str, Any]:
    """Return the launcher's description of itself. Raise `TypeError` or `KeyError` if the message is malformed."""
    host, rank, same = message["host"], message["machine_rank"], message["same"]
    is_right = isinstance(host, str) and isinstance(same, dict) and (rank is None or type(rank) is int)
    if not is_right or len(json.dumps(message)) > _LONGEST_HELLO_NBYTES:
        raise TypeError("invalid hello")
    same = {str(key): str(value) for key, value in same.items()}
    return {"host": printable(host, _LONGEST_SHOWN), "machine_rank": rank, "same": same}


class RendezvousClient:
    """A host's connection to the server. `hello` has `host`, `machine_rank` and `same` (values equal on all hosts)."""

    def __init__(
        self,
        where: tuple[str, int],
        hello: dict[str, Any],
        timeout_seconds: float,
        say: Callable[[str], None],
        token: str = "",
    ) -> None:
        self._token = token
        self._where, self._hello, self._timeout, self._say = where, hello, timeout_seconds, say
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self._start: HostAssignment | None = None
        self._refused: Exception | None = None
        self._running = self._done = False
        self.root_cause: RootCause | None = None  # why the current attempt has failed
        self.waits = False  # whether another host wants to join
        self.failed = False  # whether this host is about to end because of a failure
        self.address = where[0]  # of this host on the server's network, once connected

    def join(self, port: int) -> HostAssignment:
        """Wait until all hosts are ready for the next attempt. `port` is the port of this host's store, or 0.

        Raise `CommunicationError` if they do not join in time or the job has ended, or `ConfigError` if settings
        differ.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._start, self._refused, self.root_cause, self._done = None, None, None, False
            self.waits = self._running = False
        joined_on, say_at = None, time.monotonic() + FIRST_SAID_SECONDS
        while time.monotonic() < deadline:
            connection = self.connect(deadline)
            if connection is not joined_on:  # also if the server's host has restarted
                connection.send("join", port=port)
                joined_on = connection
            with self._changed:
                self._changed.wait_for(lambda: self._start or self._refused or self._connection is None, timeout=0.5)
                if self._refused is not None:
                    self.failed = True
                    raise self._refused
                if self._start is not None:
                    self._running = True
                    return self._start
            if time.monotonic() > say_at:
                say_at = float("inf")
                self._say(f"waiting at {_shown(self._where)} for the other hosts to join")
        self.failed = True
        raise CommunicationError(
            f"the other hosts did not join at {_shown(self._where)} within {self._timeout:.0f} seconds",
            hint="start `fullshard launch` on every host, or set a longer time with --rdzv_conf join_timeout=SECONDS",
        )

    def report(self, order: tuple[float, float], text: str) -> RootCause | None:
        """Report a rank that failed on this host, and return the first failure on any host.

        Return None if the server does not answer. `order` is the result of `failures.order_of`: a number, and the time
        of the failure by this host's clock. The failure with the smallest `order` is the first.
        """
        kind, when = order
        self._send("failed", order=(kind, when - time.time()), text=text[-_LONGEST_NBYTES // 8 :])
        with self._changed:
            self._changed.wait_for(lambda: self.root_cause, timeout=ROOT_CAUSE_SECONDS + 2)
            return self.root_cause

    def finish(self) -> RootCause | None:
        """Report that this host's ranks have succeeded. Wait for other hosts, and return the cause if one fails."""
        self._send("done")
        with self._changed:
            self._changed.wait_for(lambda: self._done or self.root_cause)
            return None if self._done else self.root_cause

    def close(self) -> None:
        """Leave the job."""
        with self._changed:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.send("leave", failed=self.failed)
            if self._reader is not None:
                self._reader.join(timeout=1)  # the server closes first, or the last message could be lost
            connection.close()

    def _send(self, kind: str, **content: Any) -> None:
        connection = self._connection
        if connection is not None:
            connection.send(kind, **content)

    def connect(self, deadline: float | None = None) -> Connection:
        """Return the connection to the server, opened if necessary. Raise `CommunicationError` if nothing answers."""
        deadline = deadline or time.monotonic() + self._timeout
        say_at = time.monotonic() + FIRST_SAID_SECONDS
        while (connection := self._connection) is None:
            try:
                connection = self._open()
            except OSError as error:
                if time.monotonic() > deadline:
                    self.failed = True
                    raise CommunicationError(
                        f"no launcher answered at {_shown(self._where)} within {self._timeout:.0f} seconds: {error}",
                        hint="start `fullshard launch` on that host too, and open the port in its firewall",
                    ) from None
                if time.monotonic() > say_at:
                    say_at = float("inf")
                    self._say(f"waiting for the launcher at {_shown(self._where)} ({error})")
                time.sleep(0.2)
                continue
            self.address = connection.socket.getsockname()[0]
            connection.send("hello", **self._hello)
            with self._changed:
                self._connection = connection
            self._reader = threading.Thread(target=self._read, args=(connection,), name="fullshard-client", daemon=True)
            self._reader.start()
        return connection

    def _open(self) -> Connection:
        """Open a connection to the server and answer its challenge. Raise `OSError` if that fails."""
        opened = socket.create_connection(self._where, timeout=5)
        try:
            connection = Connection(opened)
            connection.prove(self._token)
            return connection
        except OSError:
            opened.close()
            raise

    def _read(self, connection: Connection) -> None:
        while (messages := connection.receive()) is not None:
            with self._changed:
                for message in messages:
                    self._handle(connection, message.pop("kind"), message)
                self._changed.notify_all()
        with self._changed:
            if self._connection is connection:
                self._connection = None
                connection.close()
                if self._running and not self._done:
                    text = f"the launcher at {_shown(self._where)} is gone: it was killed, or the network failed\n"
                    gone = RootCause(self._where[0], text, gone=True)
                    self._running, self.root_cause = False, self.root_cause or gone
            self._changed.notify_all()

    def _handle(self, connection: Connection, kind: str, message: dict[str, Any]) -> None:
        if kind == "keep_alive":
            connection.send("keep_alive")
        elif kind == "start":
            self._start, self.waits = HostAssignment(**message), False
        elif kind == "waiting":
            self.waits = True
        elif kind == "root_cause":
            self._running, self.root_cause = False, RootCause(**message)
        elif kind == "done":
            self._running, self._done = False, True
        elif kind == "refused" and message["error"] == "settings":
            self._refused = ConfigError(message["text"], hint="use the same settings on all hosts")
        elif kind == "refused":
            self._refused = CommunicationError(message["text"])


def _shown(where: tuple[str, int]) -> str:
    return f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
