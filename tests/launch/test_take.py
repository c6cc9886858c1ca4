"""`fullshard launch --take fully_shard` and `python -m fullshard.take`: a program's names of torch are fullshard's.

Run: pytest tests/launch/test_take.py. Programs of others run so in tests/others/test_taken_programs.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp

from fullshard.config.flags import parse
from fullshard.core.errors import ConfigError
from fullshard.launch.plan import make_plan
from fullshard.launch.take import NAMES, take
from fullshard.take import main
from tests.launching import environment, run_python

PROGRAM = """
import sys
import torch
import torch.distributed.fsdp as fsdp
from torch.distributed._composable.fsdp import FSDPModule as older, fully_shard
from torch.distributed._composable.fsdp.fully_shard import fully_shard as oldest
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import fully_shard as inner
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy as policy
from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule as innermost
import fullshard

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = fsdp.fully_shard(torch.nn.Linear(3, 2), mp_policy=MixedPrecisionPolicy(torch.float32))
model(torch.ones(1, 3)).sum().backward()
assert fsdp.fully_shard is fully_shard is oldest is inner is fullshard.fully_shard
assert FSDPModule is older is innermost is fullshard.FSDPModule and isinstance(model, FSDPModule)
assert MixedPrecisionPolicy is policy is fullshard.MixedPrecisionPolicy
assert all(getattr(fsdp, name) is getattr(fullshard, name) for name in sys.argv[1:])
assert DataParallelMeshDims is fullshard.DataParallelMeshDims  # torch's own, so it needs no replacement
assert not issubclass(ReplicateModule, FSDPModule)  # torch's engine of replicas is torch's
assert type(model.weight).__module__.startswith("fullshard.") and __name__ == "__main__"
print("ran", sys.argv[0])
"""


def test_a_program_gets_the_names_of_fullshard(tmp_path: Path) -> None:
    """Whichever of torch's modules it imports them from. One line says so; nothing else is said."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "fullshard.take", "program.py", *NAMES]
    done = run_python(words, tmp_path, environment(RANK="0"), 60)
    assert (done.returncode, done.stdout) == (0, "ran program.py\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("fullshard: in this program, ") and all(name in line for name in NAMES)


@pytest.mark.parametrize("words", [[], ["-m"], ["--nproc_per_node", "2", "program.py"]])
def test_a_command_without_a_program(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["take.py", *words])
    with pytest.raises(SystemExit, match=r"usage: python -m fullshard\.take"):
        main()


def test_the_launcher_tells_its_processes() -> None:
    plan = make_plan(parse(["--cpu", "--take", "fully_shard", "train.py"]), [], {})
    assert plan.variables["FULLSHARD_TAKE"] == "fully_shard"
    assert "FULLSHARD_TAKE" not in make_plan(parse(["--cpu", "train.py"]), [], {}).variables


@pytest.mark.parametrize("kind", [["--take", "fuly_shard"], ["--take=fully_shard", "--no_python"]])
def test_what_the_launcher_refuses(kind: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--take has .*\nhint: (use none or fully_shard|start Python inside)"):
        make_plan(parse(["--cpu", *kind, "train.py"]), [], {})


def test_an_unknown_word_and_a_torch_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TAKE", "fsdp")
    with pytest.raises(ConfigError, match="invalid value 'fsdp'\nhint: use none or fully_shard"):
        take()
    monkeypatch.setenv("FULLSHARD_TAKE", "fully_shard")
    before = torch.distributed.fsdp.fully_shard
    monkeypatch.delattr(torch.distributed.fsdp, "share_comm_ctx")
    with pytest.raises(ConfigError, match=r"torch \S+ has no share_comm_ctx, "):
        take()
    assert torch.distributed.fsdp.fully_shard is before
