"""Read any kind of checkpoint, and write the native and other formats, without a process group or a model."""

from fullshard.checkpoint.offline.compare import Difference, compare
from fullshard.checkpoint.offline.dcp import write_dcp
from fullshard.checkpoint.offline.detect import open_source
from fullshard.checkpoint.offline.huggingface import write_weights
from fullshard.checkpoint.offline.merged import open_merged
from fullshard.checkpoint.offline.source import Contents, Source
from fullshard.checkpoint.offline.write_native import write_native

__all__ = [
    "Contents",
    "Difference",
    "Source",
    "compare",
    "open_merged",
    "open_source",
    "write_dcp",
    "write_native",
    "write_weights",
]
