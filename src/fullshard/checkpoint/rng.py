"""Convert one rank's random number generators to tensors and back, without a pickle, which could run code."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fullshard.core.errors import CheckpointError

RNG_PREFIX = "rng/"
"""The prefix of the names of these tensors in a file."""
_PYTHON_VERSION = 3
"""Version of the tuple that `random.getstate` returns, the same since Python 3.2."""


def rng_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the random generators of Python, NumPy, torch on the host, and torch on `device`."""
    version, words, gauss = random.getstate()
    if version != _PYTHON_VERSION:
        raise CheckpointError(f"Python's random state has version {version}, expected {_PYTHON_VERSION}")
    state: Any = np.random.get_state()  # data sets and collators use the global generator
    kind, keys, position, has_gauss, cached = state
    if kind != "MT19937":
        raise CheckpointError(f"NumPy's global generator is {kind}, but only the default (MT19937) can be saved")
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        tensors[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {RNG_PREFIX + name: tensor for name, tensor in tensors.items()}


def restore_rng(tensors: Mapping[str, torch.Tensor], device: torch.device) -> list[str]:
    """Restore the generators in `tensors`. Return the names that are only in `tensors` or only in this process."""
    setters: dict[str, Callable[[torch.Tensor], Any]] = {
        "python": lambda words: random.setstate(
            (_PYTHON_VERSION, tuple(words.tolist()), next(iter(tensors[RNG_PREFIX + "python_gauss"].tolist()), None))
        ),
        "numpy": lambda words: _set_numpy(words.tolist(), tensors[RNG_PREFIX + "numpy_gauss"].item()),
        "torch": torch.set_rng_state,
    }
    if device.type != "cpu":
        setters[device.type] = lambda state: torch.get_device_module(device).set_rng_state(state, device)
    saved = {name.removeprefix(RNG_PREFIX) for name in tensors if name.startswith(RNG_PREFIX) and "gauss" not in name}
    for name in saved & setters.keys():
        setters[name](tensors[RNG_PREFIX + name])
    return sorted(saved ^ setters.keys())


def _set_numpy(words: list[int], cached: float | int) -> None:
    *keys, position, has_gauss = words
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(cached)))
