"""Private names of torch's launcher; the others are in `comm.torch_private`, which says what is said of each, and why.

Apart from those, because a launcher needs no DTensor, and what it imports every launch waits for.
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
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler": frozenset({"_popen"}),
}
"""Methods that torch calls and that a class of fullshard's has in their place: the agent, which ends workers in time,
and its workers' handler, which takes processes that wait. Were they renamed, nothing would call them any more.
Since 2.0."""


def worker_context(agent: LocalElasticAgent) -> Any:
    """The workers' processes, whose `close` would give them 30 seconds; None before the first start. Since 2.0."""
    return agent._pcontext


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """How often workers may be started again, this time not counted. Since 2.0."""
    return agent._remaining_restarts


def grant_restart(agent: LocalElasticAgent) -> None:
    """Let workers be started once more than was said: not because of a failure. Since 2.0."""
    agent._remaining_restarts += 1
    agent._worker_group.spec.max_restarts += 1


def allow_no_restart(agent: LocalElasticAgent) -> None:
    """Let workers not be started again, whatever was said. Since 2.0."""
    agent._remaining_restarts = 0


def forget_store(agent: LocalElasticAgent) -> None:
    """Drop the agent's reference to its store, whose port must be free before the next one listens. Since 2.0."""
    agent._store = None


def stream_of(handler: object, name: str) -> Any:
    """The file that a worker's `stdout` or `stderr` goes to, which nobody closes; None if it has none. Since 2.0."""
    return getattr(handler, f"_{name}", None)
