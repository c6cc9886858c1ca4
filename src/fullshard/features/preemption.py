"""Let any rank request a stop, so that all ranks stop together after the same backward (`core.stopping`)."""

import torch
import torch.distributed as dist

from fullshard.comm.torch_dist import all_reduce
from fullshard.core.stopping import STOPPING
from fullshard.engine.extension import Extension


class StopTogether(Extension):
    """Shares each rank's request to stop in the message that ranks exchange at the end of a backward pass."""

    def message(self) -> bytes:
        """Return one byte, which is 1 if this rank requests a stop."""
        return bytes([STOPPING.is_wanted])

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Record that all ranks agree to stop if any has asked for it, also across tensor-parallel ranks."""
        is_wanted = bool(largest[0])
        for outer in self.model.outer_groups() if STOPPING.is_listened_to else ():
            flag = torch.tensor([is_wanted], dtype=torch.uint8, device=self.model.mesh.device)
            all_reduce(flag, "the end of backward", [outer], dist.ReduceOp.MAX)
            is_wanted = bool(flag)
        STOPPING.is_agreed |= is_wanted
