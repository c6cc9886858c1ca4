"""The Accelerator's methods that divide data loaders over the ranks and control the iteration over them."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from fullshard.api import collectives
from fullshard.api.checkpointing import Checkpointing
from fullshard.api.data import ShardedDataLoader, sampler_of, skip_first_batches
from fullshard.api.sharding import is_sharded
from fullshard.core.errors import ConfigError
from fullshard.features.sequence_parallel import cut_batch
from fullshard.launch import cuda

_EVEN_ANYWAY = (
    "even_batches=False is only supported for map-style datasets: an iterable one is divided into as many batches of "
    "the same size for every rank"
)


class Loaders(Checkpointing):
    """The part of the Accelerator that prepares data loaders."""

    device_placement: bool
    rng_types: set[str]
    _has_loader_config = _is_joined = False
    _said: frozenset[str] = frozenset()

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> ShardedDataLoader:
        """Divide a data loader over the ranks.

        Args:
            data_loader: the loader.
            device_placement: whether batches move to the device. None uses the Accelerator's setting.
            slice_fn_for_dispatch: must be None, because batches are made for each rank, even with `dispatch_batches`.

        Raises:
            ConfigError, DataError: see `ShardedDataLoader`.
        """
        if slice_fn_for_dispatch is not None:
            raise ConfigError(
                "slice_fn_for_dispatch is not supported, because batches are never sliced",
                hint="remove it: rank 0 collates a separate batch for each rank",
            )
        if isinstance(data_loader, ShardedDataLoader):
            self._remember(data_loader, self._dataloaders)
            return data_loader
        config = self.dataloader_config
        self._say_order(data_loader)
        places = self.device_placement if device_placement is None else device_placement
        prepared = ShardedDataLoader(
            data_loader,
            rank=self.process_index // self._ranks_per_batch,
            world_size=self._data_parallel_size,
            device=self.device if places else None,
            split_batches=config.split_batches,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            synchronize=self._synchronize_rng,
            even_batches=config.even_batches,
            dispatch_batches=config.dispatch_batches,
            on_uneven=self._note_uneven,
            ranks_per_batch=self._ranks_per_batch,
            cut=self._cut_batch if self._cuts_batches else None,
        )
        if not config.even_batches and prepared.share.is_always_even:
            warnings.warn(_EVEN_ANYWAY, stacklevel=2)
        self._dataloaders.append(prepared)
        return prepared

    @property
    def _cuts_batches(self) -> bool:
        """Return whether prepared loaders yield this rank's part of the sequences."""
        return self._config.parallelism.sp_size > 1

    def _cut_batch(self, batch: Any) -> dict[str, Any]:
        """Return this rank's part of the sequences in a batch. See `cut_batch`."""
        sp, handler = cast("Any", self.torch_device_mesh)["sp"], self.state.parallelism_config.sp_handler
        length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
        return cut_batch(batch, rank=sp.get_local_rank(), size=sp.size(), length=length)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Return a prepared loader unchanged, because it already cuts its batches along the sequence."""
        if self._cuts_batches and not isinstance(dl, ShardedDataLoader):
            raise ConfigError("deepspeed_ulysses_dl_adapter got a loader that is not prepared", hint="prepare it first")
        return dl

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let a script iterate within the block over loaders whose last step is not filled up.

        If some ranks also get more batches than others, raise an error, because all ranks of a sharded model must run
        every step together.

        Args:
            joinables: models and optimizers.
            even_batches: whether prepared loaders fill up an incomplete last step in the block. None keeps their
                setting.

        Raises:
            ConfigError: a loop in the block has more batches on some ranks than on others.
        """
        if not any(isinstance(one, nn.Module) and is_sharded(one) for one in joinables):
            names = ", ".join(type(one).__name__ for one in joinables)
            warnings.warn(
                f"join_uneven_inputs has no effect on {names}: as in Accelerate, joining is only supported for "
                "multi-GPU (or multi-CPU) training, of models that were prepared",
                stacklevel=3,
            )
        with contextlib.ExitStack() as after:
            for loader in self._dataloaders if even_batches is not None else ():
                deal = loader.share.deal
                if not loader.share.is_always_even:
                    after.callback(setattr, deal, "even", deal.even)
                    deal.even = bool(even_batches)
                elif not even_batches:
                    warnings.warn(_EVEN_ANYWAY, stacklevel=3)
            after.callback(setattr, self, "_is_joined", self._is_joined)
            self._is_joined = True
            yield

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader without its first batches. See `data.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said |= {message}
            self._say(message)

    def _say_order(self, loader: DataLoader[Any]) -> None:
        """Report once that `use_seedable_sampler=False` has no effect, if the script has set a configuration."""
        if (
            self._has_loader_config
            and not self.dataloader_config.use_seedable_sampler
            and hasattr(sampler_of(loader), "generator")
        ):
            self._say_once(
                "use_seedable_sampler=False has no effect: the order of samples depends only on the seed and the "
                "epoch; Accelerate gives the same order with use_seedable_sampler=True"
            )

    def _note_uneven(self) -> None:
        if not self._models:
            return
        found = f"rank {self.process_index}: even_batches=False gives some ranks more batches in this epoch than others"
        hint = (
            "keep even_batches=True (gather_for_metrics drops the repetitions), or drop the incomplete step with "
            "DataLoader(drop_last=True)"
        )
        if self._is_joined:
            raise ConfigError(f"{found}, but a sharded model must run on all ranks", hint=hint)
        warnings.warn(
            f"{found}; if a prepared model runs in this loop, those ranks will wait for the others until the time-out. "
            f"Hint: {hint}",
            stacklevel=3,
        )

    def _synchronize_rng(self) -> None:
        if "torch" in self.rng_types:
            torch.set_rng_state(collectives.broadcast_object(torch.get_rng_state()))
        if "cuda" in self.rng_types and self.device.type == "cuda":
            cuda.set_random_state(collectives.broadcast_object(cuda.random_state(self.device)), self.device)
