"""Detection of optimizers that would compute wrong results because each rank has only a part of each tensor."""

import warnings

import torch

from fullshard.comm import torch_private
from fullshard.core.errors import OptimizerError
from fullshard.engine.extension import Extension
from fullshard.engine.parameter import sharded_parameters
from fullshard.engine.step.adapters import adapter_of

NEEDS_WHOLE_TENSORS: dict[str, frozenset[str]] = {
    "torch": frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"}),
    "transformers": frozenset({"Adafactor"}),
    "bitsandbytes": frozenset({"LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"}),
    "apex": frozenset({"FusedLAMB", "FusedLARS", "FusedMixedPrecisionLamb", "FusedNovoGrad"}),
    "came_pytorch": frozenset({"CAME"}),
    "dion": frozenset({"Dion", "Dion2", "Muon", "NorMuon"}),
    "distributed_shampoo": frozenset({"DistributedShampoo"}),
    "lomo_optim": frozenset({"AdaLomo", "Lomo"}),
    "muon": frozenset({"Muon", "MuonWithAuxAdam"}),
    "peft": frozenset({"LoraFAOptimizer", "RiemannianPreconditionedOptimizer"}),
    "pytorch_optimizer": frozenset(
        {"AdaFactor", "Alice", "CAME", "DASH", "DistributedMuon", "EmoFact", "Kron", "RACS", "Shampoo", "SM3", "SOAP"}
        | {"SPAM", "SPlus", "StableSPAM", "LOMO", "AdaLOMO"}
    ),
    "torch_optimizer": frozenset({"Adafactor", "Shampoo"}),
    **dict.fromkeys(("apollo_torch", "galore_torch"), frozenset({"Adafactor", "GaLoreAdafactor"})),
}
"""Optimizers, by package, that would compute wrong updates for sharded parameters. Their update of an element depends
on the rest of its tensor, but they neither use only torch functions on the tensor nor divide the work over ranks. Other
optimizers with such updates can be used, because torch functions give them results for the unsharded tensor."""

_STEPS_IN_BACKWARD = frozenset({"Lomo", "AdaLomo", "LOMO", "AdaLOMO"})
"""Optimizers among these that update unsharded parameters in their own hooks when gradients arrive."""

_OF_ONE_PARAMETER = ("came_pytorch.", "pytorch_optimizer.", "torch_optimizer.")
"""Packages whose optimizers update each parameter independently of the others."""


class OptimizerCheck(Extension):
    """Checks the optimizers that update one model's parameters."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that needs complete tensors, or contiguous memory for a parameter of several tensors."""
        adapter = adapter_of(optimizer)
        if not adapter.works_on_parts:
            _check_whole(type(optimizer))
        wrappers = (p for p in sharded_parameters(optimizer) if torch_private.has_own_dispatch(type(p.local)))
        wrapper = next(wrappers, None)
        if wrapper is not None and adapter.needs_plain_memory:
            raise OptimizerError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} needs contiguous memory, but {wrapper.name} "
                f"is a {type(wrapper.local).__name__}, which consists of several tensors",
                hint="use one of torch's optimizers, which call the operations that the class implements",
            )


def _check_whole(kind: type) -> None:
    """Raise an error if this optimizer type needs complete tensors, or warn if only its name suggests that it does."""
    name, names = f"{kind.__module__}.{kind.__name__}", {cls.__name__ for cls in kind.__mro__}
    ours = _in_place_of(kind, names)
    if any(cls.__name__ in NEEDS_WHOLE_TENSORS.get(cls.__module__.partition(".")[0], ()) for cls in kind.__mro__):
        instead = "use an elementwise optimizer such as AdamW, SGD or Lion"
        if names & _STEPS_IN_BACKWARD:
            instead = "use AdamW or SGD with fullshard.step_in_backward (training.step_in_backward)"
        elif kind.__module__.startswith(_OF_ONE_PARAMETER) and not kind.__name__.startswith("Distributed"):
            instead = _on_owners(kind)
        raise OptimizerError(f"{name} needs complete tensors, but each rank has only a part", hint=ours or instead)
    if ours:
        warnings.warn(
            f"{name}: every rank gathers all matrices in every step and repeats the same computation. If the optimizer "
            f"is what its name suggests, {ours}",
            stacklevel=6,
        )


def _in_place_of(kind: type, names: set[str]) -> str:
    """Return a hint about what to use instead of this type of optimizer, or an empty string if nothing replaces it."""
    if "Adafactor" in names:
        return _on_owners(kind, "whole_parameters=True, ...")
    if "Muon" in names:
        return (
            "write fullshard.optim.Muon(model, lr=...) instead, with equal results and each matrix computed by one rank"
        )
    return _on_owners(kind) if names & {"SOAP", "Shampoo"} else ""


def _on_owners(kind: type, options: str = "...") -> str:
    name = kind.__name__
    return f"write fullshard.optim.OnOwners(model, {name}, {options}) instead, which computes each matrix on one rank"
