"""Attention over whole sequences, in models whose ranks have one part of every sequence.

Batches are cut by a data loader (`cut_batch`), or in training by the model itself, which then gathers its last hidden
states, so that its head and the loss see whole sequences.

Before attention, an all-to-all gives each rank of a group whole sequences for a part of the heads; after it, another
one gives each rank all heads for its part of the sequences. Between them runs Transformers' own implementation, which
is wrapped in the public `AttentionInterface`. `AttentionMaskInterface` is wrapped, too, so that masks are built for
whole sequences.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from fullshard.comm.waiting import PROGRESS, waiting_in_step
from fullshard.core.errors import ConfigError, DataError
from fullshard.core.user_class import user_class
from fullshard.features.sequence_parallel.batches import cut_batch

_OWNER = "_fullshard_sequence_parallel"
_LAYERS = ("full_attention", "sliding_attention", "attention", "dense", "sparse")
"""Types of layers that do not mix positions, except in attention that a mask function of two positions describes."""
_running: SplitSequences | None = None
"""The model whose forward is building masks, if its sequences are split."""


class SplitSequences:
    """The split sequences of one model.

    Attributes:
        group: the ranks that share a batch.
        is_split: whether the batch was split, in a running forward or else in the last one with gradients.
        padding: the attention mask of whole sequences, of shape (sequences, length), or None.
        documents: the number of the document of each token in whole sequences, or None if they are not packed.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, by_deepspeed: bool) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._name, self._by_deepspeed = user_class(model).__name__, by_deepspeed
        self._deepspeeds: dict[tuple[int, ...], Any] = {}
        self._has_attended = self.is_split = self._was_split = False
        self._part: torch.Size | None = None
        self._length = 0
        self.padding: torch.Tensor | None = None
        self.documents: torch.Tensor | None = None

    def __deepcopy__(self, memo: Any) -> SplitSequences:
        return self  # a copy of the model has the same ranks, and a group cannot be copied

    def before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Gather positions and the padding of whole sequences. In training, cut a batch that is the same on all ranks.

        An evaluation computes such a batch whole on every rank. Cached generation always has whole sequences.
        """
        global _running
        self._was_split = self.is_split
        kwargs = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        tokens: Any = kwargs.get("input_ids")
        positions = kwargs.get("position_ids")
        is_cached = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
        generates = is_cached and not torch.is_grad_enabled()
        self.is_split, self._part = not generates and (model.training or positions is not None), None
        if not self.is_split:
            return None
        has_parts = (positions is not None and positions.dim() == 2) or tokens is None
        of_all = self._gather(torch.tensor(tokens.shape, device=tokens.device)) if not has_parts else None
        if of_all is None or _is_same(of_all):
            of_all = self._of_all(kwargs)
        is_whole = _is_same(of_all)
        if not is_whole and not has_parts:
            raise DataError(
                f"{self._name} got no position_ids of shape (sequences, length), but the {self.size} ranks of a group "
                "got batches of different tokens, so these must be parts, with their positions in whole sequences",
                hint="pass all tensors of a batch from a prepared data loader to the model: model(**batch)",
            )
        if is_whole and not model.training:
            self.is_split = False
            return None
        if is_whole:
            kwargs = cut_batch({**kwargs, "use_cache": False}, rank=self.rank, size=self.size)
            self._part, self._length = kwargs["input_ids"].shape, of_all.shape[-1]
            of_all = self._of_all(kwargs)
        whole, _, padding = of_all.movedim(0, 2).flatten(2, 3)
        self.padding = self.documents = None
        if kwargs.get("attention_mask") is not None:
            self.padding = padding.bool()
        elif (jumps := whole.diff(dim=1) != 1).any():
            self.documents = nn.functional.pad(jumps, (1, 0)).cumsum(1)
            # Transformers would look for documents in one part
            kwargs["attention_mask"] = torch.ones_like(of_all[0, 0])
        _running, self._has_attended = self, False
        return (), kwargs

    def after_forward(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        """Stop building masks of whole sequences, and gather the output of a batch that was cut in `before_forward`."""
        global _running
        if _running is self and not self._has_attended and sys.exc_info()[0] is None:
            _running = None
            raise ConfigError(
                f"{self._name} never called its attention through Transformers' AttentionInterface, so its tokens have "
                "not seen those on other ranks",
                hint="use a model of Transformers with attention in all layers, or leave out sp_size",
            )
        _running = None
        if not torch.is_grad_enabled():  # a backward may still compute attention of an earlier forward again
            self.is_split = self._was_split
        for name, value in output.items() if self._part is not None and output is not None else ():
            output[name] = tuple(map(self._join, value)) if isinstance(value, tuple) else self._join(value)

    def _of_all(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the positions, tokens and padding on each rank, of shape (ranks, 3, sequences, length)."""
        names = ("position_ids", "input_ids", "attention_mask")
        positions, tokens, mask = cast("Any", [inputs.get(name) for name in names])
        if positions is None or positions.dim() != 2:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = positions if tokens is None else tokens
        own = positions.expand(tokens.shape[:2]), tokens, positions.new_ones(()) if mask is None else mask
        return self._gather(torch.stack([one.to(positions.dtype).expand_as(own[0]) for one in own]))

    def _join(self, own: Any) -> Any:
        """Concatenate a tensor along the sequence. Backward adds up the gradients that all ranks have for a part."""
        if not isinstance(own, torch.Tensor) or self._part is None:
            return own
        if own.shape[:2] != self._part:  # a router's output has one dim for all tokens
            is_flat = own.shape[:1] == (self._part.numel(),)
            return self._join(own.unflatten(0, self._part)).flatten(0, 1) if is_flat else own
        copies = own.expand(self.size, *own.shape)
        parts = exchange(copies, self.group, "gathering hidden states of split sequences")
        return parts.movedim(0, 1).flatten(1, 2)[:, : self._length]

    def attend(
        self,
        inner: Callable[..., Any],
        implementation: str,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute the attention of whole sequences, and return the result for this rank's part of them."""
        self._has_attended = True
        heads, groups = query.shape[1], key.shape[1]
        is_causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise ConfigError(f"sequence parallelism needs causal attention, but {type(module).__name__} has none")
        if heads % self.size or (groups % self.size and self.size % groups):
            raise ConfigError(
                f"{self._name} has {heads} attention heads and {groups} key and value heads, which cannot be divided "
                f"over sp_size = {self.size} ranks",
                hint="use a divisor of both numbers, or a divisor of the first that is a multiple of the second",
            )
        if self._by_deepspeed:
            if kwargs.get("s_aux") is not None or hasattr(module, "sinks") or query.shape[-1] != value.shape[-1]:
                raise ConfigError(
                    f"DeepSpeed cannot compute the attention of {self._name}: it has sinks or values of another size",
                    hint='use sp_backend="fullshard"',
                )
            shapes = len(query), heads, query.shape[-1], groups
            if shapes not in self._deepspeeds:  # it takes them when it is created
                self._deepspeeds[shapes] = _of_deepspeed(inner, self.group, *shapes)
            return self._deepspeeds[shapes](module, query, key, value, attention_mask, *args, **kwargs)
        if groups % self.size:
            key, value = (one.repeat_interleave(self.size // groups, dim=1) for one in (key, value))
        per_group = query.shape[1] // key.shape[1]
        query, key, value = self._swap(query, key, value)
        if "flash" in implementation and kwargs.get("position_ids") is not None:  # it finds documents in them
            kwargs["position_ids"] = self._gather(kwargs["position_ids"]).movedim(0, 1).flatten(1)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].chunk(self.size)[self.rank]
        own: dict[str, Any] = {"num_key_value_groups": per_group}  # what the layer says about its heads
        if isinstance(sinks := getattr(module, "sinks", None), torch.Tensor):
            own["sinks"] = sinks.chunk(self.size)[self.rank]
        fields = vars(module)
        before = {name: fields[name] for name in own if name in fields}
        fields.update(own)
        try:
            output, _ = inner(module, query, key, value, attention_mask, *args, **kwargs)
        finally:
            for name in own:
                del fields[name]
            fields.update(before)
        return self._swap(output)[0], None

    def _swap(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Give away parts of dim 1 for the parts of dim 2 that the other ranks have, in one message."""
        rows = [one.unflatten(1, (self.size, -1)).movedim(1, 0) for one in tensors]
        flat = [one.flatten(1) for one in rows]
        what = "exchanging attention heads for parts of sequences"
        received = exchange(torch.cat(flat, dim=1), self.group, what).split([one.shape[1] for one in flat], dim=1)
        return [part.view(one.shape).movedim(0, 2).flatten(2, 3) for part, one in zip(received, rows, strict=True)]

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        of_all = own.new_empty(self.size, *own.shape)
        with waiting_in_step("gathering positions of split sequences", [self.group]):
            dist.all_gather(list(of_all), own.contiguous(), group=self.group)
        return of_all


def _is_same(of_all: torch.Tensor) -> bool:
    return bool((of_all == of_all[:1]).all())


def exchange(
    rows: torch.Tensor, group: dist.ProcessGroup, what: str, arriving: Any = None, leaving: Any = None
) -> torch.Tensor:
    """Send rows of a tensor to the ranks of a group, and return the rows received. By default, parts are equal."""
    return _Exchange.apply(rows, group, what, arriving, leaving)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.group, ctx.what, *ctx.sizes = group, what, arriving, leaving = how
        received = rows.new_empty(len(rows) if arriving is None else sum(arriving), *rows.shape[1:])
        with waiting_in_step(what, [group]):
            dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return exchange(gradient, ctx.group, ctx.what, *reversed(ctx.sizes)), None, None, None, None


def _of_deepspeed(inner: Any, group: dist.ProcessGroup, count: int, heads: int, size: int, key_heads: int) -> Any:
    """Return DeepSpeed's attention around one of Transformers. It does not need DeepSpeed's engine."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed(dist_init_required=False)
    shapes = {"batch_size": count, "attn_head_count": heads, "attn_head_size": size, "kv_head_count": key_heads}
    lengths = {"seq_length_is_variable": True, "num_hidden_layers": 0}  # the layers are for debugging
    return UlyssesSPAttentionHF(attn=inner, process_group=group, **shapes, **lengths)


def split_sequences(
    model: Any, group: dist.ProcessGroup, *, implementation: str | None = None, by_deepspeed: bool = False
) -> SplitSequences:
    """Prepare a model of Transformers for batches that `cut_batch` has cut for the ranks of `group`.

    Raises:
        ConfigError: the model does not support it, or has another attention than `implementation`.
    """
    name = user_class(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"sequence parallelism needs a model of Transformers, but {name} has no configuration of one",
            hint="leave sp_size out of parallelism_config",
        )
    if by_deepspeed and find_spec("deepspeed") is None:
        raise ConfigError(
            'sp_backend = "deepspeed" (the default) needs the package deepspeed, which is not installed',
            hint='use fullshard.ParallelismConfig(sp_backend="fullshard", ...), or pip install deepspeed',
        )
    config = config.get_text_config()
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if others := sorted(set(layers) - set(_LAYERS)):
        raise ConfigError(
            f"{name} has layers of type {', '.join(others)}, which every rank would start anew at its own part of the "
            "sequences, so that gradients would be wrong without an error",
            hint="use a model with full or sliding attention in all layers, or leave out sp_size",
        )
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            f"{name} learns a prompt, which every rank would add to its own part of the sequences",
            hint="use LoRA, or leave out sp_size",
        )
    has = config._attn_implementation or "eager"
    if implementation not in (None, has):
        raise ConfigError(
            f"sp_attn_implementation = {implementation!r}, but {name} has attn_implementation = {has!r}",
            hint="load the model with the same attn_implementation, or leave sp_attn_implementation out",
        )
    _wrap(has)
    split = SplitSequences(model, group, by_deepspeed=by_deepspeed)
    for module in model.modules():
        module.__dict__[_OWNER] = split
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = getattr(inner, "base_model", inner)  # the heads of a batch that is whole get whole sequences
    body.register_forward_pre_hook(split.before_forward, with_kwargs=True)
    body.register_forward_hook(split.after_forward, always_call=True)
    PROGRESS.watcher.watch([group], next(model.parameters()).device)
    return split


def _wrap(implementation: str) -> None:
    """Wrap an attention implementation of Transformers and its masks. Other models keep using them unchanged."""
    from transformers import AttentionInterface, AttentionMaskInterface

    inner: Any = AttentionInterface().get(implementation, _own_eager)  # "eager" is not registered
    masks: Any = AttentionMaskInterface().get(implementation)
    if hasattr(inner, "of_transformers"):
        return

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        split = module.__dict__.get(_OWNER)
        if split is None or not split.is_split:
            return inner(module, *args, **kwargs)
        return split.attend(inner, implementation, module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        if _running is not None:
            length, pattern, documents = kwargs["q_length"] * _running.size, kwargs["mask_function"], _running.documents
            kwargs |= {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
            kwargs["attention_mask"] = _running.padding
            if documents is not None:
                kwargs |= {"mask_function": _within(documents, pattern), "allow_is_causal_skip": False}
        return masks(*args, **kwargs)

    attention.of_transformers = inner
    AttentionInterface.register(implementation, attention)
    if masks is not None:  # otherwise, Transformers builds none
        AttentionMaskInterface.register(implementation, mask)


def _own_eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function that a model's own file defines for `eager`."""
    homes = (vars(sys.modules[cls.__module__]).get("eager_attention_forward") for cls in type(module).__mro__)
    return next(filter(None, homes))(module, *args, **kwargs)


def _within(documents: torch.Tensor, pattern: Any) -> Any:
    """Return a mask function that adds the bounds of documents to the pattern of a layer."""
    return lambda batch, head, query, key: (
        pattern(batch, head, query, key) & (documents[batch, query] == documents[batch, key])
    )
