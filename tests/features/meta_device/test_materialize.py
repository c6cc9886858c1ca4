"""Models built on the meta device, and states taken from one rank.

pytest tests/features/meta_device/test_materialize.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fullshard.core.errors import WrapError
from fullshard.features import meta_parameters, repoint, shard_model
from tests.differential import CLOSE
from tests.distributed import run_ranks
from tests.traps import WIDTH, Stack, rank_and_size, sharded_parameters


class Plain(nn.Module):
    """Modules that all know `reset_parameters`, one of them tied and one with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


TOKENS = torch.arange(8) % 11


def whole_arrays(model: nn.Module) -> dict[str, Any]:
    """The same as arrays, which travel between processes by value."""
    return {name: value.numpy().copy() for name, value in whole_state(model).items()}


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters gathered, and all buffers, non-persistent ones included."""
    state = {name: p.full_tensor().detach() for name, p in sharded_parameters(model).items()}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def check_plain(how: str, units: tuple[str, ...]) -> dict[str, Any]:
    torch.manual_seed(3)
    context = torch.device("meta") if how == "meta" else meta_parameters()
    with context:
        model = Plain()
    assert all(p.is_meta for p in model.parameters())
    assert all(b.is_meta == (how == "meta") for b in model.buffers())
    model = shard_model(model, unit_modules=[model.get_submodule(name) for name in units])
    assert not any(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
    assert sharded_parameters(model)["embed.weight"].names == ("embed.weight", "head.weight")
    state = whole_arrays(model)
    model(TOKENS).square().mean().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert all(p.grad is not None for p in model.parameters())
    return state


@pytest.mark.parametrize("how", ["meta", "meta_parameters"])
@pytest.mark.parametrize("units", [(), ("blocks.0", "blocks.1"), ("embed", "blocks.0", "head")], ids=str)
def test_meta_model_with_reset_parameters(how: str, units: tuple[str, ...]) -> None:
    """Every tensor is initialized, and the same on every rank."""
    states = run_ranks(check_plain, 2, how, units)
    for name, value in states[0].items():
        assert np.array_equal(value, states[1][name]), name
        assert np.isfinite(value).all()
    assert (states[0]["blocks.0.1.running_var"] == 1).all() and (states[0]["blocks.0.2.weight"] == 1).all()
    assert 0 < np.abs(states[0]["blocks.0.0.weight"]).max() <= WIDTH**-0.5
    assert 0.7 < states[0]["embed.weight"].std() < 1.3


def test_same_initialization_on_any_number_of_ranks() -> None:
    alone, two, four = (run_ranks(check_plain, n, "meta", ("blocks.0", "blocks.1"))[0] for n in (1, 2, 4))
    for name, value in alone.items():
        assert np.array_equal(value, two[name]) and np.array_equal(value, four[name]), name


def check_optimizer_of_meta() -> None:
    """An optimizer that was made while the model was on the meta device holds parameters that are no more."""
    with torch.device("meta"):
        model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shard_model(model, unit_modules=[model.blocks[0]])
    repoint(optimizer, model)
    [group] = optimizer.param_groups
    assert all(held is own for held, own in zip(group["params"], model.parameters(), strict=True))


def test_an_optimizer_made_on_meta_is_repointed() -> None:
    run_ranks(check_optimizer_of_meta, 2)


def check_lstm() -> None:
    """An LSTM keeps a list of its own of its parameters."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LSTM(WIDTH, WIDTH), Last())
    sharded = shard_model(model, unit_modules=[model[0]])
    sharded(torch.randn(3, 2, WIDTH)).square().mean().backward()
    for name, parameter in sharded_parameters(sharded).items():
        assert parameter.grad is not None, name


class Last(nn.Module):
    """The output of an LSTM without its state."""

    def forward(self, value: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return value[0]


def test_meta_lstm() -> None:
    run_ranks(check_lstm, 2)


# -- Transformers -----------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32, "rope_theta": 5e5},
        tie_word_embeddings=True,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def check_llama(how: str) -> None:
    normal = llama()
    with torch.device("meta") if how == "meta" else meta_parameters():
        model = llama()
    layers: list[nn.Module] = list(model.get_submodule("model.layers").children())
    model = shard_model(model, unit_modules=layers)
    buffers = dict(model.named_buffers())
    for name, expected in normal.named_buffers():
        assert torch.equal(buffers[name], expected), name
        assert buffers[name].dtype is expected.dtype
    # The numbers drawn differ, because modules are initialized in another order, but not what they are drawn from.
    state, expected_state = whole_state(model), dict(normal.named_parameters())
    for name, parameter in expected_state.items():
        value = state[name]
        if parameter.std() > 0:
            assert 0.7 < value.std() / parameter.std() < 1.4, name
        else:
            assert torch.equal(value, parameter.detach()), name
    ids = torch.arange(12)[None]
    normal.load_state_dict({name: state.get(name, state["model.embed_tokens.weight"]) for name in normal.state_dict()})
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, normal(input_ids=ids, labels=ids).loss, **CLOSE)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("how", ["meta", "meta_parameters"])
def test_llama_on_meta(how: str) -> None:
    run_ranks(check_llama, 2, how)


# -- what nothing initializes -----------------------------------------------------------------------------------


class Forgetful(nn.Module):
    """A linear layer beside a tensor that only the constructor fills."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "parameter":
            self.forgotten: Any = nn.Parameter(torch.ones(WIDTH))
        else:
            values = {
                "float": torch.arange(WIDTH) / WIDTH,
                "int": torch.arange(WIDTH),
                "bool": torch.arange(WIDTH) > 2,
                "uint8": torch.arange(WIDTH, dtype=torch.uint8),
                "complex": torch.ones(WIDTH, dtype=torch.complex64),
                "scalar": torch.tensor(2.5),
            }
            self.register_buffer("forgotten", values[kind], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.forgotten
        return out


class HalfReset(Forgetful):
    """Has a `reset_parameters` that forgets the same tensor."""

    def reset_parameters(self) -> None:
        """Resets nothing that is here."""


def check_forgotten(cls: type[Forgetful], kind: str, how: str, init: bool) -> None:
    with torch.device("meta") if how == "meta" else meta_parameters():
        model = nn.Sequential(cls(kind))
    initialize: Callable[[nn.Module], Any] | None = fill if init else None
    if not init and (how == "meta" or kind == "parameter"):
        with pytest.raises(WrapError, match=r"(Forgetful|HalfReset).*forgotten"):
            shard_model(model, unit_modules=[], param_init_fn=initialize)
        return
    model = shard_model(model, unit_modules=[], param_init_fn=initialize)
    if kind != "parameter":
        expected = Forgetful(kind).forgotten
        got: Any = model[0].forgotten
        assert torch.equal(got, fill_value(expected) if how == "meta" else expected)
    assert model(torch.ones(2, WIDTH)).isfinite().all()


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, Forgetful):
        with torch.no_grad():
            module.forgotten.copy_(fill_value(module.forgotten))


def fill_value(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor)


@pytest.mark.parametrize("kind", ["float", "int", "bool", "uint8", "complex", "scalar", "parameter"])
@pytest.mark.parametrize("cls", [Forgetful, HalfReset])
def test_what_nothing_initializes_is_named(cls: type[Forgetful], kind: str) -> None:
    check_forgotten(cls, kind, "meta", False)


@pytest.mark.parametrize("kind", ["float", "int", "bool", "parameter"])
@pytest.mark.parametrize("how", ["meta", "meta_parameters"])
def test_param_init_fn(kind: str, how: str) -> None:
    check_forgotten(Forgetful, kind, how, True)


@pytest.mark.parametrize("kind", ["float", "int", "bool"])
def test_meta_parameters_keeps_buffers_real(kind: str) -> None:
    check_forgotten(Forgetful, kind, "meta_parameters", False)


def test_param_init_fn_gets_every_module_on_meta_once() -> None:
    with torch.device("meta"):
        model = Stack()
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    shard_model(model, unit_modules=[model.get_submodule("blocks.0")], param_init_fn=init)
    owners = [m for m in model.modules() if any(True for _ in m._parameters.values())]
    assert {id(m) for m in seen} == {id(m) for m in owners} and len(seen) == len(owners)
    for name, parameter in sharded_parameters(model).items():
        assert parameter.full_tensor().eq(0.5).all(), name


def test_meta_parameters_restores_registration() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(ArithmeticError), meta_parameters():
        raise ArithmeticError
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


# -- the same on every rank -------------------------------------------------------------------------------------


def check_sync(sync: bool) -> dict[str, Any]:
    rank, _ = rank_and_size()
    torch.manual_seed(rank)
    model = Plain()
    for block in model.blocks:
        block[1].running_mean.fill_(rank + 1.0)  # type: ignore[index]
    return whole_arrays(shard_model(model, unit_modules=list(model.blocks), sync_module_states=sync))


def test_sync_module_states() -> None:
    torch.manual_seed(0)
    expected = Plain()
    for state in run_ranks(check_sync, 3, True):
        for name, parameter in expected.named_parameters():
            assert np.array_equal(state[name], parameter.detach().numpy()), name
        assert (state["blocks.0.1.running_mean"] == 1.0).all()


def test_without_sync_each_rank_keeps_its_own_slices() -> None:
    """What is gathered is a patchwork then: the reason for the option."""
    states = run_ranks(check_sync, 2, False)
    torch.manual_seed(0)
    expected = {name: value.detach().numpy() for name, value in Plain().named_parameters()}
    assert any(not np.array_equal(states[0][name], value) for name, value in expected.items())
    assert (states[1]["blocks.0.1.running_mean"] == 2.0).all()
