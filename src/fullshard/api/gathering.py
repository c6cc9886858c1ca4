"""Collectives for evaluation loops: the Accelerator's methods that gather metrics and share a trigger flag."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator as Theirs
from accelerate.utils import recursively_apply

from fullshard.api import collectives
from fullshard.api.data import ShardedDataLoader
from fullshard.api.processes import Processes
from fullshard.api.state import GradientState
from fullshard.features.watchdog import check_orders


class Gathering(Processes):
    """The part of the Accelerator that combines values from all ranks."""

    gradient_state: GradientState
    pad_across_processes = Theirs.pad_across_processes
    _trigger = False
    shares_losses = False
    """Whether all ranks that share sequences compute the same values, from whole sequences."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all ranks along the first dimension. See `collectives.gather`.

        With tensor parallelism, ranks that compute on the same batch contribute only once.
        """
        return self._gather_once(tensor)

    def _gather_once(self, tensor: Any, **notes: Any) -> Any:
        ranks, tiles = self.num_processes, self._tensor_parallel_size
        tiles = self._ranks_per_batch if self.shares_losses else tiles

        def one_of_each(gathered: torch.Tensor) -> torch.Tensor:
            parts = gathered.view(ranks // tiles, tiles, -1, *gathered.shape[1:])
            return parts[:, 0].flatten(0, 1)

        found = collectives.gather(tensor, **notes)
        return found if tiles == 1 else recursively_apply(one_of_each, found)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values as `gather` does, but without the samples that filled up the last batch of an epoch.

        With context parallelism, samples have a row from each of their ranks, but only one object.

        Args:
            input_data: nested tensors with one row per sample, or a list of objects, one per sample.
            use_gather_object: gather objects even if they are tensors.

        Raises:
            TypeError: on several ranks, a value is neither tensors nor a list of objects.
            DataError: ranks read the loader in different orders.
        """
        if self.num_processes == 1:  # the input is complete and nothing is repeated
            return input_data if use_gather_object else collectives.gather(input_data)
        loader = self.gradient_state.active_dataloader
        order = loader.order_number if isinstance(loader, ShardedDataLoader) else None
        if use_gather_object or not _all_tensors(input_data):
            if isinstance(input_data, Mapping | str | bytes) or not isinstance(input_data, Iterable):
                raise TypeError(
                    f"gather_for_metrics on {self.num_processes} ranks expected nested tensors or a list with one "
                    f"object per sample, got a {type(input_data).__name__} (hint: put it in a list)"
                )
            said = collectives.all_gather_object((input_data, order))
            check_orders(order for _, order in said)
            data = [item for part, _ in said[:: self._ranks_per_batch] for item in part]
            return data[: self._real_rows(len(data))]
        data = self._gather_once(input_data, check=check_orders, note=order)
        parts = 1 if self.shares_losses else self._ranks_per_sequence

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.shape[0] // parts
            real = self._real_rows(rows)
            samples = torch.arange(rows, device=tensor.device).view(self._data_parallel_size, 1, -1)
            return tensor[:real] if parts == 1 else tensor[samples.expand(-1, parts, -1).flatten() < real]

        return recursively_apply(cut, data)

    def reduce(self, tensor: Any, reduction: collectives.Reduction = "sum", scale: float = 1.0) -> Any:
        """Combine tensors over all ranks. See `collectives.reduce`.

        With tensor parallelism, ranks that compute on the same batch contribute to a sum only once.
        """
        copies = self._tensor_parallel_size if reduction == "sum" else 1
        return collectives.reduce(tensor, reduction, scale / copies)

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` reports on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set the flag since the last check. All ranks must call this."""
        flag = torch.tensor(int(self._trigger), device=self.device)
        self._trigger = False
        return bool(collectives.reduce(flag, "max").item())

    def _real_rows(self, rows: int) -> int:
        """Return how many of the `rows` gathered in the current step belong to real samples, not to repetitions."""
        loader = self.gradient_state.active_dataloader
        return loader.real_rows(rows) if isinstance(loader, ShardedDataLoader) else rows


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
