"""The examples do what examples/README.md says, by the commands that it gives: they end well, and they learn.

pytest tests/project/test_examples.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import nbclient
import nbformat
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from fullshard.cli.main import app
from tests.launching import LAUNCH, environment, free_port, run_python, started

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
SCRIPTS = [command for command in COMMANDS if ".py" in command]
ALONE = [command for command in SCRIPTS if "resume.py" not in command]
SAVES = {"dpo_lora": "adapter_model", "qlora": "adapter_model"}
SAVES |= dict.fromkeys(("sft.py", "rl_loop", "--output"), "model")
"""What examples leave, by a word of their commands."""
LOSS = re.compile(r"(?<!_)\bloss'?:? +'?(\d+\.\d+(?:e-\d+)?)")
REWARD = re.compile(r"\breward'?:? +'?(\d+\.\d+(?:e-\d+)?)")


def make_place(directory: Path) -> Path:
    """Something like the repository's root, to which the examples write; and `fullshard`."""
    shutil.copytree(EXAMPLES, directory / "examples")
    (directory / "bin").mkdir()
    program = directory / "bin" / "fullshard"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{LAUNCH[2]}' \"$@\"\n")
    program.chmod(0o755)
    return directory


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def run(command: str, place: Path, *, proof: bool = True) -> str:
    """What it prints; it ends well, and has proved that the model was sharded."""
    program, *words = shlex.split(command)
    assert program == "fullshard"
    done = run_python([*LAUNCH[:3], *words], place, _environment(place), 280)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-4000:])
    output = done.stdout + done.stderr
    assert not proof or "sharded over 2 ranks" in output, output
    return output


def _environment(place: Path, **variables: str) -> dict[str, str]:
    found = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    sources = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return environment(PATH=found, PYTHONPATH=sources, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", **variables)


def falls(output: str, to: float = 0.9) -> list[float]:
    """The losses that were printed, of which the last is at most so much of the first."""
    losses = [float(number) for number in LOSS.findall(output)]
    assert len(losses) >= 3, output
    assert losses[-1] < to * losses[0], losses
    return losses


@pytest.mark.full
@pytest.mark.parametrize("command", ALONE, ids=[re.search(r"(\w+)\.py", c)[1] for c in ALONE])  # type: ignore[index]
def test_it_learns(place: Path, command: str) -> None:
    output = run(command, place, proof="torchacc" not in command and "count_gathers" not in command)
    if "count_gathers" in command:
        assert output.count("the model: 1, 0: 2, 1: 2") == 2, output
    elif "grpo" in command or "rl_loop" in command:
        rewards = [float(number) for number in REWARD.findall(output)]
        assert rewards[-1] > rewards[0] + 0.2, output
        assert "rl_loop" in command or re.search(r"the engine says: 3\+4=\S", output), output
    else:
        falls(output)
    for word, name in SAVES.items():
        if word in command:
            [directory] = [path.parent for path in (place / "out").rglob(f"{name}.safetensors")]
            if name == "model":
                from transformers import AutoModelForCausalLM

                assert AutoModelForCausalLM.from_pretrained(directory).num_parameters() > 100_000


@pytest.mark.full
def test_a_run_is_resumed_with_another_number_of_ranks(place: Path) -> None:
    first, second = (command for command in SCRIPTS if "resume.py" in command)
    losses = falls(run(first, place))
    output = run(second, place, proof=False)
    assert "resumed after step 30, with world size 1\n" in output
    assert "step 40 " in output and "step 60 " in output and "step 1 " not in output
    assert max(falls(output, to=1.1)) < losses[0]


@pytest.mark.full
def test_trainer_is_resumed(place: Path) -> None:
    [first] = (command for command in SCRIPTS if command.endswith("trainer.py"))
    falls(run(f"{first} --max_steps 30 --save_steps 20", place))
    for steps, resume in ((40, "true"), (50, "out/trainer/checkpoint-40")):
        output = run(f"{first} --max_steps {steps} --save_steps 20 --resume_from_checkpoint {resume}", place)
        assert re.search(r"fullshard: resume: from \S+/checkpoint-\d+, after step \d+\n", output)
        assert len(LOSS.findall(output)) == 1, output
    assert len(LOSS.findall(run(f"{first} --max_steps 20 --resume_from_checkpoint False", place))) == 2


@pytest.mark.full
def test_two_hosts(place: Path) -> None:
    """Both on this one, of one process each: two launchers that meet at one address."""
    port = str(free_port())
    script = place / "two_hosts.sh"
    text = (EXAMPLES / "two_hosts.sh").read_text()
    script.write_text(text.replace('"$(dirname "$0")/', f'--main_process_port {port} "examples/'))
    variables = _environment(place, PROCESSES="2")
    first = started("sh", str(script), "127.0.0.1", cwd=place, **variables)
    with first as a, started("sh", str(script), "127.0.0.1", cwd=place, **variables) as b:
        outputs = [process.communicate(timeout=200)[0] for process in (a, b)]
        assert (a.returncode, b.returncode) == (0, 0), outputs
    assert "sharded over 2 ranks" in "".join(outputs)
    falls("".join(outputs))


SRUN = """#!/bin/sh
echo "srun $*"
while [ "${1#--}" != "$1" ]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_NODEID=$task "$@" & tasks="$tasks $!"; done
(while [ ! -e limit ] && kill -0 $tasks; do sleep 0.1; done 2>/dev/null; [ ! -e limit ] || kill -USR1 $tasks) &
code=0
for task in $tasks; do wait $task || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*"; rm limit
"""


@pytest.mark.full
def test_the_batch_script_saves_before_the_limit_and_goes_on(place: Path) -> None:
    """`srun` and `scontrol` are programs here that do what Slurm's would on two hosts; both hosts are this one."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    lines = (EXAMPLES / "slurm.sh").read_text().splitlines()
    found = [re.match(r"#SBATCH --([\w-]+)=?(\S*)", line) for line in lines]
    asked = {line[1]: line[2] for line in found if line is not None}
    assert (asked["nodes"], asked["ntasks-per-node"], asked["signal"]) == ("2", "1", "USR1@120")
    job = str(10000 + free_port() % 10000)
    slurm = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_JOB_NODELIST": "localhost",
    }
    with started("bash", "examples/slurm.sh", cwd=place, **_environment(place, **slurm)) as first:
        assert first.stdout is not None
        before = []
        for line in first.stdout:
            before.append(line)
            if line.startswith("step 10 "):
                (place / "limit").touch()
        assert first.wait(timeout=100) == 75, before
    assert before[0].startswith("srun --ntasks-per-node=1 --cpus-per-task=3 --kill-on-bad-exit=1 fullshard launch")
    assert before[-1] == f"scontrol requeue {job}\n"
    [saved] = (place / "out" / "resume").glob("step-*")
    reached = int(saved.name.removeprefix("step-"))
    again = _environment(place, **slurm, STEPS=str(reached + 10))
    with started("bash", "examples/slurm.sh", cwd=place, **again) as second:
        after, _ = second.communicate(timeout=200)
    assert second.returncode == 0, after
    assert f"resumed after step {reached}, with world size 4\n" in after
    falls("".join(before) + after)


CONTAINER = {
    "type": "object",
    "required": ["image", "command"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        "resources": {"type": "object", "properties": {"limits": {"type": "object"}}, "additionalProperties": False},
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
    "additionalProperties": False,
}
REPLICAS = {
    "type": "object",
    "required": ["replicas", "template"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {
            "type": "object",
            "required": ["spec"],
            "properties": {
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": {
                        "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                        "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
                    },
                    "additionalProperties": False,
                }
            },
        },
    },
    "additionalProperties": False,
}
SPECS: dict[str, dict[str, Any]] = {
    "kubeflow.org/v1 PyTorchJob": {
        "type": "object",
        "required": ["pytorchReplicaSpecs"],
        "properties": {
            "pytorchReplicaSpecs": {
                "type": "object",
                "required": ["Master"],
                "properties": {"Master": REPLICAS, "Worker": REPLICAS},
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "type": "object",
        "required": ["runtimeRef"],
        "properties": {
            "runtimeRef": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            "trainer": {
                "type": "object",
                "properties": {
                    "image": {"type": "string"},
                    "numNodes": {"type": "integer", "minimum": 1},
                    "numProcPerNode": {"type": ["integer", "string"]},
                    "command": {"type": "array", "items": {"type": "string"}},
                    "args": {"type": "array", "items": {"type": "string"}},
                    "resourcesPerNode": {
                        "type": "object",
                        "properties": {"limits": {"type": "object"}, "requests": {"type": "object"}},
                        "additionalProperties": False,
                    },
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
}
"""What the operators' definitions of these resources say about the fields that the examples use, by hand."""
TOLD = {
    "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29400", "RANK": "0",
}  # fmt: skip
"""What a pod is told, as on a job of one host."""


@pytest.mark.parametrize("name", ["kubernetes_pytorchjob.yaml", "kubernetes_trainjob.yaml"])
def test_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = YAML(typ="safe").load(EXAMPLES / name)
    jsonschema.validate(content["spec"], SPECS[f"{content['apiVersion']} {content['kind']}"])
    assert re.fullmatch(r"[a-z0-9-]{1,40}", content["metadata"]["name"])
    if content["kind"] == "TrainJob":
        words = [*content["spec"]["trainer"]["command"], *content["spec"]["trainer"]["args"]]
    else:
        roles = content["spec"]["pytorchReplicaSpecs"]
        assert roles["Master"]["template"] == roles["Worker"]["template"]
        words = roles["Master"]["template"]["spec"]["containers"][0]["command"]
        assert words[words.index("--main_process_ip") + 1] == f"{content['metadata']['name']}-master-0"
    told = [re.sub(r"\$\((\w+)\)", lambda found: TOLD[found[1]], word) for word in words]
    launched("--dry_run", "--device", "cpu", *told[2:], monkeypatch=monkeypatch)


def launched(*words: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `fullshard launch` prints that starts nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    result = CliRunner().invoke(app, ["launch", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["kubernetes", "trainjob"])
def test_what_launch_prints_has_the_same_shape(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--num_machines 2 --num_processes 16 --device cuda --mixed_precision bf16 --print"
    words = [*flags.split(), kind, "examples/own_loop.py", "--out", "$(date)"]
    content = YAML(typ="safe").load(launched(*words, monkeypatch=monkeypatch))
    jsonschema.validate(content["spec"], SPECS[f"{content['apiVersion']} {content['kind']}"])
    if kind == "trainjob":
        trainer = content["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["resourcesPerNode"]["limits"]) == (2, {"nvidia.com/gpu": 8})
        assert trainer["args"] == ["examples/own_loop.py", "--out", "$$(date)"]
        assert trainer["command"][-1] == "$(PET_MASTER_PORT)" and "bf16" in trainer["command"]


@pytest.mark.full
def test_the_notebook(place: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(place / "examples")}}
    )
    client.execute(env=_environment(place))
    output = "".join(part.get("text", "") for cell in notebook.cells for part in cell.get("outputs", []))
    falls(output)
    assert re.search(r"\d+ tensors", output)


def test_every_example_is_in_the_table() -> None:
    listed = set(re.findall(r"\]\(([\w.]+)\)", PAGE))
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert listed == files
    assert len(SCRIPTS) == 14
