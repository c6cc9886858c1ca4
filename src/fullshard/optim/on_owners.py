"""Run any optimizer on the unsharded matrices of a sharded model. One rank owns and updates each matrix.

every rank     sends its interval of the weights and of the gradient
the owner      creates the optimizer for the unsharded matrix, gives it the matrix's state, and runs its step
every rank     receives its interval of the new weights
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.optim.with_adamw import AdamWOptions, MatricesWithAdamW, local_gradient, local_of

_REST = "rest"
"""The optimizer state of a matrix except its tensors: numbers, and the tensors' positions in lists and dicts."""


class OnOwners(MatricesWithAdamW):
    """Updates hidden matrices with any optimizer, each on the rank that owns it, and all other parameters with AdamW.

        from pytorch_optimizer import SOAP
        optimizer = fullshard.optim.OnOwners(model, SOAP, lr=3e-3, precondition_frequency=10)

    The owner of a matrix holds its optimizer state. `save_checkpoint` and `Accelerator.save_state` save this state, and
    any number of ranks can load it. The optimizer gets a convolution as a matrix with one row per output channel.

    With `whole_parameters=True`, the optimizer class updates every parameter in its original shape, including vectors
    and embeddings, and AdamW updates none. Classes such as `torch.optim.Adafactor` then give the same results as in a
    single process.

    Args:
        params: see `Muon`.
        optimizer: a class that updates a parameter only from its weights, its gradient and its state. Its `step` must
            not need a closure.
        whole_parameters: see above.
        options: the options of the class and `AdamWOptions`. AdamW also uses a learning rate and a weight decay that
            are given here.

    Raises:
        ConfigError: a value is invalid.
        OptimizerError: a group of matrices contains a vector.
    """

    keeps_matrices = True
    width = 2  # a weight and its gradient

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer: type[torch.optim.Optimizer],
        *,
        whole_parameters: bool = False,
        **options: Any,
    ) -> None:
        adamw: Any = {key: options.pop(key) for key in AdamWOptions.__annotations__ if key in options}
        self._class, self._options = optimizer, options
        self.name, self.algorithm = optimizer.__name__, optimizer.__name__.lower()
        known = self._made_with(torch.empty(1, 1), options).defaults
        shared = {key: known[key] for key in (*options, "lr", "weight_decay") if key in known}
        self._whole_parameters, self.least_dims = whole_parameters, 0 if whole_parameters else 2
        if whole_parameters and isinstance(params, nn.Module):
            params = [p for p in params.parameters() if p.requires_grad]
        super().__init__(params, {"weight_decay": 0.0, **shared, "flatten": whole_parameters}, **adamw)

    @property
    def sent_as(self) -> torch.dtype:  # type: ignore[override]
        """Return the dtype in which matrices are sent and updated: float64 if any matrix has it, or else float32."""
        is_double = any(parameter.dtype == torch.float64 for parameter in self._members())
        return torch.float64 if is_double else torch.float32

    def _made_with(self, weights: torch.Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
        """Create the optimizer for one matrix, with the current option values of the matrix's parameter group."""
        made = self._class([nn.Parameter(weights)], **self._options)
        own = made.param_groups[0]
        own.update({key: value for key, value in group.items() if key in made.defaults and key in own})
        return made

    def _check(self, group: dict[str, Any], where: str) -> None:
        """Validate the options by creating the optimizer, so that the user gets the error messages of its class."""
        options = {key: group[key] for key in self._options.keys() & group.keys()}
        self._class([nn.Parameter(torch.empty(1, 1))], **{**self._options, **options})

    def _given(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient, dtype = local_gradient(parameter), self.sent_as
        assert gradient is not None  # noqa: S101 -- of those that have one
        return torch.stack([local_of(parameter).detach().to(gradient.device, dtype), gradient.to(dtype)], dim=-1)

    def _made(self, parameter: torch.Tensor, number: int, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        given, gradient = matrix.unbind(-1)
        given, gradient = given.contiguous(), gradient.contiguous()
        if self._whole_parameters:
            given, gradient = given.view(parameter.shape), gradient.view(parameter.shape)
        made = self._made_with(given, group)
        own = made.param_groups[0]
        [weights] = own["params"]
        weights.grad = gradient
        kept, ending = self.state[parameter], f".{number}"
        if (rest := kept.get(_REST + ending)) is not None:
            saved = _with_tensors(rest, lambda name: _on(weights.device, kept[name + ending]))
            made.state[weights] = saved["state"]
            own.update({key: value for key, value in saved["group"].items() if key not in group})
        made.step()
        for key in [key for key in kept if key.endswith(ending)]:
            del kept[key]
        of_group = {key: value for key, value in own.items() if key != "params"}
        tensors: dict[str, torch.Tensor] = {}
        kept[_REST + ending] = _without_tensors({"state": dict(made.state[weights]), "group": of_group}, "", tensors)
        kept.update({name + ending: tensor for name, tensor in tensors.items()})
        result: torch.Tensor = weights.detach()
        return result

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        local_of(parameter).detach().copy_(update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, but keep that of matrices as it was saved, without a cast."""
        super().load_state_dict(state_dict)
        saved, held = (
            itertools.chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, parameter in zip(saved, held, strict=True):
            state = state_dict["state"].get(key, {})
            self.state[parameter].update({name: value for name, value in state.items() if self.is_owned(name)})


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device) if tensor.dim() else tensor  # step counts are on the host


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a copy of nested state in which names replace the tensors, and store the tensors in `tensors` by name."""
    if isinstance(value, torch.Tensor):
        tensors[path.removesuffix("/")] = value
        return {"tensor": path.removesuffix("/")}
    if isinstance(value, dict):
        return {key: _without_tensors(item, f"{path}{key}/", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(item, f"{path}{index}/", tensors) for index, item in enumerate(value))
    return value


def _with_tensors(value: Any, tensor: Any) -> Any:
    """Return a copy of nested state in which every name is replaced by the result of `tensor(name)`."""
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            return tensor(value["tensor"])
        return {key: _with_tensors(item, tensor) for key, item in value.items()}
    return type(value)(_with_tensors(item, tensor) for item in value) if isinstance(value, list | tuple) else value
