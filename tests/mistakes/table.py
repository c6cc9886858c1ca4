"""The tables of mistakes, and the programs that make each of them on real code.

A row of a table has an `id`, what a person typed or wrote, and a `class`:

works  the exit code is 0, or no exception is raised. What `sees` lists is in the output or in a warning.
clear  the command ends with an error and without a traceback, or every rank (of `ranks`) raises an error of fullshard.
       If `by` names another library, the error is that library's. What `sees` lists is in the message.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import tomllib
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fullshard
from fullshard.core.errors import FullshardError

HERE = Path(__file__).parent
SOURCE = str(Path(fullshard.__file__).parent)
Row = dict[str, Any]


def read(name: str) -> tuple[str, list[Row]]:
    """Return the prelude of a table, and its rows."""
    table = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    prelude = str(table.get("prelude", ""))
    if "extends" in table:
        prelude = read(table["extends"].removesuffix(".toml"))[0] + prelude
    return prelude, table["mistake"]


def write_files(folder: Path) -> None:
    """Write what the commands of `commands.toml` name: a script, a model, and checkpoints, some of them damaged."""
    from fullshard.checkpoint import save_checkpoint
    from tests.stored import job

    (folder / "train.py").write_text("print('hello')\n")
    (folder / "empty").mkdir()
    model, optimizer = job()
    save_checkpoint(folder / "saved" / "step-2", model=model, optimizer=optimizer)
    for name in ("flipped", "short", "missing"):
        shutil.copytree(folder / "saved" / "step-2", folder / name)
    flipped, short, missing = (
        folder / name / "model-rank00000.safetensors" for name in ("flipped", "short", "missing")
    )
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:-9])
    missing.unlink()


def write_model(folder: Path) -> None:
    """Write a small Llama with a tokenizer into `model`, and its weights alone into `weights_alone`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.cli.test_chat import TEMPLATE, WORDS
    from tests.trainers import build

    build().save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder / "model")
    (folder / "weights_alone").mkdir()
    shutil.copy(folder / "model" / "model.safetensors", folder / "weights_alone")


def run_code(prelude: str, code: str, places: dict[str, str], patience: float | None) -> tuple[str, str]:
    """Run a program on this rank: what it printed and warned, and what raised an error, if anything did.

    `places` are folders that the program names. `patience` is the number of seconds that the rank waits for others, if
    it is not that of the tests.
    """
    from accelerate.state import AcceleratorState, GradientState

    from fullshard.api import accelerator_state

    accelerator_state.AcceleratorState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if patience is not None:
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = f"file://{places['place']}/store"
        dist.init_process_group("gloo", store, timedelta(seconds=patience), size, rank)
    printed, source = io.StringIO(), ""
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            exec(compile(prelude + code, "<mistake>", "exec"), {name: Path(path) for name, path in places.items()})
        except Exception as error:
            lines = "".join(traceback.format_exception_only(error))
            printed.write(lines.removeprefix(f"{type(error).__module__}."))
            source = _source(error)
    texts = [str(warning.message) for warning in caught]
    return "\n".join([printed.getvalue(), *texts]), source


def _source(error: Exception) -> str:
    """Return what raised an error: fullshard on purpose, fullshard by accident, a package, or the program itself."""
    if isinstance(error, FullshardError):
        return "fullshard"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename.startswith(SOURCE):
        return "fullshard" if (last.line or "").startswith("raise ") else "an accident in fullshard"
    return last.filename.partition("site-packages/")[2].split("/")[0] or "python"


def busy_port() -> tuple[socket.socket, int]:
    """Return a socket that listens, and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, int(listening.getsockname()[1])
