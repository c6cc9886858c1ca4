"""Methods of `FSDPModule` provided for compatibility with torch."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import require_unit, unit_of
from fullshard.engine.module import FSDPModule
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features.torch_compat.library_methods import TorchCompat
from fullshard.features.torch_compat.state import TorchState


def replicated(module: object, wrapper: str) -> LifecycleError:
    """Return the error to raise if `wrapper` is put around a module that is a unit or contains one."""
    return LifecycleError(
        f"{wrapper} around a sharded {user_class(module).__name__} would replicate this rank's intervals",
        hint="remove the wrapper: the units already reduce gradients over all ranks",
    )


@functools.cache
def check_data_parallel() -> None:
    """Make DistributedDataParallel raise an error for sharded parameters that it is not told to ignore."""
    init: Any = DistributedDataParallel.__init__

    @functools.wraps(init)
    def checked(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for path, inner in module.named_modules():
            if isinstance(inner, FSDPModule):
                own = inner.named_parameters(path)
                if not all(name in ignored for name, parameter in own if isinstance(parameter, ShardedTensor)):
                    raise replicated(inner, "DistributedDataParallel")
        init(self, module, *args, **options)

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]


_STAGING = "there are no staging buffers"
_FIXED: Mapping[str, tuple[Callable[..., object], str]] = {
    "_set_unshard_async_op": (lambda self, async_op: True, "gathers are always asynchronous"),
    "set_allocate_memory_from_process_group_for_comm": (lambda self, enable: not enable, _STAGING),
    "set_custom_all_gather": (
        lambda self, comm: False,
        "a bucket is gathered in place, which torch's interface does not support",
    ),
    "set_custom_reduce_scatter": (
        lambda self, comm: False,
        "gradients are collected directly in the reduction's input",
    ),
    "set_force_sum_reduction_for_comms": (
        lambda self, enable: True,
        "all reductions are sums, and their divisor is applied separately",
    ),
    "set_manual_backward_finalization": (
        lambda self, enabled: True,
        "every backward completes its reductions, and finalize_backward() reduces what earlier ones deferred",
    ),
    "set_reduce_scatter_unused_params": (
        lambda self, reduce_scatter_unused_params, *, recurse=True: True,
        "a missing gradient is reduced as zeros, because other ranks may have used it",
    ),
    "set_separate_reduce_scatter_group": (
        lambda self, enable=True, *, recurse=True: enable,
        "gathers and reductions use separate groups, so that reductions do not wait for gathers",
    ),
    "set_symm_mem_for_comm": (lambda self, backend="NCCL": False, _STAGING),
}
"""Methods without effect: whether the engine always behaves as requested by the arguments, and why it does.
"""


def _fixed(name: str, is_so: Callable[..., object], why: str) -> Callable[..., None]:
    @functools.wraps(is_so)
    def method(self: nn.Module, *args: Any, **options: Any) -> None:
        if not is_so(self, *args, **options):
            given = ", ".join([*map(str, args), *(f"{option}={value}" for option, value in options.items())])
            raise LifecycleError(f"{name}({given}) is not supported: {why}", hint="remove the call")

    method.__name__, method.__qualname__ = name, f"{TorchMethods.__name__}.{name}"
    method.__doc__ = f"Accept the value that matches the engine's behavior, and raise for any other: {why}."
    return method


def _on_stream(hook: Callable[[torch.Tensor], object], stream: Any, reduced: torch.Tensor) -> None:
    """Call a hook on a stream, after earlier work on the current stream and before later work on it."""
    if reduced.device.type == "cpu" and not isinstance(stream, torch.cpu.Stream):  # the host is synchronous
        hook(reduced)
        return
    device = torch.get_device_module(reduced.device)
    current = device.current_stream()
    stream.wait_stream(current)
    with device.stream(stream):
        hook(reduced)
    current.wait_stream(stream)


class GradientReductionHandle:
    """Stand for the result of `finalize_backward(async_op=True)`."""

    def wait(self) -> None:
        """Return at once, because the reduction is complete."""


class TorchMethods(FSDPModule):
    """The methods of torch's `FSDPModule`, with torch's names and arguments. Methods without effect are in `_FIXED`."""

    def reset_iter_state(self) -> None:
        """Reset the model after a forward or backward has raised an error. Gradients that are not yet reduced are lost.

        The next step does this automatically. Call this method to do it earlier.

        Raises:
            LifecycleError: The module is not the outermost unit.
        """
        schedule = require_unit(self).schedule
        if require_unit(self) is not schedule.units[-1]:
            raise LifecycleError(
                f"reset_iter_state() was called on unit {require_unit(self).name!r}, which is not the outermost unit",
                hint="call it on the module that was passed to fully_shard last",
            )
        schedule.reset()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the model's gradients that backwards under `set_requires_gradient_sync(False)` have deferred.

        Every rank must call this after `set_requires_gradient_sync(True)`. The pipeline schedules of torch 2.15 do so.
        """
        require_unit(self).schedule.backward.reduce_if_kept()
        return GradientReductionHandle() if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the number by which the sum of gradients over all ranks is divided; by default, the number of ranks."""
        require_unit(self).reduction.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`. This is torch's older name for that method."""
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward unshards the parameters of this unit.

        Pass False if the backward of the unit does not read the parameters, as in an embedding. If backward reads them
        anyway, autograd raises an error that says they were changed.
        """
        require_unit(self).unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Set the units to unshard while this unit runs forward. The default is the next unit in recorded order."""
        require_unit(self).prefetched_in_forward = [require_unit(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """Set the units to unshard while this unit runs backward. By default, this is the unit recorded before it."""
        require_unit(self).prefetched_in_backward = [require_unit(module) for module in modules]

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object] | None, *, stream: Any = None) -> None:
        """Call `hook` with each reduced gradient of this unit, shape (S,), before it is added to `.grad`.

        The hook may change the gradient in place, for example to sum it over the ranks of another mesh. Every rank
        calls it for the same buckets in the same order.

        Args:
            hook: the function, or None to remove it.
            stream: the stream to call it on, after earlier work and before later work on the current stream. Not
                allowed with a replicate axis, because the engine reduces gradients along that axis on a separate
                stream.

        Raises:
            ConfigError: A stream is given, and there is a replicate axis.
        """
        unit = require_unit(self)
        if stream is not None and unit.mesh.replicate_size > 1:
            # Use torch's exact text, which scripts may compare. The details are in a note.
            error = ConfigError("stream cannot be set when using native HSDP")
            error.add_note(
                f"{unit} has {unit.mesh.replicate_size} replicas, over which gradients are reduced anyway\n"
                "hint: omit stream, or shard over a 1-D mesh and reduce between replicas in the hook"
            )
            raise error
        unit.reduction.hook = hook if hook is None or stream is None else functools.partial(_on_stream, hook, stream)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward wait for `event` before it gathers.

        This is needed only if the optimizer runs on another stream than forward.
        """
        TorchCompat.of(require_unit(self).schedule).post_optim_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in progress in addition to the one being collected; the default is 1.

        The setting applies to the whole model regardless of the unit it is set on, because the units share these
        buffers.

        Raises:
            TypeError, ValueError: The value is not a positive integer.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        TorchCompat.of(require_unit(self).schedule).set_reductions_in_flight(max_input_buffers)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether resharding keeps a unit's memory, so that unsharded parameters keep their addresses.

        Kernel graphs (such as CUDA graphs) need this. It takes as much memory as if the units were never resharded, and
        parameters are still gathered each time.
        """
        for unit in self._units(recurse):
            unit.keeps_memory = keep

    def _get_fsdp_state(self) -> Any:
        return TorchState(require_unit(self))

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise replicated(self, "DataParallel")


for _name, (_is_so, _why) in _FIXED.items():
    setattr(TorchMethods, _name, _fixed(_name, _is_so, _why))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit, such as `encode` or `generate`, unshard the unit as `forward` does.

    Backward may start only from the return value of the method. If the module is not a unit, the function has no
    effect. Its name is torch's.

    Raises:
        WrapError: The module does not have this method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise WrapError(
            f"{type(module).__name__} has no method {method_name!r}", hint="pass the name of an existing method"
        )

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return unit.run_method(module, method, *args, **kwargs)

    setattr(module, method_name, run)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Check that the modules are units. Nothing else is needed to share communicators and streams between them.

    Models on the same ranks always share them. The function has torch's name.

    Raises:
        WrapError: One of the modules is not a unit.
    """
    for module in modules:
        if unit_of(module) is None:
            raise WrapError(
                f"share_comm_ctx: {type(module).__name__} is not a unit", hint="call fully_shard on it first"
            )
