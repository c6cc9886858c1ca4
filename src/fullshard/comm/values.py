"""Whether a tensor's numbers can be asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_answering: list[None] = []


def has_values(device: torch.device) -> bool:
    """Whether reading a number there gives one: not on the meta device, unless somebody answers for it."""
    return device.type != "meta" or bool(_answering)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Within it somebody does: the meta device is asked what an accelerator is (`fullshard.api.virtual`)."""
    _answering.append(None)
    try:
        yield
    finally:
        _answering.pop()
