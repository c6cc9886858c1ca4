"""Count how much of a model is quantized, and raise an error if it is much less than the user asked for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import format_count

TABLES = "embeddings"
_FEW = 16
"""A matrix with fewer rows or columns than this is small."""


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter stacks several matrices, such as experts, in a separate dim or (DBRX) in rows."""
    *modules, attribute = name.lower().split(".")
    if len(shape) == 2:
        return "experts" in modules and attribute != "weight" and "bias" not in attribute
    return len(shape) == 3 and (shape[0] > 1 or "experts" in modules) and "conv" not in name.lower()


def why_small(name: str, shape: tuple[int, ...]) -> str:
    """Return the reason why a weight (a small one, or a router's) is not worth quantizing, or an empty string."""
    if len(shape) < 2 or math.prod(shape) // max(1, *shape) < _FEW:
        return "small ones"
    modules = name.split(".")[:-1]
    return "routers" if "router" in modules or modules[-1:] == ["gate"] else ""


def shares(part: Mapping[str, int], whole: int) -> str:
    """Return a text that lists each part with its number of elements and its share of the whole."""
    each = (f"{what} {format_count(numel)} ({numel / max(1, whole):.1%})" for what, numel in part.items())
    return ", ".join(each) or "nothing"


@dataclass(slots=True)
class Conversion:
    """Counts of the quantized and the other elements of a model, before quantization and without adapters."""

    is_asked_for: bool = False  # whether the user asked to quantize the complete model, and not only single layers
    converted: int = 0  # quantized elements in bitsandbytes' layers
    at_rest: int = 0  # elements that fullshard stores in the form `form` and decodes for use, in layers of any type
    whole: int = 0  # elements that stay in 16 or 32 bits
    tables: int = 0  # the part of `whole` in embeddings and the head, which bitsandbytes never converts
    stacked: int = 0  # the part of `whole` in parameters that stack several matrices
    accepted: int = 0  # the part of `whole` that the user excluded, without embeddings and the head
    unadapted: int = 0  # frozen, stacked elements without an adapter, quantized or not
    form: str = ""
    left: dict[str, int] = field(default_factory=dict)  # the elements of `whole` by reason or by name

    def add_whole(
        self, name: str, shape: tuple[int, ...], reason: str, *, is_table: bool, is_accepted: bool = False
    ) -> None:
        """Count a parameter that stays in 16 or 32 bits for the given reason."""
        numel = math.prod(shape)
        self.left[reason] = self.left.get(reason, 0) + numel
        self.whole += numel
        self.tables += numel * is_table
        self.stacked += numel * is_stacked(name, shape)
        self.accepted += numel * (is_accepted and not is_table)

    @property
    def said(self) -> str:
        """A message that states how much of the model stays in 16 or 32 bits, and why."""
        total = self.converted + self.at_rest + self.whole
        text = f"{self.whole / total:.0%} of the weights ({format_count(self.whole)} of {format_count(total)}) stay in "
        left = f"; left as they are: {shares(self.left, total)}"
        if self.at_rest:
            what = "the others" if self.converted == 0 else f"{format_count(self.at_rest)} without such a layer"
            text += f"16 or 32 bits; {what} are {self.form} at rest and in messages, and decoded for use"
            layers = f"; {format_count(self.converted)} are in bitsandbytes' layers" if self.converted else ""
            return text + layers + left
        text += "16 or 32 bits, because bitsandbytes only converts nn.Linear, except the head"
        if self.stacked:
            text += f": {format_count(self.stacked)} are experts, stacked in 3-D parameters"
        return text + left

    @property
    def said_of_adapters(self) -> str:
        """A message that states how many weights have no adapter, and why. It is empty if there are none."""
        if not self.unadapted:
            return ""
        return (
            f"{format_count(self.unadapted)} weights of experts have no adapter and are not trained: PEFT's "
            "target_modules do not reach them; target_parameters does"
        )

    def require(self) -> None:
        """Raise `ConfigError` if most of the weights to quantize, without tables and excluded ones, are unquantized."""
        if self.is_asked_for and self.whole - self.tables - self.accepted > self.converted + self.at_rest:
            raise ConfigError(
                f"the model was supposed to be quantized, but {self.said}",
                hint=(
                    "freeze the weights with requires_grad_(False) to quantize them at rest, or accept the model as "
                    "it is with llm_int8_skip_modules=['lm_head', 'experts']"
                ),
            )
