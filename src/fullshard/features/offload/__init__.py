"""Host memory beside a device: for shards, optimizer state and activations."""

from fullshard.features.offload.activations import ActivationOffload
from fullshard.features.offload.policy import CPUOffloadPolicy, OffloadPolicy
from fullshard.features.offload.storage import store_on_host

__all__ = ["ActivationOffload", "CPUOffloadPolicy", "OffloadPolicy", "store_on_host"]
