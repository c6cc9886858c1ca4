"""Methods of PEFT models that work on sharded parameters, which PEFT itself does not support.

They work layer by layer: PEFT's own code merges or unmerges a copy of the layer with unsharded parameters, and every
rank keeps its interval of the result. The results are bit-identical to PEFT's.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.full_state import full_tensor, gather_when_all_save
from fullshard.checkpoint.merging import check_mergeable, copy_module
from fullshard.checkpoint.tensors import local_tensors, rest
from fullshard.core.errors import LifecycleError
from fullshard.features import ShardedParameter


def merge_adapters(
    model: nn.Module, adapter_names: Sequence[str] | None = None, safe_merge: bool = False, progressbar: bool = False
) -> None:
    """Merge adapters of a PEFT model into its sharded base weights, in place. All ranks must call this.

    PEFT's `merge_adapter` has the same arguments. As after that method, forwards then skip the adapters. If
    `safe_merge` is set and the merged weights of a layer would not be finite, raise an error that names the layer. The
    layers before it have already been merged by then.
    """
    check_mergeable(model)
    names = None if adapter_names is None else list(adapter_names)
    rest(model)
    tqdm: Any = importlib.import_module("tqdm")  # a dependency of PEFT
    for layer in tqdm.tqdm(list(_layers(model)), desc="merging", disable=not progressbar):
        _change(layer, lambda whole: whole.merge(safe_merge=safe_merge, adapter_names=names))


def unmerge_adapters(model: nn.Module) -> None:
    """Undo the merge of all merged adapters. As with PEFT, rounding errors may remain. All ranks must call this."""
    rest(model)
    for layer in _layers(model):
        if layer.merged_adapters:
            _change(layer, lambda whole: whole.unmerge())


def use_sharded_methods(model: Any) -> None:
    """Replace PEFT methods that would be wrong for sharded parameters with correct ones, or with ones that raise."""
    for name, method in (
        ("merge_adapter", merge_adapters),
        ("unmerge_adapter", unmerge_adapters),
        ("merge_and_unload", _merge_and_unload),
        ("add_adapter", _refuse("add_adapter")),
        ("load_adapter", _load_adapter),
        ("delete_adapter", _refuse("delete_adapter")),
        ("add_weighted_adapter", _refuse("add_weighted_adapter")),
    ):
        if hasattr(model, name):
            setattr(model, name, MethodType(method, model))
    tuner = model.base_model
    if hasattr(tuner, "disable_adapter_layers"):

        def disable_adapter_layers() -> None:
            # PEFT would unmerge in the next forward, which discards its unsharded weights, so unmerge now.
            unmerge_adapters(model)
            type(tuner).disable_adapter_layers(tuner)

        tuner.disable_adapter_layers = disable_adapter_layers


def _merge_and_unload(
    self: Any, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> nn.Module:
    merge_adapters(self, adapter_names, safe_merge=safe_merge, progressbar=progressbar)
    plain: nn.Module = self.base_model.unload()
    if hasattr(plain, "save_pretrained"):
        gather_when_all_save(plain)
    return plain


def _load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    if adapter_name not in self.peft_config:
        _refuse("load_adapter")(self)
    return type(self).load_adapter(self, model_id, adapter_name, *args, **kwargs)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise LifecycleError(
            f"{name} cannot be called on a sharded {type(self).__name__}, because its set of parameters is fixed",
            hint="add, load or delete adapters before prepare or Trainer; switch between them with set_adapter",
        )

    return refuse


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "merged_adapters") and hasattr(module, "unmerge"))


@torch.no_grad()
def _change(layer: Any, change: Callable[[Any], object]) -> None:
    """Let PEFT change an unsharded copy of a layer, and copy this rank's part of the new base weights to the layer."""
    known = {id(local.tensor): local for local in local_tensors(layer)}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return full_tensor(known[id(tensor)]).clone() if id(tensor) in known else tensor.clone()

    twin: Any = copy_module(layer, whole, {})
    change(twin)
    changed = dict(twin.get_base_layer().named_parameters())
    for name, parameter in layer.get_base_layer().named_parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.local.copy_(parameter.spec.cut(changed[name]))
        else:
            parameter.copy_(changed[name])
    # DoRA records the norms used in the merge, which it needs to unmerge.
    layer.merged_adapters, layer._caches = twin.merged_adapters, getattr(twin, "_caches", {})
