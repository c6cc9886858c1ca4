"""Sequences that are divided over ranks train as on one process, and models that this would change are refused.

pytest tests/api/test_context_parallel.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fullshard import ParallelismConfig
from fullshard.api import Accelerator, context_parallel
from fullshard.api.context_parallel import prepare
from fullshard.core.errors import CommunicationError, ConfigError, DataError
from tests.differential import CLOSE, EPS
from tests.distributed import run_ranks
from tests.trainers import SMALL, arguments, build, close, pad, result, samples, trainer

LENGTHS = (16, 5, 9)


def model_of(family: str) -> Any:
    if family != "qwen3":
        return build(family)
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8))


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of 16 tokens a row, the first two of which are a prompt: they have no labels."""
    longest = {"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.full((16,), -100)}
    batch = {name: value[:-1] for name, value in pad([*rows, longest]).items()}
    return batch | {"labels": batch["labels"].index_fill(1, torch.tensor([0, 1]), -100)}


def split_layers(model: nn.Module, mesh: Any) -> None:
    rows = ("self_attn.o_proj", "mlp.down_proj")
    columns = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    plan = {name: RowwiseParallel() for name in rows} | {name: ColwiseParallel() for name in columns}
    parallelize_module(model, mesh, {f"model.layers.*.{name}": style for name, style in plan.items()})


def loop(family: str, sizes: dict[str, int], steps: int = 5, directory: str = "", load: bool = False) -> dict[str, Any]:
    """A loop as people write it for Accelerate, with two micro-batches of 4 sequences per step."""
    config = ParallelismConfig(**sizes) if sizes else None
    settings = {"activation_checkpointing": bool(sizes) and family == "llama"}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config, fsdp_plugin=settings)
    cp, tp = (getattr(config, name, 1) for name in ("cp_size", "tp_size"))
    copies = accelerator.num_processes // tp
    model = model_of(family)
    if tp > 1:
        split_layers(model, accelerator.torch_device_mesh["tp"])  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    rows: Any = samples(8 * steps, lengths=LENGTHS)
    loader = torch.utils.data.DataLoader(rows, batch_size=4 * cp // copies, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(directory)
    losses, batches = [], list(loader)
    for first in range(0, 2 * steps, 2):
        pair = batches[first : first + 2]
        for batch in pair:
            batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        counted = sum((batch["shift_labels"] != -100).sum() for batch in pair)
        items = accelerator.reduce(counted) / cp
        total = torch.zeros(())
        for batch in pair:
            buffers = list(batch.values())
            with (
                accelerator.accumulate(model),
                accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers[1:])),
            ):
                loss = model(**batch, num_items_in_batch=items).loss * copies
                accelerator.backward(loss * 2)  # which divides by the number of micro-batches
                total += loss.detach()
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert batch["input_ids"].shape[1] == 16 and batch["labels"].shape[1] == 16 // cp
        losses += [accelerator.reduce(total, "mean").item(), float(norm)]
    if directory and not load:
        accelerator.save_state(directory)
    return {"losses": losses, "weights": {k: v.cpu() for k, v in accelerator.get_state_dict(model).items()}}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert close(found["losses"], expected["losses"], 1e-5), (found["losses"], expected["losses"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, **CLOSE)


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        ("tied", 2, {"cp_size": 2}),
        pytest.param("qwen3", 2, {"cp_size": 2}, marks=pytest.mark.full),
        pytest.param("qwen3", 4, {"cp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.full),
        pytest.param("llama", 4, {"cp_size": 4}, marks=pytest.mark.full),
        pytest.param("llama", 4, {"cp_size": 2, "tp_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_loop_is_as_on_one_process(family: str, ranks: int, sizes: dict[str, int]) -> None:
    alone = run_ranks(loop, 1, family, {})[0]
    found, *others = run_ranks(loop, ranks, family, sizes)
    same(found, alone)
    assert all(close(other["losses"], found["losses"]) for other in others)


@pytest.mark.full
@pytest.mark.parametrize("saved", [1, 2])
def test_checkpoints_load_with_and_without(tmp_path: Path, saved: int) -> None:
    sizes: list[dict[str, int]] = [{}, {"cp_size": 2}]
    directory, loaded = str(tmp_path / "state"), 3 - saved
    run_ranks(loop, saved, "llama", sizes[saved - 1], 2, directory)
    expected = run_ranks(loop, saved, "llama", sizes[saved - 1], 2, directory, True)[0]
    same(run_ranks(loop, loaded, "llama", sizes[loaded - 1], 2, directory, True)[0], expected)


def trained(output: str, sizes: dict[str, int], kind: str) -> dict[str, Any]:
    config = ParallelismConfig(**sizes) if sizes else None
    batch = 4 // sizes.get("dp_shard_size", 1)
    options: dict[str, Any] = {
        **{"gradient_accumulation_steps": 2, "max_steps": 5, "per_device_train_batch_size": batch},
        **{"per_device_eval_batch_size": batch, "eval_strategy": "steps", "eval_steps": 5},
    }
    rows = samples(40, lengths=LENGTHS)
    if kind == "trl":
        return with_trl(output, rows, parallelism_config=config, **options)
    made = trainer(
        model_of("qwen3"),
        arguments(output, parallelism_config=config, **options),
        train_dataset=rows,
        eval_dataset=samples(8),
        data_collator=padded,
    )
    made.train()
    if config is not None:
        with pytest.raises(ConfigError, match="predictions are not gathered"):
            made.predict(rows[:4])
    return result(made)


def with_trl(output: str, rows: list[dict[str, torch.Tensor]], **options: Any) -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from fullshard.integrations.transformers import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({"<pad>": 0, **{str(number): number for number in range(1, 97)}}, unk_token="1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="1")

    def listed(rows: list[dict[str, torch.Tensor]]) -> Any:
        ids = [row["input_ids"].tolist() for row in rows]
        return Dataset.from_list([{"input_ids": row, "completion_mask": [0, 0] + [1] * (len(row) - 2)} for row in ids])

    settings = vars(arguments(output))
    kept = ("learning_rate", "adam_epsilon", "logging_steps", "report_to", "disable_tqdm", "save_strategy")
    more = {"pad_to_multiple_of": 16, "bf16": False, "gradient_checkpointing": False, "fsdp": "full_shard auto_wrap"}
    args = SFTConfig(output, **{name: settings[name] for name in kept}, **more, **options)
    made = SFTTrainer(
        model_of("qwen3"), args, train_dataset=listed(rows), eval_dataset=listed(samples(8)), processing_class=tokenizer
    )
    made.train()
    history = [entry for entry in made.state.log_history if "loss" in entry]
    found = {name: [entry[name] for entry in history] for name in ("mean_token_accuracy", "num_tokens", "entropy")}
    return result(made) | found


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"cp_size": 2, "dp_shard_size": 2}], ids=str)
@pytest.mark.parametrize("kind", ["trainer", "trl"])
def test_trainer_is_as_on_one_process(tmp_path: Path, sizes: dict[str, int], kind: str) -> None:
    alone = run_ranks(trained, 1, str(tmp_path), {}, kind)[0]
    found = run_ranks(trained, 2 * sizes.get("dp_shard_size", 1), str(tmp_path), sizes, kind)[0]
    same(found, alone)
    for name in alone.keys() - {"losses", "weights", "own", "total", "flos"}:
        assert close(found[name], alone[name], 1e-5), name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("gemma"), "sliding_attention"),
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)), "sliding_attention"),
        (lambda: BartModel(BartConfig(vocab_size=8, encoder_layers=1, decoder_layers=1)), "is not causal"),
        (lambda: MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8)), "recurrent state"),
        (lambda: LlamaForCausalLM._from_config(build().config, attn_implementation="eager"), "attention with 'eager'"),
    ],
)
def test_models_that_this_would_change_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(model(), "allgather")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": [1, 2, 3, 4]}, "would shift labels"),
        ({"attention_mask": [0, 1, 1, 1]}, "padded on the left"),
        ({"position_ids": [0, 1, 0, 1]}, "start again within a row"),
        ({"position_ids": [0, 1, 6, 0], "attention_mask": [1, 1, 1, 0]}, ""),
        ({"labels": [1, 2, 3, 4], "shift_labels": [2, 3, 4, -100]}, ""),
    ],
    ids=str,
)
def test_inputs_that_would_give_a_wrong_result_are_refused(
    given: dict[str, list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = torch.tensor([0, 1, 6, 7])
    monkeypatch.setattr(context_parallel, "_POSITIONS", [positions])
    inputs = {name: torch.tensor([value]) for name, value in given.items()}
    if message:
        with pytest.raises(DataError, match=message):
            context_parallel._check_inputs(build(), (), inputs)
    elif "position_ids" in given:
        assert context_parallel._check_inputs(build(), (), inputs) is None
    else:
        _, more = context_parallel._check_inputs(build(), (), inputs)
        assert torch.equal(more["position_ids"], positions[None])


def misused() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=97, bos_token_id=0, eos_token_id=0)
    model = accelerator.prepare(GPT2LMHeadModel(config))
    ids = torch.arange(1, 9)[None]
    mask = (ids < 6).long()
    with pytest.raises(DataError, match="sequences of 7 tokens cannot be divided over 2 ranks"):
        accelerator.maybe_context_parallel([ids[:, 1:]], [1]).__enter__()
    with pytest.raises(ConfigError, match="0 buffers"):
        accelerator.maybe_context_parallel().__enter__()
    with accelerator.maybe_context_parallel([ids, mask], [1, 1]):
        assert ids.shape == (1, 4)
        with pytest.raises((ConfigError, CommunicationError), match="a layer passes a mask"):
            model(ids, attention_mask=mask)
    assert torch.equal(ids, torch.arange(1, 9)[None])
    with accelerator.maybe_context_parallel([ids], [1]):
        loss = model(ids).logits.mean()
    with pytest.raises(ConfigError, match="GPT2LMHeadModel ran inside maybe_context_parallel, but its backward"):
        accelerator.backward(loss)


def test_masks_that_attention_would_ignore_are_refused() -> None:
    run_ranks(misused, 2)
