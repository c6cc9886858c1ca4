"""Models on the meta device: a unit gets its memory when its parameters get values, and no rank holds more than one."""

from fullshard.features.meta_device.conversion import ConversionMethods
from fullshard.features.meta_device.extension import MetaDevice
from fullshard.features.meta_device.initialize import InitFunction, meta_parameters
from fullshard.features.meta_device.shard_model import shard_model
from fullshard.features.meta_device.weights import WEIGHTS, WeightSource

__all__ = [
    "WEIGHTS",
    "ConversionMethods",
    "InitFunction",
    "MetaDevice",
    "WeightSource",
    "meta_parameters",
    "shard_model",
]
