"""Private names of torch that only this feature uses, beside those of `comm.torch_private`; see there."""

from __future__ import annotations

import torch

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

parse_to = torch._C._nn._parse_to
"""Device and dtype in the arguments of a `to()`. Without it bitsandbytes would quantise twice. Since 2.0."""
