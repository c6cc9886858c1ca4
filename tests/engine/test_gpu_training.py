"""The engine on GPUs, over NCCL: the cases of the simulated device. Ranks may share a GPU.

make test-gpu ARGS=tests/engine/test_gpu_training.py

Two things are asked of each. Its numbers are the CPU's: in float64 to `EXACT`, in half precision as far as that rounds.
And those of a model that is large enough to keep a GPU busy are the same bit for bit whether kernels run beside one
another or each is waited for by the host (`CUDA_LAUNCH_BLOCKING`): a wait that the engine leaves out would show.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.distributed import end_workers, run_ranks
from tests.simulated import training
from tests.simulated.features import pretrained
from tests.simulated.programs import PROGRAMS
from tests.simulated.steps import host_waits_as_known
from tests.simulated.training import MATRICES, OTHERS, Case, Program, pairwise, small_activations, train

EXACT = 1e-5
"""In float64, relative to the largest element: sums in another order, and Adam's division by gradients near zero."""
ROUGH = 0.1
"""In half precision, after a few steps of Adam, each of at most 0.01 whatever the gradient."""
LARGE = {"WIDTH": 768, "TOKENS": 4096, "BATCH": (8, 257), "CHUNK": 500, "KEPT_NBYTES": 60_000_000}

RUNS: dict[str, tuple[Program, Case]] = {
    **{str(case): (train, case) for case in (*pairwise(), *pairwise(3, **OTHERS))},
    **{
        f"{name}: {case}": (program, replace(case, precision="fp32"))
        for name, (program, case) in PROGRAMS.items()
        if program not in (train, host_waits_as_known)
    },
}


def runs_of(ranks: int) -> list[str]:
    """Names of those that so many ranks run."""
    return [name for name, (_, case) in RUNS.items() if case.ranks == ranks]


def is_rough(case: Case) -> bool:
    """Muon computes in bfloat16; bases of eigenvectors may be any where eigenvalues are close."""
    return case.precision != "fp32" or case.optimizer in MATRICES


def unlike_the_cpu(names: list[str], kind: str) -> dict[str, str]:
    """On each rank: which runs do not give the CPU's numbers, and where."""
    torch.use_deterministic_algorithms(True)
    wrong = {}
    for name in names:
        program, case = RUNS[name]
        torch.set_default_dtype(torch.float32 if is_rough(case) else torch.float64)
        try:
            with small_activations():
                expected, found = program(case, "cpu"), program(case, kind)
        except Exception:  # the others are of interest, too
            wrong[name] = traceback.format_exc()[-1500:]
            continue
        finally:
            torch.set_default_dtype(torch.float32)
        apart = [_apart(value, right) for value, right in zip(found, expected, strict=True)]
        limit = ROUGH if is_rough(case) else EXACT
        if beyond := [place for place, much in enumerate(apart) if not much <= limit]:
            wrong[name] = f"{len(beyond)} of {len(apart)}, the first {beyond[0]}: {apart[beyond[0]]:.1e} apart"
    return wrong


def _apart(value: torch.Tensor, right: torch.Tensor) -> float:
    if value.dtype != right.dtype or value.shape != right.shape:
        return float("inf")
    if not right.numel() or torch.equal(value, right):
        return 0.0
    return (value.double() - right.double()).abs().max().item() / max(right.double().abs().max().item(), 1.0)


def digests(names: list[str], kind: str) -> dict[str, list[str]]:
    """On each rank: every number of some runs of large models, to be compared bit for bit."""
    torch.use_deterministic_algorithms(True)
    for name, value in LARGE.items():
        setattr(training, name, value)
    return {name: [_digest(value) for value in RUNS[name][0](RUNS[name][1], kind)] for name in names}


def _digest(value: torch.Tensor) -> str:
    data = value.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes()).hexdigest()


@pytest.fixture(autouse=True)
def _fresh_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What these tests put into the environment is read when a process starts CUDA."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    end_workers()
    yield
    end_workers()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_numbers_are_the_cpus(ranks: int) -> None:
    """Every pair of choices is in some case; and what a script does beside training."""
    for wrong in run_ranks(unlike_the_cpu, ranks, runs_of(ranks), "cuda", kind="cuda", timeout=400):
        assert wrong == {}


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_beside_one_another_give_the_same_bit_for_bit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every third case: what a model of that size takes is mostly the host's, to make it and to compare."""
    names = [
        name for name in list(runs_of(ranks))[::3] if RUNS[name][0] is not pretrained
    ]  # which has sizes of its own
    beside = run_ranks(digests, ranks, names, "cuda", kind="cuda", timeout=400)
    end_workers()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    in_turn = run_ranks(digests, ranks, names, "cuda", kind="cuda", timeout=400)
    for found, expected in zip(beside, in_turn, strict=True):
        assert [name for name in names if found[name] != expected[name]] == []
