"""Wrappers for methods of Transformers and PEFT models that need unsharded parameters or would replace them."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

from torch import nn

from fullshard.core.errors import LifecycleError
from fullshard.core.schedule import REDUCTIONS_IN_FLIGHT
from fullshard.engine.extension import Extension
from fullshard.engine.parameter import sharded_parameter_of
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.unit import Unit
from fullshard.features.torch_compat import torch_private
from fullshard.features.torch_compat.state import TorchState


def replace_methods(module: nn.Module, unit: Unit) -> None:
    """Wrap those methods of a module that do not work with sharded parameters."""
    for found_by, name, around in (
        ("save_pretrained", "save_pretrained", _refuse_saving_intervals),
        ("prepare_inputs_for_generation", "generate", functools.partial(_generate_unsharded, unit=unit)),
        ("_activate_lora", "_activate_lora", _keep_version),
        ("resize_token_embeddings", "resize_token_embeddings", _refuse_resizing),
    ):
        if hasattr(module, found_by) and name not in module.__dict__:
            setattr(module, name, around(module))


def _refuse_saving_intervals(module: nn.Module) -> Callable[..., Any]:
    """Wrap `save_pretrained` to raise an error if it would save this rank's intervals as complete weights."""
    save: Any = module.save_pretrained

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(save).bind(*args, **kwargs).arguments
        given = arguments.get("state_dict", kwargs.get("state_dict"))
        tensors = (module.state_dict() if given is None else given).values()  # they may be unsharded at the moment
        if any(isinstance(tensor, ShardedTensor) for tensor in tensors):
            raise LifecycleError(
                f"{type(module).__name__}.save_pretrained would save this rank's intervals as if they were the "
                "complete weights",
                hint=(
                    "on every rank, call trainer.save_model, Accelerator.save_model, fullshard.checkpoint.export_hf "
                    "or, with a prepared model, save_pretrained(directory, "
                    "is_main_process=accelerator.is_main_process); or pass "
                    "state_dict=fullshard.checkpoint.full_state_dict(model)"
                ),
            )
        return save(*args, **kwargs)

    return save_pretrained


def _keep_version(module: nn.Module) -> Callable[..., Any]:
    """Wrap PEFT's `_activate_lora` to keep the parameter's version, although torch increments it."""
    activate: Any = module._activate_lora

    @contextlib.contextmanager
    def activate_lora(*args: Any, **kwargs: Any) -> Iterator[None]:
        parameter = cast("Any", module).get_param()
        with contextlib.ExitStack() as active:
            version = parameter._version
            active.enter_context(activate(*args, **kwargs))
            torch_private.set_versions((parameter,), (version,))  # no value has changed
            yield

    return activate_lora


def _generate_unsharded(module: nn.Module, unit: Unit) -> Callable[..., Any]:
    """Wrap `generate` to keep the outermost unit unsharded, because its parameters are used between forwards, too."""
    method: Any = module.generate

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        schedule = unit.schedule
        outermost = schedule.units[-1]
        if not outermost.is_at_rest:
            return method(*args, **kwargs)
        schedule.reset_if_failed()
        outermost.unshard()
        outermost.is_pinned = True
        try:
            made = method(*args, **kwargs)
        finally:  # after a failure, do not wait for ranks that may be elsewhere
            outermost.is_pinned = False
            outermost.reshard()
        schedule.settle()
        return made

    return generate


def _refuse_resizing(module: nn.Module) -> Callable[..., Any]:
    """Wrap `resize_token_embeddings` to raise an error, because the new parameters would not belong to a unit."""
    resize: Any = module.resize_token_embeddings

    @functools.wraps(resize)
    def resize_token_embeddings(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        embeddings: Any = module.get_input_embeddings()  # type: ignore[operator]
        weight = sharded_parameter_of(embeddings.weight)
        rows = (embeddings.weight if weight is None else weight).shape[0]
        if new_num_tokens in (None, rows) and not any((*args, *kwargs.values())):
            return embeddings
        raise LifecycleError(
            f"resize_token_embeddings({new_num_tokens}) was called on {type(module).__name__}, a sharded model with "
            f"{rows} tokens, but the parameters are fixed once a model is sharded",
            hint="resize before fully_shard, shard_model or prepare",
        )

    return resize_token_embeddings


class TorchCompat(Extension):
    """Gives the modules of one model the attributes and methods that torch, Transformers and PEFT expect."""

    settings: ClassVar[Mapping[str, Any]] = {"post_optim_event": None, "in_flight": REDUCTIONS_IN_FLIGHT}
    post_optim_event: Any  # event that the next forward waits for once, before it gathers
    in_flight: int  # number of reductions that may be in progress in addition to the one being collected

    def assembled(self) -> None:
        """Attach torch's state object to each unit, and wrap library methods that cannot use sharded parameters."""
        self.set_reductions_in_flight(self.in_flight)
        for unit in self.model.units:  # inner units first: each method is wrapped by the innermost unit around it
            for module in unit.modules:
                torch_private.mark_fully_sharded(module)
                torch_private.leave_state(module, TorchState(unit))
                for inner in module.modules():
                    replace_methods(inner, unit)

    def set_reductions_in_flight(self, count: int) -> None:
        """Set `in_flight` for the complete model."""
        self.in_flight = self.model.backward.reducer.order.in_flight = count

    def forward_begins(self) -> None:
        """Wait for `post_optim_event`, because gathers read main weights that another stream may still be writing."""
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
