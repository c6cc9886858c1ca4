"""What holds in environments that the default tests do not run in: PyTorch/XLA's torch, no extras, an installed wheel.

pytest tests/project/test_environments.py
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.launching import TRAIN

ROOT = Path(__file__).parents[2]


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` first on the path."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def torch_2_9(tmp_path: Path) -> Path:
    """A folder by which packages are found whose metadata say torch 2.9 and the torch_xla that goes with it."""
    for name, version in (("torch", "2.9.1"), ("torch_xla", "2.9.0")):
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path


def test_pytorch_xla_needs_nothing_that_needs_a_newer_torch(torch_2_9: Path) -> None:
    done = run_in(torch_2_9, "-c", "import fullshard.integrations.xla, fullshard.torchacc")
    assert done.returncode == 0, done.stderr


def test_the_engine_is_refused_there(torch_2_9: Path) -> None:
    done = run_in(torch_2_9, "-c", "from fullshard import fully_shard")
    assert "fullshard needs torch 2.11 or later, got 2.9.1" in done.stderr
    assert "use fullshard.integrations.xla" in done.stderr


# -- the wheel without the checkout, and without extras ---------------------------------------------------------


def needed(*extras: str) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions that `fullshard[extras]` needs, with what those need, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen = set()
    todo = [("fullshard", "")] + [("fullshard", extra) for extra in extras]
    while todo:
        name, extra = todo.pop()
        name = name.lower().replace("_", "-")
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(requirement.name, more) for more in ("", *requirement.extras)]
    del found["fullshard"]
    return found


def run(command: Sequence[str | Path], cwd: Path, timeout: float = 250) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def environment(folder: Path, *extras: str) -> Path:
    """Make an environment with the wheel and what it needs, but for `extras` without optional packages."""
    python = folder / "bin" / "python"
    assert run([sys.executable, "-m", "venv", "--without-pip", folder], ROOT) == ""
    assert run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "wheel"], ROOT)
    [wheel] = (folder / "wheel").glob("*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    said = run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], folder)
    assert "exit code" not in said, said
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for distribution in needed(*extras).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists() and not top.endswith(".pth"):
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    return python


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without extras."""
    return environment(tmp_path_factory.mktemp("bare"))


IMPORT_ALL = """
import importlib, pkgutil, sys
import fullshard
from fullshard.core.errors import MissingExtraError

for found in pkgutil.walk_packages(fullshard.__path__, "fullshard."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except MissingExtraError as error:
        print(f"{found.name}: {error.hint}")
print(fullshard.__file__)
"""


def test_every_module_of_the_wheel_imports_without_extras(bare: Path, tmp_path: Path) -> None:
    *lacking, home = run([bare, "-c", IMPORT_ALL], tmp_path).splitlines()
    assert lacking == [
        "fullshard.integrations.transformers.ema_callback: pip install 'fullshard[hf]'",
        "fullshard.recipes.sft: pip install 'fullshard[sft]'",
    ]
    assert Path(home).is_relative_to(bare.parents[1])


WANTING = """
import contextlib, sys
import fullshard
from fullshard.cli.main import main
from fullshard.core.errors import FullshardError
from fullshard.integrations import transformers

def command(words):
    sys.argv = ["fullshard", *words.split()]
    with contextlib.suppress(SystemExit):
        main()

for call in (
    lambda: fullshard.from_pretrained(None, "somebody/model"),
    lambda: fullshard.Accelerator(cpu=True, log_with="tensorboard"),
    lambda: transformers.Trainer(),
    lambda: transformers.SFTTrainer(),
    lambda: transformers.EMACallback(0.9),
):
    try:
        call()
    except FullshardError as error:
        print(error.hint)
for words in (
    "sft run.yaml --nproc 1",
    "train --steps 2 --nproc 1",
    "train --steps 2 --nproc 1 --no-plot",
):
    command(words)
"""


def test_what_wants_an_extra_names_it(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: somebody/model\n")
    said = run([bare, "-c", WANTING], tmp_path)
    named = re.findall(r"pip install 'fullshard\[(\w+)\]'", said)
    assert named == ["hf", "track", "hf", "sft", "hf", "sft", "plots", "hf"], said
    assert "Traceback" not in said, said


def test_the_wheel_trains_without_extras_and_without_the_checkout(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    program = bare.with_name("fullshard")
    assert "Usage" in run([program, "--help"], tmp_path)
    said = run([program, "launch", "--cpu", "--num_processes", "2", "train.py", ".", "2", "0"], tmp_path)
    assert "trained rank 1 of 2" in said, said


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_wheel_trains_the_default_model(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "hf", "plots")
    command: list[str | Path] = [python.with_name("fullshard"), "train", "--steps", "2"]
    command += ["--output-dir", tmp_path / "out"]
    said = run(command, tmp_path, timeout=800)
    assert (tmp_path / "out" / "report.html").exists() and "exit code" not in said, said
