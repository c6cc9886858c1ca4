"""Supervised fine-tuning: all weights, LoRA or LoRA on a quantised model, by TRL's SFTTrainer on fullshard's engine.

fullshard sft --model_name_or_path DIR --dataset_name DIR --output_dir OUT ...
fullshard launch --config_file FILE -m fullshard.recipes.sft --model_name_or_path ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from fullshard import checkpoint
from fullshard.checkpoint.lease import lease
from fullshard.core.errors import ConfigError, DataError, HubError, cut
from fullshard.launch.environment import is_started_again, may_be_started_again, read_rank_environment, run_on_main
from fullshard.launch.preemption import should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe.report import write_report
from fullshard.recipes.model import own_errors
from fullshard.recipes.optimizers import muon
from fullshard.recipes.profiling import Recorder, recorded
from fullshard.recipes.sft_arguments import SFTArguments, read_arguments

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
    """Train, save, then push if asked; returns the trainer.

    Raises:
        ConfigError: data or settings that do not fit together, or another job uses the output directory.
        HubError: the model is saved, and not pushed.
    """
    environment, training = read_rank_environment(), arguments.training
    output, is_pushed = Path(training.output_dir), bool(training.push_to_hub)
    with contextlib.ExitStack() as held:
        run_on_main(environment, lambda: held.enter_context(lease(output)))
        resume = run_on_main(environment, lambda: _where_to_begin(training))
        training.push_to_hub = False  # last of all: a hub that is out of reach costs no training
        trainer = make_trainer(arguments)
        own = arguments.own
        steps = own.profile_steps if own.profile else None
        recorder = Recorder(trainer.accelerator, output, say, steps=steps)
        trainer.add_callback(recorded(recorder))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_state()
        if importlib.util.find_spec("matplotlib") is not None:
            run_on_main(environment, lambda: write_report([output], output / "report.html"))
            say(f"report: {output / 'report.html'}")
        if should_stop():
            say("stopped by a signal, with a checkpoint; --resume_from_checkpoint True goes on from there")
            return trainer
        trainer.save_model()
        if is_pushed:
            _push(trainer, output)
        return trainer


def _push(trainer: Any, output: Path) -> None:
    """Push what is in the output directory. Raises `HubError` on rank 0 if that cannot be done."""
    trainer.args.push_to_hub = True
    try:
        trainer.push_to_hub(commit_message="End of training", revision=trainer.args.hub_revision)
    except Exception as error:  # whatever the network and the hub come up with
        name = trainer.args.hub_model_id or "USER/NAME"
        raise HubError(
            f"the model is saved in {output}, whole, but it is not on the hub: {type(error).__name__}: "
            f"{cut(str(error), 300)}",
            hint=f"push it later: hf upload {name} {output}",
        ) from error


def make_trainer(arguments: SFTArguments) -> Any:
    """Return TRL's trainer with model, data and adapters, ready to train."""
    import trl

    from fullshard.integrations.transformers import SFTTrainer

    training = arguments.training
    tokenizer, is_extended = load_tokenizer(arguments)
    model = load_model(arguments)
    # A table that is longer than the vocabulary has room already, and is not to be made shorter.
    if is_extended and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8, mean_resizing=False)
    train, test = load_data(arguments, tokenizer)
    is_flash = "flash" in (arguments.model.attn_implementation or "")
    if training.packing and not is_flash and training.packing_strategy == "bfd":
        say("packing without flash attention: texts are cut into pieces of max_length (packing_strategy wrapped)")
        training.packing_strategy = "wrapped"
    return SFTTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=trl.get_peft_config(arguments.model),
        optimizer_cls_and_kwargs=_muon(training) if arguments.uses_muon else None,
    )


def _muon(training: Any) -> tuple[Any, dict[str, Any]]:
    """Return a function that gives the maker of the optimizer, called once there are adapters, and its options."""

    def make(model: Any, **options: Any) -> torch.optim.Optimizer:
        return muon(model, say, **options)

    betas = (training.adam_beta1, training.adam_beta2)
    options = {"lr": training.learning_rate, "weight_decay": training.weight_decay, "adamw_betas": betas}
    return lambda: make, options | {"adamw_eps": training.adam_epsilon}


def load_tokenizer(arguments: SFTArguments) -> tuple[Any, bool]:
    """Return the model's tokenizer, with the chat format's tokens; and whether it has more of them than before."""
    import transformers

    name = arguments.model.model_name_or_path
    hint = "--model_name_or_path takes a Hugging Face directory or a hub name"
    with own_errors(f"cannot read the tokenizer of {name!r}", hint=hint):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=arguments.model.model_revision)
    before = len(tokenizer)
    if arguments.own.chat_template_format != "none":
        template, tokens = _FORMATS[arguments.own.chat_template_format]
        tokenizer.add_special_tokens(dict(tokens))
        tokenizer.chat_template = template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, len(tokenizer) > before


def load_model(arguments: SFTArguments) -> Any:
    """Return the model, whose weights each rank reads for itself when it is sharded."""
    import transformers
    import trl

    settings = arguments.model
    quantization = trl.get_quantization_config(settings)
    if quantization is not None and (compute := arguments.own.bnb_4bit_compute_dtype) is not None:
        quantization.bnb_4bit_compute_dtype = getattr(torch, compute)
    model = checkpoint.from_pretrained(
        transformers.AutoModelForCausalLM,
        settings.model_name_or_path,
        dtype=settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype),
        quantization_config=quantization,
        revision=settings.model_revision,
        **({} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}),
    )
    if arguments.training.gradient_checkpointing:
        model.config.use_cache = False  # type: ignore[union-attr]
    return model


def load_data(arguments: SFTArguments, tokenizer: Any) -> tuple[Any, Any]:
    """Return data to train on, and to evaluate on (None if there is none): the columns that TRL is to tokenise.

    Raises:
        ConfigError: no split to train on, no column of a known kind, or nothing to evaluate on.
        DataError: files that cannot be read, or a row that holds neither text nor chat.
    """
    import datasets

    script, training = arguments.script, arguments.training
    path = Path(script.dataset_name)
    files = {"data_files": str(path)} if path.is_file() else {}
    try:
        kind = _FILES.get(path.suffix, path.suffix) if files else script.dataset_name
        found = datasets.load_dataset(kind, script.dataset_config, **files)
    except Exception as error:  # of pyarrow's, of its JSON reader, of the hub, or of the file system
        raise DataError(
            f"{script.dataset_name} cannot be read: {error.__cause__ or error}",
            hint="name a directory with train.jsonl or train.parquet, such a file, or a dataset of the hub",
        ) from error
    if script.dataset_train_split not in found:
        raise ConfigError(
            f"{script.dataset_name} has no split {script.dataset_train_split!r} to train on, but {', '.join(found)}",
            hint="name it with --dataset_train_split",
        )
    test = found.get(script.dataset_test_split)
    if test is None and training.eval_strategy != "no":
        raise ConfigError(
            f"eval_strategy = {training.eval_strategy} and no split {script.dataset_test_split!r} to evaluate on",
            hint="name one with --dataset_test_split; a directory has a file for each split",
        )
    columns = _columns(found[script.dataset_train_split].column_names, arguments)
    splits = [script.dataset_train_split, *([] if test is None else [script.dataset_test_split])]
    train, *tests = (
        require_rows(found[split].select_columns(columns), f"{script.dataset_name}, split {split}") for split in splits
    )
    is_chat = any(not isinstance(train[0][name], str) for name in columns)
    if is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            f"{script.dataset_name} holds chats, and {arguments.model.model_name_or_path} has no chat template",
            hint="use --chat_template_format chatml or zephyr",
        )
    if is_chat and training.dataset_text_field != "text":
        say("--dataset_text_field has no effect: the data holds chats, which the chat template renders")
    return train, tests[0] if tests else None


def _columns(held: list[str], arguments: SFTArguments) -> list[str]:
    """Return the columns to train on: one of text, chats, or prompts with their completions."""
    text = arguments.training.dataset_text_field
    if arguments.own.chat_template_format == "none" and text in held:
        return [text]
    if "messages" in held:
        return [name for name in ("messages", "tools") if name in held]
    if {"prompt", "completion"} <= set(held):
        return ["prompt", "completion"]
    raise ConfigError(
        f"{arguments.script.dataset_name} has the columns {', '.join(held)}: no messages, no prompt with completion",
        hint="for texts use --chat_template_format none and name their column with --dataset_text_field",
    )


def require_rows(data: Any, where: str) -> Any:
    """Return the data once every row holds text or chats: TRL fails at one that does not, and does not say which.

    Raises:
        DataError: a row does not, with its number; or there are none.
    """
    if not len(data):
        raise DataError(f"{where} has no rows")

    def check(row: dict[str, Any], number: int) -> None:
        for name, value in row.items():
            is_chat = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
            if name != "tools" and not (is_chat or (isinstance(value, str) and name != "messages")):
                raise DataError(
                    f"{where}: row {number + 1} has {cut(repr(value), 200)} in the column {name}, expected a text or a "
                    "list of messages",
                    hint="mend or remove it; rows are counted from 1, through all files of a split",
                )

    data.map(check, with_indices=True)
    return data


def _where_to_begin(training: Any) -> Any:
    """Return the checkpoint that Trainer is to resume from. Called on rank 0.

    After a restart it is the newest checkpoint, whatever was asked for: it is this run's, because a run that may be
    started again does not begin beside those of another.

    Raises:
        ConfigError: after a restart this run's checkpoints could not be told from others.
    """
    from fullshard.integrations.transformers.trainer import complete_checkpoints

    output, text = Path(training.output_dir), str(training.resume_from_checkpoint).lower()
    asked = None if text in ("none", "false", "no") else text in ("true", "yes") or training.resume_from_checkpoint
    held = complete_checkpoints(output)
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


def say(message: str) -> None:
    """Print one line for the user, on the main rank."""
    if read_rank_environment().is_main:
        sys.stderr.write(f"fullshard: {message}\n")


def main(words: list[str] | None = None) -> None:
    """Take part in a run, as one rank of it."""
    run_worker(lambda: run(read_arguments(sys.argv[1:] if words is None else words, say)))


if __name__ == "__main__":
    main()
