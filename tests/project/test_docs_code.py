"""Every block of Python in the documentation runs, after a few lines that make what it takes for granted.

A page that has a block more than there is written here fails. What `docs/tour.md` shows are lines of the engine, which
`test_tour.py` looks for.

pytest tests/project/test_docs_code.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import preload, run_ranks
from tests.launching import environment
from tests.project.test_docs_pages import DOCS, NAMES, PAGES, ROOT, blocks

preload("tests.trainers")

WORLD = """
import os, types
import torch, fullshard
from torch import nn
from fullshard import Accelerator, FullyShardedDataParallelPlugin, OffloadPolicy, shard_model
from fullshard.checkpoint import export_hf, load_checkpoint, save_checkpoint, whole_checkpoints
from torch.utils.data import DataLoader

world_size = int(os.environ["WORLD_SIZE"])
directory = "out/mine"
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
model.layers = list(model)
layers = [block[0] for block in model.layers]
loss_of = lambda model, batch: model(batch).square().mean()
loader = DataLoader(torch.arange(256.0).view(32, 8) / 256, batch_size=2)
batch = next(iter(loader))
"""
"""What a script has."""
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
SCHEDULER = "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
SHARDED = "shard_model(model, unit_modules=layers)\n" + OPTIMIZER + SCHEDULER
PREPARED = OPTIMIZER + "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
TRAINED = "loss_of(model, batch).backward(); optimizer.step()\n"
LLAMA = "from tests.trainers import build\nmodel = build()\nids = torch.arange(12).view(1, 12)\n"
SAVED = LLAMA + "model.save_pretrained('path/or/hub-name')\n"
UNSHARDED = (
    OPTIMIZER
    + SCHEDULER
    + """
from safetensors.torch import save_model
accelerator = Accelerator()
for place in ("epoch_0", "checkpoint-500"):
    os.makedirs(place)
    save_model(model, place + "/model.safetensors")
    torch.save(optimizer.state_dict(), place + "/optimizer.bin")
    torch.save(scheduler.state_dict(), place + "/scheduler.bin")
"""
)
IMPORTED = """
from fullshard.checkpoint.offline import open_source, write_native
with open_source("epoch_0") as source:
    write_native(source, "ours", world_size=2)
model, loader = accelerator.prepare(model, loader)
"""
TORCHACC = """
from fullshard import torchacc
class GPT2Block(nn.Sequential): pass
model = nn.Sequential(GPT2Block(*layers))
loader = DataLoader(list(torch.arange(256.0).view(32, 8) / 256), batch_size=2)
"""
MESHES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from fullshard import ParallelismConfig, fully_shard
dp, tp, ep = 1, 2, 2
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, hidden):
        return self.down(self.up(hidden).tanh())
"""

SPLIT = """
def split(name, module, mesh):
    for key, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])))
"""

# For each page what its blocks stand on, one after the other.
BEFORE: dict[str, list[str]] = {
    "README.md": ["", OPTIMIZER],
    "docs/checkpoints.md": [SHARDED + "engine = types.SimpleNamespace(load_weights=list)\n"],
    "docs/howto/disk-full.md": [
        SHARDED + "step = 1\n",
        "from fullshard.core.errors import CheckpointError\naccelerator = Accelerator()\nstep = 1\n" + PREPARED,
    ],
    "docs/howto/from-accelerate.md": [UNSHARDED + IMPORTED.replace("epoch_0", "checkpoint-500"), ""],
    "docs/howto/from-deepspeed.md": [OPTIMIZER],
    "docs/howto/hf-weights.md": [LLAMA + "shard_model(model, unit_modules=list(model.model.layers))\n", ""],
    "docs/howto/own-loop.md": [""],
    "docs/howto/resume.md": ["accelerator = Accelerator()\n" + OPTIMIZER],
    "docs/howto/slow-rank.md": [SHARDED],
    "docs/howto/trackers.md": [""],
    "docs/launch.md": [
        SHARDED,
        "accelerator = Accelerator()\n" + PREPARED + "save_checkpoint(directory + '/step-2', model=model, "
        "optimizer=optimizer.optimizer, extra={'step': 2})\n",
    ],
    "docs/lora.md": [
        SAVED + "import peft\nfrom transformers import AutoModelForCausalLM\nname = 'path/or/hub-name'\n"
        "LoraConfig = lambda _: peft.LoraConfig(target_modules=['q_proj'])\n",
        "import fullshard\nfrom peft import LoraConfig, get_peft_model\n"
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, hidden_size=64, intermediate_size=64, "
        "moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=4))\n"
        "accelerator = fullshard.Accelerator()\n",
    ],
    "docs/long_context.md": [
        LLAMA
        + "from fullshard import ParallelismConfig\n"
        + "row = {'input_ids': ids[0], 'position_ids': ids[0], 'labels': ids[0], 'shift_labels': ids[0].roll(-1)}\n"
        + "loader = DataLoader([row] * 4, batch_size=2)\n"
        + OPTIMIZER,
        "",
    ],
    "docs/memory.md": [
        LLAMA,
        "",
        "",
        SHARDED + "engine = types.SimpleNamespace(wake_up=int, sleep=int)\n",
        SHARDED + "scheduler = types.SimpleNamespace(step=lambda: None)\n",
    ],
    "docs/migration.md": [UNSHARDED, UNSHARDED + IMPORTED.partition("model, loader")[0], UNSHARDED + IMPORTED],
    "docs/optimizers.md": [
        "",
        LLAMA
        + "shard_model(model, unit_modules=list(model.model.layers))\nevaluate = lambda model: model(ids)\n"
        + OPTIMIZER,
        LLAMA,
    ],
    "docs/reliability.md": [
        "accelerator = Accelerator()\n" + OPTIMIZER,
    ],
    "docs/tensor_parallelism.md": [
        MESHES + "model.blocks = nn.ModuleList(Block() for _ in range(2))\n",
        MESHES
        + "from torch.distributed.tensor import Replicate, distribute_module\n"
        + "from fullshard import DataParallelMeshDims\n"
        + "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))\n"
        + "model = nn.Module(); model.blocks = nn.ModuleList(Block() for _ in range(2))\n"
        + SPLIT,
        MESHES + "model, plan = Block(), {'up': ColwiseParallel(), 'down': RowwiseParallel()}\n",
        MESHES + "experts = nn.Module(); experts.weight = nn.Parameter(torch.zeros(4, 8)); model.experts = experts\n",
    ],
    "docs/torchacc.md": [TORCHACC, SCHEDULER + TRAINED, "", ""],
    "docs/tracking.md": [""],
    "docs/trainer.md": [""],
}
TOGETHER = ("docs/howto/hf-weights.md", "docs/torchacc.md")
"""Pages of which a block needs those before it."""
RANKS = {"docs/long_context.md": 2, "docs/tensor_parallelism.md": 2, "docs/torchacc.md": 2}
HERE = {
    '"cuda"': '"cpu"',
    "cp_size=4, dp_shard_size=2": "cp_size=2",
    "sp_size=4, dp_shard_size=2": "sp_size=2",
    "dp_shard_size=4": "dp_shard_size=1",
    "fsdp.size = 4": "fsdp.size = 2",
    "from pytorch_optimizer import SOAP": "SOAP = lambda p, lr, **_: torch.optim.Adafactor(p, lr=lr)",
}
"""What a page says of many GPUs and of packages that tests do without, for the ranks of this test."""
ELSEWHERE = {
    "docs/howto/keep-fp32.md": "test_docs_howto.py",
    "docs/howto/try-recipe.md": "test_docs_howto.py",
    "docs/tour.md": "test_tour.py",
    "docs/tutorials/your-loop.md": "below",
    "docs/tutorials/first-run.md": "test_docs_pages.py, test_the_first_run",
    "docs/xla.md": "xla/test_xla_training.py, test_the_code_of_the_page",
}


def _shown(page: Path) -> list[str]:
    """The blocks of Python of a page, and what its changes to Python make of it."""
    after = (re.sub(r"^(?:-.*\n|[+ ])", "", block, flags=re.M) for block in blocks(page, "diff") if "import" in block)
    return [*blocks(page, "python"), *after]


def test_every_page_is_run() -> None:
    shown = {NAMES[page]: len(_shown(page)) for page in PAGES}
    assert {name for name, count in shown.items() if count} == BEFORE.keys() | ELSEWHERE.keys()
    assert {name: len(before) for name, before in BEFORE.items()} == {name: shown[name] for name in BEFORE}


def _run(page: str, number: int, directory: str) -> None:
    os.chdir(directory)
    shown = _shown(ROOT / page)
    code = WORLD
    for block in range(0 if page in TOGETHER else number, number + 1):
        code += BEFORE[page][block] + shown[block]
    for there, here in HERE.items():
        code = code.replace(there, here)
    exec(compile(code, f"{page}, block {number}", "exec"), {"__name__": "block"})


@pytest.mark.parametrize(("page", "number"), [(page, i) for page, before in BEFORE.items() for i in range(len(before))])
def test_a_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run_ranks(_run, RANKS.get(page, 1), page, number, str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize(
    "code",
    list(blocks(DOCS / "tutorials" / "your-loop.md", "python")),
    ids=["fully_shard", "Accelerator", "accelerate", "checkpoint"],
)
def test_code_of_the_tutorial_runs_as_a_file(code: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code)
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT / "src"), ACCELERATE_USE_CPU="true"),
        check=True,
        timeout=120,
    )
