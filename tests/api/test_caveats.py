"""The seven things that guides to sharded fine-tuning warn of, each shown to work. docs/lora.md has the table.

pytest tests/api/test_caveats.py -m full
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fullshard
from fullshard import Accelerator, FullyShardedDataParallelPlugin, unsharded
from fullshard.checkpoint import full_state_dict
from fullshard.checkpoint.coded_state import coded_tensors
from tests.api import test_lora
from tests.distributed import run_ranks
from tests.optim import test_optimizers_8bit
from tests.trainers import SMALL, arguments, build, close, result, samples, trainer

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


def resident(offload: bool) -> tuple[int, str]:
    """Bytes this process has taken for model, gradients and optimizer, after a step; and what was said."""
    before = _resident_nbytes()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=offload))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    dist.barrier()  # the other rank has touched its part, too
    return _resident_nbytes() - before, said.getvalue()


def _resident_nbytes() -> int:
    """Of memory that the ranks share, this one's part; of pages that it was copied with, all, whoever else has them."""
    return _field("status", "RssAnon") + _field("smaps_rollup", "Pss_Shmem")


def _field(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads memory figures of Linux")
def test_3_memory_saved_by_cpu_offload_is_measured_and_said() -> None:
    """On a CPU there is nothing to move: what is said is that, with the bytes, and what is measured agrees."""
    from tests.distributed import end_workers

    taken, said = {}, ""
    for offload in (False, True):
        end_workers()  # memory that a process took before would count as free
        ranks = run_ranks(resident, 2, offload)
        taken[offload] = sum(nbytes for nbytes, _ in ranks)
        said += "".join(words for _, words in ranks)
    assert said.count("CPU offload") == 1
    assert "CPU offload saves no memory here: the 16.02 MiB of this rank are already in host memory" in said
    saved = taken[False] - taken[True]
    print(f"resident after a step: {taken[False]} bytes, with CPU offload {taken[True]}, saved {saved}")
    assert abs(saved) < 0.3 * taken[False]  # the C library keeps some of what was freed, now more and now less


# -- 4: 8-bit optimizers ----------------------------------------------------------------------------------------------

WIDE = {**SMALL, "hidden_size": 128, "intermediate_size": 256}


def qlora(directory: str, output: str, resume: str | None) -> Any:
    """A quantized model with adapters, under Trainer, with the optimizer that saving used to fail with."""
    import peft
    from transformers import BitsAndBytesConfig

    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = fullshard.from_pretrained(
        AutoModelForCausalLM, directory, dtype=torch.float32, quantization_config=quantized
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM"))
    args = arguments(output, optim="paged_adamw_8bit", save_strategy="steps", save_steps=2, learning_rate=1e-3)
    made = trainer(model, args)
    made.train(resume_from_checkpoint=resume)
    optimizer = made.optimizer.optimizer
    assert type(optimizer).__module__.startswith("bitsandbytes.")
    coded = sum(len(coded_tensors(state)[0]) for state in optimizer.state.values())
    weights = full_state_dict(made.model)
    adapters = {name: value.clone() for name, value in weights.items() if "lora_" in name}
    return result(made)["losses"], adapters, coded


def test_4_paged_adamw_8bit_is_saved_and_resumed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**WIDE)).save_pretrained(tmp_path / "base")
    base, output = str(tmp_path / "base"), str(tmp_path / "out")
    losses, adapters, coded = run_ranks(qlora, 2, base, output, None)[0]
    assert coded > 0
    again, resumed, _ = run_ranks(qlora, 2, base, output, f"{output}/checkpoint-2")[0]
    assert again == losses
    assert all(torch.equal(value, resumed[name]) for name, value in adapters.items())
    for size in (1, 4):  # blocks are cut elsewhere there, so values are rounded once more
        other, _, _ = run_ranks(qlora, size, base, output, f"{output}/checkpoint-2")[0]
        assert close(other, losses, 5e-3)


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "Lion8bit"])
def test_4_optimizers_of_8_bits_without_a_trainer(tmp_path: Path, name: str) -> None:
    test_optimizers_8bit.check_resume(tmp_path, "bitsandbytes", name, 0.02)


# -- 5: several models and optimizers ---------------------------------------------------------------------------------


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        {f"{i}.{key}": own(value).clone() for i, state in enumerate(o.state.values()) for key, value in state.items()}
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


# -- 6: generation ----------------------------------------------------------------------------------------------------


def generations(how: str) -> tuple[list[int], list[int]]:
    """What this rank generates, sharded and whole; prompts and lengths differ from rank to rank."""
    rank = dist.get_rank()
    prompt = samples(4, lengths=(9, 5))[rank]["input_ids"][None]
    options: dict[str, Any] = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "pad_token_id": 0}
    expected = build().eval().generate(prompt, **options)
    model = Accelerator(cpu=True).prepare(build()).eval()
    if how == "gathered once":
        with unsharded(model):
            found = model.generate(prompt, **options)
    else:
        found = model.generate(prompt, synced_gpus=True, **options)
    return found[0].tolist(), expected[0].tolist()


@pytest.mark.parametrize("how", ["gathered once", "in step"])
def test_6_generation_of_different_lengths(how: str) -> None:
    ranks = run_ranks(generations, 2, how)
    assert len(ranks[0][0]) != len(ranks[1][0])
    for found, expected in ranks:
        assert found == expected


# -- 7: use_orig_params -----------------------------------------------------------------------------------------------


def with_orig_params(use_orig_params: bool | None) -> Any:
    model = test_lora.adapted("plain", torch.bfloat16)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(use_orig_params=use_orig_params))
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.stack([row["input_ids"] for row in samples(2)])
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model(input_ids=ids, labels=ids).loss.backward()
    held = sum(own(p).nbytes for p in model.parameters())
    trained = sum(own(p).nbytes for p in model.parameters() if p.requires_grad)
    gradients = sum(own(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    moments = sum(own(s[key]).nbytes for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return losses, held, trained, gradients, moments, whole


def test_7_use_orig_params_is_not_needed() -> None:
    """Frozen and trained parameters share units, and only the trained ones cost a gradient, either way."""
    results = {choice: run_ranks(with_orig_params, 2, choice) for choice in (None, False, True)}
    assert results[None] == results[False] == results[True]
    for _, held, trained, gradients, moments, whole in results[None]:
        assert held <= whole / 2 + 256
        assert (gradients, moments) == (trained, 2 * trained) and trained < held / 3
