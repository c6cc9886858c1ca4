"""The flags of `fullshard sft`: TRL's own, which TRL's parser reads, a few additional flags, and aliases."""

import argparse
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fullshard.config.schema import GROUPS
from fullshard.config.settings import closest, plain_message
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError, MissingExtraError
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


_FLAGS = tomllib.loads(Path(__file__).with_name("sft_flags.toml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = _FLAGS["renamed"]
NO_EFFECT: dict[str, str] = _FLAGS["no_effect"]


class SFTArguments(NamedTuple):
    """Holds all arguments of a run: TRL's three groups and fullshard's own."""

    script: Any
    own: OwnArguments
    training: Any
    model: Any


def read_arguments(words: Sequence[str], say: Callable[[str], None]) -> SFTArguments:
    """Parse a command line. If it begins with the path of a YAML or JSON file, read the arguments from the file first.

    Call `say` with a one-line explanation for each flag that has no effect.
    """
    parser = make_parser()
    if words and not words[0].startswith("-"):
        words = [*_in_file(Path(words[0]), parser), *words[1:]]
    try:
        *groups, unused, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ConfigError:
        raise
    except ValueError as error:  # from a dataclass
        parser.error(str(error))
    if rest:
        near = closest(rest[0], [action.dest for action in parser._actions]) if rest[0].startswith("--") else None
        parser.error(
            f"unknown argument {rest[0]}; "
            + (f"did you mean --{near}?" if near else "`fullshard sft --help` lists all arguments")
        )
    arguments = SFTArguments(*groups)
    script, own, training, model = arguments
    for name in NO_EFFECT:
        if getattr(unused, name, getattr(script, name, None)) is not None:
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
    if script.dataset_streaming:
        raise ConfigError("--dataset_streaming is not supported", hint="use a dataset that fits on the disk")
    if own.muon and training.optim_args:
        raise ConfigError("--optim_args is only for Transformers' own optimizers, but --optim is muon")
    require_trackers(training.report_to, "--report_to")
    paths = ((model, "model_name_or_path"), (script, "dataset_name"))
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


def _in_file(path: Path, parser: Any) -> list[str]:
    """Convert a file to arguments. Ignore keys with null, except for `max_length`, where null means no limit."""
    from fullshard.config.document import read_document
    from fullshard.config.load import recipe_arguments

    words: list[str] = []
    entries = read_document(path)
    for entry in recipe_arguments(entries, "sft") or entries:
        value = entry.plain
        if entry.key == "max_length" and value is None:  # for max_length, null means no limit in TRL
            parser.set_defaults(max_length=None)
        elif value is not None and entry.key not in GROUPS:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{entry.key}", *map(str, values)]
    return words


def make_parser() -> Any:
    """Return TRL's parser for both TRL's arguments and fullshard's own."""
    try:
        import trl

        from fullshard.integrations.transformers import SFTConfig
    except ImportError as error:
        raise MissingExtraError("trl", extra="sft", purpose="fullshard sft") from error

    class Parser(trl.TrlParser):
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            found, rest = super().parse_known_args(args, namespace)
            if found.optim == "muon":  # Transformers does not support it
                found.muon, found.optim = True, self.get_default("optim")
            return found, rest

        def error(self, message: str) -> NoReturn:  # argparse's prints all flags and exits
            raise ConfigError(f"invalid settings: {message}")

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
    parser.set_defaults(dtype=None)
    for old, new in RENAMED.items():
        kind = ratio if old == "warmup_ratio" else known[new].type
        names = dict.fromkeys((f"--{old}", f"--{old.replace('_', '-')}"))
        like = {name: getattr(known[new], name) for name in ("nargs", "const", "choices", "default")}
        parser.add_argument(*names, dest=new, type=kind, help=f"Another name of --{new}.", **like)
    for name, reason in NO_EFFECT.items():
        if name in known:  # a flag of TRL: None means that it is not given
            parser.set_defaults(**{name: None})
            continue
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, nargs="?", const="", help=f"No effect: {reason}.".replace("%", "%%"))
    return parser
