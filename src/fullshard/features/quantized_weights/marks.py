"""Marks on modules that name the weights to quantise at rest, and their forms, until the model is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

MARKS = "_fullshard_forms"
"""Module attribute with the marks of parameters by name. Copies of the module therefore keep the marks."""
_MARK = "_fullshard_form"


@dataclass(frozen=True, slots=True)
class Mark:
    """The form in which one weight is stored at rest.

    `is_transposed`: the blocks run along the second-to-last dim, as in the experts of gpt-oss.
    """

    form: str
    is_transposed: bool = False


def mark_of(parameter: torch.Tensor) -> Mark | None:
    """Return the mark that `stamp` has put on a parameter, or None if it will not be quantised."""
    return getattr(parameter, _MARK, None)


def form_at(module: nn.Module, attribute: str) -> str:
    """Return the form that a module's parameter is marked with, or an empty string if it has no mark."""
    mark: Mark | None = vars(module).get(MARKS, {}).get(attribute)
    return "" if mark is None else mark.form


def put_mark(parameter: nn.Parameter, mark: Mark | None) -> nn.Parameter:
    """Put a mark on a parameter, and return it."""
    setattr(parameter, _MARK, mark)
    return parameter


def stamp(model: nn.Module) -> None:
    """Copy each module's marks to its parameters, because later steps use the parameters without their modules."""
    for module in model.modules():
        for attribute, one in vars(module).get(MARKS, {}).items():
            if (parameter := module._parameters.get(attribute)) is not None:
                put_mark(parameter, one)
