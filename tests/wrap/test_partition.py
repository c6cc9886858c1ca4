"""Which unit owns which parameter: nesting, ties, shared modules, ignored parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.wrap.partition import UnitPlan, partition


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_parameter("absent", None)


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 7, bias=False)


def names_by_unit(model: nn.Module, plans: Sequence[UnitPlan]) -> list[tuple[list[str], list[str]]]:
    """`(names of the unit's modules, names of its parameters)` per unit."""
    modules = {id(module): name for name, module in reversed(list(model.named_modules()))}
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        ([modules[id(m)] for m in plan.modules], [parameters[id(s.parameter)] for s in plan.slots]) for plan in plans
    ]


BLOCK = ["scale", "norm.weight", "norm.bias", "linear.weight", "linear.bias"]


def test_inner_units_first_and_the_rest_belongs_to_the_root() -> None:
    model = Model(2)
    assert names_by_unit(model, partition([model], model.blocks)) == [
        (["blocks.0"], [f"blocks.0.{name}" for name in BLOCK]),
        (["blocks.1"], [f"blocks.1.{name}" for name in BLOCK]),
        ([""], ["embedding.weight", "head.weight"]),
    ]


def test_the_order_of_the_unit_list_does_not_matter() -> None:
    model = Model()
    forward, backward = partition([model], model.blocks), partition([model], reversed(list(model.blocks)))
    assert names_by_unit(model, forward) == names_by_unit(model, backward)


def test_no_units_makes_one() -> None:
    model = Model()
    [plan] = partition([model])
    assert [id(slot.parameter) for slot in plan.slots] == [id(parameter) for parameter in model.parameters()]


def test_the_root_may_be_listed_as_a_unit() -> None:
    model = Model(1)
    assert names_by_unit(model, partition([model], [model, *model.blocks])) == names_by_unit(
        model, partition([model], model.blocks)
    )


def test_nested_units_own_only_what_is_not_in_an_inner_one() -> None:
    model = Model(1)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert names_by_unit(model, partition([model], [block, block.linear])) == [
        (["blocks.0.linear"], ["blocks.0.linear.weight", "blocks.0.linear.bias"]),
        (["blocks.0"], ["blocks.0.scale", "blocks.0.norm.weight", "blocks.0.norm.bias"]),
        ([""], ["embedding.weight", "head.weight"]),
    ]


def test_a_tied_parameter_belongs_to_the_innermost_unit_around_all_its_places() -> None:
    model = Model(3)
    model.head.weight = model.embedding.weight  # both directly in the root
    model.blocks[0].linear.weight = model.blocks[1].linear.weight  # type: ignore[union-attr]
    plans = partition([model], [*model.blocks, model.embedding, model.head])
    owned = dict(zip([plan.modules[0] for plan in plans], [p for _, p in names_by_unit(model, plans)], strict=True))
    assert owned[model] == ["embedding.weight", "blocks.0.linear.weight"]
    assert owned[model.embedding] == []
    assert owned[model.head] == []
    assert owned[model.blocks[1]] == [f"blocks.1.{name}" for name in BLOCK if name != "linear.weight"]


def test_a_tie_inside_a_nested_unit_does_not_reach_the_root() -> None:
    model = Model(1)
    outer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outer[1].weight = outer[0].weight
    model.extra = outer
    plans = partition([model], [outer, outer[0], outer[1]])
    assert {m[0]: p for m, p in names_by_unit(model, plans)}["extra"] == ["extra.0.weight"]


def test_a_slot_knows_every_place_once() -> None:
    model = Model(1)
    model.head.weight = model.embedding.weight
    model.again = model.head
    [plan] = partition([model])
    slot = next(slot for slot in plan.slots if slot.parameter is model.head.weight)
    assert slot.owners == [(model.embedding, "weight"), (model.head, "weight")]


def test_a_module_shared_by_two_units_belongs_to_the_unit_around_both() -> None:
    model = Model(3)
    shared = nn.Linear(4, 4)
    model.blocks[0].extra, model.blocks[2].extra = shared, shared
    plans = names_by_unit(model, partition([model], model.blocks))
    assert plans[-1] == ([""], ["embedding.weight", "blocks.0.extra.weight", "blocks.0.extra.bias", "head.weight"])
    assert all("extra" not in name for _, names in plans[:-1] for name in names)


def test_a_unit_that_occurs_twice_is_one_unit() -> None:
    model = Model(2)
    model.blocks.append(model.blocks[0])
    plans = names_by_unit(model, partition([model], list(model.blocks)))
    assert [modules for modules, _ in plans] == [["blocks.0"], ["blocks.1"], [""]]
    assert plans[0][1] == [f"blocks.0.{name}" for name in BLOCK]


def test_every_parameter_has_one_owner() -> None:
    model = Model(3)
    model.head.weight = model.embedding.weight
    plans = partition([model], [*model.blocks, model.blocks[1].linear])  # type: ignore[list-item]
    owned = [id(slot.parameter) for plan in plans for slot in plan.slots]
    assert sorted(owned) == sorted({id(parameter) for parameter in model.parameters()})


def test_ignored_parameters_belong_to_nobody() -> None:
    model = Model(1)
    ignored = {model.head.weight, *model.blocks[0].norm.parameters()}  # type: ignore[union-attr]
    assert names_by_unit(model, partition([model], model.blocks, ignored=ignored)) == [
        (["blocks.0"], ["blocks.0.scale", "blocks.0.linear.weight", "blocks.0.linear.bias"]),
        ([""], ["embedding.weight"]),
    ]


def test_subtrees_can_be_left_out() -> None:
    model = Model(2)
    assert names_by_unit(model, partition([model], stop_at=model.blocks)) == [
        ([""], ["embedding.weight", "head.weight"])
    ]


def test_several_modules_can_be_one_unit() -> None:
    model = Model(1)
    assert names_by_unit(model, partition([model.embedding, model.head])) == [
        (["embedding", "head"], ["embedding.weight", "head.weight"])
    ]


def test_planning_changes_nothing() -> None:
    model = Model(2)
    before = [(name, id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()]
    partition([model], model.blocks)
    assert [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()] == before


def test_partition_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model(2)
    assert len(partition([model], model.blocks)) == 3
