"""Sequences and experts that are divided among ranks, on the simulated accelerator: the numbers of one process.

pytest tests/engine/test_simulated_axes.py -m full
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.simulated.process import on_device
from tests.simulated.programs import AXES
from tests.simulated.training import Case, as_with_nccl, differences, on_the_cpu, small_activations

pytestmark = pytest.mark.full


def _differences(name: str) -> list[str]:
    """In which orders the device does not give the CPU's numbers. Those are one process's."""
    from tests.simulated.axes import STEPS

    program, case = AXES[name]
    alone = on_the_cpu(Case(ranks=1), program)[0]
    ranks = on_the_cpu(case, program)
    means = [torch.stack(values).mean(dim=0) for values in zip(*ranks, strict=True)]  # each has a part of the loss
    torch.testing.assert_close(means[: 2 * STEPS], alone[: 2 * STEPS], rtol=1e-6, atol=0)
    torch.testing.assert_close(means[2 * STEPS :], alone[2 * STEPS :], rtol=1e-5, atol=1e-6)
    return differences(case, 1, program, ranks)


@pytest.mark.parametrize("name", AXES)
def test_every_order_of_the_streams_gives_the_numbers_of_one_process(name: str) -> None:
    """Losses, norms and weights, bit for bit those of as many ranks on the CPU."""
    assert on_device(_differences, name) == []


def _memory(name: str) -> dict[int, list[int]]:
    from tests.simulated import axes
    from tests.simulated.device import Order, begin
    from tests.simulated.group import rank_here, run_ranks

    (program, case), seen = AXES[name], defaultdict[int, list[int]](list)

    def look(place: torch.device) -> None:
        torch.accelerator.synchronize(place)
        seen[rank_here()].append(torch.accelerator.memory_allocated(place))

    begin(Order.LAZY)
    with pytest.MonkeyPatch.context() as within, small_activations(), as_with_nccl():
        within.setattr(axes, "STEPS", 5)
        within.setattr(axes, "after_step", look)
        run_ranks(program, case.ranks, case, "simulated")
    return dict(seen)


@pytest.mark.parametrize("name", AXES)
def test_a_step_leaves_nothing_behind(name: str) -> None:
    """Memory grows only by the loss and the norm of each step, which the programs keep."""
    seen = on_device(_memory, name)
    assert len(seen) == AXES[name][1].ranks
    for found in seen.values():
        assert [after - before for before, after in pairwise(found)] == [2 * 512] * 4, seen


def _without_waiting(name: str, what: str) -> list[str]:
    from tests.simulated import group

    meet: Any = group.SimulatedGroup._meet

    def launched(self: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        work = meet(self, kind, *arguments, **options)
        if kind == what and isinstance(work, group._Work):
            within.setattr(work, "wait", lambda timeout=None: True)
        return work

    program, case = AXES[name]
    expected = on_the_cpu(case, program)
    with pytest.MonkeyPatch.context() as within:
        within.setattr(group.SimulatedGroup, "_meet", launched)
        return differences(case, 1, program, expected)


def test_tokens_that_are_not_waited_for_are_found() -> None:
    """The waits of this exchange are Transformers', so that no change of this package can leave them out."""
    assert on_device(_without_waiting, "expert parallel", "all_to_all")
