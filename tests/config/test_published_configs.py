"""Configurations as documents print them launch unchanged, but for the number of processes.

Those that ask for PyTorch/XLA are refused where it is not installed, and launch without that line.

The test cuts every YAML block out of the documents itself, marked as such or not. They are those in
`fixtures/documents`, or all files of the directory that $PUBLISHED_DOCUMENTS names.

pytest tests/config/test_published_configs.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
DOCUMENTS = Path(os.environ.get("PUBLISHED_DOCUMENTS", ROOT / "tests" / "fixtures" / "documents"))

_FENCED = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"[a-z_0-9]+:( |$)")
_LINE = re.compile(r"[a-z_0-9]+:( .*)?|  +\S.*|#.*")

SAID = {
    "fsdp_backward_prefetch_policy": "is translated to sharding.backward_prefetch = BACKWARD_PRE",
    "fsdp_use_orig_params": "has no effect here: the original parameters are always kept",
    "same_network": "has no effect here: hosts connect to main_process_ip",
    "xla_fsdp_grad_ckpt": "is translated to sharding.activation_checkpointing = true",
}
"""What is printed about a key, if the block has it."""


def blocks(document: str) -> Iterator[str]:
    """The YAML in a document: in fences called so, and lines outside of fences that are nothing else."""
    for found in _FENCED.finditer(document):
        if found[1] in ("yaml", "yml"):
            yield found[2]
    run: list[str] = []
    for line in [*_FENCED.sub("", document).splitlines(), ""]:
        if _LINE.fullmatch(line.rstrip()) and (run or _KEY.match(line)):
            run.append(line.rstrip())
            continue
        if len(run) >= 3:
            yield "\n".join(run) + "\n"
        run = []


def every_block() -> list[Any]:
    """The different blocks of all documents, each with the name of its document."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in DOCUMENTS.iterdir() if path.is_file()):
        for number, block in enumerate(blocks(path.read_text(encoding="utf-8")), 1):
            meaning = json.dumps(_content(block), sort_keys=True)
            found.setdefault(meaning, pytest.param(block, id=f"{path.stem}-{number}"))
    return list(found.values())


def _content(block: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load(block)
    return content


def test_the_documents_have_the_blocks() -> None:
    assert len(every_block()) >= 5


@pytest.mark.full  # each takes seconds
@pytest.mark.parametrize("block", every_block())
def test_it_launches_and_trains_sharded(block: str, tmp_path: Path) -> None:
    text = re.sub(r"^num_processes: .*\n", "", block, flags=re.MULTILINE) + "num_processes: 2\n"
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    dropped = ("ACCELERATE_", "FSDP_", "FULLSHARD_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-c",
        "from fullshard.cli.main import main; main()",
        "launch",
        "--config_file",
        str(path),
    ]
    command += [str(ROOT / "tests" / "scripts" / "three_steps.py"), str(tmp_path)]

    def launch() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)

    if re.search(r"^xla: ", block, flags=re.MULTILINE):
        refused = launch()
        assert refused.returncode != 0
        assert re.search(r"run\.yaml:1:1: xla: true requests PyTorch/XLA, but .* is not installed", refused.stderr)
        assert "or remove it" in refused.stderr
        path.write_text(re.sub(r"^xla: .*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    run = launch()
    assert run.returncode == 0, run.stdout + run.stderr

    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8")) for rank in (0, 1)]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert sum(rank["share"] for rank in ranks) == pytest.approx(1, abs=0.02), "each rank holds its half"
    assert all(0.4 < rank["share"] < 0.6 for rank in ranks)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert len(set(ranks[0]["losses"])) == 3, "no step changed the model"

    content = _content(block)
    keys = content | content.get("fsdp_config", {})
    assert ranks[0]["mode"] == keys.get("mixed_precision", "no")
    assert ranks[0]["offload"] == keys.get("fsdp_offload_params", False)
    assert ranks[0]["checkpointing"] == keys.get("xla_fsdp_grad_ckpt", False)
    lines = run.stderr.splitlines()
    for key, said in SAID.items():
        assert sum(f": {key} {said}" in line for line in lines) == (key in keys), f"{key}: {run.stderr}"
