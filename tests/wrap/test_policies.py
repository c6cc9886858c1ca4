"""Which modules become units, and what checkpointing and compiling do to a forward.

pytest tests/wrap/test_policies.py
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fullshard.core.errors import WrapError
from fullshard.features.recompute import checkpoint_modules, compile_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.wrap.policies import Auto, ByClass, ByPredicate, BySize, NoWrap, parse_policy


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        result: torch.Tensor = x + self.dropout(self.mlp(x)) * scale
        return result


class Stack(nn.Module):
    """An embedding, repeated blocks and a head that shares the embedding's weight."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module in modules]


def test_auto_finds_the_repeated_block() -> None:
    model = Stack()
    assert names(model, unit_modules(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, unit_modules(model, "auto")) == ["blocks.0", "blocks.1", "blocks.2"]


def test_auto_looks_through_sequentials() -> None:
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.ReLU()))
    assert names(model, unit_modules(model)) == ["0.0", "0.1", "1.0"]


def _config_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    small = {"d_model": 16, "num_heads": 2, "d_ff": 32, "vocab_size": 50, "decoder_start_token_id": 0}
    with torch.device("meta"):
        match kind:
            case "t5":
                config = transformers.T5Config(num_layers=2, d_kv=8, **small)
                return transformers.T5ForConditionalGeneration(config)
            case "whisper":
                config = transformers.WhisperConfig(
                    d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
                    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=60000,
                )  # fmt: skip
                return transformers.WhisperForConditionalGeneration(config)
            case "clip":
                towers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
                config = transformers.CLIPConfig(text_config=dict(towers), vision_config=dict(towers))
                return transformers.CLIPModel(config)
            case "mixtral":
                config = transformers.MixtralConfig(
                    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, num_local_experts=2, vocab_size=50,
                )  # fmt: skip
                return transformers.MixtralForCausalLM(config)
            case "pegasus" | "marian":
                prefix = kind.capitalize()
                config = getattr(transformers, f"{prefix}Config")(
                    d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2, vocab_size=50,
                    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
                    decoder_start_token_id=0, eos_token_id=1, forced_eos_token_id=1,
                )  # fmt: skip
                return getattr(transformers, "MarianMTModel" if kind == "marian" else f"{prefix}Model")(config)
            case "blip":
                towers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
                return transformers.BlipModel(transformers.BlipConfig(text_config=towers, vision_config=dict(towers)))
            case "longformer":
                towers = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
                return transformers.LongformerModel(transformers.LongformerConfig(**towers, attention_window=4))
            case "regnet":
                config = transformers.RegNetConfig(
                    embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[2] * 4, groups_width=8
                )
                return transformers.RegNetModel(config)
            case "llava":
                towers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
                config = transformers.LlavaConfig(
                    text_config=transformers.LlamaConfig(**towers, vocab_size=50),
                    vision_config=transformers.CLIPVisionConfig(**towers, image_size=8, patch_size=4),
                )
                return transformers.LlavaForConditionalGeneration(config)
            case "mamba":
                config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=50)
                return transformers.MambaForCausalLM(config)
            case _:
                config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50)
                return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("t5", {"T5Block": 4}),
        ("whisper", {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 1}),
        ("clip", {"CLIPEncoderLayer": 4}),
        ("mixtral", {"MixtralDecoderLayer": 2}),
        ("mamba", {"MambaBlock": 2}),
        ("gpt2", {"GPT2Block": 2}),
        ("pegasus", {"PegasusEncoderLayer": 2, "PegasusDecoderLayer": 3}),
        ("marian", {"MarianEncoderLayer": 2, "MarianDecoderLayer": 3}),
        ("blip", {"BlipTextLayer": 2, "BlipEncoderLayer": 2}),
        ("longformer", {"LongformerLayer": 2, "LongformerSelfAttention": 0}),
        ("regnet", {"RegNetYLayer": 8, "RegNetStage": 0}),
        ("llava", {"CLIPEncoderLayer": 2, "LlamaDecoderLayer": 2, "Linear": 0}),
    ],
)
def test_auto_on_transformers_models(kind: str, expected: dict[str, int]) -> None:
    classes = [type(module).__name__ for module in unit_modules(_config_model(kind))]
    assert {name: classes.count(name) for name in expected} == expected


def test_auto_warns_with_bytes_when_only_the_root_is_left() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(1024, 256, bias=False), nn.Linear(4, 4)

    with pytest.warns(UserWarning, match=r"only the root of Pair is wrapped.*1\.00 MiB"):
        assert unit_modules(Pair()) == []


def test_auto_warns_even_where_only_embeddings_are_left_in_the_root() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.scale = nn.Embedding(100, 8), nn.Linear(8, 8)

    with pytest.warns(UserWarning, match="only the root of Table is wrapped"):
        assert unit_modules(Table()) == []


def test_a_warning_names_what_is_left_in_the_root() -> None:
    """By its share, although some units were found; embeddings and head do not count."""

    class Wide(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Sequential(nn.Linear(8, 80), nn.Tanh())

    text = r"29% of the parameters of Wide \(.*\) are only in the root.*side \(Sequential, 720\).*'none' to accept"
    with pytest.warns(UserWarning, match=text):
        assert len(unit_modules(Wide())) == 3


def test_no_warning_where_nothing_could_be_wrapped_or_nobody_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unit_modules(nn.Linear(4, 4)) == []
        assert unit_modules(Stack(), "none") == []
        a_quarter_in_the_root = nn.Sequential(nn.Bilinear(1, 1, 12, bias=False), nn.Linear(4, 1, bias=False))
        assert len(unit_modules(a_quarter_in_the_root, {nn.Bilinear})) == 1


def test_by_class_strips_blanks_takes_classes_and_nests() -> None:
    model = Stack(depth=1)
    assert names(model, unit_modules(model, " Block , Embedding")) == ["embedding", "blocks.0"]
    assert names(model, unit_modules(model, {Block, nn.Linear})) == [
        "blocks.0", "blocks.0.mlp.0", "blocks.0.mlp.2", "head",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", ["block", "Blok"])
def test_a_wrong_class_name_lists_candidates(wrong: str) -> None:
    with pytest.raises(WrapError, match=r"no module of class.*Block \(3 x 552\)") as error:
        unit_modules(Stack(), wrong)
    assert error.value.hint == "did you mean 'Block'?"


@pytest.mark.parametrize("useless", ["GELU", "ModuleList"])
def test_a_class_that_cannot_be_a_unit_is_refused(useless: str) -> None:
    with pytest.raises(WrapError, match="none of them has a forward and parameters"):
        unit_modules(Stack(), useless)


def test_by_size_takes_the_smallest_large_enough() -> None:
    model = Stack(depth=2)  # the 552 parameters of a block are all in its mlp, whose linears have 288 and 264
    assert names(model, unit_modules(model, BySize(552))) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert names(model, unit_modules(model, BySize(200)))[:2] == ["blocks.0.mlp.0", "blocks.0.mlp.2"]


def test_children_of_multihead_attention_are_never_units() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 8))
    selected = names(model, unit_modules(model, lambda module: True))
    assert "0.self_attn" in selected
    assert not any(name.startswith("0.self_attn.") for name in selected)
    assert not any(name.startswith("0.self_attn.") for name in names(model, unit_modules(model, BySize(1))))


def test_a_shared_module_is_listed_once_and_units_are_left_out() -> None:
    block = Block()
    model = nn.Sequential(block, nn.ReLU(), block, Block())
    assert names(model, unit_modules(model, Block)) == ["0", "3"]

    class FSDPModule:
        pass

    block.__class__ = type("Block", (FSDPModule, Block), {})
    assert names(model, unit_modules(model, "Block")) == ["3"]


def test_parse_policy_and_reprs() -> None:
    assert parse_policy(None) == Auto()
    assert parse_policy("None") == NoWrap()
    assert repr(parse_policy([Block, "T5Block"])) == "ByClass(Block, T5Block)"
    assert repr(BySize(10_000_000)) == "BySize(at least 10.0 M parameters)"
    assert repr(parse_policy(test_parse_policy_and_reprs)) == "ByPredicate(test_parse_policy_and_reprs)"
    assert isinstance(parse_policy(lambda module: True), ByPredicate)
    for wrong in (3, ["Block", 1], " , ", []):
        with pytest.raises(WrapError):
            parse_policy(wrong)
    with pytest.raises(WrapError):
        BySize(0)
    assert ByClass((" A", "A ")).classes == ("A",)


def _loss_and_grads(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(tokens).square().sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_torchs_policies_belong_to_the_plugin() -> None:
    with pytest.raises(WrapError, match=r"a policy for torch's FSDP(.|\n)*hint: name the classes"):
        parse_policy(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_memory_not_numbers_or_names(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Stack()
    keys = list(plain.state_dict())
    model = copy.deepcopy(plain)
    calls: list[int] = []
    model.get_submodule("blocks.0.mlp").register_forward_hook(lambda *_: calls.append(1))
    checkpoint_modules(model, unit_modules(model), reentrant=reentrant)
    tokens = torch.randint(16, (2, 5))
    expected, grads = _loss_and_grads(plain, tokens)
    loss, actual = _loss_and_grads(model, tokens)
    assert len(calls) == 2, "the block was not recomputed"
    assert torch.equal(loss, expected)
    assert len(actual) == len(grads)
    assert all(torch.equal(a, b) for a, b in zip(actual, grads, strict=True))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_deep_copy_of_a_checkpointed_module_is_its_own() -> None:
    model = Stack()
    checkpoint_modules(model, unit_modules(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert getattr(other.blocks[0].forward, "__self__", None) is other.blocks[0]


def test_reentrant_keyword_tensors_get_gradients() -> None:
    block = Block().eval()
    model = nn.Sequential(block)
    checkpoint_modules(model, [block], reentrant=True)
    scale = torch.ones((), requires_grad=True)
    block(torch.randn(2, 8, requires_grad=True), scale=scale).sum().backward()
    assert scale.grad is not None


def test_only_the_outermost_of_nested_modules_is_checkpointed() -> None:
    model = Stack(depth=1)
    assert names(model, checkpoint_modules(model, unit_modules(model, [Block, nn.Linear]))) == ["blocks.0", "head"]


def test_checkpointing_refuses_what_would_go_wrong() -> None:
    model = Stack()
    with pytest.raises(WrapError, match="not part of Stack"):
        checkpoint_modules(model, [Block()])
    checkpoint_modules(model, [model.blocks[0]])
    with pytest.raises(WrapError, match=r"'blocks\.0' \(Block\) are already checkpointed"):
        checkpoint_modules(model, [model.blocks[0]])


def test_checkpointing_a_transformers_model_that_would_fill_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=True
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(32, (2, 6))
    expected = model(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_modules(model, unit_modules(model))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    with pytest.raises(WrapError, match="non-empty key/value cache"):
        model(input_ids=tokens, past_key_values=expected.past_key_values)
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        del layer.__dict__["_recomputed_forward"], layer.forward
    with pytest.raises(WrapError, match="own gradient checkpointing enabled"):
        checkpoint_modules(model, unit_modules(model))


@pytest.mark.parametrize("kinds", [{}, {"reentrant": True}, {"selective": True}])
def test_a_cache_is_withheld_that_comes_without_a_name(kinds: dict[str, bool]) -> None:
    """GPT-2 hands it to its blocks as the second argument; recomputing would fill it twice, and attend to both."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(32, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_modules(model, unit_modules(model), **kinds)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks, and hides its own warning
def test_compiling_keeps_names_and_composes_with_checkpointing() -> None:
    torch.manual_seed(0)
    plain = Stack(depth=2).eval()
    model = copy.deepcopy(plain)
    blocks = unit_modules(model)
    checkpoint_modules(model, blocks)
    compile_modules(blocks, backend="aot_eager")
    tokens = torch.randint(16, (2, 5))
    expected, grads = _loss_and_grads(plain, tokens)
    loss, actual = _loss_and_grads(model, tokens)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(actual, grads)
    assert list(model.state_dict()) == list(plain.state_dict())
