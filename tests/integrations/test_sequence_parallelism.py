"""Sequence parallelism in Accelerate's documented loop, in Trainer and in TRL, against one process.

pytest tests/integrations/test_sequence_parallelism.py -m full
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import fullshard
from fullshard.core.errors import ConfigError, DataError
from tests import trainers, trl_runs
from tests.distributed import run_ranks

pytestmark = pytest.mark.full
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
LENGTHS = (9, 12, 11)
BACKENDS = ["fullshard", *(["deepspeed"] if find_spec("deepspeed") else [])]


FEATURES: dict[str, dict[str, Any]] = {
    "recomputed": {"fsdp_plugin": {"activation_checkpointing": True}},
    "offloaded": {"fsdp_plugin": {"cpu_offload": True}},
    "compiled": {"dynamo_backend": "aot_eager"},
    "compiled and recomputed": {"dynamo_backend": "aot_eager", "fsdp_plugin": {"activation_checkpointing": True}},
}
"""Features that change no numbers, as arguments of the Accelerator."""
SPLIT = {
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
    **dict.fromkeys((*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
}


def config(backend: str, sp: int = 2, feature: str = "", **handler: Any) -> Any:
    """Return a config with `sp` ranks per sequence, or None with one."""
    if sp == 1 or dist.get_world_size() == 1:
        return None
    options = DeepSpeedSequenceParallelConfig(**handler)
    axis = {"replicas": "dp_replicate_size", "split layers": "tp_size"}.get(feature, "dp_shard_size")
    sizes = {"sp_size": sp, axis: dist.get_world_size() // sp}
    return fullshard.ParallelismConfig(sp_backend=backend, sp_handler=options, **sizes)


def model_of(feature: str, mesh: Any) -> Any:
    model = trainers.build()
    if feature == "recomputed by Transformers" and mesh is not None:
        model.gradient_checkpointing_enable()
    if "LoRA" in feature:
        torch.manual_seed(2)
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, adapters)
    if feature == "QLoRA at rest":
        fullshard.quantize(model, "nf4")
    if feature == "split layers" and mesh is not None:
        plan = {f"model.layers.*.{name}": style() for name, style in SPLIT.items()}
        parallelize_module(model, mesh["tp"], plan)
    return model


def batch_size(sp: int = 2) -> int:
    """Return how many samples each batch has, so that a step has four."""
    return 4 // max(1, dist.get_world_size() // sp)


def data() -> list[dict[str, torch.Tensor]]:
    """Return samples of which some have no label in the part of the first rank."""
    rows = trainers.samples(lengths=LENGTHS)
    for number, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: 7 if number % 3 else 2] = -100
    return rows


def loader_of(rows: Any, size: int, **options: Any) -> Any:
    return DataLoader(rows, batch_size=size, collate_fn=trainers.pad, **options)


def loop(
    backend: str, accumulation: int, sp: int, feature: str = "", save: str | None = None, load: str | None = None
) -> dict[str, Any]:
    """Train as Accelerate's guide to sequence parallelism does."""
    config_of_ranks = config(backend, sp, feature, sp_attn_implementation="sdpa")
    accelerator = fullshard.Accelerator(
        cpu=True,
        parallelism_config=config_of_ranks,
        gradient_accumulation_steps=accumulation,
        **FEATURES.get(feature, {}) if sp > 1 else {},
    )
    model = model_of(feature, accelerator.torch_device_mesh if sp > 1 else None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    loader = loader_of(data(), 4 if feature == "split layers" else batch_size(sp), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    if load is not None:
        accelerator.load_state(load)
    losses, norms, words = [], [], []
    model.train()
    mesh: Any = accelerator.torch_device_mesh
    for batch in loader:
        words.append(int(accelerator.reduce((batch["labels"] != -100).sum(), "sum")))
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            if config_of_ranks is not None:
                loss = weighted(loss, batch["shift_labels"], mesh["sp"].get_group())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if save is not None:
        accelerator.save_state(save)
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "words": words, "weights": weights}


def weighted(loss: torch.Tensor, shift_labels: torch.Tensor, group: Any) -> Any:
    """Return the loss of whole sequences as the guide does, if torch can do so on CPUs: in a group of all ranks."""
    from torch.distributed.nn import functional

    count = (shift_labels != -100).sum()
    if dist.get_world_size(group) < dist.get_world_size():
        total = count.clone()
        dist.all_reduce(total, group=group)
        return torch.where(count > 0, loss * count, 0.0) * dist.get_world_size(group) / total
    losses = functional.all_gather(loss, group=group)
    counts = functional.all_gather(count, group=group)
    total = sum(one * count for one, count in zip(losses, counts, strict=True) if count > 0)
    return total / max(sum(counts), 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")
def test_accelerates_loop(backend: str) -> None:
    for ranks, accumulation in ((2, 1), (4, 2)):
        alone = run_ranks(loop, ranks // 2, backend, accumulation, 1)[0]
        together = run_ranks(loop, ranks, backend, accumulation, 2)[0]
        torch.testing.assert_close(together, alone, **TOLERANCE)


@pytest.mark.parametrize("saved", [1, 2])
def test_resumed_with_and_without(tmp_path: Path, saved: int) -> None:
    before = run_ranks(loop, saved, "fullshard", 1, saved, "", str(tmp_path / "state"))[0]
    alone, together = (
        run_ranks(loop, ranks, "fullshard", 1, ranks, "", None, str(tmp_path / "state"))[0] for ranks in (1, 2)
    )
    assert alone["losses"][0] < before["losses"][0]
    torch.testing.assert_close(together, alone, **TOLERANCE)


def shifting(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that shifts labels itself, so that it needs the logits of whole sequences."""
    logits, shifted = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, shifted, reduction="sum") / num_items_in_batch


LOSSES = {"shifting": shifting}


@pytest.mark.parametrize(
    ("feature", "ranks", "alone"),
    [
        *((feature, 2, 1) for feature in (*FEATURES, "recomputed by Transformers", "LoRA", "QLoRA at rest")),
        ("replicas", 4, 2),
        ("split layers", 4, 1),
    ],
)
def test_combinations(feature: str, ranks: int, alone: int) -> None:
    expected = run_ranks(loop, alone, "fullshard", 2, 1, feature)[0]
    found = run_ranks(loop, ranks, "fullshard", 2, 2, feature)[0]
    torch.testing.assert_close(found, expected, **TOLERANCE)


def train(output: str, backend: str, settings: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        **{"per_device_train_batch_size": batch_size(), "per_device_eval_batch_size": batch_size()},
        **{"parallelism_config": config(backend), "optim": "sgd", "learning_rate": 0.1, "max_steps": -1},
        **{"num_train_epochs": 1, "eval_strategy": "epoch"},
    }
    family, loss = settings.pop("family", "llama"), LOSSES.get(settings.pop("loss", None))
    made = trainers.trainer(
        trainers.build(family),
        trainers.arguments(output, **options | settings),
        train_dataset=data(),
        eval_dataset=data()[:8],
        compute_loss_func=loss,
    )
    made.train()
    evaluated = [line["eval_loss"] for line in made.state.log_history if "eval_loss" in line]
    logits, labels, metrics = made.predict(data()[:8])
    logits = torch.tensor(logits[0] if isinstance(logits, tuple) else logits)[torch.tensor(labels) != -100]
    evaluated.append(metrics["test_loss"])
    return trainers.result(made) | {"evaluated": evaluated, "steps": made.state.max_steps, "logits": logits}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (2, {"gradient_accumulation_steps": 2, "family": "experts"}),
        (4, {"gradient_accumulation_steps": 2}),
        (4, {"loss": "shifting"}),
        (2, {"label_smoothing_factor": 0.1}),
    ],
)
def test_trainer(tmp_path: Path, backend: str, ranks: int, settings: dict[str, Any]) -> None:
    alone = run_ranks(train, 1, str(tmp_path), backend, settings)[0]
    together = run_ranks(train, ranks, str(tmp_path), backend, settings)[0]
    assert together["steps"] == 6 // settings.get("gradient_accumulation_steps", 1)
    for name in ("losses", "norms", "weights", "evaluated", "logits"):
        torch.testing.assert_close(together[name], alone[name], **TOLERANCE)


def by_trl(place: str, output: str, name: str, lora: bool, settings: dict[str, Any]) -> Any:
    size = batch_size()
    more = {"per_device_train_batch_size": size, "parallelism_config": config("fullshard"), "optim": "sgd"}
    more |= {"per_device_eval_batch_size": size, "eval_strategy": "epoch", "_eval_rows": 4, "max_steps": 4}
    made = trl_runs.build(place, name, lora, False, output, more | settings)
    made.train()
    lines = [line for line in made.state.log_history if "num_tokens" in line or "eval_loss" in line]
    return trainers.result(made) | {"counts": [line.get("num_tokens", line.get("eval_loss")) for line in lines]}


@pytest.mark.parametrize(
    ("name", "lora", "settings"),
    [
        ("SFT", False, {}),
        ("SFT", False, {"loss_type": "dft", "gradient_accumulation_steps": 2}),
        ("DPO", False, {"gradient_accumulation_steps": 2}),
        ("DPO", True, {}),
        ("DPO", False, {"precompute_ref_log_probs": True, "eval_strategy": "no", "_eval_rows": 0}),
        ("OnlineDPO", False, {"eval_strategy": "no"}),
        *((name, False, {}) for name in ("KTO", "Reward", "CPO", "ORPO", "TPO", "GKD", "GOLD")),
    ],
    ids=str,
)
def test_trainers_of_trl(tmp_path: Path, name: str, lora: bool, settings: dict[str, Any]) -> None:
    trl_runs.write_model(tmp_path)
    for ranks in ("1", "2"):
        (tmp_path / ranks).mkdir()
    alone, together = (
        run_ranks(by_trl, ranks, str(tmp_path), str(tmp_path / str(ranks)), name, lora, settings)[0] for ranks in (1, 2)
    )
    assert alone["counts"] or name == "OnlineDPO"
    for key in ("losses", "norms", "weights", "counts"):
        torch.testing.assert_close(together[key], alone[key], **TOLERANCE)


def check_refused(place: str, output: str) -> None:
    with pytest.raises(ConfigError, match="SDFTTrainer generates its batches"):
        by_trl(place, output, "SDFT", False, {"eval_strategy": "no"})
    accelerator = fullshard.Accelerator(
        cpu=True, parallelism_config=config("fullshard", sp_seq_length=16, sp_seq_length_is_variable=False)
    )
    loader = accelerator.prepare(loader_of(data(), 2))
    with pytest.raises(DataError, match="12 tokens per sequence, but sp_seq_length is 16"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="got a loader that is not prepared"):
        accelerator.deepspeed_ulysses_dl_adapter(loader.base_dataloader, torch.nn.Identity())


def test_what_is_refused(tmp_path: Path) -> None:
    trl_runs.write_model(tmp_path)
    run_ranks(check_refused, 2, str(tmp_path), str(tmp_path))


def check_sizes_of_launcher() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
        made = fullshard.Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=1, sp_size=1))
    mesh: Any = made.torch_device_mesh
    assert made.parallelism_config.sp_size == mesh["sp"].size() == 2


def test_a_config_without_sizes_leaves_them_to_the_launcher() -> None:
    run_ranks(check_sizes_of_launcher, 2)
