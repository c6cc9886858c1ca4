"""Parameters that wrap several tensors and say how those are gathered: int8 weights and their scales, NF4."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

import fullshard
from fullshard.checkpoint import full_state_dict, save_checkpoint
from fullshard.core.errors import CheckpointError, OptimizerError, WrapError
from fullshard.features import fully_shard
from tests.differential import EPS, rounding
from tests.distributed import preload, run_ranks
from tests.traps import assert_at_rest, batch, rank_and_size

preload("torchao.quantization", "torchao.prototype.quantized_training")

WIDTH, ROWS = 8, 5
"""Five rows are shared by two ranks as three and two."""
RATE = 0.05
NEAR = rounding(torch.float64, RATE / EPS * 4 * 2 * 30)
"""Four steps of two passes over 30 terms. In float32 a weight would now and then be rounded to the next code."""


class Coded(torch.Tensor):
    """Rows of int8 codes and a scale for each, which computes as their products. Forward sees a plain tensor."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Coded:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, plain: torch.Tensor) -> Coded:
        scales = plain.detach().abs().amax(1).clamp(min=1e-6) / 127
        return cls((plain.detach() / scales[:, None]).round().to(torch.int8), scales)

    def plain(self) -> torch.Tensor:
        return self.codes.to(self.scales.dtype) * self.scales[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Coded:
        return Coded(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0]
        if name in ("detach", "alias", "clone"):
            return cls(func(first.codes), func(first.scales))
        if name == "_to_copy" and kwargs.pop("dtype", None) in (None, first.dtype):  # to another device
            return cls(func(first.codes, **kwargs), func(first.scales, **kwargs))
        if name == "view":
            assert tuple(args[1]) == first.shape
            return cls(first.codes, first.scales)
        if name in ("slice", "split"):
            assert name == "split" or args[1] == 0, "by rows"
            codes, scales = func(first.codes, *args[1:]), func(first.scales, *args[1:])
            return cls(codes, scales) if name == "slice" else [cls(*pair) for pair in zip(codes, scales, strict=True)]
        if name == "new_zeros":
            rows = args[1][0]
            return cls(first.codes.new_zeros(args[1], **kwargs), first.scales.new_zeros(rows, **kwargs))
        plain_args, plain_kwargs = tree_map_only(cls, cls.plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not name.endswith("_"):
            return result
        made = args[1] if name == "copy_" and isinstance(args[1], cls) else cls.of(result)
        first.codes.copy_(made.codes)
        first.scales.copy_(made.scales)
        return first

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        assert codes.dtype is torch.int8 and codes.shape[0] == scales.shape[0]
        whole = codes.to(dtype) * scales[:, None].to(dtype)
        if out is None:
            return whole, (codes, scales, whole)
        out.copy_(whole)
        return None


def model_of(*, coded: bool) -> Any:
    torch.manual_seed(0)
    plain = nn.LayerNorm(4), nn.Linear(4, 1)
    model: Any = nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, 4), *plain, nn.Linear(1, 3)).double()
    for layer in (model[0], model[2], model[5]):  # the last one's rows are of one element
        layer.weight = nn.Parameter(Coded.of(layer.weight) if coded else Coded.of(layer.weight).plain())
    return model


def shard(model: nn.Module, **options: Any) -> Any:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number, rank, 4, WIDTH)).square().mean()
    return loss


def rounds(model: Any) -> None:
    """What an optimizer's step does to a weight that is kept as codes."""
    with torch.no_grad():
        for layer in (model[0], model[2], model[5]):
            layer.weight.copy_(Coded.of(layer.weight).plain())


def check_training(options: dict[str, Any]) -> None:
    if options.pop("hybrid", False):
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    is_frozen = options.pop("frozen", False)
    model, reference = model_of(coded=True), model_of(coded=False)
    for each in (model, reference):
        each[0].weight.requires_grad_(not is_frozen)
    shard(model, **options)
    rank, size = rank_and_size()
    optimizers = [torch.optim.Adam(m.parameters(), lr=RATE, eps=EPS) for m in (model, reference)]
    for number in range(4):
        expected = [loss_of(reference, number, r) for r in range(size)]
        torch.stack(expected).mean().backward()
        loss = loss_of(model, number, rank)
        loss.backward()
        assert loss.item() == pytest.approx(expected[rank].item(), rel=NEAR), f"step {number}"
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=NEAR)  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rounds(reference)
    weight = model[0].weight
    bucket = weight.bucket
    shards = 1 if "mesh" in options else size
    rows = -(-ROWS // shards)
    assert type(weight.to_local()) is type(weight.full_tensor()) is Coded
    assert sum(tensor.nbytes for tensor in bucket.stored) == rows * (WIDTH + 8), "a byte for each element, and scales"
    assert bucket.buffer.nbytes in (0, bucket.full_nbytes)
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        whole = mine.full_tensor()
        found = whole.plain() if isinstance(whole, Coded) else whole
        torch.testing.assert_close(found, wanted.detach(), rtol=NEAR, atol=NEAR)
    state = optimizers[0].state[model[2].weight]["exp_avg"]
    wanted = optimizers[1].state[reference[2].weight]["exp_avg"]
    torch.testing.assert_close(state.full_tensor(), wanted, rtol=NEAR, atol=NEAR)
    every, none = state.split([4, 0])
    assert torch.equal(every.full_tensor(), state.full_tensor()) and none.shape == (0, ROWS)
    assert full_state_dict(model, rank0_only=False)["0.weight"].codes.shape == (ROWS, WIDTH)
    spec = model[2].weight.spec
    assert spec.cut(torch.zeros(4, ROWS)).shape == spec.local_shape  # none for the third of three ranks
    assert_at_rest(model)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (2, {}),
        (2, {"reshard_after_forward": False, "frozen": True}),
        (3, {}),  # of whom one has no row of some weights
        pytest.param(2, {"hybrid": True}, marks=pytest.mark.full),
    ],
)
def test_trains_as_one_process(ranks: int, options: dict[str, Any]) -> None:
    run_ranks(check_training, ranks, options)


def int8(quantize: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False))
    training: Any = importlib.import_module("torchao.prototype.quantized_training")
    quantization: Any = importlib.import_module("torchao.quantization")
    quantization.quantize_(model, training.int8_weight_only_quantized_training())
    return model


def train(model: nn.Module, entry: Any, policy: Any) -> list[float]:
    """Losses. Rounding is random, and so the same only if it is asked for the same rows in the same order."""
    for module in (*model.children(), model):
        entry(module, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    losses = []
    for number in range(4):
        loss = model(batch(number, rank_and_size()[0], 4, 32).float()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_int8_beside_torch(dtype: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs

    ours, theirs = int8(), int8()
    losses = train(ours, fully_shard, fullshard.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    assert losses == train(theirs, torchs, policy)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if hasattr(other.to_local(), "int_data"):
            assert torch.equal(mine.to_local().int_data, other.to_local().int_data)
            assert torch.equal(mine.to_local().scale, other.to_local().scale)
    assert ours[0].weight.bucket.stored[0].dtype is torch.int8


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_int8_training_of_torchao_is_bit_by_bit_torchs(dtype: torch.dtype | None) -> None:
    pytest.importorskip("torchao.prototype.quantized_training", reason="needs the extra `quant`")
    run_ranks(check_int8_beside_torch, 2, dtype)


def check_nf4() -> None:
    nf4: Any = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 4))
    quantized = nf4.to_nf4(model[0].weight.detach())
    plain = quantized.get_original_weight()
    layer = model[0]
    layer.weight = nn.Parameter(quantized, requires_grad=False)
    layer.forward = lambda x: nf4.linear_nf4(x, layer.weight)
    x = batch(0, rank_and_size()[0], 3, 512).float()
    expected = model[1](x @ plain.T)
    for module in (model[0], model):
        fully_shard(module)
    found = model(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert type(layer.weight.to_local()) is nf4.NF4Tensor
    assert layer.weight.to_local().quantized_data.numel() == 512 * 512 // 2 // 2
    torch.testing.assert_close(layer.weight.full_tensor().get_original_weight(), plain)


def test_frozen_nf4_of_torchao() -> None:
    pytest.importorskip("torchao.quantization", reason="needs the extra `quant`")
    run_ranks(check_nf4, 2)


def check_kept(directory: Path) -> None:
    """torch's checkpoints have it, and it may come from the meta device."""
    model = shard(model_of(coded=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_of(model, 0, rank_and_size()[0]).backward()
    optimizer.step()
    whole = full_state_dict(model, rank0_only=False)
    with torch.device("meta"):
        other = model_of(coded=True)
    shard(other).to_empty(device="cpu")
    other.load_state_dict(whole)
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(_plain(mine.full_tensor()), _plain(wanted.full_tensor()), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"'0.weight' is a Coded, which wraps several tensors"):
        save_checkpoint(directory / "ours", model=model)
    with pytest.raises(OptimizerError, match=r"fullshard.*Muon needs contiguous memory, but 0.weight is a Coded"):
        fullshard.optim.Muon(model, lr=1e-3).step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory / "torchs")
    third = shard(model_of(coded=True))
    with torch.serialization.safe_globals([Coded]):
        dcp.load(state := {"model": third.state_dict()}, checkpoint_id=directory / "torchs")
    third.load_state_dict(state["model"])
    assert loss_of(third, 1, 0).item() == loss_of(model, 1, 0).item()


def _plain(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.plain() if isinstance(tensor, Coded) else tensor
    return plain


def test_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(check_kept, 2, tmp_path)


class Nested(Coded):
    """Wraps one that wraps others."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.around = Coded(self.codes, self.scales)
        return ["around"], None


class Unnamed(Coded):
    __tensor_flatten__ = property()


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    coded = Coded.of(torch.ones(4, 4))
    for weight, message in (
        (
            Nested(coded.codes, coded.scales),
            r"1\.weight: .* type Nested .*has a Coded in `around`, which itself wraps other",
        ),
        (Unnamed(coded.codes, coded.scales), r"1\.weight: .* type Unnamed .*has no `__tensor_flatten__`"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(weight)
        with pytest.raises(WrapError, match=message):
            fully_shard(model)
