"""Adafactor on sharded models against torch's and Transformers' own on whole tensors.

pytest tests/optim/test_adafactor.py
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.optimization
from torch import nn

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import CheckpointError, ConfigError, OptimizerError
from fullshard.features import ShardedParameter, init_mesh, shard_model
from fullshard.optim import Adafactor, Muon, TransformersAdafactor
from tests import optimizers, trainers
from tests.differential import check, compare, optimizer_state, parameters
from tests.distributed import run_ranks
from tests.optim.test_muon import Model

STEPS = 3
BOTH: dict[str, tuple[Any, Any]] = {
    "torch": (torch.optim.Adafactor, Adafactor),
    "transformers": (transformers.optimization.Adafactor, TransformersAdafactor),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "torch": [
        {},
        {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True},
    ],
    "transformers": [
        {},
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False},  # Trainer's
        {"warmup_init": True, "beta1": 0.8, "weight_decay": 0.1, "clip_threshold": 0.5, "decay_rate": -0.5},
    ],
}


def model_of() -> Model:
    torch.manual_seed(1)
    model = Model()
    model.column = nn.Parameter(torch.randn(9, 1))  # a matrix of one column
    model.stack = nn.Parameter(torch.randn(2, 3, 4, 5))
    return model


def sharded(strategy: str = "FULL_SHARD", **options: Any) -> Model:
    model = model_of()
    shard_model(model, strategy=strategy, unit_modules=list(model.blocks), **options)
    return model


def _change(name: str, grad: torch.Tensor) -> None:
    """A row and a column without any."""
    if "tokens" in name:
        grad[3], grad[:, 2] = 0.0, 0.0


def _left_out(name: str, step: int) -> bool:
    return step == 1 and "unused" in name


given_gradients = partial(optimizers.given_gradients, leaves_out=_left_out, change=_change)
step_with = partial(optimizers.step_with, leaves_out=_left_out, change=_change)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_numbers(sharding: dict[str, Any]) -> dict[str, float]:
    """All options, of both."""
    found: dict[str, float] = {}
    for kind, (theirs, ours) in BOTH.items():
        for number, options in enumerate(OPTIONS[kind]):
            reference, model = model_of(), sharded(**sharding)
            step_with(reference, theirs(trainable(reference), **options))
            optimizer = ours(trainable(model), **options)
            step_with(model, optimizer)
            record = compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})
            found |= {f"{kind} {number} {name}": value for name, value in record.items()}
            held = sum(t.numel() for s in optimizer.state.values() for k, t in s.items() if k.endswith("_var"))
            assert held < sum(p.numel() for p in reference.parameters()) / 2
    return found


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [
        (1, {}),
        (3, {}),
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "NO_SHARD"}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "SHARD_GRAD_OPTIMIZER"}, marks=pytest.mark.full),
        pytest.param(4, {"strategy": "HYBRID_SHARD", "shard_size": 2}, marks=pytest.mark.full),
    ],
)
def test_the_numbers_are_theirs(world_size: int, sharding: dict[str, Any]) -> None:
    """Sums over ranks add in another order than those of one process, and nothing else differs."""
    check(run_ranks(check_numbers, world_size, sharding), exact=False)


def check_half_precision(kind: str) -> dict[str, float]:
    """Weights stored in bfloat16: state, too, as theirs; sums over ranks are of float32."""
    theirs, ours = BOTH[kind]
    options = OPTIONS[kind][1]
    reference, model = model_of().bfloat16(), model_of().bfloat16()
    step_with(reference, theirs(trainable(reference), **options))
    shard_model(model, unit_modules=list(model.blocks))
    step_with(model, ours(trainable(model), **options))
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


@pytest.mark.numerics
@pytest.mark.parametrize("kind", BOTH)
def test_weights_in_half_precision(kind: str) -> None:
    """The same but for roundings of a bfloat16, which has eight bits."""
    check(run_ranks(check_half_precision, 2, kind), exact=False)


# -- state --------------------------------------------------------------------------------------------------------


def save(directory: str) -> None:
    model = sharded()
    optimizer = Adafactor(trainable(model), lr=0.1)
    step_with(model, optimizer, steps=STEPS - 1)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    again = Adafactor(trainable(model), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    first, second = optimizer_state(model, optimizer), optimizer_state(model, again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)  # type: ignore[arg-type]


def resume(directory: str) -> dict[str, float]:
    """The last step, on another number of ranks, against torch's in one piece; torch's state is taken, too."""
    reference = model_of()
    theirs = torch.optim.Adafactor(trainable(reference), lr=0.1)
    step_with(reference, theirs, steps=STEPS - 1)
    other = sharded()
    with torch.no_grad():
        for own, whole in zip(other.parameters(), reference.parameters(), strict=True):
            assert isinstance(own, ShardedParameter)
            own.local.copy_(own.spec.cut(whole))
    state = copy.deepcopy(theirs.state_dict())
    step_with(reference, theirs, first=STEPS - 1)
    model = model_of()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer = Adafactor(trainable(model), lr=0.5)
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    step_with(model, optimizer, first=STEPS - 1)
    found = compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})
    names = [name for name, p in reference.named_parameters() if p.requires_grad]
    column = state["state"][names.index("column")]
    column["variance"] = column.pop("row_var")  # of one column the rows are all there is
    del column["col_var"]
    taken = Adafactor(trainable(other), lr=0.1)
    taken.load_state_dict(state)
    step_with(other, taken, first=STEPS - 1)
    from_torch = compare({"parameters": parameters(other)}, {"parameters": parameters(reference)})
    return found | {f"{name} from torch's": value for name, value in from_torch.items()}


def test_saved_on_two_ranks_resumed_on_others(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    for world_size in (3, 1):
        check(run_ranks(resume, world_size, str(tmp_path)), exact=False)


# -- Trainer ------------------------------------------------------------------------------------------------------


def train(output: str, *, stock: bool) -> dict[str, Any]:
    settings = {"optim": "adafactor", "weight_decay": 0.1}
    made = trainers.trainer(trainers.build("tied"), trainers.arguments(output, stock=stock, **settings), stock=stock)
    made.train()
    optimizer = getattr(made.optimizer, "optimizer", made.optimizer)
    assert type(optimizer) is (transformers.optimization.Adafactor if stock else TransformersAdafactor)
    return trainers.result(made)


def test_trainer(tmp_path: Path) -> None:
    """`optim="adafactor"`: the losses of Transformers' own Trainer in one process."""
    [expected] = run_ranks(partial(train, stock=True), 1, str(tmp_path / "one"))
    two = run_ranks(partial(train, stock=False), 2, str(tmp_path / "two"))[0]
    assert two["own"] < two["total"]
    assert trainers.close(two["losses"], expected["losses"], 1e-4)


@pytest.mark.parametrize("kind", [Adafactor, TransformersAdafactor, Muon])
def test_a_closure_computes_what_is_stepped_with(kind: Any) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer, before = kind(model.parameters()), model.weight.detach().clone()

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(model.weight, before)


# -- refused ------------------------------------------------------------------------------------------------------


def check_refused(directory: str) -> None:
    model = sharded()
    for theirs, ours in BOTH.values():
        optimizer = theirs(trainable(model))
        for parameter, grad in given_gradients(model, 0):
            assert isinstance(parameter, ShardedParameter)
            parameter.grad = parameter.wrap(parameter.spec.cut(grad))
        with pytest.raises(OptimizerError, match=rf"(.|\n)*write fullshard\.optim\.{ours.__name__}\("):
            optimizer.step()
    optimizer = Adafactor(trainable(model))
    step_with(model, optimizer, steps=1)
    with torch.no_grad():
        for state in optimizer.state.values():
            if "row_var" in state:
                state["row_var"].add_(init_mesh().rank)
    with pytest.raises(CheckpointError, match="row_var differs between rank 0 and rank 1"):
        save_checkpoint(Path(directory) / "wrong", model=model, optimizer=optimizer)


def test_theirs_are_refused_with_the_line_to_write(tmp_path: Path) -> None:
    run_ranks(check_refused, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": 0.1}, "lr and relative_step=True"),
        ({"relative_step": False}, "relative_step=False without lr"),
        ({"lr": 0.1, "relative_step": False, "warmup_init": True}, "warmup_init=True needs relative_step=True"),
    ],
)
def test_values_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformersAdafactor([nn.Parameter(torch.ones(2, 2))], **arguments)
    with pytest.raises(ValueError, match="Learning rate"):
        Adafactor([nn.Parameter(torch.ones(2, 2))], lr=-1.0)
