"""Keep the global batch constant in elastic jobs: with fewer ranks, each rank runs more micro-batches."""

from __future__ import annotations

from fullshard.config.switches import elastic_ranks
from fullshard.core.errors import ConfigError
from fullshard.launch import RankEnvironment


def accumulation_steps(steps: int, environment: RankEnvironment) -> int:
    """Return the micro-batches per step that match the global batch of `steps` on the maximum number of ranks."""
    span = elastic_ranks()
    if span is None:
        return steps
    least, most = span
    allowed = range(least, most + 1, environment.local_world_size)
    for ranks in allowed:
        if steps * most % ranks:
            fewest = next(n for n in range(1, 10**6) if not any(n * most % each for each in allowed))
            raise ConfigError(
                f"gradient_accumulation_steps = {steps} on {most} ranks makes a batch of {steps * most} "
                f"micro-batches, which cannot be divided evenly among {ranks} ranks",
                hint=f"use a multiple of {fewest}, or a different number of hosts",
            )
    return steps * most // environment.world_size
