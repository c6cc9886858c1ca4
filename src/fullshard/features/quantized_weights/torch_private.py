"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

from typing import Any

import torch

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

parse_to = torch._C._nn._parse_to
"""Parses the device and dtype arguments of `to()`. Otherwise, bitsandbytes would quantize twice. Since torch 2.0."""


def wrapper(kind: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """Create a tensor of a subclass, without storage, with the shape and dtype of `like`. Since torch 2.0."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=device)
