"""The flags of `fullshard sft`: TRL's own, read by TRL's parser, a few more, and other names for some of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from fullshard.config.settings import closest, plain_message
from fullshard.config.trackers import require_trackers
from fullshard.config.view import step_range
from fullshard.core.errors import ConfigError, MissingExtraError
from fullshard.core.paths import local_name, require_there
from fullshard.launch import cuda


@dataclass
class OwnArguments:
    """The flags that TRL does not have."""

    chat_template_format: str = field(
        default="none",
        metadata={
            "help": "How chats are rendered; none: as the model's tokenizer does.",
            "choices": ["none", "chatml", "zephyr"],
        },
    )
    use_reentrant: bool = field(default=False, metadata={"help": "The reentrant form of gradient checkpointing."})
    bnb_4bit_compute_dtype: str | None = field(default=None, metadata={"help": "What 4-bit layers compute in."})
    profile: bool = field(default=False, metadata={"help": "Profile a few steps: a trace per rank and one of all."})
    profile_steps: str = field(
        default="3-5", metadata={"help": "The steps to profile, counted from the first of this process."}
    )


RENAMED = {
    "use_peft_lora": "use_peft",
    "use_4bit_quantization": "load_in_4bit",
    "use_8bit_quantization": "load_in_8bit",
    "use_nested_quant": "use_bnb_nested_quant",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "log_with": "report_to",
    "warmup_ratio": "warmup_steps",  # which below 1 is a share of all steps
}
NO_EFFECT = {
    "loss_chunk": "TRL computes the loss of some tokens at a time by itself",
    "append_concat_token": "TRL puts the end-of-sequence token between packed texts",
    "add_special_tokens": "TRL's tokenisation decides on special tokens",
    "ignore_bias_buffers": "it is for DDP",
    "bnb_4bit_quant_storage_dtype": "quantised weights are sharded as bytes, whatever the dtype around them",
    "use_flash_attn": "it needs a CUDA device and the package flash-attn; sdpa is used",
}
_LISTS = ("lora_target_modules", "splits")
"""Flags whose values may be one word with commas."""


@dataclass(frozen=True, slots=True)
class SFTArguments:
    """Everything a run is told: TRL's three groups, ours, and whether `--optim` is muon, which they lack."""

    script: Any
    own: OwnArguments
    training: Any
    model: Any
    uses_muon: bool = False


def read_arguments(words: Sequence[str], say: Callable[[str], None]) -> SFTArguments:
    """Return the arguments on a command line, or in a YAML or JSON file that is its only word.

    Args:
        words: as TRL takes them; `-` and `_` are the same.
        say: told in one line what became of a flag that was not plainly used.

    Raises:
        ConfigError: an unknown flag, or a value that is wrong.
        MissingExtraError: without TRL.
    """
    make_parser()  # that TRL is missing is said before what is wrong with the words
    if len(words) == 1 and not words[0].startswith("-"):
        from fullshard.config.document import read_document

        return make_arguments({entry.key: entry.plain for entry in read_document(Path(words[0]))}, say)
    return make_arguments(dict(_grouped(words)), say)


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each flag with its words."""
    rest = list(words)
    while rest:
        name, sign, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{name!r} belongs to no flag", hint="write --name value")
        values = [value] if sign else list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
        rest = rest if sign else rest[len(values) :]
        yield name.removeprefix("--"), values


def make_arguments(values: Mapping[str, Any], say: Callable[[str], None]) -> SFTArguments:
    """Return the arguments from values by flag name; see `read_arguments`."""
    parser = make_parser()
    # A null is as if the flag were not there, but for this one, where it is TRL's for no limit.
    if "max_length" in values and values["max_length"] is None:
        parser.set_defaults(max_length=None)
    given = dict(_translated({name: value for name, value in values.items() if value is not None}, say))
    if len(trackers := _words(given.get("report_to", "none"))) > 1:  # which the parser takes for one word
        parser.set_defaults(report_to=trackers)
        del given["report_to"]
    if uses_muon := _words(given.get("optim", "")) == ["muon"]:
        del given["optim"]
        if "optim_args" in given:
            raise ConfigError("--optim_args with --optim muon: they are for Transformers' own optimizers")
    given.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": _is_true(given.get("use_reentrant", False))})
    try:
        script, own, training, model = parser.read(
            [word for name, value in given.items() for word in (f"--{name}", *_words(value))]
        )
    except ValueError as error:
        raise _not_accepted(error) from error
    if script.dataset_streaming:
        raise ConfigError("--dataset_streaming is not supported", hint="name a dataset that fits on the disk")
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        raise ConfigError("a quantised model is frozen, so there is nothing to train", hint="add --use_peft True")
    step_range(own.profile_steps)
    require_trackers(training.report_to, "--report_to")
    training.resume_from_checkpoint = training.resume_from_checkpoint or None  # empty is not at all, as for Trainer
    for group, name, is_input in (
        (model, "model_name_or_path", True),
        (script, "dataset_name", True),
        (training, "output_dir", False),
        (training, "resume_from_checkpoint", False),
    ):
        written = getattr(group, name)
        if written is None and is_input:
            raise ConfigError(f"--{name} is missing", hint="give a directory or a hub name")
        try:
            if written is not None:
                setattr(group, name, local_name(written))
            if is_input:
                require_there(getattr(group, name))
        except ConfigError as error:
            raise ConfigError(f"--{name}: {plain_message(error)}", hint=error.hint) from None
    if "dtype" not in given:  # what is trained has float32 main weights, a frozen model is kept in what is computed in
        half = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
        model.dtype = half if model.use_peft else "float32"
    return SFTArguments(script, own, training, model, uses_muon)


def _translated(values: Mapping[str, Any], say: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Yield the flags by the names that TRL has for them."""
    for written, value in values.items():
        name = written.replace("-", "_")
        if name == "use_flash_attn" and cuda.is_available() and find_spec("flash_attn") is not None:
            if _is_true(value):
                yield "attn_implementation", "flash_attention_2"
            continue
        if name in NO_EFFECT:
            say(f"--{name} has no effect: {NO_EFFECT[name]}")
            continue
        if name in _LISTS:
            value = [part.strip() for word in _words(value) for part in word.split(",")]
        if name == "splits":
            train, test = ([word for word in value if ("train" in word) is wanted][:1] for wanted in (True, False))
            if not train:
                raise ConfigError(f"--splits {value} names no split to train on", hint="for example train,test")
            yield from (("dataset_train_split", train), ("dataset_test_split", test or "none"))
            continue
        if name == "warmup_ratio" and float("".join(_words(value))) >= 1:
            raise ConfigError(f"--warmup_ratio {value}: below 1, because --warmup_steps counts steps from 1 on")
        if name in RENAMED:
            say(f"--{name} is --{RENAMED[name]} today")
            if RENAMED[name] in values:
                raise ConfigError(f"--{name} and --{RENAMED[name]} both say it; keep the second")
        yield RENAMED.get(name, name), value


def _words(value: Any) -> list[str]:
    """Return a value as words, which the parser reads again."""
    if isinstance(value, list):
        return list(map(str, value))
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _is_true(value: Any) -> bool:
    return "".join(_words(value)).lower() in ("", "true", "yes", "1")


def make_parser() -> Any:
    """Return TRL's parser of its arguments and ours."""
    try:
        import trl

        from fullshard.integrations.transformers import SFTConfig
    except ImportError as error:
        raise MissingExtraError("trl", extra="sft", purpose="fullshard sft") from error

    class Parser(trl.TrlParser):
        def error(self, message: str) -> NoReturn:  # argparse's prints all flags there are, and ends the process
            raise _not_accepted(message)

        def read(self, args: Sequence[str]) -> Any:
            known = {name.removeprefix("--").replace("-", "_") for name in self._option_string_actions}
            for name in (word[2:] for word in args if word.startswith("--")):
                if name not in known:
                    near = closest(name, {*known, *RENAMED, *NO_EFFECT})
                    hint = f"did you mean --{near}?" if near else "fullshard sft --help lists all"
                    raise ConfigError(f"unknown flag --{name}", hint=hint)
            return self.parse_args_into_dataclasses(args)

    groups: Any = (trl.ScriptArguments, OwnArguments, SFTConfig, trl.ModelConfig)
    return Parser(groups, allow_abbrev=False)


def _not_accepted(reason: object) -> ConfigError:
    return ConfigError(f"the settings are not accepted: {reason}")
