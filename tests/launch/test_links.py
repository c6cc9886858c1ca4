"""What `fullshard doctor --run` says about links: of numbers, and of real faults in network namespaces.

Run: pytest tests/launch/test_links.py. The namespaces need root, `ip` and `tc` (package iproute2).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fullshard.launch.doctor import Finding, Trial, judge
from fullshard.launch.doctor_ranks import _pairs
from fullshard.launch.links import expected
from tests.launching import started
from tests.namespaces import bridge, cable_of, can_have_namespaces, ip, namespaces

H100 = "NVIDIA H100 80GB HBM3"


def rank(host: str = "a", device: str = H100, **facts: Any) -> dict[str, Any]:
    return {"host": host, "device": device, "interface": "eth0", "mtu": 1500, "speed": 0.0, **facts}


def link(source: int, target: int, rate: float, lost: float = 0.0) -> dict[str, Any]:
    return {"source": source, "target": target, "rate": rate, "lost": lost}


def named(links: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The links, as the ranks write them."""
    hosts = [[ranks[each[end]]["host"] for end in ("source", "target")] for each in links]
    names = [" to ".join(dict.fromkeys(ends)) for ends in hosts]
    return [each | {"name": name, "is_inside": " to " not in name} for each, name in zip(links, names, strict=True)]


def found(ranks: list[dict[str, Any]], links: list[dict[str, Any]] | None = None) -> list[Finding]:
    """The findings about a trial, by the way that the command goes."""
    return list(judge(Trial(0, {}, {}, ranks, named(links or [], ranks)), []))


# -- numbers ------------------------------------------------------------------------------------------------------


def test_a_link_is_compared_with_this_hardware() -> None:
    ranks = [rank("a"), rank("a"), rank("b")]
    inside, across = named([link(0, 1, 0.0), link(0, 2, 0.0)], ranks)
    assert expected(inside, ranks) == 0.75 * 450e9
    assert expected(across, ranks) == 0.75 * 50e9, "of the data sheet, where the network card is unknown"
    cards = [rank("a", speed=25e9 / 8), rank("a", speed=25e9 / 8), rank("b", speed=100e9 / 8)]
    assert expected(across, cards) == 0.75 * 25e9 / 8, "the slower of two network cards"
    assert expected(across, [rank("a", "cpu", speed=1.25e9)] * 2 + [rank("b", "cpu", speed=1.25e9)]) == 0.75e9
    assert expected(inside, [rank(device="Some GPU")] * 2) == 0.0


def test_a_ring_has_each_host_and_each_network_card() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    pairs = list(_pairs(hosts, shares_card=False))
    assert len(pairs) == len(set(pairs)) == 2 * 3 + 2 * 3 + 2 * 3
    assert {(0, 1), (1, 2), (2, 0), (0, 3), (3, 0), (1, 4), (2, 5)} <= set(pairs)
    assert list(_pairs(hosts, shares_card=True)) == [(0, 3), (3, 0)]
    assert set(_pairs(["a", "b", "c"], shares_card=True)) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert list(_pairs(["a", "a"], shares_card=True)) == [], "ranks of a host share memory"


def test_a_slow_link() -> None:
    ranks = [rank("a"), rank("a"), rank("b"), rank("b")]
    fine = [link(0, 1, 340e9), link(1, 0, 200e9), link(0, 2, 40e9), link(2, 0, 40e9)]
    assert found(ranks, fine) == []
    [inside] = found(ranks, [link(0, 1, 90e9), *fine[1:]])
    assert inside.is_wrong
    assert inside.text == "slow link, a: 90 GB/s from rank 0 to rank 1, expected 338 GB/s"
    [across] = found(ranks, [*fine[:2], link(0, 2, 3e9), fine[3]])
    assert across.text == "slow link, a to b: 3 GB/s from rank 0 to rank 2, expected 37.5 GB/s"
    assert "ethtool eth0" in across.hint


def test_one_slow_link_of_several_on_unknown_hardware() -> None:
    ranks = [rank("a", "Some GPU") for _ in range(4)]
    rates = [20e9, 21e9, 22e9, 9e9]
    [slow] = found(ranks, [link(source, (source + 1) % 4, rate) for source, rate in enumerate(rates)])
    assert slow.text == "slow link, a: 9 GB/s from rank 3 to rank 0, expected 20.5 GB/s"
    assert found(ranks[:2], [link(0, 1, 9e9), link(1, 0, 20e9)]) == [], "two links do not say which is usual"


def test_a_link_that_hung_is_named_before_the_exit_code() -> None:
    ranks = [rank("a", mtu=9000), rank("b", mtu=9000)]
    stuck, ended = judge(Trial(1, {}, {}, ranks, named([link(0, 1, 0.0)], ranks)), [])
    assert stuck.text.startswith("stuck link, a to b: small messages arrive, but large ones do not")
    assert "set switches to MTU 9000 or more, or on both hosts: ip link set eth0 mtu 1500" in stuck.hint
    assert ended.text.endswith(f"most likely: {stuck.text}")
    [inside, _] = judge(Trial(1, {}, {}, [rank(), rank()], named([link(0, 1, 0.0)], [rank(), rank()])), [])
    assert "turn off ACS and the IOMMU" in inside.hint


# -- faults -------------------------------------------------------------------------------------------------------

LOSE = "4,32 0 0 4294963256,37 0 1 {},6 0 0 0,6 0 0 2"
"""A packet filter: load a random number; if it is greater than the limit, accept the packet, else drop it."""


def tc(namespace: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", namespace, "tc", *words], check=True, capture_output=True, timeout=20)


def throttle(hosts: list[str]) -> None:
    tc(hosts[2], *f"qdisc add dev {cable_of(2)} root tbf rate 200mbit burst 256kb latency 50ms".split())


def lose(hosts: list[str]) -> None:
    """Drop 3 % of what the second host has sent, where its cable ends."""
    tc(bridge(), *["qdisc", "add", "dev", "to1", "clsact"])
    limit = LOSE.format(int(0.03 * 2**32))
    tc(bridge(), *["filter", "add", "dev", "to1", "ingress", "bpf", "bytecode"], limit, "da")


def shrink(hosts: list[str]) -> None:
    ip("-n", hosts[1], "link", "set", cable_of(1), "mtu", "1400")


def block(hosts: list[str]) -> None:
    """Hosts with jumbo frames at a switch port without."""
    for host, name in enumerate(hosts):
        ip("-n", name, "link", "set", cable_of(host), "mtu", "9000")
    ip("-n", bridge(), "link", "set", "to0", "mtu", "9000")
    ip("-n", bridge(), "link", "set", "to1", "mtu", "4000")


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    if not can_have_namespaces():
        pytest.skip("network namespaces need root and the program `ip`")
    with namespaces(request.param) as names:
        yield names


def examined(hosts: list[str], cwd: Path, seconds: float = 30) -> tuple[dict[str, Any], list[int]]:
    """What rank 0 says, and the exit codes of the launchers. `ip netns exec` shows each host its interfaces in /sys."""
    launch = [sys.executable, "-m", "fullshard", "launch", "--num_machines", str(len(hosts)), "--device", "cpu"]
    launch += ["--num_processes", str(len(hosts)), "--main_process_ip", "10.77.0.1", "--quiet"]
    doctor = ["-m", "fullshard", "doctor", "--run", "--json", "--timeout", str(seconds)]
    with ExitStack() as stack:
        first, *others = (
            stack.enter_context(
                started("ip", "netns", "exec", name, *launch, "--machine_rank", str(number), *doctor, cwd=cwd)
            )
            for number, name in enumerate(hosts)
        )
        said = first.communicate(timeout=200)[0]
        codes = [process.wait(60) for process in (first, *others)]
    beginning = said.find('{\n  "report"')
    assert beginning >= 0, said[-5000:]
    return json.JSONDecoder().raw_decode(said[beginning:])[0], codes


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("hosts", "fault", "words", "unsaid"),
    [
        (3, throttle, ["slow link", "10.77.0.3 to", "GB/s from rank 2", "expected"], "10.77.0.1 to"),
        (2, lose, ["lossy link", "10.77.0.2 to", "of packets are sent again"], "MTU"),
        (2, shrink, ["MTU", "10.77.0.2: ", "has 1400, expected 1500 as on other hosts"], "lossy"),
        (2, block, ["stuck link", "10.77.0.1 to", "packets of MTU 9000"], "lossy"),
    ],
    indirect=["hosts"],
    ids=["slow", "lossy", "mtu", "switch"],
)
def test_a_fault_is_named(
    hosts: list[str], fault: Callable[[list[str]], None], words: list[str], unsaid: str, tmp_path: Path
) -> None:
    fault(hosts)
    outcome, codes = examined(hosts, tmp_path, 15)
    assert not outcome["healthy"] and codes[0] == 1
    texts = [finding["text"] for finding in outcome["findings"] if finding["is_wrong"]]
    assert any(all(word in text for word in words) for text in texts), texts
    assert not any(unsaid in text.partition(":")[0] for text in texts), texts


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_healthy_links_are_measured(hosts: list[str], tmp_path: Path) -> None:
    outcome, codes = examined(hosts, tmp_path)
    assert outcome["healthy"] and codes == [0, 0], outcome["findings"]
    assert [(each["source"], each["target"]) for each in outcome["trial"]["links"]] == [(0, 1), (1, 0)]
