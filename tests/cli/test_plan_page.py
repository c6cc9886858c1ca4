"""The page of `fullshard plan --web` gives the command line's answers, in a real browser.

make test-web, which has Gradio and a browser; without them, what needs neither.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.cli.plan_page import _ON_HOST, _ask, _picture, page
from fullshard.core.errors import ConfigError, MissingExtraError
from fullshard.plan.job import Job

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
IN_BROWSER = pytest.mark.skipif(
    not (find_spec("gradio") and find_spec("playwright") and BROWSER), reason="`make test-web` runs this in a browser"
)
FIRST = next(iter(_ON_HOST))


def asked(
    model: str = "Llama-3.1-8B", *, file: str | None = None, devices: str = "8xH100", method: str = "full",
    seq_len: str = "2048", batch: int = 1, on_host: str = FIRST, memory: str = "", auto: bool = False,
) -> Any:  # fmt: skip
    return _ask(model, file, devices, method, seq_len, batch, on_host, memory, auto)


def told(*words: str) -> str:
    """What the command line answers, without the line about `--details`."""
    lines = CliRunner().invoke(app, ["plan", *words]).stdout.splitlines()
    return "\n".join(line for line in lines if not line.startswith("--details"))


QUESTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["--model", "Llama-3.1-8B", "--devices", "8xH100"]),
    (
        {"model": "7B", "devices": "2xRTX4090", "method": "qlora", "auto": True},
        ["--model", "7B", "--devices", "2xRTX4090", "--method", "qlora", "--auto"],
    ),
    (
        {"model": "Qwen3-4B", "devices": "1xRTX3090", "seq_len": "8k", "batch": 2, "memory": "32GiB"},
        ["-m", "Qwen3-4B", "-d", "1xRTX3090", "--seq-len", "8k", "--micro-batch", "2", "--host-memory", "32GiB"],
    ),
    (
        {"on_host": "optimizer state", "devices": "2xA100-80"},
        ["--model", "Llama-3.1-8B", "--devices", "2xA100-80", "--offload-optimizer-state"],
    ),
    (
        {"model": "gpt-oss-20b", "devices": "4xRTX5090", "method": "lora", "on_host": "nothing", "auto": True},
        [*["--model", "gpt-oss-20b", "--devices", "4xRTX5090", "--method", "lora", "--auto"], "--no-offload",
         "--no-offload-activations"],
    ),
]  # fmt: skip


SEARCHED = [pytest.param(*q, marks=pytest.mark.full if q[0].get("auto") else ()) for q in QUESTIONS]


@pytest.mark.parametrize(("question", "words"), SEARCHED)
def test_the_page_asks_what_the_command_line_asks(question: dict[str, Any], words: list[str]) -> None:
    answer, _ = asked(**question)
    assert answer.text() == told(*words)
    again = answer.question.command().split()[2:]
    assert told(*again, *(["--auto"] if question.get("auto") else [])) == answer.text()


def test_a_file_keeps_its_own_name(tmp_path: Path) -> None:
    copy = tmp_path / "copied" / "config.json"
    copy.parent.mkdir()
    copy.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000,
    }))  # fmt: skip
    answer, shown = asked("", file=str(copy), devices="1xRTX3090")
    assert shown == "config.json" and not answer.plan.fits
    assert answer.text().startswith("config on 1 x RTX3090") and "--model config.json" in answer.text()
    assert str(tmp_path) not in answer.text()


@pytest.mark.parametrize(
    "words", [{"model": "/etc/passwd"}, {"model": "other/../config.json"}, {"devices": "2xthis.json"}]
)
def test_the_page_reads_no_files_of_its_host(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the page takes no paths"):
        asked(**words)


def test_what_may_be_on_the_host_are_fields_of_a_job() -> None:
    for values in _ON_HOST.values():
        assert set(values or {}) <= set(Job.model_fields)


def test_the_picture_has_every_phase_and_the_limit() -> None:
    pytest.importorskip("matplotlib")
    answer, _ = asked()
    figure = _picture(answer)
    (axes,), (legend,) = figure.axes, figure.legends
    figure.draw_without_rendering()
    assert not axes.title.get_window_extent().overlaps(legend.get_window_extent())
    phases = answer.plan.memory.phases
    assert [label.get_text() for label in axes.get_xticklabels()] == list(phases)
    heights = [0.0] * len(phases)
    for bars in axes.containers:
        heights = [height + bar.get_height() for height, bar in zip(heights, bars, strict=True)]
    assert heights == pytest.approx([sum(nbytes.values()) / 2**30 for nbytes in phases.values()])
    assert axes.lines[0].get_ydata()[0] == pytest.approx(answer.plan.cluster.device.memory / 2**30)


@pytest.mark.skipif(bool(find_spec("gradio")), reason="Gradio is installed here")
def test_without_gradio_the_extra_is_named() -> None:
    with pytest.raises(
        MissingExtraError, match=r"fullshard plan --web needs the package 'gradio'[^$]*fullshard\[web\]"
    ):
        page()


@pytest.mark.parametrize("address", ["7860", "localhost:x", ":7860"])
def test_a_wrong_address_is_one_message(address: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--web", "--web-address", address])
    assert isinstance(done.exception, ConfigError) and "use HOST:PORT" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--web-address", "127.0.0.1:1"), "--web-address has no effect without --web"),
        (("--web",), "--model has no effect with --web"),
        (("--web", "--json"), "--json has no effect with --web"),
    ],
)
def test_an_option_without_effect_is_refused(words: tuple[str, ...], message: str) -> None:
    model = () if "--json" in words else ("--model", "GPT-2")
    assert message in str(CliRunner().invoke(app, ["plan", *model, *words]).exception)


# -- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page, served by the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "fullshard", "plan", "--web", "--web-address", found]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and f"http://{found}" in server.stdout.readline()
            yield f"http://{found}"
        finally:
            server.terminate()


@contextlib.contextmanager
def opened(address: str, width: int) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found,unused-ignore]

    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 844})
        tab.goto(address)
        tab.get_by_role("button", name="Plan", exact=True).wait_for(timeout=60_000)
        yield tab
        browser.close()


def answer_of(tab: Any) -> str:
    """Ask, and return what the page answers."""
    shown = tab.locator("#answer .cm-content")  # once there is an answer
    before = shown.inner_text() if shown.count() else ""
    tab.get_by_role("button", name="Plan", exact=True).click()
    deadline = time.monotonic() + 60
    while (text := shown.inner_text() if shown.count() else "") in ("", before) and time.monotonic() < deadline:
        tab.wait_for_timeout(100)
    return str(text)


@IN_BROWSER
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_command_lines_numbers(address: str, width: int) -> None:
    for question, words in QUESTIONS:
        with opened(address, width) as tab:
            for label, name in {"Model": "model", "Devices": "devices", "Tokens per sequence": "seq_len",
                                "Memory of each host": "memory", "Sequences per device": "batch"}.items():  # fmt: skip
                if name in question:
                    tab.get_by_label(label).fill(str(question[name]))
            tab.get_by_label(question.get("method", "full"), exact=True).check()
            tab.get_by_label("Search for the fastest").set_checked(question.get("auto", False))
            if "on_host" in question:
                tab.get_by_label("In host memory").click()
                tab.get_by_role("option", name=question["on_host"]).click()
            text, expected = answer_of(tab), told(*words)
            text, expected_text = "".join(text.split()), "".join(expected.split())
            assert expected_text.startswith(text) and len(text) >= min(
                len(expected_text), 400
            )  # the rest is scrolled to
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            is_shown = tab.locator("#recipe").is_visible()
            assert is_shown == ("\nrun: " in expected)
            head = tab.locator("#recipe .cm-content").inner_text() if is_shown else ""
            assert not is_shown or re.search(
                r"^#   fullshard (sft|launch --config_file) [\w.-]+\.yaml ", head, re.MULTILINE
            )


@IN_BROWSER
@pytest.mark.full
def test_a_wrong_file_shows_its_error_and_no_recipe(address: str, tmp_path: Path) -> None:
    wrong = tmp_path / "config.json"
    wrong.write_text('{"model_type": "llama", "hidden_size": "x"}')
    with opened(address, 1280) as tab:
        assert "fits" in answer_of(tab)
        tab.set_input_files("input[type=file]", str(wrong))
        tab.get_by_text("config.json", exact=False).last.wait_for()
        tab.wait_for_timeout(1000)
        assert answer_of(tab) == "ConfigError: config.json: hidden_size is 'x', expected a positive whole number"
        assert not tab.locator("#recipe").is_visible() and not tab.locator("#run").is_visible()


@IN_BROWSER
@pytest.mark.full
def test_only_this_host_sees_the_page(address: str) -> None:
    port = int(address.rpartition(":")[2])
    assert urllib.request.urlopen(address, timeout=20).status == 200
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((own, port), timeout=2)
