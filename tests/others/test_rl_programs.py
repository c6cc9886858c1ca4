"""Workers of programs for reinforcement learning, unchanged, under `fullshard.take`: what they send to an engine.

    PROGRAMS_PYTHON=ENV/bin/python MILES=CHECKOUT pytest tests/others/test_rl_programs.py -m full

The environment has verl 0.9.1 with Transformers 5.9, TRL 0.27 and Ray. CHECKOUT is a checkout of radixark/miles of
August 2026. Each program runs with fullshard's engine and with torch's, on one or two ranks over Gloo.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.others.test_taken_programs import ON_CPU, PARTS, TAKE, python_with, run, run_ranks, saved

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
MILES = os.environ.get("MILES", "")
PICKLES = "save_checkpoint model,optimizer,extra"


def compare(place: Path, close: float) -> dict[str, torch.Tensor]:
    """Both engines have saved the same tensors, within `close`, or one step of bfloat16; what fullshard's has saved."""
    theirs, ours = saved(place / "torch"), saved(place / "fullshard")
    assert theirs and theirs.keys() == ours.keys()
    for name, value in theirs.items():
        step = 2**-7 if value.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(ours[name], value, atol=close, rtol=step, msg=f"{name} differs")
    return ours


@pytest.mark.parametrize(
    ("model", "kind", "count"),
    [
        *(("llama", "all", 1), ("llama", "all", 2), ("llama", "lora", 1), ("llama", "lora", 2), ("llama", "merged", 2)),
        *(("moe", "all", 1), ("moe", "all", 2), ("moe", "lora", 2)),
    ],
)
def test_worker_of_verl(tmp_path: Path, model: str, kind: str, count: int) -> None:
    """Every call gives the same with both engines, except that verl cannot pickle a rank's interval."""
    python = python_with("verl")
    run(python, PARTS / "small_files.py", "rl", tmp_path / "files", cwd=tmp_path)
    calls = {}
    for engine in TAKE:
        out = tmp_path / engine
        out.mkdir()
        program = [ON_CPU, PARTS / "verl_worker.py", tmp_path / "files" / model, out, kind]
        run_ranks(python, engine, *program, cwd=out, count=count, package="verl")
        calls[engine] = json.loads((out / "calls.json").read_text())
    assert set(calls["torch"].values()) == {""}, calls["torch"]
    said = calls["fullshard"].pop(PICKLES)
    assert said.startswith("LifecycleError: cannot pickle "), said
    assert set(calls["fullshard"].values()) == {""} and len(calls["fullshard"]) >= 6, calls["fullshard"]
    if kind == "lora":
        merged = torch.load(tmp_path / "fullshard" / "collect_merged_lora_params.pt")
        base, adapters = (torch.load(tmp_path / "fullshard" / f"{each}.pt") for each in ("base", "adapters-False"))
        for name, weight in base.items():  # it has each expert separately, and `merged` has them stacked
            start = f"base_model.model.{name.replace('.base_layer', '').removesuffix('weight')}"
            if f"{start}lora_A.weight" in adapters:
                weight += 2 * adapters[f"{start}lora_B.weight"] @ adapters[f"{start}lora_A.weight"]
                torch.testing.assert_close(merged[name.replace(".base_layer", "")], weight, atol=1e-6, rtol=0)
        assert len(adapters) == 8
        if count == 1:  # with torch's engine, verl gives the base weights: its copies of them are views
            (tmp_path / "torch" / "collect_merged_lora_params.pt").unlink()
            (tmp_path / "fullshard" / "collect_merged_lora_params.pt").unlink()
    found = compare(tmp_path, 1e-5)
    assert any(name.startswith("BucketedWeightSender") for name in found)


@pytest.mark.skipif(not MILES, reason="MILES names no checkout of radixark/miles")
@pytest.mark.parametrize(
    ("model", "way", "count"),
    [("llama", "colocate", 1), ("llama", "colocate", 2), ("llama", "apart", 2), ("moe", "colocate", 2)],
)
def test_actor_of_miles(tmp_path: Path, model: str, way: str, count: int) -> None:
    """From `init` to `update_weights`, `sleep`, `wake_up` and a checkpoint: an engine receives the same weights."""
    python = python_with("ray")
    run(python, PARTS / "small_files.py", "rl", tmp_path / "files", cwd=tmp_path)
    calls = []
    for engine in TAKE:
        out = tmp_path / engine
        out.mkdir()
        words = [PARTS / "miles_actor.py", MILES, tmp_path / "files" / model, out, way]
        run_ranks(python, engine, *words, cwd=out, count=count)
        calls.append(json.loads((out / "calls.json").read_text()))
    assert calls[0] == calls[1] and calls[0].count("end_weight_update") == 2
    found = compare(tmp_path, 1e-4)
    received = [name for name in found if name.startswith("received-2.pt")]
    assert received and (model == "llama" or any(".experts.3.up_proj.weight" in name for name in received))
    assert not torch.equal(found["found.pt.lost.loss"], found["found.pt.first.loss"])
    torch.testing.assert_close(found["found.pt.loaded.loss"], found["found.pt.lost.loss"], atol=1e-6, rtol=0)
