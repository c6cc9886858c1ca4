"""The questionnaire of `fullshard config` as data: each question, its condition, its answers and its settings.

No terminal here: `Interview` keeps the answers and knows the next question, `cli/config_questions` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.config import values
from fullshard.config.hardware import Hardware
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.settings import About, SettingsError, plain_message
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path
from fullshard.core.sizes import GIB
from fullshard.core.strategy import STRATEGIES

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
    """The facts that are known while asking.

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
        """Number of processes of the job; None if the launcher shall count devices."""
        number: int | None = self["num_processes"]
        return number

    @property
    def num_machines(self) -> int:
        """Number of hosts of the job."""
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
    """An interview, question by question; answers can be taken back.

    Args:
        hardware: of this host.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.answers = Answers(hardware)
        self._asked: list[Question] = []

    def next(self) -> Question | None:
        """Return the first question that must be asked and is not answered; None when all are."""
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
        """Say why something is not an answer to a question; None if it is one. Keep nothing."""
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
        """Return the configuration of the answers so far.

        Raises:
            SettingsError: they do not go together.
        """
        answered: dict[str, Any] = {}
        for question in QUESTIONS:
            if question.name in self.answers.given and question.when(self.answers):
                answered |= question.settings(self.answers[question.name], self.answers)
        return RunConfig.of_paths(answered)


def hardware_words(hardware: Hardware) -> str:
    """Describe the hardware found, in one line."""
    cpu = f"{hardware.cpu_count} processor" + ("s" if hardware.cpu_count != 1 else "")
    memory = f", {hardware.memory_nbytes / GIB:.0f} GiB of memory" if hardware.memory_nbytes else ""
    names = [
        device.name + (f" ({device.memory_nbytes / GIB:.0f} GiB)" if device.memory_nbytes else "")
        for device in hardware.accelerators
    ]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{counts or 'no accelerator of NVIDIA or AMD'}; {cpu}{memory}"


def _ask(
    path: str, *, name: str = "", offer: Callable[[Answers], Sequence[Any]] | None = None, **particular: Any
) -> Question:
    """Return the question about a setting, in the schema's words.

    Args:
        path: the setting.
        name: of the answer, if the setting's own says too little.
        offer: which of its values to offer, the recommended one first; all by default.
        particular: fields of the `Question` that do not follow from the setting.
    """
    setting = SETTINGS[path]
    about = About.of(setting)
    usual = "" if setting.default in (None, ()) else str(setting.default)

    def choices(answers: Answers) -> Sequence[Choice]:
        return [Choice(value, about.answers[value]) for value in (offer(answers) if offer else about.answers)]

    question = Question(
        name or path.split(".")[1],
        about.ask,
        choices if about.answers else None,
        lambda _: usual,
        _reader(path),
        settings=lambda value, _: {path: value},
    )
    return replace(question, **particular)


def _reader(path: str) -> Callable[[str, Answers], Any]:
    """Return a reader for a text or a whole number within the bounds of a setting."""
    setting = SETTINGS[path]
    least = next((bound.ge for bound in setting.metadata if hasattr(bound, "ge")), None)

    def read(text: str, _: Answers) -> Any:
        if least is None:
            return text.strip() or None
        number = values.integer(text)
        if number < least:
            raise ValueError(f"expected {least} or more, got {number}")
        return number

    return read


def _devices(answers: Answers) -> Sequence[Choice]:
    found = answers.hardware.accelerators
    where = {
        "cuda": f": {len(found)} on this host" if found else ", on other machines than this",
        "cpu": f": {answers.hardware.cpu_count} on this host",
    }
    titles = About.of(SETTINGS["launch.device"]).answers
    return [
        Choice(device, titles[device] + where.get(device, ""))
        for device in (("cuda", "cpu", "auto") if found else ("cpu", "cuda", "auto"))
    ]


def _recommended_processes(answers: Answers) -> int | None:
    """Return one process per device; two on processors, as one shards nothing. None if only the launcher can count."""
    hardware, hosts = answers.hardware, answers.num_machines
    if answers["device"] == "cpu":
        return min(2, hardware.cpu_count) * hosts
    return len(hardware.accelerators) * hosts or None


def _read_processes(text: str, answers: Answers) -> int | None:
    if text.strip().lower() in ("", "auto"):
        return None
    number: int = _reader("launch.num_processes")(text, answers)
    if number % answers.num_machines:
        raise ValueError(f"it is the total over {answers.num_machines} hosts, and {number} is not a multiple of that")
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
    size: int = _reader("sharding.shard_size")(text, answers)
    total = answers.num_processes
    if total is not None and total % size:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ValueError(f"{size} does not divide the {total} processes; use one of {fitting}")
    return size


def _precisions(answers: Answers) -> Sequence[str]:
    if answers["device"] == "cpu":
        return "fp32", "bf16", "no"
    slow = any(not device.computes_bfloat16 for device in answers.hardware.accelerators)
    return ("fp16", "fp32", "no", "bf16") if slow else ("bf16", "fp16", "fp32", "no")


def _strategies(answers: Answers) -> Sequence[str]:
    is_large = answers.num_processes is None or answers.num_processes >= 4
    names = About.of(SETTINGS["sharding.strategy"]).answers
    return [name for name in names if is_large or not STRATEGIES[name].is_hybrid]


def _is_hybrid(answers: Answers) -> bool:
    return "strategy" in answers.given and STRATEGIES[answers["strategy"]].is_hybrid


def _recommended_shard_size(answers: Answers) -> str:
    if answers.num_processes is None:
        return str(max(1, len(answers.hardware.accelerators)))
    per_host = answers.num_processes // answers.num_machines
    return str(per_host if answers.num_machines > 1 else max(1, per_host // 2))


def _wraps(answers: Answers) -> Sequence[str]:
    return ("auto", "class", "size") if answers["activation_checkpointing"] else ("auto", "class", "size", "none")


def _read_path(text: str, _: Answers) -> Path:
    if not text.strip() or (path := local_path(text.strip())).is_dir():
        raise ValueError(f"expected the name of a file, got {text!r}")
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"expected a name that ends in .yaml, got {text!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    return path


def _shards(answers: Answers) -> bool:
    return STRATEGIES[answers.given.get("strategy", "FULL_SHARD")].shards and answers.num_processes != 1


def _advanced(answers: Answers) -> bool:
    return bool(answers["advanced"])


def _several_hosts(answers: Answers) -> bool:
    return answers.num_machines > 1


QUESTIONS: tuple[Question, ...] = (
    _ask("launch.device", choices=_devices),
    _ask("launch.num_machines"),
    _ask(
        "launch.num_processes",
        default=lambda answers: str(_recommended_processes(answers) or "auto"),
        read=_read_processes,
    ),
    _ask("launch.main_process_ip", read=_read_address, when=_several_hosts),
    _ask("launch.main_process_port", default=lambda _: "29500", read=_read_port, when=_several_hosts),
    _ask("precision.mode", name="precision", offer=_precisions),
    _ask(
        "sharding.strategy",
        offer=_strategies,
        when=lambda answers: answers.num_processes != 1,
        settings=lambda value, answers: (
            {} if _is_hybrid(answers) and "shard_size" not in answers.given else {"sharding.strategy": value}
        ),
    ),
    _ask("sharding.shard_size", default=_recommended_shard_size, read=_read_shard_size, when=_is_hybrid),
    _ask("sharding.activation_checkpointing"),
    _ask(
        "sharding.wrap",
        offer=_wraps,
        settings=lambda value, answers: (
            {}
            if value in ("class", "size") and not {"wrap_classes", "wrap_min_numel"} & answers.given.keys()
            else {"sharding.wrap": value}
        ),
    ),
    _ask("sharding.wrap_classes", read=_read_classes, when=lambda answers: answers["wrap"] == "class"),
    _ask("sharding.wrap_min_numel", default=lambda _: "1e8", when=lambda answers: answers["wrap"] == "size"),
    # Not asked: cpu_offload, which is slow on accelerators and saves nothing on processors.
    _ask("checkpoint.state_dict_type", when=_shards),
    _ask("training.gradient_accumulation_steps"),
    Question(
        "advanced",
        "See the advanced questions?",
        lambda _: [Choice(False, "no: the defaults are right for most"), Choice(True, "yes")],
    ),
    _ask("sharding.backward_prefetch", when=lambda answers: _advanced(answers) and _shards(answers)),
    _ask("sharding.compile", when=_advanced),
    _ask("sharding.cpu_ram_efficient_loading", when=_advanced),
    _ask("training.nonfinite_gradients", offer=lambda _: ("raise", "skip", "off"), when=_advanced),
    _ask("launch.max_restarts", when=_advanced),
    _ask("launch.log_dir", when=_advanced),
    _ask("launch.debug", when=_advanced),
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
