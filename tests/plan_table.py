"""The table of docs/planning.md with models that are quantized at rest, on cards of several sizes.

    python -m tests.plan_table

writes it between its marks; tests/plan/test_plan_at_rest.py compares.
"""

from __future__ import annotations

from pathlib import Path

from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model

PAGE = Path(__file__).parent.parent / "docs/planning.md"
BEGIN, END = "<!-- at rest -->\n", "<!-- end -->"

MODELS = {
    "Llama-3-70B": "nf4-double",
    "Qwen3-30B-A3B": "nf4-double",
    "gpt-oss-120b": "mxfp4",
    "Qwen3-235B-A22B": "nf4-double",
    "GLM-4.5-Air": "nf4-double",
}
"""The form of the frozen weights of each; the experts of gpt-oss-120b are published in it."""
DEVICES = ("2xRTX4090", "2xL40S", "4xH100", "8xH100")
JOB = {"method": "lora", "checkpointing": "full", "loss": "fused", "wrap_embeddings": True, "seq_len": 2048}


def plan_of(model: str, devices: str) -> Plan:
    """Return the plan of one cell."""
    described = load_model(model)[0]
    form = None if MODELS[model] == described.published_as else MODELS[model]
    return evaluate(described, Job.of({**JOB, "quantize": form}), parse_cluster(devices))


def table() -> str:
    """Return the table in Markdown."""
    head = ("model", "form", "at rest, GiB in all", *(devices.replace("x", " x ", 1) for devices in DEVICES))
    rows = [head, ("---",) * len(head)]
    for model, form in MODELS.items():
        plans = [plan_of(model, devices) for devices in DEVICES]
        rest = plans[0].memory.persistent * plans[0].cluster.count / GIB
        rows.append((model, form, f"{rest:.1f}", *map(_cell, plans)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(plan: Plan) -> str:
    needs = f"{plan.confidence}: {plan.memory.needed / GIB:.1f}"
    if plan.fits:
        return f"{needs}, {plan.time.tokens_per_second:,.0f} tokens/s"
    on_host = evaluate(plan.model, plan.job.model_copy(update={"offload_compute_shards": True}), plan.cluster)
    host = f"; {on_host.memory.needed / GIB:.1f} with the frozen weights on the host"
    return f"{needs}{host}, {on_host.time.tokens_per_second:,.0f} tokens/s" if on_host.fits else f"{needs}{host}"


def written() -> str:
    """Return the table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
