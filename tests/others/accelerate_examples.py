"""Accelerate's `examples/`, from a checkout of its repository: which apply, how they start, and what they start from.

An example's text is changed in one place: `from accelerate import` is `from fullshard import`. What it loads by name
lies beside it under that name.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.launching import LAUNCH, environment

OBSERVED = Path(__file__).parent / "observed.py"
RANKS = 2
TIMEOUT = 400
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

EXAMPLES = {
    "nlp_example": "",
    "complete_nlp_example": "--checkpointing_steps epoch --with_tracking",
    "cv_example": "--data_dir pets",
    "complete_cv_example": "--data_dir pets --checkpointing_steps epoch --with_tracking",
    "by_feature/automatic_gradient_accumulation": "",
    "by_feature/checkpointing": "--checkpointing_steps epoch",
    "by_feature/cross_validation": "--num_folds 2",
    "by_feature/early_stopping": "",
    "by_feature/fsdp_with_peak_mem_tracking": "--model_name_or_path bert-base-cased",
    "by_feature/gradient_accumulation": "--gradient_accumulation_steps 2",
    "by_feature/gradient_accumulation_for_autoregressive_models": "--gradient_accumulation_steps 2",
    "by_feature/local_sgd": "",
    "by_feature/memory": "",
    "by_feature/multi_process_metrics": "",
    "by_feature/profiler": "--cpu",
    "by_feature/schedule_free": "",
    "by_feature/tracking": "--with_tracking",
}
"""The examples that apply, with their arguments."""

METRIC = '''
import datasets
import evaluate


class Glue(evaluate.Metric):
    """MRPC's: accuracy and F1."""

    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        both = sum(p == r == 1 for p, r in pairs)
        ones = sum(p for p, _ in pairs) + sum(r for _, r in pairs)
        return {"accuracy": sum(p == r for p, r in pairs) / len(pairs), "f1": 2 * both / ones if ones else 0.0}
'''


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its exit status, what it printed of its metrics, and per rank what was observed."""

    status: int
    printed: list[str]
    ranks: list[dict[str, Any]]
    errors: str


def write_hub(place: Path) -> None:
    """What examples load by name, as directories of these names: models, data and a metric. Sizes do not divide."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    numbers = random.Random(0)
    words = [f"w{i}" for i in range(60)]
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[SEP]", model_max_length=64,
    )  # fmt: skip
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    size |= {"vocab_size": len(vocabulary), "max_position_embeddings": 64, "initializer_range": 0.3}
    bert = BertForSequenceClassification(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **size))
    llama = LlamaForCausalLM(LlamaConfig(**size))
    for name, model in (("bert-base-cased", bert), ("HuggingFaceTB/SmolLM-360M", llama)):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)

    def text() -> str:
        return " ".join(numbers.choices(words, k=numbers.randint(4, 12)))

    def pair(index: int) -> dict[str, Any]:
        return {"sentence1": text(), "sentence2": text(), "label": index * 7 % 3 % 2, "idx": index}

    tables = {
        "nyu-mll/glue": ("mrpc", {"train": [pair(i) for i in range(103)], "validation": [pair(i) for i in range(75)]}),
        "Salesforce/wikitext": (
            "wikitext-2-v1", {split: [{"text": text()} for _ in range(500)] for split in ("train", "validation")},
        ),
    }  # fmt: skip
    for name, (config, splits) in tables.items():
        (place / name).mkdir(parents=True)
        header = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
        for split, rows in splits.items():
            header += f"  - split: {split}\n    path: {split}.jsonl\n"
            (place / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / name / "README.md").write_text(header + "---\n")
    (place / "glue").mkdir()
    (place / "glue/glue.py").write_text(METRIC)
    write_images(place)


def write_images(place: Path) -> None:
    """Images named for their class."""
    from PIL import Image

    (place / "pets").mkdir()
    for index in range(90):
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place / "pets" / f"kind{index % 3}_{index}.jpg")


def run_example(checkout: Path, name: str, place: Path, hub: Path, *, changed: bool) -> Outcome:
    """Run an example on two processes: as it is with Accelerate, or changed under `fullshard launch`."""
    text = (checkout / "examples" / f"{name}.py").read_text()
    if changed:
        text = re.sub(r"^from accelerate import", "from fullshard import", text, flags=re.MULTILINE)
    place.mkdir(parents=True)
    for entry in hub.iterdir():
        (place / entry.name).symlink_to(entry)
    script = place / f"{Path(name).name}.py"
    script.write_text(text)
    (place / "observed").mkdir()
    plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    command = [*LAUNCH, "--num_processes", str(RANKS), "--cpu"] if changed else plain
    command += [str(OBSERVED), "observed", str(script), *EXAMPLES[name].split()]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment(**OFFLINE, HF_HOME=str(place / "home")),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    files = sorted((place / "observed").glob("rank*.pt"))
    printed = [line[line.index(found[0]) :] for line in done.stdout.splitlines() if (found := _METRICS.search(line))]
    return Outcome(done.returncode, printed, [torch.load(file) for file in files], done.stderr)


_METRICS = re.compile(r"epoch \d+|Average test metrics")
