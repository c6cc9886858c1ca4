"""Sequences that are divided over ranks train as on one process, and models that this would change are refused.

pytest tests/api/test_context_parallel.py
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fullshard import ParallelismConfig, quantize
from fullshard.api import Accelerator, context_parallel
from fullshard.api.context_parallel import prepare
from fullshard.comm.torch_private import default_store
from fullshard.core.errors import CommunicationError, ConfigError, DataError
from tests import trl_runs
from tests.differential import EPS
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


SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {"fsdp_plugin": {"activation_checkpointing": True}},
    "offloaded": {"fsdp_plugin": {"cpu_offload": True}},
    "compiled": {"dynamo_backend": "aot_eager"},
    "compiled and recomputed": {"dynamo_backend": "aot_eager", "fsdp_plugin": {"activation_checkpointing": True}},
}
"""Features that change no numbers, as arguments of the Accelerator. The loop sets up the others."""


def loop(
    family: str, sizes: dict[str, int], feature: str = "", steps: int = 5, directory: str = "", load: bool = False
) -> dict[str, Any]:
    """A loop as people write it for Accelerate, with two micro-batches of 4 sequences per step."""
    config = ParallelismConfig(**sizes) if sizes else None
    options = SETTINGS.get(feature, {}) if sizes else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config, **options)
    cp, tp = (getattr(config, name, 1) for name in ("cp_size", "tp_size"))
    copies = accelerator.num_processes // tp
    model = model_of(family)
    if feature == "recomputed by Transformers" and sizes:
        model.gradient_checkpointing_enable()
    if "LoRA" in feature:
        torch.manual_seed(2)
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, adapters)
    if feature == "QLoRA at rest":
        quantize(model, "nf4")
    if tp > 1:
        split_layers(model, accelerator.torch_device_mesh["tp"])  # type: ignore[index]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=EPS)
    if "LoRA" in feature:  # whose small gradients Adam would divide by numbers as small, and their rounding, too
        optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
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
    assert close(found["losses"], expected["losses"], 1e-6), (found["losses"], expected["losses"])
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        ("tied", 2, {"cp_size": 2}),
        pytest.param("qwen3", 2, {"cp_size": 2}, marks=pytest.mark.full),
        pytest.param("qwen3", 4, {"cp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.full),
        pytest.param("llama", 4, {"cp_size": 4}, marks=pytest.mark.full),
        pytest.param("llama", 4, {"cp_size": 2, "tp_size": 2}, marks=pytest.mark.full),
        pytest.param("llama", 8, {"cp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_loop_is_as_on_one_process(family: str, ranks: int, sizes: dict[str, int]) -> None:
    alone = run_ranks(loop, 1, family, {})[0]
    found, *others = run_ranks(loop, ranks, family, sizes)
    same(found, alone)
    assert all(close(other["losses"], found["losses"]) for other in others)


@pytest.mark.full
@pytest.mark.parametrize("feature", [*SETTINGS, "recomputed by Transformers", "LoRA", "QLoRA at rest"])
def test_features_are_as_on_one_process(feature: str) -> None:
    same(run_ranks(loop, 2, "llama", {"cp_size": 2}, feature)[0], run_ranks(loop, 1, "llama", {}, feature)[0])


@pytest.mark.full
@pytest.mark.parametrize("saved", [1, 2])
def test_checkpoints_load_with_and_without(tmp_path: Path, saved: int) -> None:
    sizes: list[dict[str, int]] = [{}, {"cp_size": 2}]
    directory, loaded = str(tmp_path / "state"), 3 - saved
    run_ranks(loop, saved, "llama", sizes[saved - 1], "", 2, directory)
    expected = run_ranks(loop, saved, "llama", sizes[saved - 1], "", 2, directory, True)[0]
    same(run_ranks(loop, loaded, "llama", sizes[loaded - 1], "", 2, directory, True)[0], expected)


def shifting(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss that shifts labels itself, so that it needs the logits of whole sequences."""
    logits, shifted = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, shifted, reduction="sum") / num_items_in_batch


def accuracy(predicted: Any) -> dict[str, float]:
    """A metric that depends on the logits of all tokens and on the number of samples."""
    assert predicted.predictions.shape[:2] == predicted.label_ids.shape and len(predicted.label_ids) in (7, 8)
    return {"accuracy": float(abs(predicted.predictions[predicted.label_ids != -100]).mean())}


def trained(output: str, sizes: dict[str, int], kind: str) -> dict[str, Any]:
    config = ParallelismConfig(**sizes) if sizes else None
    batch = 4 // sizes.get("dp_shard_size", 1)
    options: dict[str, Any] = {
        **{"gradient_accumulation_steps": 2, "max_steps": 5, "per_device_train_batch_size": batch},
        **{"per_device_eval_batch_size": batch, "eval_strategy": "steps", "eval_steps": 5},
    }
    if kind == "smoothed":
        options["label_smoothing_factor"] = 0.1
    rows = samples(40, lengths=LENGTHS)
    if kind == "trl":
        return with_trl(output, rows, parallelism_config=config, **options)
    made = trainer(
        model_of("qwen3"),
        arguments(output, parallelism_config=config, **options),
        train_dataset=rows,
        eval_dataset=samples(8),
        data_collator=padded,
        compute_loss_func=shifting if kind == "shifting" else None,
        compute_metrics=accuracy if kind == "metrics" else None,
    )
    made.train()
    predicted = made.predict(rows[:7]) if kind == "metrics" else None
    accuracies = [line["eval_accuracy"] for line in made.state.log_history if "eval_accuracy" in line]
    return result(made) | (
        {"accuracies": accuracies, "logits": predicted.predictions[0, 3].tolist()} if predicted else {}
    )


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
@pytest.mark.parametrize("kind", ["trainer", "trl", "smoothed", "shifting", "metrics"])
def test_trainer_is_as_on_one_process(tmp_path: Path, sizes: dict[str, int], kind: str) -> None:
    alone = run_ranks(trained, 1, str(tmp_path), {}, kind)[0]
    found = run_ranks(trained, 2 * sizes.get("dp_shard_size", 1), str(tmp_path), sizes, kind)[0]
    same(found, alone)
    for name in alone.keys() - {"losses", "weights", "own", "total", "flos"}:
        torch.testing.assert_close(found[name], alone[name], rtol=1e-6, atol=1e-6)


def by_trl(place: str, output: str, name: str, lora: bool, settings: dict[str, Any]) -> Any:
    """Train with a trainer of TRL's that needs the outputs of whole sequences, and evaluate."""
    config = ParallelismConfig(cp_size=2) if dist.get_world_size() > 1 else None
    options = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "optim": "sgd", "learning_rate": 0.1}
    options |= {"_eval_rows": 4, "eval_strategy": "steps", "eval_steps": 3}
    made = trl_runs.build(place, name, lora, False, output, {**options, **settings, "parallelism_config": config})
    made.train()
    others: tuple[str, ...] = ("runtime", "per_second", "total_flos")
    if name in ("CPO", "ORPO"):  # their means of logits include padding, which attention computes without masks
        others += "logits/chosen", "logits/rejected"
    logs = [{k: v for k, v in line.items() if not k.endswith(others)} for line in made.state.log_history]
    return {"logs": logs, "weights": result(made)["weights"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "lora", "settings"),
    [
        ("DPO", False, {"loss_type": ["sft", "sigmoid"], "gradient_accumulation_steps": 2}),
        ("DPO", False, {"precompute_ref_log_probs": True, "eval_strategy": "no", "_eval_rows": 0}),
        ("DPO", True, {"gradient_checkpointing": True}),
        *((name, False, {}) for name in ("KTO", "Reward", "CPO", "ORPO", "TPO")),
    ],
)
def test_trainers_that_need_whole_sequences(tmp_path: Path, name: str, lora: bool, settings: dict[str, Any]) -> None:
    trl_runs.write_model(tmp_path)
    one, two = (tmp_path / number for number in ("one", "two"))
    alone = run_ranks(by_trl, 1, str(tmp_path), str(one), name, lora, settings)[0]
    found = run_ranks(by_trl, 2, str(tmp_path), str(two), name, lora, settings)[0]
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-6)


def refused_trainers(place: str, output: str) -> None:
    for name, message in (
        ("SDFT", "SDFTTrainer generates its batches"),
        ("OnlineDPO", "OnlineDPOTrainer computes on whole sequences on every rank"),
        ("GKD", "padded on the left"),
        ("GOLD", "padded on the left"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            by_trl(place, f"{output}/{name}", name, False, {"eval_strategy": "no"})


@pytest.mark.full
def test_refused_trainers(tmp_path: Path) -> None:
    trl_runs.write_model(tmp_path)
    run_ranks(refused_trainers, 2, str(tmp_path), str(tmp_path))


def test_replicas_need_shards() -> None:
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):  # says Accelerate
        ParallelismConfig(cp_size=2, dp_replicate_size=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("gemma"), "sliding_attention"),
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)), "sliding_attention"),
        (lambda: BartModel(BartConfig(vocab_size=8, encoder_layers=1, decoder_layers=1)), "is not causal"),
        (lambda: MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8)), "recurrent state"),
        (lambda: get_peft_model(build(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")), "a prompt"),
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
    block = context_parallel._Divided(dist.group.WORLD, positions, torch.arange(8), is_for_model=False)  # type: ignore[arg-type]
    monkeypatch.setattr(context_parallel, "_BLOCKS", [block])
    inputs, model = {name: torch.tensor([value]) for name, value in given.items()}, build()

    def enter() -> Any:
        context_parallel._check_labels(model, (), inputs)
        return context_parallel._enter(model.model, (), inputs)

    if message:
        with pytest.raises(DataError, match=message):
            enter()
    else:
        assert torch.equal(enter()[1]["position_ids"], inputs.get("position_ids", positions[None]))


def left_out() -> None:
    """Rank 1 fails in the second forward, where rank 0 waits for its keys."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    model = accelerator.prepare(build())
    for step in range(2):
        ids = torch.arange(1, 9)[None]
        with accelerator.maybe_context_parallel([ids], [1]):
            if step == 0:
                model(ids).logits.mean().backward()
            elif accelerator.process_index == 1:
                model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    model(ids)
                default_store().wait(["told"])  # stay until the other has found out
            else:
                with pytest.raises(CommunicationError, match=r"rank 0, gathering .* sequences: rank 1 had .*ZeroDiv"):
                    model(ids)
                default_store().set("told", "")


@pytest.mark.full
def test_a_rank_that_leaves_an_exchange_out_is_named() -> None:
    run_ranks(left_out, 2)


def whole_sequences() -> None:
    """Outside a block, models compute as always, with masks. In a block, they divide whole sequences themselves."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    plain, other, model = (build().eval() for _ in range(3))
    model, _ = accelerator.prepare(model, other)
    layer = model.model.layers[0].self_attn
    hooks = len(model._forward_pre_hooks), len(layer._forward_pre_hooks)
    prepare(model, "allgather")
    assert hooks == (len(model._forward_pre_hooks), len(layer._forward_pre_hooks))
    ids = torch.tensor([[0, 0, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
    left = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    torch.testing.assert_close(model(**left).logits[:, 2:], plain(**left).logits[:, 2:])
    expected = plain.generate(**left, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(**left, max_new_tokens=4, do_sample=False), expected)
    positions, expected = torch.arange(8), plain(ids).logits
    loss = plain(ids[:, :5], labels=ids[:, :5]).loss
    with accelerator.maybe_context_parallel([positions], [0]):
        for one in (model, other, model):
            found = one(ids, output_hidden_states=True)
            torch.testing.assert_close(found.logits, expected)
            assert all(state.shape == (2, 8, 32) for state in found.hidden_states)
        torch.testing.assert_close(model(ids[:, :5], labels=ids[:, :5]).loss, loss)  # padded to the length of the block
        with pytest.raises(DataError, match=r"got 16 tokens per sequence, but the block has 8"):
            model(ids.repeat(1, 2))
        with pytest.raises(DataError, match=r"attention_mask of shape \(2, 1, 8, 8\) cannot be divided"):
            model(ids, attention_mask=torch.ones(2, 1, 8, 8))


def compiled_in_and_out() -> None:
    """Compiled layers use this rank's attention in a block and the usual one outside, whichever came first."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), dynamo_backend="aot_eager")
    for order in ((True, False, True), (False, True, False)):
        torch.compiler.reset()
        plain, model = build(), accelerator.prepare(build())
        for number, is_in_block in enumerate(order):
            ids, positions = torch.arange(8)[None] + number, torch.arange(8)
            expected = plain(ids).logits
            with accelerator.maybe_context_parallel([positions], [0]) if is_in_block else contextlib.nullcontext():
                torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.full
@pytest.mark.parametrize("check", [whole_sequences, compiled_in_and_out])
def test_whole_sequences(check: Any) -> None:
    run_ranks(check, 2)


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
    with accelerator.maybe_context_parallel([ids], [1]), pytest.raises(ConfigError, match=r"logits of shape \(1, 2\)"):
        accelerator.prepare(LlamaForSequenceClassification(build().config))(ids)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel ran inside maybe_context_parallel, but its backward"):
        accelerator.backward(loss)


def test_masks_that_attention_would_ignore_are_refused() -> None:
    run_ranks(misused, 2)
