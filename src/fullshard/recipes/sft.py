"""Supervised fine-tuning: all weights, LoRA or LoRA on a quantised model, by TRL's SFTTrainer on fullshard's engine.

fullshard sft --model_name_or_path DIR --dataset_name DIR --output_dir OUT ...
fullshard launch --config_file FILE -m fullshard.recipes.sft --model_name_or_path ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import torch

from fullshard import checkpoint
from fullshard.checkpoint.lease import lease
from fullshard.core.errors import ConfigError, DataError
from fullshard.launch import cuda
from fullshard.launch.environment import (
    is_started_again,
    may_be_started_again,
    read_rank_environment,
    run_on_main,
)
from fullshard.launch.preemption import should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe.report import write_report
from fullshard.recipes.hub import Hub, pushing_later, say
from fullshard.recipes.merging import merge, require_room_to_merge
from fullshard.recipes.model import own_errors
from fullshard.recipes.optimizers import muon
from fullshard.recipes.profiling import StepMemory, StepProfile, profiled, watched
from fullshard.recipes.rows import require_rows
from fullshard.recipes.sft_arguments import DataArguments, ModelArguments, SFTArguments, read_arguments

_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# `generation` marks what the assistant says, for --assistant_only_loss.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + eos_token + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "chatml": (_CHATML, {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
    "zephyr": (_ZEPHYR, {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]}),
}


def run(arguments: SFTArguments) -> Any:
    """Train, save, then merge and push if asked; returns the trainer.

    Raises:
        ConfigError: data or settings that do not fit together, another job uses the output directory, or merging
            would replace what is not this run's.
        HubError: the model is saved, and not pushed.
    """
    output = Path(arguments.training.output_dir)
    with contextlib.ExitStack() as held:
        run_on_main(read_rank_environment(), lambda: held.enter_context(lease(output)))
        return _run(arguments)


def _run(arguments: SFTArguments) -> Any:
    environment, output = read_rank_environment(), Path(arguments.training.output_dir)
    resume = run_on_main(environment, lambda: _where_to_begin(arguments.training))
    goes_on = resume is not None or run_on_main(environment, is_started_again)
    if (merge_dir := arguments.model.merge_dir) is not None:
        run_on_main(environment, lambda: require_room_to_merge(Path(merge_dir), output, goes_on=goes_on))
    trainer = make_trainer(arguments)
    hub = Hub(trainer)
    if arguments.watch.profile:
        steps = arguments.watch.profile_steps
        trainer.add_callback(profiled(StepProfile(trainer.accelerator, steps, output / "profile", say)))
    if arguments.watch.memory_timeline:
        trainer.add_callback(watched(StepMemory(trainer.accelerator, output, say)))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_state()
    _report(output)
    if should_stop():
        say("stopped by a signal, with a checkpoint; --resume_from_checkpoint True goes on from there")
        return trainer
    hub.hold()
    trainer.save_model()
    if merge_dir is not None:
        merge(arguments.model, trainer, goes_on=goes_on)
    hub.push()
    return trainer


def _report(output: Path) -> None:
    """Write `report.html` where pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        run_on_main(read_rank_environment(), lambda: write_report([output], output / "report.html"))
        say(f"report: {output / 'report.html'}")


def make_trainer(arguments: SFTArguments) -> Any:
    """Return TRL's trainer with model, data and adapters, ready to train."""
    from fullshard.integrations.transformers import SFTTrainer

    model_arguments, training = arguments.model, arguments.training
    tokenizer, is_extended = load_tokenizer(model_arguments)
    model = load_model(model_arguments, training)
    # A table that is longer than the vocabulary has room already, and is not to be made shorter.
    if is_extended and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8, mean_resizing=False)
    train, test = load_data(arguments.data, model_arguments, tokenizer, training)
    if training.packing and not _uses_flash_attention(model_arguments) and training.packing_strategy == "bfd":
        say("packing without flash attention: texts are cut into pieces of max_length (packing_strategy wrapped)")
        training.packing_strategy = "wrapped"
    if test is None and training.eval_strategy != "no":
        raise ConfigError(
            f"eval_strategy = {training.eval_strategy} without data to evaluate on",
            hint="name a test split in --splits, and for --dataset_name a directory with a file for each",
        )
    with pushing_later(training):
        return SFTTrainer(
            model=model,
            args=training,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            peft_config=lora_config(model_arguments),
            optimizer_cls_and_kwargs=_muon(training) if arguments.uses_muon else None,
        )


def _muon(training: Any) -> tuple[Any, dict[str, Any]]:
    """Return a function that gives the maker of the optimizer, called once there are adapters, and its options."""

    def make(model: Any, **options: Any) -> torch.optim.Optimizer:
        return muon(model, say, **options)

    options = {
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "adamw_betas": (training.adam_beta1, training.adam_beta2),
        "adamw_eps": training.adam_epsilon,
    }
    return lambda: make, options


def load_tokenizer(arguments: ModelArguments) -> tuple[Any, bool]:
    """Return the model's tokenizer, with the chat format's tokens; and whether it has more of them than before."""
    import transformers

    with own_errors(
        f"cannot read the tokenizer of {arguments.model_name_or_path!r}",
        hint="--model_name_or_path takes a Hugging Face directory or a hub name",
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    before = len(tokenizer)
    if arguments.chat_template_format != "none":
        template, tokens = _FORMATS[arguments.chat_template_format]
        tokenizer.add_special_tokens(dict(tokens))
        tokenizer.chat_template = template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, len(tokenizer) > before


def load_model(arguments: ModelArguments, training: Any) -> Any:
    """Return the model, whose weights each rank reads for itself when it is sharded.

    What is trained has float32 main weights. A frozen model is kept in what is computed in.
    """
    import transformers

    half = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
    quantization = None
    if arguments.use_4bit_quantization:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=arguments.bnb_4bit_quant_type,
            bnb_4bit_compute_dtype=getattr(torch, arguments.bnb_4bit_compute_dtype),
            bnb_4bit_use_double_quant=arguments.use_nested_quant,
        )
    elif arguments.use_8bit_quantization:
        quantization = transformers.BitsAndBytesConfig(load_in_8bit=True)
    options: dict[str, Any] = {"attn_implementation": "flash_attention_2"} if _uses_flash_attention(arguments) else {}
    if arguments.use_flash_attn and not options:
        say("--use_flash_attn has no effect here: it needs a CUDA device and the package flash-attn; sdpa is used")
    model = checkpoint.from_pretrained(
        transformers.AutoModelForCausalLM,
        arguments.model_name_or_path,
        dtype=half if arguments.use_peft_lora else torch.float32,
        quantization_config=quantization,
        **options,
    )
    if training.gradient_checkpointing:
        model.config.use_cache = False  # type: ignore[union-attr]
    return model


def lora_config(arguments: ModelArguments) -> Any:
    """Return PEFT's configuration; None to train all weights."""
    if not arguments.use_peft_lora:
        return None
    import peft

    targets = arguments.lora_target_modules
    return peft.LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        task_type="CAUSAL_LM",
    )


def load_data(arguments: DataArguments, model: ModelArguments, tokenizer: Any, training: Any) -> tuple[Any, Any]:
    """Return data to train on, and to evaluate on (None if there is none): the columns that TRL is to tokenise.

    Raises:
        ConfigError: no split to train on, two for one purpose, or no column of a known kind.
        DataError: files that cannot be read, or a row that holds neither text nor chat.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    is_one_file = Path(arguments.dataset_name).is_file()
    for split in (word.strip() for word in arguments.splits.split(",") if word.strip()):
        role = "train" if "train" in split else "test"
        if is_one_file and role == "test":
            continue  # else it would be evaluated on what it is trained on
        if role in found:
            raise ConfigError(f"--splits {arguments.splits!r}: both {names[role]} and {split} would be the {role} data")
        data = _load_split(arguments.dataset_name, split)
        if not len(data):
            raise ConfigError(f"{arguments.dataset_name}: split {split} has no rows")
        data = data.select_columns(_columns(data.column_names, arguments, model, training))
        require_rows(data, f"{arguments.dataset_name}, split {split}")
        found[role], names[role] = data, split
    if "train" not in found:
        raise ConfigError(f"--splits {arguments.splits!r} names no split to train on", hint="for example train,test")
    is_chat = any(not isinstance(found["train"][0][name], str) for name in found["train"].column_names)
    if is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            f"{arguments.dataset_name} holds chats, and {model.model_name_or_path} has no chat template",
            hint="use --chat_template_format chatml or zephyr",
        )
    if is_chat and training.dataset_text_field != "text":
        say("--dataset_text_field has no effect: the data holds chats, which the chat template renders")
    return found["train"], found.get("test")


def _columns(held: list[str], arguments: DataArguments, model: ModelArguments, training: Any) -> list[str]:
    """Return the columns to train on: one of text, chats, or prompts with their completions."""
    if model.chat_template_format == "none" and training.dataset_text_field in held:
        return [training.dataset_text_field]
    if "messages" in held:
        return [name for name in ("messages", "tools") if name in held]
    if {"prompt", "completion"} <= set(held):
        return ["prompt", "completion"]
    raise ConfigError(
        f"{arguments.dataset_name} has the columns {', '.join(held)}: no messages, and no prompt with completion",
        hint="for texts use --chat_template_format none and name their column with --dataset_text_field",
    )


def _load_split(name: str, split: str) -> Any:
    import datasets

    path = Path(name)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        is_part = re.compile(rf"{re.escape(split)}(\.|-\d)").match  # `training_log.jsonl` is none of `train`
        files = sorted(file for file in path.iterdir() if is_part(file.name) and file.suffix in _FILES)
        if not files:
            held = ", ".join(sorted(file.name for file in path.iterdir()))
            raise ConfigError(
                f"{path} holds no {split}.jsonl, .json or .parquet; it holds {held or 'nothing'}",
                hint=f"a split in several files has them as {split}-00000-of-00002.jsonl and so on",
            )
    else:
        try:
            return datasets.load_dataset(name, split=split)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            raise ConfigError(
                f"no data {name!r}, split {split!r}: {error}", hint="give a directory or hub name"
            ) from None
    kind = _FILES.get(files[0].suffix)
    if kind is None:
        raise ConfigError(f"{files[0]} is no data file", hint=f"use {', '.join(_FILES)}")
    try:
        return datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train")
    except Exception as error:  # of pyarrow's, of its JSON reader, or of the file system
        found = f"{path} cannot be read: {error.__cause__ or error}"
        raise DataError(found, hint="damaged files are best copied or downloaded again") from error


def _uses_flash_attention(arguments: ModelArguments) -> bool:
    return arguments.use_flash_attn and cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


def _where_to_begin(training: Any) -> Any:
    """Return the checkpoint that Trainer is to resume from. Called on rank 0.

    After a restart it is the newest checkpoint, whatever was asked for: it is this run's, because a run that may be
    started again does not begin beside those of another.

    Raises:
        ConfigError: after a restart this run's checkpoints could not be told from others.
    """
    from fullshard.integrations.transformers.trainer import complete_checkpoints

    output = Path(training.output_dir)
    asked, held = _resume(training.resume_from_checkpoint), complete_checkpoints(output)
    if training.save_only_model:  # with which nothing can go on
        return asked
    if is_started_again():
        if held:
            say(f"started again: training goes on from the newest checkpoint in {output}")
        return True if held else asked
    if asked is not True and may_be_started_again():
        begin = None if asked is None else Path(asked).resolve()
        others = [path.name for path in itertools.takewhile(lambda path: path.resolve() != begin, held)]
        if others:
            raise ConfigError(
                f"{output} holds {', '.join(others)} of an earlier run, and after a restart this one would go on there",
                hint="--resume_from_checkpoint True goes on from the newest; else use another --output_dir",
            )
    return asked


def _resume(value: Any) -> Any:
    """Return the checkpoint that `--resume_from_checkpoint` asks for: a path, or the newest one."""
    text = str(value).lower()
    return None if value is None or text in ("false", "no") else True if text in ("true", "yes") else value


def main(words: list[str] | None = None) -> None:
    """Take part in a run, as one rank of it."""
    run_worker(lambda: run(read_arguments(sys.argv[1:] if words is None else words, say)))


if __name__ == "__main__":
    main()
