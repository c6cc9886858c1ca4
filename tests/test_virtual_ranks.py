"""Losses and weights are the same bits at any number of ranks that divides the virtual ones.

pytest tests/test_virtual_ranks.py
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fullshard import Accelerator
from fullshard.api.dealing import Deal
from fullshard.api.slices import seed_of
from fullshard.checkpoint import full_state_dict
from fullshard.comm.cpu.averages import average
from fullshard.config.schema import RunConfig
from fullshard.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LifecycleError,
    OptimizerError,
)
from fullshard.core.virtual_ranks import BLOCK_NUMEL, rounds_of
from fullshard.engine import MixedPrecisionPolicy, clip_grad_norm_, no_sync, shard_model
from fullshard.engine.rounds import RoundSums, square_sum
from tests.distributed import run_ranks
from tests.test_recipe_train import inputs as inputs

STEPS, SLICE, VOCABULARY = 4, 2, 53


class Block(nn.Module):
    """Attention by hand and dropout; sizes that are no multiple of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / math.sqrt(x.shape[-1])).softmax(-1)
        x = x + self.out(self.dropout(scores) @ value)
        update: torch.Tensor = self.dropout(self.down(nn.functional.gelu(self.up(x))))
        return x + update


class Model(nn.Module):
    """Tied embeddings, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, 36), nn.ModuleList(Block(36) for _ in range(2))
        self.head = nn.Linear(36, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=36, n_layer=2, n_head=2))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=VOCABULARY, attention_dropout=0.1, max_position_embeddings=16
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Any] = {"own": Model, "gpt2": gpt2, "llama": llama}


def config_of(**settings: Any) -> RunConfig:
    """Settings by path, with `.` as `__`."""
    values = {"training__deterministic": "across_world_sizes", "launch__device": "cpu"} | settings
    return RunConfig.of_paths({path.replace("__", "."): value for path, value in values.items()})


def train(
    name: str, settings: dict[str, Any], first: int = 0, last: int = STEPS, directory: str | None = None
) -> dict[str, Any]:
    """The loop of a script: losses by slice, norms, and the weights at the end. Goes on where `directory` has it."""
    if settings.pop("comm", None) == "gloo":
        os.environ["FULLSHARD_COMM"] = "gloo"
    torch.manual_seed(7)
    model: Any = MODELS[name]()
    accelerator = Accelerator(fsdp_plugin=config_of(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    tokens = torch.randint(0, VOCABULARY, (STEPS * 8 * SLICE + 5, 12), generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(TensorDataset(tokens), batch_size=SLICE, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if first:
        accelerator.load_state(directory)
    slices = accelerator.slices
    assert slices is not None
    losses: dict[tuple[int, int], float] = {}
    norms: list[float] = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            place = (slices.step, slices.current or 0)
            output = model(batch)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
            losses[place] = loss.item()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if slices.step == last:
            break
    assert slices.step == last and len(norms) == last - first
    if directory is not None and last < STEPS:
        accelerator.save_state(directory)
    return {"losses": losses, "norms": norms, "weights": {k: v.clone() for k, v in full_state_dict(model).items()}}


def trained(world_size: int, name: str = "own", **settings: Any) -> dict[str, Any]:
    return merged(run_ranks(train, world_size, name, settings))


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    found = ranks[0]
    for rank in ranks[1:]:
        assert not found["losses"].keys() & rank["losses"].keys()
        found["losses"] |= rank["losses"]
        assert rank["norms"] == found["norms"]
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


# -- runs -----------------------------------------------------------------------------------------------------------


def test_one_rank_and_four() -> None:
    """Of four the order in which ranks are added up shows; of two it does not."""
    alone, four = (merged(run_ranks(train, world_size, "own", {}, 0, 2)) for world_size in (1, 4))
    assert len(alone["losses"]) == 2 * 8
    assert_same(four, alone)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["own", "gpt2", "llama"])
def test_the_same_bits(name: str, mode: str) -> None:
    """At 1, 2, 4 and 8 ranks, over shared memory and messages, however parameters are placed."""
    alone = trained(1, name, precision__mode=mode)
    for world_size in (2, 4, 8):
        for comm in ("shared memory", "gloo"):
            assert_same(trained(world_size, name, precision__mode=mode, comm=comm), alone)
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRAD_OPTIMIZER"):
        for world_size, comm in ((2, "shared memory"), (4, "gloo"), (4, "shared memory")):
            settings = {"sharding__strategy": strategy, "precision__mode": mode, "comm": comm}
            assert_same(trained(world_size, name, **settings), alone)
    hybrid: dict[str, Any] = {"sharding__strategy": "HYBRID_SHARD", "sharding__shard_size": 2}
    assert_same(trained(4, name, precision__mode=mode, **hybrid), alone)


@pytest.mark.full
def test_other_settings() -> None:
    """What is recomputed draws the same numbers; other virtual ranks are another sum."""
    alone = trained(1)
    assert_same(trained(4, sharding__activation_checkpointing=True), alone)
    fewer = trained(2, training__virtual_ranks=2)
    assert fewer["losses"].keys() != alone["losses"].keys()
    assert_same(trained(1, training__virtual_ranks=2), fewer)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_fewer_ranks_after_each_resume(tmp_path: Path, mode: str) -> None:
    """Saved on four ranks, on two, and on one again; and the other way."""
    settings = {"precision__mode": mode}
    alone = trained(1, **settings)
    for name, sizes in (("shrinks", (4, 2, 1)), ("grows", (1, 8, 4))):
        directory = str(tmp_path / name)
        parts = [
            merged(run_ranks(train, size, "own", dict(settings), first, last, directory))
            for size, first, last in zip(sizes, (0, 1, 3), (1, 3, STEPS), strict=True)
        ]
        whole = {
            "losses": {place: loss for part in parts for place, loss in part["losses"].items()},
            "norms": [norm for part in parts for norm in part["norms"]],
            "weights": parts[-1]["weights"],
        }
        assert_same(whole, alone)


def _command(inputs: Path, output: Path, nproc: int, *more: str) -> list[str]:
    options: dict[str, Any] = {
        "nproc": nproc, "model": inputs / "config.json", "data": inputs / "data.txt", "output-dir": output,
        "batch-size": 16, "seq-len": 32, "lr": 0.01, "vocab-size": 320, "sample-tokens": 0, "device": "cpu",
        "deterministic": "across_world_sizes", "warmup-steps": 1,
    }  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-c", "from fullshard.cli.main import main; main()", "train", *flags, "--no-plot", *more]


def run_train(inputs: Path, output: Path, nproc: int, *more: str) -> tuple[list[Any], bytes, str]:
    """(losses and norms, the exported weights, what was said)."""
    done = subprocess.run(
        _command(inputs, output, nproc, *more), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    [held_out] = [line for line in done.stdout.splitlines() if "held-out loss" in line]
    metrics = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    return [*metrics, held_out], (output / "export" / "model.safetensors").read_bytes(), done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fullshard_train(inputs: Path, tmp_path: Path, precision: str) -> None:
    """The command, with dropout and tied embeddings: 1, 2, 4 and 8 processes, and one job that shrinks twice."""
    options = ("--steps", "6", "--save-every", "2", "--keep-checkpoints", "3", "--precision", precision)
    metrics, weights, said = run_train(inputs, tmp_path / "1", 1, *options)
    assert "deterministic across world sizes: 8 virtual ranks, 8 on each of 1 rank, with 1 thread" in said
    for nproc, more in ((2, ()), (4, ("--strategy", "NO_SHARD")), (8, ())):
        found = run_train(inputs, tmp_path / str(nproc), nproc, *options, *more)
        assert found[:2] == (metrics, weights)
    # From the middle of the one with 4, and from the middle of that with 2.
    for nproc, start, step in ((2, tmp_path / "4", 2), (1, tmp_path / "resumed on 2", 4)):
        path = start / "checkpoints" / f"step-{step:06d}"
        found = run_train(inputs, tmp_path / f"resumed on {nproc}", nproc, *options, "--resume", str(path))
        assert found[1] == weights
        assert found[0] == [*(line for line in metrics[:-1] if line[0] > step), metrics[-1]]


# -- the parts ------------------------------------------------------------------------------------------------------


def pairwise(terms: list[torch.Tensor]) -> torch.Tensor:
    """The tree, by its definition."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return pairwise(terms[:half]) + pairwise(terms[half:])


def test_rounds_and_ranks_are_levels_of_one_tree() -> None:
    terms = list(torch.randn(16, 5000).unbind())
    expected = pairwise(terms)
    in_order = sum(terms[1:], start=terms[0])
    assert not torch.equal(expected, in_order)  # or the rest would show nothing
    for world_size in (1, 2, 4, 8, 16):
        sums = RoundSums(16 // world_size)
        for first in range(0, 16, world_size):
            ranks = [term.clone() for term in terms[first : first + world_size]]
            given = average(ranks, torch.empty(5000), 1.0) if world_size > 1 else ranks[0]
            found = sums.add(given)
            assert (found is None) == (first + world_size < 16)
        assert found is not None and torch.equal(found, expected)
        assert sums.nbytes == 0


def test_a_sum_in_another_dtype_is_the_same_tree() -> None:
    terms = [torch.randn(70_000).bfloat16() for _ in range(7)]
    widened = [term.float() for term in terms]
    found = average(terms, torch.empty(70_000), 1.0)
    assert torch.equal(found, average(widened, torch.empty(70_000), 1.0))
    assert torch.equal(found, pairwise(widened[:4]) + (pairwise(widened[4:6]) + widened[6]))


def test_sums_that_are_held() -> None:
    """One for each level; of a part of a longer tensor a copy. A bucket may have no part in a round."""
    sums, most = RoundSums(8), 0
    for number in range(7):
        assert sums.add(torch.ones(30)[10:20]) is None
        most = max(most, sums.nbytes)
        assert sums.nbytes == 40 * (number + 1).bit_count()
    assert most == 3 * 40
    found = sums.add(None)
    assert found is not None and found.tolist() == [7.0] * 10
    assert [sums.add(None) for _ in range(8)] == [None] * 8


def test_the_norm_is_exact_and_the_same_wherever_it_is_cut() -> None:
    gradient = torch.randn(5 * BLOCK_NUMEL + 77) * torch.logspace(-18, 18, 5 * BLOCK_NUMEL + 77)
    whole = square_sum([gradient], ())
    blocks = [square_sum([block], ()) for block in gradient.split(BLOCK_NUMEL)]
    assert whole == float(sum(map(Fraction, blocks)))
    cut = [gradient[: 2 * BLOCK_NUMEL], gradient[2 * BLOCK_NUMEL : 3 * BLOCK_NUMEL], gradient[3 * BLOCK_NUMEL :]]
    assert square_sum(cut[::-1], ()) == whole
    assert math.sqrt(whole) == pytest.approx(gradient.double().norm().item(), rel=1e-6)
    tiny = torch.full((3,), 2.0**-74)  # the square is 2**-148, the second least float32
    assert square_sum([tiny], ()) == 3 * 2.0**-148
    assert square_sum([torch.full((9,), -1.5).bfloat16(), torch.empty(0)], ()) == 9 * 2.25
    assert square_sum([], ()) == 0
    assert square_sum([torch.tensor([1.0, math.inf])], ()) == math.inf
    assert math.isnan(square_sum([torch.tensor([math.inf, math.nan])], ()))


def test_steps_of_several_rounds_are_dropped_whole() -> None:
    """At any number of ranks the same samples are left."""
    items = list(range(2 * 8 * 3 + 9))
    found = []
    for size in (1, 2, 4, 8):
        deals = [Deal(rank, size, 2, True, rounds_per_step=8 // size) for rank in range(size)]
        shares = [[s for of_all, _ in deal.dealt(items, skip=16) for s in deal.shares_of(of_all)] for deal in deals]
        assert all(len(share) == deal.rounds(len(items)) - 8 // size for share, deal in zip(shares, deals, strict=True))
        found.append([share for round_ in zip(*shares, strict=True) for share in round_])
    assert found[0] == [items[start : start + 2] for start in range(16, 48, 2)]
    assert found == [found[0]] * 4


def test_slices_draw_apart() -> None:
    seeds = {seed_of(seed, step, number) for seed in range(4) for step in range(30) for number in range(8)}
    assert len(seeds) == 4 * 30 * 8 and all(0 <= seed < 2**63 for seed in seeds)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"training__virtual_ranks": 6}, "power of two"),
        ({"training__virtual_ranks": 8, "training__deterministic": "no"}, "nothing is deterministic"),
        ({"training__gradient_accumulation_steps": 2}, "slices are the micro-batches"),
        ({"training__step_in_backward": True}, "before the last slice"),
        ({"training__check_plan": True}, "planner"),
        ({"precision__reduce_as": "int8"}, "rounded"),
        ({"precision__gather_as": "int8"}, "rounded"),
        ({"precision__mode": "fp16"}, "without a scale"),
        ({"precision__reduce_dtype": "bfloat16"}, "float32"),
        ({"sharding__compile": True}, "compiled"),
        ({"sharding__strategy": "SHARD_OPTIMIZER"}, "SHARD_OPTIMIZER adds up"),
        ({"launch__device": "cuda"}, "cuda"),
        ({"launch__num_processes": 3}, "3 processes do not divide 8"),
    ],
)
def test_settings_that_do_not_go_with_it(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**settings)


def test_policies_and_sizes() -> None:
    with pytest.raises(ConfigError, match="gather_as or reduce_as"):
        MixedPrecisionPolicy(virtual_ranks=8, reduce_as=torch.int8)
    with pytest.raises(ConfigError, match="power of two"):
        MixedPrecisionPolicy(virtual_ranks=12)
    with pytest.raises(ConfigError, match=r"8 virtual ranks on 3 ranks(.|\n)*start 1, 2, 4, 8 ranks"):
        rounds_of(8, 3)


def sharded(model: nn.Module | None = None, virtual_ranks: int = 8, **options: Any) -> Any:
    policy = MixedPrecisionPolicy(virtual_ranks=virtual_ranks)
    return shard_model(model or nn.Linear(3, 2), unit_modules=[], mp_policy=policy, **options)


def run_backward(model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(4, 3)).sum().backward()


def check_zeroed_in_place() -> None:
    """What is left of a step, zeros, does not change the order of the next one's sum."""
    grads = []
    for set_to_none in (True, False):
        torch.manual_seed(0)
        model = sharded()
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            for number in range(8):
                model(torch.full((4, 3), 0.1 * number)).square().sum().backward()
        grads.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_gradients_that_are_zeroed_in_place() -> None:
    run_ranks(check_zeroed_in_place, 1)


def check_refused_by_the_engine() -> None:
    def early() -> None:
        model = sharded()
        run_backward(model, 3)
        torch.optim.SGD(model.parameters(), lr=1.0).step()

    def kept_whole() -> None:
        model = sharded()
        with no_sync(model):
            run_backward(model)

    def hooked() -> None:
        model = sharded()
        model.set_all_reduce_hook(lambda gradient: None)
        run_backward(model)

    def norm_of_order_1() -> None:
        model = sharded()
        run_backward(model, 8)
        assert clip_grad_norm_(model, 9.0, math.inf) > 0
        clip_grad_norm_(model, 9.0, 1)

    def fused() -> None:
        model = sharded()
        run_backward(model, 8)
        torch.optim.AdamW(model.parameters(), fused=True).step()

    def adafactor() -> None:
        model = sharded()
        run_backward(model, 8)

        class Other(torch.optim.SGD):
            pass

        Other(model.parameters(), lr=1.0).step()

    def statistics() -> None:
        run_backward(sharded(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))))

    def reentrant() -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(3, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.requires_grad_()
                for _ in range(2):
                    x = checkpoint(self.inner, x, use_reentrant=True)
                return x

        model = Twice()
        shard_model(model, unit_modules=[model.inner], mp_policy=MixedPrecisionPolicy(virtual_ranks=8))
        run_backward(model)

    for attempt, error, said in (
        (early, LifecycleError, "step after 3 of 8 backwards"),
        (kept_whole, LifecycleError, "kept whole"),
        (hooked, LifecycleError, "a hook sees"),
        (norm_of_order_1, ConfigError, "norm of order 1"),
        (fused, OptimizerError, "fused"),
        (adafactor, OptimizerError, "Other is to update"),
        (statistics, LifecycleError, r"buffer '.*running_mean' was changed"),
        (reentrant, LifecycleError, "reduced twice"),
        (lambda: sharded(nn.Linear(3, 2).double()), ConfigError, "summed in torch.float64"),
        (lambda: run_backward(sharded(strategy="SHARD_OPTIMIZER")), LifecycleError, "kept whole"),
        (lambda: sharded(virtual_ranks=12), ConfigError, "power of two"),
    ):
        with pytest.raises(error, match=said):
            attempt()


def test_what_the_engine_refuses() -> None:
    run_ranks(check_refused_by_the_engine, 1)


def check_draws(directory: str) -> None:
    def started(seed: int) -> tuple[Accelerator, nn.Module]:
        torch.manual_seed(seed)
        accelerator = Accelerator(fsdp_plugin=config_of())
        return accelerator, accelerator.prepare(nn.Linear(3, 2))

    def step(accelerator: Accelerator, model: nn.Module) -> list[float]:
        before = torch.get_rng_state()
        drawn: list[float] = []
        for _ in range(8):
            with accelerator.accumulate(model):
                drawn.append(torch.rand(()).item())
                accelerator.backward(model(torch.ones(4, 3)).sum())
            assert torch.equal(torch.get_rng_state(), before)
        return drawn

    run = started(1)
    first = step(*run)
    run[0].save_state(directory)
    second = step(*run)
    assert len({*first, *second}) == 16
    resumed = started(2)
    resumed[0].load_state(directory)
    torch.manual_seed(2)  # at another number of ranks the generators would not have come back
    assert step(*resumed) == second


def test_every_slice_draws_for_itself_and_leaves_the_scripts_numbers_alone(tmp_path: Path) -> None:
    run_ranks(check_draws, 1, str(tmp_path / "state"))


def check_refused_by_the_accelerator(directory: str) -> None:
    model: Any = nn.Linear(3, 2)
    accelerator = Accelerator(fsdp_plugin=config_of())
    slices = accelerator.slices
    assert slices is not None and torch.get_num_threads() == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(4, 3)).sum()
    with pytest.raises(LifecycleError, match="outside of accumulate"):
        accelerator.backward(loss)
    with pytest.raises(LifecycleError, match=r"no accelerator\.backward within"), accelerator.accumulate(model):
        pass
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(4, 3)).sum())
        with pytest.raises(LifecycleError, match="a second time in slice 0"):
            accelerator.backward(loss)
    with pytest.raises(LifecycleError, match="a checkpoint after 1 of 8 slices"):
        accelerator.save_state(directory)
    for _ in range(7):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(4, 3)).sum())
    optimizer.step()
    accelerator.save_state(directory)
    for other, said in (
        (config_of(training__virtual_ranks=4), "virtual ranks 8, now 4"),
        (config_of(launch__num_cpu_threads_per_process=2), "threads 1, now 2"),
    ):
        accelerator = Accelerator(fsdp_plugin=other)
        model = nn.Linear(3, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match=said):
            accelerator.load_state(directory)
    accelerator = Accelerator(fsdp_plugin=config_of(), split_batches=True)
    with pytest.raises(ConfigError, match="split_batches"):
        accelerator.prepare(DataLoader(TensorDataset(torch.ones(64, 3)), batch_size=2))
    accelerator = Accelerator(fsdp_plugin=config_of())
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(17, 3)), batch_size=2))
    with pytest.raises(DataError, match="1 samples into a step of 16"):
        for _ in loader:
            with accelerator.accumulate(model):
                pass


def test_what_the_accelerator_refuses(tmp_path: Path) -> None:
    run_ranks(check_refused_by_the_accelerator, 1, str(tmp_path / "state"))


def check_three_ranks() -> None:
    with pytest.raises(ConfigError, match="8 virtual ranks on 3 ranks"):
        Accelerator(fsdp_plugin=config_of())


@pytest.mark.full
def test_three_ranks() -> None:
    run_ranks(check_three_ranks, 3)
