"""Parameters that say themselves how they are gathered: torch's protocol, which torchao's float8 weights follow."""

from functools import partial

from fullshard.comm import torch_private
from fullshard.engine.extension import at_first_sharding
from fullshard.features.extended.bucket import ExtendedParameter
from fullshard.features.extended.kinds import Composed, Extended, LateProtocol

__all__ = ["Composed", "Extended", "LateProtocol"]

at_first_sharding(partial(torch_private.allow_foreach, ExtendedParameter))
