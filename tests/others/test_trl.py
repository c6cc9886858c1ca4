"""TRL's trainers, as the package ships them, on fullshard's engine: equal to two plain processes of TRL's own.

Two and not one, because several of TRL's losses are means over what a rank has; so they are under DDP.

pytest tests/others/test_trl.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.differential import CLOSE
from tests.distributed import run_ranks
from tests.trainers import OFFLINE, close
from tests.trl_runs import TRAINERS, build, run, write_model

ONE_PROCESS = ("SFT", "DPO", "Reward")
"""Trainers whose loss and data do not depend on the number of ranks."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes get this process's environment."""
    for name, value in {**OFFLINE, "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a teacher, a reward model."""
    directory = tmp_path_factory.mktemp("trl")
    write_model(directory)
    return directory


def compare(place: Path, tmp_path: Path, name: str, lora: bool, plain: int = 2, **settings: Any) -> dict[str, Any]:
    """Losses, gradient norms and weights of two ranks must be those of `plain` processes without fullshard."""
    expected = run_ranks(run, plain, str(place), name, lora, True, str(tmp_path / f"plain{plain}"), settings)[0]
    found: dict[str, Any] = run_ranks(
        run, 2, str(place), name, lora, False, str(tmp_path / f"sharded{plain}"), settings
    )[0]
    assert found["own"] <= found["total"] / 2 + 64
    assert min(found["norms"]) > 0
    for key in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), **CLOSE)
    assert len(found["losses"]) == 3
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][weight], value, rtol=1e-4, atol=2e-5 if plain == 2 else 1e-4)
    return found


QUICK = [("DPO", True), ("GRPO", False), ("Distillation", False)]
WITHOUT_ADAPTERS = [("A2PO", True), ("SDPO", True)]  # the first takes none; of the other see below
ALL = [(name, lora) for name in TRAINERS for lora in (False, True) if (name, lora) not in WITHOUT_ADAPTERS]
MATRIX = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full) for case in ALL]


@pytest.mark.parametrize(("name", "lora"), MATRIX)
def test_trains_as_without_fullshard(place: Path, tmp_path: Path, name: str, lora: bool) -> None:
    compare(place, tmp_path, name, lora)
    if name in ONE_PROCESS and (name, lora) not in QUICK:
        compare(place, tmp_path, name, lora, plain=1)


REFERENCE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "a reference given": ("DPO", False, {"_ref_model": True}),
    "a reference given to KTO": ("KTO", False, {"_ref_model": True}),
    "log-probabilities computed before": ("DPO", False, {"precompute_ref_log_probs": True}),
    "log-probabilities computed before, by disabling": ("KTO", True, {"precompute_ref_log_probs": True}),
    "a reference that follows": ("DPO", False, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "GRPO's reference that follows": ("GRPO", False, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "a reward model": ("GRPO", False, {"_reward_funcs": "REWARD"}),
    "the base as SDPO's teacher": ("SDPO", True, {"teacher_model_kind": "base"}),
    "generation of the student": ("GKD", False, {"lmbda": 1.0}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", REFERENCE)
def test_several_models_in_one_trainer(place: Path, tmp_path: Path, case: str) -> None:
    name, lora, settings = REFERENCE[case]
    compare(place, tmp_path, name, lora, **settings)


WAYS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "checkpointing": ("DPO", True, {"gradient_checkpointing": True}),
    "checkpointing and generation": ("GRPO", True, {"gradient_checkpointing": True}),
    "accumulation": ("DPO", True, {"gradient_accumulation_steps": 2}),
    "several updates per generation": ("GRPO", False, {"gradient_accumulation_steps": 2, "num_iterations": 2}),
    "packing": ("SFT", False, {"packing": True, "max_length": 32}),
    "no padding": ("DPO", False, {"padding_free": True}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", WAYS)
def test_ways_to_train(place: Path, tmp_path: Path, case: str) -> None:
    name, lora, settings = WAYS[case]
    compare(place, tmp_path, name, lora, **settings)


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows"), [("DPO", 7), ("GRPO", 8), ("Reward", 7)])
def test_evaluation_of_a_number_that_does_not_divide(place: Path, tmp_path: Path, name: str, rows: int) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "_eval_rows": rows}
    plain = run_ranks(run, 2, str(place), name, False, True, str(tmp_path / "plain"), settings)[0]
    found = compare(place, tmp_path, name, False, **settings)
    assert close(found["evals"], plain["evals"])


def completions(place: str, stock: bool, output: str, prompts: int) -> Any:
    """What is logged on the main process, in batches of one."""
    from transformers import GenerationConfig
    from trl.trainer.callbacks import LogCompletionsCallback

    settings = {"_eval_rows": prompts, "per_device_eval_batch_size": 1, "max_steps": 1}
    made = build(place, "GRPO", False, stock, output, settings)
    callback = LogCompletionsCallback(made, GenerationConfig(max_new_tokens=4, do_sample=False), freq=1)
    made.add_callback(callback)
    made.train()
    return callback.table


@pytest.mark.full
@pytest.mark.parametrize("prompts", [1, 3])
def test_completions_of_a_number_that_does_not_divide(place: Path, tmp_path: Path, prompts: int) -> None:
    plain, sharded = (
        run_ranks(completions, 2, str(place), stock, str(tmp_path / str(stock)), prompts)[0] for stock in (True, False)
    )
    assert len({prompt for _, prompt, _ in plain}) == prompts
    assert len(sharded) == prompts
    assert sharded == plain[:prompts]  # where every rank generates all of them


def test_an_adapter_added_after_sharding_is_refused(place: Path, tmp_path: Path) -> None:
    """SDPO's teacher is a second adapter, which it adds once the model is sharded."""
    with pytest.raises(RuntimeError, match="add_adapter cannot be called on a sharded PeftModelForCausalLM"):
        run_ranks(run, 2, str(place), "SDPO", True, False, str(tmp_path), {})


def test_names_to_import() -> None:
    """A changed import is enough for each of TRL's stable trainers."""
    import trl

    import fullshard.integrations.transformers as ours

    stable = {name for name in dir(trl) if name.endswith("Trainer")}
    assert stable <= {*ours.__all__}
    for name in stable:
        assert issubclass(getattr(ours, name), getattr(trl, name))
        config = name.replace("Trainer", "Config")
        assert issubclass(getattr(ours, config), getattr(trl, config))
