"""On the simulated accelerator: where a step has the host wait, which collectives it needs, and torch's own engine."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated.features import compare_replicas, look_at_whole, not_finite_on_one_rank
from tests.simulated.mutations import MUTATIONS, SOURCE, Mutation, run
from tests.simulated.process import on_device
from tests.simulated.programs import PROGRAMS
from tests.simulated.steps import (
    WAITS,
    collectives,
    memory_between_steps,
    train_on_host_batches,
    train_with_torch,
    use_different_parameters,
    waits_of_a_step,
)
from tests.simulated.training import Case, as_with_nccl, small_activations


def _waits(cases: list[Case]) -> list[dict[str, int]]:
    from tests.simulated.group import run_ranks

    with small_activations():
        return [run_ranks(waits_of_a_step, case.ranks, case)[0] for case in cases]


def test_where_the_host_waits_in_a_step() -> None:
    """Nowhere else: what is not here goes on beside the host. Reading the loss is the script's."""
    assert dict(zip(map(str, WAITS), on_device(_waits, list(WAITS)), strict=True)) == {
        str(case): waits for case, waits in WAITS.items()
    }


def _memory() -> list[tuple[int, list[int]]]:
    from tests.simulated.group import run_ranks

    return [run_ranks(memory_between_steps, ranks, Case(ranks=ranks, precision="bf16"))[0] for ranks in (1, 2)]


def test_a_step_leaves_nothing_behind() -> None:
    """Gradients go as they are cleared, and nothing grows from step to step; but for the message of the last one."""
    for made, (first, *others) in on_device(_memory):
        assert set(others) == {first}
        assert first - made <= 2 * 512


def _on_host_batches() -> list[list[list[torch.Tensor]]]:
    from tests.simulated.group import run_ranks

    return [run_ranks(train_on_host_batches, 2, kind) for kind in ("cpu", "simulated")]


def test_what_a_script_gives_the_model_is_taken_to_its_device() -> None:
    expected, found = on_device(_on_host_batches)
    assert all(map(torch.equal, found[0], expected[0])) and all(map(torch.equal, found[1], expected[1]))


def _collectives() -> list[str]:
    from tests.simulated.group import run_ranks

    cases = [Case(ranks=2), Case(ranks=2, precision="packed"), Case(ranks=2, strategy="NO_SHARD", offload="everything")]
    cases += [Case(ranks=2, parameters="extended"), Case(ranks=2, parameters="composed")]
    cases += [Case(ranks=2, optimizer="Muon"), Case(ranks=2, strategy="NO_SHARD", optimizer="on owners")]
    with small_activations(), as_with_nccl(), collectives() as seen:
        for case in cases:
            run_ranks(waits_of_a_step, case.ranks, case)
    return sorted(seen)


def _other_collectives() -> list[str]:
    from tests.simulated.group import run_ranks

    with as_with_nccl(), collectives() as seen:
        for program in (compare_replicas, look_at_whole, not_finite_on_one_rank):
            run_ranks(program, 3, Case(ranks=3, strategy="NO_SHARD"), "simulated")
    return sorted(seen)


def test_a_step_needs_collectives_that_every_backend_has() -> None:
    """What NCCL, XCCL and HCCL have in common; of reductions the sum (0) and the maximum (4)."""
    everywhere = ["all_gather", "all_reduce 0", "all_reduce 4", "all_to_all", "reduce_scatter 0"]
    assert on_device(_collectives) == everywhere
    assert set(on_device(_other_collectives)) <= {*everywhere, "broadcast", "barrier"}


def test_cuda_is_spoken_to_in_two_files() -> None:
    """Everything else uses `torch.accelerator`, and works on any. The second compiles a kernel that waits."""
    package = SOURCE / "fullshard"
    theirs = (package / "launch" / "cuda.py", package / "api" / "torch_private.py")
    for path in (path for path in sorted(package.rglob("*.py")) if "cuda" in path.read_text()):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found = isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
            found |= any(name.startswith("torch.cuda") for name in names)
            found |= isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.cuda")
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            assert not found or path in theirs, place


def _torchs(offloads: bool) -> dict[str, list[list[torch.Tensor]]]:
    from tests.simulated.device import ORDERS, begin
    from tests.simulated.group import run_ranks

    found: dict[str, Any] = {}
    for order in ORDERS:
        begin(order, seed=1)
        found[order.name] = run_ranks(train_with_torch, 2, offloads, "simulated")
    return found


@pytest.mark.full
@pytest.mark.parametrize("offloads", [False, True])
def test_torchs_own_engine_is_clean(offloads: bool) -> None:
    """What the device shows of the engine is not of the device's making."""
    orders = list(on_device(_torchs, offloads).values())
    for ranks in orders[1:]:
        for values, expected in zip(ranks, orders[0], strict=True):
            assert all(map(torch.equal, values, expected)) and all(bool(value.isfinite().all()) for value in values)


def _differently(prefetch: str) -> dict[str, list[list[torch.Tensor]]]:
    from tests.simulated.device import ORDERS, begin
    from tests.simulated.group import run_ranks

    found: dict[str, Any] = {}
    begin(ORDERS[0])
    found["on the CPU"] = run_ranks(use_different_parameters, 2, "cpu", prefetch)
    for order in ORDERS:
        begin(order, seed=1)
        found[order.name] = run_ranks(use_different_parameters, 2, "simulated", prefetch)
    return found


@pytest.mark.parametrize(
    "prefetch", ["BACKWARD_PRE", *(pytest.param(p, marks=pytest.mark.full) for p in ("BACKWARD_POST", "NO_PREFETCH"))]
)
def test_ranks_that_use_different_parameters_launch_in_one_order(prefetch: str) -> None:
    """Where a rank reduced at the end of backward what others reduce within it, each would wait for the other."""
    runs = list(on_device(_differently, prefetch).values())
    for ranks in runs[1:]:
        for values, expected in zip(ranks, runs[0], strict=True):
            assert all(map(torch.equal, values, expected))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "expected"
    run(SOURCE, path)
    return path


def test_mutations_are_of_the_code_as_it_is() -> None:
    for mutation in MUTATIONS:
        assert mutation.changed and mutation.found_by in PROGRAMS


@pytest.mark.full
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_wait_that_is_taken_out_is_found(mutation: Mutation, expected: Path) -> None:
    with mutation.applied() as source:
        assert run(source, expected, mutation.found_by)
