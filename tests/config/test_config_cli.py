"""`fullshard config`: default, check, explain, convert, schema; nothing is overwritten and no torch is imported.

Run: pytest tests/config/test_config_cli.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from fullshard.config.load import load_file
from fullshard.config.resolve import resolve
from fullshard.config.schema import GROUPS, RunConfig
from tests.commands import run_here

ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_sharding_strategy: 2
  fsdp_transformer_layer_cls_to_wrap: "A, B"
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`fullshard config ...` there, on a wide terminal."""
    environ = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "HF_HOME": str(directory / "hf")}
    return run_here("config", *arguments, cwd=directory, environ=environ)


@pytest.fixture
def accelerate_file(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE)
    return path


@pytest.mark.parametrize("words", [["default"], ["check", "run.yaml"], ["explain", "run.yaml"], ["schema"]])
def test_torch_is_not_imported(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(ACCELERATE)
    code = "import sys\nfrom fullshard.cli.main import main\ntry: main()\nfinally: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "config", *words], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout


def test_default_is_written_once(tmp_path: Path) -> None:
    printed = run(tmp_path, "default").stdout
    assert run(tmp_path, "default", "--output", "run.yaml").returncode == 0
    path = tmp_path / "run.yaml"
    assert path.read_text() == printed
    assert resolve([load_file(path)]).config == RunConfig()

    path.write_text("mine")
    refused = run(tmp_path, "default", "--output", "run.yaml")
    assert (refused.returncode, path.read_text()) == (2, "mine")
    assert refused.stderr.startswith("ConfigError: run.yaml already exists\nhint: ")
    assert run(tmp_path, "default", "-o", "run.yaml", "--overwrite").returncode == 0
    assert path.read_text() == printed
    assert (
        "cannot write no/such.yaml: No such file or directory" in run(tmp_path, "default", "-o", "no/such.yaml").stderr
    )


def test_check(tmp_path: Path, accelerate_file: Path) -> None:
    (tmp_path / "bad.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_ofload_params: true\n")
    fine = run(tmp_path, "check", accelerate_file.name)
    assert fine.returncode == 0
    assert "accelerate.yaml: fine" in fine.stdout
    assert (
        "accelerate.yaml:5:3: fsdp_backward_prefetch_policy is translated to sharding.backward_prefetch" in fine.stdout
    )

    both = run(tmp_path, "check", "bad.yaml", accelerate_file.name)
    assert both.returncode == 2
    assert "accelerate.yaml: fine" in both.stdout
    assert "bad.yaml:3:3: unknown key 'fsdp_ofload_params'" in both.stderr
    assert "did you mean 'fsdp_offload_params'?" in both.stderr
    assert run(tmp_path, "check").returncode == 2


def test_explain_says_every_value_and_where_it_comes_from(tmp_path: Path, accelerate_file: Path) -> None:
    text = run(tmp_path, "explain", accelerate_file.name).stdout
    assert max(map(len, text.splitlines())) <= 80
    lines = text.replace("\n  ", " ").splitlines()
    by_path = {line.split()[0]: line.split() for line in lines}
    for group in GROUPS:
        for name in type(getattr(RunConfig(), group)).model_fields:
            assert f"{group}.{name}" in by_path
    assert " ".join(by_path["precision.mode"]) == "precision.mode bf16 accelerate.yaml:2:1 (mixed_precision) default no"
    assert by_path["launch.debug"] == ["launch.debug", "false", "default"]
    assert "follows from other settings" in next(line for line in lines if line.startswith("sharding.wrap "))
    assert any(line.startswith("note: accelerate.yaml:5:3: fsdp_backward_prefetch_policy") for line in lines)


def test_explain_without_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "fullshard.yaml").write_text("launch:\n  num_processes: 7\n")
    done = run(tmp_path, "explain")
    assert done.stdout.startswith("no configuration file was given\n")
    assert not any("7" in line for line in done.stdout.splitlines() if line.startswith("launch.num_processes "))


def test_a_default_file_is_used_only_with_a_word_about_it(tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(ACCELERATE)
    done = run(tmp_path, "explain")
    assert "launch.num_processes" in done.stdout
    assert "default_config.yaml:3:1" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "default_config.yaml, which `accelerate config` wrote" in done.stderr
    assert "default_config.yaml" not in run(tmp_path, "explain", "--config_file", "none").stdout


@pytest.mark.parametrize(
    "arguments",
    [("accelerate.yaml", "--num_processes", "8", "--debug"), ("--debug", "--num-processes=8", "accelerate.yaml")],
)
def test_explain_takes_the_flags_of_launch(tmp_path: Path, accelerate_file: Path, arguments: tuple[str, ...]) -> None:
    rows = {row["path"]: row for row in json.loads(run(tmp_path, "explain", "--json", *arguments).stdout)["settings"]}
    number, debug, mode = (rows[path] for path in ("launch.num_processes", "launch.debug", "precision.mode"))
    assert (number["value"], debug["value"], mode["value"]) == (8, True, "bf16")
    assert (debug["source"], mode["source"]) == ("--debug", "accelerate.yaml:2:1")
    wrong = run(tmp_path, "explain", *arguments, "--num_proceses", "3")
    assert (wrong.returncode, "did you mean --num_processes?" in wrong.stderr) == (2, True)


def test_explain_in_json(tmp_path: Path, accelerate_file: Path) -> None:
    found = json.loads(run(tmp_path, "explain", "--json", accelerate_file.name).stdout)
    rows = {row["path"]: row for row in found["settings"]}
    assert rows["sharding.wrap_classes"] == {
        "path": "sharding.wrap_classes",
        "value": ["A", "B"],
        "default": [],
        "source": "accelerate.yaml:7:3",
        "written_as": "fsdp_transformer_layer_cls_to_wrap",
        "description": rows["sharding.wrap_classes"]["description"],
    }
    assert len(found["notes"]) == 1


def test_convert(tmp_path: Path, accelerate_file: Path) -> None:
    done = run(tmp_path, "convert", accelerate_file.name, "-o", "native.yaml")
    assert done.returncode == 0
    assert "note: accelerate.yaml:5:3: fsdp_backward_prefetch_policy is translated" in done.stderr
    assert resolve([load_file(tmp_path / "native.yaml")]).config == resolve([load_file(accelerate_file)]).config
    assert "No such option: --to" in run(tmp_path, "convert", "native.yaml", "--to", "accelerate").stderr


def test_schema_describes_what_is_written(tmp_path: Path) -> None:
    schema = json.loads(run(tmp_path, "schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(YAML(typ="safe").load(run(tmp_path, "default").stdout), schema)


def test_the_questionnaire_needs_a_terminal(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert "fullshard config default" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_subcommand(tmp_path: Path) -> None:
    text = run(tmp_path, "--help").stdout
    for name in ("default", "check", "explain", "convert", "schema"):
        assert f"  {name} " in text
