"""The page of `fullshard plan --web`: the planner's questions and answers in a browser.

A Space of Hugging Face shows the same page with this `app.py`:

from fullshard.cli.plan_page import page
page().launch()
"""

import contextlib
import dataclasses
import importlib
import tempfile
import threading
from pathlib import Path
from typing import Any, get_args

import typer

from fullshard.core.errors import ConfigError, FullshardError
from fullshard.core.imports import import_extra
from fullshard.core.paths import looks_like_path
from fullshard.core.sizes import GIB, parse_size
from fullshard.plan.answer import continued, launch_command
from fullshard.plan.ask import Answer, ask
from fullshard.plan.job import Method
from fullshard.plan.memory import CATEGORIES
from fullshard.plan.recipe import as_recipe

_ON_HOST = {
    "as the planner chooses": None,
    "nothing": {"offload": False, "offload_activations": False},
    "optimizer state": {"offload_optimizer_state": True},
    "all that is sharded": {"offload": True},
    "activations": {"offload_activations": True},
}
"""The choices of what to keep in host memory, as fields of a job."""


def page() -> Any:
    """Return the page as a Gradio app. Raise `MissingExtraError` if Gradio or matplotlib is not installed."""
    gradio = import_extra("gradio", extra="web", purpose="fullshard plan --web")
    import_extra("matplotlib", extra="web", purpose="fullshard plan --web")
    files = tempfile.TemporaryDirectory()  # removed with the page
    with gradio.Blocks(title="fullshard plan", analytics_enabled=False) as blocks:
        gradio.Markdown("# Does it fit, and how fast?\nThe answers of `fullshard plan`, before you rent or buy.")
        with gradio.Row():
            with gradio.Column(min_width=300):
                model = gradio.Textbox("Llama-3.1-8B", label="Model", info="a name, or a size such as 7B")
                file = gradio.File(label="or its config.json", file_types=[".json"], height=130)
                devices = gradio.Textbox("8xH100", label="Devices", info="such as 2xRTX4090 or 1024xA100-80")
                method = gradio.Radio(list(get_args(Method)), value="full", label="Method")
                seq_len = gradio.Textbox("2048", label="Tokens per sequence", info="such as 4096 or 32k")
                batch = gradio.Number(
                    1, label="Sequences per device", info="the search may raise 1", precision=0, minimum=1
                )
                on_host = gradio.Dropdown(list(_ON_HOST), label="In host memory")
                host_memory = gradio.Textbox(label="Memory of each host", placeholder="of a typical host, or 512GiB")
                auto = gradio.Checkbox(True, label="Search for the fastest plan that fits (--auto)")
                asks = gradio.Button("Plan", variant="primary")
            with gradio.Column(scale=2, min_width=300):
                verdict = gradio.Code(label="Answer", language=None, wrap_lines=True, lines=2, elem_id="answer")
                picture = gradio.Plot(show_label=False, visible=False)
                command = gradio.Code(
                    label="Run", language="shell", wrap_lines=True, lines=1, visible=False, elem_id="run"
                )
                recipe = gradio.Code(label="Recipe", language="yaml", max_lines=20, visible=False, elem_id="recipe")
                download = gradio.DownloadButton("Download the recipe", visible=False)
                asked = gradio.Code(label="In a terminal", language="shell", wrap_lines=True, lines=1, elem_id="asked")

        def answered(*words: Any) -> tuple[Any, ...]:
            try:
                answer, shown = _ask(*words)
            except FullshardError as error:
                hidden = gradio.update(visible=False)
                text = f"{type(error).__name__}: {error}".replace(f"{Path(words[1]).parent}/" if words[1] else "\0", "")
                return text, *([hidden] * 4), gradio.update(value="")
            text, path = "", Path(files.name, f"{answer.plan.model.name.replace(' ', '-')}.yaml")
            if answer.fits:
                text = as_recipe(answer.plan, shown, str(words[2]), path.name)
                path.write_text(text, encoding="utf-8")
            run = continued("", launch_command(answer.plan)).strip()
            return (
                answer.text(),
                gradio.update(value=_picture(answer), visible=True),
                gradio.update(value=run, visible=bool(text)),
                gradio.update(value=text, visible=bool(text)),
                gradio.update(value=str(path) if text else None, visible=bool(text)),
                continued("", answer.question.command() + " --auto" * bool(words[-1])).strip(),
            )

        inputs = [model, file, devices, method, seq_len, batch, on_host, host_memory, auto]
        outputs = [verdict, picture, command, recipe, download, asked]
        gradio.on([asks.click, model.submit, devices.submit], answered, inputs, outputs, api_name="plan")
    return blocks


def serve(address: str) -> None:
    """Serve the page at `HOST:PORT` until Ctrl-C. Raise `ConfigError` if the address is invalid or in use."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--web-address is {address!r}", hint="use HOST:PORT, for example 127.0.0.1:7860")
    try:
        page().launch(server_name=host, server_port=int(port), share=False, quiet=True, prevent_thread_lock=True)
    except OSError as error:
        hint = "use another --web-address"
        raise ConfigError(f"the page cannot be served at {address}: {error}", hint=hint) from None
    typer.echo(f"the page is at http://{address}; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _ask(
    model: str, file: str | None, devices: str, method: str, seq_len: str, batch: float, on_host: str, memory: str,
    auto: bool,
) -> tuple[Answer, str]:  # fmt: skip
    """Ask the planner what the page asks. Also return the model's name as commands have it."""
    given = {"method": method, "seq_len": seq_len, "micro_batch": batch} | (_ON_HOST[on_host] or {})
    default = {"method": "full", "seq_len": "2048", "micro_batch": 1}
    given = {name: value for name, value in given.items() if value != default.get(name)}
    if (file is None and looks_like_path(model.strip())) or devices.strip().endswith(".json"):
        raise ConfigError("the page takes no paths", hint="upload the config.json, or plan in a terminal")
    size = parse_size(memory) if memory.strip() else None
    answer = ask(file or model.strip(), devices.strip() or None, given, auto=auto, host_memory=size)
    if file is None:
        return answer, model.strip()
    # The browser's file has another name than its copy on this host.
    shown = Path(file).name
    question = dataclasses.replace(answer.question, options={**answer.question.options, "--model": shown})
    plan = dataclasses.replace(answer.plan, model=dataclasses.replace(answer.plan.model, name=Path(file).stem))
    return dataclasses.replace(answer, question=question, plan=plan), shown


def _picture(answer: Answer) -> Any:
    """Draw the memory of a device at the fullest moment of each phase, by category, against its limit in GiB."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 3.6), layout="constrained")
    axes, plan = figure.add_subplot(), answer.plan
    phases, limit = plan.memory.phases, plan.cluster.device.memory / GIB
    below = [0.0] * len(phases)
    for category in CATEGORIES:
        values = [nbytes.get(category, 0) / GIB for nbytes in phases.values()]
        if any(values):
            color = importlib.import_module("matplotlib").colormaps["tab20"](CATEGORIES.index(category))
            axes.bar(list(phases), values, bottom=below, color=color, label=category)
            below = [low + value for low, value in zip(below, values, strict=True)]
    axes.axhline(limit, color="black", linestyle="--", label=f"limit: {limit:.1f} GiB")
    needed = plan.memory.needed / GIB
    axes.axhline(needed, color="black", linestyle=":", label=f"needed, with fragments: {needed:.1f} GiB")
    axes.set(ylabel="GiB", title="peak memory of a device in each phase")
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
