"""Transformers' Trainer on fullshard's engine, against Transformers' own on one process.

pytest tests/integrations/test_trainer.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.api import plugin as plugins
from fullshard.checkpoint import full_state_dict
from fullshard.config.handover import hand_over
from fullshard.config.schema import CheckpointConfig, RunConfig
from fullshard.core.errors import CheckpointError, CommunicationError, ConfigError, LifecycleError
from fullshard.features.watchdog import WATCHDOG
from fullshard.observe import read_metrics
from fullshard.observe.record import read_runs
from tests.checkpoint.test_lease import another_job
from tests.differential import CLOSE, TOLERANCE
from tests.distributed import run_ranks
from tests.features.watchdog.test_waits_and_timeouts import until
from tests.launching import LAUNCH, run_python
from tests.trainers import arguments, build, close, pad, result, run, samples, trainer


def compare(tmp_path: Path, family: str = "llama", world_size: int = 2, **options: Any) -> Any:
    """Losses and gradient norms of `world_size` ranks must be those of one process with the same global batch."""
    [stock] = run_ranks(run, 1, str(tmp_path / "stock"), family, True, options)
    ranks = run_ranks(run, world_size, str(tmp_path / "sharded"), family, False, options)
    assert close(ranks[0]["losses"], stock["losses"]), (ranks[0]["losses"], stock["losses"])
    assert close(ranks[0]["norms"], stock["norms"])
    for name, value in stock["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, **CLOSE)
    return ranks, stock


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen", marks=pytest.mark.numerics), "gemma"])
def test_losses_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    ranks, stock = compare(tmp_path, family)
    for rank in ranks:
        assert abs(rank["own"] - rank["total"] / 2) <= 16  # 1/W, up to the rounding of a bucket
        assert rank["losses"] == ranks[0]["losses"]
    assert sum(rank["own"] for rank in ranks) == ranks[0]["total"]
    assert ranks[0]["flos"] == stock["flos"]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen", "gemma", "experts"])
def test_losses_on_four_ranks(tmp_path: Path, family: str) -> None:
    ranks, _ = compare(tmp_path, family, world_size=4)
    assert all(abs(rank["own"] - rank["total"] / 4) <= 64 for rank in ranks)


def test_accumulation(tmp_path: Path) -> None:
    compare(tmp_path, gradient_accumulation_steps=3, max_steps=3, lengths=(12, 5, 9))


def test_label_smoothing(tmp_path: Path) -> None:
    compare(tmp_path, label_smoothing_factor=0.1)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance", "sequential"])
def test_sampling_strategies(tmp_path: Path, strategy: str) -> None:
    options = {"train_sampling_strategy": strategy, "lengths": (12, 5, 9, 3), "gradient_accumulation_steps": 2}
    one = run_ranks(run, 1, str(tmp_path), "llama", False, options)[0]
    two = run_ranks(run, 2, str(tmp_path), "llama", False, options)[0]
    assert close(two["losses"], one["losses"])


def seen(output: str, strategy: str) -> list[list[int]]:
    rows = samples(96, lengths=(12, 5, 9, 3))
    args = arguments(output, train_sampling_strategy=strategy, max_steps=-1, num_train_epochs=1)
    loader = trainer(build(), args, train_dataset=rows).get_train_dataloader()
    return [[int(length) for length in batch["attention_mask"].sum(1)] for batch in loader]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_every_sample_is_dealt_once(tmp_path: Path, strategy: str) -> None:
    ranks = run_ranks(seen, 2, str(tmp_path), strategy)
    assert sorted(n for rank in ranks for batch in rank for n in batch) == sorted([12, 5, 9, 3] * 24)
    if strategy == "group_by_length":
        assert all(len(set(a + b)) <= 2 for a, b in zip(*ranks, strict=True))  # alike over both ranks


def recomputed(output: str, options: dict[str, Any]) -> tuple[list[float], int, str]:
    """Losses, how often a part of a layer ran, and what of this library has the layer recomputed."""
    made, runs = trainer(build(), arguments(output, **options)), list[int]()
    layer = made.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    made.train()
    how = vars(layer).get("_recomputed_by")
    return result(made)["losses"], len(runs), how.__name__ if how else ""


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [("gradient_checkpointing", ""), ("activation_checkpointing", ""), ("fsdp_config", "_wholly"),
     ("mode", "_selectively")],
)  # fmt: skip
def test_activation_checkpointing(tmp_path: Path, spelling: str, expected: str) -> None:
    """As Transformers does it where its own arguments ask for it."""
    [stock] = run_ranks(run, 1, str(tmp_path / "stock"), "llama", True, {})
    options = (
        {"fsdp_config": {"activation_checkpointing": True}}
        if spelling == "fsdp_config"
        else {"fsdp_config": {"activation_checkpointing": True, "activation_checkpointing_mode": "selective"}}
        if spelling == "mode"
        else {spelling: True, f"{spelling}_kwargs": {"use_reentrant": spelling == "gradient_checkpointing"}}
    )
    losses, runs, how = run_ranks(recomputed, 2, str(tmp_path / "sharded"), options)[0]
    assert close(losses, stock["losses"])
    assert (runs, how) == (2 * len(losses), expected)


def bf16(output: str) -> Any:
    made = trainer(build(), arguments(output, bf16=True))
    counts: list[torch.Tensor] = []
    made.model.register_forward_pre_hook(lambda _, __, k: counts.append(k["num_items_in_batch"]), with_kwargs=True)
    made.train()
    assert counts and all(count.dtype is torch.long for count in counts)  # in bf16 it would be another number
    assert all(p.dtype is torch.float32 for p in made.model.parameters())
    return result(made)["losses"], made.accelerator.mixed_precision


def test_bf16(tmp_path: Path) -> None:
    [stock] = run_ranks(run, 1, str(tmp_path / "stock"), "llama", True, {"bf16": True, "use_cpu": True})
    losses, mode = run_ranks(bf16, 2, str(tmp_path / "sharded"))[0]
    assert mode == "bf16"
    assert close(losses, stock["losses"], 2e-2)


# -- saving and resuming --------------------------------------------------------------------------------------------


def interrupted(output: str, kind: str, family: str) -> tuple[Any, Any, list[str]]:
    """A run of 6 steps in one go, and the same in two halves."""
    options: dict[str, Any] = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "fsdp_config": {"state_dict_type": kind},
    }
    whole = trainer(build(family), arguments(f"{output}/whole", **options))
    whole.train()
    files = sorted(str(p.relative_to(f"{output}/whole/checkpoint-3")) for p in Path(output).rglob("checkpoint-3/**/*"))
    torch.manual_seed(99)  # nothing but the checkpoint may make the second half equal
    again = trainer(build(family), arguments(f"{output}/whole", **options))
    again.train(resume_from_checkpoint=f"{output}/whole/checkpoint-3")
    return result(whole), result(again), files


@pytest.mark.parametrize(
    ("kind", "family", "size"),
    [
        ("SHARDED_STATE_DICT", "llama", 2),
        ("FULL_STATE_DICT", "tied", 2),
        pytest.param("FULL_STATE_DICT", "experts", 2, marks=pytest.mark.full),
        pytest.param("SHARDED_STATE_DICT", "qwen", 4, marks=pytest.mark.full),
        pytest.param("SHARDED_STATE_DICT", "gemma", 4, marks=pytest.mark.full),
        pytest.param("FULL_STATE_DICT", "gemma", 2, marks=pytest.mark.full),
    ],
)
def test_resume_is_bit_exact(tmp_path: Path, kind: str, family: str, size: int) -> None:
    whole, again, files = run_ranks(interrupted, size, str(tmp_path), kind, family)[0]
    assert again["losses"] == whole["losses"]
    for name, value in whole["weights"].items():
        assert torch.equal(again["weights"][name], value), name
    assert {"config.json", "trainer_state.json", *(f"rng_state_{rank}.pth" for rank in range(size))} <= set(files)
    weights = [f for f in files if Path(f).name.startswith("model") and f.endswith(".safetensors")]
    if kind == "SHARDED_STATE_DICT":
        assert weights == [f"training_state/model-rank{rank:05d}.safetensors" for rank in range(size)]
    elif family == "tied":
        assert weights == ["model.safetensors"]  # written once


def torch_format(output: str) -> dict[str, torch.Tensor]:
    config = RunConfig(checkpoint=CheckpointConfig(format="dcp"))
    os.environ.update(hand_over(config, Path(output).with_name(f"config-{dist.get_rank()}.json")))
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    made = trainer(build("tied"), arguments(output, **options))
    made.train()
    full = trainer(build(), arguments(output, fsdp_config={"state_dict_type": "FULL_STATE_DICT"}))
    with pytest.raises(ConfigError, match=r"checkpoint\.format = dcp stores weights"):
        full.train()
    weights: dict[str, torch.Tensor] = result(made)["weights"]
    return weights


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_torchs_format_besides(tmp_path: Path) -> None:
    """Where Trainer on Accelerate looks for it."""
    import torch.distributed.checkpoint as dcp

    expected = run_ranks(torch_format, 2, str(tmp_path / "out"))[0]
    directory = tmp_path / "out" / "checkpoint-2"
    assert (directory / "optimizer_0" / ".metadata").is_file() and (directory / "training_state").is_dir()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(state, checkpoint_id=directory / "pytorch_model_fsdp_0", no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state["model"][name], tensor), name
    assert not list(directory.glob(".*"))


def other_world_size(output: str) -> Any:
    """On whatever number of ranks: go on from step 2 to step 4."""
    made = trainer(build(), arguments(output, save_strategy="steps", save_steps=2))
    last = Path(output) / "checkpoint-2"
    made.train(resume_from_checkpoint=str(last) if last.is_dir() else None)
    return result(made)


@pytest.mark.full
def test_resume_at_another_world_size(tmp_path: Path) -> None:
    two = run_ranks(other_world_size, 2, str(tmp_path))[0]
    [one] = run_ranks(other_world_size, 1, str(tmp_path))
    assert close(one["losses"], two["losses"])


def resume_with_another_batch(output: str) -> str:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(build(), arguments(output, **options)).train()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for size in (None, 1):
            batch = {} if size is None else {"per_device_train_batch_size": size}
            again = trainer(build(), arguments(output, **options | batch))
            assert size is not None or not said.getvalue()
            again.train(resume_from_checkpoint=f"{output}/checkpoint-2")
    return said.getvalue()


def test_another_number_of_samples_per_step_is_said(tmp_path: Path) -> None:
    said, _ = run_ranks(resume_with_another_batch, 2, str(tmp_path))
    assert said.count("checkpoint-2: its steps had 4 samples but now have 2") == 1


def resume_newest(output: str) -> tuple[int, str]:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer(build(), arguments(output, **options)).train()
    torn = Path(output) / "checkpoint-9"
    if dist.get_rank() == 0:
        (torn / "training_state").mkdir(parents=True)
        with (Path(output) / "checkpoint-4/training_state/optimizer-rank00001.safetensors").open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"!")
    dist.barrier()
    again = trainer(build(), arguments(output, **options | {"max_steps": 6}))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        again.train(resume_from_checkpoint=True)
    assert dist.get_rank() or "checkpoint-4 is passed over, because it is damaged" in said.getvalue()
    return int(again.state.global_step), str(again.state.log_history[-2]["step"])


def test_resume_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(resume_newest, 2, str(tmp_path))[0] == (6, "6")


def refused_output(output: str) -> str:
    with pytest.raises(ConfigError) as error:
        trainer(build(), arguments(output, save_strategy="steps", save_steps=2)).train()
    return str(error.value)


def test_another_jobs_output_directory_is_refused(tmp_path: Path) -> None:
    with another_job("folder", tmp_path) as refused:
        for message in run_ranks(refused_output, 2, str(tmp_path)):
            assert re.match(refused, message), message


def save_both(output: str, family: str) -> None:
    from transformers import AutoModelForCausalLM

    made = trainer(build(family), arguments(output))
    made.train()
    whole = result(made)["weights"]
    assert made.is_fsdp_enabled
    plugin = made.accelerator.state.fsdp_plugin
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin.set_state_dict_type(kind)
        assert kind in str(made.accelerator.state.fsdp_plugin.state_dict_type)
        made.save_model(f"{output}/{kind}")
        loaded = AutoModelForCausalLM.from_pretrained(f"{output}/{kind}")
        if dist.get_rank() == 0:
            for name, value in loaded.state_dict().items():
                assert torch.equal(whole[name], value), name


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("tied", 2),
        pytest.param("llama", 4, marks=pytest.mark.full),
        pytest.param("qwen", 4, marks=pytest.mark.full),
        pytest.param("gemma", 4, marks=pytest.mark.full),
    ],
)
def test_save_model_always_writes_a_loadable_model(tmp_path: Path, family: str, size: int) -> None:
    run_ranks(save_both, size, str(tmp_path), family)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        names = sorted(p.name for p in (tmp_path / kind).iterdir())
        assert names == ["config.json", "generation_config.json", "model.safetensors", "training_args.bin"]
        args = torch.load(tmp_path / kind / "training_args.bin", weights_only=False)
        assert type(args).__module__.startswith("transformers")


class Unwritable:
    """A tokenizer for which there is no room."""

    def save_pretrained(self, directory: Path) -> None:
        raise OSError(f"no space left in {directory.name}")


def fail_on_rank_0(output: str) -> None:
    made = trainer(build(), arguments(output))
    made.train()
    made.processing_class = Unwritable()
    for is_internal in (False, True):
        with pytest.raises(CheckpointError, match="rank 0: OSError: no space left in model"):
            made.save_model(f"{output}/model", is_internal)


def test_what_one_rank_cannot_write_beside_the_weights_fails_on_all(tmp_path: Path) -> None:
    run_ranks(fail_on_rank_0, 2, str(tmp_path))


def fail_in_a_callback(output: str) -> str:
    """Rank 1 catches what its callback has raised, and does not end."""
    from transformers import TrainerCallback

    class Uploads(TrainerCallback):
        """To where rank 1 may not."""

        def on_save(self, *_: Any, **further: Any) -> None:
            WATCHDOG._asked = 6.0
            if dist.get_rank() == 1:
                raise OSError("forbidden")

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(build(), arguments(output, **options), train_dataset=samples(), callbacks=[Uploads()])
    with pytest.raises((OSError, CommunicationError)) as error:
        made.train()
    here, there = (Path(output) / f"failed-{rank}" for rank in (dist.get_rank(), 1 - dist.get_rank()))
    here.touch()
    until(there.exists)
    return str(error.value)


def test_a_callback_that_fails_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    found, own = run_ranks(fail_in_a_callback, 2, str(tmp_path))
    assert own == "forbidden"
    assert "rank 1 had an error in Trainer's loop (OSError('forbidden')) that rank 0 did not have" in found


def save_in_ones_own_way(output: str, who: str) -> list[list[str]]:
    """A class derived from Trainer, or from the model's, that saves something besides, and a module by itself."""
    import transformers

    from fullshard.integrations.transformers import Trainer

    class OwnModel(transformers.LlamaForCausalLM):
        def save_pretrained(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
            torch.save(self.model.embed_tokens.state_dict()["weight"], Path(directory) / "table.pt")
            return super().save_pretrained(directory, *args, **kwargs)

    class OwnTrainer(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            assert self.args.should_save, "one rank saves"
            super()._save(output_dir, state_dict)
            self.model.model.save_pretrained(Path(output_dir) / "base")
            with pytest.raises(LifecycleError, match="called while only one rank was saving the model"):
                self.model(input_ids=torch.zeros(1, 4, dtype=torch.long))

    model = build()
    if who == "model":
        model.__class__ = OwnModel
    kind = OwnTrainer if who == "trainer" else Trainer
    args = arguments(output, save_strategy="steps", save_steps=4)
    made = kind(model, args, train_dataset=samples(), data_collator=pad)
    made.train()
    made.save_model(f"{output}/final")
    whole = full_state_dict(made.model, rank0_only=False)
    again = kind(build() if who == "trainer" else model, arguments(output, max_steps=6), train_dataset=samples())
    if who == "trainer":  # from what is in training_state
        again.data_collator = pad
        again.train(resume_from_checkpoint=f"{output}/checkpoint-4")
    found = []
    for path in (Path(output, "checkpoint-4"), Path(output, "final")):
        read = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert all(torch.equal(whole[name], value) for name, value in read.items())
        if who == "trainer":
            base = transformers.AutoModel.from_pretrained(path / "base").state_dict()
            assert all(torch.equal(whole[f"model.{name}"], value) for name, value in base.items())
        else:
            assert torch.equal(torch.load(path / "table.pt"), whole["model.embed_tokens.weight"])
        found.append(sorted(each.name for each in path.iterdir()))
    return found


@pytest.mark.parametrize("who", ["trainer", "model"])
def test_what_a_class_of_the_users_saves_is_saved(tmp_path: Path, who: str) -> None:
    _, final = run_ranks(save_in_ones_own_way, 2, str(tmp_path), who)[0]
    own = "base" if who == "trainer" else "table.pt"
    assert {*final} == {own, "config.json", "generation_config.json", "model.safetensors", "training_args.bin"}


def best(output: str, kind: str) -> tuple[float, float, str]:
    args = arguments(
        output, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, greater_is_better=True, save_total_limit=1, fsdp_config={"state_dict_type": kind},
    )  # fmt: skip
    made = trainer(build(), args, eval_dataset=samples(8))
    made.train()
    return made.state.best_metric, made.evaluate()["eval_loss"], made.state.best_model_checkpoint


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_load_best_model_at_end(tmp_path: Path, kind: str) -> None:
    """By a measure by which that is the first, so that something is loaded."""
    best_loss, loaded_loss, directory = run_ranks(best, 2, str(tmp_path), kind)[0]
    assert loaded_loss == pytest.approx(best_loss, rel=TOLERANCE)
    assert Path(directory).name == "checkpoint-2"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]  # save_total_limit


def only_model(output: str) -> None:
    made = trainer(build(), arguments(output, save_strategy="steps", save_steps=4, save_only_model=True))
    made.train()


@pytest.mark.full
def test_save_only_model(tmp_path: Path) -> None:
    run_ranks(only_model, 2, str(tmp_path))
    names = {p.name for p in (tmp_path / "checkpoint-4").iterdir()}
    assert "model.safetensors" in names and "training_state" not in names


def push(output: str) -> list[str]:
    import huggingface_hub

    calls: list[str] = []

    class Url:
        repo_id = "someone/model"

    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("create_repo")
        return Url

    def upload(self: Any, **kwargs: Any) -> str:
        calls.append(f"upload_folder {'model.safetensors' in {p.name for p in Path(kwargs['folder_path']).iterdir()}}")
        return "url"

    api: Any = huggingface_hub.HfApi
    api.create_repo, api.upload_folder = create, upload
    made = trainer(build(), arguments(output, push_to_hub=True, hub_model_id="someone/model", max_steps=1))
    made.train()
    made.save_model()  # pushes
    return calls


def test_push_to_hub_up_to_the_network(tmp_path: Path) -> None:
    ranks = run_ranks(push, 2, str(tmp_path))
    assert ranks[0][0] == "create_repo" and "upload_folder True" in ranks[0]
    assert ranks[1] == []


# -- evaluation -----------------------------------------------------------------------------------------------------


def evaluate(output: str, stock: bool) -> tuple[float, Any, Any, dict[str, float]]:
    def accuracy(prediction: Any) -> dict[str, float]:
        hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"accuracy": float(hits.mean()), "rows": float(len(hits))}

    made = trainer(build(), arguments(output, stock=stock), stock=stock, eval_dataset=samples(8),
                   compute_metrics=accuracy)  # fmt: skip
    first = made.evaluate()
    predicted = made.predict(samples(6))
    return first["eval_loss"], predicted.predictions, predicted.label_ids, first


def test_evaluate_and_predict_on_a_fresh_trainer(tmp_path: Path) -> None:
    [(loss, logits, labels, metrics)] = run_ranks(evaluate, 1, str(tmp_path), True)
    for rank in run_ranks(evaluate, 2, str(tmp_path), False):
        assert rank[0] == pytest.approx(loss, rel=TOLERANCE)
        assert rank[1].shape == logits.shape and (rank[2] == labels).all()
        assert abs(rank[1] - logits).max() <= TOLERANCE * abs(logits).max()
        assert rank[3]["eval_accuracy"] == pytest.approx(metrics["eval_accuracy"])
        assert rank[3]["eval_rows"] == 8


def generate(output: str, train_first: bool) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration, Trainer

    from fullshard.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    torch.manual_seed(1)
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    size = dist.get_world_size()
    args = Seq2SeqTrainingArguments(
        output, predict_with_generate=True, generation_max_length=9, per_device_eval_batch_size=2 // size,
        per_device_train_batch_size=2 // size, max_steps=2, report_to=[], disable_tqdm=True, log_level="error",
        save_strategy="no", fsdp="full_shard",
    )  # fmt: skip
    rows = samples(4, lengths=(12, 5, 7))  # rank 0 reads other lengths than rank 1
    made = Seq2SeqTrainer(model, args, train_dataset=rows, data_collator=pad)
    assert isinstance(made, Trainer)
    if train_first:
        made.train()
    return made.predict(rows).predictions


@pytest.mark.parametrize("train_first", [False, True])
def test_predict_with_generate(tmp_path: Path, train_first: bool) -> None:
    [expected] = run_ranks(generate, 1, str(tmp_path), train_first)
    for predictions in run_ranks(generate, 2, str(tmp_path), train_first):
        assert predictions.shape == expected.shape and (predictions == expected).all()


# -- settings -------------------------------------------------------------------------------------------------------


def callbacks(output: str) -> list[str]:
    from transformers import TrainerCallback

    seen: list[str] = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step} {type(kwargs['model']).__name__}")
            control.should_training_stop = state.global_step == 2

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("save")

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("evaluate")

    args = arguments(output, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=2)
    trainer(build(), args, eval_dataset=samples(4), callbacks=[Recorder()]).train()
    return seen


def test_callbacks(tmp_path: Path) -> None:
    expected = ["step 1 LlamaForCausalLM", "save", "step 2 LlamaForCausalLM", "evaluate", "save"]
    assert run_ranks(callbacks, 2, str(tmp_path)) == [expected] * 2


def policies(output: str) -> tuple[int, int, int]:
    from peft.utils.other import fsdp_auto_wrap_policy

    from fullshard.features import describe

    named = trainer(
        build(), arguments(output, fsdp_config={"transformer_layer_cls_to_wrap": "LlamaMLP, LlamaAttention"})
    )
    named.train()
    assigned = trainer(build(), arguments(output))
    assigned.accelerator.state.fsdp_plugin.auto_wrap_policy = lambda module: type(module).__name__ == "LlamaMLP"
    assigned.train()
    pefts = trainer(build(), arguments(output))
    pefts.accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(pefts.model)
    pefts.train()
    return describe(named.model).units, describe(assigned.model).units, describe(pefts.model).units


def test_auto_wrap_policy(tmp_path: Path) -> None:
    assert run_ranks(policies, 2, str(tmp_path))[0] == (5, 3, 3)


def own_optimizer(output: str, stock: bool) -> tuple[str, list[float]]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = trainer(model, arguments(output, stock=stock), stock=stock, optimizers=(optimizer, None))
    made.train()
    return type(made.optimizer.optimizer).__name__, result(made)["losses"]


@pytest.mark.full
def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    [(_, expected)] = run_ranks(own_optimizer, 1, str(tmp_path), True)
    name, losses = run_ranks(own_optimizer, 2, str(tmp_path), False)[0]
    assert name == "SGD" and close(losses, expected)


def refused(output: str, options: dict[str, Any]) -> str:
    from fullshard.core.errors import FullshardError

    try:
        trainer(build(), arguments(output, **options))
    except FullshardError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fsdp_config": {"offload_param": True}}, "offload_param"),
        ({"fsdp_config": {"fsdp_sharding_strategi": 1}}, "did you mean"),
        ({"fsdp": "full_shard auto_warp"}, "auto"),
        ({"fsdp": "offload"}, "full_shard offload"),
        ({"fsdp": "full_shard", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}, "SHARD_GRAD_OP"),
        ({"fsdp_config": {"activation_checkpointing": True}, "activation_checkpointing": True}, "remove"),
        ({"bf16_full_eval": True}, "bf16=True"),
        ({"deepspeed": "ds.json"}, "TrainingArguments.deepspeed is not supported"),
        ({"deepspeed": None, "torch_compile": True, "torch_compile_mode": "max-autotune"}, "torch_compile_mode"),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    [message] = run_ranks(refused, 1, str(tmp_path), options)
    assert expected in message and "hint" in message, message


def said(output: str) -> list[str]:
    plugins._ALREADY_SAID.clear()  # by other tests in this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(build(), arguments(output, fsdp_config={"limit_all_gathers": True, "use_orig_params": True}))
    return [str(warning.message) for warning in caught if "no effect here" in str(warning.message)]


def test_keys_without_effect_say_so(tmp_path: Path) -> None:
    [messages] = run_ranks(said, 1, str(tmp_path))
    found = {message.partition(" has no effect")[0] for message in messages}  # and not of `auto_wrap`
    assert found == {f"TrainingArguments.fsdp_config: {key}" for key in ("limit_all_gathers", "use_orig_params")}


def settings_of(output: str, options: dict[str, Any]) -> tuple[str, bool, str]:
    made = trainer(build(), arguments(output, **options))
    config = made.accelerator._config.sharding
    return config.resolved_strategy().name, config.cpu_offload, made.accelerator.state_dict_type


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fsdp": "full shard, offload"}, ("FULL_SHARD", True, "SHARDED_STATE_DICT")),
        ({"fsdp": "shard_grad_op"}, ("SHARD_GRAD_OP", False, "SHARDED_STATE_DICT")),
        ({"fsdp_config": {"state_dict_type": "full_state_dict"}}, ("FULL_SHARD", False, "FULL_STATE_DICT")),
        ({"fsdp_config": {"reshard_after_forward": False}}, ("SHARD_GRAD_OP", False, "SHARDED_STATE_DICT")),
        ({"fsdp": None, "fsdp_config": {"sharding_strategy": 2}}, ("SHARD_GRAD_OP", False, "SHARDED_STATE_DICT")),
    ],
)  # fmt: skip
def test_settings_are_honored(tmp_path: Path, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert run_ranks(settings_of, 1, str(tmp_path), options) == [expected]


def divided(output: str) -> list[Any]:
    from fullshard import ParallelismConfig
    from fullshard.core.errors import ConfigError

    found: list[Any] = []
    for sizes in ({}, {"dp_shard_size": 2}, {"dp_replicate_size": 2}, {"tp_size": 2}, {"cp_size": 2}):
        try:
            found.append(settings_of(output, {"parallelism_config": ParallelismConfig(**sizes)})[0])
        except ConfigError as error:
            found.append(str(error).partition("\n")[0])
    return found


def test_a_parallelism_config_says_how_the_model_is_divided(tmp_path: Path) -> None:
    [found, _] = run_ranks(divided, 2, str(tmp_path))
    assert found[:3] == ["FULL_SHARD", "FULL_SHARD", "NO_SHARD"]
    assert found[3].endswith("parallelism_config has tp_size = 2, but the model's layers are not split")
    assert found[4] == "FULL_SHARD"


def two_by_two(output: str) -> list[Any]:
    from fullshard import ParallelismConfig

    options = {"max_steps": 2}
    return [run(output, options=options | more) for more in ({}, {"parallelism_config": ParallelismConfig(2, 2)})]


def test_each_rank_of_a_replica_over_two_has_half_of_it(tmp_path: Path) -> None:
    for whole, replicas in run_ranks(two_by_two, 4, str(tmp_path)):
        assert abs(replicas["own"] - whole["total"] / 2) <= 16 < abs(whole["own"] - whole["total"] / 2)
        assert close(replicas["losses"], whole["losses"]) and close(replicas["norms"], whole["norms"])


def from_file(output: str, path: str) -> tuple[str, bool, str]:
    return settings_of(output, {"fsdp": "full_shard", "fsdp_config": path})


def test_fsdp_config_file(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_offload_params": True, "state_dict_type": "FULL_STATE_DICT"}))
    assert run_ranks(from_file, 1, str(tmp_path), str(path)) == [("FULL_SHARD", True, "FULL_STATE_DICT")]
    path.write_text('{\n "state_dict_typ": "FULL_STATE_DICT"}')
    [message] = run_ranks(refused, 1, str(tmp_path), {"fsdp_config": str(path)})
    assert "fsdp.json:2:2" in message and "state_dict_type" in message


def iterable(output: str) -> list[float]:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(samples(24))

    made = trainer(build(), arguments(output), train_dataset=Stream())
    made.train()
    return list(result(made)["losses"])


def test_iterable_dataset(tmp_path: Path) -> None:
    [one] = run_ranks(iterable, 1, str(tmp_path))
    two = run_ranks(iterable, 2, str(tmp_path))[0]
    assert close(two, one)


# -- scripts that know nothing of fullshard -------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "scripts" / "trainer_script.py"


def script(command: list[str], output: Path, *options: str) -> tuple[list[float], list[list[str]]]:
    """Losses, and whether the model was sharded and how many parameters each rank held."""
    words = [*command, str(SCRIPT), "--output_dir", str(output), *LOGGING, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python(words, SCRIPT.parent, environment, 240)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def read(output: str) -> tuple[list[float], list[list[str]]]:
    lines = [line.removeprefix("[rank 1] ").split() for line in output.splitlines()]
    losses = [float(line[1]) for line in lines if line[:1] == ["LOSS"]]
    return losses, [line[1:] for line in lines if line[:1] == ["PARAMETERS"]]


LOGGING = ("--report_to", "none", "--logging_steps", "1")
COMMON = ("--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2")
LAUNCHED = [*LAUNCH, "--num_processes", "2", "--mixed_precision", "no"]
ON_TWO = (*COMMON, "--per_device_train_batch_size", "2")


def run_alone(output: Path, options: tuple[str, ...]) -> str:
    """What the script prints without any launcher, in a process that has imported Transformers already."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    sys.argv = [str(SCRIPT), "--output_dir", str(output), *LOGGING, *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def test_an_unchanged_script_under_fullshard_launch(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    [output] = run_ranks(run_alone, 1, tmp_path / "plain", (*COMMON, "--per_device_train_batch_size", "4"))
    expected, parameters = read(output)
    assert parameters == [["False", "24800"]]
    losses, parameters = script(LAUNCHED, tmp_path / "sharded", *ON_TWO)
    assert close(losses, expected) and parameters == [["True", "12400"]] * 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")


@pytest.mark.full
def test_an_unchanged_script_resumes(tmp_path: Path) -> None:
    losses, _ = script(LAUNCHED, tmp_path / "sharded", *ON_TWO)
    checkpoint = str(tmp_path / "sharded" / "checkpoint-2")
    resumed, _ = script(LAUNCHED, tmp_path / "again", *ON_TWO, "--resume_from_checkpoint", checkpoint)
    assert resumed == losses[2:]


def _uneven(output: str) -> None:
    with pytest.raises(ConfigError, match="even_batches = False would give some ranks fewer steps"):
        trainer(build("tied"), arguments(output, accelerator_config={"even_batches": False}))


def test_uneven_batches_are_refused(tmp_path: Path) -> None:
    run_ranks(_uneven, 2, str(tmp_path))


def _arguments_with_a_list(output: str) -> list[Any]:
    from transformers.trainer_utils import FSDPOption

    from fullshard.integrations.transformers import TrainingArguments

    @dataclass
    class Declared(TrainingArguments):
        fsdp: list[FSDPOption] | str | None = None

    Declared.__dataclass_fields__["fsdp"].type = str  # as HfArgumentParser leaves it
    given: list[Any] = [None, True, "full_shard auto_wrap", [FSDPOption.FULL_SHARD]]
    return [Declared(output, fsdp=fsdp).fsdp for fsdp in given]


def test_where_transformers_declares_a_list_of_words_they_are_one(tmp_path: Path) -> None:
    [(nothing, true, words, options)] = run_ranks(_arguments_with_a_list, 1, str(tmp_path))
    assert nothing == [], "Transformers 5.6 asks for its length"
    assert true == options == ["full_shard"]
    assert words == ["full_shard", "auto_wrap"]


def recorded(output: str) -> Any:
    args = arguments(output, logging_steps=2, max_steps=3, eval_strategy="steps", eval_steps=3, save_strategy="steps")
    made = trainer(build(), args, train_dataset=samples(lengths=(12, 5)), eval_dataset=samples(8))
    made.train()
    made.evaluate()
    return made.state.log_history


def test_a_run_is_recorded_for_reports(tmp_path: Path) -> None:
    """Each step, with the values of all ranks, and what only Trainer knows of those that it logs."""
    history, _ = run_ranks(recorded, 2, str(tmp_path))
    one, two, three, after = list(read_metrics(tmp_path / "metrics.jsonl"))
    [logged] = [entry for entry in history if "loss" in entry]
    assert [m.step for m in (one, two, three, after)] == [1, 2, 3, 3]
    assert close([(one.loss + two.loss) / 2], [logged["loss"]])
    assert (two.grad_norm, two.learning_rate) == (logged["grad_norm"], logged["learning_rate"])
    assert one.grad_norm is None and one.learning_rate is None
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert [three.held_out_loss, after.held_out_loss] == evaluations and one.held_out_loss is None
    for m in (one, two, three):
        assert len(m.memory_nbytes) == 2 and min(m.memory_nbytes) > 2**20
        tokens = m.tokens_per_second * m.step_seconds
        assert 4 * 5 <= round(tokens) <= 4 * 12 and abs(tokens - round(tokens)) < 1e-6  # without padding
        assert 0 < m.data_wait_seconds < m.step_seconds
    [run] = read_runs([tmp_path])
    assert run.state == "done, 3 steps" and run.recorded.total_steps == 3 and run.recorded.steps_per_pass == 6
    assert run.settings["logging_steps"]["value"] == 2 and "hub_token" not in run.settings
    assert run.settings["sharding.strategy"]["value"] == "FULL_SHARD"
    assert "length of the sequences" in run.recorded.unplanned and run.recorded.planned_nbytes is None
