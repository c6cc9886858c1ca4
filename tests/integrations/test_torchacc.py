"""`fullshard.torchacc` in one process: every field of `Config`, length buckets, names that are absent.

pytest tests/integrations/test_torchacc.py
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard.torchacc as torchacc
from fullshard.config.dialect import Status
from fullshard.config.resolve import resolve
from fullshard.config.torchacc import TORCHACC, Config, check_sizes
from fullshard.core.errors import CheckpointError, ConfigError, DataError, OptimizerError, WrapError

DOCS = Path(__file__).parents[2] / "docs" / "torchacc.md"

DEFAULTS: dict[str, Any] = {
    "backend": "eager",
    "compute.fp16": False,
    "compute.bf16": False,
    "compute.acc_scaled_dot_attn": False,
    "compute.disable_kernel_patches": False,
    "memory.gc": False,
    "memory.gc_cls": None,
    "memory.gc_cnt": None,
    "dist.dp.size": None,
    "dist.tp.size": 1,
    "dist.pp.size": 1,
    "dist.pp.num_micro_batches": 1,
    "dist.pp.input_names": None,
    "dist.pp.split_points": [],
    "dist.pp.broadcast_loss": True,
    "dist.fsdp.size": 1,
    "dist.fsdp.wrap_layer_cls": set(),
    "dist.fsdp.flatten_parameters": True,
    "dist.fsdp.sync_module_states": False,
    "dist.fsdp.use_spmd": False,
    "dist.fsdp.shard_output_callable": None,
    "dist.sp.size": 1,
    "dist.topology": ["dp", "fsdp", "pp", "tp"],
    "dataloader.buckets": None,
    "dataloader.max_length": None,
    "dataloader.num_buckets": None,
    "dataloader.pad_value_dict": None,
}


def get(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def configured(**fields: Any) -> Config:
    """A configuration with fields assigned one by one; `__` stands for a dot."""
    config = Config()
    for name, value in fields.items():
        *parents, last = name.split("__")
        setattr(get(config, ".".join(parents)) if parents else config, last, value)
    return config


# -- Config -----------------------------------------------------------------------------------------------------


def test_the_fields_and_defaults_are_torchaccs() -> None:
    assert {key.name: get(Config(), key.name) for key in TORCHACC.keys} == DEFAULTS


def test_configurations_share_nothing() -> None:
    first, second = Config(), Config()
    first.dist.fsdp.wrap_layer_cls.add("Block")
    first.compute.bf16 = True
    assert second.dist.fsdp.wrap_layer_cls == set()
    assert second.compute.bf16 is False


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"dist__fsdp__sz": 4}, "config.dist.fsdp has no field 'sz'", "did you mean 'size'?"),
        ({"compute__bf_16": True}, "config.compute has no field 'bf_16'", "did you mean 'bf16'?"),
        (
            {"memory__checkpoint": True},
            "config.memory has no field 'checkpoint'",
            "use one of gc, gc_cls",
        ),
        ({"fsdp": 4}, "config has no field 'fsdp'", "use one of backend, compute"),
        ({"dist__fsdp__wrap_layer_cls": "GPT2Block"}, "expected a set of class names", "write {'GPT2Block'}"),
        ({"dist__fsdp__wrap_layer_cls": ["A", "B"]}, "expected a set of class names", "write {'A', 'B'}"),
        ({"dist__fsdp__wrap_layer_cls": {3}}, "should be a valid string, got 3", None),
        ({"memory__gc_cls": "GPT2Block"}, "config.memory.gc_cls: expected a set", "write {'GPT2Block'}"),
        ({"memory__gc_cnt": -1}, "config.memory.gc_cnt", None),
        ({"dist__fsdp__size": "4"}, "config.dist.fsdp.size: input should be a valid integer, got '4'", None),
        ({"dist__fsdp__size": 0}, "greater than or equal to 1, got 0", None),
        ({"dist__fsdp__size": True}, "config.dist.fsdp.size", None),
        ({"dist__fsdp": 4}, "config.dist.fsdp", None),
        ({"compute__bf16": 1}, "config.compute.bf16: input should be a valid boolean, got 1", None),
        ({"backend": "xla"}, "input should be 'lazy' or 'eager', got 'xla'", None),
        ({"dist__topology": ["dp", "fsdp"]}, "config.dist.topology: expected", "list each of the four axes once"),
        (
            {"dataloader__buckets": [256, 128]},
            "config.dataloader.buckets: expected lengths in ascending order",
            "write [128, 256]",
        ),
        ({"dataloader__buckets": [0, 128]}, "expected positive lengths", "use a list such as"),
        ({"dataloader__buckets": []}, "expected positive lengths", "use a list such as"),
        ({"dataloader__buckets": [1.5]}, "config.dataloader.buckets", None),
        ({"dataloader__max_length": 0}, "config.dataloader.max_length", None),
    ],
)
def test_a_wrong_assignment_is_an_error_at_once(fields: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        configured(**fields)
    assert message in str(error.value)
    assert hint is None or (error.value.hint is not None and hint in error.value.hint)


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"compute__fp16": True, "compute__bf16": True}, "compute.fp16 means precision.mode = fp16", "keep one"),
        ({"dist__tp__size": 2}, "dist.tp.size = 2 is not supported: split layers", "remove dist.tp.size"),
        ({"dist__pp__size": 2}, "dist.pp.size = 2 is not supported: pipeline", "remove dist.pp.size"),
        ({"dist__sp__size": 2}, "dist.sp.size = 2 is not supported: sequence", "remove dist.sp.size"),
        ({"dist__fsdp__shard_output_callable": print}, "requests PyTorch/XLA", "every rank has its own outputs"),
        (
            {"dist__fsdp__use_spmd": True},
            "dist.fsdp.use_spmd: true requests PyTorch/XLA",
            "pip install 'fullshard[xla]'",
        ),
        ({"memory__gc_cls": {"Block"}}, "memory.gc_cls = [Block] has no effect without memory.gc", "gc = True"),
        ({"memory__gc_cnt": 2}, "memory.gc_cnt = 2 has no effect without memory.gc", "gc = True"),
        ({"dataloader__num_buckets": 2}, "has no effect without dataloader.max_length", "set max_length"),
        ({"dataloader__buckets": [8], "dataloader__max_length": 8}, "both set the lengths", "keep one"),
        ({"dataloader__pad_value_dict": {"x": 0}}, "has no effect without dataloader.buckets", "set buckets"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str, hint: str) -> None:
    config = configured(**fields)
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert message in str(error.value)
    assert error.value.hint is not None
    assert hint in error.value.hint
    with pytest.raises(ConfigError, match=r"torchacc\.Config"):
        torchacc.accelerate(nn.Linear(2, 2), config=config)


OTHER_VALUES: dict[str, Any] = {
    "backend": "lazy",
    "compute.acc_scaled_dot_attn": True,
    "compute.disable_kernel_patches": True,
    "dist.pp.num_micro_batches": 2,
    "dist.pp.input_names": ["x"],
    "dist.pp.split_points": ["h.1"],
    "dist.pp.broadcast_loss": False,
    "dist.fsdp.flatten_parameters": False,
    "dist.fsdp.sync_module_states": True,
}


def test_every_field_without_effect_says_so() -> None:
    assert set(OTHER_VALUES) == {key.name for key in TORCHACC.keys if key.status is Status.NO_EFFECT}
    for name, value in OTHER_VALUES.items():
        [note] = configured(**{name.replace(".", "__"): value}).reading().notes
        assert str(note).startswith(f"torchacc.Config: {name} has no effect here: ")
    assert Config().reading().notes == []


def test_what_the_fields_set() -> None:
    config = configured(compute__bf16=True, memory__gc=True, dist__fsdp__size=2, dist__fsdp__wrap_layer_cls={"B", "A"})
    settings = {path: setting.value for path, setting in resolve([config.reading()]).settings.items()}
    assert settings == {
        "precision.mode": "bf16",
        "sharding.activation_checkpointing": True,
        "sharding.strategy": "HYBRID_SHARD",
        "sharding.shard_size": 2,
        "sharding.wrap_classes": ("A", "B"),
    }


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({"dist__fsdp__size": 4}, 6, "dist.fsdp.size = 4 does not divide the world size of 6"),
        ({"dist__fsdp__size": 2, "dist__dp__size": 3}, 4, "times dist.fsdp.size = 2 is 6, but the world size is 4"),
        ({"dist__fsdp__size": 2, "dist__topology": ["fsdp", "dp", "pp", "tp"]}, 4, "puts replicas next to each other"),
        ({"dist__fsdp__size": 2, "dist__dp__size": 2}, 4, None),
        ({"dist__fsdp__size": 4, "dist__topology": ["fsdp", "dp", "pp", "tp"]}, 4, None),
        ({"dist__fsdp__size": 2, "dist__topology": ["pp", "tp", "dp", "fsdp"]}, 4, None),
        ({}, 5, None),
    ],
)
def test_sizes_against_the_ranks(fields: dict[str, Any], world_size: int, message: str | None) -> None:
    entries = configured(**fields).entries()
    if message is None:
        check_sizes(entries, world_size)
        return
    with pytest.raises(ConfigError) as error:
        check_sizes(entries, world_size)
    assert message in str(error.value)


def test_a_size_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"start 4 processes \(or a multiple of it\), or use one of 1, 2, 3, 6"):
        check_sizes(configured(dist__fsdp__size=4).entries(), 6)


def test_files_and_dicts(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(
        "compute: {bf16: true}\n"
        "dist:\n  fsdp:\n    size: 2\n    wrap_layer_cls: [GPT2Block]\n    flatten_parameters: false\n"
        "dataloader:\n  buckets: [8, 16]\n  pad_value_dict: {input_ids: 0}\n"
        "memory: {gc: true, gc_cls: [GPT2Block]}\n"
    )
    config = Config.of(path)
    assert config.compute.bf16
    assert config.dist.fsdp.wrap_layer_cls == {"GPT2Block"}
    assert config.memory.gc_cls == {"GPT2Block"}
    assert config.dataloader.pad_value_dict == {"input_ids": 0}
    [note] = config.reading().notes
    assert str(note).startswith(f"{path}:6:5: dist.fsdp.flatten_parameters has no effect here")
    fields = {"compute": {"bf16": True}, "dist": {"fsdp": {"size": 2, "wrap_layer_cls": ["GPT2Block"]}}}
    assert Config.of(fields).dist.fsdp.size == 2
    assert Config.of(None) == Config()
    assert Config.of(config) is config
    with pytest.raises(ConfigError, match=r"gc_cls: expected a set of class names, got \[\['Block'\]\]"):
        Config.of({"memory": {"gc_cls": [["Block"]]}})
    with pytest.raises(ConfigError, match=r"got a builtins\.int"):
        Config.of(3)  # type: ignore[arg-type]


def test_faults_in_a_file_are_all_named_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text("compute:\n  bf16: yes please\ndist:\n  fsdp:\n    sz: 2\n  tp: 3\n")
    with pytest.raises(ConfigError) as error:
        Config.from_file(path)
    text = str(error.value)
    assert f"{path}:2:3: config.compute.bf16: input should be a valid boolean" in text
    assert f"{path}:5:5: unknown key 'dist.fsdp.sz'" in text
    assert "did you mean 'dist.fsdp.size'?" in text
    assert f"{path}:6:3: unknown key 'dist.tp'" in text


def test_the_page_has_the_table() -> None:
    """The table in docs/torchacc.md is what the dialect says; print(table()) makes it anew."""
    assert table() in DOCS.read_text()


def table() -> str:
    rows = ["| field | default | here |", "|---|---|---|"]
    for key in TORCHACC.keys:
        reason = f": {key.because}" if key.because else ""
        target = f" as `{key.target}`" if key.target else ""
        rows.append(f"| `{key.name}` | `{get(Config(), key.name)!r}` | {key.status}{target}{reason} |")
    return "\n".join(rows)


# -- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mark_dynamic", "torch._dynamo.mark_dynamic"),
        ("accelerate_hf_trainer", "fullshard launch"),
        ("ops", "scaled_dot_product_attention"),
        ("get_global_context", "no global state"),
        ("anything", "has no 'anything'"),
    ],
)
def test_absent_names_say_what_to_use(name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=reason):
        getattr(torchacc, name)


def test_absent_names_of_dist() -> None:
    with pytest.raises(AttributeError, match="tensor parallelism is not supported"):
        getattr(torchacc.dist, "tp")  # noqa: B009 -- a type checker knows that it is not there
    with pytest.raises(AttributeError, match="in place, without a wrapper"):
        getattr(torchacc.dist, "FullyShardedDataParallel")  # noqa: B009


def test_it_is_imported_in_every_usual_way() -> None:
    from fullshard import torchacc as second

    assert second is torchacc
    assert importlib.import_module("fullshard.torchacc.dist") is torchacc.dist
    assert importlib.import_module("fullshard.torchacc.config").Config is torchacc.Config
    assert sys.modules["fullshard.torchacc.dist.fsdp"] is torchacc.dist.fsdp


def test_what_belongs_to_recorded_graphs_does_nothing() -> None:
    torchacc.mark_step()
    torchacc.sync(wait=True)
    torchacc.dist.mark_step()
    assert torchacc.lazy_device().type in ("cpu", "cuda")
    assert not torchacc.is_lazy_device("cpu")
    assert not torchacc.is_lazy_tensor(torch.zeros(1))
    assert (torchacc.dist.world_size(), torchacc.dist.rank(), torchacc.dist.local_rank()) == (1, 0, 0)
    assert torchacc.dist.is_master_ordinal()
    assert torchacc.dist.rendezvous("here", b"message") == [b"message"]
    [moved, rest] = torchacc.send_cpu_data_to_device([torch.ones(2), {"x": torch.ones(1)}], "meta")
    assert moved.is_meta
    assert rest["x"].is_meta
    with pytest.raises(ConfigError, match="omit replicas"):
        torchacc.dist.rendezvous("here", replicas=[1])


# -- accelerate -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, [1, 1, 1, 1]),
        ({"memory__gc": True}, [2, 2, 2, 2]),
        ({"memory__gc": True, "memory__gc_cls": {"Block"}}, [2, 2, 2, 2]),
        ({"memory__gc": True, "memory__gc_cnt": 2}, [2, 2, 1, 1]),
        ({"memory__gc": True, "memory__gc_cls": {"Block"}, "memory__gc_cnt": 0}, [1, 1, 1, 1]),
    ],
)
def test_what_is_checkpointed_is_computed_twice(fields: dict[str, Any], calls: list[int]) -> None:
    model = torchacc.accelerate(blocks(), config=configured(dist__fsdp__wrap_layer_cls={"Block"}, **fields))
    model(torch.ones(2, 4)).sum().backward()
    assert [block.calls for block in model] == calls


def test_what_cannot_be_checkpointed() -> None:
    with pytest.raises(WrapError, match="did you mean 'Block'"):
        torchacc.accelerate(blocks(), config=configured(memory__gc=True, memory__gc_cls={"Blok"}))
    with pytest.raises(ConfigError, match="gc_cnt = 9, but Sequential has only 4 modules"):
        torchacc.accelerate(blocks(), config=configured(memory__gc=True, memory__gc_cnt=9))


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(WrapError, match="did you mean 'Block'"):
        torchacc.accelerate(blocks(), config=configured(dist__fsdp__wrap_layer_cls={"Blocks"}))


def test_more_shards_than_ranks() -> None:
    with pytest.raises(ConfigError, match=r"does not divide the world size of 1\nhint: start 4 processes"):
        torchacc.accelerate(blocks(), config=configured(dist__fsdp__size=4))


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="dataloader is a list"):
        torchacc.accelerate(blocks(), [1, 2])  # type: ignore[arg-type]
    model = torchacc.accelerate(blocks())
    with pytest.raises(ConfigError, match="already sharded"):
        torchacc.accelerate(model)
    with pytest.raises(ConfigError, match="pipeline parallelism"):
        model.forward_backward()


def test_a_field_without_effect_is_said_once() -> None:
    config = configured(dist__fsdp__flatten_parameters=False)
    config.dist.pp.broadcast_loss = False
    with pytest.warns(UserWarning, match="has no effect here") as caught:
        torchacc.accelerate(blocks(), config=config)
    said = [str(warning.message).split(":")[1].strip().split()[0] for warning in caught]
    assert sorted(said) == ["dist.fsdp.flatten_parameters", "dist.pp.broadcast_loss"]
    torchacc.accelerate(blocks(), config=config)  # a second warning would be an error here


def test_the_model_stays_what_it_was() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=31)
    model = GPT2LMHeadModel(config)
    prepared = torchacc.accelerate(model, config=configured(dist__fsdp__wrap_layer_cls={"GPT2Block"}))
    assert prepared is model
    assert prepared.config is config
    assert type(prepared).__name__ == "GPT2LMHeadModel"
    assert prepared.device.type == "cpu"
    made = prepared.generate(torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2), max_new_tokens=3, pad_token_id=0)
    assert made.shape[1] > 2
    metadata = prepared.get_shard_metadata()
    assert metadata["shard_info"][""]["lm_head.weight"]["_orig_size"] == (32, 8)


def test_float16_needs_a_scaler() -> None:
    model = torchacc.accelerate(blocks(), config=configured(compute__fp16=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(torch.ones(2, 4)).float().sum()
    loss.backward()
    with pytest.raises(OptimizerError, match="does not use a loss scaler"):
        optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torchacc.amp.GradScaler(init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
    assert len(torchacc.fetch_gradients(optimizer)) == len(before)
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    other.step()  # not its model
    disabled = torchacc.amp.GradScaler(enabled=False)
    second = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(OptimizerError, match="does not use a loss scaler"):
        disabled.step(second)


def test_an_optimizer_made_too_early_is_refused() -> None:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = torchacc.accelerate(model, config=configured(dist__fsdp__wrap_layer_cls={"Block"}))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OptimizerError, match="repoint"):
        optimizer.step()


# -- AsyncLoader ------------------------------------------------------------------------------------------------


def batch_of(length: int, keys: tuple[str, ...] = ("input_ids", "attention_mask", "labels")) -> dict[str, Any]:
    return {key: torch.ones(2, length, dtype=torch.long) for key in keys}


def test_batches_are_padded_to_the_next_bucket() -> None:
    loader = torchacc.AsyncLoader([batch_of(length) for length in (3, 4, 5, 9, 16)], "cpu", buckets=[4, 8, 16])
    batches = list(loader)
    assert [batch["input_ids"].shape[-1] for batch in batches] == [4, 4, 8, 16, 16]
    assert batches[0]["input_ids"][0].tolist() == [1, 1, 1, 0]
    assert batches[0]["attention_mask"][0].tolist() == [1, 1, 1, 0]
    assert batches[0]["labels"][0].tolist() == [1, 1, 1, -100]
    assert len(loader) == 5


def test_a_batch_longer_than_all_buckets_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    loader = torchacc.AsyncLoader([batch_of(length) for length in (12, 11, 12)], "cpu", buckets=[4, 8])
    assert [batch["labels"].shape[-1] for batch in loader] == [12, 12, 12]
    assert loader.buckets == [4, 8, 12]
    assert capsys.readouterr().err.count("a batch of length 12 is longer than all buckets, [4, 8]") == 1


@pytest.mark.parametrize(
    ("longest", "count", "expected"),
    [(64, 4, [16, 32, 48, 64]), (100, 8, [13, 25, 38, 50, 63, 75, 88, 100]), (3, 8, [1, 2, 3]), (512, None, None)],
)
def test_uniform_buckets_end_at_the_longest(longest: int, count: int | None, expected: list[int] | None) -> None:
    loader = torchacc.AsyncLoader([], "cpu", max_length=longest, num_buckets=count)
    assert loader.buckets == (expected or [64, 128, 192, 256, 320, 384, 448, 512])
    assert list(loader) == []


def test_own_padding_and_values_per_sample() -> None:
    batch = {"x": torch.ones(2, 3), "label": torch.tensor([1, 2]), "name": ["a", "b"]}
    [padded] = torchacc.AsyncLoader([batch], "cpu", buckets=[5], pad_value_dict={"x": 7})
    assert padded["x"][0].tolist() == [1, 1, 1, 7, 7]
    assert padded["label"].tolist() == [1, 2]
    assert padded["name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("batch", "padding", "message"),
    [
        (batch_of(3, ("input_ids", "token_type_ids")), None, r"pass pad_value_dict with a value for each of"),
        (batch_of(3, ("input_ids",)), {"input_ids": 0, "labels": 0}, r"the batch has the keys \['input_ids'\]"),
        ([torch.ones(2, 3)], None, "got a list"),
    ],
)
def test_batches_that_cannot_be_padded(batch: Any, padding: dict[str, float] | None, message: str) -> None:
    loader = torchacc.AsyncLoader([batch], "cpu", buckets=[4], pad_value_dict=padding)
    with pytest.raises(DataError, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buckets": [8, 4]}, "ascending"),
        ({"buckets": []}, "ascending"),
        ({"buckets": [4], "max_length": 8}, "use only one of the two"),
        ({"max_length": 0}, "at least 1"),
        ({"pad_value_dict": {"x": 0}}, "has no effect without buckets"),
        ({"prefetch": 3}, "no argument 'prefetch'"),
    ],
)
def test_wrong_arguments_of_the_loader(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchacc.AsyncLoader([], "cpu", **arguments)


def test_arguments_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    torchacc.AsyncLoader([], "cpu", batches_per_execution=2)
    assert "batches_per_execution has no effect here" in capsys.readouterr().err


def test_the_position_is_that_of_the_loop() -> None:
    dataset = TensorDataset(torch.arange(12))
    model = nn.Linear(1, 1)
    _, loader = torchacc.accelerate(model, DataLoader(dataset, batch_size=2, shuffle=True))
    order = [batch[0].tolist() for batch in loader]
    assert len(loader) == 6
    assert sorted(itertools.chain(*order)) == list(range(12))
    assert loader.state_dict()["epoch"] == 1
    following = iter(loader)
    first = [next(following)[0].tolist() for _ in range(2)]
    position = loader.state_dict()
    assert position["consumed"] == 4
    rest = [batch[0].tolist() for batch in following]
    loader.load_state_dict(position)
    assert [batch[0].tolist() for batch in loader] == rest
    assert sorted(itertools.chain(*first, *rest)) == list(range(12))
    assert loader.dataset is dataset


# -- saving on one rank -----------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "value.pth"
    torchacc.save({"x": torch.arange(10)[2:4]}, path)
    assert torch.load(path)["x"].tolist() == [2, 3]
    assert torch.load(path)["x"].untyped_storage().nbytes() == 16
    with pytest.raises(CheckpointError, match="Is a directory"):
        torchacc.save(1, tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        torchacc.save({"x": 1}, path)
    assert [file.name for file in path.parent.iterdir()] == ["value.pth"]
    assert torch.load(path)["x"].tolist() == [2, 3]


def test_one_rank_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torchacc.accelerate(blocks())
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for path in ("model", "model.pth"):
        checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        torchacc.save(checkpoint, path, master_only=False)
        whole, written = torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(path, "*.pth")
        assert written == "consolidated.pth"
        assert {name: value.tolist() for name, value in whole.items()} == {n: v.tolist() for n, v in expected.items()}
        assert torch.load("consolidated.pth")["model"].keys() == whole.keys()
    with pytest.raises(CheckpointError, match=r"no file matches nowhere\*\.pth"):
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints("nowhere")
    torchacc.save({"x": 1}, "plain.pth")
    with pytest.raises(CheckpointError, match=r"plain\.pth does not hold a model"):
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints("plain.pth")
