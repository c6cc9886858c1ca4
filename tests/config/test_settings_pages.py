"""What the schema is made into: every page of it is as it was, to the letter.

A change of words is a change of these pages. Write them anew with

    python -m tests.config.test_settings_pages
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli.launch import help_text
from fullshard.cli.main import app
from fullshard.config.hardware import DetectedDevice, Hardware
from fullshard.config.questions import QUESTIONS, Interview, Question
from fullshard.config.schema import (
    CheckpointConfig,
    LaunchConfig,
    PrecisionConfig,
    RunConfig,
    ShardingConfig,
    TrainingConfig,
)
from fullshard.config.write import json_schema, write_native
from fullshard.config.write_accelerate import write_accelerate
from fullshard.recipes.arguments import TrainArguments

PAGES = Path(__file__).parents[1] / "fixtures" / "settings"
GIB = 2**30
HOSTS = {
    "laptop": Hardware(4, 16 * GIB),
    "server": Hardware(64, 512 * GIB, (DetectedDevice("NVIDIA H200", 140 * GIB, 9.0),) * 8),
    "old server": Hardware(64, 512 * GIB, (DetectedDevice("Tesla V100", 16 * GIB, 7.0),) * 4),
}
INTERVIEWS: dict[str, dict[str, Any]] = {
    "laptop": {"num_processes": "1", "wrap": "size"},
    "server": {"num_machines": "2", "strategy": "HYBRID_SHARD", "wrap": "class", "wrap_classes": "Block, Other"},
    "old server": {"advanced": True, "activation_checkpointing": True},
    "laptop, left to the launcher": {"device": "auto", "num_processes": "auto", "strategy": "NO_SHARD"},
}
CHANGED: dict[str, RunConfig] = {
    "everything": RunConfig(
        launch=LaunchConfig(
            num_processes=8,
            num_machines=2,
            main_process_ip="10.0.0.1",
            main_process_port=1234,
            rdzv_backend="c10d",
            rdzv_id="job",
            rdzv_conf="timeout=900",
            max_restarts=3,
            monitor_interval=5.0,
            device="cuda",
            gpu_ids=("0", "1"),
            num_cpu_threads_per_process=4,
            log_dir="logs",
            role="trainer",
            debug=True,
        ),
        sharding=ShardingConfig(
            strategy="HYBRID_SHARD",
            shard_size=4,
            reshard_after_forward="auto",
            unsharded_memory_gib=1.5,
            wrap_classes=("Block", "Other"),
            wrap_embeddings=True,
            ignored_modules=".*router",
            backward_prefetch="NO_PREFETCH",
            forward_prefetch=False,
            activation_checkpointing=True,
            activation_checkpointing_reentrant=True,
            cpu_offload=True,
            offload_compute_shards=True,
            offload_main_weights=True,
            offload_optimizer_state=True,
            offload_activations=True,
            cpu_ram_efficient_loading=True,
            compile=True,
            compile_backend="Eager",
            compile_mode="max-autotune",
            compile_fullgraph=True,
            compile_dynamic=True,
        ),
        precision=PrecisionConfig(
            mode="fp32",
            param_dtype="float32",
            reduce_dtype="float32",
            gather_as="int8",
            reduce_as="bfloat16",
            output_dtype="float32",
            buffer_dtype="float32",
            cast_inputs=False,
        ),
        training=TrainingConfig(gradient_accumulation_steps=4, step_in_backward=True, check_plan=True),
        checkpoint=CheckpointConfig(state_dict_type="FULL_STATE_DICT", format="dcp", async_save=True),
    ),
    "replicated": RunConfig(
        sharding=ShardingConfig(
            strategy="NO_SHARD",
            wrap="none",
            backward_prefetch="BACKWARD_POST",
            offload_activations=False,
            compile_mode="max-autotune",
            sync_module_states=False,
        ),
        precision=PrecisionConfig(mode="bf16"),
        training=TrainingConfig(gradient_clipping=1.0),
    ),
    "hybrid": RunConfig(
        launch=LaunchConfig(num_processes=8, num_machines=2, device="cpu"),
        sharding=ShardingConfig(
            strategy="HYBRID_SHARD_ZERO2",
            wrap_min_numel=10**8,
            activation_checkpointing=True,
            activation_checkpointing_mode="selective",
            backward_prefetch="BACKWARD_POST",
            compile_fullgraph=True,
        ),
    ),
}


def _interview(hardware: Hardware, answers: dict[str, Any], said: set[str]) -> Iterator[str]:
    """Every question with what it offers and what it refuses, and what the answers set."""
    asking = Interview(hardware)
    while (question := asking.next()) is not None:
        yield f"{question.name}: {question.text}"
        if question.choices is not None:
            choices = question.choices(asking.answers)
            yield from (f"    {choice.value!s:.30}: {choice.title}" for choice in choices)
            answer = answers.get(question.name, choices[0].value)
        else:
            offered = question.default(asking.answers)
            yield f"    [{offered}]"
            refused = [line for line in _refused(asking, question) if f"{question.name}{line}" not in said]
            said |= {f"{question.name}{line}" for line in refused}
            yield from refused
            answer = answers.get(question.name, offered)
        asking.answer(question, answer)
    yield write_native(asking.config(), comments=False, only_changed=True)


def _refused(asking: Interview, question: Question) -> Iterator[str]:
    for answer in ("0", "-1", "1.5", "many", "3", "a b", "70000", " "):
        fault = asking.fault(question, answer)
        if fault is not None:
            yield f"    {answer!r} is refused: {fault}"


def _questions() -> str:
    lines = [f"order: {' '.join(question.name for question in QUESTIONS)}"]
    said: set[str] = set()
    for name, answers in INTERVIEWS.items():
        lines += ["", f"== {name}", *_interview(HOSTS[name.partition(",")[0]], answers, said)]
    return "\n".join(lines) + "\n"


def _accelerate() -> str:
    lines = []
    for name, config in CHANGED.items():
        text, remarks = write_accelerate(config)
        lines += [f"== {name}", text, *map(str, remarks), ""]
    return "\n".join(lines)


def _flags(command: str) -> str:
    """The flags of a command in their order, and what stands between them."""
    text = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
    words = [word.strip(",") for line in text.splitlines() for word in line.split() if line.startswith("  -")]
    return "\n".join(word for word in words if word.startswith("-")) + "\n"


MADE = {
    "launch_help.txt": help_text,
    "default.yaml": lambda: write_native(RunConfig()),
    "changed.yaml": lambda: write_native(CHANGED["everything"]),
    "schema.json": lambda: json.dumps(json_schema(), indent=1) + "\n",
    "questions.txt": _questions,
    "accelerate.txt": _accelerate,
    "train_arguments.json": lambda: TrainArguments.of({}).to_json(),
    "train_flags.txt": lambda: _flags("train"),
    "plan_flags.txt": lambda: _flags("plan"),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert MADE[name]() == (PAGES / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for page, make in MADE.items():
        (PAGES / page).write_text(make(), encoding="utf-8")
