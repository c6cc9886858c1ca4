"""Modules of torch that keep their weights in a way of their own, beside unsharded replicas; torch's tools for them.

All of them run in one call of two ranks.

pytest tests/engine/test_torch_modules.py
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim import swa_utils

from fullshard.core.errors import FullshardError, WrapError
from fullshard.features import fully_shard, unsharded
from tests.distributed import run_ranks
from tests.traps import (
    WIDTH,
    adamw,
    assert_at_rest,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    sharded_step,
    train_beside_reference,
)

Call = Callable[[Any, torch.Tensor], torch.Tensor]
EXACT: Any = {"rtol": 1e-9, "atol": 1e-9}


class Around(nn.Module):
    """A module between two layers."""

    def __init__(self, inner: nn.Module, call: Call) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.call(self.inner, self.first(x)))
        return out


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH, WIDTH)])
        self.named = nn.ParameterDict({"shift": torch.rand(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x * self.several[0]) @ self.several[1] + self.named["shift"]
        return out


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x[:, :, None]))[:, :, 0]  # type: ignore[no-any-return]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def symmetric() -> nn.Module:
    return parametrize.register_parametrization(linear(), "weight", Symmetric())


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 10, dropout=0.0, batch_first=True)


def plainly(module: Any, x: torch.Tensor) -> Any:
    return module(x)


def first(module: Any, x: torch.Tensor) -> Any:
    return module(x)[0]


def flattened(module: Any, x: torch.Tensor) -> Any:
    module.flatten_parameters()
    return module(x)[0]


def attended(module: Any, x: torch.Tensor) -> Any:
    return module(x, x, x, need_weights=False)[0]


def batched(module: Any, x: torch.Tensor) -> Any:
    return module(x[None])[0]


def masked(module: Any, x: torch.Tensor) -> Any:
    return module(x[None], src_key_padding_mask=torch.tensor([[False, False, False, True]]))[0].nan_to_num()[:3]


def looked_up(module: Any, x: torch.Tensor) -> Any:
    return x + module(torch.tensor([[0, 2], [2, 4], [1, 1], [3, 0]]))


def cached(module: Any, x: torch.Tensor) -> Any:
    with parametrize.cached():
        return module(x) + module(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "LSTM": (lambda: nn.LSTM(WIDTH, 2 * WIDTH, 2, proj_size=WIDTH), first),
    "GRU, flattened in forward": (lambda: nn.GRU(WIDTH, WIDTH // 2, bidirectional=True), flattened),
    "LSTMCell": (lambda: nn.LSTMCell(WIDTH, WIDTH), first),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True), attended),
    "TransformerEncoderLayer": (encoder_layer, batched),
    "TransformerEncoder, nested tensors": (lambda: nn.TransformerEncoder(encoder_layer(), 2), masked),
    "weight_norm, hook": (lambda: nn.utils.weight_norm(linear()), plainly),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), plainly),
    "spectral_norm, hook": (lambda: nn.utils.spectral_norm(linear()), plainly),
    "spectral_norm": (lambda: parametrizations.spectral_norm(linear()), plainly),
    "orthogonal": (lambda: parametrizations.orthogonal(linear()), plainly),
    "orthogonal, cayley": (lambda: parametrizations.orthogonal(linear(), orthogonal_map="cayley"), plainly),
    "a parametrization, cached": (symmetric, cached),
    "pruned": (lambda: prune.l1_unstructured(linear(), "weight", 0.3), plainly),
    "ParameterList, ParameterDict": (Lists, plainly),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, WIDTH, mode="max"), looked_up),
    "BatchNorm": (Normed, plainly),
}


def around(name: str) -> nn.Module:
    make, call = MODULES[name]
    return Around(make(), call)


def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def assert_same_outputs(model: nn.Module, replica: nn.Module) -> None:
    """In evaluation, where some modules take a fast path, and all buffers."""
    for each in (model, replica):
        each.eval()
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            torch.testing.assert_close(model(batch(7, 0)), replica(batch(7, 0)), **EXACT)
    for each in (model, replica):
        each.train()
    for (name, own), other in zip(model.named_buffers(), replica.buffers(), strict=True):
        torch.testing.assert_close(own, other, **EXACT, msg=name)


def train_beside_replica(name: str, units: tuple[str, ...]) -> None:
    """A replica per rank, because modules with statistics and power iterations change in every forward."""
    make = functools.partial(around, name)
    model, replica = build_sharded(make, units), build(make)
    optimizers = adamw(model.parameters()), adamw(replica.parameters())
    rank, size = rank_and_size()
    for step in range(3):
        torch.testing.assert_close(run(model, step, rank), run(replica, step, rank), **EXACT)
        for parameter in replica.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        assert_same_gradients(model, replica)
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert_same_parameters(model, replica)
        assert_same_outputs(model, replica)
        model.to("cpu").double()  # where some modules make their lists of weights anew
    assert_at_rest(model)


def train_all(units: tuple[str, ...]) -> dict[str, str]:
    failed = {}
    for name in MODULES:
        try:
            train_beside_replica(name, units)
        except Exception as error:
            failed[name] = repr(error)
    return failed


@pytest.mark.parametrize("units", [("inner",), pytest.param((), marks=pytest.mark.full)], ids=["a unit", "in the root"])
def test_modules_train_as_unsharded(units: tuple[str, ...]) -> None:
    assert run_ranks(train_all, 2, units) == [{}, {}]


# -- sparse gradients, modules without weights yet ------------------------------------------------------------------


def check_sparse() -> None:
    """The gradient is dense, which is said, and has the same elements."""
    for make in (nn.Embedding, functools.partial(nn.EmbeddingBag, mode="sum")):
        kind = lambda sparse, make=make: Around(make(5, WIDTH, sparse=sparse), looked_up_in_turn)  # noqa: E731
        with pytest.warns(UserWarning, match=r"inner \(Embedding(Bag)?\): its gradient is a dense interval"):
            model = build_sharded(functools.partial(kind, True), ["inner"])
        dense = build(functools.partial(kind, False))
        reference_step(dense, run, 0)
        sharded_step(model, run, 0)
        assert_same_gradients(model, dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_sharded(functools.partial(kind, False), ["inner"])


def looked_up_in_turn(module: Any, x: torch.Tensor) -> Any:
    indices = torch.tensor([0, 2, 2, 4])
    return x + (module(indices) if isinstance(module, nn.Embedding) else module(indices[:, None]))


def test_sparse_gradients_are_said_to_be_dense() -> None:
    run_ranks(check_sparse, 2)


@pytest.mark.parametrize("lazy", [nn.LazyLinear, nn.LazyConv1d, nn.LazyBatchNorm1d])
def test_lazy_modules_are_refused_by_name(lazy: Any) -> None:
    arguments = {nn.LazyLinear: (3,), nn.LazyConv1d: (3, 1)}.get(lazy, ())
    model = nn.Sequential(nn.Linear(4, 4), lazy(*arguments))
    with pytest.raises(WrapError, match=rf"1 \({lazy.__name__}\) does not know the sha.*\n.*run the model on a batch"):
        fully_shard(model)


# -- torch's tools on a sharded model --------------------------------------------------------------------------------


def sharded(inner: Callable[[], nn.Module] = linear) -> Any:
    return build_sharded(lambda: Around(inner(), plainly), ["inner"])


def prune_after(model: Any) -> None:
    prune.l1_unstructured(model.inner, "weight", 0.3)


def prune_globally(model: Any) -> None:
    prune.global_unstructured([(model.inner, "weight"), (model.last, "weight")], prune.L1Unstructured, amount=0.3)


def parametrize_after(model: Any) -> None:
    parametrize.register_parametrization(model.inner, "weight", nn.Softplus())


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "DistributedDataParallel": (nn.parallel.DistributedDataParallel, "DistributedDataParallel around a sharded Around"),
    "DataParallel": (lambda m: m._replicate_for_data_parallel(), "DataParallel around a sharded Around"),
    "weight_norm, hook": (lambda m: nn.utils.weight_norm(m.inner), r"inner\.weight_g of shape .* was added to"),
    "spectral_norm, hook": (lambda m: nn.utils.spectral_norm(m.inner), r"inner\.weight_orig"),
    "a parametrization": (parametrize_after, r"`set_` of inner\.weight .*\n.*register parametrizations before"),
    "pruning": (prune_after, r"inner\.weight_orig"),
    "pruning of all": (prune_globally, r"inner\.weight_orig"),
    "SyncBatchNorm": (nn.SyncBatchNorm.convert_sync_batchnorm, r"inner\.norm\.weight"),
    "fuse_conv_bn_eval": (
        lambda m: fusion.fuse_conv_bn_eval(m.inner.conv.eval(), m.inner.norm.eval()),
        r"plain tensor \(6,\)",
    ),
    "AveragedModel": (
        swa_utils.AveragedModel,
        "FSDP does not support deepcopy.* of Around",
    ),
    "functional_call": (
        lambda m: torch.func.functional_call(m, {"first.weight": torch.zeros(WIDTH, WIDTH).double()}, (batch(0, 0),)),
        r"first\.weight was replaced.*\n.*unsharded\(model\).*functional_call",
    ),
    "torch.func.grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(batch(0, 0)), r"torch\.func's grad"),
}


def refuse_all() -> dict[str, str]:
    """Each as it is called, or at the next forward."""
    wrong = {}
    for name, (use, message) in REFUSED.items():
        model = sharded(Normed if "Norm" in name or "conv" in name else linear)
        try:
            use(model)
            model(batch(0, 0))
        except (FullshardError, RuntimeError) as error:  # the last one of torch's DTensor
            if not re.search(message, str(error)):
                wrong[name] = str(error)
        else:
            wrong[name] = "silent"
    return wrong


def test_what_cannot_be_done_to_a_sharded_model_is_refused() -> None:
    assert run_ranks(refuse_all, 2) == [{}, {}]


def check_tools() -> None:
    model, plain = sharded(), build(lambda: Around(linear(), plainly))
    x, along = batch(0, 0), batch(1, 0)
    # Before anything else has run, when ranks agree on what the model is.
    torch.testing.assert_close(torch.func.jvp(model, (x,), (along,)), torch.func.jvp(plain, (x,), (along,)), **EXACT)
    torch.testing.assert_close(torch.vmap(model)(x), torch.vmap(plain)(x), **EXACT)
    own = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    torch.testing.assert_close(own, plain(x), **EXACT)
    others = {name: torch.rand_like(p).requires_grad_() for name, p in plain.named_parameters()}
    results = []
    for each, whole in wholes(model, plain):
        with whole:
            out = torch.func.functional_call(each, others, (x,))
            results.append((out, *torch.autograd.grad(out.sum(), list(others.values()))))
    torch.testing.assert_close(results[0], results[1], **EXACT)
    results = [second_derivatives(each, x[0], whole) for each, whole in wholes(model, plain)]
    torch.testing.assert_close(results[0], results[1], **EXACT)
    assert_same_gradients(model, plain)


def wholes(model: nn.Module, plain: nn.Module) -> list[tuple[nn.Module, Any]]:
    return [(model, unsharded(model)), (plain, contextlib.nullcontext())]


def second_derivatives(model: nn.Module, x: torch.Tensor, whole: Any) -> tuple[torch.Tensor, ...]:
    """Those of `torch.func`, one of which goes back to the parameters."""

    def loss(x: torch.Tensor) -> Any:
        return model(x).square().sum()

    with whole:
        gradient = torch.func.grad(loss)(x)
        gradient.square().sum().backward()
        per_sample = torch.vmap(torch.func.grad(loss))(torch.stack([x, x + 1]))
        found = gradient, per_sample, torch.func.jacrev(model)(x), torch.func.hessian(loss)(x)
    return tuple(each.detach() for each in found)


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_torch_func(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)  # without shared memory parameters are copied to be sent
    run_ranks(check_tools, 2)


def check_averages() -> None:
    """A model of averages that is sharded as the model is; batch norm's statistics made anew."""
    make = functools.partial(around, "BatchNorm")
    model, plain = build_sharded(make, ["inner"]), build(make)
    average = swa_utils.get_ema_multi_avg_fn(0.9)
    averages, expected = (swa_utils.AveragedModel(build(make), multi_avg_fn=average) for _ in range(2))
    shadow: Any = averages.module
    fully_shard(shadow.inner)
    fully_shard(shadow)
    optimizers = adamw(model.parameters()), adamw(plain.parameters())
    for step in range(3):
        reference_step(plain, run, step)
        sharded_step(model, run, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        averages.update_parameters(model)
        expected.update_parameters(plain)
    assert_same_parameters(averages.module, expected.module)
    for each in (averages, expected):
        swa_utils.update_bn([batch(step, 0) for step in range(3)], each)
    for own, other in zip(averages.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(own, other, **EXACT)


def test_averaged_models() -> None:
    run_ranks(check_averages, 2)


# -- second derivatives ----------------------------------------------------------------------------------------------


def whole(model: nn.Module) -> Any:
    return unsharded(model) if hasattr(model, "unshard") else contextlib.nullcontext()


def gradient_penalty(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank).requires_grad_()
    with whole(model):
        out = model(x).tanh().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        loss: torch.Tensor = out.square() + (gradient.norm(2, -1) - 1).square().mean()
        loss.backward()
    return loss.detach()


def meta_learning(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A step of an inner loop, and the gradient through it."""
    x = batch(step, rank)
    with whole(model):
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        inner = torch.func.functional_call(model, parameters, (x,)).square().mean()
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        stepped = {
            name: value - 0.1 * gradient for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
        }
        loss: torch.Tensor = torch.func.functional_call(model, stepped, (x + 1,)).square().mean()
        loss.backward()
    return loss.detach()


def check_second_derivatives() -> None:
    for step in (gradient_penalty, meta_learning):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            train_beside_reference(functools.partial(around, "weight_norm"), step, ["inner"], strategy=strategy)


def test_second_derivatives_of_a_whole_model() -> None:
    run_ranks(check_second_derivatives, 2)
