"""State dicts of sharded models: DTensors in them, and whole tensors that are loaded from them."""

from fullshard.features.state_dicts.hooks import StateDicts

__all__ = ["StateDicts"]
