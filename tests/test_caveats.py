"""Things that guides to sharded fine-tuning warn of, each shown to work.

pytest tests/test_caveats.py -m full
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from fullshard import Accelerator, FullyShardedDataParallelPlugin
from fullshard.checkpoint import full_state_dict
from tests import test_lora, test_optimizers_8bit
from tests.distributed import run_ranks
from tests.trainers import build, close

pytestmark = pytest.mark.full


# -- 1: merging while sharded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "modules_to_save"])
def test_1_merging_while_sharded(tmp_path: Path, case: str) -> None:
    run_ranks(test_lora.export_merged, 2, str(tmp_path / "merged"), case)
    expected = test_lora.pefts_merge(case)
    test_lora.compare_bitwise(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected)


# -- 2: modules_to_save -----------------------------------------------------------------------------------------------


def test_2_modules_to_save(tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    [stock] = run_ranks(test_lora.train, 1, str(tmp_path / "stock"), "modules_to_save", True, {})
    sharded = run_ranks(test_lora.train, 2, str(tmp_path / "sharded"), "modules_to_save", False, {})[0]
    assert close(sharded["losses"], stock["losses"])
    saved = load_file(tmp_path / "sharded" / "adapter" / "adapter_model.safetensors")
    [key] = [name for name in saved if "lm_head" in name]
    base = build("llama")
    assert not torch.equal(saved[key], base.lm_head.weight)  # it was trained
    loaded = PeftModel.from_pretrained(base, tmp_path / "sharded" / "adapter")
    assert torch.equal(loaded.state_dict()["base_model.model.lm_head.modules_to_save.default.weight"], saved[key])


# -- 3: memory saved by CPU offload -----------------------------------------------------------------------------------


def resident(offload: bool) -> int:
    """Bytes this process has taken for model, gradients and optimizer, after a step."""
    before = _resident_nbytes()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=offload))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return _resident_nbytes() - before


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory figures of Linux")
def test_3_memory_saved_by_cpu_offload_is_measured_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU there is nothing to move: what is said is that, with the bytes, and what is measured agrees."""
    from tests.distributed import end_workers

    taken = {}
    for offload in (False, True):
        end_workers()  # memory that a process took before would count as free
        taken[offload] = max(run_ranks(resident, 2, offload))
    said = capfd.readouterr().err
    assert said.count("CPU offload") == 1
    assert "CPU offload saves nothing here: the 16.02 MiB of this rank are in host memory already" in said
    saved = taken[False] - taken[True]
    print(f"resident after a step: {taken[False]} bytes, with CPU offload {taken[True]}, saved {saved}")
    assert abs(saved) < 0.1 * taken[False]


# -- 4: 8-bit optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "Lion8bit"])
def test_4_optimizers_of_8_bits_without_a_trainer(tmp_path: Path, name: str) -> None:
    test_optimizers_8bit.check_resume(tmp_path, "bitsandbytes", name, 0.02)


# -- 5: several models and optimizers ---------------------------------------------------------------------------------


def two_models(directory: str, order: tuple[int, ...], load: bool) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(load)  # what is loaded must replace other values
    models: list[Any] = [nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, width)) for width in (3, 5)]
    optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=1e-2 * (i + 1)) for i, model in enumerate(models)]
    accelerator = Accelerator(cpu=True)
    objects = [models[0], models[1], optimizers[0], optimizers[1]]
    for place, prepared in zip(order, accelerator.prepare(*(objects[i] for i in order)), strict=True):
        objects[place] = prepared
    if load:
        accelerator.load_state(directory)
    else:
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for model, optimizer in (objects[0::2], objects[1::2]):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(directory)
    moments = [
        {f"{i}.{key}": value.clone() for i, state in enumerate(o.state.values()) for key, value in state.items()}
        for o in objects[2:]
    ]
    return [*(full_state_dict(model, rank0_only=False) for model in objects[:2]), *moments]


def test_5_several_models_and_optimizers_in_any_order(tmp_path: Path) -> None:
    found = []
    for number, order in enumerate(itertools.permutations(range(4))):
        if number % 5:  # 0123, 0321, 1302, 2130, 3102: each comes first
            continue
        directory = str(tmp_path / "".join(map(str, order)))
        saved = run_ranks(two_models, 2, directory, order, False)
        assert _same(saved, run_ranks(two_models, 2, directory, order, True)), order
        found.append(saved)
    assert len(found) == 5
    assert all(_same(found[0], other) for other in found[1:])


def _same(one: Any, other: Any) -> bool:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items()) for a, b in pairs)
