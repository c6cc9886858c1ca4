"""Training through PyTorch/XLA on four virtual devices of a CPU: `make test-xla`, in an environment of its own.

It shares nothing with the other tests: the engine does not import with the torch that torch_xla needs.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.xla

ROOT = Path(__file__).parents[2]
VOCAB = 32


class Block(nn.Module):
    """Gives a tuple, as layers of Transformers do."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden)))),)


class Net(nn.Module):
    """With tied weights, a persistent buffer, and a dict for its output."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            (hidden,) = block(hidden)
        logits = self.head(hidden) * self.scale
        return {"loss": nn.functional.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1)), "logits": logits}


@pytest.fixture(scope="module")
def xla() -> Any:
    """The adapter. A model is sharded before anything runs backward: torch counts devices then."""
    before = set(sys.modules)
    from fullshard.integrations import xla as adapter

    new = set(sys.modules) - before
    assert not [name for name in new if name.startswith(("torch_xla", "fullshard.engine", "fullshard.comm"))]
    adapter.prepare(Net())
    return adapter


@pytest.fixture(scope="module")
def start() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, VOCAB, (8, 6)), torch.randint(0, VOCAB, (8, 6))) for _ in range(4)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Any]) -> list[tuple[float, float]]:
    """Losses and norms of gradients, which are clipped."""
    found = []
    for ids, labels in data:
        loss = model(ids, labels)["loss"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


@pytest.fixture(scope="module")
def one_process(xla: Any, start: Net, data: Any) -> Any:
    model = copy.deepcopy(start)
    return steps(model, adamw(model), data), model


def spec(tensor: torch.Tensor) -> str:
    import torch_xla

    found: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return found


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"wrap_classes": ("Block",)}, 1e-5),
        ({"wrap_classes": ("Block",), "shard_size": 2, "checkpointing": True}, 1e-5),
        ({"wrap_min_numel": 500}, 1e-5),
        ({"wrap_classes": ("Block",), "bf16": True}, 2e-3),
    ],
    ids=["full", "hybrid-2x2-checkpointed", "by-size", "bf16"],
)
def test_four_steps_are_those_of_one_process(
    xla: Any, start: Net, data: Any, one_process: Any, options: dict[str, Any], tolerance: float
) -> None:
    expected, reference = one_process
    model = xla.prepare(copy.deepcopy(start), xla.XlaSettings(**options))
    assert model.head.weight is model.embed.weight
    found = steps(model, adamw(model), xla.batches(data, model))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=tolerance)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], abs=20 * tolerance)
    if not options.get("bf16"):
        for name, value in xla.full_state_dict(model).items():
            torch.testing.assert_close(value, reference.state_dict()[name], atol=5e-5, rtol=0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_parameters_and_state_are_divided(xla: Any, start: Net, data: Any) -> None:
    model = xla.prepare(copy.deepcopy(start), xla.XlaSettings(shard_size=2))
    optimizer = adamw(model)
    steps(model, optimizer, xla.batches(data[:1], model))
    weight = model.blocks[0].up.weight
    assert spec(weight) == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert spec(optimizer.state[weight]["exp_avg"]) == spec(weight)
    shards = xla.sharded_state_dict(model)["blocks.0.up.weight"]
    assert [tuple(part.shape) for _, _, part in shards] == [(32, 16)] * 4
    whole = xla.full_state_dict(model)["blocks.0.up.weight"]
    for _, indices, part in shards:
        torch.testing.assert_close(part.cpu(), whole[indices], atol=0, rtol=0)


def test_outputs_of_every_kind_are_divided(xla: Any) -> None:
    class Out(OrderedDict[str, Any]):
        """Like Transformers' ModelOutput."""

    class Gives(nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.linear, self.make = nn.Linear(4, 4), make

        def forward(self, x: torch.Tensor) -> Any:
            return self.make(self.linear(x))

    for make, pick in (
        (lambda y: y, lambda out: [out]),
        (lambda y: (y, None, y.sum()), lambda out: [out[0]]),
        (lambda y: {"a": y, "b": [y * 2]}, lambda out: [out["a"], out["b"][0]]),
        (lambda y: Out(logits=y), lambda out: [out["logits"]]),
    ):
        model = xla.prepare(Gives(make), xla.XlaSettings(shard_size=2))
        out = model(xla.shard_batch(torch.ones(8, 4), model))
        assert [spec(tensor) for tensor in pick(out)] == ["{devices=[4,1]0,1,2,3}"] * len(pick(out))
    seen = []
    model = xla.prepare(Gives(lambda y: y), xla.XlaSettings(shard_output=lambda out, mesh: seen.append((out, mesh))))
    out = model(xla.shard_batch(torch.ones(8, 4), model))
    assert seen[0][0] is out
    assert seen[0][1].mesh_shape == (1, 4)
    assert spec(out) == ""


def test_a_checkpoint_goes_to_another_mesh(xla: Any, start: Net, data: Any, one_process: Any, tmp_path: Path) -> None:
    expected = [loss for loss, _ in one_process[0]]
    model = xla.prepare(copy.deepcopy(start), xla.XlaSettings(wrap_classes=("Block",)))
    optimizer = adamw(model)
    steps(model, optimizer, xla.batches(data[:2], model))
    xla.save_checkpoint(tmp_path / "a.pt", model, optimizer, extra={"step": 2})
    other = xla.prepare(Net(), xla.XlaSettings(wrap_classes=("Block",), shard_size=2))
    resumed = adamw(other, lr=1.0)
    assert xla.load_checkpoint(tmp_path / "a.pt", other, resumed) == {"step": 2}
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert spec(other.blocks[0].up.weight) == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert other.head.weight is other.embed.weight
    found = steps(other, resumed, xla.batches(data[2:], other))
    assert [loss for loss, _ in found] == pytest.approx(expected[2:], abs=1e-5)


ENGINE = """
import sys, torch
sys.path[:0] = [{root!r}, {src!r}]
from tests.xla.test_xla_training import Net, adamw, steps
import fullshard
from fullshard.checkpoint import load_checkpoint
from fullshard.cli.main import app
from typer.testing import CliRunner
made = CliRunner().invoke(app, ["ckpt", "import", {path!r}, {native!r}, "--optimizer", "AdamW"])
assert made.exit_code == 0, made.output
data = torch.load({data!r})
model = Net()
model = fullshard.shard_model(model, unit_modules=list(model.blocks))
optimizer = adamw(model)
load_checkpoint({native!r}, model=model, optimizer=optimizer)
print("LOSSES", *[loss for loss, _ in steps(model, optimizer, data)])
"""


def test_a_run_moves_to_the_engine(xla: Any, start: Net, data: Any, one_process: Any, tmp_path: Path) -> None:
    python = os.environ.get("ENGINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    expected = [loss for loss, _ in one_process[0]]
    model = xla.prepare(copy.deepcopy(start), xla.XlaSettings(wrap_classes=("Block",)))
    optimizer = adamw(model)
    steps(model, optimizer, xla.batches(data[:1], model))
    xla.save_checkpoint(tmp_path / "there.pt", model, optimizer)
    torch.save(data[1:3], tmp_path / "data.pt")
    paths = {"data": tmp_path / "data.pt", "path": tmp_path / "there.pt", "native": tmp_path / "native"}
    code = ENGINE.format(root=str(ROOT), src=str(ROOT / "src"), **{k: str(v) for k, v in paths.items()})
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
    assert list(map(float, line.split()[1:])) == pytest.approx(expected[1:3], abs=1e-5)


def test_what_cannot_be_is_an_error(xla: Any, start: Net, tmp_path: Path) -> None:
    from fullshard.core.errors import CheckpointError, ConfigError, WrapError

    with pytest.raises(ConfigError, match="shard_size = 3 does not divide 4 devices"):
        xla.prepare(copy.deepcopy(start), xla.XlaSettings(shard_size=3))
    with pytest.raises(WrapError, match="Net has no module of class 'Blok'"):
        xla.prepare(copy.deepcopy(start), xla.XlaSettings(wrap_classes=("Blok",)))
    with pytest.raises(ConfigError, match="Net is not sharded"):
        xla.save_checkpoint(tmp_path / "x", copy.deepcopy(start))
    model = xla.prepare(copy.deepcopy(start))
    with pytest.raises(ConfigError, match="already sharded"):
        xla.prepare(model)
    with pytest.raises(ConfigError, match="a batch of 6 samples cannot be split across 4 devices"):
        xla.shard_batch(torch.ones(6, 2), model)
    xla.save_checkpoint(tmp_path / "model", model)
    with pytest.raises(CheckpointError, match="does not contain an optimizer"):
        xla.load_checkpoint(tmp_path / "model", model, adamw(model))
    with pytest.raises(CheckpointError, match="the model has 'bias', the state does not"):
        xla.load_checkpoint(tmp_path / "model", xla.prepare(nn.Linear(2, 2)))


def test_the_engine_says_what_to_use_here(xla: Any) -> None:
    from fullshard.core.errors import VersionError
    from fullshard.core.requirements import OLDEST_TORCH

    oldest = r"\.".join(map(str, OLDEST_TORCH))

    with pytest.raises(VersionError, match=rf"(?s)fullshard needs torch {oldest} or later.*fullshard.integrations.xla"):
        import fullshard.engine  # noqa: F401


def test_the_code_of_the_page(xla: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    page = (ROOT / "docs" / "xla.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(DOCUMENTED)
    size = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    batch = {"input_ids": torch.arange(32).view(4, 8), "labels": torch.arange(32).view(4, 8)}
    exec(code, {"model": GPT2LMHeadModel(size), "torch": torch, "train_dataloader": [batch, batch]})
    assert torch.load(tmp_path / "out" / "step-100.pt")["optimizer"]["state"]


DOCUMENTED = "xla: True # must be set\nxla_fsdp_settings: # more\nxla_fsdp_grad_ckpt: True # recompute\n"


def test_the_documents_settings(xla: Any, tmp_path: Path) -> None:
    from fullshard.core.errors import ConfigError

    path = tmp_path / "run.yaml"
    path.write_text(DOCUMENTED)
    assert xla.XlaSettings.from_file(path) == xla.XlaSettings(checkpointing=True)
    fsdp = "distributed_type: XLA\nmixed_precision: bf16\nfsdp_config:\n  xla: true\n  xla_fsdp_v2: true\n"
    path.write_text(fsdp + "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n  fsdp_forward_prefetch: false\n")
    with pytest.warns(UserWarning, match=r"run\.yaml:7:3: fsdp_forward_prefetch has no effect under PyTorch/XLA"):
        assert xla.XlaSettings.from_file(path) == xla.XlaSettings(wrap_classes=("BertLayer",), bf16=True)
    path.write_text(fsdp + "  fsdp_offload_params: true\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:6:3: fsdp_offload_params: PyTorch/XLA keeps all state"):
        xla.XlaSettings.from_file(path)
    path.write_text("distributed_type: XLA\nmixed_precision: fp16\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2:1: fp16 is not supported: TPUs compute in bfloat16 or float32"):
        xla.XlaSettings.from_file(path)


def test_the_documents_torchacc_example(xla: Any) -> None:
    """The document's own lines, but for a small model, random tokens and fewer of them."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, GPT2Config

    import fullshard.torchacc as torchacc

    torch.manual_seed(0)
    size = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(size)
    ids = torch.randint(0, 64, (32, 16))
    dataset = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    train_dataloader: Any = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)  # type: ignore[arg-type]

    config = torchacc.Config()
    config.compute.bf16 = True
    config.dist.fsdp.size = 4
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    config.dist.fsdp.use_spmd = True
    model, train_dataloader = torchacc.accelerate(model, train_dataloader, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    model.train()
    losses = []
    for _epoch in range(4):
        for batch in train_dataloader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]  # the document's autocast is CUDA's, and the model computes in bf16 by itself
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(spec(parameter) for parameter in model.parameters())
    with pytest.raises(AttributeError, match=r"has no 'save' when training with PyTorch/XLA"):
        _ = torchacc.save


def test_the_fields_of_torchaccs_guide(xla: Any, start: Net) -> None:
    from fullshard import torchacc

    seen = []
    fields = {
        **{"size": 2, "wrap_layer_cls": {"Block"}, "flatten_parameters": False, "sync_module_states": True},
        **{"use_spmd": True, "shard_output_callable": lambda output, mesh: seen.append((output, mesh.mesh_shape))},
    }
    with pytest.warns(UserWarning) as said:
        model = torchacc.accelerate(copy.deepcopy(start), config={"dist": {"fsdp": fields}})
    for field in ("flatten_parameters", "sync_module_states"):
        assert sum(f"{field} has no effect" in str(warning.message) for warning in said) == 1
    ids = torch.zeros(4, 6, dtype=torch.long)
    out = model(*xla.shard_batch((ids, ids), model))
    assert [shape for _, shape in seen] == [(2, 2)] * 3
    assert [type(output) for output, _ in seen] == [tuple, tuple, dict]
    assert seen[-1][0] is out
    assert spec(out["logits"]) == ""
    assert spec(model.blocks[0].up.weight) == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"


TRAINER = """
import sys, torch
import torch_xla.runtime as xr
xr.use_spmd()
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
size = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
)
rows = [{"input_ids": r, "labels": r} for r in torch.randint(0, 64, (32, 16))]
args = TrainingArguments(
    sys.argv[1], max_steps=4, per_device_train_batch_size=8, report_to="none", save_strategy="no", logging_steps=1,
    learning_rate=1e-2, dataloader_drop_last=True, fsdp="full_shard", optim="adamw_torch",
    fsdp_config={"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True, "xla_fsdp_settings": {}},
)
trainer = Trainer(LlamaForCausalLM(size), args, train_dataset=rows)
trainer.train()
print("LOSSES", *[row["loss"] for row in trainer.state.log_history if "loss" in row])
"""


def test_a_trainer_with_the_documents_settings(tmp_path: Path) -> None:
    """Transformers' own Trainer reads these keys itself. Version 5 makes no optimizer then, and stops."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__.startswith("5."):
        pytest.skip("Trainer of Transformers 5 makes no optimizer with `xla: true`; 4.57 does")
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
    losses = list(map(float, line.split()[1:]))
    assert len(losses) == 4
    assert losses[-1] < losses[0]
