"""What leaves a sharded model by others' code: right, or an error, or said to be a slice's.

pytest tests/engine/test_traps_borders.py
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from fullshard.core.errors import LifecycleError, WrapError
from fullshard.features import ShardedParameter, ShardedTensor, clip_grad_norm_, fully_shard, shard_model
from tests.distributed import run_ranks
from tests.traps import BLOCKS, Stack, adamw, build, build_sharded, rank_and_size, reference_step, run_squared


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer after a step, with the gradients of another."""
    model = build_sharded(Stack, BLOCKS)
    optimizer = adamw(model.parameters())
    run_squared(model, 0, rank_and_size()[0])
    optimizer.step()
    optimizer.zero_grad()
    run_squared(model, 1, rank_and_size()[0])
    return model, optimizer


def refused(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises((LifecycleError, dcp.api.CheckpointException)) as caught:
        function(*args, **options)
    assert "this rank holds only elements" in str(caught.value) and "save_checkpoint" in str(caught.value), caught.value


def async_save(state: dict[str, Any], directory: str) -> None:
    future: Any = dcp.async_save(state, checkpoint_id=directory)
    future.result()


# -- torch's checkpoint API, pickles and safetensors ------------------------------------------------------------


def check_files() -> None:
    model, optimizer = trained()
    held: dict[str, dict[str, torch.Tensor]] = {
        "model": model.state_dict(),
        "copies": {name: value.clone() for name, value in model.state_dict().items()},
        "on the host": {name: value.cpu() for name, value in model.state_dict().items()},
        "in bf16": {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()},
        "data": {name: value.data for name, value in model.named_parameters()},
        "gradients": {name: value.grad for name, value in model.named_parameters() if value.grad is not None},
        "exp_avg": {str(key): state["exp_avg"] for key, state in optimizer.state_dict()["state"].items()},
        "averaged": {
            name: value.clone().mul_(0.9).add_(value, alpha=0.1) for name, value in model.state_dict().items()
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        for tensors in held.values():
            refused(torch.save, tensors, io.BytesIO())
            refused(pickle.dumps, tensors)
            refused(safetensors.torch.save_file, tensors, Path(directory) / "file")
            refused(safetensors.torch.save, tensors)
    refused(torch.save, optimizer.state_dict(), io.BytesIO())
    vector: Any = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()), vector * 2)
    with pytest.raises(LifecycleError, match="cannot assign data to sharded parameter"):
        nn.utils.vector_to_parameters(vector.full_tensor(), model.parameters())
    with pytest.raises(LifecycleError):
        torch.optim.swa_utils.AveragedModel(model)


def test_slices_in_files_are_refused() -> None:
    run_ranks(check_files, 2)


# -- numbers ----------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[list[Any]], Any]] = {
    "p.grad.norm()": lambda ps: [p.grad.norm() for p in ps],
    "p.grad.data.norm(2)": lambda ps: [p.grad.detach().data.norm(2).item() for p in ps],
    "torch.norm(p.grad)": lambda ps: torch.stack([torch.norm(p.grad) for p in ps]),
    "vector_norm": lambda ps: [torch.linalg.vector_norm(p.grad) for p in ps],
    "_foreach_norm": lambda ps: torch._foreach_norm([p.grad for p in ps]),
    "cat": lambda ps: torch.cat([p.grad.flatten() for p in ps]).norm(),
    "(p.grad ** 2).sum()": lambda ps: sum((p.grad**2).sum() for p in ps),
    "isnan().any()": lambda ps: any(bool(p.grad.isnan().any()) for p in ps),
    "p.norm()": lambda ps: [p.norm() for p in ps],
    "p.data.norm()": lambda ps: [p.data.norm() for p in ps],
    "(p ** 2).sum()": lambda ps: sum((p**2).sum() for p in ps),
    "p.pow(2).sum()": lambda ps: sum(p.pow(2).sum() for p in ps),
    "(p - q).abs().mean()": lambda ps: sum((p - p.clone()).abs().mean() for p in ps),
    "p.grad.unsqueeze(0)": lambda ps: [p.grad.unsqueeze(0).square().sum() for p in ps],
    "p.grad.split(1)": lambda ps: [p.grad.flatten().split(1) for p in ps],
}


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return [whole(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_numbers() -> None:
    model, _ = trained()
    run_squared(model, 7, rank_and_size()[0])
    plain = [nn.Parameter(whole(p).detach()) for p in model.parameters()]
    for own, other in zip(model.parameters(), plain, strict=True):
        other.grad = whole(own.grad)
    for function in NUMBERS.values():
        got, expected = whole(function(list(model.parameters()))), function(plain)
        torch.testing.assert_close(got, whole(expected), rtol=1e-9, atol=1e-12)


def test_numbers_are_those_of_the_whole() -> None:
    run_ranks(check_numbers, 2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, slice by slice": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def check_silence() -> None:
    """Nothing is said of what is right: optimizers, clipping, element-wise work, a model in one part."""
    rank, _ = rank_and_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in OPTIMIZERS.values():
            model = build_sharded(Stack, BLOCKS)
            optimizer = make(model.parameters())
            for step in range(2):
                run_squared(model, step, rank)
                clip_grad_norm_(model.parameters(), 1.0)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 0.5
                    parameter.grad.data.clamp_(-1, 1)
                    parameter.data.mul_(0.99)
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.zero_grad()
            averaged = {name: value.clone() for name, value in model.state_dict().items()}
            for name, value in model.state_dict().items():
                averaged[name].mul_(0.9).add_(value, alpha=0.1)
            model.load_state_dict(averaged)
            states = [v for state in optimizer.state.values() for v in state.values()]
            assert all(isinstance(v, ShardedTensor) for v in states if v.dim())
        alone = build_sharded(Stack, BLOCKS, strategy="NO_SHARD")
        run_squared(alone, 0, rank)
        assert [p.grad.norm() for p in alone.parameters() if p.grad is not None]


def test_what_is_right_is_silent() -> None:
    run_ranks(check_silence, 2)


def check_gradients() -> None:
    """The user's view of a gradient is the gradient: changes in place arrive, and it can be made whole."""
    model, reference = build_sharded(Stack, BLOCKS), build(Stack)
    reference_step(reference, run_squared, 0)
    run_squared(model, 0, rank_and_size()[0])
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, ShardedParameter) and isinstance(parameter.grad, ShardedTensor)
        assert parameter.grad is parameter.grad and parameter.grad.shape == other.shape
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-9)
        parameter.grad *= 2  # type: ignore[misc]
        parameter.grad.data.add_(1)
        assert other.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * other.grad + 1, rtol=1e-9, atol=1e-9)
    # Another backward adds to what is there, and the optimizer takes it.
    run_squared(model, 1, rank_and_size()[0])
    other_reference = build(Stack)
    reference_step(other_reference, run_squared, 1)
    for own, first, second in zip(
        model.parameters(), reference.parameters(), other_reference.parameters(), strict=True
    ):
        assert isinstance(own.grad, ShardedTensor) and first.grad is not None and second.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), 2 * first.grad + 1 + second.grad, rtol=1e-9, atol=1e-9)


def test_the_users_gradient_is_the_gradient() -> None:
    run_ranks(check_gradients, 2)


def check_counts() -> None:
    model, reference = build_sharded(Stack, BLOCKS), build(Stack)
    expected = [p.numel() for p in reference.parameters()]
    assert [p.numel() for p in model.parameters()] == expected
    assert [p.nelement() for p in model.parameters()] == expected
    assert [v.numel() for v in model.state_dict().values()] == expected


def test_numel_is_the_whole_parameters() -> None:
    run_ranks(check_counts, 2)


def check_foreign_state() -> None:
    """State of another slice is refused, by whatever way it comes."""
    _, optimizer = trained()
    _, other = trained()
    state = other.state_dict()
    first, last = state["state"][0], state["state"][3]
    state["state"][0], state["state"][3] = last, first
    with pytest.raises(
        ValueError, match=r"state 'exp_avg' of embed\.weight \(6, 6\) has the shape \(13, 6\): .*blocks\.0\.up\.weight"
    ):
        optimizer.load_state_dict(state)


def test_optimizer_state_of_another_slice_is_refused() -> None:
    run_ranks(check_foreign_state, 2)


# -- parameters that are not memory of their own ----------------------------------------------------------------


class Wrapper(torch.Tensor):
    """As torchao's: another tensor inside, and operations of its own."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*tree_map_only(cls, lambda t: t.held, args), **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


class Gathering(nn.Parameter):
    """Says how it is gathered."""

    def fsdp_pre_all_gather(self, *args: Any) -> None:
        """Torch's FSDP would call it."""


class Marked(nn.Parameter):
    """A subclass in name only, as bitsandbytes' weights are."""


def with_weight(weight: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = weight
    return model


def test_parameters_that_wrap_other_tensors_are_refused_by_name() -> None:
    values = torch.ones(4, 4)
    for weight, message in (
        (nn.Parameter(Wrapper(values)), r"1\.weight: a parameter of type Wrapper wraps other tensors"),
        (nn.Parameter(Wrapper(values), requires_grad=False), r"1\.weight: .*\n.*ignored_params"),
        (
            Gathering(values),
            r"1\.weight: a parameter of type Gathering defines its own all-gather with `fsdp_pre_all_gather`",
        ),
    ):
        model = with_weight(weight)
        for shard in (fully_shard, functools.partial(shard_model, unit_modules=[model[0]])):  # type: ignore[index]
            with pytest.raises(WrapError, match=message):
                shard(model)
        assert not any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    ignored = nn.Parameter(Wrapper(values), requires_grad=False)
    fully_shard(with_weight(ignored), ignored_params={ignored})
    fully_shard(with_weight(Marked(values)))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="since torch 2.10")
def test_gradients_of_another_dtype_are_refused_by_name() -> None:
    weight: Any = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad_dtype = None
    model: Any = fully_shard(with_weight(weight).bfloat16())
    with pytest.raises(
        WrapError, match=r"1\.weight: grad_dtype = torch\.float32 conflicts with the stored dtype torch.bfloat16"
    ):
        model[1].weight.grad_dtype = torch.float32
    model[1].weight.grad_dtype = torch.bfloat16
    assert model[1].weight.grad_dtype is torch.bfloat16
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    with pytest.raises(WrapError, match=r"1\.weight: grad_dtype = torch\.float32 .*\n.*MixedPrecisionPolicy"):
        fully_shard(with_weight(weight))


def check_dtensors() -> None:
    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    for rows in (4, 7):
        model = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        with pytest.raises(WrapError, match=r"0\.weight, 0\.bias: the parameter is a DTensor over .*not another axis"):
            fully_shard(model)


def test_dtensors_are_refused_by_name() -> None:
    run_ranks(check_dtensors, 2)


def test_torchaos_weights_are_refused_by_name() -> None:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="needs the extra `quant`")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())  # for inference: it says no way to gather it
    with pytest.raises(WrapError, match=r"0\.weight, 1\.weight: a parameter of type Int8"):
        fully_shard(model)
