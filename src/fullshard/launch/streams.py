"""The meaning of `--log_dir`, `--tee` and `--redirects`, as torchrun has it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.errors import ConfigError

STREAMS = ("stdout", "stderr")
_BITS = {"stdout": 1, "stderr": 2}
_SELECTION = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The destinations of streams.

    Attributes:
        directory: for files; None writes none.
        tee: per local rank, 1 for stdout + 2 for stderr: those go to a file and to the terminal.
        redirects: the same, for those that go to a file only.
    """

    directory: Path | None = None
    tee: str | None = None
    redirects: str | None = None

    def __post_init__(self) -> None:
        for name in ("tee", "redirects"):
            text = getattr(self, name)
            if text is not None and not _SELECTION.fullmatch(text):
                raise ConfigError(
                    f"--{name}: expected 0 to 3, or RANK:0..3 separated by commas, got {text!r}",
                    hint="1 is standard output, 2 standard error, 3 both; 0:3,1:1 names local ranks",
                )
            if text is not None and self.directory is None:
                raise ConfigError(f"--{name} writes files", hint="say where with --log_dir DIRECTORY")

    def of(self, local_rank: int, stream: str) -> tuple[bool, bool]:
        """Return whether a stream goes to the terminal, and whether to a file."""
        tee, redirect = _selects(self.tee, local_rank, stream), _selects(self.redirects, local_rank, stream)
        everything = self.directory is not None and self.tee is None and self.redirects is None
        return tee or not redirect, tee or redirect or everything


def _selects(text: str | None, local_rank: int, stream: str) -> bool:
    if text is None:
        return False
    if ":" not in text:
        bits = int(text)
    else:
        bits = {int(rank): int(bits) for rank, bits in (item.split(":") for item in text.split(","))}.get(local_rank, 0)
    return bool(bits & _BITS[stream])
