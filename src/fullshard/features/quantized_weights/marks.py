"""Marks on a module that record which of its weights to quantize when the model is sharded, and in which form."""

from dataclasses import dataclass

import torch
from torch import nn

MARKS = "_fullshard_forms"
"""Module attribute with the marks of parameters by name. Copies of the module therefore keep the marks."""
_MARK = "_fullshard_form"


@dataclass(frozen=True, slots=True)
class Mark:
    """The form of a weight at rest. With `is_transposed`, blocks run along the second-to-last dim (gpt-oss)."""

    form: str
    is_transposed: bool = False


def mark_of(parameter: torch.Tensor) -> Mark | None:
    """Return the mark that `stamp` has copied to a parameter, or None if the parameter will not be quantized."""
    return getattr(parameter, _MARK, None)


def form_at(module: nn.Module, attribute: str) -> str:
    """Return the form that is marked for a module's parameter, or an empty string if it has no mark."""
    mark: Mark | None = vars(module).get(MARKS, {}).get(attribute)
    return "" if mark is None else mark.form


def put_mark(parameter: nn.Parameter, mark: Mark | None) -> nn.Parameter:
    """Attach a mark to a parameter, and return the parameter."""
    setattr(parameter, _MARK, mark)
    return parameter


def stamp(model: nn.Module) -> None:
    """Copy marks from modules to parameters, because later steps see the parameters without their modules."""
    for module in model.modules():
        for attribute, one in vars(module).get(MARKS, {}).items():
            if (parameter := module._parameters.get(attribute)) is not None:
                put_mark(parameter, one)
