"""The part of a model that bitsandbytes converts, and when that is less than the user meant."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import format_count


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter holds several matrices, as Transformers keeps those of a layer's experts."""
    return len(shape) == 3 and shape[0] > 1 and "conv" not in name.lower()


@dataclass(slots=True)
class Conversion:
    """Elements of a model's own parameters, as they are before quantisation; adapters are not counted.

    Attributes:
        is_asked_for: whether the whole model was to be quantised, not single layers.
        converted: in few bits.
        whole: in 16 or 32 bits.
        tables: of `whole`, embeddings and the head, which bitsandbytes leaves alone in every model.
        stacked: of `whole`, matrices stacked in one parameter.
        accepted: of `whole`, parameters that are no table and that the user excluded.
        unadapted: frozen and stacked, whole or not, without an adapter.
    """

    is_asked_for: bool = False
    converted: int = 0
    whole: int = 0
    tables: int = 0
    stacked: int = 0
    accepted: int = 0
    unadapted: int = 0

    def add_whole(self, name: str, shape: tuple[int, ...], *, is_table: bool, is_accepted: bool = False) -> None:
        """Count a parameter that is not converted."""
        numel = math.prod(shape)
        self.whole += numel
        self.tables += numel * is_table
        self.stacked += numel * is_stacked(name, shape)
        self.accepted += numel * (is_accepted and not is_table)

    @property
    def said(self) -> str:
        """Say what stays in 16 or 32 bits, and why, in one line."""
        total = self.converted + self.whole
        text = (
            f"{self.whole / total:.0%} of the weights ({format_count(self.whole)} of {format_count(total)}) stay in 16 "
            "or 32 bits, because bitsandbytes converts nn.Linear only, the head left out"
        )
        if self.stacked:
            text += f": {format_count(self.stacked)} are experts, stacked in 3-D parameters"
        return text

    @property
    def said_of_adapters(self) -> str:
        """Say which weights have no adapter, and why; empty if all have one."""
        if not self.unadapted:
            return ""
        return (
            f"{format_count(self.unadapted)} weights of experts have no adapter and are not trained: target_modules, "
            "all-linear included, reaches nn.Linear only, and experts are stacked in 3-D parameters"
        )

    def require(self) -> None:
        """Refuse a quantised model if most of it, tables left out, is not quantised."""
        if self.is_asked_for and self.whole - self.tables - self.accepted > self.converted:
            raise ConfigError(
                f"the model was to be quantised, and {self.said}",
                hint="train adapters without quantisation, sharded over more ranks; or load with Transformers' own "
                "from_pretrained and convert the experts with bitsandbytes.nn.parametrize.replace_parameter_4bit; "
                "llm_int8_skip_modules=['lm_head', 'experts'] accepts it as it is",
            )
