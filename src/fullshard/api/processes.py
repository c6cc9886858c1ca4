"""The per-process tasks of scripts: ask which rank they are, wait, print once, divide inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from fullshard.api.forwarding import forwarded
from fullshard.api.state import ProcessState
from fullshard.core.errors import ConfigError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Processes:
    """The part of the Accelerator that is about processes and not about training.

    Args:
        process: this process's place in the job.
    """

    def __init__(self, process: ProcessState) -> None:
        self.process = process

    device: torch.device = forwarded("process.device")
    """The device on which this rank computes."""
    num_processes: int = forwarded("process.environment.world_size")
    """World size."""
    process_index: int = forwarded("process.environment.rank")
    """Rank."""
    local_process_index: int = forwarded("process.environment.local_rank")
    """Rank on this host."""

    @property
    def _tensor_parallel_size(self) -> int:
        """The number of ranks that compute on the same batch, each with a part of every layer."""
        return 1

    @property
    def _data_parallel_size(self) -> int:
        """Ranks, or groups of them, that compute on batches of their own."""
        return self.num_processes // self._tensor_parallel_size

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first rank of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here."""
        self.process.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print like `print`, on the first rank of each host."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 -- that is what it is for

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let rank 0 run the block before the other ranks (which then find what it downloaded or cached)."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the first rank of each host run the block before the others."""
        return self._first(self.is_local_main_process)

    def on_main_process(self, function: FunctionT) -> FunctionT:
        """Decorate a function to run on rank 0 and return None elsewhere."""
        return self._only(self.is_main_process, function)

    def on_local_main_process(self, function: FunctionT) -> FunctionT:
        """Decorate a function to run on the first rank of each host and return None elsewhere."""
        return self._only(self.is_local_main_process, function)

    def on_last_process(self, function: FunctionT) -> FunctionT:
        """Decorate a function to run on the last rank and return None elsewhere."""
        return self._only(self.is_last_process, function)

    def on_process(self, function: FunctionT | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the given rank and return None elsewhere."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(self.process_index == process_index, function)

    def on_local_process(self, function: FunctionT | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on the given rank of each host and return None elsewhere."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(self.local_process_index == local_process_index, function)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this rank's part of `inputs`: neighbouring items, the first ranks taking one more if it does not divide.

        Ranks of a tensor-parallel group have the same part.

        Args:
            inputs: a list, tuple, tensor, `datasets.Dataset` or other sliceable, or a mapping of such, all of the same
                length.
            apply_padding: repeat the last item where a rank has fewer, so that results can be gathered.

        Raises:
            ConfigError: the values of a mapping differ in length.
        """
        if self._data_parallel_size == 1:
            yield inputs
        elif isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigError(f"cannot split values of different lengths between processes: {lengths}")
            yield type(inputs)({key: self._part(value, apply_padding) for key, value in inputs.items()})  # type: ignore[call-arg]
        else:
            yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, str | bytes):
            return inputs  # a prompt for all, and no list of letters
        size, extra = divmod(len(inputs), self._data_parallel_size)
        rank = self.process_index // self._tensor_parallel_size
        start = rank * size + min(rank, extra)
        end = start + size + (rank < extra)
        missing = size + (extra > 0) - (end - start)
        if hasattr(inputs, "column_names") and hasattr(inputs, "select"):  # datasets.Dataset: a slice of it is a dict
            fill = [len(inputs) - 1] * missing if apply_padding and len(inputs) else []
            return inputs.select([*range(start, end), *fill])
        part = inputs[start:end]
        if not apply_padding or missing == 0 or len(inputs) == 0:
            return part
        last = inputs[-1:]
        if isinstance(part, torch.Tensor):
            return torch.cat([part, *[last] * missing])
        return part + last * missing

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an error, or the others would wait for a rank that is gone from here.
            if is_first:
                self.wait_for_everyone()

    def _only(self, runs_here: bool, function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if runs_here else None

        return cast("FunctionT", wrapped)
