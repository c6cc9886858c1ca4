"""TorchAcc's module of this name. The fields, and what becomes of each, are in `fullshard.config.torchacc`."""

from fullshard.config.torchacc import (
    ComputeConfig,
    Config,
    DataLoaderConfig,
    DistConfig,
    DPConfig,
    FSDPConfig,
    MemoryConfig,
    PPConfig,
    SPConfig,
    TPConfig,
)

__all__ = [
    "ComputeConfig",
    "Config",
    "DPConfig",
    "DataLoaderConfig",
    "DistConfig",
    "FSDPConfig",
    "MemoryConfig",
    "PPConfig",
    "SPConfig",
    "TPConfig",
]
