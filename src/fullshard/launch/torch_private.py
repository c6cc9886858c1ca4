"""Private names of torch's launcher; `comm.torch_private` has the others, and says what each entry states, and why.

They are apart from those because a launcher needs no DTensor, and every launch waits for its imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

OVERRIDDEN: Mapping[str, frozenset[str]] = {
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": frozenset(
        {"_exit_barrier", "_monitor_workers", "_restart_workers", "_shutdown", "_start_workers", "_stop_workers"}
    ),
}
"""Methods that torch calls and that fullshard's agent, which ends workers in time, overrides. If torch renamed one,
nothing would call ours any more. Since 2.0."""


def worker_context(agent: LocalElasticAgent) -> Any:
    """Return the workers' processes, whose `close` gives them 30 seconds; None before the first start. Since 2.0."""
    return agent._pcontext


def close_streams(workers: Any) -> None:
    """Close the launcher's handles of log files; torch does so only for workers that it has to end. Since 2.0."""
    for handler in workers.subprocess_handlers.values():
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """Return how often workers may be started again, this time not counted. Since 2.0."""
    return agent._remaining_restarts


def grant_restart(agent: LocalElasticAgent) -> None:
    """Grant workers one start more than was set: for a reason that is no failure. Since 2.0."""
    agent._remaining_restarts += 1
    agent._worker_group.spec.max_restarts += 1


def allow_no_restart(agent: LocalElasticAgent) -> None:
    """Forbid further starts of workers, whatever was set. Since 2.0."""
    agent._remaining_restarts = 0


def forget_store(agent: LocalElasticAgent) -> None:
    """Drop the agent's reference to its store, whose port must be free before the next one listens. Since 2.0."""
    agent._store = None
