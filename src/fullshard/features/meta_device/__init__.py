"""Models on the meta device: a unit is allocated when its parameters get values, one unit at a time on each rank."""

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
