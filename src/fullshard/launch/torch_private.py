"""The private names of torch's launcher that fullshard uses.

`comm.torch_private` contains the other private names of torch, and explains what each docstring states. The modules are
separate because a launcher does not need DTensor, whose import would make every launch slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

OVERRIDDEN: Mapping[str, frozenset[str]] = {
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": frozenset(
        {"_exit_barrier", "_monitor_workers", "_restart_workers", "_shutdown", "_start_workers", "_stop_workers"}
    )
}
"""Methods of torch's agent that fullshard overrides to end workers promptly. If torch renamed a method, the override
would no longer be called. Since torch 2.0."""

HOMES_OF_FULLY_SHARD = (
    *("torch.distributed.fsdp._fully_shard", "torch.distributed.fsdp._fully_shard._fully_shard"),
    *("torch.distributed.fsdp._fully_shard._fsdp_api", "torch.distributed._composable.fsdp"),
    "torch.distributed._composable.fsdp.fully_shard",
)
"""The private modules from which programs import `fully_shard` and its kin. Since torch 2.6."""

USERS_OF_FULLY_SHARD = ("torch.distributed._composable.replicate_with_fsdp",)
"""Modules with classes derived from torch's engine. They must be imported before a name changes. Since torch 2.9."""


def worker_context(agent: LocalElasticAgent) -> Any:
    """Return the context of the workers' processes, or None before a start. Closing takes 30 s. Since torch 2.0."""
    return agent._pcontext


def close_streams(workers: Any) -> None:
    """Close the launcher's log files. torch closes them only if it has to end the workers. Since torch 2.0."""
    for handler in workers.subprocess_handlers.values():
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """Return how many more times the workers may be restarted after this start. Since torch 2.0."""
    return agent._remaining_restarts


def grant_restart(agent: LocalElasticAgent) -> None:
    """Raise the user's limit on restarts by one, for a restart that was not caused by a failure. Since torch 2.0."""
    agent._remaining_restarts += 1
    agent._worker_group.spec.max_restarts += 1


def allow_no_restart(agent: LocalElasticAgent) -> None:
    """Forbid any further restart of the workers, regardless of the user's limit. Since torch 2.0."""
    agent._remaining_restarts = 0


def forget_store(agent: LocalElasticAgent) -> None:
    """Drop the agent's reference to its store, so that the port is free for the next store. Since torch 2.0."""
    agent._store = None
