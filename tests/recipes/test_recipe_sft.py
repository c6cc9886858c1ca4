"""`fullshard sft`, with the two commands of a well-known page on PEFT and FSDP.

pytest tests/recipes/test_recipe_sft.py; SEED_DOCUMENTS=DIR cuts the commands out of the pages in DIR instead of
out of tests/fixtures/commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fullshard.core.errors import ConfigError, DataError, MissingExtraError
from tests.distributed import run_ranks
from tests.trainers import OFFLINE, close


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes get this process's environment, from which another test may have taken it."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


DOCUMENTS = Path(os.environ.get("SEED_DOCUMENTS") or Path(__file__).parents[1] / "fixtures" / "commands")
SMALLER = [
    "--max_seq_len",
    "32",
    "--max_steps",
    "3",
    "--lora_dropout",
    "0",
    "--logging_steps",
    "1",
    "--report_to",
    "none",
]


def commands() -> list[tuple[str, list[str]]]:
    """The YAML before each `accelerate launch ... train.py` of the page, and the arguments behind it."""
    found = []
    for path in sorted(DOCUMENTS.glob("*")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^accelerate launch .*?train\.py((?:.*\\\n)*.*)$", text, re.MULTILINE):
            yaml = re.findall(r"```ya?ml\n(.*?)```", text[: match.start()], re.DOTALL)
            if "--use_peft_lora" in match[1]:
                found.append((yaml[-1], shlex.split(match[1].replace("\\\n", " "))))
    return found


def replaced(words: list[str], **values: str | None) -> list[str]:
    """The command with other values for some flags; None leaves a flag out."""
    result: list[str] = []
    position = 0
    while position < len(words):
        name = words[position].removeprefix("--")
        has_value = position + 1 < len(words) and not words[position + 1].startswith("--")
        pair = words[position : position + 1 + has_value]
        position += len(pair)
        if name not in values:
            result += pair
        elif (value := values[name]) is not None:
            result += [f"--{name}", value]
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, and chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("sft")
    chats = [
        [{"role": "user", "content": f"what is {i} plus {j}?"}, {"role": "assistant", "content": f"it is {i + j}"}]
        for i in range(8)
        for j in range(8)
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator([turn["content"] for chat in chats for turn in chat], learn)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    (directory / "data").mkdir()
    for split, rows in (("train", chats[:56]), ("test", chats[56:])):
        lines = [json.dumps({"messages": chat}) + "\n" for chat in rows]
        (directory / "data" / f"{split}.jsonl").write_text("".join(lines))
    return directory


def run(command: list[str], *, fails: bool = False) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(Path(sys.executable).parent / "fullshard"), *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


def losses(output: Path) -> list[float]:
    state = max(output.glob("checkpoint-*"), key=lambda p: int(p.name[11:])) / "trainer_state.json"
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def pefts_losses(words: list[str], adapter: str) -> list[float]:
    """What TRL and PEFT do with the same arguments in one process, from the same adapter."""
    import accelerate
    import trl
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from fullshard.recipes import sft, sft_arguments

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.integrations.transformers.SFTConfig", trl.SFTConfig)
        arguments = sft_arguments.read_arguments(words, print)
    training = arguments.training
    training.packing_strategy, training.use_cpu = "wrapped", True
    tokenizer, _ = sft.load_tokenizer(arguments)
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model.model_name_or_path, dtype=torch.float32,
        quantization_config=quantized if arguments.model.load_in_4bit else None,
    )  # fmt: skip
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8, mean_resizing=False)
    train, _ = sft.load_data(arguments)
    trainer = trl.SFTTrainer(
        model, args=training, train_dataset=train, processing_class=tokenizer,
        peft_config=trl.get_peft_config(arguments.model),
    )  # fmt: skip
    # reentrant checkpointing does not go with DDP otherwise, even of one rank
    trainer.accelerator.ddp_handler = accelerate.DistributedDataParallelKwargs(static_graph=True)
    weights = load_file(f"{adapter}/adapter_model.safetensors")
    set_peft_model_state_dict(trainer.model, weights)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, 1], ids=["lora", "qlora"])
def test_the_commands_of_the_page(tmp_path: Path, place: Path, number: int) -> None:
    yaml, words = commands()[number]
    own: dict[str, str | None] = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / "data")}
    exact: dict[str, str | None] = {"bf16": "False"}
    if number == 1:
        exact["bnb_4bit_compute_dtype"] = "float32"

    def launch(name: str, size: int, values: dict[str, str | None], *, fails: bool = False) -> str:
        file = tmp_path / f"{size}.yaml"
        smaller = re.sub(r"num_processes: \d+", f"num_processes: {size}", yaml)
        file.write_text(
            smaller if "bf16" not in values else re.sub(r"mixed_precision: bf16", "mixed_precision: 'no'", smaller)
        )
        batch = str(4 // size)
        sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
        command = replaced(words, **own, **sizes, output_dir=str(tmp_path / name), **values)
        return run(
            ["launch", "--config_file", str(file), "-m", "fullshard.recipes.sft", *command, *SMALLER], fails=fails
        )

    # as it is written, on two ranks: all but the push, for there is no network
    said = launch("verbatim", 2, {}, fails=True)
    assert not re.search(r"_C_mxfp8|register_constant|gemm_4bit_forward|is deprecated", said)
    assert f"fullshard: adapter: {tmp_path / 'verbatim'}; try it with: fullshard chat" in said
    for flag in ("append_concat_token", "add_special_tokens", "use_flash_attn", "dataset_text_field"):
        assert f"--{flag} has no effect" in said
    assert f"the model is saved in full in {tmp_path / 'verbatim'}, but pushing it to the hub failed" in said
    assert "hf upload" in said

    offline: dict[str, str | None] = {"push_to_hub": None}
    launch("alone", 1, offline)
    assert close(losses(tmp_path / "verbatim"), losses(tmp_path / "alone"), 2e-2)  # three digits, of which bf16 has two
    launch("two", 2, offline | exact)
    launch("one", 1, offline | exact)
    tolerance = 1e-5 if number == 0 else 1e-4  # TRL keeps the adapters of a quantized model in bf16
    assert close(losses(tmp_path / "two"), losses(tmp_path / "one"), tolerance)
    launch("start", 1, offline | exact | {"learning_rate": "0"})
    command = replaced(
        words, **own, **offline, **exact, output_dir=str(tmp_path / "peft"), per_device_train_batch_size="4",
        evaluation_strategy="no", splits="train",
    )  # fmt: skip
    [expected] = run_ranks(pefts_losses, 1, [*command, *SMALLER], str(tmp_path / "start"))
    assert close(losses(tmp_path / "two"), expected, tolerance)
    check_merged(tmp_path, place / "model", "verbatim")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT's, which are wrong
def test_adapters_on_experts_quantized_at_rest(tmp_path: Path, place: Path) -> None:
    """The command of the page on mixtures of experts, on one rank and on two, and the merge afterwards."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "data").symlink_to(place / "data")
    words = ["--quantize", "nf4", "--lora_target_modules", "all-linear", "--max_steps", "3", "--logging_steps", "1"]
    words += ["--gradient_checkpointing", "True", "--lora_dropout", "0"]
    for size in (1, 2):
        output = tmp_path / str(size)
        said = run(
            [
                "sft",
                "--num_processes",
                str(size),
                *small_run(tmp_path, output, *words),
                "--per_device_train_batch_size",
                str(4 // size),
            ]
        )
        assert "nf4 at rest" in said and "have no adapter" not in said
    refused = [*small_run(tmp_path, tmp_path / "refused", *words), "--lora_dropout", "0.1"]
    assert "lora_dropout != 0.\nhint: remove that option (--lora_dropout 0)" in run(
        ["sft", "-n", "1", *refused], fails=True
    )
    assert close(losses(tmp_path / "2"), losses(tmp_path / "1"), 1e-5)
    run(["merge", str(tmp_path / "model"), str(tmp_path / "2"), str(tmp_path / "merged")])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base.resize_token_embeddings(merged["model.embed_tokens.weight"].shape[0], mean_resizing=False)
    for name, value in PeftModel.from_pretrained(base, tmp_path / "2").merge_and_unload().state_dict().items():
        assert torch.equal(merged[name], value), name
    moved = [name for name, value in before.items() if "experts" in name and not torch.equal(merged[name], value)]
    assert len(moved) == 4, moved


def check_merged(directory: Path, model: Path, adapter: str) -> None:
    """`fullshard merge` makes of the saved adapter what PEFT makes of it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run(["merge", str(model), str(directory / adapter), str(directory / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(directory / "merged")
    base = AutoModelForCausalLM.from_pretrained(model)
    base.resize_token_embeddings(merged.config.vocab_size, mean_resizing=False)
    adapted = PeftModel.from_pretrained(base, directory / adapter).merge_and_unload()
    for name, value in adapted.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["lora", "load_in_4bit", "files in 4 bits"])
def test_evaluated_merged_and_pushed_at_the_end(tmp_path: Path, place: Path, kind: str) -> None:
    """A file with everything, on two ranks. The merged model computes what the base and the adapter compute."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    base: Any = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(tmp_path / "base")
    if kind == "files in 4 bits":
        form = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(place / "model", quantization_config=form, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    output = tmp_path / "out"
    (tmp_path / "run.yaml").write_text(f"""
model_name_or_path: {tmp_path / "base"}
dataset_name: {place / "data" / "train.jsonl"}
output_dir: {output}
chat_template_format: chatml
use_peft: true
load_in_4bit: {str(kind == "load_in_4bit").lower()}
lora_target_modules: all-linear
learning_rate: 1.0e-2
bf16: false
report_to: none
max_steps: 4
eval_split_size: 0.25
eval_strategy: steps
eval_steps: 2
merge_adapter: true
push_to_hub: true
launch: {{num_processes: 2, device: cpu}}
""")
    said = run(["sft", str(tmp_path / "run.yaml")], fails=True)
    assert "14 rows are held out for evaluation, 42 remain" in said
    assert f"the model is saved in full in {output}, but pushing it to the hub failed" in said
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [2, 4]

    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output / "merged")
    asked = [{"role": "user", "content": "what is 1 plus 2?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    if kind == "files in 4 bits":
        adapted.base_model.model.dequantize()
    with torch.no_grad():
        expected, found = adapted(ids).logits, merged(ids).logits
        with adapted.disable_adapter():
            before = adapted(ids).logits
    assert torch.allclose(found, expected, atol=1e-5) and (expected - before).abs().max() > 1e-3
    words = [sys.executable, "-m", "fullshard", "chat", str(output), "--max-new-tokens", "4"]
    talk = subprocess.run(words, input="hi\n", capture_output=True, text=True, timeout=120, check=False)
    assert talk.returncode == 0 and f"{output} answers" in talk.stderr, talk.stderr[-2000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_chat_template_is_saved_with_the_model(tmp_path: Path, place: Path) -> None:
    """From a file, and from another model, whose tokens the model gets."""
    from transformers import AutoTokenizer

    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    donor = AutoTokenizer.from_pretrained(place / "model")
    donor.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    donor.chat_template = "<|turn|>" + template
    donor.save_pretrained(tmp_path / "donor")
    words = replaced(small_run(place, tmp_path, "--max_steps", "1"), chat_template_format=None, use_peft_lora=None)
    for source, expected in (("own.jinja", template), ("donor", donor.chat_template)):
        path, output = str(tmp_path / source), tmp_path / f"out-{source}"
        run(["sft", "-n", "2", *replaced(words, output_dir=str(output)), "--chat_template_path", path])
        saved = AutoTokenizer.from_pretrained(output)
        assert saved.chat_template == expected and ("<|turn|>" in saved.get_vocab()) == (source == "donor")
        words_of_chat = [sys.executable, "-m", "fullshard", "chat", str(output), "--max-new-tokens", "4"]
        talk = subprocess.run(words_of_chat, input="hi\n", capture_output=True, text=True, timeout=120, check=False)
        assert talk.returncode == 0 and f"{output} answers" in talk.stderr, talk.stderr[-2000:]


def train_and_push(arguments: list[str]) -> list[str]:
    """The calls that would reach the hub."""
    import huggingface_hub

    from fullshard.recipes.sft import main

    output = Path(arguments[1])
    calls: list[str] = []

    class Url:
        repo_id = "someone/model"

    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("create_repo")
        return Url

    def upload(self: Any, **kwargs: Any) -> str:
        calls.append(f"upload {kwargs['commit_message']}")
        assert (output / "adapter_model.safetensors").is_file()
        return "url"

    api: Any = huggingface_hub.HfApi
    api.create_repo, api.upload_folder = create, upload
    main(arguments)
    return calls


@pytest.mark.full
def test_pushed_once_all_is_saved(tmp_path: Path, place: Path) -> None:
    words = ["--output_dir", str(tmp_path / "out"), *small_run(place, tmp_path / "out")[6:], "--push_to_hub", "True"]
    words += ["--max_steps", "1", "--model_name_or_path", str(place / "model"), "--dataset_name", str(place / "data")]
    first, second = run_ranks(train_and_push, 2, words)
    assert first[0] == "create_repo" and first[-1] == "upload End of training" and second == []


def run_here(words: list[str]) -> str:
    """The error that a run ends with, without its hint; empty if it ends well."""
    from fullshard.recipes.sft import run
    from fullshard.recipes.sft_arguments import read_arguments

    try:
        run(read_arguments(words, print))
    except (ConfigError, DataError) as error:
        return str(error).partition("\nhint")[0]
    return ""


RATE = ("--learning_rate", "0.1", "--lr_scheduler_type", "constant")


def small_run(place: Path, output: Path, *words: str) -> list[str]:
    """Few steps of adapters for the model in `place`."""
    return [
        "--model_name_or_path", str(place / "model"), "--dataset_name", str(place / "data"), "--output_dir",
        str(output), "--chat_template_format", "chatml", "--use_peft_lora", "True", "--lora_r", "2", "--bf16", "False",
        "--report_to", "none", "--per_device_train_batch_size", "2", "--max_length", "32", *words,
    ]  # fmt: skip


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(data: Path, *words: str, chat_template_format: str = "chatml") -> tuple[Any, Any]:
    """Data to train on and to evaluate on, of files read as a run does."""
    from fullshard.recipes.sft import load_data

    form = ("--chat_template_format", chat_template_format)
    arguments, _ = parsed(*form, *words, data=str(data))
    return load_data(arguments)


def test_a_model_that_is_not_there_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.recipes import sft

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments, _ = parsed()
    arguments.model.model_name_or_path = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer of '.*nothing'"):
        sft.load_tokenizer(arguments)
    arguments.model.model_name_or_path = "Llama-3.1-8B"
    with pytest.raises(ConfigError, match="cannot read the tokenizer") as error:
        sft.load_tokenizer(arguments)
    assert "is the planner's name" in str(error.value.hint)


def test_a_misspelled_data_set_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_rows(tmp_path / "chats" / "train.jsonl", CHAT)
    with pytest.raises(DataError, match="chat cannot be read") as error:
        loaded(Path("chat"))
    assert error.value.hint == "./chat does not exist; did you mean chats?"


def test_one_file_is_trained_on_and_not_evaluated_on(tmp_path: Path) -> None:
    train, test = loaded(write_rows(tmp_path / "chats.jsonl", CHAT, CHAT))
    assert len(train) == 2 and test is None
    with pytest.raises(ConfigError, match="has no split 'test', only train"):
        loaded(tmp_path / "chats.jsonl", "--splits", "test")


def test_a_split_is_the_files_that_have_its_name(tmp_path: Path) -> None:
    for name in ("test.jsonl", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"):
        write_rows(tmp_path / name, CHAT)
    write_rows(tmp_path / "notes.jsonl", {"loss": 1.0})
    train, test = loaded(tmp_path)
    assert (len(train), len(test)) == (2, 1)
    assert loaded(tmp_path, "--splits", "train,tes")[1] is None
    with pytest.raises(ConfigError, match="has no split 'tes', only train, test"):
        loaded(tmp_path, "--splits", "train,tes", "--eval_strategy", "epoch")
    with pytest.raises(ConfigError, match="has no split 'training', only train, test"):
        loaded(tmp_path, "--splits", "training")


NOTHING: dict[str, Any] = {"messages": []}
MIXED = {"messages": [*CHAT["messages"], {"role": "user", "content": [{"type": "text", "text": "and this?"}]}]}


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (
            [CHAT, CHAT, NOTHING],
            r"split train: row 3 has \[\] in the column messages, expected text or a list of m.*\nhint",
        ),
        ([NOTHING], r"row 1 has \[\] in"),
        ([MIXED, NOTHING], r"row 2 has \[\] in"),
        ([CHAT, {"messages": None}], "row 2 has None in"),
        ([CHAT, {"messages": "hi"}], "row 2 has 'hi' in"),
        ([{"messages": ["hi"]}], r"row 1 has \['hi'\] in"),
        ([{"text": None}, {"text": "a"}], "row 1 has None in the column text, expected text"),
        ([{"text": None}], "row 1 has None in the column text"),
        ([{"text": "a"}, {"text": 5}], "row 2 has 5 in the column text"),
        ([{"text": 5}], "row 1 has 5 in the column text"),
        ([{"text": ["a"]}], r"row 1 has \['a'\] in the column text"),
        ([{"text": "2024-01-01T00:00:00"}], "row 1 has "),  # which the reader takes for a time
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}],
            "row 2 has None in the column completion, expected text or a list of messages",
        ),
        ([{"prompt": CHAT["messages"], "completion": []}], r"row 1 has \[\] in the column completion"),
    ],
)
def test_a_row_that_holds_nothing_to_train_on_is_named(tmp_path: Path, rows: list[dict[str, Any]], wrong: str) -> None:
    write_rows(tmp_path / "train.jsonl", *rows)
    form = "none" if "text" in rows[0] else "chatml"
    with pytest.raises(DataError, match=wrong):
        loaded(tmp_path, "--splits", "train", chat_template_format=form)


def test_rows_that_can_be_trained_on(tmp_path: Path) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    kinds: list[tuple[str, list[dict[str, Any]]]] = [
        ("chatml", [CHAT | {"tools": None}, CHAT | tools]),
        ("chatml", [CHAT, MIXED]),
        ("chatml", [{"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}]),
        ("none", [{"prompt": "a", "completion": ""}]),
        ("none", [{"text": "a"}, {"text": ""}]),
    ]
    for number, (form, rows) in enumerate(kinds):
        write_rows(tmp_path / str(number) / "train.jsonl", *rows)
        train, _ = loaded(tmp_path / str(number), "--splits", "train", chat_template_format=form)
        assert len(train) == len(rows)
    write_rows(tmp_path / "eval/train.jsonl", CHAT)
    write_rows(tmp_path / "eval/test.jsonl", NOTHING)
    with pytest.raises(DataError, match="split test: row 1"):
        loaded(tmp_path / "eval")


def rows_of_embeddings(words: list[str]) -> int:
    from fullshard.recipes.sft import make_trainer
    from fullshard.recipes.sft_arguments import read_arguments

    trainer = make_trainer(read_arguments(words, print))
    trainer.train()
    return int(trainer.model.get_input_embeddings().weight.shape[0])


def test_new_tokens_go_into_the_rows_that_a_padded_vocabulary_has(tmp_path: Path, place: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for rows, expected in ((len(tokenizer) + 20, len(tokenizer) + 20), (len(tokenizer), 288)):
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
            )
        ).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        words = small_run(tmp_path, tmp_path / "out", "--max_steps", "1", "--save_strategy", "no")
        [found] = run_ranks(rows_of_embeddings, 1, replaced(words, dataset_name=str(place / "data")))
        assert found == expected


def coded_after(words: list[str]) -> tuple[int, bool]:
    """How many weights are codes at rest in a run, and whether all weights are trained."""
    from fullshard.recipes.sft import make_trainer
    from fullshard.recipes.sft_arguments import read_arguments
    from tests.checkpoint.test_coded_files import held

    trainer = make_trainer(read_arguments(words, print))
    trainer.train()
    return len(held(trainer.model)), all(p.requires_grad for p in trainer.model.parameters())


@pytest.mark.full
def test_codes_in_the_files_remain_for_adapters_alone(tmp_path: Path, place: Path) -> None:
    from transformers import AutoTokenizer

    from tests.checkpoint.test_coded_files import gpt_oss

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenizer.save_pretrained(gpt_oss(tmp_path / "model", vocab_size=len(tokenizer)))
    words = small_run(tmp_path, tmp_path / "out", "--max_steps", "1", "--save_strategy", "no")
    words = replaced(words, dataset_name=str(place / "data"))
    assert run_ranks(coded_after, 1, [*words, "--lora_target_modules", "all-linear"]) == [(4, False)]
    assert run_ranks(coded_after, 1, replaced(words, use_peft_lora=None, lora_r=None)) == [(0, True)]


class Killed(Exception):
    """Of a rank, in the middle of a run."""


def steps_run(words: list[str], environment: dict[str, str], killed_at: int = 0) -> tuple[str, list[int]]:
    """The error of a run, as `run_here` gives it, and the steps it began, counted from 1."""
    from transformers import TrainerCallback

    from fullshard.recipes import sft

    os.environ.update(environment)
    steps: list[int] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step + 1)
            if steps[-1] == killed_at:
                raise Killed

    def make(arguments: Any) -> Any:
        trainer = make_trainer(arguments)
        trainer.add_callback(Watch())
        return trainer

    make_trainer = sft.make_trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "make_trainer", make)
        try:
            return run_here(words), steps
        except Killed:
            return "killed", steps


def test_what_is_started_again_goes_on_from_its_newest_checkpoint(tmp_path: Path, place: Path) -> None:
    output, again = tmp_path / "out", {"TORCHELASTIC_RESTART_COUNT": "1"}
    words = small_run(place, output, "--save_steps", "1", "--max_steps", "3", "--splits", "train")
    assert run_ranks(steps_run, 1, words, {}, 3) == [("killed", [1, 2, 3])]
    (output / "checkpoint-9").mkdir()  # killed while it was saved
    older = ["--resume_from_checkpoint", str(output / "checkpoint-1")]
    assert run_ranks(steps_run, 1, [*words, *older], again) == [("", [3])]
    assert run_ranks(steps_run, 1, words, again) == [("", [])]  # it failed after its last step, as it was pushed


KILLED_ONCE = """
import os
from pathlib import Path
from transformers import TrainerCallback
from fullshard.recipes import sft

class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        with open("steps-" + os.environ["RANK"], "a") as file:
            file.write(str(state.global_step + 1))
        if state.global_step == 2 and os.environ["RANK"] == "1" and not Path("killed").exists():
            Path("killed").touch()
            os._exit(3)

def make(arguments):
    trainer = of_sft(arguments)
    trainer.add_callback(Watch())
    return trainer

of_sft, sft.make_trainer = sft.make_trainer, make
sft.main()
"""


@pytest.mark.full
def test_a_launcher_starts_again_what_was_killed(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(KILLED_ONCE)
    words = small_run(place, Path("out"), "--save_steps", "1", "--max_steps", "4")
    launch = ["launch", "--num_processes", "2", "--max_restarts", "1", "--monitor_interval", "0.1", "script.py"]
    said = run([*launch, *words])
    assert (tmp_path / "steps-1").read_text() == "12334"
    assert said.count("restarted: training continues from the newest checkpoint in out") == 1


@pytest.mark.parametrize(
    ("environment", "words", "begun"),
    [
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, [], "holds checkpoint-2 from an earlier run"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, ["--resume_from_checkpoint", "False"], "holds checkpoint-2 from"),
        ({"FULLSHARD_ELASTIC": "1:2"}, ["--resume_from_checkpoint", "elsewhere/checkpoint-7"], "holds checkpoint-2"),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            ["--resume_from_checkpoint", "out/checkpoint-1"],
            "holds checkpoint-2 from",
        ),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, ["--resume_from_checkpoint", "out/checkpoint-2"], "begun"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, ["--resume_from_checkpoint", "True"], "begun"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, ["--save_only_model", "True"], "begun"),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, [], "would start at step 1 and replace it"),
        ({}, [], "out holds checkpoint-2 from an earlier run, and this run would start at step 1"),
        ({}, ["--resume_from_checkpoint", "False"], "begun"),
        ({}, ["--resume_from_checkpoint", "out/checkpoint-1"], "begun"),
    ],
)
def test_a_run_does_not_begin_beside_checkpoints_of_another_run(
    tmp_path: Path, environment: dict[str, str], words: list[str], begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.recipes import sft
    from fullshard.recipes.sft_arguments import read_arguments

    def begin(arguments: Any) -> None:
        raise ConfigError("begun")

    monkeypatch.setattr(sft, "make_trainer", begin)
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for number in (1, 2):
        write_rows(tmp_path / f"out/checkpoint-{number}/trainer_state.json", {})
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=begun):
        sft.run(read_arguments(small_run(tmp_path, Path("out"), *words), print))


def labels_of(words: list[str]) -> list[tuple[str, str]]:
    """What the model reads, and of it what it is trained on."""
    from fullshard.recipes.sft import make_trainer
    from fullshard.recipes.sft_arguments import read_arguments

    trainer = make_trainer(read_arguments(words, print))
    tokenizer = trainer.processing_class
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    return [
        (tokenizer.decode(ids[mask.bool()]), tokenizer.decode(ids[labels != -100]))
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    ]


@pytest.mark.full
def test_completion_only_loss(tmp_path: Path, place: Path) -> None:
    rows = [{"prompt": f"what is {i}?", "completion": f" it is {i}"} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--model_name_or_path", str(place / "model"), "--output_dir", str(tmp_path / "out"), "--splits", "train",
              "--report_to", "none"]  # fmt: skip
    [found] = run_ranks(labels_of, 1, [*common, "--dataset_name", str(tmp_path)])
    assert found[1] == ("what is 1? it is 1</s>", " it is 1</s>")
    chats = ["--dataset_name", str(place / "data"), "--assistant_only_loss", "True", "--chat_template_format"]
    [[(text, trained), _]] = run_ranks(labels_of, 1, [*common, *chats, "chatml"])
    assert text == "<|im_start|>user\nwhat is 0 plus 0?<|im_end|>\n<|im_start|>assistant\nit is 0<|im_end|>\n"
    assert trained == "it is 0<|im_end|>"
    [[(text, trained), _]] = run_ranks(labels_of, 1, [*common, *chats, "zephyr"])
    assert text == "<|user|>\nwhat is 0 plus 0?</s>\n<|assistant|>\nit is 0</s>\n" and trained == "it is 0</s>"


@pytest.mark.full
def test_one_file_holds_it_all(tmp_path: Path, place: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = f"""
model_name_or_path: {place / "model"}
dataset_name: {place / "data"}
output_dir: {tmp_path / "out"}
chat_template_format: zephyr
dataset_text_field: content
max_length: 64
max_steps: 2
bf16: false
report_to: none
learning_rate: 1e-3
launch:
  num_processes: 2
  device: cpu
sharding:
  strategy: SHARD_GRAD_OP
"""
    (tmp_path / "run.yaml").write_text(settings)
    assert "SHARD_GRAD_OP" in run(["sft", str(tmp_path / "run.yaml")])
    before = AutoModelForCausalLM.from_pretrained(place / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])  # all weights are trained


def parsed(*words: str, data: str = "d") -> tuple[Any, list[str]]:
    from fullshard.recipes.sft_arguments import read_arguments

    said: list[str] = []
    common = ["--model_name_or_path", "m", "--output_dir", "o", "--bf16", "False"]
    common += [] if "--dataset_name" in words else ["--dataset_name", data]
    common += [] if "--report_to" in words or "--log_with" in words else ["--report_to", "none"]
    return read_arguments([*common, *words], said.append), said


def test_every_flag_of_the_page_is_understood() -> None:
    from fullshard.recipes.sft_arguments import NO_EFFECT

    assert len(commands()) == 2
    for _, words in commands():
        arguments, said = parsed(*replaced(words, push_to_hub=None, hub_private_repo=None, hub_strategy=None))
        written = dict(itertools.pairwise(words))
        training = arguments.training
        assert (training.max_length, training.seed) == (int(written["--max_seq_len"]), int(written["--seed"]))
        assert arguments.model.lora_r == int(written["--lora_r"]) and training.packing
        assert arguments.training.gradient_checkpointing_kwargs == {"use_reentrant": arguments.own.use_reentrant}
        assert len(said) == sum(f"--{name}" in words for name in (*NO_EFFECT, "use_flash_attn"))


def test_the_page_names_every_flag() -> None:
    from fullshard.recipes.sft_arguments import NO_EFFECT, RENAMED, OwnArguments

    text = (Path(__file__).parents[2] / "docs" / "sft.md").read_text(encoding="utf-8")
    table = text.partition("## Flags")[2].partition("## Data")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    own = {f.name for f in dataclasses.fields(OwnArguments) if f.init}
    assert named >= own | RENAMED.keys() | NO_EFFECT.keys()


def test_a_warmup_ratio_is_a_share_of_the_steps() -> None:
    for words, steps in ((["--warmup_ratio", "0.1"], 10), (["--warmup_steps", "7"], 7), (["--warmup_ratio", "0.0"], 0)):
        assert parsed(*words)[0].training.get_warmup_steps(100) == steps


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lora_dropot", "3"], "unknown argument --lora_dropot; did you mean --lora_dropout"),
        (["--chat_template_format", "alpaca"], "invalid choice: 'alpaca'"),
        (["--use_unsloth", "True"], "unknown argument --use_unsloth"),
        (["--dataset_streaming", "True"], "is not supported"),
        (["--learning_rate", "fast"], "invalid settings: --learning_rate: invalid float value: 'fast'"),
        (["--max_steps", "3", "stray"], "unknown argument stray"),
        (["--warmup_ratio", "1.0"], "warmup_ratio.*: a warmup ratio must be less than 1"),
        (
            ["--report_to", "dvclive"],
            r"'dvclive' is not installed\nhint: pip install 'fullshard\[dvclive\]'",
        ),
    ],
)
def test_refused(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=expected):
        parsed(*words)
    assert capsys.readouterr() == ("", "")  # argparse would print every flag there is


def test_a_missing_trl_is_said_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.recipes.sft_arguments import read_arguments

    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fullshard\[sft\]'"):
        read_arguments(["run.yaml", "--nproc", "1"], print)


def in_yaml(path: Path, text: str, dataset: str = "d") -> Any:
    """The arguments in a file that says little more than `text`."""
    from fullshard.recipes.sft_arguments import read_arguments

    path.write_text(f"model_name_or_path: m\ndataset_name: {dataset}\noutput_dir: o\nbf16: false\n" + text)
    return read_arguments([str(path)], print)


def test_null_in_a_file_says_nothing(tmp_path: Path) -> None:
    without = in_yaml(tmp_path / "run.yaml", "")
    names = ("splits", "seed", "report_to", "resume_from_checkpoint", "hub_model_id", "use_unsloth",
             "gradient_checkpointing_kwargs", "run_name", "eos_token", "profile", "optim_args")  # fmt: skip
    arguments = in_yaml(tmp_path / "run.yaml", "".join(f"{name}: null\n" for name in names))
    assert (arguments.model, arguments.script, arguments.own) == (without.model, without.script, without.own)
    assert arguments.training.to_dict() == without.training.to_dict()
    assert in_yaml(tmp_path / "run.yaml", "max_length: null\n").training.max_length is None  # TRL's for no limit
    with pytest.raises(ConfigError, match="--dataset_name: this argument is required"):
        in_yaml(tmp_path / "run.yaml", "", dataset="null")


def test_several_values(tmp_path: Path) -> None:
    text = """
lora_target_modules: [q_proj, v_proj]
splits: [train, test]
report_to: [tensorboard]
label_names: [a, b]
lr_scheduler_kwargs: {x: [1, 2]}
"""
    arguments = in_yaml(tmp_path / "run.yaml", text)
    assert (arguments.model.lora_target_modules, arguments.script.dataset_train_split) == (
        ["q_proj", "v_proj"],
        "train",
    )
    training = arguments.training
    assert (training.report_to, training.label_names) == (["tensorboard"], ["a", "b"])
    assert training.lr_scheduler_kwargs == {"x": [1, 2]}
    with pytest.raises(ConfigError, match=r"run.yaml:5:1: .*--max_steps takes one value, got \[1, 2\]"):
        in_yaml(tmp_path / "run.yaml", "max_steps: [1, 2]\n")
    training = parsed("--report_to", "tensorboard", "x", "--label-names", "a", "b", "--max_steps", "1")[0].training
    assert (training.report_to, training.label_names) == (["tensorboard", "x"], ["a", "b"])


@pytest.mark.parametrize(
    ("words", "launch"),
    [
        (["--max-restarts", "1"], ["--max_restarts", "1"]),
        (["--cpu"], ["--cpu"]),
        (["--timeout=3"], ["--timeout", "3"]),
        (["--quantize", "nf4"], ["--quantize", "nf4"]),
        (["-n", "2"], ["--num_processes", "2"]),
    ],
)
def test_the_launchers_flags_are_handed_on(
    words: list[str], launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.cli.sft import sft

    seen: list[list[str]] = []
    monkeypatch.setattr("fullshard.cli.main.app", seen.append)
    named = ["--model_name_or_path", "org/name", "--dataset_name", "org/data"]
    for own in ([*named, "--output_dir", "1"], [*named, "--bf16"]):
        for written in ([*own, *words], [*words, *own]):
            sft(cast("Any", SimpleNamespace(args=written)))
            assert seen.pop() == ["launch", *launch, "-m", "fullshard.recipes.sft", *own]


@pytest.mark.full
def test_a_mistake_in_the_flags_is_one_message_of_several_processes(tmp_path: Path) -> None:
    wanted = ["--model_name_or_path", "x", "--dataset_name", "y", "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "fullshard", "sft", "--num_processes", "2", *wanted, "--learning_rate", "high"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("ConfigError: invalid settings: ") == 1
