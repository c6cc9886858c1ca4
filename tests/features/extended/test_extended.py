"""Parameters that define their own all-gather (`fsdp_pre_all_gather`): torchao's float8 weights, and others."""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.features import fully_shard, units_of
from tests.differential import CLOSE, EPS, TOLERANCE
from tests.distributed import preload, run_ranks
from tests.traps import assert_at_rest, batch, rank_and_size

preload("torchao.float8")

WIDTH, ROWS = 6, 5
"""Five rows are shared by two ranks as three and two."""


class Halved(torch.Tensor):
    """Sends bfloat16. `asked` counts how often it was asked to, `made` is memory of what was made of it."""

    held: torch.Tensor
    asked = 0
    made: ClassVar[list[torch.UntypedStorage]] = []

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Halved:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: Any, module: nn.Module, policy: Any
    ) -> tuple[torch.Tensor, int]:
        assert (mesh.ndim, module.weight.shape) == (1, size)
        assert policy.param_dtype in (None, torch.float32)
        Halved.asked += 1
        return self.held.bfloat16(), 7

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: int, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        [sent] = outputs
        assert (sent.dtype, metadata) == (torch.bfloat16, 7)
        if out is not None:
            out.copy_(sent)
            return None
        made = sent.to(dtype)
        Halved.made.append(made.untyped_storage())
        return made, (sent, made)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16().to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class RoundedLinear(nn.Linear):
    """What computing with `Halved` means, in one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = _Rounded.apply(self.weight)
        return F.linear(x, rounded, self.bias)


def stack(layer: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    """Three layers, with plain parameters between extended ones."""
    torch.manual_seed(0)
    return nn.Sequential(layer(WIDTH, ROWS), nn.Tanh(), layer(ROWS, ROWS), nn.LayerNorm(ROWS), layer(ROWS, 1))


def extend(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Halved(module.weight.detach()), module.weight.requires_grad)
    return model


def shard(model: nn.Module, **options: Any) -> Any:
    for module in model.children():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: list[int], max_norm: float = 0.1
) -> list[float]:
    """Losses of these ranks' batches, and the norm before clipping."""
    width = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    losses = []
    for rank in ranks:
        loss = model(batch(number, rank, 4, width).float()).square().mean()
        (loss / len(ranks)).backward()
        losses.append(loss.item())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return [*losses, norm.item()]


def assert_trains_as(model: Any, reference: nn.Module, steps: int = 3) -> None:
    rank, size = rank_and_size()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=EPS, weight_decay=0.1) for m in (model, reference)]
    for number in range(steps):
        expected = step(reference, optimizers[1], number, list(range(size)))
        found = step(model, optimizers[0], number, [rank])
        assert found[0] == pytest.approx(expected[rank], rel=TOLERANCE), f"loss of step {number}"
        assert found[1] == pytest.approx(expected[-1], rel=TOLERANCE), f"norm of step {number}"
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), wanted[name].detach(), **CLOSE)
    assert_at_rest(model)


def check_own_class(options: dict[str, Any]) -> None:
    Halved.asked = 0
    Halved.made.clear()
    model = extend(stack())
    if options.pop("frozen", False):
        model[0].weight.requires_grad_(False)
    reference = stack(RoundedLinear)
    reference[0].weight.requires_grad_(model[0].weight.requires_grad)
    if rank_and_size()[1] > 1 and options.pop("hybrid", False):
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    original = weakref.ref(model[0].weight)
    shard(model, **options)
    gc.collect()
    assert original() is None, "the whole weight is still there"
    assert_trains_as(model, reference)
    assert Halved.made and not any(storage.nbytes() for storage in Halved.made), "what was made beside is kept"
    at_first, per_step = 3, 6 if options.get("reshard_after_forward") is not False else 3
    if "mesh" not in options and model[0].weight.requires_grad:
        assert Halved.asked == at_first + 3 * per_step
    with (
        torch.no_grad(),
        pytest.raises(LifecycleError, match=r"0\.weight was changed in place"),
        fullshard.unsharded(model, writeback=True),
    ):
        model[0].weight.mul_(2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"reshard_after_forward": False}),
        (2, {"hybrid": True, "frozen": True}),
        (2, {"mp_policy": fullshard.MixedPrecisionPolicy(param_dtype=torch.float32)}),
    ],
)
def test_a_class_that_sends_bfloat16(ranks: int, options: dict[str, Any]) -> None:
    """Losses, norms and weights of a process whose weights are rounded in forward."""
    run_ranks(check_own_class, ranks, options)


def float8(model: nn.Module, *, fsdp: bool) -> Any:
    torchao: Any = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=fsdp, emulate=True)
    return torchao.convert_to_float8_training(model, config=config)


def layers(depth: int = 2) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=i > 0) for i in range(depth)))


def check_float8(precompute: bool) -> None:
    torchao: Any = importlib.import_module("torchao.float8")
    model = shard(float8(layers(), fsdp=True))
    reference = float8(layers(), fsdp=False)
    weight = model[0].weight.bucket
    assert weight.full_nbytes == 32 * 32, "a byte for each element"
    if precompute:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=EPS, weight_decay=0.1) for m in (model, reference)]
        rank, size = rank_and_size()
        for number in range(3):
            expected = step(reference, optimizers[1], number, list(range(size)))
            assert step(model, optimizers[0], number, [rank])[0] == pytest.approx(expected[rank], rel=TOLERANCE)
            torchao.precompute_float8_dynamic_scale_for_fsdp(model)
            scale = model[0].weight._local_tensor._precomputed_scale
            largest = reference[0].weight.detach().abs().max()
            assert scale.item() == pytest.approx(torch.finfo(torch.float8_e4m3fn).max / largest.item(), rel=TOLERANCE)
    else:
        assert_trains_as(model, reference)


def check_float8_in_half_precision() -> None:
    """Weights that are stored in bfloat16 get float32 main weights, by which gradients go."""
    rank, _ = rank_and_size()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model = float8(layers(3).to(torch.bfloat16).to(dtype), fsdp=True)
        accelerator = fullshard.Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        found.append([step(model, optimizer, number, [rank]) for number in range(2)])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert found[0] == found[1]


def test_float8_in_half_precision() -> None:
    pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
    run_ranks(check_float8_in_half_precision, 2)


def test_the_planner_is_told_in_what_dtype_a_weight_is_gathered() -> None:
    pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
    model = shard(float8(layers(), fsdp=True))
    plans = [bucket.plan for unit in units_of(model) for bucket in unit.buckets]
    assert [plan.full_dtype for plan in plans].count("float8_e4m3fn") == 2


@pytest.mark.parametrize("precompute", [False, True])
def test_float8_of_torchao(precompute: bool) -> None:
    pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
    run_ranks(check_float8, 2, precompute)


class _Bytes:
    """Gloo sends no float8, so torch's `fully_shard` is told to send bytes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        output, own = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return dist.all_gather_into_tensor(output, own, group=group, async_op=async_op)


def check_beside_torch() -> None:
    from torch.distributed.fsdp import fully_shard as torchs

    theirs: Any = float8(layers(), fsdp=True)
    for module in (*theirs.children(), theirs):
        torchs(module)
        module.set_custom_all_gather(_Bytes())
    ours = shard(float8(layers(), fsdp=True))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=EPS) for m in (ours, theirs)]
    for number in range(3):
        found, expected = (
            # Not clipped: a norm is a sum whose order is each engine's own.
            step(model, optimizer, number, [rank_and_size()[0]], max_norm=math.inf)
            for model, optimizer in zip((ours, theirs), optimizers, strict=True)
        )
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], rel=TOLERANCE)
    for mine, torchs_own in zip(ours.parameters(), theirs.parameters(), strict=True):
        whole = torchs_own.full_tensor()
        assert torch.equal(mine.full_tensor(), getattr(whole, "_tensor", whole))


def test_float8_beside_torchs_fully_shard() -> None:
    pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
    run_ranks(check_beside_torch, 2)


def check_kept(directory: Path) -> None:
    """On the meta device first, then saved and loaded, by fullshard and by torch."""
    with torch.device("meta"):
        model = extend(stack())
    shard(model)
    model.to_empty(device="cpu")
    values = stack().state_dict()
    model.load_state_dict(values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step(model, optimizer, 0, [rank_and_size()[0]])
    save_checkpoint(directory / "ours", model=model, optimizer=optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "torchs")
    second = shard(extend(stack()))
    other = torch.optim.AdamW(second.parameters(), lr=0.05)
    load_checkpoint(directory / "ours", model=second, optimizer=other)
    third = shard(extend(stack()))
    dcp.load(state := {"model": third.state_dict()}, checkpoint_id=directory / "torchs")
    third.load_state_dict(state["model"])
    expected = step(model, optimizer, 1, [rank_and_size()[0]])
    assert step(second, other, 1, [rank_and_size()[0]]) == expected
    assert third(batch(1, rank_and_size()[0], 4, WIDTH).float()).square().mean().item() == expected[0]


def test_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(check_kept, 2, tmp_path)


class Alone(nn.Parameter):
    """Has one of the two."""

    def fsdp_post_all_gather(self) -> None: ...


class Older(Halved):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh, more: int) -> Any: ...  # type: ignore[override]


def check_in_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(Halved(torch.ones(4, 4)), mesh["tp"], [Replicate()]))
    with pytest.raises(WrapError, match=r"weight: .* type DTensor wraps other tensors"):
        fully_shard(model, mesh=mesh["dp"])


def test_a_dtensor_of_such_is_refused_by_name() -> None:
    run_ranks(check_in_dtensor, 2)


def test_what_cannot_be_gathered_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(4, 4)
    for weight, message in (
        (Alone(values), r"1\.weight: .* type Alone .*has no `fsdp_pre_all_gather`"),
        (nn.Parameter(Older(values)), r"1\.weight: .* type Older .*with 2 arguments"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = weight
        with pytest.raises(WrapError, match=message):
            fully_shard(model)
    sharded: Any = extend(stack())
    monkeypatch.setenv("FULLSHARD_OFFLOAD", "rehearse")
    with pytest.raises(ConfigError, match="type Halved defines its own all-gather"):
        fully_shard(sharded, offload_policy=fullshard.CPUOffloadPolicy())
    for device in ("cpu", "meta"):
        with torch.device(device), pytest.raises(LifecycleError, match="define their own all-gather"):
            shard(extend(stack())).to(torch.bfloat16)


def test_methods_given_after_sharding_are_refused_whenever_that_is() -> None:
    """As torch's own test of `fully_shard` gives them to plain parameters; there they are asked for at each gather."""
    for is_local in (True, False):
        model = fully_shard(nn.Linear(3, 3))
        model(torch.ones(1, 3))
        told = model.weight._local_tensor if is_local else model.weight
        told.fsdp_pre_all_gather = lambda mesh: None
        with pytest.raises(LifecycleError, match="rank 0: `fsdp_pre_all_gather` was added to weight after sharding"):
            model(torch.ones(1, 3))
