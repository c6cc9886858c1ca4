"""The counterpart of TorchAcc's `config` module. `fullshard.config.torchacc` defines the fields and their effects."""

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
