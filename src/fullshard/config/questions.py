"""The questionnaire of `fullshard config` as data: what is asked, when, what may be answered and what it sets.

No terminal here: `Interview` keeps the answers and knows the next question, `cli/config_questions` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.config import values
from fullshard.config.hardware import Hardware
from fullshard.config.schema import RunConfig
from fullshard.config.settings import SettingsError, plain_message
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path
from fullshard.core.sizes import GIB

Settings = Mapping[str, Any]

BACK = object()
"""Value of a choice that takes the last answer back."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a question.

    Attributes:
        value: the answer.
        title: what is shown, in words.
    """

    value: Any
    title: str


@dataclass(slots=True)
class Answers:
    """What is known while asking.

    Attributes:
        hardware: of this host.
        given: answers by the name of their question.
    """

    hardware: Hardware
    given: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    @property
    def num_processes(self) -> int | None:
        """Processes of the job; None if the launcher shall count devices."""
        number: int | None = self["num_processes"]
        return number

    @property
    def num_machines(self) -> int:
        """Hosts of the job."""
        return self["num_machines"] or 1


def _always(_: Answers) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        name: its key among the answers.
        text: what is asked.
        choices: the answers to choose from, the recommended one first; None for a text.
        default: the text that is offered.
        read: turns a text into the answer; a `ValueError` or `ConfigError` says why it is not one.
        when: whether it is asked.
        settings: what the answer sets, by path.
    """

    name: str
    text: str
    choices: Callable[[Answers], Sequence[Choice]] | None = None
    default: Callable[[Answers], str] = lambda _: ""
    read: Callable[[str, Answers], Any] = lambda text, _: text
    when: Callable[[Answers], bool] = _always
    settings: Callable[[Any, Answers], Settings] = lambda _value, _answers: {}


class Interview:
    """Asks question by question; answers can be taken back.

    Args:
        hardware: of this host.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.answers = Answers(hardware)
        self._asked: list[Question] = []

    def next(self) -> Question | None:
        """The first question that has to be asked and is not answered; None when all are."""
        given = self.answers.given
        return next((q for q in QUESTIONS if q.name not in given and q.when(self.answers)), None)

    def answer(self, question: Question, answer: Any) -> None:
        """Keep an answer: the value of a choice, or the text that was typed.

        Raises:
            ConfigError, ValueError: it is not an answer, or does not go with the earlier ones; nothing is kept.
        """
        value = answer if question.choices is not None else question.read(answer, self.answers)
        self.answers.given[question.name] = value
        try:
            self.config()
        except SettingsError as error:
            del self.answers.given[question.name]
            raise ConfigError(error.faults[0].message, hint=error.faults[0].hint) from None
        self._asked.append(question)

    def fault(self, question: Question, answer: Any) -> str | None:
        """Why something is not an answer to a question, in words; None if it is one. Nothing is kept."""
        try:
            self.answer(question, answer)
        except (ConfigError, ValueError) as error:
            hint = getattr(error, "hint", None)
            return plain_message(error) + (f"; {hint}" if hint else "")
        self.back()
        return None

    def back(self) -> bool:
        """Take back the last answer; False if there is none."""
        if not self._asked:
            return False
        del self.answers.given[self._asked.pop().name]
        return True

    def config(self) -> RunConfig:
        """The configuration of the answers so far.

        Raises:
            SettingsError: they do not go together.
        """
        answered: dict[str, Any] = {}
        for question in QUESTIONS:
            if question.name in self.answers.given and question.when(self.answers):
                answered |= question.settings(self.answers[question.name], self.answers)
        return RunConfig.of_paths(answered)


def hardware_words(hardware: Hardware) -> str:
    """What was found, in one line."""
    cpu = f"{hardware.cpu_count} processor" + ("s" if hardware.cpu_count != 1 else "")
    memory = f", {hardware.memory_nbytes / GIB:.0f} GiB of memory" if hardware.memory_nbytes else ""
    names = [
        device.name + (f" ({device.memory_nbytes / GIB:.0f} GiB)" if device.memory_nbytes else "")
        for device in hardware.accelerators
    ]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{counts or 'no accelerator'}; {cpu}{memory}"


def _sets(path: str) -> Callable[[Any, Answers], Settings]:
    return lambda value, _: {path: value}


def _yes_no(yes: str, no: str, *, recommend: bool = False) -> Callable[[Answers], Sequence[Choice]]:
    both = [Choice(True, yes), Choice(False, no)]
    return lambda _: both if recommend else both[::-1]


def _devices(answers: Answers) -> Sequence[Choice]:
    found = answers.hardware.accelerators
    cuda = Choice(
        "cuda", "NVIDIA GPUs" + (f": {len(found)} on this host" if found else ", on other machines than this")
    )
    cpu = Choice("cpu", f"processors: {answers.hardware.cpu_count} on this host")
    auto = Choice("auto", "whatever the machine has when the job starts")
    return [cuda, cpu, auto] if found else [cpu, cuda, auto]


def _recommended_processes(answers: Answers) -> int | None:
    """One per device; on processors two, because one shards nothing. None where only the launcher can count."""
    hardware, hosts = answers.hardware, answers.num_machines
    if answers["device"] == "cpu":
        return min(2, hardware.cpu_count) * hosts
    return len(hardware.accelerators) * hosts or None


def _read_processes(text: str, answers: Answers) -> int | None:
    if text.strip().lower() in ("", "auto"):
        return None
    number = _positive(text)
    if number % answers.num_machines:
        raise ValueError(f"it is the total over {answers.num_machines} hosts, and {number} is not a multiple of that")
    return number


def _positive(text: str, _: Answers | None = None) -> int:
    number = values.integer(text)
    if number < 1:
        raise ValueError(f"expected 1 or more, got {number}")
    return number


def _read_restarts(text: str, _: Answers) -> int:
    number = values.integer(text)
    if number < 0:
        raise ValueError(f"expected 0 or more, got {number}")
    return number


def _read_port(text: str, _: Answers) -> int:
    number = values.integer(text)
    if not 1 <= number <= 65535:
        raise ValueError(f"expected a port from 1 to 65535, got {number}")
    return number


def _read_address(text: str, _: Answers) -> str | None:
    address = text.strip()
    if len(address.split()) > 1 or "/" in address:
        raise ValueError(f"expected one host name or IP address, got {text!r}")
    return address or None


def _read_classes(text: str, _: Answers) -> tuple[str, ...]:
    names = values.names(text)
    wrong = [name for name in names if not name.isidentifier()]
    if wrong or not names:
        raise ValueError(f"expected class names such as LlamaDecoderLayer, with commas between, got {text!r}")
    return names


def _read_shard_size(text: str, answers: Answers) -> int:
    size = _positive(text)
    total = answers.num_processes
    if total is not None and total % size:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ValueError(f"{size} does not divide the {total} processes; use one of {fitting}")
    return size


def _precisions(answers: Answers) -> Sequence[Choice]:
    bf16 = Choice("bf16", "bf16: computes in bfloat16, keeps float32 weights and optimizer state")
    fp16 = Choice("fp16", "fp16: computes in float16 with a scaled loss; for GPUs without bfloat16")
    fp32 = Choice("fp32", "fp32: everything in float32")
    kept = Choice("no", "as the model has them: no dtype is changed")
    if answers["device"] == "cpu":
        return [fp32, bf16, kept]
    slow = any(not device.computes_bfloat16 for device in answers.hardware.accelerators)
    return [fp16, fp32, kept, bf16] if slow else [bf16, fp16, fp32, kept]


def _strategies(answers: Answers) -> Sequence[Choice]:
    found = [
        Choice("FULL_SHARD", "FULL_SHARD (ZeRO-3): shards weights, gradients and optimizer state; least memory"),
        Choice("SHARD_GRAD_OP", "SHARD_GRAD_OP (ZeRO-2): keeps weights whole from forward to backward; less traffic"),
    ]
    if answers.num_processes is None or answers.num_processes >= 4:
        found += [
            Choice("HYBRID_SHARD", "HYBRID_SHARD: FULL_SHARD in groups, copies across them; for slow links of hosts"),
            Choice("HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2: the same with SHARD_GRAD_OP in each group"),
        ]
    return [*found, Choice("NO_SHARD", "NO_SHARD (DDP): every rank holds all; for models that fit many times over")]


def _is_hybrid(answers: Answers) -> bool:
    return str(answers["strategy"]).startswith("HYBRID")


def _recommended_shard_size(answers: Answers) -> str:
    if answers.num_processes is None:
        return str(max(1, len(answers.hardware.accelerators)))
    per_host = answers.num_processes // answers.num_machines
    return str(per_host if answers.num_machines > 1 else max(1, per_host // 2))


def _wraps(answers: Answers) -> Sequence[Choice]:
    found = [
        Choice("auto", "automatic: the model's own list of layers, and all repeated blocks"),
        Choice("class", "the modules of classes that I name"),
        Choice("size", "by number of parameters"),
    ]
    if not answers["activation_checkpointing"]:
        found.append(Choice("none", "the whole model as one unit: saves no memory while it runs"))
    return found


def _read_path(text: str, _: Answers) -> Path:
    path = local_path(text.strip())
    if not text.strip() or path.is_dir():
        raise ValueError(f"expected the name of a file, got {text!r}")
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"expected a name that ends in .yaml, got {text!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    return path


def _shards(answers: Answers) -> bool:
    return answers["strategy"] != "NO_SHARD" and answers.num_processes != 1


def _advanced(answers: Answers) -> bool:
    return bool(answers["advanced"])


def _several_hosts(answers: Answers) -> bool:
    return answers.num_machines > 1


_STATE_DICTS = [
    Choice("SHARDED_STATE_DICT", "one part per rank: fast, and loads at any number of ranks"),
    Choice("LOCAL_STATE_DICT", "the same; get_state_dict returns what a rank holds"),
    Choice("FULL_STATE_DICT", "whole weights besides: gathered on rank 0, slower, needs memory there"),
]
_PREFETCHES = [
    Choice("BACKWARD_PRE", "before this unit's gradients are computed: fastest"),
    Choice("BACKWARD_POST", "after: one unit less in memory"),
    Choice("NO_PREFETCH", "never: least memory"),
]

QUESTIONS: tuple[Question, ...] = (
    Question("device", "What will the job run on?", _devices, settings=_sets("launch.device")),
    Question(
        "num_machines",
        "How many hosts?",
        default=lambda _: "1",
        read=_positive,
        settings=_sets("launch.num_machines"),
    ),
    Question(
        "num_processes",
        "How many processes over all hosts? (one per device; auto: count when the job starts)",
        default=lambda answers: str(_recommended_processes(answers) or "auto"),
        read=_read_processes,
        settings=_sets("launch.num_processes"),
    ),
    Question(
        "main_process_ip",
        "Address of the first host? (empty: given with --main_process_ip, or by Slurm)",
        read=_read_address,
        when=_several_hosts,
        settings=_sets("launch.main_process_ip"),
    ),
    Question(
        "main_process_port",
        "Port there that the other hosts can reach?",
        default=lambda _: "29500",
        read=_read_port,
        when=_several_hosts,
        settings=_sets("launch.main_process_port"),
    ),
    Question("precision", "Which precision?", _precisions, settings=_sets("precision.mode")),
    Question(
        "strategy",
        "How shall the model be divided?",
        _strategies,
        when=lambda answers: answers.num_processes != 1,
        settings=lambda value, answers: (
            {} if _is_hybrid(answers) and "shard_size" not in answers.given else {"sharding.strategy": value}
        ),
    ),
    Question(
        "shard_size",
        "Ranks per shard group? (usually the devices of one host)",
        default=_recommended_shard_size,
        read=_read_shard_size,
        when=_is_hybrid,
        settings=_sets("sharding.shard_size"),
    ),
    Question(
        "activation_checkpointing",
        "Recompute activations in backward? (activation checkpointing)",
        _yes_no(
            "yes: much less memory for long inputs, about a third more computation",
            "no: fastest, if the activations fit",
        ),
        settings=_sets("sharding.activation_checkpointing"),
    ),
    Question(
        "wrap",
        "Which modules are the units that are gathered one at a time?",
        _wraps,
        settings=lambda value, answers: (
            {}
            if value in ("class", "size") and not {"wrap_classes", "wrap_min_numel"} & answers.given.keys()
            else {"sharding.wrap": value}
        ),
    ),
    Question(
        "wrap_classes",
        "Their class names? (for example LlamaDecoderLayer; commas between several)",
        read=_read_classes,
        when=lambda answers: answers["wrap"] == "class",
        settings=_sets("sharding.wrap_classes"),
    ),
    Question(
        "wrap_min_numel",
        "Parameters a unit has at least? (for example 1e8)",
        default=lambda _: "1e8",
        read=_positive,
        when=lambda answers: answers["wrap"] == "size",
        settings=_sets("sharding.wrap_min_numel"),
    ),
    # Not asked: cpu_offload, which is slow on accelerators and saves nothing on processors.
    Question(
        "state_dict_type",
        "What shall a saved model be?",
        lambda _: _STATE_DICTS,
        when=_shards,
        settings=_sets("checkpoint.state_dict_type"),
    ),
    Question(
        "gradient_accumulation_steps",
        "Micro-batches per optimizer step? (gradient accumulation)",
        default=lambda _: "1",
        read=_positive,
        settings=_sets("training.gradient_accumulation_steps"),
    ),
    Question("advanced", "See the advanced questions?", _yes_no("yes", "no: the defaults are right for most")),
    Question(
        "backward_prefetch",
        "When is the next unit gathered in backward?",
        lambda _: _PREFETCHES,
        when=lambda answers: _advanced(answers) and _shards(answers),
        settings=_sets("sharding.backward_prefetch"),
    ),
    Question(
        "compile",
        "Compile every unit with torch.compile?",
        _yes_no("yes: faster steps, slower start", "no"),
        when=_advanced,
        settings=_sets("sharding.compile"),
    ),
    Question(
        "cpu_ram_efficient_loading",
        "Shall from_pretrained read weights on one rank of each host only?",
        _yes_no("yes: a large model is in host memory once", "no"),
        when=_advanced,
        settings=_sets("sharding.cpu_ram_efficient_loading"),
    ),
    Question(
        "max_restarts",
        "How often are all processes started again after one failed?",
        default=lambda _: "0",
        read=_read_restarts,
        when=_advanced,
        settings=_sets("launch.max_restarts"),
    ),
    Question(
        "log_dir",
        "Folder for a log file per rank? (empty: none)",
        read=lambda text, _: text.strip() or None,
        when=_advanced,
        settings=_sets("launch.log_dir"),
    ),
    Question(
        "debug",
        "Check collectives against one another while running?",
        _yes_no("yes: finds ranks that disagree, slow", "no"),
        when=_advanced,
        settings=_sets("launch.debug"),
    ),
    Question(
        "form",
        "In whose words shall the file be?",
        lambda _: [
            Choice("fullshard", "fullshard's YAML, with every setting explained"),
            Choice("accelerate", "Accelerate's YAML, which both tools read"),
        ],
        when=_advanced,
    ),
    Question("path", "Which file shall be written?", default=lambda _: "fullshard.yaml", read=_read_path),
    Question(
        "overwrite",
        "That file exists already. Replace it?",
        lambda _: [Choice(BACK, "no: name another one"), Choice(True, "yes: what is in it is lost")],
        when=lambda answers: answers["path"] is not None and answers["path"].exists(),
    ),
)
