"""Parameters that define their own all-gather with torch's extension hooks, such as torchao's float8 weights."""

from functools import partial

from fullshard.comm import torch_private
from fullshard.engine.extension import at_first_sharding
from fullshard.features.extended.bucket import ExtendedParameter
from fullshard.features.extended.kinds import Composed, Extended, LateProtocol

__all__ = ["Composed", "Extended", "LateProtocol"]

at_first_sharding(partial(torch_private.allow_foreach, ExtendedParameter))
