"""`AsyncLoader`: batches are fetched ahead in a thread, padded to one of a few lengths, and put on the device."""

from __future__ import annotations

import bisect
import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fullshard.api.collectives import send_to_device
from fullshard.comm import device as devices
from fullshard.core.errors import ConfigError, DataError
from fullshard.core.threads import start_thread

DEFAULT_PADDING: Mapping[str, float] = {"input_ids": 0, "attention_mask": 0, "labels": -100}
"""The default values that batches are padded with, by key."""

_NO_EFFECT = {
    "loader_prefetch_size": "there is one queue; device_prefetch_size is its length",
    "host_to_device_transfer_threads": "one thread fetches, pads and copies",
    "batches_per_execution": "there is no recorded graph to execute",
}
_END = object()
_POLL_SECONDS = 0.1


class AsyncLoader:
    """Iterates a loader ahead of the loop that uses it.

    The first batch of an epoch is fetched by the loop itself (a loader may agree on its order with other ranks then,
    which must not happen in a thread); the others by a thread that is `device_prefetch_size` batches ahead. An error in
    the loader is raised in the loop, at the batch it belongs to. Leaving the loop early ends the thread.

    Args:
        loader: the loader; one that divides its data over the ranks, or only this rank's.
        device: where batches are put.
        buckets: the lengths batches are padded to, rising. A longer batch becomes a bucket of its own.
        max_length: instead of `buckets`: the longest, the others at equal distances below it.
        num_buckets: how many with `max_length`.
        pad_value_dict: by key of a batch, what to pad with; by default `input_ids` and `attention_mask` with 0,
            `labels` with -100. Tensors of fewer than two dims (one value per sample) are left as they are.
        device_prefetch_size: batches that wait at most.
        other: TorchAcc's other arguments; they have no effect, which is said.

    Raises:
        ConfigError: an argument that is wrong.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        buckets: list[int] | None = None,
        max_length: int | None = None,
        num_buckets: int | None = 8,
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        device_prefetch_size: int = 4,
        **other: Any,
    ) -> None:
        for name in other:
            if name not in _NO_EFFECT:
                raise ConfigError(f"AsyncLoader has no argument {name!r}", hint="see its docstring")
            _say(f"AsyncLoader: {name} has no effect here: {_NO_EFFECT[name]}")
        if device_prefetch_size < 1:
            raise ConfigError(f"device_prefetch_size must be at least 1, got {device_prefetch_size}")
        self.loader = loader
        self.device = torch.device(device)
        self._ahead = device_prefetch_size
        lengths = _bucket_lengths(buckets, max_length, 8 if num_buckets is None else num_buckets)
        if lengths is None and pad_value_dict is not None:
            raise ConfigError("pad_value_dict means nothing without buckets or max_length", hint="give buckets")
        self._padding = None if lengths is None else Padding(lengths, pad_value_dict)
        self._position: Any = None

    @property
    def buckets(self) -> list[int] | None:
        """The lengths batches are padded to; None without padding."""
        return None if self._padding is None else list(self._padding.lengths)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        following = next(iterator, _END)
        if following is _END:
            return
        self._position = self._now()
        yield self._prepared(following)
        ahead = _Ahead(self, iterator)
        try:
            for batch, position in ahead:
                self._position = None if batch is _END else position
                if batch is _END:
                    return
                yield batch
        finally:
            ahead.close()
            close = getattr(iterator, "close", None)
            if close is not None and not ahead.is_running:
                close()

    def state_dict(self) -> Any:
        """Return the loader's position after the last batch handed out, not after the last that was fetched."""
        return self.loader.state_dict() if self._position is None else self._position  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Continue at a position, if the loader can."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._position = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names this object does not have: the dataset, the batch size, set_epoch.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _prepared(self, batch: Any) -> Any:
        return send_to_device(batch if self._padding is None else self._padding(batch), self.device)

    def _now(self) -> Any:
        state = getattr(self.loader, "state_dict", None)
        return None if state is None else state()


class _Ahead:
    """A thread that takes batches from an iterator, and the queue it puts them in.

    Args:
        source: prepares the batches.
        iterator: only the thread takes from it while it runs.
    """

    def __init__(self, source: AsyncLoader, iterator: Iterator[Any]) -> None:
        self._queue: queue.Queue[tuple[Any, Any, BaseException | None]] = queue.Queue(source._ahead)
        self._stop = threading.Event()
        arguments = (source, iterator, self._queue, self._stop)
        # A daemon that is told to stop: a loader that hangs does not hang the process.
        self._thread = start_thread("AsyncLoader", _fetch, arguments, self._stop.set)
        self._finalizer = weakref.finalize(self, _end, self._stop, self._thread)
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            batch, position, error = self._queue.get()
            if error is not None:
                raise error
            yield batch, position

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._finalizer()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(timeout=5)


def _fetch(source: AsyncLoader, iterator: Iterator[Any], into: queue.Queue[Any], stop: threading.Event) -> None:
    """Fetch batches, as the body of the thread."""
    if source.device.type != "cpu":
        devices.select(source.device.type, source.device.index or 0)  # the current device is the thread's own
    while not stop.is_set():
        item: tuple[Any, Any, BaseException | None]
        try:
            batch = next(iterator, _END)
            item = (batch if batch is _END else source._prepared(batch), source._now(), None)
        except BaseException as error:
            item = (None, None, error)
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                into.put(item, timeout=_POLL_SECONDS)
                break
        if item[0] is _END or item[2] is not None:
            return


@dataclass(slots=True)
class Padding:
    """Pads the last dim of a batch's tensors to the next bucket, so that shapes stay few.

    Attributes:
        lengths: the buckets, rising; a longer batch adds one.
        values: by key, what to pad with; None: `DEFAULT_PADDING`.
    """

    lengths: list[int]
    values: Mapping[str, float] | None = None

    def __call__(self, batch: Any) -> Any:
        """Return the padded batch.

        Raises:
            DataError: it is no mapping, or has other keys than there are values to pad with.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"buckets pad batches that are dicts, key by key; got a {type(batch).__name__}",
                hint="have the dataset or collate_fn return dicts",
            )
        rows = {key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
        known = DEFAULT_PADDING if self.values is None else self.values
        unknown = sorted(rows - known.keys())
        absent = [] if self.values is None else sorted(self.values.keys() - batch.keys())
        if unknown or absent:
            raise DataError(
                f"the batch has {sorted(batch)}, and there are values to pad {sorted(known)} with",
                hint=f"give pad_value_dict with one value for each of {sorted(rows)}",
            )
        return {**batch, **{key: self._padded(batch[key], known[key]) for key in rows}}

    def _padded(self, tensor: torch.Tensor, value: float) -> torch.Tensor:
        length = tensor.shape[-1]
        if length > self.lengths[-1]:
            _say(f"AsyncLoader: a batch of length {length} is longer than all buckets, {self.lengths}: it is one now")
            self.lengths.append(length)
        bucket = self.lengths[bisect.bisect_left(self.lengths, length)]
        return F.pad(tensor, (0, bucket - length), value=value)


def _bucket_lengths(buckets: list[int] | None, max_length: int | None, num_buckets: int) -> list[int] | None:
    if buckets is not None and max_length is not None:
        raise ConfigError("buckets and max_length both say how long batches are", hint="give one of the two")
    if max_length is not None:
        if max_length < 1 or num_buckets < 1:
            raise ConfigError(f"max_length = {max_length}, num_buckets = {num_buckets}: both must be at least 1")
        return sorted({-(-max_length * (number + 1) // num_buckets) for number in range(num_buckets)})
    if buckets is None:
        return None
    if not buckets or buckets != sorted(set(buckets)) or buckets[0] < 1:
        raise ConfigError(f"buckets = {buckets!r}", hint="give positive lengths, rising, for example [128, 256, 512]")
    return list(buckets)


def _say(message: str) -> None:
    print(f"fullshard: {message}", file=sys.stderr, flush=True)  # noqa: T201 -- a note for the person at the screen
