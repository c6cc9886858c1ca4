"""Private names of torch that only this feature uses; see `comm.torch_private`."""

from __future__ import annotations

import torch

parse_to = torch._C._nn._parse_to
"""Device and dtype in the arguments of a `to()`. Without it bitsandbytes would quantise twice. Since 2.0."""
