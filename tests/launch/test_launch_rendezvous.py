"""The rendezvous server and its clients over the loopback address, each message by itself.

`test_launch_hosts` starts whole jobs in network namespaces; here the server runs in this process, and hosts are played.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.launch import rendezvous, rendezvous_server
from fullshard.launch.rendezvous import MultiHostRendezvous
from fullshard.launch.rendezvous_server import Connection, HostAssignment, RendezvousClient, RendezvousServer, RootCause

LOOPBACK = "127.0.0.1"
Closing = TypeVar("Closing")


_to_close: list[Any] = []


def opened(thing: Closing) -> Closing:
    """Have it closed at the end of the test."""
    _to_close.append(thing)
    return thing


class Host:
    """A launcher that says just what a test has it say."""

    def __init__(self, where: tuple[str, int], host: str, machine_rank: int | None = None, **same: str) -> None:
        self.connection = opened(Connection(socket.create_connection(where, timeout=20)))
        self._unread: list[dict[str, Any]] = []
        self.connection.prove("")
        self.connection.send("hello", host=host, machine_rank=machine_rank, same=same)

    def send(self, kind: str, **content: Any) -> None:
        self.connection.send(kind, **content)

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of that kind. What keeps the connection alive is answered."""
        while True:
            while self._unread:
                message = self._unread.pop(0)
                if message["kind"] != "keep_alive":
                    assert message.pop("kind") == kind, message
                    return message
                self.send("keep_alive")
            received = self.connection.receive()
            assert received is not None, f"the server closed the connection instead of saying {kind}"
            self._unread += received

    def is_closed(self) -> bool:
        """Whether the server ends the connection, whatever it says before."""
        while (received := self.connection.receive()) is not None:
            self._unread += received
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Root causes are told soon, waiting is said soon, and all is closed in the end, a server after its hosts."""
    monkeypatch.setattr(rendezvous_server, "ROOT_CAUSE_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous_server, "FIRST_SAID_SECONDS", 0.2)
    yield
    while _to_close:
        _to_close.pop().close()


def serve(hosts: int = 2, token: str = "") -> tuple[RendezvousServer, tuple[str, int]]:
    """A server, and where it listens."""
    listening = socket.create_server((LOOPBACK, 0))
    server = opened(RendezvousServer(listening, hosts, token))
    server.start()
    return server, (LOOPBACK, listening.getsockname()[1])


@pytest.fixture
def where() -> tuple[str, int]:
    """Where a server for two hosts listens."""
    return serve()[1]


def started(where: tuple[str, int]) -> tuple[Host, Host]:
    """Two hosts of an attempt that is running."""
    first, second = Host(where, "a"), Host(where, "b")
    first.send("join", port=7)
    second.send("join", port=0)
    assert [host.hear("start")["rank"] for host in (first, second)] == [0, 1]
    return first, second


# -- joining --------------------------------------------------------------------------------------------------------


def test_the_host_that_has_opened_a_store_is_first(where: tuple[str, int]) -> None:
    """Whoever comes first, and nobody starts before it is there."""
    second, first = Host(where, "b"), Host(where, "a")
    second.send("join", port=0)
    time.sleep(0.2)
    first.send("join", port=4711)
    assert first.hear("start") == {"rank": 0, "hosts": 2, "address": LOOPBACK, "port": 4711}
    assert second.hear("start") == {"rank": 1, "hosts": 2, "address": LOOPBACK, "port": 4711}


def test_machine_ranks_order_the_hosts() -> None:
    _, where = serve(3)
    hosts = {rank: Host(where, f"h{rank}", rank) for rank in (2, 0, 1)}
    for rank, host in hosts.items():
        host.send("join", port=9 if rank == 0 else 0)
    assert {rank: host.hear("start")["rank"] for rank, host in hosts.items()} == {0: 0, 1: 1, 2: 2}


def test_machine_ranks_that_are_not_each_there_once_are_refused(where: tuple[str, int]) -> None:
    hosts = [Host(where, "a", 0), Host(where, "b", 2)]
    hosts[0].send("join", port=1)
    hosts[1].send("join", port=0)
    for host in hosts:
        told = host.hear("refused")
        assert told["text"] == "the hosts' machine ranks must be consecutive numbers from 0, got 0, 2"
        assert told["error"] == "settings"


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"x": "1"}, {"x": "2"}, "x: 2 on b (127.0.0.1), 1 on a (127.0.0.1)"),
        ({"x": "1"}, {}, "x: None on b (127.0.0.1), 1 on a (127.0.0.1)"),
        ({"machine_rank": 0}, {}, "machine_rank given: False on b (127.0.0.1), True on a (127.0.0.1)"),
    ],
    ids=["value", "missing", "machine-rank"],
)
def test_hosts_with_other_settings_are_both_refused(
    where: tuple[str, int], one: dict[str, Any], other: dict[str, Any], text: str
) -> None:
    first, second = Host(where, "a", **one), Host(where, "b", **other)
    first.send("join", port=1)
    time.sleep(0.2)
    second.send("join", port=0)
    assert first.hear("refused") == second.hear("refused") == {"text": text, "error": "settings"}


def test_a_running_job_is_not_told_of_a_stranger_with_other_settings(where: tuple[str, int]) -> None:
    first, second = started(where)
    stranger = Host(where, "c", x="1")
    stranger.send("join", port=0)
    assert "x: 1 on c" in stranger.hear("refused")["text"]
    for host in (first, second):
        host.send("done")
    assert first.hear("done") == second.hear("done") == {}


def test_one_that_waits_takes_the_place_of_one_that_is_lost(where: tuple[str, int]) -> None:
    first, second = started(where)
    third = Host(where, "c")
    third.send("join", port=0)
    second.connection.close()
    assert first.hear("root_cause")["here"] is False
    first.send("join", port=8)
    assert first.hear("start")["rank"] == 0
    assert third.hear("start") == {"rank": 1, "hosts": 2, "address": LOOPBACK, "port": 8}


# -- the end of an attempt ------------------------------------------------------------------------------------------


def test_the_first_failure_is_the_root_cause_whenever_it_is_heard_of(where: tuple[str, int]) -> None:
    first, second = started(where)
    first.send("failed", order=(1, 5.0), text="the connection to b is gone")
    second.send("failed", order=(0, 9.0), text="killed")
    for host, here in ((first, False), (second, True)):
        told = {"host": "host 1, b (127.0.0.1),", "text": "killed", "here": here, "lost": False}
        assert host.hear("root_cause") == told


def test_all_start_again_when_all_have_joined_again(where: tuple[str, int]) -> None:
    """A failure that is told after the root cause belongs to the attempt before, which is over."""
    first, second = started(where)
    first.send("failed", order=(1, 5.0), text="one")
    assert first.hear("root_cause")["text"] == second.hear("root_cause")["text"] == "one"
    second.send("failed", order=(0, 1.0), text="late")
    first.send("join", port=8)
    second.send("join", port=0)
    assert [host.hear("start")["port"] for host in (first, second)] == [8, 8]
    second.send("failed", order=(1, 7.0), text="two")
    assert first.hear("root_cause")["text"] == second.hear("root_cause")["text"] == "two"


def test_a_lost_host_is_the_root_cause_of_what_others_report(where: tuple[str, int]) -> None:
    first, second = started(where)
    first.send("failed", order=(0, 1.0), text="the connection to b is gone")
    second.connection.close()
    told = first.hear("root_cause")
    assert told["text"] == (
        "host 1, b (127.0.0.1), is gone: its launcher was killed, or the network between the hosts failed\n"
    )
    assert (told["host"], told["here"]) == ("host 1, b (127.0.0.1),", False)


def test_a_cause_that_nothing_can_precede_is_told_at_once(
    where: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost host, and the last of the hosts that could have failed."""
    monkeypatch.setattr(rendezvous_server, "ROOT_CAUSE_SECONDS", 15.0)
    first, second = started(where)
    begin = time.monotonic()
    first.send("failed", order=(0, 2.0), text="later")
    second.send("failed", order=(0, 1.0), text="sooner")
    assert first.hear("root_cause")["text"] == second.hear("root_cause")["text"] == "sooner"
    for host, port in ((first, 8), (second, 0)):
        host.send("join", port=port)
    assert [host.hear("start")["port"] for host in (first, second)] == [8, 8]
    second.connection.close()
    assert first.hear("root_cause")["lost"]
    assert time.monotonic() - begin < 10


def test_a_host_that_is_done_may_go(where: tuple[str, int]) -> None:
    first, second = started(where)
    second.send("done")
    second.connection.close()
    first.send("done")
    assert first.hear("done") == {}


def test_done_is_told_when_the_last_host_is_done(where: tuple[str, int]) -> None:
    first, second = started(where)
    first.send("done")
    time.sleep(0.3)
    second.send("failed", order=(1, 1.0), text="late")
    assert first.hear("root_cause")["text"] == "late", "it was not told that all are done"


def test_a_silent_host_is_lost_and_one_that_answers_is_not(
    where: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = started(where)
    monkeypatch.setattr(rendezvous_server, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous_server, "TIMEOUT_SECONDS", 1.5)
    told = first.hear("root_cause")  # which answers what keeps the connection alive
    assert told["text"] == "host 1, b (127.0.0.1), has sent nothing for 2 seconds\n"
    assert second.is_closed()


def test_who_does_not_say_who_it_is_has_less_time(where: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "PROOF_SECONDS", 0.3)
    with socket.create_connection(where, timeout=5) as stranger:
        while stranger.recv(1000):
            pass


def test_one_that_ends_without_restarts_ends_the_job(where: tuple[str, int]) -> None:
    first, second = started(where)
    second.send("failed", order=(1, 1.0), text="one")
    first.hear("root_cause")
    first.send("join", port=8)
    second.send("leave", failed=True)
    told = {"text": "host 1, b (127.0.0.1), has ended and has no restarts left", "error": "job"}
    assert first.hear("refused") == told
    late = Host(where, "c")
    late.send("join", port=0)
    assert late.hear("refused") == told


def test_one_that_leaves_while_it_runs_was_stopped(where: tuple[str, int]) -> None:
    first, second = started(where)
    second.send("leave", failed=False)
    assert first.hear("root_cause")["text"] == "host 1, b (127.0.0.1), was stopped by a signal\n"


def test_one_that_leaves_when_it_is_done_is_no_failure(where: tuple[str, int]) -> None:
    first, second = started(where)
    second.send("done")
    second.send("leave", failed=False)
    first.send("done")
    assert first.hear("done") == {}


# -- messages -------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_however_they_are_cut(where: tuple[str, int]) -> None:
    with socket.create_connection(where) as plain:
        hello = json.dumps({"kind": "hello", "host": "a", "machine_rank": None, "same": {}}).encode()
        join = json.dumps({"kind": "join", "port": 5}).encode()
        proof = rendezvous_server._proof("", plain.recv(64, socket.MSG_WAITALL))
        plain.sendall(proof[:10])
        time.sleep(0.2)
        plain.sendall(proof[10:] + hello[:10])
        time.sleep(0.2)
        plain.sendall(hello[10:] + b"\n" + join + b"\n")
        second = Host(where, "b")
        second.send("join", port=0)
        assert second.hear("start")["port"] == 5


@pytest.mark.parametrize(
    ("sent", "how"),
    [
        (b"no JSON\n", "is gone"),
        (b'["a list"]\n', "is gone"),
        (b'{"no": "kind"}\n', "is gone"),
        (b"x" * ((1 << 20) + 1), "is gone"),
        (b'{"kind": "failed"}\n', "sent an invalid message"),
        (b'{"kind": "join", "port": "x"}\n', "sent an invalid message"),
        (b'{"kind": "failed", "order": [1' + b"0" * 400 + b', 0], "text": ""}\n', "sent an invalid message"),
    ],
    ids=["text", "list", "no-kind", "too-long", "no-content", "no-number", "too-large"],
)
def test_what_is_no_message_loses_its_host(where: tuple[str, int], sent: bytes, how: str) -> None:
    first, second = started(where)
    second.connection.socket.sendall(sent)
    assert first.hear("root_cause")["text"].startswith(f"host 1, b (127.0.0.1), {how}")
    assert second.is_closed()


HELLO = b'{"kind": "hello", "host": "x", "machine_rank": null, "same": {}}\n'
ATTACKS = {
    "no proof": b"\n" * 64 + HELLO + b'{"kind": "failed", "order": [0], "text": "the end"}\n',
    "garbage": bytes(range(256)) * 4096,
    "half a proof": b"0" * 10,
    "nothing": b"",
}
PROVED_ATTACKS = {
    "brackets": b"[" * 100_000 + b"\n",
    "failed without hello": b'{"kind": "failed", "order": [-9], "text": "the end"}\n',
    "failed after hello": HELLO + b'{"kind": "failed", "order": [-9], "text": "the end"}\n',
    "left": HELLO + b'{"kind": "leave", "failed": true}\n',
    "left without a word": HELLO + b'{"kind": "leave"}\n',
    "hello of other types": b'{"kind": "hello", "host": 1, "machine_rank": "0", "same": []}\n',
    "a long line": HELLO + b"x" * (1 << 21),
    "kinds of other types": HELLO + b'{"kind": [1]}\n{"kind": null}\n',
    "long settings": HELLO.replace(b"{}", b'{"x": "' + b"x" * 900_000 + b'"}') + b'{"kind": "join", "port": 0}\n' * 30,
    "no port": HELLO + b'{"kind": "join", "port": 70000}\n',
}


def test_strangers_do_not_end_the_job(where: tuple[str, int]) -> None:
    """Whatever they send, and however many they are; the job learns of its own failures afterwards."""
    first, second = started(where)
    sockets = [socket.create_connection(where, timeout=20) for _ in range(300)]
    for stranger, sent in zip(sockets, (ATTACKS | PROVED_ATTACKS).values(), strict=False):
        with contextlib.suppress(OSError):  # closed before all was sent
            if sent not in ATTACKS.values():
                Connection(stranger).prove("")
            stranger.sendall(sent)
    for stranger in sockets[:250]:
        stranger.close()
    second.send("failed", order=[1, 2.0], text="a real one\n")
    assert first.hear("root_cause")["text"] == "a real one\n"
    for stranger in sockets:
        stranger.close()


def test_a_stranger_who_reads_nothing_keeps_nobody_waiting(
    where: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are as long as they may be, and it is told of them until that is enough."""
    monkeypatch.setattr(rendezvous_server, "TIMEOUT_SECONDS", 3.0)
    first, second = started(where)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stranger.connect(where)
        connection = Connection(stranger)
        connection.prove("")
        connection.send("hello", host="\x1b[2J" * 99, machine_rank=None, same={"s" * 99: "x" * 60_000})
        with pytest.raises(ConnectionError):
            for _ in range(2_000):
                stranger.sendall(b'{"kind": "join", "port": 0}\n' * 100)
                for host in (first, second):
                    host.send("keep_alive")
    second.send("failed", order=[1, 2.0], text="a real one\n")
    assert first.hear("root_cause")["text"] == "a real one\n"


def test_an_answer_is_of_no_use_a_second_time() -> None:
    where = serve(token="secret")[1]
    with socket.create_connection(where, timeout=20) as known, socket.create_connection(where, timeout=20) as replayed:
        challenges = [each.recv(64, socket.MSG_WAITALL) for each in (known, replayed)]
        assert challenges[0] != challenges[1]
        answer = rendezvous_server._proof("secret", challenges[0])
        for each in (known, replayed):
            each.sendall(answer + HELLO)
        told = replayed.makefile().readline()
        assert "the job's token ($FULLSHARD_TOKEN)" in told
        assert "keep_alive" in known.makefile().readline()


def test_strangers_leave_room_for_no_more_than_there_may_be(where: tuple[str, int]) -> None:
    """Those that have said hello, too."""
    started(where)
    strangers = [Host(where, "x") for _ in range(rendezvous_server._MOST_STRANGERS + 4)]
    assert strangers
    with socket.create_connection(where, timeout=20) as late:
        assert late.recv(1) == b""


def test_who_does_not_know_the_token_is_told(pool: ThreadPoolExecutor) -> None:
    listening = socket.create_server((LOOPBACK, 0))
    server = opened(RendezvousServer(listening, 2, "secret"))
    server.start()
    where = (LOOPBACK, listening.getsockname()[1])
    hello: dict[str, Any] = {"host": "a", "machine_rank": None, "same": {}}
    for token in ("", "Secret"):
        stranger = opened(RendezvousClient(where, hello, 30, print, token))
        with pytest.raises(ConfigError, match=r"the job's token \(\$FULLSHARD_TOKEN\)"):
            stranger.join(7)
    known = [opened(RendezvousClient(where, hello, 30, print, "secret")) for _ in range(2)]
    answers = [pool.submit(each.join, port) for each, port in zip(known, (7, 0), strict=True)]
    assert [answer.result(30).rank for answer in answers] == [0, 1]


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REACH_SECONDS", 1.0)
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(CommunicationError, match=f"store at {LOOPBACK}:{port} did not answer within 1 seconds"):
        rendezvous.reach_store(LOOPBACK, port)
    assert time.monotonic() - begin < 20
    store: Any = rendezvous.open_store(LOOPBACK)
    reached: Any = rendezvous.reach_store(LOOPBACK, store.port)
    assert reached.timeout == store.timeout


# -- the client -----------------------------------------------------------------------------------------------------


class Said(list[str]):
    """What a client has said to the user."""

    def has(self, words: str) -> bool:
        return any(words in line for line in self)


def client(where: tuple[str, int], host: str, *, seconds: float = 30, said: Said | None = None) -> RendezvousClient:
    hello: dict[str, Any] = {"host": host, "machine_rank": None, "same": {}}
    return opened(RendezvousClient(where, hello, seconds, (said if said is not None else Said()).append))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def joined(where: tuple[str, int], pool: ThreadPoolExecutor) -> tuple[RendezvousClient, RendezvousClient]:
    clients = client(where, "a"), client(where, "b")
    answers = [pool.submit(each.join, port) for each, port in zip(clients, (7, 0), strict=True)]
    assert [answer.result(30) for answer in answers] == [HostAssignment(rank, 2, LOOPBACK, 7) for rank in (0, 1)]
    return clients


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_clients_learn_that_all_are_done(where: tuple[str, int], pool: ThreadPoolExecutor) -> None:
    first, second = joined(where, pool)
    ended = pool.submit(first.finish)
    time.sleep(0.3)
    assert not ended.done(), "the other host is not"
    assert (second.finish(), ended.result(30)) == (None, None)
    assert not (first.failed or second.failed)


def test_clients_learn_the_root_cause(where: tuple[str, int], pool: ThreadPoolExecutor) -> None:
    """One that waits for the others to be done, and one that reports."""
    first, second = joined(where, pool)
    ended = pool.submit(first.finish)
    assert second.report((1, 2.0), "text") == RootCause("host 1, b (127.0.0.1),", "text", here=True)
    assert ended.result(30) == RootCause("host 1, b (127.0.0.1),", "text", here=False)
    again = [pool.submit(each.join, port) for each, port in ((first, 8), (second, 0))]
    assert [answer.result(30).port for answer in again] == [8, 8]
    assert (first.root_cause, second.root_cause) == (None, None)


def test_a_failure_is_as_old_as_its_hosts_clock_says(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour that two hosts' clocks are apart makes none of their failures the first."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        host = client(listening.getsockname(), "a")
        connected = pool.submit(host.connect)
        server = accept(listening)
        connected.result(30)
        now = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: now)
        told = pool.submit(host.report, (1, now - 5.0), "why")
        messages: list[dict[str, Any]] = []
        while not any(message["kind"] == "failed" for message in messages):
            messages += server.receive() or []
        assert messages[-1] == {"kind": "failed", "order": [1, -5.0], "text": "why"}
        server.send("root_cause", host="a", text="why")
        assert told.result(30) == RootCause("a", "why")


def test_a_client_without_a_server_says_so() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        where = listening.getsockname()
    said = Said()
    alone = client(where, "a", seconds=1.0, said=said)
    with pytest.raises(CommunicationError, match=rf"no launcher answered at 127.0.0.1:{where[1]} within 1 seconds: "):
        alone.connect()
    assert alone.failed
    assert said.has(f"waiting for the launcher at 127.0.0.1:{where[1]} (")


def test_a_client_whose_others_do_not_come_says_so(where: tuple[str, int]) -> None:
    said = Said()
    alone = client(where, "a", seconds=1.0, said=said)
    with pytest.raises(CommunicationError, match=rf"the other hosts did not join at 127.0.0.1:{where[1]} within 1 sec"):
        alone.join(5)
    assert alone.failed
    assert said == [f"waiting at 127.0.0.1:{where[1]} for the other hosts to join"]


def test_a_client_that_is_refused_raises_by_the_reason(where: tuple[str, int], pool: ThreadPoolExecutor) -> None:
    hellos: list[dict[str, Any]] = [{"host": name, "machine_rank": None, "same": {"x": name}} for name in "ab"]
    hosts = [opened(RendezvousClient(where, hello, 30, print)) for hello in hellos]
    for answer in [pool.submit(host.join, port) for host, port in zip(hosts, (5, 0), strict=True)]:
        with pytest.raises(ConfigError, match="x: ") as error:
            answer.result(30)
        assert error.value.hint == "use the same settings on all hosts"
    assert all(host.failed for host in hosts)


def test_a_client_of_a_job_that_is_over_raises(where: tuple[str, int]) -> None:
    gone = Host(where, "a")
    gone.send("leave", failed=True)
    with pytest.raises(CommunicationError, match="has ended and has no restarts left"):
        client(where, "b").join(0)


def test_a_client_that_closes_tells_why(where: tuple[str, int], pool: ThreadPoolExecutor) -> None:
    first, second = joined(where, pool)
    second.failed = True
    second.close()
    with pytest.raises(CommunicationError, match=r"host 1, b .* has ended and has no restarts left"):
        first.join(8)


def accept(listening: socket.socket) -> Connection:
    connection = opened(Connection(listening.accept()[0]))
    connection.challenge()
    while not connection.is_proved:
        assert connection.take_proof("")
    return connection


def test_a_server_that_is_gone_is_the_root_cause(pool: ThreadPoolExecutor) -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        where = listening.getsockname()
        host = client(where, "a")
        answer = pool.submit(host.join, 0)
        server = accept(listening)
        server.send("start", rank=1, hosts=2, address=LOOPBACK, port=3)
        assert answer.result(30).rank == 1
        server.close()
        until(lambda: host.root_cause, "the client learns of it")
        text = f"the launcher at 127.0.0.1:{where[1]} is gone: it was killed, or the network failed\n"
        assert host.root_cause == RootCause(LOOPBACK, text, gone=True)
        assert host.finish() == host.root_cause


def test_a_server_that_ends_after_all_is_done_is_no_failure(pool: ThreadPoolExecutor) -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        host = client(listening.getsockname(), "a")
        answer = pool.submit(host.join, 0)
        server = accept(listening)
        server.send("start", rank=1, hosts=2, address=LOOPBACK, port=3)
        answer.result(30)
        server.send("done")
        server.close()
        assert host.finish() is None
        until(lambda: host._connection is None, "the connection ends")
        assert host.root_cause is None


def test_a_client_joins_again_where_the_server_has_come_back(pool: ThreadPoolExecutor) -> None:
    """The host of the server was started anew before all had joined."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        host = client(listening.getsockname(), "a")
        answer = pool.submit(host.join, 0)
        first = accept(listening)
        assert _kinds(first, 2) == ["hello", "join"]
        first.close()
        second = accept(listening)
        assert _kinds(second, 2) == ["hello", "join"]
        second.send("start", rank=1, hosts=2, address=LOOPBACK, port=3)
        assert answer.result(30) == HostAssignment(1, 2, LOOPBACK, 3)
        assert host.root_cause is None


def test_a_client_answers_what_keeps_it_alive(pool: ThreadPoolExecutor) -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        connected = pool.submit(client(listening.getsockname(), "a").connect)
        server = accept(listening)
        connected.result(30)
        server.send("keep_alive")
        assert _kinds(server, 2) == ["hello", "keep_alive"]


def _kinds(connection: Connection, count: int) -> list[str]:
    kinds: list[str] = []
    while len(kinds) < count:
        received = connection.receive()
        assert received is not None, kinds
        kinds += [message["kind"] for message in received]
    return kinds


# -- torchelastic's side ----------------------------------------------------------------------------------------------


def test_two_hosts_find_one_store(pool: ThreadPoolExecutor) -> None:
    """What the first puts there the second reads; the server stays until both have left."""
    server, where = serve()
    handlers = [MultiHostRendezvous("job", client(where, name), server if name == "a" else None) for name in "ab"]
    found = [pool.submit(handler.next_rendezvous) for handler in handlers]
    first, second = (each.result(60) for each in found)
    assert [(each.rank, each.world_size) for each in (first, second)] == [(0, 2), (1, 2)]
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert first.bootstrap_store_info == second.bootstrap_store_info is not None
    left = pool.submit(handlers[0].shutdown)
    time.sleep(0.5)
    assert server.is_alive()
    handlers[1].shutdown()
    assert left.result(30)
    until(lambda: not server.is_alive(), "the server ends")


def test_the_server_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds for one that does not leave."""
    server, where = serve()
    Host(where, "a")
    waited: list[float | None] = []
    with monkeypatch.context() as within:
        within.setattr(threading.Thread, "join", lambda _, timeout=None: waited.append(timeout))
        server.close()
    assert waited == [5]
    assert server.is_alive()


def test_addresses_are_written_as_people_write_them() -> None:
    assert rendezvous_server._shown(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert rendezvous_server._shown(("fd00::1", 5)) == "[fd00::1]:5"


# -- hosts that come and go -----------------------------------------------------------------------------------------


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Where a server for two or three hosts listens."""
    monkeypatch.setattr(rendezvous_server, "REGROUP_SECONDS", 0.2)
    listening = socket.create_server((LOOPBACK, 0))
    opened(RendezvousServer(listening, 3, least=2, last_call=0.3)).start()
    return LOOPBACK, listening.getsockname()[1]


def test_fewer_hosts_start_when_nobody_else_has_come(elastic: tuple[str, int]) -> None:
    first, second = Host(elastic, "a"), Host(elastic, "b")
    first.send("join", port=7)
    time.sleep(0.4)
    begin = time.monotonic()
    second.send("join", port=0)
    assert [host.hear("start")["hosts"] for host in (first, second)] == [2, 2]
    assert time.monotonic() - begin > 0.25, "a third might have come"


def test_all_hosts_start_at_once_and_go_on_without_the_lost_one(elastic: tuple[str, int]) -> None:
    hosts = [Host(elastic, name) for name in "abc"]
    for host in hosts:
        host.send("join", port=7 if host is hosts[0] else 0)
    assert [host.hear("start")["rank"] for host in hosts] == [0, 1, 2]
    hosts[1].connection.close()
    for host in (hosts[0], hosts[2]):
        cause = host.hear("root_cause")
        assert cause["lost"] and "is gone" in cause["text"]
    hosts[0].send("join", port=8)
    hosts[2].send("join", port=0)
    assert [(host.hear("start") | {"address": ""})["hosts"] for host in (hosts[0], hosts[2])] == [2, 2]


def test_a_host_that_failed_is_not_lost(elastic: tuple[str, int]) -> None:
    hosts = [Host(elastic, name) for name in "abc"]
    for host in hosts:
        host.send("join", port=7 if host is hosts[0] else 0)
        host.connection.socket.settimeout(5)
    for host in hosts:
        host.hear("start")
    hosts[1].send("failed", order=[1, 3.0], text="its fault")
    assert [host.hear("root_cause")["lost"] for host in hosts] == [False] * 3


def test_a_host_that_comes_is_told_of_and_all_begin_anew(elastic: tuple[str, int]) -> None:
    hosts = [Host(elastic, name) for name in "ab"]
    for host in hosts:
        host.send("join", port=7 if host is hosts[0] else 0)
    assert [host.hear("start")["hosts"] for host in hosts] == [2, 2]
    third = Host(elastic, "c")
    third.send("join", port=0)
    for host in hosts:
        host.hear("waiting")
        host.send("join", port=9 if host is hosts[0] else 0)
    starts = [host.hear("start") for host in (*hosts, third)]
    assert [start["rank"] for start in starts] == [0, 1, 2] and {start["port"] for start in starts} == {9}


def test_nobody_joins_a_job_that_has_ended(elastic: tuple[str, int]) -> None:
    hosts = [Host(elastic, name) for name in "ab"]
    for host in hosts:
        host.send("join", port=7 if host is hosts[0] else 0)
    for host in hosts:
        host.hear("start")
    for host in hosts:
        host.send("done")
    for host in hosts:
        host.hear("done")
    late = Host(elastic, "c")
    late.send("join", port=0)
    assert late.hear("refused") == {"text": "the job has ended", "error": "job"}
