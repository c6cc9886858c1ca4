"""Exchange JSON messages between the ranks of a save or a load. An error on one rank is raised on all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.tensor_file import Bytes
from fullshard.comm import torch_private
from fullshard.comm.device import current
from fullshard.comm.torch_dist import all_gather_single, as_sent
from fullshard.comm.waiting import PROGRESS, Waiting
from fullshard.core.errors import CheckpointError, CommunicationError, FullshardError, StoreError, plural
from fullshard.engine.lookup import require_module
from fullshard.features import ShardedParameter

T = TypeVar("T")
_MESSAGE_NBYTES = 256 * 2**20
"""The largest message between two ranks, because some transports count bytes with 31 bits."""


def _spread(parameter: ShardedParameter) -> int:
    """Return the number of ranks among which a parameter is sharded, replicated or split by tensor parallelism."""
    outer = parameter.spec.outer_group
    return parameter.mesh.world_size * (1 if outer is None else outer.size())


class Ranks:
    """All ranks of the job, as seen from this rank. All ranks must call its methods together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = torch.device("cpu")
        if self.world_size > 1 and "gloo" not in str(dist.get_backend_config(group)):
            self.device = current()

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return the ranks that `model` is sharded over."""
        require_module(model)
        parameters = [p for p in model.parameters() if isinstance(p, ShardedParameter)]
        if not parameters:
            return cls()
        first = max(parameters, key=_spread)
        if _spread(first) > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"{first.name} is sharded over {plural(_spread(first), 'rank')}, but this process has destroyed its "
                "process group",
                hint="save before accelerator.end_training() or any other call that destroys the process group",
            )
        ranks = cls(first.mesh.control_group if first.spec.outer_group is None else None)
        if _spread(first) != ranks.world_size:
            raise CheckpointError(
                f"{first.name} is sharded over only {_spread(first)} of {ranks.world_size} ranks",
                hint="checkpoints need a mesh over all ranks",
            )
        return ranks

    def apart(self) -> Ranks:
        """Return the same ranks with a new process group, for use in another thread. All ranks must call this."""
        if self.world_size == 1:
            return Ranks()
        group = self._group or dist.group.WORLD
        assert group is not None  # noqa: S101 -- there is more than one rank
        timeout = torch_private.timeout_of(group, self.device)
        return Ranks(dist.new_group(backend="gloo", timeout=timeout))

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        if self.world_size == 1:
            return value
        with self._peers("exchanging metadata"):
            return all(self._numbers(int(value)))

    def gather(self, value: Any) -> list[Any]:
        """Collect a JSON value from each rank. Return all values on rank 0, and an empty list on the other ranks."""
        if self.world_size == 1:
            return [value]
        data = json.dumps(value).encode()
        with self._peers("collecting messages"):
            sizes = self._numbers(len(data))
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
            padded[: len(data)] = _as_tensor(data).to(self.device)
            parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
            dist.gather(padded, parts, dst=0, group=self._group)
        if parts is None:
            return []
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def everywhere(self, value: Any) -> list[Any]:
        """Collect a JSON value from each rank, and return all values on every rank."""
        found: list[Any] = self.broadcast(self.gather(value))
        return found

    def exchange(self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]) -> None:
        """Send bytes to other ranks and receive bytes from them. Each item is (rank, buffer in host memory).

        Two ranks must list the messages between them in the same order. Call this on the result of `apart`.
        """
        with self._peers("exchanging data"):
            tensors, works = [], []
            for ranks, begin in ((received, dist.irecv), (sent, dist.isend)):
                for rank, data in ranks:
                    for start in range(0, len(data), _MESSAGE_NBYTES):
                        tensors.append(torch.from_numpy(data[start : start + _MESSAGE_NBYTES]))
                        works.append(begin(tensors[-1], rank, group=self._group))
            for work in works:
                if work is not None:
                    work.wait()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. The values on other ranks are ignored."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode() if self.rank == 0 else b""))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank. The bytes on other ranks are ignored."""
        if self.world_size == 1:
            return data
        with self._peers("waiting for rank 0"):
            size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
            dist.broadcast(size, src=0, group=self._group)
            buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
            if self.rank == 0:
                buffer.copy_(_as_tensor(data))
            dist.broadcast(buffer, src=0, group=self._group)
        return buffer.cpu().numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return rank 0's tensor, cast to `dtype`, on every rank. The other ranks pass None."""
        sent = torch.empty(shape, dtype=dtype, device=self.device)
        if tensor is not None:
            sent.copy_(tensor)
        if self.world_size > 1 and sent.numel():
            with self._peers("receiving tensors"):
                dist.broadcast(as_sent(sent.view(-1)), src=0, group=self._group)
        return sent

    def together(self, doing: str, function: Callable[[], T], *, kind: type[CheckpointError] = CheckpointError) -> T:
        """Run `function`, which must not communicate, on every rank. If it fails on one rank, raise `kind` on all."""
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(function())
        except Exception as caught:
            error = caught
        self.fail_together(doing, error, kind=kind)
        return result[0]

    def fail_together(
        self, doing: str, error: Exception | None, *, kind: type[CheckpointError] = CheckpointError
    ) -> None:
        """Raise an error on every rank if `error` is not None on any rank. See `together`."""
        if self.all(error is None):  # usually this one small message is sufficient
            return
        text = str(error) if isinstance(error, FullshardError) else f"{type(error).__name__}: {error}"
        message = None if error is None else text
        found: Sequence[tuple[str | None, bool]] = self.broadcast(self.gather([message, isinstance(error, StoreError)]))
        messages = [message for message, _ in found]
        if any(is_silent for _, is_silent in found):
            kind = CheckpointError  # if a store does not return the data, it is unknown whether they are damaged
        if self.world_size == 1 and isinstance(error, CheckpointError):
            raise error
        reasons = dict.fromkeys(text for text in messages if text is not None)
        lines = [f"{_name(r for r, text in enumerate(messages) if text == reason)}: {reason}" for reason in reasons]
        told = isinstance(error, FullshardError)  # the lines contain all that it says
        raise kind(f"{doing} failed\n" + "\n".join(lines)) from None if told else error

    def on_rank_0(
        self, doing: str, function: Callable[[], T], *, kind: type[CheckpointError] = CheckpointError
    ) -> T | None:
        """Run `function` on rank 0. Return its result there and None elsewhere, or raise an error on every rank."""
        return self.together(doing, lambda: function() if self.rank == 0 else None, kind=kind)

    def _numbers(self, own: int) -> list[int]:
        """Collect an integer from each rank, and return all of them on every rank."""
        numbers = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        all_gather_single(numbers, torch.tensor([own], dtype=torch.int64, device=self.device), group=self._group)
        return [int(number) for number in numbers.tolist()]

    @contextmanager
    def _peers(self, doing: str) -> Iterator[None]:
        """Convert a communication error in the block to an error that says that the other ranks are lost."""
        group = self._group or dist.group.WORLD
        try:
            with Waiting(f"a checkpoint, {doing}", [group]):
                yield
        except CommunicationError as error:
            why = PROGRESS.watcher.reason(error.__context__) if isinstance(error.__context__, RuntimeError) else error
            raise CheckpointError(
                f"lost the other ranks while {doing}: {why}", hint="look at the log of the rank that stopped first"
            ) from error


def all_come(where: str, seconds: float) -> bool:
    """Return whether all ranks call this within `seconds`, equally often apart from calls that returned False."""
    number = _COME.get(where, 0)
    key, store, size = f"fullshard/come/{where}/{number}", torch_private.default_store(), dist.get_world_size()
    come, until = store.add(key, 1), time.monotonic() + seconds
    try:
        while come < size and time.monotonic() < until:
            time.sleep(0.02)
            come = store.add(key, 0)
    finally:  # an interrupted rank does not count as arrived
        if come < size:
            come = store.add(key, -1) + 1
            if come == size:  # the last rank has arrived just now
                store.add(key, 1)
        if come == size:
            _COME[where] = number + 1
    return come == size


_COME: dict[str, int] = {}
"""How often all ranks have reached each place."""


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _name(ranks: Iterator[int]) -> str:
    """Return ranks as text, for example `rank 3` or `ranks 0, 1, 2 and 61 more`."""
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:3]))
    return f"ranks {shown}" + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
