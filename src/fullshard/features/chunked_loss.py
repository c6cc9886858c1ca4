"""Language model loss computed in chunks of tokens, so that the full (tokens, vocabulary) logits are never in memory.

Forward keeps only the loss of each chunk. Backward computes the logits of each chunk again, at the cost of a second
matrix product in the head. The head computes the loss in its own forward, where its weight is unsharded, no matter
which unit owns the weight. It returns the loss in place of the logits, and the model's forward passes it on. A model
that does anything else with the logits would change the loss. This is detected and raises an error.
"""

import functools
import inspect
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fullshard.core.errors import WrapError, plural
from fullshard.core.user_class import inner_forward, user_class

IGNORED = -100
"""The label of a token that has no target."""

_INNER = "_fullshard_forward_with_whole_logits"
_ASKED = "_fullshard_chunked_loss"
_TARGETS = "_fullshard_targets"


@dataclass(slots=True)
class _Targets:
    """Holds the targets that the head needs to compute the loss and, after its forward, the sum of the token losses."""

    labels: torch.Tensor  # shape (tokens,), already shifted
    chunk: int
    loss: torch.Tensor | None = None


def use_chunked_loss(model: nn.Module, *, tokens: int) -> None:
    """Make `model` compute its loss in chunks whenever it receives labels. The output then has no logits.

    Without labels the model returns logits as before. Call this before or after sharding.

    Args:
        model: a causal language model from Transformers, or its PEFT wrapper.
        tokens: number of tokens per chunk. A chunk temporarily needs about 12 bytes per token and vocabulary entry.

    Raises:
        WrapError: The model's head or loss is not of a supported type.
    """
    if tokens < 1:
        raise WrapError(
            f"the chunk size is {tokens} tokens, expected at least 1", hint="use 1024, which suits most models"
        )
    if hasattr(model, "get_base_model"):
        unwrap: Any = model.get_base_model
        model = unwrap()
    if _INNER in model.__dict__:
        raise WrapError(f"{type(model).__name__} already computes its loss in chunks")
    head = _head(model)
    forward = model.forward
    names = list(inspect.signature(forward).parameters)
    model.__dict__[_INNER], model.__dict__[_ASKED] = model.__dict__.get("forward"), (names, tokens)
    # Keep the signature visible: Transformers' Trainer uses it to find the data columns that the model accepts.
    model.forward = MethodType(functools.wraps(getattr(forward, "__func__", forward))(_forward_with_loss), model)
    head.__dict__[_INNER] = head.__dict__.get("forward")
    head.forward = MethodType(_head_forward, head)


def _head(model: nn.Module) -> nn.Module:
    name = user_class(model).__name__
    hint = "remove the chunk size, so that the loss is computed from complete logits"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise WrapError(f"{name} has no output embeddings and therefore no loss over a vocabulary", hint=hint)
    if not isinstance(head, nn.Linear) or user_class(head) is not nn.Linear:
        raise WrapError(f"the head of {name} is a {user_class(head).__name__}, not a plain linear layer", hint=hint)
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise WrapError(
            f"the loss function of {name} is {getattr(loss, '__name__', loss)!r}, expected that of a causal language "
            "model",
            hint=hint,
        )
    return head


def _forward_with_loss(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner, (names, tokens) = inner_forward(self, _INNER), self.__dict__[_ASKED]
    kwargs.update(zip(names, args, strict=False))
    labels, shifted = kwargs.pop("labels", None), kwargs.get("shift_labels")
    if labels is None and shifted is None:
        return inner(**kwargs)
    kwargs.pop("shift_labels", None)
    if shifted is None:
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    count = kwargs.pop("num_items_in_batch", None)
    ignored = kwargs.pop("ignore_index", IGNORED)
    if ignored != IGNORED:
        shifted = shifted.masked_fill(shifted == ignored, IGNORED)
    head: nn.Module = self.get_output_embeddings()  # type: ignore[operator]
    head.__dict__[_TARGETS] = targets = _Targets(shifted.reshape(-1), tokens)
    try:
        output = inner(**kwargs)
    finally:
        del head.__dict__[_TARGETS]
    return _with_loss(self, output, targets, count)


def _with_loss(model: Any, output: Any, targets: _Targets, count: Any) -> Any:
    """Return the model's output with the sum of losses, divided by `count` or the number of targets, as its loss."""
    total = targets.loss
    is_handed_through = getattr(output, "logits", None) is total
    if total is None or not is_handed_through:
        what = "did not call its original head" if total is None else "changes the logits that its head returns"
        raise WrapError(
            f"{type(model).__name__} {what}, so its loss cannot be computed in chunks",
            hint="remove the chunk size, so that the loss is computed from complete logits",
        )
    if count is None:
        count = (targets.labels != IGNORED).sum()
    loss = total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
    if (router_loss := getattr(output, "aux_loss", None)) is not None:
        loss = loss + model.router_aux_loss_coef * router_loss.to(loss.device)
    output.loss, output.logits = loss, None
    return output


def _head_forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    targets: _Targets | None = self.__dict__.get(_TARGETS)
    if targets is None:
        logits: torch.Tensor = inner_forward(self, _INNER)(hidden)
        return logits
    flat = hidden.reshape(-1, hidden.shape[-1])
    if len(flat) != len(targets.labels):
        raise WrapError(
            f"the batch has {plural(len(targets.labels), 'label')}, but the head received {len(flat)} tokens",
            hint="remove the argument logits_to_keep",
        )
    targets.loss = chunked_cross_entropy(flat, self.weight, self.bias, targets.labels, tokens=targets.chunk)
    return targets.loss


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, *, tokens: int
) -> torch.Tensor:
    """Return the summed float32 cross-entropy of `linear(hidden, weight, bias)`, computed `tokens` tokens at a time.

    `hidden` has shape (T, hidden size). `labels` has shape (T,), with -100 for tokens that have no target.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, tokens)
    return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The autograd function of `chunked_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), tokens):
            logits = functional.linear(hidden[start : start + tokens], weight, bias).float()
            total += functional.cross_entropy(
                logits, labels[start : start + tokens], ignore_index=IGNORED, reduction="sum"
            )
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.tokens = tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, labels = ctx.saved_tensors
        needs, wide = ctx.needs_input_grad, torch.promote_types(weight.dtype, torch.float32)  # for sums over chunks
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        for start in range(0, len(hidden), ctx.tokens):
            rows = slice(start, start + ctx.tokens)
            of_logits = _logits_gradient(functional.linear(hidden[rows], weight, bias), labels[rows], gradient)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), hidden[rows])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            None,
            None,
        )


def _logits_gradient(logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return (softmax - one-hot) x gradient in the dtype of `logits`. Rows of tokens without a target are zero."""
    result = functional.log_softmax(logits.float(), dim=-1).exp_().mul_(gradient)
    targets = labels != IGNORED
    result[targets, labels[targets]] -= gradient
    result[~targets] = 0
    return result.to(logits.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
