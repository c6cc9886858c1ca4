"""The files in `recipes/`, and their table in docs/recipes.md.

    python -m tests.recipe_files

writes them; tests/plan/test_plan_recipes.py compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import MARGIN, Plan
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.recipe import as_recipe
from fullshard.plan.search import pareto, search

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/recipes.md"
BEGIN, END = "<!-- recipes -->\n", "<!-- end -->"

LORA, QLORA = {"method": "lora", "loss": "fused"}, {"method": "qlora", "loss": "fused"}
FULL: dict[str, Any] = {"loss": "fused"}
NF4 = {**LORA, "quantize": "nf4-double"}

RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-3.1-8b-qlora-1x24gb": ("meta-llama/Llama-3.1-8B", "1xRTX4090", QLORA),
    "llama-3.1-8b-qlora-2x24gb": ("meta-llama/Llama-3.1-8B", "2xRTX4090", {**QLORA, "seq_len": 4096}),
    "llama-3.1-8b-lora-4x48gb": ("meta-llama/Llama-3.1-8B", "4xL40S", LORA),
    "llama-3.1-8b-full-8x80gb": ("meta-llama/Llama-3.1-8B", "8xH100", {**FULL, "seq_len": 8192}),
    "llama-3.1-70b-qlora-4x48gb": ("meta-llama/Llama-3.1-70B", "4xL40S", QLORA),
    "llama-3.1-70b-lora-8x80gb": ("meta-llama/Llama-3.1-70B", "8xH100", LORA),
    "llama-3.1-70b-full-16x80gb": ("meta-llama/Llama-3.1-70B", "16xH100", {**FULL, "checkpointing": "full"}),
    "qwen3-4b-lora-1x24gb": ("Qwen/Qwen3-4B", "1xRTX4090", LORA),
    "qwen3-4b-full-4x48gb": ("Qwen/Qwen3-4B", "4xL40S", FULL),
    "qwen3-14b-qlora-2x24gb": ("Qwen/Qwen3-14B", "2xRTX4090", QLORA),
    "qwen3-32b-full-16x80gb": ("Qwen/Qwen3-32B", "16xH100", {**FULL, "checkpointing": "full"}),
    "qwen3-30b-a3b-nf4-2x24gb": ("Qwen/Qwen3-30B-A3B", "2xRTX4090", NF4),
    "gpt-oss-20b-lora-2x24gb": ("openai/gpt-oss-20b", "2xRTX4090", LORA),
    "gpt-oss-120b-lora-8x80gb": ("openai/gpt-oss-120b", "8xH100", LORA),
    "gemma-3-12b-qlora-2x24gb": ("google/gemma-3-12b-it", "2xRTX4090", QLORA),
    "mistral-small-24b-qlora-2x24gb": ("mistralai/Mistral-Small-24B-Instruct-2501", "2xRTX4090", QLORA),
    "phi-4-lora-4x48gb": ("microsoft/phi-4", "4xL40S", LORA),
    "smollm2-135m-full-cpu": ("HuggingFaceTB/SmolLM2-135M", "2xCPU", {"precision": "fp32", "seq_len": 512}),
    "vit-large-full-2x24gb": ("google/vit-large-patch16-224", "2xRTX4090", {"seq_len": 197, "micro_batch": 32}),
    "whisper-large-v3-full-4x48gb": ("openai/whisper-large-v3", "4xL40S", {"seq_len": 448, "micro_batch": 8}),
    "t5-large-full-2x24gb": ("google-t5/t5-large", "2xRTX4090", {"seq_len": 512, "micro_batch": 8}),
}
"""The question of each recipe: model, devices, and what the search must not change."""


def plan_of(name: str) -> Plan:
    """Return the fastest plan for the question of a recipe."""
    model, devices, given = RECIPES[name]
    job, cluster = Job.of(given), parse_cluster(devices)
    return pareto(search(load_model(model)[0], job, cluster, fixed=given.keys() - {"micro_batch"}, margin=MARGIN))[0]


def text_of(name: str, plan: Plan) -> str:
    """Return the text of a recipe."""
    model, devices, _ = RECIPES[name]
    return as_recipe(plan, model, devices, f"{name}.yaml")


def table(plans: dict[str, Plan]) -> str:
    """Return the table in Markdown."""
    rows = ["| recipe | GiB per device | on each host, GiB | tokens/s |\n| --- | --- | --- | --- |\n"]
    for name, plan in plans.items():
        needed = f"{plan.memory.needed / GIB:.1f} of {plan.cluster.device.memory / GIB:.1f}"
        host = max(plan.memory.host_load, plan.memory.host_steady) / GIB
        rows.append(f"| `{name}` | {needed} | {host:.1f} | {plan.time.tokens_per_second:,.0f} |\n")
    return "".join(rows)


def written() -> str:
    """Return the table as it is in the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write all files anew."""
    plans = {name: plan_of(name) for name in RECIPES}
    for old in ROOT.glob("recipes/*.yaml"):
        old.unlink()
    for name, plan in plans.items():
        (ROOT / "recipes").mkdir(exist_ok=True)
        (ROOT / "recipes" / f"{name}.yaml").write_text(text_of(name, plan), encoding="utf-8")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table(plans)}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
