"""The answer of a rehearsal: what is beside the measured numbers, from one run that all tests share.

pytest tests/api/rehearsal/test_rehearsal_answer.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fullshard.api.rehearsal.meter import FREE, exposed_seconds
from fullshard.cli.rehearse import _asked, _lines
from fullshard.observe.plots import rehearsal_chart
from fullshard.observe.report import write_report
from fullshard.plan.hardware import find_device
from tests.commands import run_here
from tests.distributed import preload

VALUES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
preload("fullshard.api.rehearsal.stage", "fullshard.api.accelerator")


def _stage(options: dict[str, Any], script: str, words: list[str]) -> None:
    from fullshard.api.rehearsal import stage

    os.environ["OMP_NUM_THREADS"] = "1"
    with patch.object(sys, "argv", ["stage", json.dumps(options), "script", script, *words]):
        stage.main()


def rehearse_in_a_fork(folder: Path, script: Path, *words: str, **options: Any) -> dict[str, Any]:
    """Return the answer for a script. A fork of a process that has imported torch is quicker than the command."""
    answer = folder / "answer.json"
    given = {
        "devices": "8xH100",
        "rank": 0,
        "steps": None,
        "links": None,
        "engine": None,
        "answer": str(answer),
        **options,
    }
    process = multiprocessing.get_context("forkserver").Process(target=_stage, args=(given, str(script), [*words]))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return {"as": "8 x H100 in 1 host", "rank": 0, **json.loads(answer.read_text())}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer for a model whose layers the planner knows."""
    return rehearse_in_a_fork(tmp_path_factory.mktemp("known"), SCRIPTS / "rehearsed_llama.py", json.dumps(VALUES))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer for a model that the planner does not know, on torch's engine."""
    return rehearse_in_a_fork(tmp_path_factory.mktemp("unknown"), SCRIPTS / "rehearsed.py", "fsdp2")


def test_the_plan_is_beside_each_phase(known: dict[str, Any], unknown: dict[str, Any]) -> None:
    """With what is left between the two; a script without a plan says why."""
    for phase, peak in known["phases"].items():
        assert peak["planned"] > 0
        line = next(line for line in _lines(known) if line.startswith(f"{phase}: "))
        assert ", plan " in line
    assert known["engine"] == "fullshard"
    assert known["planned"] > known["phases"]["backward"]["planned"]
    assert "(plan: " in "\n".join(_lines(known))
    assert {peak["planned"] for peak in unknown["phases"].values()} == {None}
    assert "no plan beside it: the script does not shard its model with fullshard" in _lines(unknown)
    assert unknown["engine"] == "torch"
    shown = "\n".join(_lines(unknown | {"engine": None}))
    assert "; nothing is sharded by fullshard or fully_shard" in shown
    assert "nothing is sharded" not in "\n".join([*_lines(known), *_lines(unknown)])


def test_the_plan_is_that_of_the_command(known: dict[str, Any], tmp_path: Path) -> None:
    """The job is read from the sharded model as a user would describe it."""
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    words = ["--model", str(tmp_path), "--devices", "8xH100", "--precision", "no", "--micro-batch", "4"]
    done = run_here("plan", "--json", *words, "--seq-len", "64", "--attention", "flash")
    planned = json.loads(done.stdout)["memory"]
    assert known["planned"] == planned["needed"]
    device = planned["phases"]["load"]["framework"]
    assert known["phases"]["backward"]["planned"] == sum(planned["phases"]["backward"].values()) - device


def test_time_is_said_for_the_device_at_hand(known: dict[str, Any], unknown: dict[str, Any]) -> None:
    """The plan's ratio gives that of the device that was asked for. The model's FLOP are planned, or else counted."""
    by_plan = known["seconds_by_plan"]
    assert 0 < by_plan < known["step_seconds"]  # a CPU's computation, on an H100
    said = "\n".join(_lines(known))
    assert "times are of the device at hand; about " in said
    assert " on H100 by the plan" in said
    tokens, width, inner = 4 * 64, 128, 256
    products = 2 * (4 * width**2 + 3 * width * inner) + width * 256
    scores = 2 * 2 * (64 + 1) * width  # two products for each pair of a token and an earlier one, in two layers
    assert known["flops"] == pytest.approx(6 * tokens * products + 3 * tokens * scores, rel=0.01)
    assert "times are of the device at hand; there is no plan" in _lines(unknown)
    outer = 6 * 4 * 32 * (2 * 2 * 64 * 256 + 64 * 128)  # of rehearsed.py, whose first product needs no input's gradient
    assert unknown["flops"] == pytest.approx(outer, rel=0.01)


def test_a_run_too_short_to_measure_communication_says_so(known: dict[str, Any]) -> None:
    said = "\n".join(_lines(known | {"exposed_seconds": None, "seconds_by_plan": None, "step_seconds": 6.8893}))
    assert "\nstep: 6.89 s;" in said
    assert "communication: not measured, because that needs" in said and "6 steps (better 14)" in said
    assert "of which" not in said and "there is no plan" not in said and ", plan " in said


def test_the_worst_wait_is_named(known: dict[str, Any], unknown: dict[str, Any]) -> None:
    """The longest on a CPU; on a device, the one that most often begins after all of its work."""
    assert {"unit 'model.layers.0', unshard", "unit 'model.layers.0', reduce"} <= known["waits"].keys()
    place = max(known["waits"], key=lambda place: known["waits"][place]["host"])
    seconds = known["waits"][place]["host"]
    assert f"waits for messages take at most {1000 * seconds:.1f} ms per step, in {place}" in _lines(known)
    assert unknown["waits"].keys() == {"the script"}
    late = {"a": {"count": 4, "late": 1}, "b": {"count": 8, "late": 6}, "c": {"count": 1, "host": 9}}
    assert "the host is behind the device in at most 75% of the waits, in b" in _lines(known | {"waits": late})
    assert not any("waits" in line for line in _lines(known | {"waits": {}}))


def test_mfu_needs_a_device_whose_peak_is_known(known: dict[str, Any], tmp_path: Path) -> None:
    """A CPU has one only if it was calibrated."""
    assert known["mfu"] is None
    assert "MFU" not in "\n".join(_lines(known))
    speeds = {"flops": 2e11, "flops_fp32": 1e11, "memory_bandwidth": 2e10, "link": 2e9, "network": 1e9}
    values = {"name": "CPU", "memory": 10**10, "per_host": 2, "source": "a test", "framework": 0, **speeds}
    (tmp_path / "here.json").write_text(json.dumps(values))
    script, words = SCRIPTS / "rehearsed_llama.py", json.dumps(VALUES)
    found = rehearse_in_a_fork(tmp_path, script, words, devices=f"2x{tmp_path / 'here.json'}")
    assert found["is_asked_device"]
    assert found["runtime"] > 100 * 2**20  # of the process before the script, which torch alone exceeds
    assert found["needed"] == found["peak_reserved"] + found["runtime"]
    assert found["seconds_by_plan"] is None
    assert found["mfu"] == pytest.approx(found["flops"] / found["step_seconds"] / 1e11)
    found["as"] = "2 x CPU in 1 host"
    assert f"; MFU {found['mfu']:.1%}" in "\n".join(_lines(found))


def test_what_the_runtime_takes_is_part_of_what_is_needed(known: dict[str, Any]) -> None:
    """On a GPU, it is the planner's figure. `test_mfu_needs_a_device_whose_peak_is_known` has a CPU."""
    assert known["runtime"] == find_device("H100").framework
    assert known["needed"] == known["peak_reserved"] + known["runtime"]
    assert ", with 1.50 GiB for the runtime (plan: " in "\n".join(_lines(known))


def test_both_engines_are_compared(known: dict[str, Any], tmp_path: Path) -> None:
    """A script that imports `fully_shard` from fullshard gets torch's, and both answers are in one table."""
    words = json.dumps(VALUES)
    found = rehearse_in_a_fork(tmp_path, SCRIPTS / "rehearsed_llama.py", words, engine="torch")
    assert found["engine"] == "torch"
    assert len(found["losses"]) == len(known["losses"]) == 6
    lines = _lines({**known, "torch": found})
    ratio = known["peak_allocated"] / found["peak_allocated"]
    assert any(line.startswith("peak allocated") and line.endswith(f"{ratio:.3f}") for line in lines)
    assert f"losses, torch: {found['losses'][0]:.4f}" in "\n".join(lines)
    assert not any("not comparable" in line for line in lines)
    assert "the script does not use the fully_shard of torch" in "\n".join(_lines({**known, "torch": known}))


def test_the_answer_is_drawn_and_in_the_report(known: dict[str, Any], tmp_path: Path) -> None:
    """A file, and a section of the report for a folder with the answer."""
    rehearsal_chart(known, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    for text in ("load and first forward", "limit: 79.2 GiB", "plan", "free links"):
        assert f">{text}" in drawn or text in drawn
    (tmp_path / "rehearsal.json").write_text(json.dumps(known))
    write_report([tmp_path], tmp_path / "report.html")
    assert "<h2>Rehearsal</h2><figure>" in (tmp_path / "report.html").read_text()
    done = run_here("rehearse", "--as", "8xH100", "--plot", str(tmp_path / "chart.txt"), "--", "x.py")
    assert "expected a name that ends in .svg, .png or .pdf" in done.stderr


def test_values_of_other_ranks_are_named_in_short_lines() -> None:
    """As many as there are, in lines of 80 columns."""
    asked = _asked({"unknown": {f"broadcast from rank {rank} of 64": 3 for rank in range(9)}})
    assert "broadcast from rank 8 of 64 (3x)" in asked.replace("\n", " ")
    assert max(map(len, asked.splitlines())) <= 80
    assert asked.splitlines()[-1].startswith("hint: ")


@pytest.mark.parametrize("period", [2, 3, 4])
@pytest.mark.parametrize("steps", [7, 8, 10, 12, 18, 30])
def test_slow_steps_are_not_taken_for_communication(period: int, steps: int) -> None:
    """A script that saves in every second, third or fourth step, whichever its first is."""
    for first in range(period):
        spans = [(0.1 + 0.02 * (not free) + 0.3 * (step % period == first), free) for step, free in _kinds(steps)]
        assert exposed_seconds(spans) == pytest.approx(0.02)


def _kinds(steps: int) -> list[tuple[int, bool]]:
    return [(step, FREE[step % len(FREE)]) for step in range(steps)]


def test_exposed_communication_needs_steps_of_both_kinds() -> None:
    """It is never negative, and None without a step whose links are free."""
    assert exposed_seconds([(0.1, False)] * 3) is None
    assert exposed_seconds([(0.1, True)] * 3) is None
    assert exposed_seconds([(0.1, False), (0.2, True)]) == 0


@pytest.mark.full
@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_script_that_sleeps_in_some_steps(period: int, tmp_path: Path) -> None:
    """Its messages of 20 ms are measured all the same."""
    lines = [
        "import sys, time, torch, torch.distributed as dist",
        "dist.init_process_group('gloo')",
        "model = torch.nn.Linear(8, 8)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "message = torch.ones(125_000)  # of 0.5 MB, sent twice at 50 MB/s",
        "for step in range(14):",
        "    model(torch.ones(8)).sum().backward()",
        "    dist.all_reduce(message)",
        "    time.sleep(0.1 * (step % int(sys.argv[1]) == 0))",
        "    optimizer.step()",
    ]
    (tmp_path / "sleeps.py").write_text("\n".join(lines))
    values = {"name": "CPU", "memory": 10**10, "per_host": 1000, "source": "a test", "framework": 0, "flops": 1e11,
              "flops_fp32": 1e11, "memory_bandwidth": 2e10, "link": 5e7, "network": 5e7,
              "link_efficiency": 1.0}  # fmt: skip
    (tmp_path / "here.json").write_text(json.dumps(values))
    devices = f"1000x{tmp_path / 'here.json'}"
    found = rehearse_in_a_fork(tmp_path, tmp_path / "sleeps.py", str(period), devices=devices)
    assert found["exposed_seconds"] == pytest.approx(0.02, rel=0.25)
    assert found["waits"].keys() == {"the script"}
    assert found["waits"]["the script"]["count"] == 1
    assert 0.015 < found["waits"]["the script"]["host"] < 0.1
