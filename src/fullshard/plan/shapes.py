"""A model as the planner sees it: units of parameters with shapes, and what a layer keeps for backward.

    ModelShape
    ├── units     inner units in definition order, the root last: the order the engine makes them in
    │   ├── parameters    name, shape, stored dtype, trainable, exact
    │   └── block         what its forward computes; None for a unit that is not a transformer layer
    └── calls     the units in the order their forwards begin

Names and order are those of the Transformers model, so that layouts and events can be compared one to one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError
from fullshard.core.forms import FORMS


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: qualified name in the model; a tied parameter has its first.
        exact: whether it is bytes that are never cast (quantised weights and their scales).
        statistics: dtype of running statistics that it computes with, in that dtype (a batch norm's), None for none.
        role: `matrix` for the weight of a linear layer inside a block (LoRA and quantisation apply to it), `embedding`,
            `head` or `other`.
        form: name of the form (`core.forms`) that it is stored and sent in, as codes; empty: as numbers.
        tiles: into how many parts tensor parallelism has cut it; `shape` is that of one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    exact: bool = False
    statistics: str | None = None
    role: str = "other"
    form: str = ""
    tiles: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter as it is stored."""
        return FORMS[self.form].nbytes(self.numel) if self.form else self.numel * itemsize(self.dtype)


_POSITIONS = ("wpe.weight", "position_embeddings.weight", "decoder.embed_positions.weight", ".position_embeddings")
"""GPT-2's, BERT's, Whisper's and OPT's (of what they write), ViT's."""

Norm = Literal["layer", "rms", "rms-float32-weight"]
"""LayerNorm; RMS norms, whose statistics are float32: Llama's, whose weight multiplies in the compute dtype; Gemma's,
whose weight multiplies before the result is cast."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of one layer, per token.

    Attributes:
        read: widths of all their inputs, added up.
        read_once: the same with what several read counted once, and without attention's output, which is kept anyway.
        ranks: of all, added up.
        dropout: whether they drop out what they read.
        written: widths of all tensors that they add to, added up.
    """

    read: int
    read_once: int
    ranks: int
    dtype: str = "float32"
    dropout: bool = False
    written: int = 0

    @classmethod
    def of(cls, parameters: Iterable[ParameterShape], *, dropout: bool) -> Adapters | None:
        """Return those among a layer's parameters, by PEFT's names; None if there are none."""
        parameters = list(parameters)
        factors = [p for p in parameters if ".lora_A." in p.name]
        if not factors:
            return None
        paths = [p.name.partition(".lora_A.")[0].rpartition(".") for p in factors]
        once = {(parent, p.shape[1]) for (parent, _, leaf), p in zip(paths, factors, strict=True) if leaf not in _LAST}
        read, ranks = (sum(p.shape[dim] for p in factors) for dim in (1, 0))
        written = sum(p.shape[0] for p in parameters if ".lora_B." in p.name)
        return cls(read, sum(width for _, width in once), ranks, factors[0].dtype, dropout, written)


_LAST = ("o_proj", "out_proj", "o")
"""Attention's last projections."""


@dataclass(frozen=True, slots=True)
class Block:
    """The computation of a transformer layer, per token.

    Attributes:
        value_dim: size of a head's values, where it is another.
        latents: widths of the normalised latents of queries, keys and values, added up; 0: none.
        window: how many keys a query sees, of those before it; 0: all of these.
        intermediate: width of the feed-forward part; of one expert in a mixture.
        gated: whether the feed-forward part multiplies two projections (SwiGLU and friends).
        fused_gate: whether those two are one matrix product, so that one tensor holds both.
        norms: normalisations of width `hidden`.
        head_norms: whether queries and keys are normalised, too.
        shared_intermediate: width of the expert that every token passes, 0 for none.
        sliced_values: whether values are a slice of one projection, of which queries and keys are rotated copies.
        float32_scores: whether softmax, where it is written out, is in float32.
        capped_scores: whether scores pass a tanh before it.
        dropout: whether a sublayer's result is dropped out.
        attention_dropout: whether attention's scores are.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True
    fused_gate: bool = False
    activation: str = "silu"
    norms: int = 2
    norm: Norm = "rms"
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    sliced_values: bool = False
    float32_scores: bool = True
    capped_scores: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    adapters: Adapters | None = None
    value_dim: int = 0
    latents: int = 0
    window: int = 0

    @property
    def active_intermediate(self) -> int:
        """Feed-forward width one token passes."""
        return self.intermediate * max(1, self.experts_per_token) + self.shared_intermediate


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The parameters one unit owns, and its computation."""

    name: str
    parameters: tuple[ParameterShape, ...]
    block: Block | None = None

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model.

    Attributes:
        units: see the module's text; the last is the root.
        vocab: number of logits per token, 0 if the model has no vocabulary head.
        hidden: width of the residual stream, 0 if unknown.
        tied: whether the head shares the embedding's parameter.
        encoder_decoder: whether half of the tokens pass an encoder.
        calls: names of the inner units in the order their forwards begin; empty: definition order.
        capped_logits: whether logits pass a tanh, which keeps its output.
        published_as: the stored form (`core.forms`) in which its published files have most weights; empty: as numbers.
        is_final: whether dtypes and trainability are those of the run already, so that no training method applies.
    """

    name: str
    units: tuple[UnitShape, ...]
    vocab: int = 0
    hidden: int = 0
    tied: bool = False
    encoder_decoder: bool = False
    calls: tuple[str, ...] = ()
    is_final: bool = False
    published_as: str = ""
    capped_logits: bool = False

    @property
    def root(self) -> UnitShape:
        """The outermost unit."""
        return self.units[-1]

    @property
    def parameters(self) -> Iterable[ParameterShape]:
        """All parameters, unit by unit."""
        return (parameter for unit in self.units for parameter in unit.parameters)

    @property
    def numel(self) -> int:
        """Parameters of the model, all tiles of each."""
        return sum(parameter.numel * parameter.tiles for parameter in self.parameters)

    @property
    def positions(self) -> int | None:
        """Most tokens of a sequence, if a table of positions says it. Some tables have two rows for padding."""
        for parameter in self.parameters:
            if parameter.name.endswith(_POSITIONS):
                rows = parameter.shape[-2]
                return rows - 2 if (rows - 2).bit_count() == 1 else rows
        return None

    @property
    def trainable_numel(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel * parameter.tiles for parameter in self.parameters if parameter.trainable)

    @property
    def blocks(self) -> list[Block]:
        """Return the transformer layers."""
        return [unit.block for unit in self.units if unit.block is not None]

    def in_call_order(self) -> list[UnitShape]:
        """Return the units in the order their forwards begin: the root, then the others."""
        if not self.calls:
            return [self.root, *self.units[:-1]]
        by_name = {unit.name: unit for unit in self.units}
        return [self.root, *(by_name[name] for name in self.calls)]

    def with_own_embeddings(self) -> ModelShape:
        """Return the model whose input embedding and head are units of their own (`features.unit_selection`)."""
        embeddings = [p for p in self.root.parameters if p.role == "embedding"]
        heads = tuple(p for p in self.root.parameters if p.role == "head")
        if self.tied or not embeddings or not heads:
            raise ConfigError(
                f"{self.name} has no input embedding and head that could be units: "
                + ("they share a weight" if self.tied else "its shapes show none"),
                hint="leave wrap_embeddings out",
            )
        embedding = max(embeddings, key=lambda p: p.numel)
        names = [weight.name.rpartition(".")[0] for weight in (embedding, heads[0])]
        of_module = {name: [p for p in self.root.parameters if p.name.rpartition(".")[0] == name] for name in names}
        first, last = (UnitShape(name, tuple(of_module[name])) for name in names)  # a head's bias goes with it
        rest = tuple(p for p in self.root.parameters if p.name.rpartition(".")[0] not in names)
        return dataclasses.replace(
            self,
            units=(first, *self.units[:-1], last, dataclasses.replace(self.root, parameters=rest)),
            calls=(first.name, *self.calls, last.name) if self.calls else (),
        )

    def with_adapters(self, *, dropout: bool) -> ModelShape:
        """Return the model whose layers say what their adapters read."""
        units = list(self.units)
        for number, unit in enumerate(units):
            if unit.block is not None:
                adapters = Adapters.of(unit.parameters, dropout=dropout)
                units[number] = dataclasses.replace(unit, block=dataclasses.replace(unit.block, adapters=adapters))
        return dataclasses.replace(self, units=tuple(units))

    def map(self, change: Callable[[UnitShape, ParameterShape], Iterable[ParameterShape]]) -> ModelShape:
        """Return the model with every parameter replaced by the result of `change`."""
        units = [
            dataclasses.replace(unit, parameters=tuple(new for p in unit.parameters for new in change(unit, p)))
            for unit in self.units
        ]
        return dataclasses.replace(self, units=tuple(units))
