"""Models on the meta device: each rank allocates one unit at a time, when its parameters get values."""

from fullshard.features.meta_device.conversion import ConversionMethods
from fullshard.features.meta_device.initialize import WEIGHTS, InitFunction, WeightSource, meta_parameters
from fullshard.features.meta_device.shard_model import shard_model
from fullshard.features.meta_device.stand_ins import MetaDevice

__all__ = [
    "WEIGHTS",
    "ConversionMethods",
    "InitFunction",
    "MetaDevice",
    "WeightSource",
    "meta_parameters",
    "shard_model",
]
