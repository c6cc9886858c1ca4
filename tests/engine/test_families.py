"""Transformers models of many families: training, evaluation, checkpointing and generation against unsharded ones."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.strategy import STRATEGIES
from fullshard.engine.call import Call
from fullshard.features import describe, shard_model, unsharded
from fullshard.features.unit_selection import unit_modules
from tests.differential import Engine, Record, check, compare, ddp, gradients, parameters, plain, torch_engine
from tests.distributed import run_ranks
from tests.families import FAMILIES, build_family, family_batch

STEPS = 3


def ours(model: nn.Module, **arguments: Any) -> nn.Module:
    model = shard_model(model, unit_modules=unit_modules(model), **arguments)
    # A family whose layers were not found would still train, in one piece.
    assert describe(model).units > 2
    return model


def theirs(model: nn.Module) -> nn.Module:
    return torch_engine(model, unit_modules(model))


@contextlib.contextmanager
def seeded(step: int) -> Iterator[None]:
    """Dropout draws the same numbers for every engine, other ones on every rank."""
    torch.manual_seed(1000 * step + dist.get_rank())
    yield


def train(name: str, engine: Engine, *, reentrant: bool | None = None) -> Record:
    """Train, evaluate in the middle and at the end. `reentrant`: the kind of activation checkpointing, None is none."""
    model = build_family(name)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
        if reentrant:
            model.enable_input_require_grads()  # type: ignore[operator]
    model = engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record: Record = {"losses": {}, "gradients": {}, "logits": {}}
    for step in range(STEPS):
        model.train()
        with seeded(step):
            loss = model(**family_batch(name, step, dist.get_rank())).loss
            loss.backward()
        record["losses"][step] = loss.detach()
        record["gradients"] |= {f"{step}.{key}": grad for key, grad in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            record["logits"][step] = evaluate(model, name)
    record["parameters"] = parameters(model)
    del loss
    assert not any(isinstance(each, Call) for each in gc.get_objects()), "the graph of a step is still there"
    return record


def evaluate(model: nn.Module, name: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        output = model(**family_batch(name, 99, dist.get_rank()))
    logits = output.logits if "logits" in output else output.logits_per_image
    assert isinstance(logits, torch.Tensor)
    return logits.clone()


def family(name: str, strategy: str, shard_size: int | None, with_torch: bool) -> list[dict[str, float]]:
    """`[compared with DDP, compared with torch]`."""
    record = train(name, lambda m: ours(m, strategy=strategy, shard_size=shard_size))
    references = [ddp, theirs] if with_torch else [ddp]
    return [compare(without_noise(record), without_noise(train(name, engine))) for engine in references]


def without_noise(record: Record) -> Record:
    """Softmax does not see the bias of the keys, so its true gradient is 0 and what is computed is rounding alone.

    On two ranks even that is the same; on more it cannot be.
    """
    if dist.get_world_size() <= 2:
        return record
    noise = ("key.bias", "k_proj.bias")
    return {
        kind: {name: tensor for name, tensor in tensors.items() if not str(name).endswith(noise)}
        for kind, tensors in record.items()
    }


TAKEN_BY_TORCH = [name for name in FAMILIES if name not in ("mamba", "bert", "clip")]
"""Torch's refuses nested units that share a prefix of names, ties across units, and scalar parameters."""

CROSS_ATTENTION = ["t5", "whisper"]
"""Their encoder's output is used by every decoder layer: gradients of the uses are added in another order by DDP."""


@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_and_evaluates_like_its_replicas(name: str) -> None:
    check(
        [values for [values] in run_ranks(family, 2, name, "FULL_SHARD", None, False)],
        exact=name not in CROSS_ATTENTION,
    )


QUICK_WITH_TORCH = ["llama", "t5", "qwen2_moe"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK_WITH_TORCH else pytest.mark.full) for n in TAKEN_BY_TORCH],
)
def test_family_trains_like_torch_s_fully_shard(name: str) -> None:
    check([values for _, values in run_ranks(family, 2, name, "FULL_SHARD", None, True)], exact=True)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "FULL_SHARD"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_under_every_strategy(name: str, strategy: str) -> None:
    shard_size = 1 if strategy == "HYBRID_SHARD" else 2 if strategy == "HYBRID_SHARD_ZERO2" else None
    results = run_ranks(family, 2, name, strategy, shard_size, False)
    check([values for [values] in results], exact=name not in CROSS_ATTENTION)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_family_on_three_ranks(name: str) -> None:
    # Whole models amplify roundings over the steps; a wrong gradient is off by far more.
    check([values for [values] in run_ranks(family, 3, name, "FULL_SHARD", None, False)], exact=False)


# -- activation checkpointing -----------------------------------------------------------------------------------


def checkpointed(name: str, reentrant: bool) -> dict[str, float]:
    """Against the same sharded model without checkpointing where that is equal, else against torch's with it.

    The reentrant kind loses what leaves a layer beside its output, so the auxiliary loss of experts does not train
    their router: no engine can bring that back.
    """
    record = train(name, ours, reentrant=reentrant)
    lossy = reentrant and name in ("qwen2_moe", "mixtral")
    return compare(record, train(name, theirs, reentrant=True) if lossy else train(name, ours))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("gpt2", "llama", "mamba") else pytest.mark.full) for n in FAMILIES],
)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    """Nothing changes, dropout included."""
    check(run_ranks(checkpointed, 2, name, reentrant), exact=True)


# -- generation -------------------------------------------------------------------------------------------------


def generate(name: str, whole: bool, num_beams: int) -> list[bool]:
    """Whether sharded and unsharded generation agree, before and after a training step."""
    inputs = {key: value for key, value in family_batch(name, 0, dist.get_rank()).items() if key != "labels"}
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": num_beams, "do_sample": False, "eos_token_id": None}
    outputs = []
    for engine in (ours, ddp):
        model = engine(build_family(name))
        for step in range(2):
            with unsharded(model) if whole and engine is ours else contextlib.nullcontext():
                plain(model).eval()
                outputs.append(plain(model).generate(**inputs, **options))  # type: ignore[operator]
            plain(model).train()
            with seeded(step):
                model(**family_batch(name, step, dist.get_rank())).loss.backward()
            torch.optim.SGD(model.parameters(), lr=3.0).step()
    assert outputs[0].shape[1] > 8
    assert not torch.equal(outputs[0], outputs[1]), "the step must matter"
    return [torch.equal(one, other) for one, other in zip(outputs[:2], outputs[2:], strict=True)]


@pytest.mark.parametrize(
    ("whole", "num_beams"),
    [(False, 1), (False, 3), (True, 1), pytest.param(True, 3, marks=pytest.mark.full)],
    ids=lambda value: {False: "unit by unit", True: "unsharded"}.get(value) if isinstance(value, bool) else str(value),
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generate(name: str, whole: bool, num_beams: int) -> None:
    """Unit by unit (every rank generates equally many tokens here) and with everything unsharded first.

    T5's `generate` calls the encoder past the root unit, which owns the embeddings.
    """
    assert run_ranks(generate, 2, name, whole, num_beams) == [[True, True]] * 2
