"""Names of torch that this feature replaces; see `comm.torch_private`."""

from __future__ import annotations

import torch

from fullshard.core.imports import Replaced

state_dict = Replaced.of(torch.optim.Optimizer, "state_dict")
load_state_dict = Replaced.of(torch.optim.Optimizer, "load_state_dict")
"""Public, and replaced all the same: torch's hooks for it are set per optimizer, and a script hands none to the engine.
Since 2.0."""
