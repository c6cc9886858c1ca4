"""The strategy table: names, codes and the mesh each asks for."""

from __future__ import annotations

import pytest

from fullshard.core.errors import ConfigError
from fullshard.core.strategy import STRATEGIES, Axis, Placement, Strategy, parse_strategy

HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def test_the_rows_and_their_codes() -> None:
    assert [(row.name, row.code) for row in STRATEGIES.values()] == [
        ("FULL_SHARD", 1),
        ("SHARD_GRAD_OP", 2),
        ("NO_SHARD", 3),
        ("HYBRID_SHARD", 4),
        ("HYBRID_SHARD_ZERO2", 5),
        ("SHARD_GRAD_OPTIMIZER", None),
        ("SHARD_OPTIMIZER", None),
    ]


def test_what_tells_the_rows_apart() -> None:
    """No two rows say the same, so nothing but the row is needed at run time."""
    contents = {(*map(str, row.placements), row.reshards_after_forward) for row in STRATEGIES.values()}
    assert len(contents) == len(STRATEGIES)
    assert [row.name for row in STRATEGIES.values() if row.reshards_after_forward] == ["FULL_SHARD", "HYBRID_SHARD"]
    for row in STRATEGIES.values():
        assert len({tuple(role) for role in row.placements}) == 1, "a mesh has the same axes for every role"
        assert row.optimizer_state.get(Axis.SHARD, Placement.SHARD) is Placement.SHARD
        assert all(role.get(Axis.REPLICATE, Placement.REPLICATE) is Placement.REPLICATE for role in row.placements)


def test_what_follows_from_the_axes() -> None:
    assert [row.name for row in STRATEGIES.values() if not row.shards] == ["NO_SHARD"]
    assert [row.name for row in STRATEGIES.values() if row.is_hybrid] == list(HYBRID)
    for row in STRATEGIES.values():
        assert row.shard_size_on(8, None) == (8 if row.is_hybrid else None)
        assert row.shard_size_on(8, 4) == 4


def test_the_row_that_differs_after_forward_alone() -> None:
    others = {name: (row.with_reshard(True), row.with_reshard(False)) for name, row in STRATEGIES.items()}
    names = {name: tuple(row and row.name for row in rows) for name, rows in others.items()}
    assert names == {
        "FULL_SHARD": ("FULL_SHARD", "SHARD_GRAD_OP"),
        "SHARD_GRAD_OP": ("FULL_SHARD", "SHARD_GRAD_OP"),
        "NO_SHARD": (None, "NO_SHARD"),
        "HYBRID_SHARD": HYBRID,
        "HYBRID_SHARD_ZERO2": HYBRID,
        "SHARD_GRAD_OPTIMIZER": (None, "SHARD_GRAD_OPTIMIZER"),
        "SHARD_OPTIMIZER": (None, "SHARD_OPTIMIZER"),
    }


def test_what_is_kept_from_step_to_step() -> None:
    assert [row.name for row in STRATEGIES.values() if row.keeps_parameters] == [
        "SHARD_GRAD_OPTIMIZER",
        "SHARD_OPTIMIZER",
    ]
    assert [row.name for row in STRATEGIES.values() if row.keeps_gradients] == ["SHARD_OPTIMIZER"]


def test_a_mesh_and_what_is_done_are_one_row() -> None:
    for row in STRATEGIES.values():
        sizes = (2 if Axis.REPLICATE in row.parameters else 1, 2 if row.shards else 1)
        found = [
            other.name
            for other in STRATEGIES.values()
            if other.matches(
                *sizes,
                reshards_after_forward=row.reshards_after_forward,
                keeps_parameters=row.keeps_parameters,
                keeps_gradients=row.keeps_gradients,
            )
        ]
        assert found == [row.name]


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=STRATEGIES)
def test_every_spelling_finds_the_row(row: Strategy) -> None:
    spellings: list[str | int | Strategy] = [
        row,
        row.name,
        row.name.lower(),
        row.name.replace("_", "-"),
        f" {row.name} ",
    ]
    if row.code is not None:
        spellings += [row.code, str(row.code)]
    assert [parse_strategy(spelling) for spelling in spellings] == [row] * len(spellings)


def test_the_private_name_of_torch_is_accepted() -> None:
    assert parse_strategy("_HYBRID_SHARD_ZERO2").name == "HYBRID_SHARD_ZERO2"


@pytest.mark.parametrize("value", ["FULLSHARD", "", 0, 6, "ZeRO-3", None, 1.0])
def test_unknown_strategies_are_refused_with_the_list(value: object) -> None:
    with pytest.raises(ConfigError, match="unknown sharding strategy") as caught:
        parse_strategy(value)
    assert all(f"{row.name} ({row.code})" in str(caught.value) for row in STRATEGIES.values() if row.code)
    assert all(row.name in str(caught.value) for row in STRATEGIES.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 96])
def test_mesh_shapes_without_a_choice(world_size: int) -> None:
    assert STRATEGIES["FULL_SHARD"].mesh_shape(world_size, None) == (1, world_size)
    assert STRATEGIES["SHARD_GRAD_OP"].mesh_shape(world_size, world_size) == (1, world_size)
    assert STRATEGIES["NO_SHARD"].mesh_shape(world_size, None) == (world_size, 1)


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize(("world_size", "shard_size"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (1, 1)])
def test_hybrid_mesh_shapes(name: str, world_size: int, shard_size: int) -> None:
    assert STRATEGIES[name].mesh_shape(world_size, shard_size) == (world_size // shard_size, shard_size)


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_needs_a_shard_size(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} requires the number of ranks per shard group .*\n.*hint: set"):
        STRATEGIES[name].mesh_shape(8, None)


@pytest.mark.parametrize("shard_size", [3, 16, 0, -1])
def test_shard_sizes_that_do_not_divide(shard_size: int) -> None:
    with pytest.raises(ConfigError, match=f"shard_size = {shard_size} does not divide world size 8\n.*1, 2, 4, 8"):
        STRATEGIES["HYBRID_SHARD"].mesh_shape(8, shard_size)


@pytest.mark.parametrize(("name", "shard_size"), [("FULL_SHARD", 4), ("SHARD_GRAD_OP", 1), ("NO_SHARD", 8)])
def test_a_shard_size_where_there_is_no_choice(name: str, shard_size: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} has a shard group of .* got shard_size = {shard_size}"):
        STRATEGIES[name].mesh_shape(8, shard_size)
