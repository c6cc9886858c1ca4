"""Models on the meta device: a unit gets its memory when its parameters get values, and no rank holds more than one."""

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
