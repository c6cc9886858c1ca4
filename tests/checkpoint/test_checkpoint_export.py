"""Export: what `from_pretrained` reads is what was trained, without warnings, in files of the size asked for."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fullshard.checkpoint import export_hf
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.sizes import parse_size
from fullshard.features import shard_model
from fullshard.features.watchdog import WATCHDOG
from tests.differential import is_same_product
from tests.distributed import run_ranks
from tests.features.watchdog.test_waits_and_timeouts import until

transformers = pytest.importorskip("transformers")


def _model(kind: str = "llama", *, is_tied: bool = True) -> Any:
    torch.manual_seed(3)
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(
            **common, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
        )
    else:
        config = transformers.LlamaConfig(**common, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(config)


def _layers(model: Any) -> list[nn.Module]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def _export(path: str, kind: str, is_tied: bool, options: dict[str, Any]) -> torch.Tensor:
    model = _model(kind, is_tied=is_tied)
    model.generation_config.max_new_tokens = 17
    shard_model(model, unit_modules=_layers(model))
    export_hf(path, model=model, **options)
    return _logits(model)


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(12).view(1, 12)).logits
    return logits


def _load(path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """`from_pretrained`, which must find nothing to complain about."""
    transformers.utils.logging.enable_propagation()
    caplog.clear()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    # Others speak of what they lack when they are imported for the first time.
    said = [record for record in caplog.records if record.name.startswith("transformers")]
    assert [record.getMessage() for record in said if record.levelname != "INFO"] == []
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(("kind", "is_tied"), [("llama", True), ("llama", False), ("gpt2", True), ("mixtral", False)])
def test_from_pretrained_gives_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, is_tied: bool
) -> None:
    path = tmp_path / "export"
    logits = run_ranks(_export, 2, str(path), kind, is_tied, {})
    model = _load(path, caplog)
    assert is_same_product(_logits(model), logits[0])
    assert model.generation_config.max_new_tokens == 17
    assert json.loads((path / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_files_hold_what_transformers_itself_would_write(tmp_path: Path, kind: str) -> None:
    """Names and values, where the form on disk is another than that in memory (experts) too."""
    model = _model(kind)
    model.save_pretrained(tmp_path / "theirs")
    run_ranks(_export, 2, str(tmp_path / "ours"), kind, True, {"max_shard_size": "15KB"})
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = {n: t for file in (tmp_path / "ours").glob("*.safetensors") for n, t in load_file(file).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_form_on_disk_that_joins_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is one tensor on disk is gathered together and written as one."""
    if "hrm_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of Transformers has no such model")
    config = transformers.AutoConfig.for_model(
        "hrm_text", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_layers_per_stack=2,
        num_attention_heads=4, head_dim=8, max_position_embeddings=32, H_cycles=1, L_cycles=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    export_hf(tmp_path / "export", model=model)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = _load(tmp_path / "export", caplog).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_files_stay_below_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logits = run_ranks(_export, 2, str(tmp_path / "export"), "llama", False, {"max_shard_size": "10KB"})
    files = sorted((tmp_path / "export").glob("model-*.safetensors"))
    assert len(files) > 4
    sizes = {file.name: sum(t.nbytes for t in load_file(file).values()) for file in files}
    assert max(sizes.values()) <= 10_000
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "export" / file)
    assert is_same_product(_logits(_load(tmp_path / "export", caplog)), logits[0])


def test_another_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(_export, 2, str(tmp_path / "export"), "llama", True, {"dtype": "bfloat16"})
    model = _load(tmp_path / "export", caplog)
    assert model.dtype == torch.bfloat16
    expected = _model().state_dict()
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in model.state_dict().items())


def test_tokenizer_and_plain_models(tmp_path: Path) -> None:
    """Without a configuration only the weights are written; names, values and buffers are those of the module."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    export_hf(tmp_path / "export", model=net, tokenizer=_Tokenizer())
    assert sorted(p.name for p in (tmp_path / "export").iterdir()) == ["model.safetensors", "tokenizer.txt"]
    loaded = load_file(tmp_path / "export" / "model.safetensors")
    assert loaded.keys() == net.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in net.state_dict().items())


class _Tokenizer:
    def save_pretrained(self, path: Path) -> None:
        (Path(path) / "tokenizer.txt").write_text("words")


def test_an_export_is_replaced_only_on_demand(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    export_hf(tmp_path / "a", model=net)
    nn.init.zeros_(net.weight)
    with pytest.raises(CheckpointError, match="already exists"):
        export_hf(tmp_path / "a", model=net)
    export_hf(tmp_path / "a", model=net, overwrite=True)
    assert not load_file(tmp_path / "a" / "model.safetensors")["weight"].any()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def _write_error(directory: str) -> str:
    model = shard_model(nn.Sequential(*(nn.Linear(100, 100) for _ in range(4))), unit_modules=[])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            export_hf(Path(directory) / "a", model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


def test_a_failed_write_fails_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    for message in run_ranks(_write_error, 2, str(tmp_path)):
        assert "rank 0: OSError: [Errno 27] File too large" in message
    assert list(tmp_path.iterdir()) == []


def _gather_error(directory: str) -> str:
    """Rank 1 has no memory for a whole parameter, catches that and is not heard of again."""
    rank, done = dist.get_rank(), Path(directory) / "done"
    model = shard_model(nn.Linear(4096, 4096), unit_modules=[])
    dist.barrier()
    WATCHDOG._asked = 6.0
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, limits[1]))
    try:
        export_hf(Path(directory) / "export", model=model)
    except RuntimeError as error:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        until(done.exists) if rank == 1 else done.touch()
        return str(error)
    return ""


@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.full)])
def test_a_rank_that_cannot_gather_is_named_on_the_others(
    comm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    other, own = run_ranks(_gather_error, 2, str(tmp_path))
    assert "allocate memory" in own
    assert other.startswith("rank 0, gathering weight: rank 1 had an error in gathering weight (RuntimeError("), other


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    net: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="the dtype 'int8' is not supported"):
        export_hf(tmp_path / "a", model=net, dtype="int8")
    with pytest.raises(ConfigError, match="the size '5 apples' cannot be parsed"):
        export_hf(tmp_path / "a", model=net, max_shard_size="5 apples")
    net.peft_config = {}
    with pytest.raises(CheckpointError, match=r"contains adapters(.|\n)*hint: add them with"):
        export_hf(tmp_path / "a", model=net)
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    sizes: dict[int | str, int] = {"5GB": 5 * 10**9, "1.5GiB": 3 * 2**29, "200 mb": 2 * 10**8, 7: 7, "7": 7}
    assert {size: parse_size(size) for size in sizes} == sizes
