"""Transformers' `Trainer` and TRL's trainers, adapted to fullshard's engine.

These are subclasses of the original classes with the mixin `ShardedTraining`. `sharded(cls)` makes one from any class
derived from a Trainer. Under `fullshard launch`, a script that imports the classes from `transformers` and `trl` gets
them without changes, because the launcher calls `install()`.
"""

from fullshard.core.imports import on_demand

__all__, __getattr__, __dir__ = on_demand(__name__)
