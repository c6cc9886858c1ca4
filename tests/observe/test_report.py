"""A report of runs: what is in it, that it is one file, and that nothing in it is read from elsewhere.

pytest tests/observe/test_report.py
"""

from __future__ import annotations

import base64
import html.parser
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.cli.options import file_word
from fullshard.core.errors import DataError, MissingExtraError
from fullshard.observe import StepMetrics
from fullshard.observe.plots import Line, line_chart, smoothed
from fullshard.observe.record import read_runs
from fullshard.observe.report import write_report


def made_up_run(directory: Path, *, steps: int = 20, lr: float = 1e-3, events: list[dict[str, Any]]) -> Path:
    """What `fullshard train` would leave."""
    directory.mkdir()
    lines = [
        StepMetrics(
            step=step, loss=5 - step / 10, learning_rate=lr, grad_norm=1.0,
            step_seconds=0.5, tokens_per_second=128.0, data_wait_seconds=0.25, memory_nbytes=(2**30, 2**31),
            checkpoint_seconds=0.5, skipped_steps=2,
        ).to_json()
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"--lr": {"value": lr, "origin": "given"}, "--seed": {"value": 0, "origin": "default"}}
    (directory / "settings.json").write_text(json.dumps(settings))
    (directory / "environment.json").write_text(json.dumps({"torch": "2.13.0", "device": "H100", "ranks": 2}))
    same = {"host": "h", "pid": 1, "rank": 0, "step": None}
    times = (f"2026-11-23T17:00:{second:02}.000Z" for second in range(60))
    text = "".join(json.dumps({"time": next(times)} | same | event) + "\n" for event in events)
    (directory / "events.jsonl").write_text(text)
    return directory


SAVED = [{"kind": "save", "step": step, "path": f"out/checkpoints/step-{step:06}", "seconds": 1.25} for step in (9, 20)]
DONE: list[dict[str, Any]] = [{"kind": "start", "world_size": 2}, *SAVED, {"kind": "end"}]
FAILED: list[dict[str, Any]] = [
    {"kind": "start", "world_size": 2},
    {"kind": "failure", "rank": 1, "how": "SIGKILL", "step": 7},
    {"kind": "restart", "number": 1, "of": 1},
    {"kind": "waiting", "rank": 0, "cause_rank": 1, "message": "rank 1 is running"},
    {"kind": "start", "world_size": 2},
    {"kind": "failure", "rank": 1, "message": "ValueError: <script>alert(1)</script>\nsecond line", "step": 9},
]


class Page(html.parser.HTMLParser):
    """Checks that elements are closed, and gathers texts, ids and what would be read from elsewhere."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.read: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href") and not (value or "").startswith("data:"):
                self.read.append(f"{tag} {value}")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_runs_side_by_side(tmp_path: Path) -> None:
    first = made_up_run(tmp_path / "first", events=DONE)
    second = made_up_run(tmp_path / "second", lr=2e-3, steps=9, events=FAILED)
    write_report([first, second], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not page.read and "@import" not in text and "url(http" not in text, "one file, without a network"
    assert {"script", "iframe"}.isdisjoint(re.findall(r"<(\w+)", text)), "what a run says is text"
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert "first: done, 20 steps" in page.texts
    assert "second: failed after step 9: ValueError: <script>alert(1)</script>" in page.texts
    for expected in (
        "3.0500, mean of the last 2 of 20 logged steps",
        "2.00 GiB",
        "0.002 (given)",
    ):
        assert expected in page.texts, expected
    assert '<tr class="differs"><td>--lr</td>' in text and "<summary>1 by default</summary>" in text
    assert re.search(r"waiting</td>\s*<td>\s*</td>\s*<td>1</td>\s*<td>reported by rank 0: rank 1 is running", text), (
        text
    )
    assert "SIGKILL" in text and text.count("<img") == 6
    rows = re.findall(r"<tr><td>(.*?)</td>", text[text.index("What differs") : text.index("The same in all runs")])
    assert rows == ["steps", "loss at the end", "waited for data", "blocked by checkpoints", "--lr"]


GIB = 2**30
CPU = {"device": "cpu", "planned_nbytes": 2 * GIB, "before_model_nbytes": GIB, "reserve_nbytes": 0}
GPU = {"device": "H100", "planned_nbytes": 3 * GIB, "before_model_nbytes": 0, "reserve_nbytes": GIB}
UNPLANNED = {"device": "H100", "planned_nbytes": None, "unplanned": "plan: this run cannot be planned: a <b>"}


def story(run: Path, environment: dict[str, Any], *held_out: tuple[int, float], **step: Any) -> str:
    """The texts of a report on a run of 40 steps with the loss 2 +- 0.01 and evaluations after these steps."""
    run.mkdir()
    fixed = {
        "step_seconds": 0.5,
        "tokens_per_second": 9.0,
        "data_wait_seconds": 0.0,
        "memory_nbytes": [1, 3 * GIB // 2],
    }
    steps = [
        STEP
        | fixed
        | step
        | {"step": number, "loss": 2 + 0.01 * (-1) ** number, "held_out_loss": dict(held_out).get(number)}
        for number in range(1, 41)
    ]
    (run / "metrics.jsonl").write_text(lines(*steps))
    (run / "environment.json").write_text(json.dumps(environment))
    write_report([run], run / "report.html")
    return " ".join(Page((run / "report.html").read_text()).texts)


@pytest.mark.parametrize(
    ("held_out", "steps_per_pass", "said"),
    [
        (
            [(20, 2.5), (40, 2.25)],
            10,
            "2.25 is 0.25 above the training loss of 2.00: training has read its texts 4.0 times",
        ),
        ([(20, 2.5), (40, 2.25)], 100, "0.25 above the training loss of 2.00: training has read no text twice"),
        ([(20, 2.5), (40, 2.25)], None, "0.25 above the training loss of 2.00: the model predicts texts that it was"),
        ([(20, 2.25), (40, 2.5)], 10, "the model overfits. The held-out loss was lowest after step 20, with 2.25"),
        (
            [(30, 1.75)],
            10,
            "After step 30, the held-out loss of 1.75 is 0.25 below the training loss of 2.00: held-out",
        ),
        ([(40, 2.001)], 10, ""),  # within two standard errors
        ([], 10, ""),
    ],
)
def test_a_sentence_explains_the_held_out_loss(
    held_out: list[tuple[int, float]], steps_per_pass: float | None, said: str, tmp_path: Path
) -> None:
    text = story(tmp_path / "run", {"steps_per_pass": steps_per_pass}, *held_out)
    assert said in text
    assert ("the training loss" in text) == bool(said)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (CPU | {"limit_nbytes": 4 * GIB}, "planned 2.00 GiB, measured 1.50 GiB of 4.00 GiB. Both include the 1.00 GiB"),
        (
            GPU | {"limit_nbytes": 6 * GIB},
            "planned 3.00 GiB, measured 1.50 GiB of 6.00 GiB. Both count only tensors. The plan adds 1.00 GiB",
        ),
        (GPU, "planned 3.00 GiB, measured 1.50 GiB. Both"),
        (GPU, "The limit is unknown: the run did not record it"),
        (UNPLANNED | {"limit_nbytes": 6 * GIB}, "rank: measured 1.50 GiB of 6.00 GiB."),
        (UNPLANNED, "The planned peak is unknown: this run cannot be planned: a <b>."),
        ({}, "rank: measured 1.50 GiB. The planned peak is unknown: the run did not record it"),
    ],
)
def test_the_memory_is_one_story(environment: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in " ".join(story(tmp_path / "run", environment).split())
    page = (tmp_path / "run" / "report.html").read_text()
    bars = [float(width) for width in re.findall(r"(?:width|left): ([\d.]+)%\"", page)]
    limit, planned = environment.get("limit_nbytes"), environment.get("planned_nbytes")
    full = limit or (planned or 0) + environment.get("reserve_nbytes", 0)
    shown = [1.5 * GIB] if planned is None else [1.5 * GIB, planned]
    assert bars == ([100 * nbytes / full for nbytes in shown] if full else [])


def test_after_a_resume_the_memory_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", events=DONE)
    more = [STEP | {"step": step, "memory_nbytes": [3 * GIB // 2]} for step in (21, 22)]
    environment = CPU | {"ranks": 1, "limit_nbytes": 4 * GIB, "resumed_after": 20}
    (run / "environment.json").write_text(json.dumps(environment))
    write_report([run], run / "report.html")
    text = " ".join(" ".join(Page((run / "report.html").read_text()).texts).split())
    assert "The measured peak is unknown: the last attempt did not record it" in text
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines(*more))
    write_report([run], run / "report.html")
    text = " ".join(" ".join(Page((run / "report.html").read_text()).texts).split())
    assert "planned 2.00 GiB, measured 1.50 GiB of 4.00 GiB. All values describe the last attempt, which" in text
    assert "began after step 20. Both include" in text and "ranks 1 (2 until step 20)" in text


def test_charts_mark_where_a_run_resumed(tmp_path: Path) -> None:
    """Each load with the optimizer is a resume; those after the last one were of steps that ran again."""
    paths = ("a/step-000004", "/dev/shm/copies-9x/step-000007-0f81", "a/step-000015")
    loads = [{"kind": "load", "path": path, "optimizer": True} for path in paths]
    weights = {"kind": "load", "path": "a/step-000002", "optimizer": False}
    run = made_up_run(tmp_path / "run", events=[*loads, weights, loads[1]])
    (run / "environment.json").write_text(json.dumps({"resumed_after": 7}))
    (record,) = read_runs([run])
    assert record.resumed == [4, 7]
    write_report([run], run / "report.html")
    assert "all charts: resumed after steps 4, 7." in (run / "report.html").read_text()
    plain, marked = (Line("a", [1, 2, 9], [3.0, 2.0, 1.0], marks=marks) for marks in ([], record.resumed))
    drawn = [base64.b64decode(line_chart("", [line]).partition(",")[2]).decode() for line in (plain, marked)]
    dotted = [image.count("stroke-dasharray: 1,1.65") for image in drawn]
    assert dotted == [0, 2]


def test_memory_that_was_not_measured_is_unknown(tmp_path: Path) -> None:
    text = " ".join(story(tmp_path / "run", GPU, memory_nbytes=[0, 0]).split())
    assert "rank: planned 3.00 GiB." in text and "The measured peak is unknown" in text


def test_the_sample_is_shown_as_text(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", events=DONE)
    (run / "sample.txt").write_text("def f(a):\n    return a < 2\n")
    write_report([run], run / "report.html")
    assert "<pre>def f(a):\n    return a &lt; 2\n</pre>" in (run / "report.html").read_text()


def test_smoothing_is_a_weighted_mean_of_what_was_before() -> None:
    values = [3.0, 1.0, 4.0, 1.5]
    for number, value in enumerate(smoothed(values, 0.6), start=1):
        weights = [0.6 ** (number - place) for place in range(1, number + 1)]
        assert value == pytest.approx(sum(map(float.__mul__, weights, values)) / sum(weights))
    assert smoothed([2.0] * 5, 0.95) == pytest.approx([2.0] * 5)


def test_many_steps_are_drawn_as_their_means() -> None:
    source = line_chart("nats", [Line("a", range(5000), [float(x) for x in range(5000)]), Line("b", [1], [2.0], 1)])
    assert source.startswith("data:image/svg+xml;base64,") and len(source) < 90_000


def test_a_run_of_trainer(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 2.0, "learning_rate": 0.1}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "loss": 1.5}]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (run,) = read_runs([tmp_path])
    assert run.series("loss") == ([1, 2], [2.0, 1.5])
    assert run.series("held_out_loss") == ([1], [3.0])
    [numbers] = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).output)
    assert numbers["run"] == tmp_path.name and numbers["outcome"] == "unknown" and numbers["step"] == 2
    assert numbers["loss"] == 1.5 and numbers["held_out_loss"] == 3.0 and not (tmp_path / "report.html").exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "1.5000, mean" in (tmp_path / "report.html").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"does not contain a run: there is no metrics.jsonl(.|\n)*hint: pass the --output-dir"
    ):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_file_that_was_cut_off_is_named_with_its_line(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", events=DONE)
    settings = (run / "settings.json").read_text()
    (run / "settings.json").write_text(settings[:40])
    with pytest.raises(
        DataError, match=r"settings\.json is not valid JSON.*\nhint: a killed process may have left it incomplete"
    ):
        read_runs([run])
    (run / "settings.json").write_text("[1]")
    with pytest.raises(DataError, match=r"settings\.json is not valid JSON: expected a JSON object, got a list"):
        read_runs([run])
    (run / "settings.json").write_text(settings)
    for name, text, wrong in (
        ("settings.json", '{"--lr": 3}', r"--lr: input should be"),
        ("trainer_state.json", '{"log_history": [{"step": 1, "loss": "x"}]}', r"log_history.0.loss: input should be"),
        ("trainer_state.json", '{"log_history": [3]}', r"log_history.0: input should be"),
    ):
        path = run / name
        before = path.read_bytes() if path.exists() else b""
        path.write_text(text)
        lines = (run / "metrics.jsonl").read_bytes()
        if name == "trainer_state.json":
            (run / "metrics.jsonl").unlink()
        with pytest.raises(DataError, match=rf"{name}: {wrong}(.|\n)*hint: another program"):
            read_runs([run])
        path.write_bytes(before) if before else path.unlink()
        (run / "metrics.jsonl").write_bytes(lines)
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    for line in (metrics[2][:30], '{"epoch": 1}', "[1]", "\udce9"):
        text = "\n".join([*metrics[:2], line, *metrics[3:]]) + "\n"
        (run / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=r"metrics\.jsonl:3: expected a step that"):
            read_runs([run])


def test_of_trainers_states_the_newest_that_is_whole_counts(tmp_path: Path) -> None:
    for step, text in ((9, '{"log_history": [{"step": 9, "loss": 2.0}]}'), (10, '{"log_history": [{"st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    (run,) = read_runs([tmp_path])
    assert run.series("loss") == ([9], [2.0])
    (tmp_path / "checkpoint-9" / "trainer_state.json").unlink()
    with pytest.raises(DataError, match=r"checkpoint-10.trainer_state\.json is not valid JSON"):
        read_runs([tmp_path])


STEP = {
    "step": 1, "loss": 2.5, "learning_rate": 0.1, "grad_norm": 1.0, "step_seconds": 0.5,
    "tokens_per_second": 8.0, "data_wait_seconds": 0.1, "memory_nbytes": [10],
}  # fmt: skip
NAMES = ("$x_{$", "$", "_hidden", "\ud83d\ude00 \u4e2d", "a\x00\x1b[31m", "n" * 50_000, "", "<b>", "{{ 7 / 0 }}", "%s")


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def event(**fields: object) -> dict[str, object]:
    return {"time": "2026-11-23T17:00:00Z", "kind": "failure"} | fields


FINE: dict[str, dict[str, str]] = {
    "names": {"settings.json": json.dumps({n: {"value": n, "origin": n} for n in NAMES})},
    "times": {"events.jsonl": lines(*(event(time=t) for t in ("yesterday", "", "2026-13-45", "2026-01-01", "\ud800")))},
    "odd events": {"events.jsonl": lines(event(kind=["a"]), event(step=[1], rank={"a": 1}, message=3, path={}), 7)},
    "odd saves": {"events.jsonl": lines(*(event(kind="save", path=p, seconds=[]) for p in (None, [1], "\x00/" * 999)))},
    "halves": {"events.jsonl": lines(event(message="\ud800"))},
    "huge integers": {"events.jsonl": lines(event(step=10**4000, other=[10**4000]), event(step=7))},
    "deep events": {"events.jsonl": lines(event()) + '{"time": "", "kind": "skip", "a": ' + "[" * 90_000},
    "no text": {"events.jsonl": "\udcff\udcfe\x00"},
    "deep settings": {"settings.json": '{"a": {"origin": "given", "value": ' + "[" * 150 + "]" * 150 + "}}"},
    "odd environment": {"environment.json": json.dumps({"device": "\u202e", "ranks": -1, "x": [{"y": None}], "": 2})},
    "no finite number": {"metrics.jsonl": lines(*(STEP | {"loss": x} for x in ("nan", "-inf", "1e308", -1e308)))},
    "huge steps": {"metrics.jsonl": lines(STEP | {"step": 10**200}, STEP | {"memory_nbytes": [10**400]})},
    "an odd sample": {"sample.txt": "<b>\udcff\x00" + "{{ 7 / 0 }}" * 90_000},
    "no memory": {"metrics.jsonl": lines(STEP | {"memory_nbytes": []})},
    "Trainer": {"metrics.jsonl": "", "trainer_state.json": '{"log_history": [{"loss": 1.5}, {"eval_bleu": "x"}]}'},
}
ODD: tuple[tuple[str, object], ...] = (
    ("loss", [1.0]),
    ("tokens_per_second", [1.0]),
    ("step", "one"),
    ("step", 1.5),
    ("memory_nbytes", "all"),
    ("step_seconds", {}),
)
WRONG = {
    **{f"{key} is {odd}": {"metrics.jsonl": lines(STEP, STEP | {key: odd}, STEP)} for key, odd in ODD},
    "deep steps": {"metrics.jsonl": "[" * 90_000 + "\n"},
    "a long step": {"metrics.jsonl": "x" * 2**21 + "\n"},
    "a deep file": {"settings.json": '{"a":' * 90_000},
    "another encoding": {"settings.json": "\udcff\udcfe{\x00"},
    "odd sizes": {"environment.json": json.dumps({"planned_nbytes": 10**30})},
    "odd settings": {"settings.json": '{"--lr": [1, 2]}'},
    "odd history": {"metrics.jsonl": "", "trainer_state.json": '{"log_history": {"loss": 1}}'},
    "no run": {"metrics.jsonl": "", "trainer_state.json": '{"log_history": [{"eval_bleu": 1}]}'},
}
SPECIAL = ("metrics.jsonl", "events.jsonl", "settings.json", "environment.json", "sample.txt", "trainer_state.json")


def hostile(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir()
    for name, text in ({"metrics.jsonl": lines(STEP)} | files).items():
        (directory / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return directory


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 6 * 2**30)


@pytest.mark.parametrize("files", FINE.values(), ids=FINE)
def test_an_odd_folder_gives_a_report(files: dict[str, str], tmp_path: Path) -> None:
    run = hostile(tmp_path / os.fsdecode(b"run$_\xff<i>"), files)
    write_report([run], run / "report.html")
    text = (run / "report.html").read_text()
    Page(text)
    assert "<b>" not in text and "<i>" not in text and len(text) < 3_000_000


@pytest.mark.parametrize("files", WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_error_with_its_name(files: dict[str, str], tmp_path: Path) -> None:
    run = hostile(tmp_path / "run", files)
    with pytest.raises(DataError) as caught:
        write_report([run], run / "report.html")
    assert any(name in str(caught.value) for name, text in files.items() if text) and "hint: " in str(caught.value)
    assert len(str(caught.value)) < 1000 and not (run / "report.html").exists()


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_of_the_folder_is_not_read(name: str, tmp_path: Path) -> None:
    """Pipes would be waited for; links may lead to files of others."""
    other = hostile(tmp_path / "other", {name: "{}"})
    makers: list[Callable[[Path], object]] = [os.mkfifo, sparse, Path.mkdir]
    makers += [lambda path: path.symlink_to(other / name), lambda path: path.symlink_to(path)]
    for number, make in enumerate(makers):
        run = hostile(tmp_path / str(number), {"metrics.jsonl": ""} if name == "trainer_state.json" else {})
        (run / name).unlink(missing_ok=True)
        make(run / name)
        if make is Path.mkdir and name == "events.jsonl":
            continue  # no journal
        with pytest.raises(DataError, match=rf"{re.escape(name)} cannot be read: .*\nhint: move it away"):
            read_runs([run])


def test_links_are_neither_followed_nor_overwritten(tmp_path: Path) -> None:
    run, others = hostile(tmp_path / "run", {}), tmp_path / "others"
    hostile(others, {"trainer_state.json": '{"log_history": [{"step": 77, "loss": 1.0}]}'})
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-2").symlink_to("/")
    (run / "checkpoints" / "step-3").mkdir()
    os.mkfifo(run / "checkpoints" / "step-3" / "pipe")
    (run / "checkpoints" / "step-3" / "others").symlink_to(others)
    (run / "checkpoint-9").symlink_to(others)
    (run / "report.html").symlink_to(others / "metrics.jsonl")
    begin = time.monotonic()
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert time.monotonic() - begin < 60
    assert (others / "metrics.jsonl").read_text() == lines(STEP) and not (run / "report.html").is_symlink()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="does not contain a run"):  # but in a folder that is not its own
        read_runs([run])
    assert {path.name for path in run.iterdir()} == {"checkpoints", "checkpoint-9", "report.html"}


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hostile(tmp_path / "run", {})
    for package in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=rf"{package}(.|\n)*fullshard\[plots\]"):
                write_report([run], run / "report.html")


@pytest.mark.parametrize(
    ("output", "what"), [("nowhere/x.html", "does not exist; create it"), ("", "is a folder; specify a")]
)
def test_where_nothing_can_be_written_is_said_first(output: str, what: str, tmp_path: Path) -> None:
    """Also of what takes minutes: a simulation's picture, a calibration."""
    file = str(tmp_path / output)
    commands = (
        ["report", "no-run", "-o", file],
        ["simulate", "-m", "GPT-2", "-d", "8xH100", "--timeline", file],
        ["plan", "--calibrate", file],
    )
    for command in commands:
        result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
        assert result.exit_code == 2
        assert what in result.output


def test_a_folder_that_takes_no_file_is_said_first() -> None:
    real, effective, saved = os.getresuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "there").touch(0o666)
        (folder / "there").chmod(0o666)
        folder.chmod(0o555)
        try:
            os.setresuid(real or 65534, effective or 65534, saved)
            with pytest.raises(typer.BadParameter, match=r"cannot be written because .* is not writable"):
                file_word(f"{folder}/new")
            assert file_word(f"{folder}/there") == folder / "there"
        finally:
            os.setresuid(real, effective, saved)
            folder.chmod(0o755)
