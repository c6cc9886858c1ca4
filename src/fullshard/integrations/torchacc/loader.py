"""`AsyncLoader`, which pads batches to one of a few lengths and moves them to the device."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device

from fullshard.core.errors import ConfigError, DataError, tell

DEFAULT_PADDING: Mapping[str, float] = {"input_ids": 0, "attention_mask": 0, "labels": -100}
"""The default padding values for batches, by key."""

_NO_EFFECT = {
    **dict.fromkeys(
        ("loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads"),
        "the workers of a DataLoader fetch ahead: num_workers and prefetch_factor",
    ),
    "batches_per_execution": "there is no recorded graph to execute",
}


class AsyncLoader:
    """A loader that pads the batches of another loader and moves them to the device.

    All other attributes of the wrapped loader are available on this loader too.

    Args:
        loader: The loader. It either divides its data over the ranks or only has this rank's data.
        device: The device to which batches are moved.
        buckets: The lengths to which batches are padded, in ascending order. If a batch is longer than all buckets, its
            length is added to them.
        max_length: The largest length, as an alternative to `buckets`. The other lengths are evenly spaced below it.
        num_buckets: The number of lengths if `max_length` is given.
        pad_value_dict: The value to pad with for each key of a batch. By default, `input_ids` and `attention_mask` are
            padded with 0 and `labels` with -100. Tensors with fewer than two dims (one value per sample) are not
            padded.
        other: TorchAcc's other arguments, which have no effect. A message about each is printed.

    Raises:
        ConfigError: If an argument is invalid.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        buckets: list[int] | None = None,
        max_length: int | None = None,
        num_buckets: int | None = 8,
        pad_value_dict: Mapping[str, float] | None = None,
        **other: Any,
    ) -> None:
        for name in other:
            if name not in _NO_EFFECT:
                raise ConfigError(f"AsyncLoader has no argument {name!r}", hint="check the arguments in its docstring")
            _say(f"{name} has no effect here: {_NO_EFFECT[name]}")
        self.loader, self.device = loader, torch.device(device)
        self.buckets = _bucket_lengths(buckets, max_length, 8 if num_buckets is None else num_buckets)
        if self.buckets is None and pad_value_dict is not None:
            raise ConfigError(
                "pad_value_dict has no effect without buckets or max_length", hint="set buckets or max_length"
            )
        self._padding = pad_value_dict

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield send_to_device(batch if self.buckets is None else self._padded(batch, self.buckets), self.device)

    def __getattr__(self, name: str) -> Any:
        # Only called for attributes that this object does not have, such as the dataset or set_epoch.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _padded(self, batch: Any, lengths: list[int]) -> dict[str, Any]:
        """Return a batch whose tensors are padded to the next larger bucket, so that few shapes occur."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"buckets require batches that are dicts, got a {type(batch).__name__}",
                hint="make the dataset or collate_fn return dicts",
            )
        rows = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
        known = DEFAULT_PADDING if self._padding is None else self._padding
        if rows.keys() - known.keys() or (self._padding is not None and known.keys() - batch.keys()):
            raise DataError(
                f"the batch has the keys {sorted(batch)}, but pad_value_dict has values for {sorted(known)}",
                hint=f"pass pad_value_dict with a value for each of {sorted(rows)}",
            )
        if (longest := max((value.shape[-1] for value in rows.values()), default=0)) > lengths[-1]:
            _say(f"a batch of length {longest} is longer than all buckets, {lengths}, and is added to them")
            lengths.append(longest)
        padded = {}
        for key, value in rows.items():
            bucket = lengths[bisect.bisect_left(lengths, value.shape[-1])]
            padded[key] = F.pad(value, (0, bucket - value.shape[-1]), value=known[key])
        return {**batch, **padded}


def _bucket_lengths(buckets: list[int] | None, max_length: int | None, num_buckets: int) -> list[int] | None:
    if buckets is not None and max_length is not None:
        raise ConfigError("buckets and max_length both set the lengths of batches", hint="use only one of the two")
    if max_length is not None:
        if max_length < 1 or num_buckets < 1:
            raise ConfigError(f"max_length and num_buckets must be at least 1, got {max_length} and {num_buckets}")
        return sorted({-(-max_length * (number + 1) // num_buckets) for number in range(num_buckets)})
    if buckets is None:
        return None
    if not buckets or buckets != sorted(set(buckets)) or buckets[0] < 1:
        raise ConfigError(
            f"buckets must be positive and ascending, got {buckets!r}", hint="pass a list such as [128, 256, 512]"
        )
    return list(buckets)


def _say(message: str) -> None:
    tell(f"fullshard: AsyncLoader: {message}")
