"""Accelerate's process helpers: ranks, barriers, printing on one rank, and splitting inputs between ranks."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import PartialState as Theirs
from accelerate.utils import DistributedType

from fullshard.api.forwarding import forwarded
from fullshard.api.state import ProcessState
from fullshard.core.errors import ConfigError


class Processes:
    """The part of the Accelerator that deals with processes rather than with training."""

    initialized = True
    distributed_type = DistributedType.FSDP

    def __init__(self, process: ProcessState) -> None:
        self.process = process

    device: torch.device = forwarded("process.device")
    """The device on which this rank computes."""
    num_processes: int = forwarded("process.environment.world_size")
    """The world size."""
    process_index: int = forwarded("process.environment.rank")
    """The rank of this process."""
    local_process_index: int = forwarded("process.environment.local_rank")
    """The rank of this process on its host."""
    use_distributed = Theirs.use_distributed
    is_main_process, is_local_main_process = Theirs.is_main_process, Theirs.is_local_main_process
    is_last_process, print = Theirs.is_last_process, Theirs.print
    main_process_first, local_main_process_first = Theirs.main_process_first, Theirs.local_main_process_first
    on_main_process, on_local_main_process = Theirs.on_main_process, Theirs.on_local_main_process
    on_last_process, on_process, on_local_process = Theirs.on_last_process, Theirs.on_process, Theirs.on_local_process

    @property
    def _tensor_parallel_size(self) -> int:
        """Return the number of ranks that compute on the same batch, each with one part of every split layer."""
        return 1

    _ranks_per_sequence: int = 1
    """The number of ranks over which context or sequence parallelism divides every sequence."""

    @property
    def _ranks_per_batch(self) -> int:
        """Return the number of ranks that get the same batch."""
        return self._tensor_parallel_size * self._ranks_per_sequence

    @property
    def _data_parallel_size(self) -> int:
        """Return the number of different batches in a step."""
        return self.num_processes // self._ranks_per_batch

    @property
    def _ranks_of_gradients(self) -> int:
        """Return the number of ranks whose gradients differ, because they compute on other samples or tokens."""
        return self.num_processes // self._tensor_parallel_size

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this method."""
        self.process.barrier()

    def _goes_first(self, is_main: bool) -> Iterator[None]:
        """Run the block on one rank before the others. Unlike in Accelerate, the others continue if it raises."""
        if not is_main:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_main:
                self.wait_for_everyone()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this rank a contiguous part of `inputs`.

        If the items do not divide evenly, each of the first ranks gets one item more. Ranks that
        get the same batch get the same part.

        Args:
            inputs: a list, tuple, tensor, `datasets.Dataset` or other sliceable, or a mapping whose values are
                sliceables of equal length.
            apply_padding: repeat the last item on ranks that have fewer items, so that results can be gathered.

        Raises:
            ConfigError: the values of a mapping differ in length.
        """
        if self._data_parallel_size == 1:
            yield inputs
        elif isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigError(f"values of different lengths cannot be split between processes: {lengths}")
            yield type(inputs)({key: self._part(value, apply_padding) for key, value in inputs.items()})  # type: ignore[call-arg]
        else:
            yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, str | bytes):
            return inputs  # a prompt for all ranks, not a list of characters
        size, extra = divmod(len(inputs), self._data_parallel_size)
        rank = self.process_index // self._ranks_per_batch
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
