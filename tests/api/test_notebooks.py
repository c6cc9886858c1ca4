"""Training started from a notebook.

pytest tests/api/test_notebooks.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
import torch.distributed as dist

from fullshard import notebook_launcher
from fullshard.core.errors import ConfigError
from tests.differential import TOLERANCE

TRAIN = """
def train(factor, out):
    import torch
    from torch import nn
    from fullshard import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=factor))
    for _ in range(2):
        loss = model(torch.ones(64, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    full = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save((accelerator.num_processes, float(loss.detach()), full), out)
    accelerator.end_training()
"""
THREADS = (
    "import torch; torch.set_num_threads(2); torch.ones(2000, 2000).sum(); torch.ones(9, 500) @ torch.ones(500, 9)"
)


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="has used CUDA"):
        notebook_launcher(print, num_processes=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="is already a rank of a job"):
        notebook_launcher(print, num_processes=2)


def cells_in(folder: Path) -> list[str]:
    return [
        THREADS,
        TRAIN,
        "from fullshard import notebook_launcher",
        f"notebook_launcher(train, (0.1, {str(folder / 'two.pt')!r}), num_processes=2)",
        f"train(0.1, {str(folder / 'one.pt')!r})",
    ]


def test_functions_of_a_session_train_on_two_ranks(tmp_path: Path) -> None:
    """After torch's threads have started; a function that no file has."""
    debug = f"import fullshard; fullshard.debug_launcher(train, (0.1, {str(tmp_path / 'debug.pt')!r}))"
    command = [sys.executable, "-c", "\n".join([TRAIN, debug, *cells_in(tmp_path)])]
    with ExitStack() as stack:
        with suppress(OSError):  # if nobody has it
            stack.enter_context(socket.create_server(("127.0.0.1", 29500)))  # as another notebook would
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    check_alike(tmp_path)
    (tmp_path / "debug.pt").rename(tmp_path / "two.pt")
    check_alike(tmp_path)


@pytest.mark.full
def test_cells_train_on_two_ranks(tmp_path: Path) -> None:
    """The same in a kernel of Jupyter."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells_in(tmp_path)])
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    check_alike(tmp_path)


def check_alike(folder: Path) -> None:
    (two, loss, weights), (one, reference, same) = (torch.load(folder / f"{n}.pt") for n in ("two", "one"))
    assert (two, one) == (2, 1)
    assert loss == pytest.approx(reference, rel=TOLERANCE)
    for name, value in same.items():
        torch.testing.assert_close(weights[name], value)
