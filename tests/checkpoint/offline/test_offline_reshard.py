"""Checkpoints cut anew without a process group: bit by bit the same, loadable, and refused where they cannot be.

Run: `python -m pytest tests/checkpoint/offline/test_offline_reshard.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import load_checkpoint, verify_checkpoint
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.offline import compare, open_source, write_native
from fullshard.checkpoint.tensors import local_parameters
from fullshard.core.errors import CheckpointError
from fullshard.features import ShardedParameter
from tests.distributed import run_ranks
from tests.interchange import reference, save_native, sharded_job, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("saved")
    for world_size in (1, 2, 3, 4):
        run_ranks(save_native, world_size, str(root / str(world_size)))
    return {world_size: root / str(world_size) for world_size in (1, 2, 3, 4)}


def _reshard(source: Path, target: Path, **options: Any) -> list[str]:
    with open_source(source) as opened:
        return write_native(opened, target, **options)


def _differences(a: Path, b: Path) -> list[str]:
    with open_source(a) as one, open_source(b) as other:
        return [f"{difference.name}: {difference.what}" for difference in compare(one, other)]


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_every_world_size_becomes_every_other_and_back(saved: dict[int, Path], tmp_path: Path, before: int) -> None:
    for after in (1, 2, 3, 4):
        target, back = tmp_path / f"{after}", tmp_path / f"back{after}"
        notes = _reshard(saved[before], target, world_size=after)
        verify_checkpoint(target).raise_if_damaged()
        assert read_manifest(target).world_size == after
        assert _differences(saved[before], target) == []
        assert bool(notes) == (before != after), "generators are of use at the same world size only"
        _reshard(target, back, world_size=before)
        assert _differences(saved[before], back) == []
        ranks = {piece.rank for record in read_manifest(target).parameters.values() for piece in record.pieces}
        assert ranks == set(range(after)), "every rank has a share"


def _state(directory: str, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Load at the world size of this process group; everything whole, and the losses of further steps."""
    model, optimizer = sharded_job(seed=1)
    extra = load_checkpoint(directory, model=model, optimizer=optimizer)
    found: dict[str, Any] = {"extra": extra["step"]}
    for local in local_parameters(model, rank=0):
        for key, value in optimizer.state.get(local.tensor, {}).items():
            assert isinstance(value, torch.Tensor)
            is_cut = isinstance(local.tensor, ShardedParameter) and value.ndim
            if not is_cut:
                found[f"{local.name}/{key}"] = value.clone()
        assert isinstance(local.tensor, ShardedParameter)
        found[local.name] = local.tensor.full_tensor().detach()
    return found, train(model, optimizer, steps)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4), (3, 2)])
def test_what_was_cut_anew_loads_and_trains_on(saved: dict[int, Path], tmp_path: Path, before: int, after: int) -> None:
    _reshard(saved[before], tmp_path / "new", world_size=after)
    loaded = run_ranks(_state, after, str(tmp_path / "new"), 2)
    directly = run_ranks(_state, after, str(saved[before]), 2)
    for (mine, losses), (theirs, other_losses) in zip(loaded, directly, strict=True):
        assert losses == other_losses
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name
    weights, _ = reference()
    torch.testing.assert_close(loaded[0][0]["embed.weight"], weights["embed.weight"])


def test_the_same_world_size_keeps_generators(saved: dict[int, Path], tmp_path: Path) -> None:
    assert _reshard(saved[2], tmp_path / "new", world_size=2) == []
    with open_source(saved[2]) as one, open_source(tmp_path / "new") as other:
        for rank in range(2):
            mine, theirs = one.rank_state(rank), other.rank_state(rank)
            assert mine.keys() == theirs.keys()
            assert any(name.startswith("rng/") for name in mine)
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_nothing_is_left_of_a_copy_that_failed(saved: dict[int, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    _reshard(saved[2], broken, world_size=2)
    file = broken / "optimizer-rank00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optimizer-rank00001\.safetensors is damaged"):
        _reshard(broken, tmp_path / "new", world_size=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]
    with pytest.raises(CheckpointError, match="already exists"):
        _reshard(saved[2], broken, world_size=2)
    _reshard(saved[2], broken, world_size=3, overwrite=True)
    verify_checkpoint(broken).raise_if_damaged()


def test_a_difference_of_one_bit_is_found(saved: dict[int, Path], tmp_path: Path) -> None:
    """Every kind of difference: a value, one that is no number, a dtype, a name."""
    from safetensors.torch import load_file, save_file

    from fullshard.checkpoint.offline import write_weights

    with open_source(saved[2], optimizer=False) as source:
        write_weights(source, tmp_path / "a")
        write_weights(source, tmp_path / "b")
        write_weights(source, tmp_path / "c", dtype="bfloat16")
    assert _differences(tmp_path / "a", tmp_path / "b") == []
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["frozen.weight"].view(torch.int32)[1, 2] ^= 1
    tensors["frozen.bias"][0] = torch.nan
    tensors["layers.0.1.bias"].mul_(-0.0)
    del tensors["scale"]
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    found = _differences(tmp_path / "a", tmp_path / "b")
    assert found[0] == "frozen.bias: values differ by at most inf"
    assert found[1].startswith("frozen.weight: values differ by at most") and "e-" in found[1]
    assert found[-1] == "scale: only in A"
    assert len(found) == 4
    both = "frozen.bias: float32 of shape [6] and bfloat16 of shape [6]"
    assert both in _differences(tmp_path / "a", tmp_path / "c")


def test_manifests_that_claim_too_much_are_refused(saved: dict[int, Path], tmp_path: Path) -> None:
    """Before anyone makes room for it: the checksum of a manifest is no proof of good will."""
    from fullshard.checkpoint.format import MANIFEST_NAME, encode_manifest

    target = tmp_path / "new"
    _reshard(saved[1], target, world_size=1)
    manifest = read_manifest(target)
    record = manifest.parameters["embed.weight"]
    huge = record.model_copy(
        update={"shape": (2**40,), "pieces": (record.pieces[0].model_copy(update={"stop": 2**40}),)}
    )
    changed = manifest.model_copy(update={"parameters": {**manifest.parameters, "embed.weight": huge}})
    (target / MANIFEST_NAME).write_bytes(encode_manifest(changed))
    with pytest.raises(CheckpointError, match=r"model-rank00000\.safetensors has .* bytes, but should hold"):
        open_source(target)
    assert not verify_checkpoint(target).is_valid
    deep = b'{"format_version":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    import google_crc32c

    prefix = b'{"crc32c":"' + f"{google_crc32c.value(deep):08x}".encode() + b'","manifest":'
    (target / MANIFEST_NAME).write_bytes(prefix + deep + b"}\n")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_source(target)
