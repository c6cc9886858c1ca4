"""Offloading of shards, optimizer state and activations from the device to host memory."""

from fullshard.features.offload.pages import ActivationOffload
from fullshard.features.offload.parking import Parking, park, unpark
from fullshard.features.offload.storage import CPUOffloadPolicy, OffloadPolicy, store_on_host

__all__ = ["ActivationOffload", "CPUOffloadPolicy", "OffloadPolicy", "Parking", "park", "store_on_host", "unpark"]
