"""Which collectives a group gets: those of registered backends first, and torch's own always.

pytest tests/comm/test_select.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import select
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.select import Candidate, choices_for, collectives_for, register_backend
from fullshard.comm.torch_dist import Alone, NativeCollectives
from fullshard.features.shared_memory import SharedMemoryCollectives
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def check_backends() -> list[str]:
    """What the ranks get without a backend, with one that cannot and with one that can."""
    group, registered = dist.group.WORLD, select._BACKENDS[:]
    try:
        select._BACKENDS.clear()
        [messages, own] = choices_for(group, CPU)
        assert type(messages.collectives) is GlooCollectives and type(own.collectives) is NativeCollectives
        total = messages.collectives.reduce_scatter(torch.ones(4), tag=0).wait()
        assert total.tolist() == own.collectives.reduce_scatter(torch.ones(4), tag=0).wait().tolist() == [2.0, 2.0]
        register_backend(lambda group, device: "no link")
        reasons = [choices_for(group, CPU)[0].reason]
        register_backend(lambda group, device: Candidate(NativeCollectives(group), "link", "it is there"))
        [chosen, *others] = choices_for(group, CPU)
        assert type(collectives_for(group, CPU, only_all_reduce=True)) is GlooCollectives
        return [messages.reason, *reasons, chosen.reason, *(other.reason for other in others)]
    finally:
        select._BACKENDS[:] = registered


def test_backends_come_first_and_torchs_own_are_always_there() -> None:
    slower, never = "Gloo's own are slower", "never: each byte of a reduce-scatter is sent twice"
    assert run_ranks(check_backends, 2) == [[slower, "no link", "it is there", slower, never]] * 2


def check_registered() -> str:
    return type(choices_for(dist.group.WORLD, CPU)[0].collectives).__name__


def test_importing_the_features_registers_shared_memory() -> None:
    assert run_ranks(check_registered, 2) == [SharedMemoryCollectives.__name__] * 2
    assert type(collectives_for(None, CPU)) is Alone
