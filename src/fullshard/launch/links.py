"""Judge the links that the ranks of `fullshard doctor --run` measured (`doctor_ranks`). Speeds are bytes per second."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.plan.advice import compare
from fullshard.plan.hardware import GB, find_device

Facts = dict[str, Any]
SLOW, LOSSY, JUMBO = 0.5, 0.003, 4096
"""A link is bad below this fraction of its expected speed, or above this fraction of packets that were sent again. RoCE
can only send its largest messages if the MTU exceeds them (bytes)."""


def expected(link: Facts, ranks: Sequence[Facts]) -> float:
    """Return the speed that this hardware should reach on a link, or 0 if the device is unknown."""
    ends = ranks[link["source"]], ranks[link["target"]]
    try:
        row = find_device(ends[0]["device"])
    except ConfigError:
        return 0.0
    card = min(max((port["speed"] for port in end["fabric"].values()), default=end["speed"]) for end in ends)
    most = row.network if row.is_cpu or not card else row.link
    return row.link_efficiency * (row.link if link["is_inside"] else min(card or most, most))


def recommend(ranks: Sequence[Facts], links: Sequence[Facts]) -> dict[str, str]:
    """Return the speeds of ways to train at the measured speeds, or nothing if too little is known."""
    hosts, rates = len({rank["host"] for rank in ranks}), {True: [0.0], False: [0.0]}
    for link in links:
        rates[link["is_inside"]].append(link["rate"] if expected(link, ranks) else 0.0)
    if not links or len(ranks) % hosts or not all(rate for each in rates.values() for rate in each[1:]):
        return {}
    return compare(find_device(ranks[0]["device"]), len(ranks), hosts, *(min(r[1:] or r) for r in rates.values()))


def judge_links(ranks: Sequence[Facts], links: Sequence[Facts]) -> Iterator[tuple[str, Facts]]:
    """Yield names in `verdicts.toml`, with the facts that the texts name, for links that are slow or may be."""
    for name, group in groupby(sorted(links, key=lambda link: (link["name"], link["rate"])), lambda link: link["name"]):
        worst, *others = group
        alike = [link["rate"] for link in links if link["is_inside"] == worst["is_inside"]]
        # One link that is slower than others of its kind is bad even if nothing is known about the hardware.
        wanted = max(expected(worst, ranks), median(alike) if len(alike) > 2 else 0.0)
        lost = max(link["lost"] for link in (worst, *others))
        numbers = {"name": name, "got": worst["rate"] / GB, "wanted": wanted / GB, "lost": lost, "most": LOSSY}
        facts = ranks[worst["source"]] | worst | numbers
        if worst["rate"] <= SLOW * wanted:
            yield ("slow" if worst["rate"] else "stuck") + ("_inside" if worst["is_inside"] else ""), facts
        if lost > LOSSY:
            yield "lossy", facts
    for rank in ranks:
        if rank["mtu"] < (largest := max(rank["mtu"] for rank in ranks)):
            yield "mtu", rank | {"largest": largest}
        yield from ((verdict, rank | more) for verdict, more in _configured(rank))


def _configured(rank: Facts) -> Iterator[tuple[str, Facts]]:
    environ, ways, active = rank["environ"], rank["ways"], sorted(rank["fabric"])
    names = {"active": ",".join(active), "asked": environ.get("NCCL_IB_HCA", "")}
    is_off = {name: environ.get(f"NCCL_{name}_DISABLE", "0") != "0" for name in ("P2P", "IB")}
    for slot, (lanes, most) in rank["lanes"].items():
        if lanes < most:
            yield "lanes" if 2 * lanes < most else "half_the_lanes", {"slot": slot, "got": lanes, "most": most}
    if "SHM" in ways:
        codes = {*rank["peers"].partition("Legend")[0].split()}
        why = "missing" if "GNS" in codes else "blocked" if codes & {"CNS", "TNS", "NS"} else "unused"
        yield f"p2p_{'disabled' if is_off['P2P'] else why}", {}
    if active and "NET/Socket" in ways:
        yield "rdma_disabled" if is_off["IB"] else "rdma_unused", names
    elif "GB10" in rank["device"] and len(active) > 1 and "," not in names["asked"]:
        yield "half_a_port", names
    for port in rank["fabric"].values():
        if 0 < port["mtu"] <= JUMBO and not port["port"].startswith("ib"):  # InfiniBand's messages have another limit
            yield "small_mtu", port | {"gigabits": 8 * port["speed"] / GB}
    rows = re.findall(r"^\s*GPU\d+((?:[ \t]+(?:X|SYS|NODE|PHB|PXB|PIX|NV\d+))+)", rank["topology"], re.MULTILINE)
    far = [
        f"GPU{a}-GPU{b}" for a, row in enumerate(rows) for b, way in enumerate(row.split()) if way == "SYS" and a < b
    ]
    if far:
        yield "far", {"pairs": ", ".join(far[:4]) + (" and more" if far[4:] else "")}
