"""What `fullshard doctor --run` says about links: of real faults in network namespaces, and of recorded texts.

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
import torch

from fullshard.launch import doctor_ranks
from fullshard.launch.doctor import Finding, Trial, judge
from fullshard.launch.doctor_ranks import _pairs, ways_in
from fullshard.launch.environment import RankEnvironment
from fullshard.launch.links import expected, recommend
from tests.launching import started
from tests.namespaces import bridge, cable_of, can_have_namespaces, ip, namespaces

RECORDED = Path(__file__).parents[1] / "fixtures" / "links"
H100 = "NVIDIA H100 80GB HBM3"
ROCE = {"mlx5_0": {"port": "ens1", "speed": 50e9, "mtu": 9000}}


def rank(host: str = "a", device: str = H100, **facts: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        **{"interface": "eth0", "mtu": 1500, "speed": 0.0, "fabric": {}, "environ": {}, "lanes": {}},
        **{"ways": ["P2P"], "topology": "", "peers": ""},
    }
    return {"host": host, "device": device, **usual, **facts}


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
    assert expected(across, [rank("a", fabric=ROCE, speed=1e9)] * 2 + [rank("b", fabric=ROCE)]) == 0.75 * 50e9
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


# -- recorded texts -----------------------------------------------------------------------------------------------


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def test_p2p() -> None:
    ways = ways_in(recorded("nccl_shared_memory"))
    assert ways == ["SHM"], "`P2P Chunksize` is not a connection"
    card = "NVIDIA GeForce RTX 5090"
    facts: dict[str, Any] = {
        "ways": ways,
        "peers": recorded("peers_two_5090"),
        "topology": recorded("topology_two_5090"),
    }
    [missing] = found([rank(device=card, **facts)] * 2)
    assert not missing.is_wrong, "nothing can be done about it"
    assert missing.text.startswith(f"P2P off, a: {card} does not support it")
    [disabled] = found([rank(device=card, **facts, environ={"NCCL_P2P_DISABLE": "1"})])
    assert (disabled.is_wrong, disabled.hint) == (True, "unset NCCL_P2P_DISABLE")
    [blocked] = found([rank(ways=ways, peers=recorded("peers_two_5090").replace("\tGNS", "\tCNS"))])
    assert (blocked.is_wrong, "iommu=pt" in blocked.hint) == (True, True)
    [unused] = found([rank(ways=ways, peers=recorded("peers_two_5090").replace("\tGNS", "\tOK"))])
    assert (unused.is_wrong, unused.hint) == (True, "export NCCL_P2P_LEVEL=SYS")


def test_sockets_instead_of_rdma() -> None:
    ways = ways_in(recorded("nccl_sockets"))
    assert ways == ["NET/Socket", "P2P"]
    assert found([rank(ways=ways)]) == [], "a host without RDMA"
    assert found([rank(ways=["NET/IB"], fabric=ROCE)]) == []
    [unused] = found([rank(ways=ways, fabric=ROCE, environ={"NCCL_IB_HCA": "mlx5_7"})])
    assert unused.text.startswith("sockets instead of RDMA, a: NCCL sends through eth0, but mlx5_0 could send")
    assert "(NCCL_IB_HCA=mlx5_7)" in unused.text
    assert "export NCCL_IB_HCA=mlx5_0" in unused.hint
    [disabled] = found([rank(ways=ways, fabric=ROCE, environ={"NCCL_IB_DISABLE": "1"})])
    assert disabled.hint == "unset NCCL_IB_DISABLE"


def test_gpus_of_two_processors() -> None:
    assert found([rank(topology=recorded("topology_two_5090"))]) == []
    [far] = found([rank(topology=recorded("topology_five_gpus"))])
    assert not far.is_wrong
    assert far.text == "SYS topology, a: GPU0-GPU1, GPU0-GPU2, GPU0-GPU3, GPU0-GPU4 connect across processors"


def host_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_a_gb10_and_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/sys as the recorded `ibstat` describes it: two active RDMA devices for one port."""
    cards = recorded("ibstat_gb10").split("CA '")[1:]
    for card in cards:
        name = card.partition("'")[0]
        state = "4: ACTIVE" if "State: Active" in card else "1: DOWN"
        rate = card.partition("Rate: ")[2].split()[0]
        files = {
            "ports/1/state": state,
            "ports/1/rate": f"{rate} Gb/sec (4X HDR)",
            f"device/net/e{name[4:]}/mtu": "1500",
        }
        host_files(tmp_path / "class/infiniband" / name, files)
    monkeypatch.setattr(doctor_ranks, "_SYS", tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    facts = doctor_ranks._facts(torch.device("cpu"), RankEnvironment()) | {"device": "NVIDIA GB10", "ways": ["NET/IB"]}
    assert sorted(facts["fabric"]) == ["roceP2p1s0f0", "rocep1s0f0"]
    half, *mtus = found([facts])
    assert half.text.startswith("half a port, ") and "a GB10 is two RDMA devices" in half.text
    assert half.hint == "export NCCL_IB_HCA=roceP2p1s0f0,rocep1s0f0"
    assert all("has 1500 at 200 Gb/s, expected 9000" in mtu.text for mtu in mtus) and len(mtus) == 2
    assert not any(finding.is_wrong for finding in [half, *mtus])
    two = [facts | {"host": host, "environ": {"NCCL_IB_HCA": half.hint.partition("=")[2]}, "fabric": {
        name: port | {"mtu": 9000} for name, port in facts["fabric"].items()}} for host in "ab"]  # fmt: skip
    assert found(two, [link(0, 1, 23.7e9), link(1, 0, 23.7e9)]) == []
    [slow] = found(two, [link(0, 1, 3e9), link(1, 0, 23.7e9)])
    assert "3 GB/s from rank 0 to rank 1, expected 18.8 GB/s" in slow.text


def test_pcie_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"vendor": "0x10de", "class": "0x030000", "max_link_width": "16"}
    for slot, lanes in (("0000:01:00.0", "16"), ("0000:02:00.0", "8"), ("0000:2b:00.0", "4")):
        host_files(tmp_path / "bus/pci/devices" / slot, {**gpu, "current_link_width": lanes})
    audio = {**gpu, "class": "0x040300", "current_link_width": "1"}
    host_files(tmp_path / "bus/pci/devices/0000:01:00.1", audio)
    monkeypatch.setattr(doctor_ranks, "_SYS", tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    lanes = doctor_ranks._facts(torch.device("cpu"), RankEnvironment())["lanes"]
    half, few = sorted(found([rank(lanes=lanes)] * 2), key=lambda finding: finding.is_wrong)
    assert few.text == "PCIe lanes, a: the GPU at 0000:2b:00.0 uses 4 of 16"
    assert (half.is_wrong, few.is_wrong) == (False, True)
    assert "0000:02:00.0 uses 8 of 16" in half.text


def allowed(device: str, rate: float) -> list[str]:
    """The ways to train on two hosts with these speeds between them, the fastest first."""
    ranks = [rank("a", device), rank("b", device)]
    return list(recommend(ranks, named([link(0, 1, rate), link(1, 0, rate)], ranks)))


def test_strategies_follow_from_the_measured_speeds() -> None:
    slow, fast = allowed("NVIDIA GB10", 0.3e9), allowed("NVIDIA GB10", 23.7e9)
    assert sorted(slow) == sorted(fast) and len(slow) == 7
    assert slow[0] == "Qwen3-8B, split by layers (pipeline)"
    assert slow[-1] == "Qwen3-8B, FULL_SHARD", "it sends most"
    assert fast.index("Qwen3-8B, SHARD_OPTIMIZER") < fast.index("Qwen3-8B, split by layers (pipeline)")
    assert slow.index("Qwen3-8B, FULL_SHARD, int8 messages") < slow.index("Qwen3-8B, FULL_SHARD")
    assert allowed("NVIDIA GB10", 0.0) == [], "a link that hung"
    assert allowed("Some GPU", 1e9) == []
    assert recommend([rank()], []) == {}


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
    assert outcome["strategies"]
