"""The flags of `fullshard sft`: TRL's own, which TRL's parser reads, a few additional flags, and aliases."""

import argparse
import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fullshard.config.origin import Entry
from fullshard.config.schema import GROUPS
from fullshard.config.settings import closest, plain_message
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError
from fullshard.core.imports import import_extra
from fullshard.core.paths import local_name, require_there
from fullshard.launch import cuda


def _flag(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, **({"choices": list(choices)} if choices else {})})


@dataclass
class OwnArguments:
    """The flags that `fullshard sft` adds to TRL's."""

    chat_template_format: str = _flag("none", "Template that renders chats.", "none", "chatml", "zephyr")
    splits: list[str] | None = _flag(None, "Splits for training and evaluation, for example train,test.")  # noqa: RUF009 -- a field
    use_reentrant: bool = _flag(False, "Use the reentrant form of gradient checkpointing.")
    bnb_4bit_compute_dtype: str | None = _flag(None, "Compute dtype of 4-bit layers.")
    use_flash_attn: bool = _flag(False, "Use FlashAttention 2 if it is installed.")
    muon: bool = _flag(False, "Use Muon for matrices, like --optim muon.")
    profile: bool = _flag(False, "Profile steps 3 to 5, and write one trace per rank.")
    eval_split_size: float | None = _flag(None, "Rows to hold out for evaluation: a number, or a share below 1.")
    merge_adapter: bool = _flag(False, "At the end, write base model and adapter as one model to OUTPUT_DIR/merged.")
    entries: Mapping[str, Entry] = field(default_factory=dict, init=False)  # in the file of the arguments


FLAGS = tomllib.loads(Path(__file__).with_name("sft_flags.toml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = FLAGS["renamed"]
NO_EFFECT: dict[str, str] = FLAGS["no_effect"]


class SFTArguments(NamedTuple):
    """Holds all arguments of a run: TRL's three groups and fullshard's own."""

    script: Any
    own: OwnArguments
    training: Any
    model: Any


def read_arguments(words: Sequence[str], say: Callable[[str], None]) -> SFTArguments:
    """Parse a command line, which may begin with a file of arguments. `say` gets a line for each unused flag."""
    parser, entries = make_parser(), dict[str, Entry]()
    if words and not words[0].startswith("-"):
        entries, words = _in_file(Path(words[0]), parser), words[1:]
    for word in words:  # a flag replaces what the file says
        entries.pop(getattr(parser._option_string_actions.get(word.partition("=")[0]), "dest", ""), None)
    with blamed(entries):
        found = _parsed(parser, [*(word for entry in entries.values() for word in _words(entry)), *words], say)
    found.own.entries = entries
    return found


def _parsed(parser: Any, words: Sequence[str], say: Callable[[str], None]) -> SFTArguments:
    try:
        *groups, _, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ConfigError:
        raise
    except ValueError as error:  # from a dataclass
        parser.error(str(error))
    if rest:
        parser.error(f"unknown argument {rest[0]}; {_advice(rest[0], parser)}")
    arguments = SFTArguments(*groups)
    script, own, training, model = arguments
    for name in parser.unused:
        say(f"--{name} has no effect: {NO_EFFECT[name]}")
    if own.use_flash_attn and cuda.is_available() and find_spec("flash_attn") is not None:
        model.attn_implementation = "flash_attention_2"
    elif own.use_flash_attn:
        say("--use_flash_attn has no effect without a CUDA device and the flash-attn package; sdpa is used instead")
    if own.splits is not None:
        names = ",".join(own.splits).split(",")
        train, test = ([name for name in names if ("train" in name) is wanted] for wanted in (True, False))
        script.dataset_train_split, script.dataset_test_split = (train or [names[0]])[0], (test or ["none"])[0]
    if isinstance(model.lora_target_modules, str) and "," in model.lora_target_modules:
        model.lora_target_modules = model.lora_target_modules.split(",")
    if training.gradient_checkpointing_kwargs is None:
        training.gradient_checkpointing_kwargs = {"use_reentrant": own.use_reentrant}
    if model.dtype is None:  # trained weights are float32, frozen ones have the compute dtype
        half = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
        model.dtype = half if model.use_peft else "float32"
    _check(arguments)
    return arguments


def _check(arguments: SFTArguments) -> None:
    script, own, training, model = arguments
    for name, hint in FLAGS["refused"].items():
        if getattr(script, name, None) or getattr(training, name, None):
            raise ConfigError(f"--{name} is not supported", hint=hint)
    if own.muon and training.optim_args:
        raise ConfigError("--optim_args is only for Transformers' own optimizers, but --optim is muon")
    if own.merge_adapter and not model.use_peft:
        raise ConfigError("--merge_adapter needs an adapter", hint="add --use_peft True")
    if own.chat_template_format != "none" and training.chat_template_path is not None:
        raise ConfigError("--chat_template_format and --chat_template_path both set the template", hint="omit one")
    if model.use_peft and not str(training.chat_template_path or ".jinja").endswith((".jinja", ".j2")):
        raise ConfigError("--use_peft needs a .jinja file as --chat_template_path", hint="use its chat_template.jinja")
    require_trackers(training.report_to, "--report_to")
    paths: tuple[Any, ...] = ((model, "model_name_or_path"), (script, "dataset_name"))
    paths += ((training, "chat_template_path"),) if training.chat_template_path is not None else ()
    for group, name in (*paths, (training, "output_dir"), (training, "resume_from_checkpoint")):
        try:
            if (group, name) in paths and getattr(group, name) is None:
                raise ConfigError("this argument is required", hint="use a directory or a hub name")
            if getattr(group, name) is not None:
                setattr(group, name, local_name(getattr(group, name)))
            if (group, name) in paths:
                require_there(getattr(group, name))
        except ConfigError as error:
            raise ConfigError(f"--{name}: {plain_message(error)}", hint=error.hint) from None


def _in_file(path: Path, parser: Any) -> dict[str, Entry]:
    """Return the arguments in a file, by field. Ignore null, except for `max_length`, where it means no limit."""
    from fullshard.config.document import read_document
    from fullshard.config.load import recipe_arguments

    found: dict[str, Entry] = {}
    for entry in recipe_arguments(entries := read_document(path), "sft") or entries:
        if entry.key == "max_length" and entry.value is None:
            parser.set_defaults(max_length=None)
        elif entry.value is None or entry.key in GROUPS:
            continue
        elif (action := parser._option_string_actions.get(f"--{entry.key}")) is None:
            raise ConfigError(f"{entry.origin}: unknown option {entry.key!r}; {_advice(entry.key, parser)}")
        elif (other := found.setdefault(action.dest, entry)).plain != entry.plain:
            raise ConfigError(f"{other.origin} and {entry.origin} contradict each other: {other!r}, {entry!r}")
        else:
            with blamed({entry.key: entry}):
                if parser.parse_known_args(_words(entry))[1]:
                    parser.error(f"--{entry.key} takes one value, got {entry.plain}")
    return found


def _words(entry: Entry) -> list[str]:
    """Return an entry of a file as words of a command line."""
    value = json.dumps(entry.plain) if entry.is_mapping else entry.value
    return [f"--{entry.key}", *map(str, value)] if isinstance(value, list) else [f"--{entry.key}={value}"]


def _advice(word: str, parser: Any) -> str:
    """Return a remedy for an unknown argument, which is a flag or a key in a file."""
    name, dashes = word.removeprefix("--").partition("=")[0], "--" if word.startswith("--") else ""
    if section := next((section for section, model in GROUPS.items() if name in model.model_fields), None):
        return f"put it in the section {section} of a file"
    near = closest(name, [*(action.dest for action in parser._actions), *([] if dashes else GROUPS)], 0.6)
    return f"did you mean {dashes}{near}?" if near else "`fullshard sft --help-all` lists all arguments"


@contextlib.contextmanager
def blamed(entries: Mapping[str, Entry]) -> Iterator[None]:
    """Begin an error within the block with the lines in a file of the arguments that its message names."""
    try:
        yield
    except ConfigError as error:
        named = {name for match in re.findall(r"--(\w+)|`(\w+)`|\b(\w*[_\d]\w*)", str(error)) for name in match}
        lines = " and ".join(str(entry.origin) for field, entry in entries.items() if {field, entry.key} & named)
        raise ConfigError(": ".join(filter(None, (lines, plain_message(error)))), hint=error.hint) from None


def make_parser() -> Any:
    """Return TRL's parser for both TRL's arguments and fullshard's own."""
    trl: Any = import_extra("trl", extra="sft", purpose="fullshard sft")
    from fullshard.integrations.transformers import SFTConfig

    class Parser(trl.TrlParser):  # type: ignore[misc]
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            found, rest = super().parse_known_args(args, namespace)
            if found.optim == "muon":  # Transformers does not support it
                found.muon, found.optim = True, self.get_default("optim")
            if found.eval_strategy is None:
                found.eval_strategy = "no" if found.eval_split_size is None else "epoch"
            self.unused = [name for name in NO_EFFECT if getattr(found, name) is not None]
            return found, rest

        def error(self, message: str) -> NoReturn:  # argparse's prints all flags and exits
            raise ConfigError("invalid settings: " + re.sub(r"argument (--\w+)(/\S+)?:", r"\1:", message))

    def ratio(word: str) -> float:
        if float(word) >= 1:
            raise argparse.ArgumentTypeError(
                "a warmup ratio must be less than 1, because --warmup_steps treats larger values as numbers of steps"
            )
        return float(word)

    groups: Any = (trl.ScriptArguments, OwnArguments, SFTConfig, trl.ModelConfig)
    parser = Parser(groups, allow_abbrev=False)
    known: dict[str, Any] = {name.removeprefix("--"): each for name, each in parser._option_string_actions.items()}
    known["report_to"].nargs = "+"
    known["optim"].choices = [*(known["optim"].choices or ()), "muon"]
    known["optim"].type = str
    parser.set_defaults(dtype=None, eval_strategy=None)
    for old, new in RENAMED.items():
        kind = ratio if old == "warmup_ratio" else known[new].type
        names = (f"--{old}", f"--{old.replace('_', '-')}")
        like = {name: getattr(known[new], name) for name in ("nargs", "const", "choices", "default")}
        parser.add_argument(*names, dest=new, type=kind, help=f"Another name of --{new}.", **like)
    for name, reason in NO_EFFECT.items():
        if name not in known:
            text = f"No effect: {reason}.".replace("%", "%%")
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="", help=text)
        parser.set_defaults(**{name: None})  # None means that it is not given
    return parser
