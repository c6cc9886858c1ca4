"""Free pages of the heap go back to the system, and long sums are made where one of their terms is.

pytest tests/test_heap.py
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from fullshard.comm.cpu.averages import average
from fullshard.comm.cpu.heap import TRIM_NBYTES
from fullshard.config.switches import HEAP

BEGIN = """
import torch
from pathlib import Path
from fullshard.comm.cpu.heap import Heap

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.empty(2**23)  # glibc then takes what is shorter from its heap, from the next one on
torch.ones(2**22).sum()
heap = Heap()
"""

HOLES = f"""{BEGIN}
kept, freed = [], []
for _ in range(64):
    freed.append(torch.ones(2**18))
    kept.append(torch.ones(2**10))
before = resident()
freed.clear()
heap.note({TRIM_NBYTES - 1})
few = before - resident()
heap.note(1)
most = before - resident()
for _ in range(64):
    freed.append(torch.ones(2**18))
    kept.append(torch.ones(2**10))
before = resident()
freed.clear()
heap.trim()
between = before - resident()
for _ in range(64):
    freed.append(torch.ones(2**18))
    kept.append(torch.ones(2**10))
torch.ones(2**26)  # 256 MiB that are gone at once
before = resident()
freed.clear()
heap.note({TRIM_NBYTES})
below = before - resident()
print(few >> 20, most >> 20, between >> 20, below >> 20)
"""

STEP = f"""{BEGIN}
def leave_holes(mib: int) -> int:
    freed, kept = [], []
    for _ in range(mib):
        freed.append(torch.ones(2**18))
        kept.append(torch.ones(2**10))
    freed.clear()
    alive.append(kept)
    before = resident()
    heap.begin_last_unit()
    return before - resident() >> 20

alive = []
"""

STEPS = f"""{STEP}
results = [leave_holes(128), leave_holes(16)]
alive.append(torch.ones(2**25))
print(*results, leave_holes(16))
"""

SMALL_STEP = f"""{STEP}
print(leave_holes(16))
"""


def run(script: str, switch: str) -> list[int]:
    """What a script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {HEAP.name: switch, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no malloc_trim")
@pytest.mark.parametrize("switch", ["trim", pytest.param("keep", marks=pytest.mark.full)])
def test_holes_are_given_back(switch: str) -> None:
    """64 MiB between blocks that stay, once so many bytes have been announced, unless more was resident before."""
    few, after, between, below = run(HOLES, switch)
    print(f"{switch}: {few} MiB before the limit, {after} after, {between} when told to, {below} below the peak")
    assert few <= 8
    assert below <= 40  # what is free at its end
    if switch == "trim":
        assert after >= 50 and between >= 50
    else:  # glibc itself gives back what is free at its end
        assert after <= 8 and between <= 40


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no malloc_trim")
@pytest.mark.parametrize("switch", ["trim", pytest.param("keep", marks=pytest.mark.full)])
def test_what_grew_is_given_back_before_the_last_unit(switch: str) -> None:
    """When it is 64 MiB or more since the last time, or since the heap was first asked for: not in small models."""
    first, little, more = run(STEPS, switch)
    print(
        f"{switch}: {first} MiB of 128 the first time, then {little} of 16, and {more} of 16 with 128 MiB more resident"
    )
    assert little <= 2
    if switch == "trim":
        assert run(SMALL_STEP, switch)[0] <= 2
        assert first >= 120 and more >= 14
    else:
        assert max(first, more) <= 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sum_in_the_place_of_a_term_is_the_same(ranks: int) -> None:
    torch.manual_seed(1)
    numel = 150_000  # several blocks, the last of them short
    terms = [torch.randn(numel) for _ in range(ranks)]
    whole = average(terms, torch.empty(numel), float(ranks))
    for own in range(ranks):
        copies = [term.clone() for term in terms]
        result = average(copies, copies[own], float(ranks))
        assert result is copies[own]
        assert torch.equal(result, whole)
        assert all(torch.equal(copies[i], terms[i]) for i in range(ranks) if i != own)
    halves = [term.bfloat16() for term in terms]
    wider = average(halves, torch.empty(numel), float(ranks))
    assert torch.equal(wider, average([half.float() for half in halves], torch.empty(numel), float(ranks)))
    mixed = [*halves[:-1], halves[-1].float()]
    assert torch.equal(average(mixed, mixed[-1], float(ranks)), wider)  # in the place of a term, the others narrower
