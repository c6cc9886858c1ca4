"""Gradients of embeddings and output layers, taken use by use before autograd makes them larger than they are.

    a tied weight     Autograd adds up, in new memory, what all uses give, and then hands the sum over: three times the
                      largest weight at once. What an output layer gives is collected as soon as it is there instead,
                      and taken out of autograd's sum. The weight's first place is left to autograd, so that its own
                      hook still tells when all is there: backward comes to the embedding last.
    an output layer   A linear layer's product is made where it is to be, in the reduce input, and not beside it first.
                      To that end its part of the graph is replaced by one node that computes the same.
    an embedding      A step looks up a few rows, and autograd makes a gradient of all of them, almost all zeros. So the
                      lookup is told to give its rows only (`nn.Embedding.sparse`), which are added to the reduce
                      input. On accelerators they would have to be counted, which waits for the device: not there.

What is reduced and published is as dense as ever, and the same bit for bit. So a tied weight is left to autograd where
that could not be (`Gradient.takes_uses`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import Node

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket

SWITCH = "FULLSHARD_GRADIENTS"
"""Environment variable; `whole` leaves everything to autograd."""

_MAX_NODES = 32
"""Of the part of a graph that a module made and that is looked through for its parameter: a layer's few."""


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that is still to be computed: the product of two matrices."""

    left: torch.Tensor
    right: torch.Tensor

    def value(self) -> torch.Tensor:
        """In memory of its own."""
        return self.left.mm(self.right)

    def write(self, piece: torch.Tensor) -> None:
        """Into `piece`, shape (n,)."""
        torch.mm(self.left, self.right, out=piece.view(self.left.shape[0], self.right.shape[1]))


Take = Callable[["Bucket", int, "torch.Tensor | Product"], bool]
Wrap = Callable[[Any], Any]


def watch_uses(bucket: Bucket, take: Take, wrap: Wrap) -> None:
    """Put the hooks on the modules whose parameters a trainable bucket holds.

    Args:
        bucket: the bucket.
        take: takes one use's gradient, in its parameter's shape, given the bucket and the parameter's index in it; says
            whether it did.
        wrap: put around hooks that compiled code must not contain.
    """
    if os.environ.get(SWITCH, "uses") == "whole":
        return
    by_rows = bucket.mesh.device.type == "cpu" and bucket.mesh.world_size > 1
    for index, slot in enumerate(bucket.slots):
        if not slot.parameter.dtype.is_floating_point:
            continue
        first = slot.owners[0][0]
        for module in {id(m): m for m, _ in slot.owners if m is not first}.values():
            module.register_forward_hook(wrap(_UseHook(bucket, index, take, wrap)))
        for module, attribute in slot.owners if by_rows else ():
            if isinstance(module, nn.Embedding) and attribute == "weight":
                lookup = _Lookup(bucket, index)
                module.register_forward_pre_hook(lookup.begin)
                module.register_forward_hook(lookup.end, always_call=True)


def add_rows(piece: torch.Tensor, grad: torch.Tensor, *, is_first: bool) -> None:
    """Add the rows that a sparse gradient has to the collected one.

    Args:
        piece: shape (n,), what was collected.
        grad: n elements in their parameter's shape.
        is_first: `piece` has nothing yet.
    """
    if is_first:
        piece.zero_()
    if grad.sparse_dim() == 1 and grad.dense_dim() == 1:
        # Rows that were looked up several times are added up first, by the kernel and in the order of a dense gradient;
        # `coalesce` has an order of its own.
        rows, place = torch.unique(grad._indices()[0], return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad._values(), place, rows.numel(), -1, False)
        piece.view(grad.shape).index_add_(0, rows, sums.to(piece.dtype))
    else:
        piece.add_(grad.to_dense().reshape(-1))


def _is_looked_at(bucket: Bucket, index: int) -> bool:
    """Whether somebody else may look at the whole gradient before it is collected."""
    return bucket.unit.is_pinned or bool(bucket.slots[index].parameter._backward_hooks)


# -- embeddings -----------------------------------------------------------------------------------------------------


class _Lookup:
    """The hooks of one embedding, which has its own `sparse` back after each forward."""

    def __init__(self, bucket: Bucket, index: int) -> None:
        self._bucket, self._index = weakref.ref(bucket), index
        self._was_sparse: bool | None = None

    def begin(self, module: nn.Embedding, _args: Any) -> None:
        """Before the forward."""
        bucket = self._bucket()
        is_compiled = get_eval_frame_callback() is not None  # compiled code takes no such gradient
        if bucket is None or is_compiled or module.scale_grad_by_freq or _is_looked_at(bucket, self._index):
            return
        is_tied = len(bucket.slots[self._index].owners) > 1
        # Autograd adds the rows to what other uses give one lookup at a time, and so in another order.
        if not is_tied or (bucket.gradient is not None and bucket.gradient.takes_uses(self._index)):
            self._was_sparse, module.sparse = module.sparse, True

    def end(self, module: nn.Embedding, _args: Any, _output: Any) -> None:
        """After it, even if it failed."""
        if self._was_sparse is not None:
            module.sparse, self._was_sparse = self._was_sparse, None

    begin._torchdynamo_disable = end._torchdynamo_disable = True  # type: ignore[attr-defined]


# -- tied weights ---------------------------------------------------------------------------------------------------


class _UseHook:
    """Forward hook of a module with a tied parameter: finds the nodes of the graph that give its gradient."""

    def __init__(self, bucket: Bucket, index: int, take: Take, wrap: Wrap) -> None:
        # Weakly: autograd keeps hooks where Python's garbage collector does not look.
        self._bucket, self._index, self._take, self._wrap = weakref.ref(bucket), index, take, wrap

    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor | None:
        bucket = self._bucket()
        if bucket is None or not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return None
        if _is_looked_at(bucket, self._index):
            return None
        parameter = bucket.slots[self._index].parameter
        is_exact = bucket.gradient is not None and bucket.gradient.takes_uses(self._index)
        if is_exact and args and isinstance(args[0], torch.Tensor):
            accumulate = _product(output.grad_fn, args[0], parameter)
            if accumulate is not None:
                made: torch.Tensor = _Linear.apply(args[0], parameter, [output.detach()], self._multiplying(accumulate))
                return made
        inputs = {a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None}
        for node, place in _givers(output.grad_fn, parameter, inputs):
            node.register_hook(self._wrap(self._taking(node, place)))
        return None

    def _multiplying(self, accumulate: Node) -> Callable[[Product], torch.Tensor | None]:
        reference, index, take = self._bucket, self._index, self._take

        def multiply(product: Product) -> torch.Tensor | None:
            bucket = reference()
            if bucket is None or torch.is_grad_enabled() or not _will_run(accumulate):
                return product.value()
            return None if take(bucket, index, product) else product.value()

        return multiply

    def _taking(self, node: Node, place: int) -> Callable[[Any, Any], tuple[torch.Tensor | None, ...] | None]:
        reference, index, take, accumulate = self._bucket, self._index, self._take, node.next_functions[place][0]
        assert accumulate is not None  # noqa: S101 -- see `_givers`

        def hook(given: tuple[torch.Tensor | None, ...], _received: Any) -> tuple[torch.Tensor | None, ...] | None:
            bucket, gradient = reference(), given[place]
            if bucket is None or gradient is None or not _will_run(accumulate) or not take(bucket, index, gradient):
                return None
            return (*given[:place], None, *given[place + 1 :])

        return hook


class _Linear(torch.autograd.Function):
    """Stands in for the graph of a linear layer without a bias; computes what autograd would, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        output: list[torch.Tensor],
        multiply: Callable[[Product], torch.Tensor | None],
    ) -> torch.Tensor:
        """`output` is what the layer has made of the other two; in a list autograd does not take it for an input."""
        ctx.save_for_backward(hidden, weight)
        ctx.multiply = multiply
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Of the input, and of the weight unless that has been taken."""
        hidden, weight = ctx.saved_tensors
        gradient, of_hidden, of_weight = gradient.reshape(-1, weight.shape[0]), None, None
        if ctx.needs_input_grad[0]:
            of_hidden = gradient.mm(weight).view(hidden.shape)
        if ctx.needs_input_grad[1]:
            of_weight = ctx.multiply(Product(gradient.t(), hidden.reshape(-1, weight.shape[1])))
        return of_hidden, of_weight, None, None


def _product(last: Node, hidden: torch.Tensor, parameter: nn.Parameter) -> Node | None:
    """Where `parameter`'s gradient goes, if what `last` ends is the product of `hidden` and its transpose."""
    node = last.next_functions[0][0] if last.name() == "UnsafeViewBackward0" else last
    if node is None or node.name() != "MmBackward0" or hidden.grad_fn is None:  # then nothing tells it from another
        return None
    (rows, _), (transposed, _) = node.next_functions
    if rows is not None and rows is not hidden.grad_fn and rows.name() in ("ViewBackward0", "ReshapeAliasBackward0"):
        rows = rows.next_functions[0][0]
    if rows is not hidden.grad_fn or transposed is None or transposed.name() != "TBackward0":
        return None
    accumulate = transposed.next_functions[0][0]
    return accumulate if getattr(accumulate, "variable", None) is parameter else None


def _givers(last: Node, parameter: nn.Parameter, stop: set[Node]) -> list[tuple[Node, int]]:
    """The nodes between `stop` and `last` that give a gradient of `parameter`, with its place among what they give."""
    found: list[tuple[Node, int]] = []
    left, seen = [last], {last}
    while left and len(seen) <= _MAX_NODES:
        node = left.pop()
        for place, (following, _) in enumerate(node.next_functions):
            if following is None or following in stop:
                continue
            if getattr(following, "variable", None) is parameter:
                found.append((node, place))
            elif following not in seen:
                seen.add(following)
                left.append(following)
    return found


def _will_run(accumulate: Node) -> bool:
    """Whether this backward puts gradients into `.grad`; `torch.autograd.grad` hands them to its caller."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return False
