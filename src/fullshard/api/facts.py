"""The read-only properties of an Accelerator, under Accelerate's names."""

import functools
from operator import methodcaller
from typing import Any

from accelerate import Accelerator as Theirs
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.api.accelerates import parallelism_config, tensor_parallel_size
from fullshard.api.accelerator_state import AcceleratorState
from fullshard.api.forwarding import forwarded
from fullshard.api.gathering import Gathering
from fullshard.comm import torch_private
from fullshard.config.schema import RunConfig
from fullshard.core.dtypes import AUTOCAST
from fullshard.core.errors import tell


class Facts(Gathering):
    """The part of the Accelerator that provides read-only information."""

    _config: RunConfig
    _parallelism: Any
    state: AcceleratorState
    handlers: dict[str, Any]
    dataloader_config: Any
    project_configuration: Any
    deepspeed_plugin = None
    multi_device = False  # whether models are replicated by DDP
    is_fsdp2 = True  # a model is sharded in place
    is_composable_parallelism_enabled = True
    should_save_model = True  # every rank takes part in saving
    has_lomo_optimizer = False
    delayed_fp8_autocast = False
    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = None
    flag_tensor = None

    distributed_type: DistributedType = forwarded("state.distributed_type")
    """Always FSDP, even on one rank."""
    use_distributed: bool = forwarded("state.use_distributed")
    """True if there are several ranks."""
    mixed_precision: str = forwarded("state.mixed_precision")
    """The precision mode: `no`, `fp32`, `bf16`, `fp16` or `fp8`."""

    native_amp: bool = forwarded("mixed_precision", AUTOCAST.__contains__)
    """True if models run under autocast."""
    fp8_enabled: bool = forwarded("mixed_precision", "fp8".__eq__)
    has_fp8_handler: bool = forwarded("ao_recipe_handler", lambda recipe: recipe is not None)
    fp8_backend: str = forwarded("has_fp8_handler", lambda has: "AO" if has else "NO")
    parallelism_config: Any = forwarded("state.parallelism_config")
    """The `ParallelismConfig` that the script passed, or None."""

    def _parallelism_of_settings(self) -> Any:
        """Return the `ParallelismConfig` that the launcher's settings request, or None."""
        if self._ranks_per_sequence == 1:
            return None
        sizes = (*self._data_parallel_sizes, self._tensor_parallel_size)
        return parallelism_config(self._config.parallelism, *sizes)

    @functools.cached_property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Return a mesh with the axes dp_replicate, dp_shard and, if they have several ranks, cp, sp and tp.

        The mesh also has Accelerate's joint axes: `dp` for batches, `dp_cp` for losses, `dp_shard_cp` for parameters.
        The last two include sp. Return None if there is only one rank or if neither a `ParallelismConfig` nor tensor
        parallelism needs a mesh.
        """
        if self.num_processes == 1 or (self.parallelism_config is None and self._tensor_parallel_size == 1):
            return None
        axes = self._config.parallelism
        others = {"cp": axes.cp_size, "sp": axes.sp_size, "tp": self._tensor_parallel_size}
        replicas, shards = self._data_parallel_sizes
        sizes = {"dp_replicate": replicas, "dp_shard": shards} | {k: size for k, size in others.items() if size > 1}
        mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sharded = tuple(name for name in sizes if name not in ("dp_replicate", "tp"))
        for name, joined in (("dp", ("dp_shard",)), ("dp_cp", sharded)):
            torch_private.flattened(mesh["dp_replicate", *joined], name)
        torch_private.flattened(mesh[sharded], "dp_shard_cp")
        return mesh

    @property
    def _tensor_parallel_size(self) -> int:
        return tensor_parallel_size(self._parallelism)

    _ranks_per_sequence: int = forwarded("_config.parallelism.ranks_per_sequence")

    @property
    def tensor_parallel_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group, which is also the index of its part of layers."""
        return self.process_index % self._tensor_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Return the index of the model replica to which this rank's shard belongs."""
        return self.process_index // self._tensor_parallel_size // self._shard_size()

    @property
    def context_parallel_rank(self) -> int:
        """Return this rank's index in its context-parallel group."""
        axes = self._config.parallelism
        return self.process_index // self._tensor_parallel_size // axes.sp_size % axes.cp_size

    @property
    def data_parallel_shard_rank(self) -> int:
        """Return the index of this rank's batch among the batches of its model replica."""
        return self.process_index // self._ranks_per_batch % self._data_parallel_sizes[1]

    autocast_handler: Any = forwarded("handlers", methodcaller("get", "AutocastKwargs"))
    """The settings of autocast."""

    scaler_handler: Any = forwarded("handlers", methodcaller("get", "GradScalerKwargs"))
    """The script's arguments for the loss scaler, or None."""
    init_handler: Any = forwarded("handlers", methodcaller("get", "InitProcessGroupKwargs"))
    """The script's arguments for the process group, or None."""
    ddp_handler: Any = forwarded("handlers", methodcaller("get", "DistributedDataParallelKwargs"))
    """The script's arguments for DDP, or None. They have no effect."""
    profile_handler: Any = forwarded("handlers", methodcaller("get", "ProfileKwargs"))
    """The script's settings for `profile()`, or None."""

    split_batches: bool = forwarded("dataloader_config.split_batches", bool)
    """True if a loader's batch size counts the samples of all ranks together."""
    dispatch_batches: bool = forwarded("dataloader_config.dispatch_batches", bool)
    """True if rank 0 reads the batches of all ranks."""
    even_batches: bool = forwarded("dataloader_config.even_batches", bool, may_set=True)
    """True if loaders prepared from now on fill up an incomplete last step of an epoch."""
    use_seedable_sampler: bool = forwarded("dataloader_config.use_seedable_sampler", bool)
    """True if the script asked for seeded samplers. Samplers are always seeded."""
    non_blocking: bool = forwarded("dataloader_config.non_blocking", bool)
    """True if batches are copied to the device without waiting."""

    use_stateful_dataloader: bool = forwarded("dataloader_config.use_stateful_dataloader", bool)
    """True if the script asked for stateful loaders. Prepared loaders are always stateful."""

    project_dir: str | None = forwarded("project_configuration.project_dir")
    """Base directory for `save_state`."""
    logging_dir: str | None = forwarded("project_configuration.logging_dir")
    """Directory for the script's logs."""
    save_iteration: int = forwarded("project_configuration.iteration", int)
    """Number of the next checkpoint."""

    gradient_accumulation_steps: int = forwarded("gradient_state.num_steps", may_set=True)
    """Micro-batches per optimizer step."""
    sync_gradients: bool = forwarded("gradient_state.sync_gradients", may_set=True)
    """True if the current micro-batch ends a step."""
    verify_device_map = Theirs.verify_device_map

    def _say(self, message: str) -> None:
        if self.is_main_process:
            tell(f"fullshard: {message}")

    def _shard_size(self) -> int:
        """Return the number of ranks that together hold one replica of a model, or one part that is split from it."""
        sharding = self._config.sharding
        size = sharding.resolved_shard_size(self.process.environment.local_world_size)
        found = sharding.resolved_strategy().mesh_shape(self.num_processes // self._tensor_parallel_size, size)[1]
        self._config.parallelism.check_shards(found)
        return found

    @property
    def _data_parallel_sizes(self) -> tuple[int, int]:
        """Return the number of model replicas and the number of batches of each."""
        shards = self._shard_size() // self._ranks_per_sequence
        return self._data_parallel_size // shards, shards
