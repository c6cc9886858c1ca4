"""The flags of `fullshard sft`: those of the well-known `train.py` for supervised fine-tuning, and TRL's own.

Three groups, as there: the model, the data, and everything of `SFTConfig`. Flags that have another name today are
translated, those without effect say why, each with one line; any other flag is an error.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from fullshard.config.settings import plain_message
from fullshard.config.trackers import require_trackers
from fullshard.config.values import step_range
from fullshard.core.errors import ConfigError, MissingExtraError
from fullshard.core.paths import local_name, require_there


@dataclass
class ModelArguments:
    """The model and its adapters."""

    model_name_or_path: str = field(metadata={"help": "Directory or hub name of the model."})
    chat_template_format: str = field(
        default="none",
        metadata={"help": "chatml or zephyr: how chats are rendered; none: as the model's tokenizer does."},
    )
    use_peft_lora: bool = field(default=False, metadata={"help": "Train LoRA adapters and leave the model frozen."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the adapters, divided by their rank."})
    lora_dropout: float = field(default=0.1, metadata={"help": "Dropout before the adapters."})
    lora_r: int = field(default=64, metadata={"help": "Rank of the adapters."})
    lora_target_modules: str = field(
        default="q_proj,k_proj,v_proj,o_proj,down_proj,up_proj,gate_proj",
        metadata={"help": "Layers that get an adapter, separated by commas, or all-linear."},
    )
    use_4bit_quantization: bool = field(default=False, metadata={"help": "Quantise the frozen model to 4 bits."})
    use_8bit_quantization: bool = field(default=False, metadata={"help": "Quantise the frozen model to 8 bits."})
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "nf4 or fp4."})
    bnb_4bit_compute_dtype: str = field(default="float16", metadata={"help": "What quantised layers compute in."})
    use_nested_quant: bool = field(default=False, metadata={"help": "Quantise the scales, too."})
    use_flash_attn: bool = field(default=False, metadata={"help": "Attention by the package flash-attn."})
    use_reentrant: bool = field(default=False, metadata={"help": "The reentrant form of gradient checkpointing."})
    merge_dir: str | None = field(
        default=None, metadata={"help": "After training, write the model with its adapters merged here."}
    )


@dataclass
class DataArguments:
    """The data."""

    dataset_name: str = field(
        metadata={"help": "A directory with one .jsonl, .json or .parquet per split, such a file, or a hub name."}
    )
    splits: str = field(default="train,test", metadata={"help": "Splits: those named like train, and for evaluation."})


@dataclass
class WatchArguments:
    """The flags that choose what to look at while it trains."""

    profile: bool = field(
        default=False, metadata={"help": "Profile a few steps: a trace per rank and one of all, for Perfetto."}
    )
    profile_steps: str = field(
        default="3-5", metadata={"help": "The steps to profile, counted from the first of this process."}
    )
    memory_timeline: bool = field(
        default=False, metadata={"help": "Write what memory holds through the third step: JSON and a picture."}
    )


NO_EFFECT = {
    "loss_chunk": "TRL computes the loss of some tokens at a time by itself",
    "append_concat_token": "TRL puts the end-of-sequence token between packed texts",
    "add_special_tokens": "TRL's tokenisation decides on special tokens",
    "bnb_4bit_quant_storage_dtype": "quantised weights are sharded as bytes, whatever the dtype around them",
}
OWN = (ModelArguments, DataArguments, WatchArguments)
"""Groups of flags besides TRL's."""
RENAMED = {
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "log_with": "report_to",
    "warmup_ratio": "warmup_steps",  # which below 1 is a share of all steps
}
_REFUSED = {"use_unsloth": "fullshard has an engine of its own", "tokenizer_name": "the model's tokenizer is used"}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True, slots=True)
class SFTArguments:
    """Everything a run is told.

    Attributes:
        model, data, watch: see the classes.
        training: TRL's `SFTConfig`, made for fullshard's engine.
        uses_muon: `--optim muon`, which Transformers does not name.
    """

    model: ModelArguments
    data: DataArguments
    watch: WatchArguments
    training: Any
    uses_muon: bool = False


def read_arguments(words: Sequence[str], say: Callable[[str], None]) -> SFTArguments:
    """Return the arguments on a command line, or in a YAML or JSON file that is its only word.

    Args:
        words: `--name value`, `--name=value` or `--name` for true, `--name value value` where it takes several; `-` and
            `_` are the same.
        say: told in one line what became of a flag that was not plainly used.

    Raises:
        ConfigError: an unknown or refused flag, or a value that is wrong.
        MissingExtraError: without TRL.
    """
    if len(words) == 1 and not words[0].startswith("-"):
        return make_arguments(read_file(Path(words[0])), say)
    return make_arguments(dict(_flags(words, _kinds(_sft_config()))), say)


def make_arguments(values: Mapping[str, Any], say: Callable[[str], None]) -> SFTArguments:
    """Return the arguments from values by flag name; see `read_arguments`."""
    config = _sft_config()
    known = {f.name for cls in (*OWN, config) for f in fields(cls) if f.init}
    taken: dict[str, Any] = {}
    problems = []
    for written, value in values.items():
        name = written.replace("-", "_")
        if name in NO_EFFECT:
            say(f"--{name} has no effect: {NO_EFFECT[name]}")
        elif name in _REFUSED and value is not None and str(value).lower() not in _FALSE:
            problems.append(f"--{name} is not supported: {_REFUSED[name]}")
        elif name in _REFUSED:
            continue
        elif name in RENAMED:
            say(f"--{name} is --{RENAMED[name]} today")
            if RENAMED[name] in values:
                problems.append(f"--{name} and --{RENAMED[name]} both say it; keep the second")
            if name == "warmup_ratio" and _is_whole(value):
                problems.append(f"--warmup_ratio {value}: below 1, because --warmup_steps counts steps from 1 on")
            taken[RENAMED[name]] = value
        elif name in known:
            taken[name] = value
        else:
            problems.append(_unknown(written, known))
    if problems:
        raise ConfigError("\n".join(problems), hint="docs/sft.md says which flags there are")
    if str(taken.get("optim")).lower() != "muon":
        return _parse(taken, config)
    del taken["optim"]
    if taken.get("optim_args") is not None:
        raise ConfigError("--optim_args with --optim muon: they are for Transformers' own optimizers")
    return replace(_parse(taken, config), uses_muon=True)


def _unknown(written: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(written.replace("-", "_"), {*known, *NO_EFFECT, *RENAMED}, n=1)
    return f"unknown flag --{written}" + (f"; did you mean --{near[0]}?" if near else "")


def check_early(values: Mapping[str, Any], places: Mapping[str, object] = MappingProxyType({})) -> None:
    """Check names and paths before any process is started; each process checks the values.

    Args:
        values: by flag name.
        places: where each is written, in a file.

    Raises:
        ConfigError: an unknown flag, a path that does not exist, or no model or data.
    """
    known = {flag.removeprefix("--") for flag in flags()}
    if known <= {f.name for cls in OWN for f in fields(cls)}:
        return  # without TRL, which is said where it is needed
    others = {*known, *NO_EFFECT, *RENAMED, *_REFUSED}
    for written, value in values.items():
        name, place = written.replace("-", "_"), f"{places[written]}: " if written in places else ""
        if name not in others:
            raise ConfigError(place + _unknown(written, known), hint="docs/sft.md says which flags there are")
        if name in _PATHS and isinstance(value, str):
            try:
                require_there(local_name(value))
            except ConfigError as error:
                raise ConfigError(f"{place}--{name}: {plain_message(error)}", hint=error.hint) from None
    if missing := [f"--{name}" for name in _PATHS if name not in {written.replace("-", "_") for written in values}]:
        raise ConfigError(f"{' and '.join(missing)} missing", hint="give a directory or a hub name")


_PATHS = ("model_name_or_path", "dataset_name")


def read_file(path: Path) -> dict[str, Any]:
    """Return the values in a YAML or JSON file. Raises `ConfigError` if it is none."""
    from fullshard.config.document import read_document

    return {entry.key: entry.plain for entry in read_document(path)}


def flags() -> dict[str, str]:
    """Return every flag with a line of help; TRL's are read out of its source: importing it would take seconds."""
    found = {f"--{field.name}": str(field.metadata["help"]) for kind in OWN for field in fields(kind)}
    for package, file in _CONFIG_SOURCES:
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            if (path := Path(place, file)).is_file():
                found |= {f"--{name}": "" for name in _annotated(ast.parse(path.read_bytes()))}
    return found


_CONFIG_SOURCES = (
    ("trl", "trainer/sft_config.py"),
    ("trl", "trainer/base_config.py"),
    ("transformers", "training_args.py"),
)
"""The files of SFTConfig and of the classes that it is made of."""


def _annotated(tree: ast.Module) -> Iterator[str]:
    for made in tree.body:
        for node in made.body if isinstance(made, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                yield node.target.id


def _is_whole(ratio: Any) -> bool:
    """Return whether a ratio would be read as a number of steps. The parser refuses values that are no number."""
    try:
        return float(ratio) >= 1
    except (TypeError, ValueError):
        return False


def _flags(words: Sequence[str], kinds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} belongs to no flag", hint="write --name value")
        name, sign, value = word[2:].partition("=")
        name = name.replace("-", "_")
        position += 1
        if sign:
            yield name, value
            continue
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), words[position:]))
        if not _takes_several(kinds.get(RENAMED.get(name, name))):
            given = given[:1]
        position += len(given)
        yield name, given if len(given) > 1 else given[0] if given else "true"


def _kinds(config: type) -> dict[str, Any]:
    """Return the type of every flag."""
    return {name: kind for cls in (*OWN, config) for name, kind in get_type_hints(cls).items()}


def _takes_several(kind: Any) -> bool:
    return any(get_origin(one) is list for one in (kind, *get_args(kind)))


def _parse(values: Mapping[str, Any], config: type) -> SFTArguments:
    """Parse the values by Transformers' parser, which knows the type of every field."""
    given = {name: value for name, value in values.items() if value is not None}
    reentrant = str(given.get("use_reentrant", "false")).lower() in _TRUE
    given.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": reentrant})
    kinds = _kinds(config)
    several = {name for name, value in given.items() if isinstance(value, list) and _takes_several(kinds[name])}
    parser = _parser(config, several)
    # A null is as if the flag were not there, but for flags that may be nothing: `max_length: null` is no limit.
    empty = {name for name in values.keys() - given.keys() if type(None) in get_args(kinds[name])}
    parser.set_defaults(**dict.fromkeys(empty - {"report_to"}))  # Transformers makes a tracker called None of it
    words = [
        word
        for name, value in given.items()
        for word in (f"--{name}", *(map(str, value) if name in several else [_text(value)]))
    ]
    try:
        model, data, watch, training = parser.parse_args_into_dataclasses(words)
    except ConfigError:
        raise
    except ValueError as error:
        raise _not_accepted(error) from error
    if model.chat_template_format not in ("none", "chatml", "zephyr"):
        raise ConfigError(f"chat_template_format = {model.chat_template_format!r}", hint="use none, chatml or zephyr")
    if (model.use_4bit_quantization or model.use_8bit_quantization) and not model.use_peft_lora:
        raise ConfigError("a quantised model is frozen, so there is nothing to train", hint="add --use_peft_lora True")
    if model.merge_dir is not None and not model.use_peft_lora:
        raise ConfigError(
            "merge_dir without adapters: there is nothing to merge", hint="the whole model is saved to output_dir"
        )
    step_range(watch.profile_steps)
    require_trackers(training.report_to, "--report_to")
    training.resume_from_checkpoint = training.resume_from_checkpoint or None  # empty is not at all, as for Trainer
    for group, names in (
        (model, ("model_name_or_path", "merge_dir")),
        (data, ("dataset_name",)),
        (training, ("output_dir", "resume_from_checkpoint")),
    ):
        for name in names:
            if (written := getattr(group, name)) is not None:
                setattr(group, name, local_name(written))
                if name in _PATHS:
                    require_there(getattr(group, name))
    return SFTArguments(model, data, watch, training)


def _parser(config: type, several: Collection[str]) -> Any:
    """Return Transformers' parser, in which the flags `several` take any number of words."""
    import transformers

    class Parser(transformers.HfArgumentParser):  # type: ignore[misc]
        def add_argument(self, *names: Any, **options: Any) -> Any:
            if names[0].removeprefix("--") in several:
                options["nargs"] = "*"
            return super().add_argument(*names, **options)

        def error(self, message: str) -> NoReturn:  # argparse's prints all flags there are, and ends the process
            raise _not_accepted(message)

    return Parser((*OWN, config), allow_abbrev=False)


def _not_accepted(reason: object) -> ConfigError:
    return ConfigError(f"the settings are not accepted: {reason}")


def _text(value: Any) -> str:
    """Return a value as one word, which the parser reads again."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _sft_config() -> Any:
    try:
        from fullshard.integrations.transformers import SFTConfig
    except ImportError as error:
        raise MissingExtraError("trl", extra="sft", purpose="fullshard sft") from error
    return SFTConfig
