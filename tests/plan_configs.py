"""Configurations of models of 2025 and 2026, and how many parameters Transformers' own classes have.

Each line of `fixtures/plan_configs.jsonl` is a model: a known one of `fullshard.plan.known_models`, a published
config.json (the fields that size it), or the default configuration of a type of Transformers (a line without fields).
`parameters` is the count of the real class, and null if there is none; `frozen` are those that the class itself does
not train; `text` is the part of it that the planner
plans, if that is less; `says` is in the planner's note, or in its error if it refuses the file.

    python -m tests.plan_configs          # count again, with the installed Transformers
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from fullshard.api.counting import as_numbers
from fullshard.plan.known_models import MODELS

LINES = Path(__file__).parent / "fixtures/plan_configs.jsonl"
KNOWN_AS = {"kimi_k2": "deepseek_v3"}
CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"),
    "AutoModelForMultimodalLM",
)
TEXT = ("language_model.", "lm_head.", "text_model.", "model.layers.", "model.embed_tokens.", "model.norm.")
"""Names of the parameters of the text part in models of several parts."""


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]


def config_json(line: dict[str, Any]) -> str:
    """The text of the model's config.json."""
    if values := line.get("config", MODELS.get(line["name"])):
        return json.dumps(values)
    text: str = AutoConfig.for_model(line["name"]).to_json_string(use_diff=False)
    return text


def real_counts(file: str) -> dict[str, int | None]:
    """Parameters of the model that Transformers builds from a config.json, those without gradient, and its text part's.

    All are None if it cannot build the model.
    """
    values = as_numbers(json.loads(file))
    kind = KNOWN_AS.get(values["model_type"], values["model_type"])
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(**{**values, "model_type": kind})
            named = (getattr(transformers, name, None) for name in config.architectures or ())
            cls = next((c for c in named if c is not None and c.config_class is type(config)), None)
            model = cls(config) if cls is not None else _class_of(config).from_config(config)
    except Exception:  # each family in its own way
        return dict.fromkeys(("parameters", "frozen", "text"))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    text = (n for name, n in counts.items() if "vision" not in name and any(part in name for part in TEXT))
    frozen = (parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return {"parameters": sum(counts.values()), "frozen": sum(frozen), "text": sum(text)}


def _class_of(config: Any) -> Any:
    factories = [getattr(transformers, name) for name in CLASSES]
    return next(factory for factory in factories if type(config) in factory._model_mapping)


def main() -> None:
    counted = []
    for line in lines():
        real = real_counts(config_json(line))
        rest = {name: value for name, value in line.items() if name not in real}
        shown = {"parameters": real["parameters"]} | ({"frozen": real["frozen"]} if real["frozen"] else {})
        counted.append(rest | shown | ({"text": real["text"]} if "text" in line else {}))
    LINES.write_text("".join(json.dumps(line) + "\n" for line in counted), encoding="utf-8")


if __name__ == "__main__":
    main()
