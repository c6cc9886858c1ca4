"""Interchange with real peers: torch's fully_shard and DCP, Accelerate, torchtitan's layout, torch_xla, Hugging Face.

Run: `python -m pytest tests/checkpoint/offline/test_offline_interchange.py`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fullshard.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.offline import Source, compare, open_source, write_dcp, write_native, write_weights
from fullshard.checkpoint.tensors import local_parameters
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.layout import Interval
from fullshard.features import ShardedParameter
from tests.distributed import run_ranks
from tests.interchange import (
    Net,
    files_in_use,
    groups,
    plain_job,
    reference,
    save_native,
    sharded_job,
    train,
    write_xla,
)


def _peer_job(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """The job on torch's own engine."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(groups(net), lr=1e-2)


def _whole(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().clone()


def _everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors of a job on torch's engine, by name."""
    names = {id(p): n for n, p in net.named_parameters()}
    found = {n: _whole(t) for n, t in net.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": _whole(value) for key, value in state.items()}
    return found


def _save_peer(directory: str, layout: str) -> dict[str, torch.Tensor]:
    net, optimizer = _peer_job()
    train(net, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=layout == "torchtitan")
    weights, state = get_state_dict(net, optimizer, options=flat)
    if layout == "accelerate":
        dcp.save({"model": weights}, checkpoint_id=f"{directory}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": state}, checkpoint_id=f"{directory}/optimizer_0")
    elif layout == "torchtitan":
        dcp.save({**weights, "optimizer": state, "train_state": {"step": torch.tensor(2)}}, checkpoint_id=directory)
    elif layout == "app":
        dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=directory)
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    return _everything(net, optimizer)


def _read_all(source: Source) -> dict[str, torch.Tensor]:
    return {
        name: source.read(kind, name, Interval(0, record.numel)).reshape(record.shape).clone()
        for kind, name, record in source.contents.tensors()
    }


def _load_ours(directory: str, seed: int) -> dict[str, torch.Tensor]:
    """Load on our engine; everything whole by name."""
    model, optimizer = sharded_job(seed)
    load_checkpoint(directory, model=model, optimizer=optimizer)
    found: dict[str, torch.Tensor] = {}
    for local in local_parameters(model, rank=0):
        assert isinstance(local.tensor, ShardedParameter)
        found |= dict.fromkeys(local.names, local.tensor.full_tensor().detach())
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


@pytest.mark.parametrize("layout", ["torch", "app", "torchtitan", "accelerate"])
def test_torch_fsdp2_checkpoints_become_ours(tmp_path: Path, layout: str) -> None:
    theirs = run_ranks(_save_peer, 2, str(tmp_path / "theirs"), layout)[0]
    with open_source(tmp_path / "theirs") as source:
        assert ("Accelerate" in source.title) == (layout == "accelerate")
        read = _read_all(source)
        assert {n: t for n, t in read.items() if not torch.equal(t, theirs[n])} == {}
        notes = write_native(source, tmp_path / "ours", world_size=3)
        assert notes == (["train_state.step: not part of the model"] if layout == "torchtitan" else [])
    verify_checkpoint(tmp_path / "ours").raise_if_damaged()
    with open_source(tmp_path / "ours") as ours:
        assert ours.contents.parameters["embed.weight"].aliases == ("head.weight",), "tied weights are found"
        assert ours.contents.optimizer is not None
        assert ours.contents.optimizer.kind == "AdamW"
        assert {str(group.options["weight_decay"]) for group in ours.contents.optimizer.groups} == {"0.0", "0.1"}
        assert {n for n in _read_all(ours) if "/" in n} == {n for n in theirs if "/" in n}
    loaded = run_ranks(_load_ours, 3, str(tmp_path / "ours"), 5)[0]
    assert {n for n, t in loaded.items() if not torch.equal(t, theirs[n])} == set()


def _load_peer(directory: str, layout: str) -> dict[str, torch.Tensor]:
    net, optimizer = _peer_job(seed=1)
    flat = StateDictOptions(flatten_optimizer_state_dict=layout == "torchtitan")
    weights: Any
    state: Any
    weights, state = get_state_dict(net, optimizer, options=flat)
    if layout == "torchtitan":
        nested = {**weights, "optimizer": state}
        dcp.load(nested, checkpoint_id=directory)
        weights, state = {name: nested[name] for name in weights}, nested["optimizer"]
    else:
        nested = {"model": weights, "optimizer": state}
        dcp.load(nested, checkpoint_id=directory)
        weights, state = nested["model"], nested["optimizer"]
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state, options=flat)
    return _everything(net, optimizer)


@pytest.mark.parametrize("layout", ["torch", "torchtitan"])
def test_torch_fsdp2_loads_ours(tmp_path: Path, layout: Any) -> None:
    run_ranks(save_native, 3, str(tmp_path / "ours"))
    with open_source(tmp_path / "ours") as source:
        ours = _read_all(source)
        write_dcp(source, tmp_path / "theirs", layout=layout)
    loaded = run_ranks(_load_peer, 2, str(tmp_path / "theirs"), layout)[0]
    assert {n for n, t in ours.items() if not torch.equal(t, loaded[n])} == set()
    with open_source(tmp_path / "theirs") as again, open_source(tmp_path / "ours") as source:
        assert list(compare(source, again)) == []


def _accelerate(directory: str, *, save: bool, kind: str) -> dict[str, torch.Tensor]:
    """Accelerate's own functions on Accelerate's own engine (FSDP2)."""
    import accelerate
    from accelerate.utils import fsdp_utils

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type=kind
    )
    accelerator = accelerate.Accelerator(cpu=True)
    # Accelerate itself shards on accelerators only; its functions for checkpoints work on any device.
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model, _ = _peer_job(0 if save else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if save:
        train(model, optimizer)
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, directory)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, directory)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    found = _everything(model, optimizer)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return found


def _one_group(directory: str) -> None:
    """A checkpoint of ours whose optimizer has one group, as Accelerate's job above."""
    from fullshard.checkpoint import save_checkpoint
    from fullshard.features import shard_model

    net = shard_model(Net(), unit_modules=[])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer)
    save_checkpoint(directory, model=net, optimizer=optimizer)


def _accelerate_save(directory: str, kind: str) -> dict[str, torch.Tensor]:
    return _accelerate(directory, save=True, kind=kind)


def _accelerate_load(directory: str, kind: str) -> dict[str, torch.Tensor]:
    return _accelerate(directory, save=False, kind=kind)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_checkpoints_of_accelerate_become_ours(tmp_path: Path, kind: str) -> None:
    theirs = run_ranks(_accelerate_save, 2, str(tmp_path / "theirs"), kind)[0]
    (tmp_path / "theirs" / "scheduler.bin").write_bytes(b"x")
    with open_source(tmp_path / "theirs") as source:
        read = _read_all(source)
        assert {n for n, t in read.items() if not torch.equal(t, theirs[n])} == set()
        assert sum("/" in name for name in read) > 30
        notes = write_native(source, tmp_path / "ours", world_size=2)
    assert notes == ["not converted: scheduler.bin"]
    with open_source(tmp_path / "theirs", optimizer=False) as source:
        assert not any("/" in name for name in _read_all(source))
        assert source.contents.notes == [f"not converted: {_optimizer_name(kind)}, scheduler.bin"]


def _save_unsharded(directory: str) -> None:
    """Save a job with Accelerate on one device."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    accelerator.save_state(directory)


@pytest.mark.parametrize("layout", ["accelerate", "trainer"])
def test_an_import_lists_the_training_state_of_unsharded_checkpoints(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(_save_unsharded, 1, str(tmp_path / "theirs"))
    if layout == "trainer":
        own = {"optimizer.bin": "optimizer.pt", "scheduler.bin": "scheduler.pt", "random_states_0.pkl": "rng_state.pth"}
        for name, new in own.items():
            (tmp_path / "theirs" / name).rename(tmp_path / "theirs" / new)
        (tmp_path / "theirs" / "trainer_state.json").write_text("{}")
    (tmp_path / "theirs" / "README.md").write_text("not training state")
    with open_source(tmp_path / "theirs") as source:
        assert source.title == "unsharded checkpoint of Accelerate or Trainer"
        listed, hint = write_native(source, tmp_path / "ours", world_size=2)
    assert (
        listed
        == {
            "accelerate": "not converted: optimizer.bin, random_states_0.pkl, scheduler.bin",
            "trainer": "not converted: optimizer.pt, rng_state.pth, scheduler.pt, trainer_state.json",
        }[layout]
    )
    assert "does not name its parameters" in hint
    title = hint.split("'")[-2]
    assert f"# {title}\n" in (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
    load_checkpoint(tmp_path / "ours", model=nn.Linear(3, 2))
    assert "random" not in caplog.text, "an import holds no random states, which its command has printed"


def test_another_number_of_ranks_is_the_reason_why_random_states_are_not_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(save_native, 2, str(tmp_path / "ours"))
    load_checkpoint(tmp_path / "ours", model=Net())
    assert "fullshard: random number generators are not restored: saved by 2 ranks, loaded by 1" in caplog.text


def _optimizer_name(kind: str) -> str:
    return "optimizer_0" if kind == "SHARDED_STATE_DICT" else "optimizer.bin"


def test_accelerate_loads_and_merges_ours(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    run_ranks(_one_group, 2, str(tmp_path / "ours"))
    with open_source(tmp_path / "ours") as source:
        ours = _read_all(source)
        write_dcp(source, tmp_path / "theirs")
    loaded = run_ranks(_accelerate_load, 2, str(tmp_path / "theirs"), "SHARDED_STATE_DICT")[0]
    assert {n for n, t in ours.items() if not torch.equal(t, loaded[n])} == set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_fsdp_weights(str(tmp_path / "theirs" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {n for n, t in merged.items() if not torch.equal(t, ours.get(n, ours["embed.weight"]))} == set()
    with open_source(tmp_path / "ours", optimizer=False) as source:
        write_weights(source, tmp_path / "consolidated")
    assert load_file(tmp_path / "consolidated" / "model.safetensors").keys() == ours.keys() - {
        name for name in ours if "/" in name
    }


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("outer", ["", "model.model."])
@pytest.mark.parametrize("has_buffers", [True, False])
def test_files_of_torch_xla_and_torchacc(tmp_path: Path, is_flat: bool, outer: str, has_buffers: bool) -> None:
    net, _ = plain_job()
    train(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    untied = nn.ModuleDict({"layers": net.layers, "frozen": net.frozen, "embed": net.embed})
    if not has_buffers:
        for layer in net.layers.children():
            layer.register_module("1", nn.LayerNorm(7))
    write_xla(tmp_path, untied, ["layers.0", "layers.1", "layers.2"], 4, flat=is_flat, outer=outer)
    with open_source(tmp_path) as source:
        assert source.title == "torch_xla / TorchAcc per-rank files"
        read = _read_all(source)
        write_weights(source, tmp_path / "whole")
    expected = untied.state_dict()
    assert read.keys() == expected.keys()
    assert {n for n, t in read.items() if not torch.equal(t, expected[n]) or t.dtype != expected[n].dtype} == set()


def test_padding_of_torch_xla(tmp_path: Path) -> None:
    """350 elements on 4 ranks are padded to 512, 128 on each."""
    net = nn.Linear(25, 14, bias=False)
    write_xla(tmp_path, net, [], 4, flat=True)
    state = torch.load(tmp_path / "rank-0-of-4.pth", weights_only=True)["model"]
    assert [tensor.numel() for tensor in state.values()] == [128]
    with open_source(tmp_path / "rank-0-of-4.pth") as source:
        assert torch.equal(_read_all(source)["weight"], net.weight)


@pytest.mark.parametrize("is_flat", [True, False])
def test_optimizer_files_of_torchacc(tmp_path: Path, is_flat: bool) -> None:
    net = nn.Sequential(nn.Linear(25, 14), nn.Linear(14, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(4, 25)).sum().backward()
    optimizer.step()
    # the shards of the root come first, then those of the inner unit; with one unit that is the model's order
    write_xla(tmp_path, net, [], 2, flat=is_flat, name="rank{r}-of-{w}-model.pth", optimizer=optimizer)
    with open_source(tmp_path) as source:
        read = _read_all(source)
        write_native(source, tmp_path / "ours", world_size=2)
        assert source.contents.optimizer is not None
        assert source.contents.optimizer.kind == "AdamW"
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(read[f"{name}/{key}"], value), (name, key)
    verify_checkpoint(tmp_path / "ours").raise_if_damaged()


def test_incomplete_files_of_torch_xla_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(25, 14)
    write_xla(tmp_path, net, [], 3, flat=True)
    (tmp_path / "rank-1-of-3.pth").unlink()
    with pytest.raises(CheckpointError, match="ranks 0 of 3, 2 of 3; expected every"):
        open_source(tmp_path)
    write_xla(tmp_path, net, [], 3, flat=True)
    (tmp_path / "rank-1-of-3.pth").write_bytes((tmp_path / "rank-0-of-3.pth").read_bytes())
    with pytest.raises(CheckpointError, match="ranks 0 of 3, 0 of 3, 2 of 3;"):
        open_source(tmp_path)
    write_xla(tmp_path, net, [], 2, flat=True)
    with pytest.raises(CheckpointError, match="ranks 0 of 2, 0 of 3, 0 of 3, 1 of 2, 2 of 3;"):
        open_source(tmp_path)


def test_plain_torch_files(tmp_path: Path) -> None:
    net, optimizer = plain_job()
    train(net, optimizer)
    weights, _ = reference()
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save({"model": wrapped, "epoch": 3}, tmp_path / "nested.pt")
    for name, notes in (("weights.pt", []), ("nested.pt", ["epoch: not part of the model"])):
        with open_source(tmp_path / name) as source:
            assert list(source.contents.notes) == notes
            read = _read_all(source)
            assert {n for n, t in read.items() if not torch.equal(t, weights[n])} == set()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbers.pt")
    with pytest.raises(CheckpointError, match="identifies parameters by number"):
        open_source(tmp_path / "numbers.pt")
    open_source(tmp_path / "numbers.pt", optimizer=False).close()
    named = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    train(net, named)
    torch.save({"model": net.state_dict(), "optimizer": named.state_dict()}, tmp_path / "named.pt")
    with open_source(tmp_path / "named.pt") as source:
        write_native(source, tmp_path / "ours", world_size=2)
        assert source.contents.optimizer is not None
        assert source.contents.optimizer.kind == "SGD"
        momentum = _read_all(source)["embed.weight/momentum_buffer"]
    assert torch.equal(momentum, named.state[net.embed.weight]["momentum_buffer"])


@pytest.mark.parametrize("kind", ["native", "dcp", "torch", "safetensors"])
def test_a_source_leaves_no_file_open(tmp_path: Path, kind: str) -> None:
    net, optimizer = plain_job()
    train(net, optimizer)
    path = tmp_path / "native"
    save_checkpoint(path, model=net, optimizer=optimizer)
    with open_source(path) as source:
        match kind:
            case "dcp":
                path = tmp_path / "dcp"
                write_dcp(source, path)
            case "torch":
                path = tmp_path / "net.pt"
                torch.save(net.state_dict(), path)
            case "safetensors":
                path = tmp_path / "weights"
                write_weights(source, path)
    assert files_in_use(tmp_path) == []
    with open_source(path) as source:
        _read_all(source)
        assert bool(files_in_use(tmp_path)) == (kind in ("native", "torch"))
    assert files_in_use(tmp_path) == []


def test_an_optimizer_of_unknown_class_must_be_named(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    state = {
        "state": {"weight": {"ema": torch.ones(2, 3)}},
        "param_groups": [{"lr": 0.1, "params": ["weight", "bias"]}],
    }
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    with open_source(tmp_path / "a.pt") as source:
        with pytest.raises(ConfigError, match="--optimizer AdamW"):
            write_native(source, tmp_path / "ours", world_size=1)
        write_native(source, tmp_path / "ours", world_size=1, optimizer_kind="Lion")
    with open_source(tmp_path / "ours") as ours:
        assert ours.contents.optimizer is not None
        assert ours.contents.optimizer.kind == "Lion"


def test_an_export_names_the_class_that_its_configuration_lacks(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    masked = BertForMaskedLM(BertConfig(vocab_size=16, **sizes))  # with the names of BertLMHeadModel
    cases = (("whole", model, ["LlamaForCausalLM"]), ("inner", model.model, None), ("masked", masked, None))
    for name, part, expected in cases:
        type(part.config)(vocab_size=16, **sizes).save_pretrained(tmp_path / f"{name}-config")
        save_checkpoint(tmp_path / name, model=part)
        with open_source(tmp_path / name) as source:
            write_weights(source, tmp_path / f"{name}-out", config_from=tmp_path / f"{name}-config", needs_config=True)
        config = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert config.get("architectures") == expected
