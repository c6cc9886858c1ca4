"""Several hosts of one job: where they meet, and how each learns what becomes of the others.

One launcher runs the desk; every launcher, that one included, keeps one connection to it for as long as the job runs.
A connection that closes, or is silent for too long, is a host that is gone. Messages are one JSON object per line.

    to the desk     hello    who I am, and my settings
                    join     ready for the next attempt
                    failed   a rank of mine failed: its report, and when
                    done     all ranks of mine succeeded
                    leave    for good
                    alive    nothing new
    from the desk   start    all hosts have joined: your rank, and the address of the store
                    verdict  the attempt has failed: where first, and the report of that
                    done     all hosts have succeeded
                    refused  why you cannot take part, or not any more
                    alive    nothing new

The first failure that is heard of is not always the first that happened: when a rank ends, all ranks connected to it
fail too. So the desk listens a moment longer, and then names one.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.errors import CommunicationError, ConfigError

ALIVE_SECONDS = 1.0
"""How often each side says that it is there."""

SILENT_SECONDS = 10.0
"""Silence after which a host counts as gone. One whose launcher was killed is known at once: the connection closes."""

VERDICT_SECONDS = 1.0
"""How long the desk listens after the first failure that it hears of."""

WAITING_SECONDS = 15.0
"""How long a host that is one too many may wait for one of the others to turn out to be gone. More than silence."""

_LONGEST_NBYTES = 1 << 20
"""A message that is longer is not one of ours."""

REPEAT_SECONDS = 30.0
"""How often a launcher that waits says so."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a host learns when all have joined.

    Attributes:
        rank: of this host.
        hosts: number of hosts.
        address: where the workers find the store.
        port: where the workers find the store.
    """

    rank: int
    hosts: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt failed.

    Attributes:
        host: name of the host where it failed first.
        text: what to print.
        here: whether that host is this one.
    """

    host: str
    text: str
    here: bool = False


class Line:
    """One connection: whole messages in and out."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = bytearray()
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENT_SECONDS)

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; a connection that is gone is noticed by whoever receives from it."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None if the other side is gone, or does not speak this language."""
        try:
            chunk = self.socket.recv(65536)
            self._received += chunk
            *lines, rest = bytes(self._received).split(b"\n")
            self._received[:] = rest
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        valid = all(isinstance(message, dict) and "kind" in message for message in messages)
        return messages if chunk and valid and len(rest) < _LONGEST_NBYTES else None

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@dataclass(slots=True, eq=False)
class _Member:
    line: Line
    address: str
    heard: float
    hello: dict[str, Any] = field(default_factory=dict)
    admitted: bool = False
    joined: int | None = None  # port of the store it has opened; 0 where it has opened none
    since: float = 0.0
    running: bool = False
    done: bool = False
    rank: int | None = None

    @property
    def name(self) -> str:
        where = f"{self.hello.get('host', '?')} ({self.address})"
        return where if self.rank is None else f"host {self.rank}, {where},"


class Desk(threading.Thread):
    """The meeting place.

    Args:
        listening: a socket bound to the address that the hosts know.
        hosts: how many there are.
    """

    def __init__(self, listening: socket.socket, hosts: int) -> None:
        super().__init__(name="fullshard-desk", daemon=True)
        self._listening, self._hosts = listening, hosts
        self._members: list[_Member] = []
        self._failures: list[tuple[tuple[float, ...], _Member, str]] = []
        self._verdict_at: float | None = None
        self._over: str | None = None
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def close(self) -> None:
        """End as soon as every member has left, and after five seconds at the latest."""
        self._closing.set()
        self.join(timeout=5)

    def run(self) -> None:
        """Serve until closed."""
        said = 0.0
        while not (self._closing.is_set() and not self._members):
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._listening:
                    connection, address = self._listening.accept()
                    member = _Member(Line(connection), address[0], time.monotonic())
                    self._members.append(member)
                    self._selector.register(connection, selectors.EVENT_READ, member)
                elif key.data in self._members:
                    self._hear(key.data)
            now = time.monotonic()
            if now - said > ALIVE_SECONDS:
                said = now
                self._tell(self._members, "alive")
            self._look_at_the_clock(now)
        self._listening.close()

    def _look_at_the_clock(self, now: float) -> None:
        for member in [member for member in self._members if now - member.heard > SILENT_SECONDS]:
            self._lose(member, f"has said nothing for {SILENT_SECONDS:.0f} seconds")
        if self._verdict_at is not None and now >= self._verdict_at:
            self._give_verdict()
        if sum(member.running for member in self._members) == self._hosts:
            for member in self._members:
                if member.joined is not None and now - member.since > WAITING_SECONDS:
                    text = f"the job has its {self._hosts} hosts already, and they are all there"
                    self._refuse([member], text, "settings")

    def _tell(self, members: list[_Member], kind: str, **content: Any) -> None:
        for member in members:
            member.line.send(kind, **content)

    def _refuse(self, members: list[_Member], text: str, error: str) -> None:
        for member in members:
            member.joined = None
        self._tell(members, "refused", text=text, error=error)

    def _hear(self, member: _Member) -> None:
        messages = member.line.receive()
        if messages is None:
            self._lose(member, "is gone: its launcher was killed, or the network between the hosts failed")
            return
        member.heard = time.monotonic()
        try:
            for message in messages:
                self._take(member, message.pop("kind"), message)
        except (KeyError, TypeError, ValueError):
            self._lose(member, "sent something that is not understood; are the versions of fullshard the same?")

    def _take(self, member: _Member, kind: str, message: dict[str, Any]) -> None:
        if kind == "hello":
            member.hello = message
        elif kind == "join":
            member.joined, member.since, member.done = int(message["port"]), time.monotonic(), False
            if self._over is not None:
                self._refuse([member], self._over, "job")
            elif self._fits(member):
                self._start_if_ready()
        elif kind == "failed":
            self._fail(member, tuple(message["order"]), str(message["text"]))
        elif kind == "done":
            member.done = True
            running = [other for other in self._members if other.running]
            if all(other.done for other in running):
                self._tell(running, "done")
        elif kind == "leave":
            self._forget(member)
            if message["failed"]:
                self._over = f"{member.name} has ended, without restarts left"
                self._refuse([other for other in self._members if other.joined is not None], self._over, "job")
            elif member.running and not member.done:
                self._fail(member, (-1,), f"{member.name} was stopped by a signal\n")

    def _fits(self, member: _Member) -> bool:
        """Whether this host's settings are those of the others; if not, both sides are told."""
        member.admitted = True
        for other in self._members:
            if not other.admitted or other is member:
                continue
            given = {"machine_rank given": member.hello["machine_rank"] is not None, **member.hello["same"]}
            there = {"machine_rank given": other.hello["machine_rank"] is not None, **other.hello["same"]}
            for name in given.keys() | there.keys():
                if given.get(name) != there.get(name):
                    text = f"{name}: {given.get(name)} on {member.name}, {there.get(name)} on {other.name}"
                    member.admitted = False
                    self._refuse([member] if other.running else [member, other], text, "settings")
                    return False
        return True

    def _start_if_ready(self) -> None:
        joined = [member for member in self._members if member.joined is not None]
        # Not while an attempt is running, or before the host of the desk, which alone has opened a store, is there.
        if any(member.running for member in self._members) or not any(member.joined for member in joined):
            return
        if len(joined) < self._hosts:
            return
        joined.sort(key=lambda member: (not member.joined, member.hello["machine_rank"] or 0))
        ranks = [member.hello["machine_rank"] for member in joined[: self._hosts]]
        if None not in ranks and ranks != list(range(self._hosts)):
            text = f"the machine ranks of the hosts are {', '.join(map(str, ranks))}: each from 0 must be there once"
            self._refuse(joined, text, "settings")
            return
        first, port = joined[0].address, joined[0].joined
        for rank, member in enumerate(joined[: self._hosts]):
            member.rank, member.running, member.joined = rank, True, None
            member.line.send("start", rank=rank, hosts=self._hosts, address=first, port=port)
        self._failures, self._verdict_at = [], None

    def _fail(self, member: _Member, order: tuple[float, ...], text: str) -> None:
        if not any(other.running for other in [member, *self._members]):
            return  # a verdict has been given
        self._failures.append((order, member, text))
        if self._verdict_at is None:
            self._verdict_at = time.monotonic() + VERDICT_SECONDS

    def _lose(self, member: _Member, how: str) -> None:
        self._forget(member)
        if member.running and not member.done:
            # Before everything else: the failures that others report are of the connections to it.
            self._fail(member, (-1,), f"{member.name} {how}\n")

    def _forget(self, member: _Member) -> None:
        self._members.remove(member)
        self._selector.unregister(member.line.socket)
        member.line.close()

    def _give_verdict(self) -> None:
        self._verdict_at = None
        _, first, text = min(self._failures, key=lambda failure: failure[0])
        for member in [member for member in self._members if member.running]:
            member.line.send("verdict", host=first.name, text=text, here=member is first)
            member.running = False
        self._start_if_ready()


class Membership:
    """This host's connection to the desk.

    Args:
        where: address and port of the desk.
        hello: `host` (its name), `machine_rank`, and under `same` what must be equal on all hosts.
        timeout_seconds: how long to wait for the other hosts.
        say: prints one line for the user.
    """

    def __init__(
        self, where: tuple[str, int], hello: dict[str, Any], timeout_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._where, self._hello, self._timeout, self._say = where, hello, timeout_seconds, say
        self._line: Line | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self._start: Start | None = None
        self._refused: Exception | None = None
        self._running = self._done = False
        self.verdict: Verdict | None = None
        """Why the attempt that is running has failed."""
        self.failed = False
        """Whether this host is about to end because of a failure."""
        self.address = where[0]
        """The address of this host on the network of the desk, once connected."""

    def connect(self) -> None:
        """Find the desk, if there is no connection to it already.

        Raises:
            CommunicationError: nobody answers in time.
        """
        self._connect(time.monotonic() + self._timeout)

    def join(self, port: int) -> Start:
        """Wait until all hosts are ready for the next attempt.

        Args:
            port: of the store that was opened here; 0 where the desk is elsewhere.

        Raises:
            CommunicationError: they are not in time, or the job is over.
            ConfigError: they do not fit together.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._start, self._refused, self.verdict, self._done = None, None, None, False
        joined_on, say_at = None, time.monotonic() + 5
        while time.monotonic() < deadline:
            line = self._connect(deadline)
            if line is not joined_on:  # also after the host of the desk has come back
                line.send("join", port=port)
                joined_on = line
            with self._changed:
                self._changed.wait_for(lambda: self._start or self._refused or self._line is None, timeout=0.5)
                if self._refused is not None:
                    self.failed = True
                    raise self._refused
                if self._start is not None:
                    self._running = True
                    return self._start
            if time.monotonic() > say_at:
                say_at += REPEAT_SECONDS
                self._say(f"waiting at {_place(self._where)} for the other hosts to join")
        self.failed = True
        raise CommunicationError(
            f"the other hosts have not joined at {_place(self._where)} within {self._timeout:.0f} seconds",
            hint="start `fullshard launch` on every host; --rdzv_conf join_timeout=SECONDS waits longer",
        )

    def report(self, order: tuple[float, ...], text: str) -> Verdict | None:
        """Say that a rank here has failed, and learn which host was first; None if the desk does not answer."""
        self._send("failed", order=order, text=text[-_LONGEST_NBYTES // 8 :])
        with self._changed:
            self._changed.wait_for(lambda: self.verdict, timeout=VERDICT_SECONDS + 2)
            return self.verdict

    def finish(self) -> Verdict | None:
        """Say that all ranks here have succeeded, and wait for those of the other hosts; the verdict if some fail."""
        self._send("done")
        with self._changed:
            self._changed.wait_for(lambda: self._done or self.verdict)
            return None if self._done else self.verdict

    def close(self) -> None:
        """Leave the job."""
        with self._changed:
            line, self._line = self._line, None
        if line is not None:
            line.send("leave", failed=self.failed)
            if self._reader is not None:
                self._reader.join(timeout=1)  # the desk closes; closing first could lose what was sent last
            line.close()

    def _send(self, kind: str, **content: Any) -> None:
        line = self._line
        if line is not None:
            line.send(kind, **content)

    def _connect(self, deadline: float) -> Line:
        say_at = time.monotonic() + 5
        while (line := self._line) is None:
            try:
                connection = socket.create_connection(self._where, timeout=5)
            except OSError as error:
                if time.monotonic() > deadline:
                    self.failed = True
                    raise CommunicationError(
                        f"no launcher answers at {_place(self._where)} after {self._timeout:.0f} seconds: {error}",
                        hint="start `fullshard launch` on the host with that address too, and let the port through",
                    ) from None
                if time.monotonic() > say_at:
                    say_at += REPEAT_SECONDS
                    self._say(f"waiting for the launcher at {_place(self._where)} ({error})")
                time.sleep(0.2)
                continue
            self.address = connection.getsockname()[0]
            line = Line(connection)
            line.send("hello", **self._hello)
            with self._changed:
                self._line = line
            self._reader = threading.Thread(target=self._read, args=(line,), name="fullshard-membership", daemon=True)
            self._reader.start()
        return line

    def _read(self, line: Line) -> None:
        while (messages := line.receive()) is not None:
            with self._changed:
                for message in messages:
                    self._take(line, message.pop("kind"), message)
                self._changed.notify_all()
        with self._changed:
            if self._line is line:
                self._line = None
                line.close()
                if self._running and not self._done:
                    text = f"the launcher at {_place(self._where)} is gone: it was killed, or the network failed\n"
                    self._running, self.verdict = False, self.verdict or Verdict(self._where[0], text)
            self._changed.notify_all()

    def _take(self, line: Line, kind: str, message: dict[str, Any]) -> None:
        if kind == "alive":
            line.send("alive")
        elif kind == "start":
            self._start = Start(**message)
        elif kind == "verdict":
            self._running, self.verdict = False, Verdict(**message)
        elif kind == "done":
            self._running, self._done = False, True
        elif kind == "refused" and message["error"] == "settings":
            self._refused = ConfigError(message["text"], hint="start all hosts with the same settings")
        elif kind == "refused":
            self._refused = CommunicationError(message["text"])


def _place(where: tuple[str, int]) -> str:
    return f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
