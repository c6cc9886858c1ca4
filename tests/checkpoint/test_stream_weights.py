"""Weights streamed out of a model that trains: `export_hf`'s byte by byte, one at a time, and nobody is left waiting.

pytest tests/checkpoint/test_stream_weights.py
"""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import fullshard
from fullshard.checkpoint import export_hf
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.engine.shard_spec import ShardSpec
from fullshard.features import shard_model
from tests.api.test_lora import adapted
from tests.checkpoint.test_checkpoint_export import _layers, _model
from tests.distributed import run_ranks


def _made(kind: str) -> Any:
    model = adapted("dora") if kind == "dora" else _model(kind)
    return shard_model(model, unit_modules=_layers(model.get_base_model() if kind == "dora" else model))


def _against_the_export(directory: str, kind: str, dtype: str | None) -> None:
    model = _made(kind)
    export_hf(Path(directory) / "export", model=model, dtype=dtype)
    streamed = dict(fullshard.stream_weights(model, dtype=dtype))
    expected = load_file(Path(directory) / "export" / "model.safetensors")
    assert streamed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert streamed[name].dtype == tensor.dtype
        assert torch.equal(streamed[name], tensor), name
    to_rank_0 = dict(fullshard.stream_weights(model, dtype=dtype, rank0_only=True))
    assert to_rank_0.keys() == (expected.keys() if dist.get_rank() == 0 else set())


@pytest.mark.parametrize(("kind", "dtype"), [("llama", None), ("mixtral", "bfloat16"), ("dora", "bfloat16")])
def test_they_are_those_of_the_export(tmp_path: Path, kind: str, dtype: str | None) -> None:
    run_ranks(_against_the_export, 2, str(tmp_path), kind, dtype)


def _left_early(leaves: int, how: str) -> str:
    model = _made("mixtral")
    before = dict(fullshard.stream_weights(model))
    said = ""
    try:
        for count, _ in enumerate(fullshard.stream_weights(model), start=1):
            if dist.get_rank() == leaves and count == 4:
                if how == "break":
                    break
                raise OSError("the engine is gone")
    except (OSError, CheckpointError) as error:
        said = str(error)
    # Training goes on, and the next stream is whole.
    model(torch.arange(12).view(1, 12)).logits.sum().backward()
    after = dict(fullshard.stream_weights(model))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return said


@pytest.mark.parametrize(("leaves", "how"), [(0, "break"), (1, "raise")])
def test_who_leaves_lets_nobody_wait(leaves: int, how: str) -> None:
    said = run_ranks(_left_early, 2, leaves, how)
    assert said[leaves] == ("" if how == "break" else "the engine is gone")
    assert f"rank {leaves}: the loop over the tensors was exited early, at 'model.layers.0." in said[1 - leaves]


def _alive_while_gathering() -> int:
    model = _made("llama")
    gather, most = ShardSpec.gather, 0
    given: list[Any] = []

    def watched(spec: Any, local: torch.Tensor) -> torch.Tensor:
        nonlocal most
        deadline = time.monotonic() + 2  # Gloo's thread may still let go of the last
        while (alive := sum(one() is not None for one in given)) and time.monotonic() < deadline:
            time.sleep(0.001)
        most = max(most, alive)
        whole = gather(spec, local)
        given.append(weakref.ref(whole.untyped_storage()))
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardSpec, "gather", watched)
        stream = fullshard.stream_weights(model)
        while next(stream, None) is not None:
            pass
    assert len(given) > 10
    return most


def test_a_tensor_is_gone_before_the_next_is_gathered() -> None:
    assert run_ranks(_alive_while_gathering, 2) == [0, 0]


def test_tensors_are_the_callers_and_a_dtype_is_checked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for _, tensor in fullshard.stream_weights(model):
        tensor.zero_()
    assert all(p.any() for p in model[0].parameters())
    assert torch.equal(model.state_dict()["1.running_var"], torch.ones(2))
    with pytest.raises(ConfigError, match="int8"):
        next(fullshard.stream_weights(model, dtype="int8"))
