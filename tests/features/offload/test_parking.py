"""Parking a model: nothing is lost, nothing is computed meanwhile, and the device's memory is free.

That training is the same bit for bit, parked anywhere, is in `tests/engine/test_simulated_training.py` (`Case.parked`).

pytest tests/features/offload/test_parking.py
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.features import FSDPModule, fully_shard, park, unpark, unsharded
from fullshard.optim import EMA
from tests.distributed import end_workers, place_of, run_ranks
from tests.offload import WIDTH, Case
from tests.simulated.process import on_device
from tests.simulated.training import Case as Simulated
from tests.simulated.training import batch, made, optimizer_of


def _trained() -> tuple[Any, torch.optim.Optimizer]:
    """A model after one step, with the gradients of another micro-batch."""
    case = Case()
    model = case.model(None)
    optimizer = case.optimizer_of(model)
    _backward(model)
    optimizer.step()
    optimizer.zero_grad()
    _backward(model)
    return model, optimizer


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def _values(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [t.full_tensor() for p in model.parameters() for t in (p, p.grad)]
    return found + [v.full_tensor() for s in optimizer.state.values() for v in s.values() if v.dim()]


def _errors() -> list[str]:
    """What using a parked model says."""
    model, optimizer = _trained()
    loss = model(torch.ones(2, WIDTH)).sum()
    park(model, optimizer)
    uses = [lambda: model(torch.ones(2, WIDTH)), loss.backward, model.unshard, optimizer.step]
    found = []
    for use in uses:
        with pytest.raises(LifecycleError) as error:
            use()
        found.append(str(error.value).split(": ", 1)[1])
    unpark(model)
    with pytest.raises(LifecycleError, match="cannot be updated"):
        optimizer.step()
    unpark(model, optimizer)
    loss.backward()
    optimizer.step()
    return found


def test_a_parked_model_computes_nothing() -> None:
    forward, backward, gather, step = run_ranks(_errors, 2)[1]
    assert (
        forward.startswith("a parked model or optimizer cannot run its forward")
        and "unpark(model, optimizer)" in forward
    )
    assert backward.startswith("a parked model or optimizer cannot run its backward")
    assert gather.startswith("a parked model or optimizer cannot gather weights")
    assert step.startswith("a parked model or optimizer cannot be updated")


def _keeps_weights() -> None:
    model, optimizer = _trained()
    before = _values(model, optimizer)
    with torch.no_grad():
        expected = model(torch.ones(2, WIDTH))
    park(model, optimizer, keep="weights")
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), expected)
    with pytest.raises(LifecycleError, match="cannot run its forward"):
        model(torch.ones(2, WIDTH))
    park(model, optimizer)  # the weights, too
    with torch.no_grad(), pytest.raises(LifecycleError, match="cannot run its forward"):
        model(torch.ones(2, WIDTH))
    unpark(model, optimizer)
    unpark(model, optimizer)
    assert all(map(torch.equal, _values(model, optimizer), before))


@pytest.mark.usefixtures("rehearsed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_can_stay_and_be_parked_later(ranks: int) -> None:
    run_ranks(_keeps_weights, ranks)


def _trains(parks: bool, is_tensor_parallel: bool) -> list[torch.Tensor]:
    """Train with an average of the weights, and park between micro-batches and after steps."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if is_tensor_parallel:
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["replicate"]
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    average = EMA(model)
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank() * (not is_tensor_parallel))
        loss = model(torch.randn(4, WIDTH, generator=draw)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if parks:
            park(model, [optimizer, average], keep="weights" if step == 2 else None)
            torch.ones(4096).neg_()  # overwrites what has lost its memory
            unpark(model, [optimizer, average])
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            average.update()
    averages = [value.clone() for state in average.state.values() for value in state.values()]
    assert averages
    return [*losses, *averages, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def _trains_alike() -> None:
    for is_tensor_parallel in (False, True):
        plain, parked = (_trains(parks, is_tensor_parallel) for parks in (False, True))
        assert all(map(torch.equal, plain, parked))
        assert not torch.equal(plain[0], plain[3])


@pytest.mark.usefixtures("rehearsed")
def test_training_on_four_ranks_is_the_same_bit_for_bit() -> None:
    """With two replicas of two ranks, and with a model that is also tensor-parallel."""
    end_workers()  # torch remembers groups of processes that an earlier test has ended
    run_ranks(_trains_alike, 4)


def _saves(folder: str) -> None:
    model, optimizer = _trained()
    before = _values(model, optimizer)
    park(model, optimizer)
    save_checkpoint(f"{folder}/parked", model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    unpark(model, optimizer)
    assert torch.equal(next(model.parameters()).full_tensor(), before[0] * 2)
    load_checkpoint(f"{folder}/parked", model=model, optimizer=optimizer)
    assert all(map(torch.equal, _values(model, optimizer), before))


@pytest.mark.usefixtures("rehearsed")
def test_a_parked_model_is_saved_and_changed(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path))


def test_what_cannot_be_parked_is_refused() -> None:
    with pytest.raises(LifecycleError, match="Linear is not sharded"):
        park(nn.Linear(2, 2))
    model: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="park: keep is 'state'"):
        park(model, keep="state")  # type: ignore[arg-type]
    with unsharded(model), pytest.raises(LifecycleError, match="parked while the outermost unit"):
        park(model)

    class Parks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            park(self)
            return x

    outer = Parks()
    outer.linear = nn.Linear(2, 2)
    with pytest.raises(LifecycleError, match="cannot be parked during its forward or backward"):
        fully_shard(outer)(torch.ones(2))
    assert isinstance(model, FSDPModule)


# -- memory of the device ---------------------------------------------------------------------------------------

CASES = [
    Simulated(),
    Simulated(ranks=2, precision="bf16", loop="no_sync", optimizer="fused"),
    Simulated(ranks=2, strategy="SHARD_OPTIMIZER", offload="optimizer state"),
    Simulated(ranks=2, parameters="coded", precision="bf16", optimizer="Muon"),
    Simulated(ranks=2, strategy="NO_SHARD", optimizer="on owners"),
    Simulated(ranks=2, offload="main weights", activations="on host"),
    Simulated(ranks=2, parameters="composed"),
]


def _memory(case: Simulated, kind: str) -> tuple[int, int, int, int]:
    """Bytes of the device that are allocated before parking, then, at most while both happen, and afterwards."""
    place, device = place_of(kind), torch.accelerator
    model = made(case, place)
    optimizer, average = optimizer_of(case, model), EMA(model)
    for step in range(2):
        model(*batch(step, 0, place)).backward()
        average.update()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    gc.collect()
    device.synchronize(place)
    before = device.memory_allocated(place)
    device.reset_peak_memory_stats(place)
    park(model, [optimizer, average])
    parked = device.memory_allocated(place)
    unpark(model, [optimizer, average])
    device.synchronize(place)
    return before, parked, device.max_memory_allocated(place), device.memory_allocated(place)


def _moves(case: Simulated, kind: str) -> None:
    """Move a model by `to()`, and change what returned."""
    place = place_of(kind)
    model: Any = made(case, place)
    held = torch.accelerator.memory_allocated(place)
    park(model, keep="weights")
    assert torch.accelerator.memory_allocated(place) > held / 2
    model.to("cpu")
    assert torch.accelerator.memory_allocated(place) < held / 2
    with pytest.raises(LifecycleError, match="cannot be converted"):
        model.half()
    model.to(place)
    for parameter in model.parameters():
        before = parameter.bucket.main_version
        with torch.no_grad():
            parameter.mul_(2)
        assert parameter.bucket.main_version > before, "the engine does not notice that the weight has changed"


def _all_moves() -> None:
    from tests.simulated.device import NAME, Order, begin
    from tests.simulated.group import run_ranks as run_threads

    begin(Order.LAZY, 1)
    run_threads(_moves, 2, Simulated(ranks=2, precision="bf16"), NAME)


def test_a_model_that_returned_is_whole_again() -> None:
    on_device(_all_moves)


def _all_memory() -> dict[str, list[tuple[int, int, int, int]]]:
    from tests.simulated.device import NAME, Order, begin
    from tests.simulated.group import run_ranks as run_threads

    found = {}
    for case in CASES:
        begin(Order.LAZY, 1)
        found[str(case)] = run_threads(_memory, case.ranks, case, NAME)
    return found


def test_the_memory_of_the_device_is_free_while_a_model_is_parked() -> None:
    for name, ranks in on_device(_all_memory).items():
        for before, parked, peak, after in ranks:
            assert parked < (20 << 10) and parked < before / 2, name  # a count of steps takes 512 bytes
            assert peak <= before and after <= before, name


def test_the_state_dict_of_a_parked_model_can_be_read() -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    before = full_state_dict(model)
    park(model)
    assert all(torch.equal(value.full_tensor(), before[name]) for name, value in model.state_dict().items())
    unpark(model)
    assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
