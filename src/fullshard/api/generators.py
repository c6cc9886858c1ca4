"""Functions that find and seed the random number generators of torch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import Sampler


def is_generator(value: object) -> bool:
    """Return whether a value is a random generator."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def held_by(holder: object) -> Iterator[Any]:
    """Yield the random generators in the attributes of an object, and those in its samplers."""
    for value in getattr(holder, "__dict__", {}).values():
        if is_generator(value):
            yield value
        elif isinstance(value, Sampler):
            yield from held_by(value)


def seed(generator: Any, number: int) -> Callable[[], object]:
    """Seed a generator, or the module `random` or `numpy.random`. Return a function that restores the old state."""
    back: Callable[[], object]
    if isinstance(generator, torch.Generator):
        back = partial(generator.set_state, generator.get_state())
        generator.manual_seed(number)
    elif hasattr(generator, "getstate"):
        back = partial(generator.setstate, generator.getstate())
        generator.seed(number)
    elif hasattr(generator, "get_state"):
        back = partial(generator.set_state, generator.get_state())
        generator.seed(number % 2**32)
    else:
        bits = generator.bit_generator
        back = partial(setattr, bits, "state", bits.state)
        bits.state = type(bits)(number % 2**64).state
    return back
