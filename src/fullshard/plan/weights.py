"""Building blocks of the families of models: fields of a `config.json`, and the weights of common modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.plan.shapes import ModelShape, ParameterShape, UnitShape


class Fields:
    """The fields of a `config.json`, each under whichever of its names is there."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that is set to a positive whole number.

        Raises:
            ConfigError: none is and there is no default, or it is not such a number.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.where}: {name} is {value!r}, expected a positive whole number")
            return value
        if default is None:
            raise ConfigError(
                f"{self.where}: no field {' or '.join(names)}", hint="the file must be the model's whole config.json"
            )
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false.

        Raises:
            ConfigError: it is something else, such as the text "false".
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool | int):
            raise ConfigError(f"{self.where}: {name} is {value!r}, expected true or false")
        return bool(value)

    def items(self, name: str) -> tuple[Any, ...]:
        """Return a field that is a list; empty where it is not set.

        Raises:
            ConfigError: it is something else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"{self.where}: {name} is {value!r}, expected a list")
        return tuple(value or ())

    def heads(self) -> tuple[int, int, int]:
        """Return the heads of queries, those of keys and values, and their width."""
        heads, hidden = self.number("num_attention_heads"), self.number("hidden_size")
        kv_heads = self.number("num_key_value_heads", default=heads)
        return heads, kv_heads, self.number("head_dim", default=hidden // heads)

    def is_set(self, name: str) -> bool:
        """Return whether the field is there."""
        return self.values.get(name) is not None

    def text(self, *names: str, default: str) -> str:
        """Return the first of `names` that is set to a word.

        Raises:
            ConfigError: it is something else.
        """
        value = next((self.values[name] for name in names if self.is_set(name)), default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {' or '.join(names)} is {value!r}, expected a word")
        return value

    def is_dropped(self, *names: str, default: float = 0.0) -> bool:
        """Return whether anything is dropped out: the first of `names` that is set is more than 0.

        Raises:
            ConfigError: it is no number.
        """
        value = next((self.values[name] for name in names if self.is_set(name)), default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {' or '.join(names)} is {value!r}, expected a number")
        return value > 0


def attention_window(fields: Fields, index: int, *, period: int) -> int:
    """Return how many keys a query of layer `index` sees; 0: all before it.

    Args:
        fields: `layer_types` says it layer by layer; older files have a pattern, or nothing.
        index: of the layer.
        period: the family's: one layer in `period` has no window; 1: every layer has one, 0: none has.
    """
    width, kinds = fields.values.get("sliding_window"), fields.items("layer_types")
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        return 0
    if index < len(kinds):
        return width if kinds[index] == "sliding_attention" else 0
    period = fields.number("sliding_window_pattern", default=period) if period else 0
    return width if period == 1 or (period and (index + 1) % period) else 0


Weights = list[ParameterShape]
"""The weights of one module, in definition order."""


def linear_weights(name: str, inputs: int, outputs: int, *, bias: bool = False, conv1d: bool = False) -> Weights:
    """Return the weights of a linear layer, or of GPT-2's `Conv1D`, whose weight is transposed."""
    shape = (inputs, outputs) if conv1d else (outputs, inputs)
    weights = [ParameterShape(f"{name}.weight", shape, role="matrix")]
    return [*weights, ParameterShape(f"{name}.bias", (outputs,))] if bias else weights


def norm_weights(name: str, width: int, *, bias: bool = False) -> Weights:
    """Return the weights of a normalisation."""
    weights = [ParameterShape(f"{name}.weight", (width,))]
    return [*weights, ParameterShape(f"{name}.bias", (width,))] if bias else weights


def embedding_weights(name: str, rows: int, width: int) -> Weights:
    """Return the weight of a table of words or positions."""
    return [ParameterShape(f"{name}.weight", (rows, width), role="embedding")]


def head_weights(name: str, width: int, vocab: int) -> Weights:
    """Return the weights of the head, which makes logits."""
    return [ParameterShape(f"{name}.weight", (vocab, width), role="head")]


def gated_weights(prefix: str, hidden: int, width: int, *, bias: bool = False) -> Weights:
    """Return the weights of a feed-forward part that multiplies two projections."""
    return [
        *linear_weights(f"{prefix}.gate_proj", hidden, width, bias=bias),
        *linear_weights(f"{prefix}.up_proj", hidden, width, bias=bias),
        *linear_weights(f"{prefix}.down_proj", width, hidden, bias=bias),
    ]


def attention_weights(
    prefix: str,
    hidden: int,
    queries: int,
    keys: int,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    gated: bool = False,
) -> Weights:
    """Return the weights of attention with four projections; `queries`, `keys`: widths of all heads together.

    `gated`: a gate is projected beside the queries.
    """
    return [
        *linear_weights(f"{prefix}.q_proj", hidden, 2 * queries if gated else queries, bias=bias),
        *linear_weights(f"{prefix}.k_proj", hidden, keys, bias=bias),
        *linear_weights(f"{prefix}.v_proj", hidden, keys, bias=bias),
        *linear_weights(f"{prefix}.o_proj", queries, hidden, bias=bias if output_bias is None else output_bias),
    ]


def head_norm_weights(prefix: str, queries: int, keys: int) -> Weights:
    """Return the weights of the norms of queries and keys."""
    return norm_weights(f"{prefix}.q_norm", queries) + norm_weights(f"{prefix}.k_norm", keys)


def expert_weights(prefix: str, experts: int, hidden: int, width: int) -> Weights:
    """Return the weights of experts whose weights are stacked."""
    return [
        ParameterShape(f"{prefix}.experts.gate_up_proj", (experts, 2 * width, hidden)),
        ParameterShape(f"{prefix}.experts.down_proj", (experts, hidden, width)),
    ]


def decoder_of(
    fields: Fields, layers: Iterable[UnitShape], *, tied: bool = False, capped_logits: bool = False
) -> ModelShape:
    """Build a decoder of these layers, as Llama has it around them; `tied`: its head, if the file does not say."""
    vocab, hidden = fields.number("vocab_size"), fields.number("hidden_size")
    root = [*embedding_weights("model.embed_tokens", vocab, hidden), *norm_weights("model.norm", hidden)]
    return model_of(fields, layers, root, hidden, tied=tied, capped_logits=capped_logits)


def model_of(
    fields: Fields,
    units: Iterable[UnitShape],
    root: Weights,
    hidden: int,
    *,
    tied: bool,
    capped_logits: bool = False,
) -> ModelShape:
    """Build a model of units with `root` around them and, unless tied, the head; `tied`: if the file does not say."""
    vocab, tied = fields.number("vocab_size"), fields.flag("tie_word_embeddings", tied)
    if not tied:
        root = [*root, *head_weights("lm_head", hidden, vocab)]
    around = UnitShape("", tuple(root))
    return ModelShape("", (*units, around), vocab, hidden, tied, capped_logits=capped_logits)
