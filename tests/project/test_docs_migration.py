"""Every command of docs/migration.md does what its row says.

Run: `python -m pytest tests/project/test_docs_migration.py`.
"""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from typer.testing import CliRunner

from fullshard.checkpoint import verify_checkpoint
from fullshard.checkpoint.offline import open_source
from fullshard.cli.ckpt import app
from tests.interchange import write_xla

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\|.*\| `fullshard ckpt ([^`]+)` \|$", PAGE, re.MULTILINE)
IMPORTS = [command for command in COMMANDS if command.startswith("import")]


def _job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds each kind of checkpoint under the name it has on the page."""
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "hf-bin", "unsharded", "accelerate-full", "xla", "torchacc"):
        (tmp_path / name).mkdir()
    net, optimizer = _job()
    weights = net.state_dict()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file(weights, tmp_path / "unsharded" / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "unsharded" / "optimizer.bin")
    torch.save(weights, tmp_path / "hf-bin" / "pytorch_model.bin")
    torch.save(weights, tmp_path / "model.pt")
    named, state = get_state_dict(net, optimizer)
    torch.save(named, tmp_path / "accelerate-full" / "pytorch_model_fsdp.bin")
    torch.save(state, tmp_path / "accelerate-full" / "optimizer.bin")
    _, flat = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    states: dict[str, dict[str, Any]] = {
        "accelerate-sharded/pytorch_model_fsdp_0": {"model": named},
        "accelerate-sharded/optimizer_0": {"optimizer": state},
        "dcp": {"model": named, "optimizer": state},
        "torchtitan": {**named, "optimizer": flat},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in states.items():
            dcp.save(value, checkpoint_id=tmp_path / name, no_dist=True)
    write_xla(tmp_path / "xla", net, [], 4, flat=True)
    write_xla(tmp_path / "torchacc", net, [], 4, flat=False, name="rank{r}-of-{w}-model.pth", optimizer=optimizer)
    return tmp_path


def _run(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, (command, result.output, result.exception)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from fullshard.core.layout import Interval

    with open_source(path) as source:
        return {
            name: source.read(kind, name, Interval(0, record.numel)).reshape(record.shape).clone()
            for kind, name, record in source.contents.tensors()
        }


def test_the_page_has_a_command_for_each() -> None:
    assert len(IMPORTS) == 10
    assert len(COMMANDS) == 15


@pytest.mark.parametrize("command", IMPORTS)
def test_imports(workplace: Path, command: str) -> None:
    _run(command)
    verify_checkpoint("ours").raise_if_damaged()
    net, optimizer = _job()
    expected = dict(net.state_dict())
    if any(word in command for word in ("accelerate", "dcp", "torchtitan", "torchacc")):
        for name, parameter in net.named_parameters():
            expected |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    found = _tensors(Path("ours"))
    assert found.keys() == expected.keys()
    assert {name for name, tensor in found.items() if not torch.equal(tensor, expected[name])} == set()


def test_exports(workplace: Path) -> None:
    _run("import dcp ours")
    for command in COMMANDS:
        if not command.startswith("import"):
            _run(f"{command} --overwrite")
            expected, found = _tensors(Path("ours")), _tensors(Path("out"))
            if " --to " not in command or command.endswith("--to safetensors"):
                expected = {name: tensor for name, tensor in expected.items() if "/" not in name}
            assert found.keys() == expected.keys(), command
            assert {name for name, tensor in found.items() if not torch.equal(tensor, expected[name])} == set()
