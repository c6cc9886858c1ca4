"""Recipes: files with a planned configuration, its figures, and the arguments of the commands that run it.

`fullshard launch --config_file`, `fullshard sft` and `fullshard train` read a recipe. Each uses fullshard's sections.
`sft` and `train` also use the section with their name.
"""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from fullshard.config.write import scalar, write_native
from fullshard.core.errors import filled
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Plan
from fullshard.plan.families import FAMILIES
from fullshard.plan.job import Job
from fullshard.plan.library import load_config
from fullshard.plan.report import as_run_config, for_the_script

_SFT_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "muon": "muon",
    "sgd": "sgd",
}
_TRAIN_OPTIMIZERS = {"adamw": "adamw", "adamw-fused": "adamw", "muon": "muon"}


def as_recipe(plan: Plan, model: str, devices: str, file: str, kept: Mapping[str, Any] | None = None) -> str:
    """Return the recipe of a plan, by the words `model` and `devices` of the question and settings in `kept`."""
    job = plan.job
    figures = {
        "memory_gib": round(plan.memory.needed / GIB, 1),
        "host_memory_gib": round(max(plan.memory.host_load, plan.memory.host_steady) / GIB, 1),
        "tokens_per_second": round(plan.time.tokens_per_second),
    }
    values = {n: v for n, v in job.model_dump().items() if v != Job.model_fields[n].default}
    sections: dict[str, Mapping[str, Any]] = {"plan": {"model": model, "devices": devices, **values, **figures}}
    config = load_config(model) or {}
    kinds = {part.get("model_type") for part in (config, config.get("text_config") or {})}
    if kinds & FAMILIES.keys() and job.tp == job.ep == 1:
        sections |= {"sft": _for_sft(job, model)} if job.optimizer in _SFT_OPTIMIZERS else {}
        if job.method == "full" and job.optimizer in _TRAIN_OPTIMIZERS and job.shared_by == 1 and job.quantize is None:
            sections["train"] = _for_train(plan, model)
    return "\n".join(
        [
            *_head(plan, file, sections),
            write_native(as_run_config(plan, kept), comments=False, only_changed=True),
            *_lines(sections),
        ]
    )


def _head(plan: Plan, file: str, sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    gib = f"{plan.memory.needed / GIB:.1f} of {plan.cluster.device.memory / GIB:.1f} GiB"
    said = (
        f"{plan.model.name}, {plan.job.method} training on {plan.cluster}: {gib} per device, "
        f"{plan.time.tokens_per_second:,.0f} tokens/s, by fullshard's planner. "
        f"Your script must use {for_the_script(plan.job)}{', as fullshard sft does' if 'sft' in sections else ''}."
    )
    commands = {
        "sft": f"fullshard sft {quote(file)} --dataset_name YOUR_DATA",
        "train": f"fullshard train {quote(file)} --data YOUR_TEXTS",
        "plan": f"fullshard launch --config_file {quote(file)} SCRIPT.py",
    }
    lines = [*filled(said).splitlines(), *(f"  {command}" for name, command in commands.items() if name in sections)]
    if "/" not in (model := str(sections["plan"]["model"])) and len(sections) > 1:
        lines += [f"{model} is the planner's name: replace it by a directory, or by OWNER/NAME on the hub"]
    return [f"# {line}" for line in lines]


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        line
        for name, values in sections.items()
        for line in (f"{name}:", *(f"  {key}: {scalar(value)}" for key, value in values.items()), "")
    ]


def _for_sft(job: Job, model: str) -> dict[str, Any]:
    """Return the arguments of TRL and `fullshard sft`. The run's own sections have the rest."""
    values = {
        "model_name_or_path": model,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "max_length": job.seq_len,
        "optim": _SFT_OPTIMIZERS[job.optimizer],
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "gradient_checkpointing": False,  # the section `sharding` says what is recomputed
        **({"max_grad_norm": 0} if job.schedule.steps_in_backward else {}),
    }
    if job.method != "full":
        targets = (job.lora_targets or "all-linear").split(",")
        values |= {"use_peft": True, "lora_r": job.adapter_rank, "lora_alpha": 2 * job.adapter_rank}
        values |= {"lora_target_modules": targets, "lora_dropout": job.lora_dropout or 0.0}
        values |= {"load_in_4bit": job.method == "qlora"}
        values |= {"use_bnb_nested_quant": True} if job.method == "qlora" else {}  # as planned
    return values


def _for_train(plan: Plan, model: str) -> dict[str, Any]:
    job = plan.job
    values = {
        "model": model,
        "batch_size": job.micro_batch * job.accumulation * plan.cluster.count,
        "micro_batch_size": job.micro_batch,
        "seq_len": job.seq_len,
        "optimizer": _TRAIN_OPTIMIZERS[job.optimizer],
    }
    values |= {"max_grad_norm": 0} if job.schedule.steps_in_backward else {}
    return values | ({"loss_chunk": job.chunk_tokens} if job.loss == "fused" else {})
