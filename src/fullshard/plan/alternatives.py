"""The same run on other devices or with other settings, side by side: what it needs, its speed and its cost."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import parse_count
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.hardware import Cluster, parse_cluster
from fullshard.plan.job import Job, token_count
from fullshard.plan.library import check_positions
from fullshard.plan.shapes import ModelShape

MOST_POINTS = 64
"""Most values of a sweep. More count as a mistake, such as a step that is too small."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative to the planned run.

    Attributes:
        label: the difference.
        plan: what was planned.
        price: per device and hour, in any currency; None: unknown.

    Raises:
        ConfigError: a price that is none.
    """

    label: str
    plan: Plan
    price: float | None = None

    def __post_init__(self) -> None:
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(f"{self.label}: expected a price of 0 or more, got {self.price}", hint="such as 3.50")

    def hours(self, tokens: float | None) -> float | None:
        """Return the hours to train that many tokens; None if no number of tokens was given."""
        return None if tokens is None else tokens / self.plan.time.tokens_per_second / 3600

    def money(self, tokens: float | None) -> float | None:
        """Return the cost of those hours; None without a price."""
        hours = self.hours(tokens)
        return None if hours is None or self.price is None else hours * self.plan.cluster.count * self.price


def read_tokens(text: str) -> float:
    """Parse a number of tokens: `15e9`, `300B`, `1.5T`.

    Raises:
        ConfigError: another form.
    """
    count = parse_count(text)
    if not count:
        raise ConfigError(f"tokens {text!r}: expected a number above 0", hint="write it as 15e9 or 300B")
    return count


def elsewhere(model: ModelShape, job: Job, texts: Sequence[str], *, price: float | None) -> list[Alternative]:
    """Return the job on other devices: `8xH200`, or `8xH200@3.50` with a price of its own.

    Raises:
        ConfigError: unknown devices, or a price that is none.
    """
    found = []
    for text in (part.strip() for part in ",".join(texts).split(",") if part.strip()):
        devices, _, said = text.partition("@")
        try:
            own = float(said) if said else price
        except ValueError:
            raise ConfigError(f"{text!r}: {said!r} is no price", hint="write it as 8xH200@3.50") from None
        cluster = parse_cluster(devices)
        found.append(Alternative(str(cluster), evaluate(model, job, cluster), own))
    return found


def with_settings(model: ModelShape, job: Job, cluster: Cluster, text: str, *, price: float | None) -> Alternative:
    """Return the job with other settings: `checkpointing=full,micro-batch=4`; `devices=16xH100` is one of them.

    Raises:
        ConfigError: another form, no such setting, or a value that it does not take.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, is_said, value = part.partition("=")
        if not is_said:
            raise ConfigError(f"{text!r}: {part!r} is no setting", hint="write it as checkpointing=full,micro-batch=4")
        values[name.strip().replace("-", "_")] = value.strip()
    place = parse_cluster(values.pop("devices")) if "devices" in values else cluster
    changed = Job.of({**job.model_dump(), **values})
    check_positions(model, changed.seq_len)
    return Alternative(", ".join(text.split(",")), evaluate(model, changed, place), price)


def swept(model: ModelShape, job: Job, cluster: Cluster, text: str, *, price: float | None) -> list[Alternative]:
    """Return one job per value of a setting: `seq-len=2048..131072` doubles, `micro-batch=1,2,4`, `devices=8..64`.

    Raises:
        ConfigError: no such setting, or values that it does not take.
    """
    name, values = _sweep(text)
    kind = f"x{cluster.device.name}" if name == "devices" else ""
    each = ((value, with_settings(model, job, cluster, f"{name}={value}{kind}", price=price)) for value in values)
    return [dataclasses.replace(found, label=str(value)) for value, found in each]


def _sweep(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name != "devices" and name not in Job.model_fields:
        raise ConfigError(f"sweep {text!r}: no setting {name!r}", hint="write it as seq-len=2048..131072")
    ends = re.fullmatch(r"\s*(\d+k?)\s*\.\.\s*(\d+k?)\s*", values, re.IGNORECASE)
    found = [word for part in values.split(",") if (word := part.strip())]
    if ends:
        first, last = token_count(ends[1]), token_count(ends[2])
        found = [str(first << power) for power in range(last.bit_length()) if 0 < first << power <= last]
    if not found or len(found) > MOST_POINTS:
        raise ConfigError(
            f"sweep {text!r}: {len(found)} values, expected 1 to {MOST_POINTS}",
            hint="write it as seq-len=2048..131072, which doubles, or micro-batch=1,2,4",
        )
    return name, found


def as_rows(alternatives: Sequence[Alternative], tokens: float | None) -> list[Mapping[str, Any]]:
    """Return plain values, for programs; `settings` are those in which a run differs from the first."""
    jobs = [each.plan.job.model_dump() for each in alternatives]
    return [
        {
            "what": each.label,
            "devices": each.plan.cluster.count,
            "kind": each.plan.cluster.device.name,
            "confidence": each.plan.confidence,
            "needed": each.plan.memory.needed,
            "available": each.plan.cluster.device.memory,
            "step": each.plan.time.total,
            "tokens_per_second": each.plan.time.tokens_per_second,
            "mfu": each.plan.time.mfu,
            "hours": each.hours(tokens),
            "money": each.money(tokens),
            "settings": {name: value for name, value in job.items() if value != jobs[0][name]},
        }
        for each, job in zip(alternatives, jobs, strict=True)
    ]
