"""The Accelerator on two real ranks.

pytest tests/api/test_accelerator_ranks.py
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fullshard.api import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    accelerate,
    skip_first_batches,
)
from fullshard.checkpoint import full_state_dict, verify_checkpoint
from fullshard.config.handover import hand_over
from fullshard.config.schema import CheckpointConfig, RunConfig
from fullshard.core.errors import CheckpointError, CommunicationError, ConfigError, DataError, OptimizerError
from fullshard.features import ShardedParameter, describe, units_of
from fullshard.features.watchdog import DesyncDetection
from tests.differential import CLOSE, EPS, TOLERANCE, own_part
from tests.distributed import run_ranks


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def make_model(seed: int = 0, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), *[Block(width) for _ in range(3)], nn.Linear(width, 2))


def make_data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_state_dict(model, rank0_only=False)


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave nothing of what is to be loaded."""
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            tensor.detach().zero_()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of Adam's state."""
    named = ((name, optimizer.state[parameter]) for name, parameter in model.named_parameters())
    return {f"{name}/{key}": own_part(value) for name, state in named for key, value in state.items()}


class Stream(IterableDataset[torch.Tensor]):
    """Numbers as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(11))


# -- metrics and collectives ------------------------------------------------------------------------------------


def _metrics(marker: Path) -> dict[str, Any]:
    accelerator = Accelerator()
    results: dict[str, Any] = {}
    for name, dataset in {"map": TensorDataset(torch.arange(11)), "stream": Stream()}.items():
        loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
        rows: list[int] = []
        objects: list[str] = []
        for batch in loader:
            values = batch[0] if isinstance(batch, list) else batch
            rows += accelerator.gather_for_metrics(values).tolist()
            objects += accelerator.gather_for_metrics([f"s{v}" for v in values.tolist()])
        results[name] = (rows, objects)
    rank = accelerator.process_index
    results["looks"] = _looks(accelerator)
    results["nested"] = accelerator.gather({"a": [torch.tensor(rank)], "b": (torch.full((1, 2), rank),)})
    results["bool"] = accelerator.gather(torch.tensor([rank == 0]))
    results["half"] = accelerator.gather(torch.tensor([1.5 + rank], dtype=torch.bfloat16)).tolist()
    padded = accelerator.pad_across_processes(torch.ones(1 + rank, 2), pad_index=-1)
    results["padded"] = accelerator.gather(padded).tolist()
    first = accelerator.pad_across_processes(torch.ones(2, 1 + rank), dim=1, pad_index=7, pad_first=True)
    results["padded_first"] = first.tolist()
    value = torch.tensor([1.0, 2.0 + rank])
    results["reduced"] = [accelerator.reduce(value, how).tolist() for how in ("sum", "mean", "max", "none")]
    results["half_sum"] = accelerator.reduce(torch.tensor(rank + 0.5, dtype=torch.bfloat16)).item()
    try:
        accelerator.gather(torch.ones(1 + rank))
    except CommunicationError as error:
        results["mismatch"] = str(error)
    for wrong in ({"text": "abc"}, "abc", None):
        with pytest.raises(TypeError, match="on 2 ranks expected nested tensors or a list with one object per"):
            accelerator.gather_for_metrics(wrong)
    if rank == 1:
        accelerator.set_trigger()
    results["trigger"] = (accelerator.check_trigger(), accelerator.check_trigger())
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        results["split"] = part
    with accelerator.split_between_processes({"t": torch.arange(3)}, apply_padding=True) as part:
        results["split_padded"] = part["t"].tolist()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        accelerator.print("once")
    results["printed"] = output.getvalue()
    with accelerator.main_process_first():
        results["first"] = marker.exists()
        if rank == 0:
            time.sleep(0.1)
            marker.touch()
    with contextlib.suppress(ZeroDivisionError), accelerator.main_process_first():
        results["after_an_error"] = 1 // rank  # on rank 0, for which rank 1 must not wait for ever
    results["main"] = accelerator.on_main_process(lambda: "main")()
    results["last"] = accelerator.on_process(process_index=1)(lambda: "last")()
    torch.manual_seed(rank)
    list(Accelerator(rng_types=["torch"]).prepare(DataLoader(make_data())))
    results["drawn"] = torch.rand(()).item()
    return results


def _looks(accelerator: Accelerator) -> list[list[int]]:
    """What is gathered of epochs in which rank 0 alone looks at the loader, in all ways; each has a backward."""
    loader, other, model = accelerator.prepare(
        *(DataLoader(TensorDataset(torch.arange(11)), batch_size=2, shuffle=True) for _ in range(2)), nn.Linear(1, 1)
    )

    def backward() -> None:
        model(torch.ones(1, 1)).sum().backward()

    accelerator.gradient_state.has_optimizer = True  # as of one that was prepared
    is_first = accelerator.process_index == 0
    epochs: list[list[int]] = []
    if is_first:
        next(iter(loader))
    for look in (list, lambda loader: next(iter(loader))):
        epochs.append([])
        for (values,) in loader:
            rows = accelerator.gather_for_metrics(values).tolist()
            if is_first:
                look(loader)
            assert accelerator.gather_for_metrics(values.tolist()) == rows
            epochs[-1] += rows
            backward()
    epochs.append([])
    for _ in loader:
        for (values,) in other:
            if is_first:
                next(iter(loader))
            epochs[-1] += accelerator.gather_for_metrics(values).tolist()
        backward()
        break
    left_lying = iter(other)
    if is_first:
        next(left_lying)
    assert accelerator.gather_for_metrics(torch.zeros(1)).tolist() == [0, 0]
    backward()
    epochs += [[n for (values,) in other for n in accelerator.gather_for_metrics(values).tolist()] for _ in range(2)]
    if is_first:
        list(other)
    backward()  # of no loop
    differ = "rank 0 in the order of epoch 4, rank 1 in the order of epoch 3; some"
    for (values,) in other:
        for each in (values, values.tolist()):
            with pytest.raises(DataError, match=differ):
                accelerator.gather_for_metrics(each)
        with pytest.warns(UserWarning, match=differ):
            backward()
        backward()  # it is said once
        break
    backward()
    return epochs


def _rightly_apart() -> tuple[int, list[str]]:
    """Ranks read in different orders as they may: how often they were compared in 20 steps, and what was said of it."""
    data = TensorDataset(torch.arange(10.0))
    uneven = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader, model = uneven.prepare(DataLoader(data, batch_size=2, shuffle=True), nn.Linear(1, 1))
    own = skip_first_batches(DataLoader(data, batch_size=5, shuffle=True), 0)  # each rank reads all of it
    other = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2, shuffle=True))
    left_lying = iter(other)
    compared: list[int] = []
    whole = DesyncDetection.compare

    def counted(detection: DesyncDetection) -> None:
        compared.append(detection.model.steps)
        whole(detection)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if uneven.process_index == 0:
            list(own)
        for several in (itertools.chain(loader, loader), itertools.chain(own, own)):
            for (values,) in itertools.islice(several, 4):
                model(values[:1, None]).sum().backward()
        patch.setattr(DesyncDetection, "compare", counted)
        if uneven.process_index == 0:
            next(left_lying)
        for _ in range(20):
            model(torch.ones(1, 1)).sum().backward()
    texts = [str(warning.message) for warning in said]
    return len(compared), [text for text in texts if "orders" in text]


def test_ranks_may_read_in_different_orders() -> None:
    assert run_ranks(_rightly_apart, 2) == [(1, [])] * 2


def test_metrics_and_collectives(tmp_path: Path) -> None:
    results = run_ranks(_metrics, 2, tmp_path / "made by rank 0")
    for rank, result in enumerate(results):
        for name in ("map", "stream"):
            rows, objects = result[name]
            assert rows == list(range(11)), name
            assert objects == [f"s{i}" for i in range(11)], name
        assert [sorted(epoch) for epoch in result["looks"]] == [list(range(11))] * 5
        assert result["nested"]["a"][0].tolist() == [0, 1]
        assert result["nested"]["b"][0].tolist() == [[0, 0], [1, 1]]
        assert result["bool"].tolist() == [True, False]
        assert result["half"] == [1.5, 2.5]
        assert result["padded"] == [[1, 1], [-1, -1], [1, 1], [1, 1]]
        assert result["padded_first"] == ([[7, 1], [7, 1]] if rank == 0 else [[1, 1], [1, 1]])
        own = [1.0, 2.0 + rank]
        assert result["reduced"] == [[2.0, 5.0], [1.0, 2.5], [1.0, 3.0], own]
        assert result["half_sum"] == 2.0
        assert "rank 0 has [((1,), 'torch.float32')], rank 1 has [((2,)" in result["mismatch"]
        assert result["trigger"] == (True, False)
        assert result["split"] == (["a", "b"] if rank == 0 else ["c"])
        assert result["split_padded"] == ([0, 1] if rank == 0 else [2, 2])
        assert result["printed"] == ("once\n" if rank == 0 else "")
        assert result["first"] == (rank == 1), "rank 0 runs the block before the others"
        assert result.get("after_an_error") == (1 if rank == 1 else None)
        assert result["main"] == ("main" if rank == 0 else None)
        assert result["last"] == ("last" if rank == 1 else None)
    assert results[0]["drawn"] == results[1]["drawn"]


# -- accumulation, order of preparation, precision --------------------------------------------------------------


def _train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, epochs: int = 1) -> list[float]:
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def _accumulate(batch_size: int, steps: int, use_no_sync: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=batch_size))
    if not use_no_sync:
        _train(accelerator, model, optimizer, loader)
        return whole(model)
    for number, (x, y) in enumerate(loader):
        is_last = number % steps == steps - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if is_last:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def _all_ways() -> list[dict[str, torch.Tensor]]:
    # 24 samples on two ranks: rank r must see the same samples in a step of 4x1 as in one of 1x4, whose deals differ,
    # so each step uses the batches of both ranks and only their mean is compared.
    return [_accumulate(4, 1, False), _accumulate(1, 4, False), _accumulate(1, 4, True)]


def test_accumulating_equals_a_larger_batch() -> None:
    for large, small, unreduced in run_ranks(_all_ways, 2):
        for name, value in large.items():
            torch.testing.assert_close(small[name], value, **CLOSE)
            torch.testing.assert_close(unreduced[name], value, **CLOSE)


def _orders() -> list[dict[str, torch.Tensor]]:
    def prepared(how: str) -> dict[str, torch.Tensor]:
        accelerator = Accelerator()
        model, data = make_model(), DataLoader(make_data(), batch_size=2, shuffle=True)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        match how:
            case "together":
                model, optimizer, loader = accelerator.prepare(model, optimizer, data)
            case "reversed":
                loader, optimizer, model = accelerator.prepare(data, optimizer, model)
            case "optimizer first":
                optimizer = accelerator.prepare(optimizer)
                loader = accelerator.prepare(data)
                model = accelerator.prepare(model)
            case _:
                model = accelerator.prepare(model)
                optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
                loader = accelerator.prepare(data)
                assert accelerator.prepare(model, optimizer, loader) == (model, optimizer, loader)
        assert all(isinstance(p, ShardedParameter) for p in model.parameters())
        _train(accelerator, model, optimizer, loader)
        return whole(model)

    torch.manual_seed(3)
    return [prepared(how) for how in ("together", "reversed", "optimizer first", "one by one")]


def test_objects_are_prepared_in_any_order() -> None:
    for first, *others in run_ranks(_orders, 2):
        for other in others:
            assert all(torch.equal(value, other[name]) for name, value in first.items())


def _settings() -> dict[str, list[float]]:
    losses = {}
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "recomputed": {"activation_checkpointing": True, "wrap": "class", "wrap_classes": "Block"},
        "recomputed in part": {
            "activation_checkpointing": True,
            "activation_checkpointing_mode": "selective",
            "wrap_classes": "Block",
        },
        "kept": {"reshard_after_forward": "auto"},
        "compiled": {"compile": True},
        "gathered once": {"strategy": "SHARD_GRAD_OP"},
        "replicated": {"strategy": "NO_SHARD"},
        "by size": {"wrap": "size", "wrap_min_numel": 40},
        "one unit": {"wrap": "none"},
        "hybrid": {"strategy": "HYBRID_SHARD", "shard_size": 1},
        "ignoring": {"ignored_modules": "2.linear", "wrap": "class", "wrap_classes": "Block"},
    }
    for name, settings in variants.items():
        backend = "aot_eager" if settings.pop("compile", False) else None
        accelerator = Accelerator(fsdp_plugin=settings, dynamo_backend=backend)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=2))
        losses[name] = _train(accelerator, model, optimizer, loader)
    return losses


def test_settings_change_how_and_not_what() -> None:
    losses, _ = run_ranks(_settings, 2)
    ignoring = losses.pop("ignoring")
    for name, values in losses.items():
        assert values == pytest.approx(losses["plain"], rel=TOLERANCE), name
    # An ignored module is not reduced over the ranks, so only its first step is the same.
    assert ignoring[0] == pytest.approx(losses["plain"][0], rel=TOLERANCE)


def _precision() -> dict[str, Any]:
    result: dict[str, Any] = {}
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        accelerator = Accelerator(mixed_precision="bf16")
        model = make_model().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=4))
    result["said"] = stderr.getvalue()
    result["main"] = {p.dtype for p in model.parameters()}
    result["inside"] = []
    # Not on the block itself: a unit has given its unsharded parameters back when later hooks run.
    model[1].linear.register_forward_hook(lambda m, args, out: result["inside"].append((m.weight.dtype, out.dtype)))
    result["output"] = model(next(iter(loader))[0]).dtype
    with accelerator.autocast():
        result["autocast"] = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    losses = _train(accelerator, model, optimizer, loader, epochs=4)
    result["falls"] = losses[-1] < losses[0]
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    result["bare"] = "forward" in model.__dict__
    return result


def test_bf16_keeps_float32_main_weights_and_outputs() -> None:
    for rank, result in enumerate(run_ranks(_precision, 2)):
        assert result["main"] == {torch.float32}
        assert result["inside"][0] == (torch.bfloat16, torch.bfloat16)
        assert result["output"] == torch.float32
        assert result["autocast"] == torch.bfloat16
        assert result["falls"]
        assert not result["bare"]
        said = result["said"]
        assert ("get float32 main weights" in said and "sharded over 2 ranks" in said) == (rank == 0)


def _start_up_line(strategy: str) -> tuple[str, str]:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy=strategy))
        model = accelerator.prepare(make_model())
    inner: Any = units_of(model)[0].modules[0]
    inner.set_reshard_after_forward(False, recurse=False)
    return stderr.getvalue(), str(describe(model))


@pytest.mark.parametrize(
    ("strategy", "line", "note"),
    [
        ("FULL_SHARD", "sharded over 2 ranks (FULL_SHARD, 1 x 2): ", ""),
        ("SHARD_GRAD_OP", "sharded over 2 ranks (SHARD_GRAD_OP, 1 x 2): ", ""),
        ("HYBRID_SHARD", "sharded over 2 ranks (FULL_SHARD, 1 x 2): ", "HYBRID_SHARD with a shard group of 2 of 2"),
        ("NO_SHARD", "replicated on 2 ranks (NO_SHARD, 2 x 1): ", ""),
    ],
)
def test_the_line_at_start_up_names_the_strategy(strategy: str, line: str, note: str) -> None:
    (said, after), _ = run_ranks(_start_up_line, 2, strategy)
    assert f"Sequential: {line}" in said
    assert note in said and ("with a shard group" in said) == bool(note)
    kept = "(FULL_SHARD keeping 1 of 4 units, 1 x 2)" if "FULL_SHARD, " in line else line
    assert kept in after


def _overflow() -> dict[str, Any]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates, skipped, norms = [], [], []
    x, y = make_data(4).tensors
    for step in range(3):
        loss = nn.functional.cross_entropy(model(x), y)
        # Rank 1 alone overflows in the second step; both must leave it out.
        accelerator.backward(loss * (float("inf") if step == 1 and accelerator.process_index == 1 else 1.0))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    finite = all(value.isfinite().all().item() for value in whole(model).values())
    assert accelerator.scaler is not None
    return {
        "rates": rates,
        "skipped": skipped,
        "norms": norms,
        "finite": finite,
        "scale": accelerator.scaler.get_scale(),
    }


def test_fp16_overflow_on_one_rank_skips_the_step_everywhere() -> None:
    results = run_ranks(_overflow, 2)
    for result in results:
        assert result["skipped"] == [False, True, False]
        assert result["rates"] == [0.025, 0.025, 0.00625], "a schedule steps once for each rank"
        assert result["finite"]
        assert result["scale"] == 512.0
        assert max(result["norms"][::2]) < 10, "norms must be those of unscaled gradients, in every step"
    assert results[0]["norms"][::2] == results[1]["norms"][::2]


def _refusals() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    with pytest.raises(OptimizerError, match="Adafactor needs complete tensors"):
        accelerator.prepare(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(OptimizerError, match="was not prepared"):
        accelerator.unscale_gradients(torch.optim.SGD(model.parameters()))
    return "done"


def test_optimizers_that_need_whole_matrices_are_refused() -> None:
    assert run_ranks(_refusals, 2) == ["done", "done"]


# -- state ------------------------------------------------------------------------------------------------------


class Counter:
    """Something a script registers."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _run(directory: str, save_after: int | None, resume: bool, batch_size: int) -> dict[str, Any]:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=1),
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(make_data(), batch_size=batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        accelerator.load_state()
    losses = []
    while loader.epoch < 2:
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.value += 1
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if save_after in (counter.value, counter.value - 1):  # two saves, of which the limit keeps the second
                accelerator.save_state()
    return {"losses": losses, "counter": counter.value, "rate": scheduler.get_last_lr(), "weights": whole(model)}


def test_state_resumes_in_mid_epoch_on_any_number_of_ranks(tmp_path: Path) -> None:
    whole_run = run_ranks(_run, 2, str(tmp_path), 7, False, 4)[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["checkpoint_1"]
    resumed = run_ranks(_run, 2, str(tmp_path), None, True, 4)[0]
    assert resumed["losses"] == whole_run["losses"][8:], "resuming on the same ranks must be exact"
    assert resumed["counter"] == whole_run["counter"]
    assert resumed["rate"] == whole_run["rate"]
    assert all(torch.equal(value, resumed["weights"][name]) for name, value in whole_run["weights"].items())
    [alone] = run_ranks(_run, 1, str(tmp_path), None, True, 4)
    assert alone["losses"] == pytest.approx(whole_run["losses"][8:], rel=TOLERANCE)


def _two_models(directory: str, load: bool) -> list[dict[str, torch.Tensor]]:
    config = RunConfig(checkpoint=CheckpointConfig(format="dcp"))
    os.environ.update(hand_over(config, Path(directory) / f"config-{os.environ['RANK']}.json"))
    accelerator = Accelerator()
    generator, critic = make_model(1 + load), make_model(11 + load, width=8)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (generator, critic)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, 0.5)
    objects = accelerator.prepare(generator, optimizers[0], critic, optimizers[1], scheduler)
    path = Path(directory) / "state"
    if load:
        accelerator.load_state(path)
    else:
        for x, y in accelerator.prepare(DataLoader(make_data(), batch_size=4)):
            loss = nn.functional.cross_entropy(objects[0](x), y) + nn.functional.cross_entropy(objects[2](x), y)
            accelerator.backward(loss)
            for optimizer in (objects[1], objects[3]):
                optimizer.step()
                optimizer.zero_grad()
            objects[4].step()
        accelerator._dataloaders.clear()
        accelerator.save_state(path)
        accelerator.save_state(path)  # replaces its own
        (path / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            accelerator.save_state(path)
        accelerator.wait_for_everyone()
        (path / "notes.txt").unlink(missing_ok=True)
    stepped = [(o, p) for o in (objects[1], objects[3]) for g in o.param_groups for p in g["params"] if o.state.get(p)]
    moments = {f"exp_avg.{i}": o.state[p]["exp_avg"].full_tensor() for i, (o, p) in enumerate(stepped)}
    assert moments
    return [whole(objects[0]), whole(objects[2]), moments, {"rate": torch.tensor(objects[4].get_last_lr())}]


def test_several_models_and_optimizers_are_saved_together(tmp_path: Path) -> None:
    saved = run_ranks(_two_models, 2, str(tmp_path), False)
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert names == {f"{kind}_{i}" for kind in ("part", "pytorch_model_fsdp", "optimizer") for i in range(2)}
    loaded = run_ranks(_two_models, 2, str(tmp_path), True)
    for before, after in zip(saved, loaded, strict=True):
        for a, b in zip(before, after, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def _two_models_of_one_optimizer(directory: str, load: bool) -> list[dict[str, torch.Tensor]]:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    models = make_model(1 + load), make_model(11 + load, width=8)
    optimizer = torch.optim.AdamW(itertools.chain(*(model.parameters() for model in models)), lr=1e-2)
    optimizer, *prepared = accelerator.prepare(optimizer, *models)
    if load:
        accelerator.load_state(directory)
    else:
        accelerator.backward(sum(model(torch.ones(2, 4)).square().mean() for model in prepared))
        optimizer.step()
        accelerator.save_state(directory)
        accelerator._config = accelerator._config.model_copy(update={"checkpoint": CheckpointConfig(format="dcp")})
        with pytest.raises(ConfigError, match="one model per optimizer"):
            accelerator.save_state(f"{directory}-dcp")
    state = {f"exp_avg.{i}": optimizer.state[p]["exp_avg"] for i, p in enumerate(optimizer.param_groups[0]["params"])}
    return [*map(whole, prepared), {name: moment.full_tensor() for name, moment in state.items()}]


def test_models_of_one_optimizer_are_saved_as_one(tmp_path: Path) -> None:
    """As diffusers' scripts train a text encoder beside the model."""
    saved, _ = run_ranks(_two_models_of_one_optimizer, 2, str(tmp_path / "state"), False)
    assert {"model", "model_1"} <= {path.name for path in (tmp_path / "state").iterdir()}
    loaded, *_ = run_ranks(_two_models_of_one_optimizer, 3, str(tmp_path / "state"), True)
    for before, after in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())


def _hugging_face(directory: str) -> dict[str, Any]:
    import transformers

    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    torch.manual_seed(1)
    source = transformers.GPT2LMHeadModel(config)
    base = Path(directory)
    if accelerator.is_main_process:
        source.save_pretrained(base / "source")
    accelerator.wait_for_everyone()
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(transformers.GPT2LMHeadModel.from_pretrained(base / "source"))
    tokens = torch.arange(12).view(1, 12)
    expected = source.eval()(input_ids=tokens).logits
    loaded_equal = torch.allclose(model.eval()(input_ids=tokens).logits, expected, **CLOSE)
    state = accelerator.get_state_dict(model)
    # The way Accelerate's documentation has people save a sharded model.
    accelerator.unwrap_model(model).save_pretrained(
        base / "idiom", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    # The way Transformers' examples save any model.
    accelerator.unwrap_model(model).save_pretrained(
        base / "example", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_model(model, base / "saved", max_shard_size="10KB")
    shards = len(list((base / "saved").glob("*.safetensors")))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (base / "saved" / "notes.txt").write_text("mine")
    accelerator.wait_for_everyone()
    accelerator.save_model(model, base / "saved")  # one file now; the shards of before must not be read
    accelerator.save({"step": 3}, base / f"step{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    same = [
        torch.allclose(
            transformers.GPT2LMHeadModel.from_pretrained(base / d)(input_ids=tokens).logits,
            expected,
            **CLOSE,
        )
        for d in ("idiom", "example", "saved")
    ]
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        del os.environ[name]  # set by the plugin for Transformers; these processes serve other tests too
    files = sorted(path.name for path in (base / "saved").iterdir())
    accelerator.wait_for_everyone()
    pickles = []
    for size in ("10KB", "10GB"):  # those of the first must not be left
        accelerator.save_model(model, base / "saved", max_shard_size=size, safe_serialization=False)
        accelerator.wait_for_everyone()
        pickles.append(sorted(path.name for path in (base / "saved").glob("*model*")))
        pickled = transformers.GPT2LMHeadModel.from_pretrained(base / "saved")(input_ids=tokens).logits
        same.append(torch.allclose(pickled, expected, **CLOSE))
    weights = torch.load(base / "saved" / "pytorch_model.bin")
    return {
        "files": files,
        "pickles": pickles,
        "tied": weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr(),
        "shards": shards,
        "loaded": loaded_equal,
        "same": same,
        "keys": len(state),
        "step": torch.load(base / "step0.pt"),
    }


def test_models_go_to_and_come_from_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(_hugging_face, 2, str(tmp_path))
    for result in (first, second):
        assert result["loaded"]
        assert result["same"] == [True] * 5
        assert result["shards"] > 1
        assert len(result["pickles"][0]) > 2 and result["pickles"][1] == ["pytorch_model.bin"] and result["tied"]
        assert result["files"] == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
        assert result["step"] == {"step": 3} and not (tmp_path / "step1.pt").exists()
    assert first["keys"] > 0
    assert second["keys"] == 0


# -- the one-call form ------------------------------------------------------------------------------------------


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of the user's own."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / 10), index % 2


def _one_call() -> tuple[list[float], int]:
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Pictures(), batch_size=2)
    sharded, optimizer, loader = accelerate(model, optimizer, loader, {"wrap": "class", "wrap_classes": "Block"})
    assert sharded is model
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, len(loader)


def test_the_one_call_form() -> None:
    results = run_ranks(_one_call, 2)
    for losses, steps in results:
        assert steps == 3
        assert len(losses) == 9
        assert losses[-1] < losses[0]
    assert results[0][0] != results[1][0], "ranks must see different data"


# -- saving in the background -----------------------------------------------------------------------------------------


def _background(directory: str) -> tuple[list[float], list[float], str, int]:
    project = ProjectConfiguration(
        project_dir=directory, automatic_checkpoint_naming=True, total_limit=2, async_save=True
    )
    accelerator = Accelerator(project_config=project, cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(4000), 2, shuffle=True))
    batches = iter(loader)

    def steps(count: int) -> list[float]:
        losses = []
        for x, y in itertools.islice(batches, count):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(1)
    for _ in range(3):  # each but the first waits for the one before, and the first goes in the end
        saved = accelerator.save_state()
        expected = steps(3)
    accelerator.load_state(saved)
    batches = iter(loader)  # goes on in mid-epoch
    got = steps(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if accelerator.process_index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    count = 0
    try:
        accelerator.save_state()
        with pytest.raises(CheckpointError, match="rank 1: cannot write") as caught:
            for _ in range(900):
                count += len(steps(1))
                time.sleep(0.01)  # the writing thread gets its turn
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    path = accelerator.save_state(wait=True)
    assert Path(path).exists()
    accelerator.end_training()
    return expected, got, str(caught.value), count


def test_training_goes_on_while_the_state_is_saved(tmp_path: Path) -> None:
    first, second = run_ranks(_background, 2, str(tmp_path))
    assert first[2:] == second[2:]
    for expected, got, _, _ in (first, second):
        assert got == expected
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_4"]
    for name in names[1:]:
        found = verify_checkpoint(tmp_path / "checkpoints" / name)
        assert found.is_valid
        assert found.manifest is not None
        extra: Any = found.manifest.states["extra"]
        assert extra["config"]["sharding"]["strategy"] == "FULL_SHARD"


# -- positions over world sizes ---------------------------------------------------------------------------------------


class _Ids(Dataset[torch.Tensor]):
    """Samples that are their own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class _Stub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def _position(directory: str, kind: str, steps: int, resumed: bool) -> list[int]:
    """Ids of the samples that all ranks used together."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    make = StatefulDataLoader if kind == "stateful" else DataLoader
    loader = make(_Ids(101), batch_size=3, shuffle=True)
    _model, loader = accelerator.prepare(_Stub(), loader)
    if resumed:
        accelerator.load_state(f"{directory}/a")
    used: list[int] = []
    for batch in loader:
        # the repetitions that fill up the last step of an epoch are left out, as for metrics
        used += [int(x) for x in accelerator.gather_for_metrics(batch).flatten()]
        steps -= 1
        if steps == 0:
            break
    accelerator.save_state(f"{directory}/a")
    return used


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_each_sample_once_although_the_world_size_changes(tmp_path: Path, kind: str) -> None:
    """Two ranks, then three, then one, in one epoch."""
    parts = [
        run_ranks(_position, size, str(tmp_path), kind, steps, resumed)[0]
        for size, steps, resumed in ((2, 5, False), (3, 4, True), (1, 0, True))
    ]
    assert [len(part) for part in parts] == [30, 36, 35]
    assert sorted(itertools.chain(*parts)) == list(range(101))


def _scaled(directory: str) -> list[float]:
    accelerator = Accelerator(cpu=True)
    scales = []
    for scale in (512.0, 2.0):
        model = accelerator.prepare(_Stub())
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
        accelerator.scaler.scale(torch.ones(()))
        accelerator.step = int(scale)
        if scale == 512.0:
            accelerator.save_state(f"{directory}/a")
        else:
            accelerator.load_state(f"{directory}/a")
        scales += [accelerator.scaler.get_scale(), float(accelerator.step)]
        assert model is not None
        accelerator.free_memory()
        assert accelerator.step == 0
    return scales


def test_the_loss_scale_and_the_step_come_back(tmp_path: Path) -> None:
    assert run_ranks(_scaled, 2, str(tmp_path)) == [[512.0, 512.0, 512.0, 512.0]] * 2


# -- kinds of state dicts and formats ---------------------------------------------------------------------------------


def _kinds(directory: str) -> dict[str, list[str]]:
    plugin = FullyShardedDataParallelPlugin()
    names = {}
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    full, held = whole(model), moments(model, optimizer)
    for kind in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT"):
        plugin.set_state_dict_type(kind)
        path = Path(accelerator.save_state(f"{directory}/{kind}"))
        names[kind] = sorted(entry.name for entry in path.iterdir())
        state = accelerator.get_state_dict(model)
        if kind == "LOCAL_STATE_DICT":
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, ShardedParameter)
                start, stop = parameter.interval.start, parameter.interval.stop
                assert torch.equal(state[name], full[name].flatten()[start:stop])
        elif accelerator.is_main_process:
            assert all(torch.equal(state[name], full[name]) for name in full)
        else:
            assert state == {}
        clear(model, optimizer)
        accelerator.load_state(f"{directory}/{kind}")
        assert all(torch.equal(now, full[name]) for name, now in whole(model).items())
        assert all(torch.equal(moments(model, optimizer)[name], then) for name, then in held.items())
    return names


def test_kinds_of_state_dicts(tmp_path: Path) -> None:
    """FULL writes the whole weights besides, LOCAL hands out what a rank holds; all load anywhere."""
    names = run_ranks(_kinds, 2, str(tmp_path))[0]
    assert names["SHARDED_STATE_DICT"] == names["LOCAL_STATE_DICT"]
    assert set(names["FULL_STATE_DICT"]) - set(names["SHARDED_STATE_DICT"]) == {"model"}
    for kind in names:
        verify_checkpoint(tmp_path / kind).raise_if_damaged()


def _with_torch_format(directory: str, wait: bool) -> dict[str, torch.Tensor]:
    rank = os.environ["RANK"]
    config = RunConfig(checkpoint=CheckpointConfig(format="dcp"))
    os.environ.update(hand_over(config, Path(directory).with_name(f"config-{rank}.json")))
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    for _ in range(2):  # the second replaces the first
        accelerator.save_state(f"{directory}/a", wait=wait)
    expected, held = whole(model), moments(model, optimizer)
    accelerator.load_state(f"{directory}/a")  # waits for what is being saved
    clear(model, optimizer)
    accelerator.load_state(f"{directory}/a")
    assert all(torch.equal(moments(model, optimizer)[name], then) for name, then in held.items())
    assert all(torch.equal(now, expected[name]) for name, now in whole(model).items())
    return expected


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("wait", [True, False])
def test_torch_format_besides(tmp_path: Path, wait: bool) -> None:
    """Where Accelerate looks for it, read by torch itself; the checkpoint stays what it is."""
    import torch.distributed.checkpoint as dcp

    out = tmp_path / "out"
    out.mkdir()
    expected = run_ranks(_with_torch_format, 2, str(out), wait)[0]
    verify_checkpoint(out / "a").raise_if_damaged()
    assert (out / "a" / "optimizer_0" / ".metadata").is_file()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(state, checkpoint_id=out / "a" / "pytorch_model_fsdp_0", no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())
    assert sorted(path.name for path in out.iterdir()) == ["a"]
