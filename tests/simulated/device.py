"""Makes the simulated device the accelerator of this process. Importing this cannot be undone."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.simulated.build import library

NAME = "simulated"
DEVICES = 4
TESTS = str(Path(__file__).parent)


class Order(IntEnum):
    """Which stream advances, where the program leaves the choice."""

    LAZY = 0
    """none, until somebody must wait for it"""
    EAGER_SIDE = 1
    """all but the computing stream, at once"""
    EAGER_COMPUTE = 2
    """the computing stream, at once; the others when it must wait for them"""
    RANDOM = 3
    """any, by a seed"""


ORDERS = tuple(Order)

torch.utils.rename_privateuse1_backend(NAME)
torch.ops.load_library(str(library()))
_C = ctypes.CDLL(str(library()))
for _name in ("drawn", "seed_of", "pending"):
    getattr(_C, f"simulated_{_name}").restype = ctypes.c_int64
_C.simulated_seed.argtypes = [ctypes.c_int, ctypes.c_int64]
_C.simulated_set_drawn.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_C.simulated_failure.restype = ctypes.c_char_p
_C.simulated_start(DEVICES)

begin_ranks, enter, leave = _C.simulated_begin_ranks, _C.simulated_enter, _C.simulated_leave


def begin(order: Order, seed: int = 0) -> None:
    """Begin anew in this order: what is queued is dropped, what has failed is forgotten."""
    _C.simulated_reset(int(order), seed)


def pending(device: int = 0) -> int:
    """Tasks that have not run yet."""
    return int(_C.simulated_pending(device))


# -- where the host waits ---------------------------------------------------------------------------------------

_counting: dict[int, Counter[str]] = {}
"""By device: ranks count apart."""


def _place(frame: FrameType | None) -> str:
    """The innermost function that is neither torch's nor the device's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(TESTS) and "<" not in name:
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_block(reason: bytes) -> None:
    counter = _counting.get(torch.accelerator.current_device_index())
    if counter is not None:
        counter[f"{reason.decode()} in {_place(sys._getframe(1))}"] += 1


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Counts how often the host waits for this rank's device inside, by reason and place."""
    index = torch.accelerator.current_device_index()
    counter = _counting[index] = Counter()
    _C.simulated_on_block(_on_block)
    try:
        yield counter
    finally:
        del _counting[index]
        if not _counting:
            _C.simulated_on_block(None)


# -- torch.simulated --------------------------------------------------------------------------------------------


class _Module:
    """What torch asks of the module of a device, `torch.cuda` for CUDA."""

    Stream = torch.Stream
    Event = torch.Event

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def stream(stream: torch.Stream) -> Any:
        return stream

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for device in range(DEVICES):
            _C.simulated_seed(device, seed)

    @staticmethod
    def manual_seed(seed: int) -> None:
        _C.simulated_seed(torch.accelerator.current_device_index(), seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        index = _index(device)
        return torch.tensor([_C.simulated_seed_of(index), _C.simulated_drawn(index)]).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        seed, drawn = state.view(torch.int64).tolist()
        _C.simulated_set_drawn(_index(device), seed, drawn)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


torch._register_device_module(NAME, _Module)
torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)
