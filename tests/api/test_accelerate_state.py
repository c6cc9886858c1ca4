"""Accelerate's own helpers see the ranks that fullshard's Accelerator joined.

pytest tests/api/test_accelerate_state.py
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.api import Accelerator, PartialState
from tests.distributed import run_ranks
from tests.launching import environment, launch, run_python

HELPERS = """
import torch
from fullshard import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast, gather, gather_object, reduce, set_seed

rank = accelerator.process_index
mine = torch.tensor([rank + 1.0])
assert gather(mine).tolist() == [1.0, 2.0]
assert reduce(mine, "sum").item() == 3.0
assert broadcast(mine).item() == 1.0
assert gather_object([rank]) == [0, 1]
set_seed(5, device_specific=True)
assert torch.initial_seed() == 5 + rank
for state in (PartialState(), AcceleratorState()):
    assert (state.num_processes, state.process_index, state.local_process_index) == (2, rank, rank)
    assert state.use_distributed and state.device == accelerator.device
    state.wait_for_everyone()
    with state.split_between_processes([1, 2, 3]) as part:
        assert part == ([1, 2] if rank == 0 else [3])
assert AcceleratorState().mixed_precision == "bf16" and AcceleratorState().deepspeed_plugin is None
assert AcceleratorState().fsdp_plugin is accelerator.state.fsdp_plugin
# As Transformers does it; what is made anew must see what was there.
Accelerator()
assert gather_object([rank]) == [0, 1] and AcceleratorState().mixed_precision == "no"
print(f"helpers of rank {rank} agree")
"""


@pytest.mark.full
def test_accelerate_is_imported_after_the_accelerator_starts(tmp_path: Path) -> None:
    script = tmp_path / "helpers.py"
    script.write_text(HELPERS)
    done = launch("--cpu", "--num_processes", "2", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"helpers of rank {rank} agree" in done.stdout for rank in range(2))


def _state_was_made_before() -> tuple[int, Any, list[int], str]:
    from accelerate import PartialState
    from accelerate.logging import get_logger
    from accelerate.state import AcceleratorState
    from accelerate.utils import gather_object

    AcceleratorState._reset_state(reset_partial_state=True)
    early = PartialState()  # Accelerate finds no accelerator and takes this rank for the only one
    assert early.num_processes == 1
    accelerator = Accelerator(cpu=True)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger("fullshard_test", log_level="INFO")
    logger.logger.addHandler(handler)
    logger.info("once")
    logger.info("everywhere", main_process_only=False)
    return early.num_processes, str(early.backend), gather_object([accelerator.process_index]), "; ".join(lines)


def test_accelerate_made_its_state_before_the_accelerator_starts() -> None:
    first, second = run_ranks(_state_was_made_before, 2)
    assert first == (2, "gloo", [0, 1], "[RANK 0] once; [RANK 0] everywhere")
    assert second == (2, "gloo", [0, 1], "[RANK 1] everywhere")


def _both_states() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import TorchDynamoPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    theirs, their_partial = dict(AcceleratorState._shared_state), dict(PartialState._shared_state)
    Accelerator(cpu=True)
    return theirs, their_partial, dict(AcceleratorState._shared_state), dict(PartialState._shared_state)


def test_the_state_has_what_accelerate_itself_puts_there() -> None:
    for theirs, their_partial, ours, our_partial in run_ranks(_both_states, 2):
        assert our_partial.keys() == their_partial.keys()
        assert ours.keys() == theirs.keys() | {"fsdp_plugin"}  # which Accelerate has on accelerators only
        same = our_partial.keys() - {"distributed_type", "device"}
        assert {name: our_partial[name] for name in same} == {name: their_partial[name] for name in same}
        assert our_partial["device"].type == their_partial["device"].type == "cpu"
        assert ours["dynamo_plugin"] == theirs["dynamo_plugin"]


def test_one_process_without_a_launcher_communicates_nothing() -> None:
    code = """
import fullshard, torch
from accelerate.utils import gather, gather_object, reduce
accelerator = fullshard.Accelerator(cpu=True)
assert gather(torch.tensor([1.0])).tolist() == [1.0] and gather_object([7]) == [7]
assert reduce(torch.tensor([2.0])).item() == 2.0
from accelerate import PartialState
PartialState().wait_for_everyone()
assert not PartialState().use_distributed and PartialState().is_main_process
"""
    done = run_python([sys.executable, "-c", code], Path.cwd(), environment(), 120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config"])
def test_another_engine_is_not_there(name: str) -> None:
    assert getattr(Accelerator(cpu=True).state, name) is None


def test_the_state_tells_what_the_accelerator_does() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = accelerator.state
    assert state is accelerator.state
    assert (state.num_processes, state.backend, state.use_distributed) == (1, None, False)
    assert state.mixed_precision == "bf16" and state.distributed_type == accelerator.distributed_type == "FSDP"
    assert state.is_last_process and state.is_main_process and state.device == torch.device("cpu")


def test_a_compiler_that_torch_does_not_list_is_no_error() -> None:
    from accelerate.state import AcceleratorState

    Accelerator(cpu=True, dynamo_backend="eager")
    assert AcceleratorState().dynamo_plugin.backend.value == "EAGER"


def test_after_a_reset_nothing_is_prepared_until_there_is_an_accelerator_again() -> None:
    from accelerate.state import AcceleratorState

    for reset in (AcceleratorState._reset_state, lambda: Accelerator(cpu=True).state._reset_state()):
        accelerator = Accelerator(cpu=True)
        reset()
        with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState\._reset_state\(\)` was called"):
            accelerator.prepare(torch.nn.Linear(1, 1))
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))


def test_debug_is_one_for_all_states() -> None:
    import accelerate

    accelerator = Accelerator(cpu=True)
    accelerator.state.debug = True
    assert accelerate.PartialState().debug and accelerate.state.AcceleratorState().debug and PartialState().debug
    PartialState().debug = False
    assert not accelerate.PartialState().debug and not accelerator.state.debug


def test_a_state_says_what_it_is() -> None:
    shown = str(Accelerator(cpu=True, mixed_precision="bf16").state)
    assert shown.startswith("Distributed environment: DistributedType.FSDP\nNum processes: 1\nProcess index: 0")
    assert shown.endswith("Device: cpu\n\nMixed precision type: bf16\n")


def test_trainers_loop_is_what_accelerates_gradient_state_shows(tmp_path: Path) -> None:
    import accelerate
    from transformers import TrainingArguments

    from fullshard.integrations.transformers import Trainer

    trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    theirs = accelerate.state.GradientState()
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    assert not theirs.sync_gradients and not trainer.accelerator.sync_gradients
