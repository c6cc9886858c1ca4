"""What the schema is made into: every page of it is as it was, to the letter.

A change of words is a change of these pages. Write them anew with

    python -m tests.config.test_settings_pages
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.launch import help_text
from fullshard.cli.main import app
from fullshard.config.schema import (
    CheckpointConfig,
    LaunchConfig,
    PrecisionConfig,
    RunConfig,
    ShardingConfig,
    TrainingConfig,
)
from fullshard.config.write import json_schema, write_native
from fullshard.recipes.arguments import TrainArguments

PAGES = Path(__file__).parents[1] / "fixtures" / "settings"
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
            quantize="nf4",
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
        training=TrainingConfig(gradient_accumulation_steps=4, step_in_backward=True),
        checkpoint=CheckpointConfig(state_dict_type="FULL_STATE_DICT", format="dcp", async_save=True),
    ),
}


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
    "train_arguments.json": lambda: TrainArguments.of({}).model_dump_json(indent=2) + "\n",
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
