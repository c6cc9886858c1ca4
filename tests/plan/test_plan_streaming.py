"""How long weights take to an inference engine: what the page says of it is what is planned.

pytest tests/plan/test_plan_streaming.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.streaming import Streaming

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+x\w+) \| ([\d.]+) \| ([\d.]+) \| (yes|no)", PAGE, re.MULTILINE)


def planned(devices: str) -> Streaming:
    return evaluate(load_model("Llama-3.1-8B")[0], Job(), parse_cluster(devices)).streaming


@pytest.mark.parametrize(("devices", "gathered", "sent", "within"), ROWS)
def test_the_page_has_what_is_planned(devices: str, gathered: str, sent: str, within: str) -> None:
    plan = planned(devices)
    assert (f"{plan.gathered:.2f}", f"{plan.sent:.2f}") == (gathered, sent)
    assert (plan.gathered + plan.sent <= 2) == (within == "yes")


def test_what_it_is_made_of() -> None:
    assert len(ROWS) == 5
    alone, host, hosts = (planned(f"{count}xH100") for count in (1, 8, 64))
    assert alone.nbytes == hosts.nbytes == 2 * 8_030_261_248
    assert alone.gathered == 0 < host.gathered < hosts.gathered
    device = parse_cluster("8xH100").device
    assert host.gathered > host.nbytes / (device.link * device.link_efficiency)
    assert alone.sent == host.nbytes / (device.network * device.link_efficiency)
