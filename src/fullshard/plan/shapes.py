"""The planner's description of a model: units with parameter shapes, and what each layer saves for backward.

    ModelShape
    ├── units     inner units in definition order, followed by the root, as the engine creates them
    │   ├── parameters    name, shape, stored dtype, trainable, exact
    │   └── block         what the unit's forward computes; None if the unit is not a transformer layer
    └── calls     the inner units in the order in which their forwards begin

Names and order match the Transformers model, so that layouts and events can be compared one by one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Self

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError
from fullshard.core.forms import FORMS


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """The shape, dtype and role of one parameter."""

    name: str  # qualified name in the model; for a tied parameter, the first of its names
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    exact: bool = False  # whether it consists of bytes that are never cast (quantized weights and their scales)
    # Dtype of the running statistics that are used together with the parameter, such as a batch norm's. The unsharded
    # parameter has the same dtype. None if there are no such statistics.
    statistics: str | None = None
    # `matrix` for the weight of a linear layer inside a block, to which LoRA and quantization apply; `embedding`,
    # `head` or `other`.
    role: str = "other"
    form: str = ""  # name of the form (`core.forms`) in which it is stored and sent; empty if it is not quantized
    tiles: int = 1  # number of parts into which tensor or expert parallelism has split it; `shape` is one part's
    of_experts: bool = False  # whether expert parallelism has split it, so that fewer ranks share each part
    folded_rank: int = 0  # rank of an adapter that forward adds to a copy of this weight; 0 if there is no such adapter

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter in its stored dtype."""
        return FORMS[self.form].nbytes(self.numel) if self.form else self.numel * itemsize(self.dtype)


_POSITIONS = ("wpe.weight", "position_embeddings.weight", "decoder.embed_positions.weight", ".position_embeddings")
"""Names of position tables in GPT-2, BERT, Whisper and OPT (for the decoder), and ViT."""

Norm = Literal["layer", "rms", "rms-float32-weight"]
"""LayerNorm, or an RMS norm with statistics in float32. Llama multiplies by the weight in the compute dtype (`rms`),
and Gemma multiplies by it before the result is cast (`rms-float32-weight`)."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The sizes of all adapters in one layer, per token."""

    read: int  # sum of the widths of all adapters' inputs
    # Sum of the widths of the different inputs. An input that several adapters share counts once, and attention's
    # output does not count because it is saved for backward anyway.
    read_once: int
    ranks: int  # sum of the ranks of all adapters
    dtype: str = "float32"
    dropout: bool = False  # whether the adapters apply dropout to their inputs
    written: int = 0  # sum of the widths of all adapters' outputs
    folded: int = 0  # elements of the weights to which adapters are added before use, which takes a copy of them
    # Ranks of the adapters whose inputs and whose outputs tensor parallelism splits. It sums the products of the first
    # in forward, and the gradients of the others' first products in backward.
    summed: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of(cls, parameters: Iterable[ParameterShape], *, dropout: bool) -> Self | None:
        """Return the adapters among a layer's parameters, recognized by PEFT's names, or None if there are none."""
        parameters = list(parameters)
        folded = {_module_of(p.name.rpartition(".")[0]) for p in parameters if p.folded_rank}
        adapters = [p for p in parameters if ".lora_" in p.name]
        adapters = [p for p in adapters if _module_of(p.name.partition(".lora_")[0]) not in folded]
        factors = [p for p in adapters if ".lora_A." in p.name]
        if not factors and not folded:
            return None
        paths = [p.name.partition(".lora_A.")[0].rpartition(".") for p in factors]
        once = {(parent, p.shape[1]) for (parent, _, leaf), p in zip(paths, factors, strict=True) if leaf not in _LAST}
        return cls(
            read=sum(p.shape[1] for p in factors),
            read_once=sum(width for _, width in once),
            ranks=sum(p.shape[0] for p in factors),
            dropout=dropout,
            written=sum(p.shape[0] for p in adapters if ".lora_B." in p.name),
            folded=sum(p.numel for p in parameters if p.folded_rank),
            summed=(
                tuple(p.shape[0] for p in factors if p.tiles > 1),
                tuple(p.shape[1] for p in adapters if ".lora_B." in p.name and p.tiles > 1),
            ),
        )


def _module_of(path: str) -> str:
    """Return the path that a module has in the model without PEFT, by removing the names of PEFT's wrappers."""
    return path.replace(".base_layer", "")


_LAST = ("o_proj", "out_proj", "o")
"""Names of attention's output projections."""


@dataclass(frozen=True, slots=True)
class Block:
    """The computation of a transformer layer, per token."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the feed-forward part, or of one expert in a mixture of experts
    gated: bool = True  # whether the feed-forward part multiplies two projections (SwiGLU and similar)
    fused_gate: bool = False  # whether one matrix product computes both projections, so that one tensor holds both
    activation: str = "silu"
    norms: int = 2  # number of norms of width `hidden`
    norm: Norm = "rms"
    head_norms: bool = False  # whether queries and keys are normalized, too
    experts: int = 0
    experts_per_token: int = 0
    float32_router: bool = False  # whether the weights of the experts' outputs are float32 in every precision
    shared_intermediate: int = 0  # width of the expert that processes every token; 0 if there is none
    # Whether one projection computes queries, keys and values. The values are then a slice of its output, whereas
    # rotation copies the queries and keys.
    sliced_values: bool = False
    float32_scores: bool = True  # whether softmax is computed in float32 if scores are written to memory
    capped_scores: bool = False  # whether scores pass through a tanh before softmax
    dropout: bool = False  # whether dropout applies to the output of a sublayer
    attention_dropout: bool = False  # whether dropout applies to attention's scores
    adapters: Adapters | None = None
    value_dim: int = 0  # size of a head's values if it differs from `head_dim`, and otherwise 0
    latents: int = 0  # sum of the widths of the normalized latents of queries, keys and values; 0 if there are none
    window: int = 0  # number of preceding keys that a query sees; 0 means all of them
    load: float = 1.0  # the tokens of a rank's experts, divided by the average over all ranks

    @property
    def active_intermediate(self) -> int:
        """The total feed-forward width through which one token passes."""
        return round(self.intermediate * max(1, self.experts_per_token) * self.load) + self.shared_intermediate


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The parameters that one unit owns, and what its forward computes."""

    name: str
    parameters: tuple[ParameterShape, ...]
    block: Block | None = None

    @property
    def numel(self) -> int:
        """The total number of elements in all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shapes of a complete model."""

    name: str
    units: tuple[UnitShape, ...]  # the inner units in definition order, followed by the root
    vocab: int = 0  # number of logits per token; 0 if the model has no vocabulary head
    hidden: int = 0  # width of the residual stream; 0 if unknown
    tied: bool = False  # whether the head shares the embedding's parameter
    encoder_decoder: bool = False  # whether the model has an encoder, through which half of the tokens pass
    # Names of the inner units in the order in which their forwards begin; empty means definition order.
    calls: tuple[str, ...] = ()
    # Whether dtypes and `trainable` already describe the run, so that no training method must be applied.
    is_final: bool = False
    # The form (`core.forms`) in which the published files store most weights; empty if they are not quantized.
    published_as: str = ""
    capped_logits: bool = False  # whether logits pass through a tanh, whose output is saved for backward
    # (name in PEFT's `target_modules`, expert parameter that PEFT adapts for this name); empty if PEFT only adapts
    # linear layers.
    converted_targets: tuple[tuple[str, str], ...] = ()

    @property
    def root(self) -> UnitShape:
        """The outermost unit."""
        return self.units[-1]

    @property
    def parameters(self) -> Iterable[ParameterShape]:
        """All parameters, one unit after another."""
        return (parameter for unit in self.units for parameter in unit.parameters)

    @property
    def numel(self) -> int:
        """The number of the model's elements, including all tensor-parallel parts."""
        return sum(parameter.numel * parameter.tiles for parameter in self.parameters)

    @property
    def positions(self) -> int | None:
        """The number of rows in the model's table of positions, without those for padding, or None without a table."""
        for parameter in self.parameters:
            if parameter.name.endswith(_POSITIONS):
                rows = parameter.shape[-2]
                return rows - 2 if (rows - 2).bit_count() == 1 else rows
        return None

    @property
    def trainable_numel(self) -> int:
        """The number of trained elements, including all tensor-parallel parts."""
        return sum(parameter.numel * parameter.tiles for parameter in self.parameters if parameter.trainable)

    @property
    def blocks(self) -> list[Block]:
        """Return the descriptions of all transformer layers."""
        return [unit.block for unit in self.units if unit.block is not None]

    def in_call_order(self) -> list[UnitShape]:
        """Return the units in the order in which their forwards begin: first the root, then the others."""
        if not self.calls:
            return [self.root, *self.units[:-1]]
        by_name = {unit.name: unit for unit in self.units}
        return [self.root, *(by_name[name] for name in self.calls)]

    def with_own_embeddings(self) -> Self:
        """Return the model with the input embedding and the head as separate units (`features.unit_selection`)."""
        embeddings = [p for p in self.root.parameters if p.role == "embedding"]
        heads = tuple(p for p in self.root.parameters if p.role == "head")
        if self.tied or not embeddings or not heads:
            raise ConfigError(
                f"the input embedding and the head of {self.name} cannot be units: "
                + ("they share a weight" if self.tied else "the planner cannot tell which parameters they are"),
                hint="remove wrap_embeddings",
            )
        embedding = max(embeddings, key=lambda p: p.numel)
        names = [weight.name.rpartition(".")[0] for weight in (embedding, heads[0])]
        of_module = {name: [p for p in self.root.parameters if p.name.rpartition(".")[0] == name] for name in names}
        first, last = (UnitShape(name, tuple(of_module[name])) for name in names)  # includes the head's bias
        rest = tuple(p for p in self.root.parameters if p.name.rpartition(".")[0] not in names)
        return dataclasses.replace(
            self,
            units=(first, *self.units[:-1], last, dataclasses.replace(self.root, parameters=rest)),
            calls=(first.name, *self.calls, last.name) if self.calls else (),
        )

    def with_adapters(self, *, dropout: bool) -> Self:
        """Return the model with each layer's adapters entered in the description of the layer (`Block.adapters`)."""
        units = list(self.units)
        for number, unit in enumerate(units):
            if unit.block is not None:
                adapters = Adapters.of(unit.parameters, dropout=dropout)
                units[number] = dataclasses.replace(unit, block=dataclasses.replace(unit.block, adapters=adapters))
        return dataclasses.replace(self, units=tuple(units))

    def map(self, change: Callable[[UnitShape, ParameterShape], Iterable[ParameterShape]]) -> Self:
        """Return the model with every parameter replaced by the parameters that `change` returns for it."""
        units = [
            dataclasses.replace(unit, parameters=tuple(new for p in unit.parameters for new in change(unit, p)))
            for unit in self.units
        ]
        return dataclasses.replace(self, units=tuple(units))
