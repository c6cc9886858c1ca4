"""The command line: quick to start, one option per setting, errors as messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fullshard
from fullshard.cli.main import COMMANDS, app, load_command
from fullshard.core.errors import ConfigError
from fullshard.recipes.arguments import TrainArguments
from tests.commands import run_here


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "command",
    [["--help"], ["train", "--help"], ["config", "--help"], ["config", "explain"], ["doctor", "--help"], ["--version"]],
)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    """`--help` is quick because torch, transformers and rich are not imported."""
    code = (
        "import sys\n"
        "from fullshard.cli.main import app\n"
        "try: app()\n"
        "finally: print('HEAVY', sorted({'torch', 'transformers', 'rich', 'numpy'} & sys.modules.keys()))"
    )
    done = _python(code, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("name", ["launch", "plan", "ckpt"])
def test_a_command_imports_its_own_module_alone(name: str) -> None:
    code = (
        "import sys\n"
        "from fullshard.cli.main import app\n"
        "try: app()\n"
        "finally: print('OWN', sorted(m for m in sys.modules if m.startswith('fullshard.cli.')))"
    )
    done = _python(code, name, "--help")
    assert done.returncode == 0, done.stderr
    own = sorted({"fullshard.cli.main", "fullshard.cli.options", f"fullshard.cli.{name}"})
    assert done.stdout.splitlines()[-1] == f"OWN {own}"


def test_a_wrong_command_gets_a_suggestion() -> None:
    done = run_here("lanch")
    assert done.returncode == 2
    assert "'launch'" in done.stderr


def test_import_loads_no_torch() -> None:
    looks = "dir(fullshard); hasattr(fullshard, '__wrapped__')"  # what doctest and inspect ask of any module
    done = _python(f"import sys, fullshard; {looks}; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_commands_that_need_torch_say_so_if_it_is_not_installed() -> None:
    """Some machines on which runs are planned have none."""
    code = "import sys; sys.modules['torch'] = None\nfrom fullshard.cli.main import main; main()"
    doctor, recipes = _python(code, "doctor"), _python(code, "recipe", "list")
    assert (doctor.returncode, recipes.returncode) == (2, 0)
    assert doctor.stderr == (
        "ModuleNotFoundError: this command needs torch, which is not installed\nhint: pip install torch\n"
    )


def test_exported_names_are_sorted_and_exist() -> None:
    assert fullshard.__all__ == sorted(fullshard.__all__)
    for name in fullshard.__all__:
        assert getattr(fullshard, name) is not None
        assert name in dir(fullshard)
    with pytest.raises(AttributeError, match="has no attribute 'fully_shrd'"):
        getattr(fullshard, "fully_shrd")  # noqa: B009


def test_every_setting_is_an_option() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], terminal_width=200).output
    for name, field in TrainArguments.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description, name
        if field.annotation is bool:
            assert f"--no-{name.replace('_', '-')}" in text


@pytest.mark.parametrize("words", [["plan", "--model"], ["launch", "--log_dir"]])
def test_words_that_are_no_text_are_refused(tmp_path: Path, words: list[str]) -> None:
    """The name of a file may be any bytes; Python has a surrogate for each that is no UTF-8."""
    done = run_here(*words, "\udcff", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(r"ConfigError: the argument '\udcff' is not valid UTF-8")


def test_version() -> None:
    assert run_here("--version").stdout == f"fullshard {fullshard.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: Input should be greater than or equal to 1 (got 0)"),
        (["--warmup-steps", "9", "--steps", "3"], "--warmup-steps 9 is more than --steps 3"),
        (["--strategy", "FULL"], "--strategy: unknown sharding strategy 'FULL'\nhint: use one of FULL_SHARD (1)"),
        (["--lr", "inf"], "--lr: Input should be a finite number (got inf)"),
        (["-n", "0"], "--nproc must be at least 1, got 0"),
        (["--stpes", "1"], "No such option: --stpes"),
        (["--resume", "never"], "fullshard train has no option --resume\nhint: the run resumes from its newest "),
        (["--steps", "3", "--overwrite"], "has no option --overwrite\nhint: use another --output-dir or remove its "),
        (["--async_save"], "has no option --async-save\nhint: use Accelerator"),
        (["--tensorboard"], "has no option --tensorboard\nhint: use --log-with tensorboard"),
        (["--prompt=x"], "has no option --prompt\nhint: the sample continues the data"),
        (["--precision", "fp8"], "'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], message: str) -> None:
    done = run_here("train", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file of the user's that the system refuses is a message as any other, and no traceback."""
    (tmp_path / "file").touch()
    done = run_here("plan", "-m", "7B", "-d", "8xH100", "--write", str(tmp_path / "file" / "x" / "plan.yaml"))
    message = f"ConfigError: cannot write {tmp_path}/file/x/plan.yaml: Not a directory\nhint: choose another file\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    ("error", "words", "is_a_message"),
    [
        (FileNotFoundError(2, "None such", "mine/part"), ["mine"], True),
        (FileNotFoundError(2, "None such", "mine/part"), ["--file=./mine/part"], True),
        (FileNotFoundError(2, "None such", "/usr/lib/ours.so"), ["mine", "-x", ""], False),
        (ChildProcessError(2, "None such", "ours"), ["mine"], False),
        (OSError(5, None, "mine"), ["mine"], False),
        (OSError(5, "Broken", 3), ["3"], False),
    ],
)
def test_a_fault_of_no_file_that_is_named_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, error: OSError, words: list[str], is_a_message: bool
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("fullshard.cli.main.app", fail)
    monkeypatch.setattr("fullshard.cli.main.check_words", lambda words: None)
    if is_a_message:
        assert run_here(*words).stderr == "FileNotFoundError: mine/part: None such\n"
    else:
        with pytest.raises(OSError):
            run_here(*words)


def test_nproc_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["train", "--nproc", "2"])
    assert isinstance(result.exception, ConfigError)
    assert "--nproc has no effect because" in str(result.exception)


def test_arguments_survive_the_command_line(tmp_path: Path) -> None:
    """What the launcher writes is what the workers read, every field of it."""
    arguments = TrainArguments.of({"lr": 3e-4, "output_dir": tmp_path, "wrap": "A,B", "steps": 7})
    assert TrainArguments.model_validate_json(arguments.model_dump_json()) == arguments


def _helps() -> Iterator[str]:
    for name in COMMANDS:
        inner = getattr(load_command(name), "commands", {})
        for words in ([name], *([name, other] for other in inner)):
            yield CliRunner().invoke(app, [*words, "--help"], terminal_width=80).output


def test_every_help_page_fits_80_columns() -> None:
    pages = list(_helps())
    assert len(pages) > 15
    assert [line for page in pages for line in page.splitlines() if len(line) > 80] == []
    lists = [page.partition("Commands:\n")[2] for page in (*pages, CliRunner().invoke(app, ["--help"]).output)]
    assert sum(map(bool, lists)) == 4
    assert [line for page in lists for line in page.splitlines() if line.endswith("...")] == []  # none is cut


def test_a_plan_breaks_no_line_in_a_pipe_and_fits_80_columns_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "plan",
        "--model",
        "Llama-3.1-8B",
        "--devices",
        "8xH100",
        "--micro-batch",
        "2",
        "--seq-len",
        "8192",
        "--details",
    ]
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = CliRunner().invoke(app, words).output.splitlines()
    assert [line for line in piped if line.startswith("8 x H100") and line.endswith("checkpointing none")]
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, words).output.splitlines()
    assert max(map(len, shown)) <= 80 < max(map(len, piped))
    speed = re.search(r"[0-9,]+ tokens/s", "\n".join(piped))
    assert speed
    for word in ("main weights", speed[0], "does not fit", "full activation checkpointing"):
        assert any(word in line for line in piped) and any(word in line for line in shown)


@pytest.mark.parametrize(
    "words", ["recipe list", "plan -m Llama-3.1-8B -d 8xH100", "plan -m Llama-3.1-8B -d 8xH100 --details", "launch -h"]
)
def test_usual_output_fits_80_columns_and_has_no_colors_in_a_pipe(words: str) -> None:
    shown = run_here(*words.split(), environ={**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}).stdout
    assert len(shown.splitlines()) > 5 and max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sharding: {strategi: FULL_SHARD}", r"run.yaml:3:12: unknown key 'strategi' in the section 'sharding'"),
        ("sharding: {backward_prefetch: X}", r"run.yaml:3:12: setting 'backward_prefetch'"),
        ("training: {step_in_backward: true, gradient_clipping: 1.0}", r"run.yaml:3:\d+"),
    ],
)
def test_a_mistake_in_a_file_of_sft_is_found_there_before_anything_starts(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: org/name\ndataset_name: org/data\n{line}\n")
    result = CliRunner().invoke(app, ["sft", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert re.search(message, str(result.exception)), result.exception


def test_the_help_of_sft_has_its_flags() -> None:
    told = CliRunner().invoke(app, ["sft", "--help-all"]).output
    assert all(flag in told for flag in ("--use_peft", "reentrant form of", "--per_device_train_batch_size"))


def test_options_may_be_written_with_underscores() -> None:
    result = CliRunner().invoke(app, ["train", "--batch_size=0"])
    assert "--batch-size: Input should be greater than or equal to 1" in str(result.exception)
    assert "--batch-size" in CliRunner().invoke(app, ["train", "--batch_sise", "3"]).output
