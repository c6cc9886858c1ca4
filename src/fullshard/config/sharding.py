"""The settings of the group `sharding`, which control how a model is divided over the ranks, and their constraints."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fullshard.config.settings import ANY_CASE, CombinationError, Settings, setting
from fullshard.core.offload import Offload
from fullshard.core.strategy import Strategy, parse_strategy

BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
WrapKind = Literal["auto", "none", "class", "size"]
CheckpointingMode = Literal["full", "selective"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Form = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8", "mxfp4", "fp8"]
"""The stored forms (`core.forms`)."""


def kept_or_auto(choice: str) -> Mapping[str, Any]:
    """Return the settings for the choice `auto` or `strategy`: `reshard_after_forward` is then `auto` or None."""
    return {"sharding.reshard_after_forward": "auto" if choice == "auto" else None}


class ShardingConfig(Settings):
    """Settings for how a model is divided over the ranks."""

    strategy: str = setting(
        "FULL_SHARD",
        ask="How should the model be divided?",
        answers={
            "FULL_SHARD": "FULL_SHARD (ZeRO-3): shards weights, gradients and optimizer state; least memory",
            "SHARD_GRAD_OP": "SHARD_GRAD_OP: keeps weights unsharded from forward to backward; less traffic",
            "HYBRID_SHARD": "HYBRID_SHARD: FULL_SHARD in groups, replicas across groups; for slow links between hosts",
            "HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2: the same with SHARD_GRAD_OP in each group",
            "SHARD_GRAD_OPTIMIZER": "SHARD_GRAD_OPTIMIZER (ZeRO-2): keeps weights unsharded between optimizer steps",
            "SHARD_OPTIMIZER": "SHARD_OPTIMIZER (ZeRO-1): also keeps gradients unsharded; less traffic in accumulation",
            "NO_SHARD": "NO_SHARD (DDP): every rank holds everything; for models that are small for the device",
        },
    )
    """FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, SHARD_GRAD_OPTIMIZER (ZeRO-2) or
    SHARD_OPTIMIZER (ZeRO-1), in any case, or Accelerate's number for one of the first five."""

    shard_size: int | None = setting(None, ge=1, ask="Ranks per shard group? (usually the devices of one host)")
    """Number of ranks per shard group. The hybrid strategies require it, and the others determine it."""

    reshard_after_forward: bool | Literal["auto"] | None = setting(None, overruled_by=("strategy",))
    """Whether unsharded parameters are freed between forward and backward. None: the strategy decides. A boolean
    selects the strategy that differs only in this respect: FULL_SHARD with `false` is SHARD_GRAD_OP, and so on. `auto`:
    as many units as memory allows stay unsharded."""

    unsharded_memory_gib: float | None = Field(default=None, ge=0, le=2**30)
    """GiB (2**30 bytes) per rank for the units that `reshard_after_forward: auto` keeps unsharded. None: the memory
    that is free after two steps."""

    wrap: WrapKind = setting(
        "auto",
        ask="Which modules are the units that are gathered one at a time?",
        answers={
            "auto": "automatic: the model's own list of layers, and all repeated blocks",
            "class": "the modules of the classes that I name",
            "size": "by number of parameters",
            "none": "the complete model as one unit: saves no memory while it runs",
        },
        overruled_by=("wrap_classes", "wrap_min_numel"),
    )
    """Which modules are units: `class`, `size`, `none` (only the root), or `auto`. With `auto`, units are chosen by
    class or size if a setting below requests it, else from the model's own list of layers and all repeated blocks."""

    wrap_classes: tuple[str, ...] = setting(
        (),
        ask="What are their class names? (for example LlamaDecoderLayer; separate several with commas)",
        overruled_by=("wrap", "wrap_min_numel"),
    )
    """Class names of the units. Text is split at commas."""

    wrap_min_numel: int | None = setting(
        None,
        ge=1,
        ask="How many parameters must a unit have at least? (for example 1e8)",
        overruled_by=("wrap", "wrap_classes"),
    )
    """Minimum number of parameters of a unit."""

    wrap_embeddings: bool = False
    """Whether the input embedding and the head are separate units. The head then stays unsharded until backward."""

    quantize: Form | None = None
    """The form in which large frozen weights are stored and sent as codes. A unit dequantizes its weights when it is
    unsharded. None: weights are not converted."""

    ignored_modules: str | None = None
    """A regular expression. Modules with a fully matching qualified name keep their parameters unsharded."""

    backward_prefetch: Annotated[BackwardPrefetch, ANY_CASE] = "BACKWARD_PRE"
    """When the next unit's all-gather is issued in backward: before this unit computes gradients, after, or never."""

    forward_prefetch: bool = True
    """Whether the next unit's all-gather is issued while this unit runs forward."""

    activation_checkpointing: bool = setting(
        False,
        ask="Recompute activations in backward? (activation checkpointing)",
        answers={
            False: "no: fastest, if the activations fit",
            True: "yes: much less memory for long inputs, about a third more computation",
        },
    )
    """Whether the activations of every unit are recomputed in backward instead of kept."""

    activation_checkpointing_reentrant: bool = False
    """Whether PyTorch's older, reentrant implementation of activation checkpointing is used."""

    activation_checkpointing_mode: CheckpointingMode = "full"
    """What is recomputed in a unit: everything (`full`), or everything except attention's output and every second
    matrix product (`selective`)."""

    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer state are in host memory. Sets `offload_compute_shards`,
    `offload_main_weights` and `offload_optimizer_state`."""

    offload_compute_shards: bool | None = setting(None, overruled_by=("cpu_offload",))
    """Whether the inputs of the units' gathers are kept in host memory: frozen parameters, and with
    `offload_main_weights` also trainable ones. None: the value of `cpu_offload`."""

    offload_main_weights: bool | None = setting(None, overruled_by=("cpu_offload",))
    """Whether main weights and their gradients are kept in host memory and updated there. None: the value of
    `cpu_offload`."""

    offload_optimizer_state: bool | None = setting(None, overruled_by=("cpu_offload",))
    """Whether the optimizer's state is kept in host memory. If only the state is, it is copied to the device for each
    step. None: the state is kept with the main weights."""

    offload_activations: bool = False
    """Whether the tensors that autograd saves for a unit (with `activation_checkpointing`, the unit's inputs) are in
    host memory until its backward. `cpu_offload`, which is about sharded data, does not include this."""

    sync_module_states: bool = True
    """Whether rank 0's parameters and buffers are broadcast first. Otherwise, they must be equal on all ranks."""

    cpu_ram_efficient_loading: bool = False
    """Whether `from_pretrained` reads weights only on each host's first rank. Requires `sync_module_states`."""

    compile: bool = False
    """Whether the forward of every unit is compiled separately."""

    compile_backend: str = "inductor"
    """Backend of `torch.compile`."""

    compile_mode: CompileMode = "default"
    """Mode of `torch.compile`."""

    compile_fullgraph: bool = False
    """Whether a unit that does not compile to a single graph is an error."""

    compile_dynamic: bool | None = None
    """Whether shapes are dynamic from the start. None: after the first recompilation."""

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_strategy(cls, value: object) -> str:
        return parse_strategy(value).name

    @field_validator("wrap_classes", mode="before")
    @classmethod
    def _split_classes(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return tuple(stripped for name in value if (stripped := name.strip()))
        return value

    @model_validator(mode="before")
    @classmethod
    def _derive_wrap(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("wrap", "auto") == "auto":
            kind = "class" if values.get("wrap_classes") else "size" if values.get("wrap_min_numel") else "auto"
            return values if kind == "auto" else {**values, "wrap": kind}
        return values

    @model_validator(mode="after")
    def _wrap_fits(self) -> Self:
        for kind, name in (("class", "wrap_classes"), ("size", "wrap_min_numel")):
            value = getattr(self, name)
            if (self.wrap == kind) != bool(value):
                raise CombinationError(
                    f"wrap = {self.wrap!r} cannot be combined with {name} = "
                    f"{list(value) if kind == 'class' else value}",
                    "wrap",
                    name,
                    hint=f"use {name} together with wrap: {kind}, or remove both",
                )
        return self

    @model_validator(mode="after")
    def _checkpointing_fits(self) -> Self:
        other = "activation_checkpointing_reentrant" if self.activation_checkpointing_reentrant else "compile"
        for name, is_set in (
            ("activation_checkpointing_reentrant", self.activation_checkpointing_reentrant),
            ("activation_checkpointing_mode", self.activation_checkpointing_mode != "full"),
        ):
            if is_set and not self.activation_checkpointing:
                what = f"{name} is set, but activation_checkpointing is not"
                raise CombinationError(what, name, hint=f"set activation_checkpointing: true, or remove {name}")
        if self.activation_checkpointing_mode == "selective" and getattr(self, other):
            raise CombinationError(
                f"activation_checkpointing_mode = 'selective' needs to see individual operations, which {other} hides",
                "activation_checkpointing_mode",
                other,
                hint="use activation_checkpointing_mode: full",
            )
        for name in ("activation_checkpointing", "offload_activations"):
            if getattr(self, name) and self.wrap == "none":
                what = f"{name} works unit by unit, but wrap = 'none' makes the model a single unit"
                raise CombinationError(what, name, "wrap", hint=f"use wrap: auto, or remove {name}")
        return self

    @model_validator(mode="after")
    def _memory_fits(self) -> Self:
        row = self.resolved_strategy()
        if self.unsharded_memory_gib is not None and not self.keeps_what_fits:
            raise CombinationError(
                "unsharded_memory_gib only applies to reshard_after_forward = 'auto', which is not set",
                "unsharded_memory_gib",
                hint="set reshard_after_forward: auto, or remove unsharded_memory_gib",
            )
        names = ("cpu_offload", "offload_compute_shards", "offload_main_weights", "offload_optimizer_state")
        switch = next((name for name in names if getattr(self, name)), None)
        if switch is not None and not row.shards:
            raise CombinationError(
                f"{switch} moves shards to the host, but {row.name} has no shards",
                switch,
                "strategy",
                hint=f"use FULL_SHARD or SHARD_GRAD_OP, or remove {switch}",
            )
        if self.offload_optimizer_state is False and (self.offload_main_weights or self.offload_main_weights is None):
            main = "offload_main_weights" if self.offload_main_weights else "cpu_offload"
            if getattr(self, main):
                what = f"{main} makes the optimizer update main weights on the host, but its state is on the device"
                raise CombinationError(what, "offload_optimizer_state", main, hint="remove offload_optimizer_state")
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise CombinationError(
                "cpu_ram_efficient_loading without sync_module_states would train on empty weights",
                "sync_module_states",
                "cpu_ram_efficient_loading",
                hint="remove sync_module_states",
            )
        return self

    @property
    def offload(self) -> Offload:
        """Return which parts are offloaded to host memory."""
        parts = self.offload_compute_shards, self.offload_main_weights, self.offload_optimizer_state
        return Offload.of(self.cpu_offload, *parts, self.offload_activations)

    @property
    def keeps_what_fits(self) -> bool:
        """Return whether `reshard_after_forward` is `auto`, which keeps as many units unsharded as memory allows."""
        return self.reshard_after_forward == "auto"

    @property
    def unsharded_memory_nbytes(self) -> int | None:
        """Return `unsharded_memory_gib` in bytes."""
        return None if self.unsharded_memory_gib is None else round(self.unsharded_memory_gib * 2**30)

    def resolved_strategy(self) -> Strategy:
        """Return the strategy after `reshard_after_forward` has been applied to it, or raise `CombinationError`."""
        row = parse_strategy(self.strategy)
        if self.reshard_after_forward == "auto":
            if row.reshards_after_forward:
                return row
            raise CombinationError(
                f"reshard_after_forward = 'auto' decides which units stay unsharded, but {row.name} keeps all units "
                "unsharded",
                "reshard_after_forward",
                "strategy",
                hint="use FULL_SHARD or HYBRID_SHARD, or remove reshard_after_forward",
            )
        other = row if self.reshard_after_forward is None else row.with_reshard(self.reshard_after_forward)
        if other is not None:
            return other
        raise CombinationError(
            f"reshard_after_forward = {self.reshard_after_forward} has no effect with {row.name}, which "
            + ("keeps parameters unsharded" if row.shards else "does not shard anything"),
            "reshard_after_forward",
            "strategy",
            hint="remove reshard_after_forward, or use FULL_SHARD",
        )

    def resolved_shard_size(self, local_world_size: int) -> int | None:
        """Return the number of ranks per shard group. A hybrid strategy without a size uses the ranks of one host."""
        return self.resolved_strategy().shard_size_on(local_world_size, self.shard_size)
