"""The pages of docs/howto/: short, the answer first, and what they show is what the commands print.

pytest tests/project/test_docs_howto.py
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from tests.distributed import run_ranks
from tests.launching import environment
from tests.project.test_docs_code import WORLD
from tests.project.test_docs_pages import BLOCK, DOCS, blocks, commands
from tests.project.test_examples import LOSS, make_place, run

FOLDER = DOCS / "howto"
QUESTIONS = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
NAMES = [path.stem for path in QUESTIONS]
FILES = {
    "fsdp.yaml": """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
""",
    "ds.json": """{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "offload_optimizer": {"device": "none"}
  }
}
""",
}
FILES["my.yaml"] = (DOCS.parent / "recipes" / "llama-3.1-8b-qlora-2x24gb.yaml").read_text(encoding="utf-8")
"""Files that people bring from Accelerate and DeepSpeed, and a recipe."""


def _sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables and the targets of links."""
    text = re.sub(r"`[^`\n]*`", "X", BLOCK.sub("\n\n", text))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^(?:#|\|).*$", "\n", text, flags=re.MULTILINE))
    items = re.split(r"\n\s*\n|^\s*\* ", text, flags=re.MULTILINE)
    return [sentence for item in items for sentence in re.split(r"(?<=[.:?!])\s+", " ".join(item.split()))]


@pytest.mark.parametrize("page", QUESTIONS, ids=NAMES)
def test_a_page_is_short_and_begins_with_the_answer(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert 150 <= len(re.findall(r"[\w'-]+", BLOCK.sub("", text))) <= 350
    title, _, answer, *_ = re.split(r"(\n\n)", text.replace("\n\n```", "\n\n\x00```"), maxsplit=2)
    assert title.startswith("# ") and len(_sentences(answer)) == 2, _sentences(answer)
    assert text[: text.index("```")].count("\n") <= 8, "the first command is not on the first screen"
    assert re.findall(r"^## (Check|Limits)$", text, re.MULTILINE) == ["Check", "Limits"]
    assert "\nReference: [" in text[text.index("## Limits") :]


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_sentences_are_short(page: Path) -> None:
    assert [line for line in _sentences(page.read_text(encoding="utf-8")) if len(line.split()) > 30] == []


def test_the_index_lists_every_page() -> None:
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    titles = [(path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "), path.name) for path in QUESTIONS]
    assert sorted(re.findall(r"^\* \[(.+)\]\((.+)\)$", text, re.MULTILINE)) == sorted(titles)


def _shown(page: Path) -> Iterator[tuple[str, list[str], str]]:
    """The plans and checks of a page whose output follows, each with that output."""
    for (_, code), (language, output) in itertools.pairwise(BLOCK.findall(page.read_text(encoding="utf-8"))):
        words = shlex.split(code.replace("\\\n", ""), comments=True)
        if language == "text" and words[:2] in (["fullshard", "plan"], ["fullshard", "config"]):
            yield page.stem, words[1:], output


SHOWN = [one for page in QUESTIONS for one in _shown(page)]


@pytest.mark.full
@pytest.mark.parametrize(("page", "words", "shown"), SHOWN, ids=[f"{page}-{words[0]}" for page, words, _ in SHOWN])
def test_the_output_is_what_the_command_prints(
    page: str, words: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, text in FILES.items():
        Path(name).write_text(text)
    result = CliRunner().invoke(app, words)
    assert shown in result.output, result.output


def _dtypes() -> None:
    """Run both blocks of the page on a model whose layers have a router, and then one forward."""
    code = WORLD + (
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.router, self.up = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "    def forward(self, hidden):\n"
        "        return self.up(hidden * self.router(hidden))\n"
        "model = nn.Sequential(Block(), Block())\n"
        "model.layers = list(model)\n"
    )
    page = FOLDER / "keep-fp32.md"
    code += "\n".join(blocks(page, "python")) + "model(batch)\n"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "keep-fp32.md", "exec"), {"__name__": "block"})
    assert [printed.getvalue()] == list(blocks(page, "text"))


def test_a_module_computes_in_float32() -> None:
    run_ranks(_dtypes, 1)


MODELS = """
import sys
sys.path.insert(0, "examples")
import small
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

base = small.model()
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.save_pretrained("base"), tokenizer.save_pretrained("mixture")
AutoModelForCausalLM.from_pretrained(base).save_pretrained("base")
Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
)).save_pretrained("mixture")
"""
"""Tiny models with a tokenizer, in `base` and `mixture`."""
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the examples, tiny models and chats."""
    place = make_place(tmp_path)
    subprocess.run([sys.executable, "-c", MODELS], cwd=place, env=environment(), check=True, timeout=120)
    (place / "chats").mkdir()
    (place / "chats" / "train.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 32)
    return place


def _of(name: str, *programs: str) -> list[str]:
    return [shlex.join(words) for words in commands(FOLDER / f"{name}.md") if words[1] in programs]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "model"), [("qlora-8b", "base"), ("moe-30b", "mixture")])
def test_a_recipe_is_copied_and_trains(place: Path, name: str, model: str) -> None:
    """The recipe of the page trains a tiny model on a CPU, and the adapters are merged."""
    copy, train = _of(name, "recipe", "sft")
    run(copy, place, proof=False)
    recipe = place / "my.yaml"
    recipe.write_text(recipe.read_text().replace("device: cuda", "device: cpu").replace("gib: 2.3", "gib: 0.01"))
    run(f"{train} --model_name_or_path {model} --max_steps 2 --max_length 64 --report_to none", place, proof=False)
    [output] = [path.parent for path in (place / "out").glob("*/adapter_model.safetensors")]
    run(f"fullshard merge {model} {output} out/merged", place, proof=False)
    assert (place / "out" / "merged" / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_recipe_is_tried_with_a_tiny_model(place: Path) -> None:
    [code] = blocks(FOLDER / "try-recipe.md", "python")
    code = code.replace('"meta-llama/Llama-3.1-8B-Instruct"', '"base"')
    subprocess.run([sys.executable, "-c", code], cwd=place, env=environment(), check=True, timeout=120)
    copy, train, rehearse = _of("try-recipe", "recipe", "sft", "rehearse")
    for command in (copy, train):
        run(command, place, proof=False)
    assert (place / "out" / "try" / "adapter_model.safetensors").exists()
    [shown] = blocks(FOLDER / "try-recipe.md", "text")
    assert shown in run(rehearse, place, proof=False)


def test_the_template_marks_the_answers() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    inner = Tokenizer(models.WordLevel({token: at for at, token in enumerate([*tokens, "?"])}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", additional_special_tokens=tokens[1:])
    [tokenizer.chat_template] = blocks(DOCS / "sft.md", "jinja")
    asked, answered = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
    text = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    turns = [f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant")]
    assert text == f"<s>{turns[0]}U<|eot_id|>{turns[1]}"
    form = {"return_dict": True, "return_assistant_tokens_mask": True}
    read = tokenizer.apply_chat_template([asked, answered], **form)
    assert tokenizer.convert_ids_to_tokens(read["input_ids"][-2:]) == ["?", "<|eot_id|>"]
    assert read["assistant_masks"][-2:] == [1, 1] and sum(read["assistant_masks"]) == 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_run_is_resumed_and_exported(place: Path) -> None:
    first, second = _of("resume", "launch")
    run(first, place)
    assert "resumed after step 30, with world size 1\n" in run(second, place, proof=False)
    for command in [*_of("resume", "ckpt"), *_of("hf-weights", "ckpt")]:
        run(command, place, proof=False)
    assert (place / "out" / "hf" / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_divided_sequences_have_the_same_losses(place: Path) -> None:
    divided, whole = (
        [float(loss) for loss in LOSS.findall(run(command, place, proof="--cp_size" in command))]
        for command in _of("long-context", "launch")[2:]
    )
    assert divided == pytest.approx(whole, abs=2e-3)  # Trainer prints four digits
    assert len(whole) == 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_one_and_two_processes_have_the_same_losses(place: Path) -> None:
    losses = []
    for command in _of("loss-differs", "train"):
        run(f"{command.replace('--steps 20', '--steps 3')} --seq-len 16 --max-data-mb 0.5", place, proof=False)
        lines = (place / shlex.split(command)[-1] / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 3
