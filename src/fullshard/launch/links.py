"""Judge the links that the ranks of `fullshard doctor --run` measured (`doctor_ranks`). Speeds are bytes per second."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.plan.hardware import GB, find_device

Facts = dict[str, Any]
SLOW, LOSSY = 0.5, 0.003
"""A link is bad below this fraction of its expected speed, or above this fraction of packets that were sent again."""


def expected(link: Facts, ranks: Sequence[Facts]) -> float:
    """Return the speed that this hardware should reach on a link, or 0 if the device is unknown."""
    ends = ranks[link["source"]], ranks[link["target"]]
    try:
        row = find_device(ends[0]["device"])
    except ConfigError:
        return 0.0
    card = min(end["speed"] for end in ends)
    most = row.network if row.is_cpu or not card else row.link
    return row.link_efficiency * (row.link if link["is_inside"] else min(card or most, most))


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
