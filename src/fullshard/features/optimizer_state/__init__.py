"""State of torch's optimizers: in state dicts, and cut to intervals where it was whole."""

from fullshard.features.optimizer_state.repoint import repoint
from fullshard.features.optimizer_state.state_dict import as_sharded, install

__all__ = ["as_sharded", "install", "repoint"]
