"""The bytes the planner predicts are those the allocator hands out.

Within 3 %.

pytest tests/plan/test_plan_memory.py
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GPT2Config, GPT2LMHeadModel

from fullshard.api.planning import model_shape
from fullshard.comm.base import Work, WorkOf
from fullshard.comm.gloo import GlooCollectives, average
from fullshard.core.sizes import SUM_BLOCK_NBYTES, sum_blocks
from fullshard.features import FSDPModule, MixedPrecisionPolicy, shard_model
from fullshard.features.shared_memory.collectives import MappedBuffer
from fullshard.features.shared_memory.send_queue import BufferPool
from fullshard.features.steps_in_backward.stepper import step_in_backward
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import DEVICES, parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.memory import Memory, fragments_nbytes, memory_of
from fullshard.plan.route import Route
from fullshard.plan.schedule import predict_step
from fullshard.plan.setting import PlanSetting
from fullshard.plan.shapes import ModelShape, ParameterShape, UnitShape
from tests.distributed import run_ranks

WIDTH, DEPTH, VOCAB = 320, 4, 500
TOKENS = 64
"""Of a GPT-2, whose activations are something."""


class Layer(nn.Module):
    """Two matrices and what makes it residual. With one row of input its activations are nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Model(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """A way to train the model on `world_size` ranks."""

    strategy: str = "FULL_SHARD"
    world_size: int = 2
    shard_size: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    accumulation: int = 1
    frozen: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = True
    reduce_dtype: str | None = None
    gloo: bool = False
    step_in_backward: bool = False
    vocab: int = 0
    """of a GPT-2 that takes the toy's place"""

    @property
    def job(self) -> Job:
        names = ("strategy", "shard_size", "precision", "optimizer", "accumulation", "reduce_dtype")
        prefetch = ("backward_prefetch", "forward_prefetch", "step_in_backward")
        values = {name: getattr(self, name) for name in (*names, *prefetch)}
        return Job.of(values | {"seq_len": TOKENS if self.vocab else 1, "attention": "sdpa"})


CASES = {
    "full shard": Case(),
    "full shard, 4 ranks": Case(world_size=4),
    "grad op": Case("SHARD_GRAD_OP"),
    "no shard": Case("NO_SHARD"),
    "hybrid": Case("HYBRID_SHARD", 4, 2),
    "hybrid zero2": Case("HYBRID_SHARD_ZERO2", 4, 2),
    "one rank": Case(world_size=1),
    "one rank, bf16": Case(world_size=1, precision="bf16"),
    "bf16": Case(precision="bf16"),
    "bf16, 4 ranks": Case(world_size=4, precision="bf16"),
    "accumulation": Case(accumulation=3),
    "accumulation, bf16": Case(accumulation=2, precision="bf16"),
    "accumulation, one rank": Case(world_size=1, accumulation=2),
    "accumulation, hybrid": Case("HYBRID_SHARD", 4, 2, accumulation=2),
    "accumulation, over gloo": Case(accumulation=2, optimizer="sgd", gloo=True),
    "sgd": Case(optimizer="sgd"),
    "momentum": Case(optimizer="sgd-momentum"),
    "no prefetch": Case(backward_prefetch="NO_PREFETCH", forward_prefetch=False),
    "frozen base": Case(frozen=True),
    "over gloo": Case(gloo=True),
    "over gloo, 4 ranks, bf16": Case(world_size=4, precision="bf16", gloo=True),
    "step in backward": Case(step_in_backward=True),
    "step in backward, one rank": Case(world_size=1, step_in_backward=True),
    "step in backward, over gloo": Case(gloo=True, step_in_backward=True, optimizer="sgd-momentum"),
    "step in backward, hybrid": Case("HYBRID_SHARD", 4, 2, step_in_backward=True),
    "step in backward, accumulation, bf16": Case(accumulation=2, precision="bf16", step_in_backward=True),
    "frozen base, grad op": Case("SHARD_GRAD_OP", frozen=True, precision="bf16"),
    "gpt2, whose head decides": Case(vocab=8000, optimizer="sgd"),
    "gpt2, whose layers decide": Case(vocab=500, optimizer="sgd"),
    "gpt2, bf16": Case(vocab=8000, precision="bf16", optimizer="sgd-momentum"),
    "gpt2, accumulation, bf16": Case(vocab=8000, precision="bf16", optimizer="sgd-momentum", accumulation=2),
}
QUICK = ("full shard", "grad op", "bf16", "accumulation", "frozen base", "one rank", "gpt2, whose head decides")


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.vocab:
        sizes = {"n_embd": 128, "n_layer": DEPTH, "n_head": 4, "n_positions": TOKENS, "vocab_size": case.vocab}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        dropouts = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **dropouts, use_cache=False))
        return model
    model = Model()
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("layers.3", "head")))
    return model


def predict(case: Case) -> Memory:
    with torch.device("meta"):
        shape = model_shape(build(case))
    job = case.job
    layout = lay_out(shape, strategy=job.row, world_size=case.world_size, shard_size=case.shard_size, dtypes=job.dtypes)
    route = Route.of(layout.shard_size, on_cpu=True, per_host=None if case.gloo else layout.shard_size)
    setting = PlanSetting(shape, layout, job, DEVICES["CPU"], route=route)
    return memory_of(predict_step(layout, job.schedule), setting, ranks_per_host=case.world_size)


def measure(case: Case) -> tuple[int, int]:
    """(live bytes between steps, most live bytes in a step) of this rank.

    By PyTorch's own allocator reports, and by what is handed out of memory that ranks share.
    """
    gc.collect()  # models of other cases
    with _watched(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = _train(case)
    reports = profiler.profiler.kineto_results.events()
    start, end = (
        next(e for e in reports if e.name() == "measured").start_ns(),
        next(e for e in reports if e.name() == "after").start_ns(),
    )
    live = rest = peak = 0
    allocated = [(e.start_ns(), e.nbytes()) for e in reports if e.name() == "[memory]"]
    shared = [(e.start_ns(), int(e.name().split()[1])) for e in reports if e.name().startswith("shared ")]
    for moment, nbytes in sorted(allocated + shared):
        live += nbytes
        if moment < start:
            rest = peak = live
        elif moment < end:
            peak = max(peak, live)
    del model
    return rest, peak


class _Returned(deque[tuple[int, int]]):
    """Where an pool learns that a tensor has ended."""

    def append(self, piece: tuple[int, int]) -> None:
        note(-piece[1])
        super().append(piece)


def note(nbytes: int) -> None:
    """Put it between the allocator's own reports."""
    with record_function(f"shared {nbytes}"):
        pass


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Note each tensor that is cut out of shared memory, and its end; of a bucket this rank's interval.

    A thread of Gloo holds what it has summed up until some time after it has said so. If that is the last to hold it,
    the profiler, which looks at this thread alone, never sees its end: wait for the other to let go.
    """
    pool_class: Any = BufferPool
    buffer_class: Any = MappedBuffer
    gloo_class: Any = GlooCollectives
    empty, make, all_reduce = pool_class.empty, buffer_class.__init__, gloo_class.all_reduce

    def noted_empty(pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(pool._returned, _Returned):
            pool._returned = _Returned(pool._returned)
        tensor: torch.Tensor = empty(pool, numel, dtype)
        note(-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return tensor

    def noted_make(buffer: MappedBuffer, *args: Any, **options: Any) -> None:
        make(buffer, *args, **options)
        note(buffer._interval.nbytes)

    def watched_all_reduce(collectives: GlooCollectives, tensor: Any, *, tag: int) -> Work:
        holders = tensor._use_count()
        works = [all_reduce(collectives, tensor, tag=tag)]

        def wait() -> torch.Tensor:
            works.pop().wait()
            while tensor._use_count() > holders:
                time.sleep(1e-4)
            return cast(torch.Tensor, tensor)

        return WorkOf(wait)

    pool_class.empty, buffer_class.__init__, gloo_class.all_reduce = noted_empty, noted_make, watched_all_reduce
    try:
        yield
    finally:
        pool_class.empty, buffer_class.__init__, gloo_class.all_reduce = empty, make, all_reduce


def _train(case: Case) -> Any:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    model = build(case)
    shard_model(
        model,
        unit_modules=list(cast(Any, model).transformer.h if case.vocab else cast(Any, model).layers),
        strategy=case.strategy,
        shard_size=case.shard_size,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtypes[case.precision],
            reduce_dtype=getattr(torch, case.reduce_dtype) if case.reduce_dtype else None,
        ),
        forward_prefetch=case.forward_prefetch,
        backward_prefetch=case.backward_prefetch,
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if case.optimizer == "sgd-momentum" else 0)
    if case.step_in_backward:
        step_in_backward(optimizer)
    tokens = torch.arange(TOKENS)[None] if case.vocab else torch.tensor([[1]])

    def step() -> None:
        for number in range(case.accumulation):
            cast(FSDPModule, model).set_is_last_backward(number == case.accumulation - 1)
            if case.vocab:
                model(tokens, labels=tokens).loss.backward()
            else:
                model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with record_function("measured"):
        step()
    with record_function("after"):
        pass
    return model


def products_are_copied() -> bool:
    """Whether this processor makes products of bfloat16 in float32 first."""
    matrix = torch.ones(512, 512, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.mm(matrix, matrix)
    reports = profiler.profiler.kineto_results.events()
    return bool(sum(max(0, e.nbytes()) for e in reports if e.name() == "[memory]") > 1.5 * matrix.nbytes)


def measure_on_rank(case: Case) -> tuple[int, int, bool]:
    assert dist.get_world_size() == case.world_size
    os.environ["FULLSHARD_COMM"] = "gloo" if case.gloo else "auto"
    return *measure(case), products_are_copied()  # here: what ran in the tests' own process may have changed that


MARKED = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_persistent_and_peak_bytes(name: str) -> None:
    case = CASES[name]
    memory = predict(case)
    peak = memory.peak_of_step
    for rank, (rest, most, is_copied) in enumerate(run_ranks(measure_on_rank, case.world_size, case)):
        # The planner counts the float32 copy of a product in half precision, which some processors do without.
        spared = 0 if case.precision == "fp32" or is_copied else 4 * 3 * WIDTH * WIDTH
        print(f"{name}, rank {rank}: rest {rest} / {memory.persistent}, peak {most} / {peak} = {peak / most:.3f}")
        assert memory.persistent == pytest.approx(rest, rel=0.03)
        assert 0.97 * most <= peak <= 1.03 * most + spared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_takes_the_blocks_that_are_planned(dtype: torch.dtype) -> None:
    into = torch.empty(SUM_BLOCK_NBYTES)  # four of them
    for number in (2, 3, 4, 5, 8):
        terms = [torch.ones(len(into), dtype=dtype) for _ in range(number)]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            average(terms, into, 2.0)
        reports = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        taken = [nbytes for nbytes in reports if nbytes > into.itemsize * 2]  # more than the divisor
        assert taken == [SUM_BLOCK_NBYTES] * sum_blocks(number, is_cast=dtype != into.dtype)


def unit(name: str, role: str = "matrix") -> UnitShape:
    parameters = ParameterShape(f"{name}.a", (64, 64), role=role), ParameterShape(f"{name}.b", (256, 8), "bfloat16")
    return UnitShape(name, parameters if name else parameters[:1])


@pytest.mark.parametrize("role", ["embedding", "head"])
@pytest.mark.parametrize("values", [{}, {"step_in_backward": True}, {"accumulation": 2}])
def test_what_comes_goes(values: dict[str, Any], role: str) -> None:
    """Buckets of two dtypes, and a root whose gradient comes first or last."""
    model = ModelShape("two", (unit("layers.0"), unit("layers.1"), unit("", role)), is_final=True)
    plan = evaluate(model, Job.of({"precision": "no", **values}), parse_cluster("2xH100"))
    timeline = plan.memory.timeline
    assert all(nbytes >= 0 for moment in timeline for nbytes in moment.nbytes.values())
    assert any(moment.nbytes.get("reduce buffers") for moment in timeline)
    for name in ("gathered units", "logits", "activations", "reduce buffers"):
        assert not timeline[-1].nbytes.get(name), name


def test_what_the_allocator_cannot_use_is_needed_on_devices_of_their_own_memory() -> None:
    model = ModelShape("one", (unit("layers.0"), unit("", "head")), is_final=True)
    on_gpus, on_cpu = (evaluate(model, Job(), parse_cluster(devices)).memory for devices in ("2xH100", "2xCPU"))
    come_and_gone = on_gpus.peak - on_gpus.persistent - on_gpus.phases["load"]["framework"]
    assert on_gpus.needed == on_gpus.peak + fragments_nbytes(come_and_gone, is_alone=False) > on_gpus.peak
    assert on_cpu.needed == on_cpu.peak
