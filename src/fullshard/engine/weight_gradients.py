"""Gradients of weights, made where they are to be, and no larger than they are.

    a linear layer    The product of a large one is written into the reduce input, and autograd is handed that memory:
                      otherwise it would be made beside it and copied. To that end the layer's part of the graph is
                      replaced by one node that computes the same. On accelerators copying is quicker than such a node.
    a tied weight     Autograd adds up, in new memory, what all uses give, and then hands the sum over: three times the
                      largest weight at once. What an output layer gives is collected as soon as it is there instead,
                      and taken out of autograd's sum. The first use is left to autograd, so that its own hook still
                      tells when all is there: backward comes to it last, and adds in the same order. What is computed
                      with the weight past its modules (`F.linear(x, embedding.weight)`) stays in autograd's sum.
    an embedding      A step looks up a few rows, and autograd makes a gradient of all of them, almost all zeros. So the
                      lookup is told to give its rows only (`nn.Embedding.sparse`), which are added to the reduce
                      input: those of each lookup by themselves, as above, because autograd puts the rows of several
                      together. On accelerators they would have to be counted, which waits for the device: not there.

What is reduced and published is as dense as ever, and the same bit for bit. So a weight is left to autograd where that
could not be (`Gradient.takes_uses`, `Gradient.lend`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from fullshard.comm import torch_private
from fullshard.config.switches import GRADIENTS
from fullshard.engine.bucket import Bucket
from fullshard.engine.call import uncompiled
from fullshard.engine.parameter import is_hooked
from fullshard.engine.unsharded_gradient import Product

_LARGE_NBYTES = 2**20
"""Copying so many bytes takes longer than what Python does for a node."""
_MAX_NODES = 32
"""Of the part of a graph that a module made and that is looked through for its parameter: a layer's few."""
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
"""Nodes with which a layer makes matrices of its input, and of the product what it returns."""


Take = Callable[[Bucket, int, torch.Tensor | Product], bool]
Multiply = Callable[[Product], torch.Tensor | None]


def watch_uses(bucket: Bucket, take: Take) -> None:
    """Put the hooks on the modules whose parameters a trainable bucket holds.

    Each use's gradient, in its parameter's shape, is for `take`, with the bucket and the parameter's index in it, which
    says whether it took it.
    """
    if GRADIENTS.read() == "whole":
        return
    in_place = bucket.mesh.reduce.pages.are_dear
    by_rows = in_place and bucket.mesh.world_size > 1
    for index, slot in enumerate(bucket.slots):
        is_plain = bucket.tiles[index] is None and not torch_private.has_own_dispatch(type(slot.parameter))
        if not slot.parameter.dtype.is_floating_point or not is_plain:
            continue
        first = slot.owners[0][0]
        is_large = slot.parameter.dim() == 2 and slot.parameter.nbytes >= _LARGE_NBYTES
        if in_place and is_large and len(slot.owners) == 1 and type(first) is not nn.Embedding:
            # Before every other hook: what those put on an output's graph would be lost with it.
            first.register_forward_hook(_layer_hook(bucket, index), prepend=True)
        owners = {id(m): m for m, _ in slot.owners}
        lookups = [m for m, name in slot.owners if by_rows and isinstance(m, nn.Embedding) and name == "weight"]
        to_come: weakref.WeakSet[_ToCome] = weakref.WeakSet()
        for module in owners.values() if lookups or len(owners) > 1 else ():
            hook = uncompiled(_UseHook(bucket, index, take, to_come))
            module.register_forward_hook(_unless_in_graph(hook), prepend=True)
        for module in lookups:
            lookup = _Lookup(bucket, index, to_come)
            module.register_forward_pre_hook(lookup.begin)
            module.register_forward_hook(lookup.end, always_call=True)


def _unless_in_graph(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A forward hook where the module runs by itself; a graph that the compiler makes of more than it stays whole."""

    def guarded(module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(module, args, output)

    torch_private.keep_compiler_out(guarded, is_in_graphs=True)
    return guarded


def _is_looked_at(bucket: Bucket, index: int) -> bool:
    """Whether somebody else may look at the whole gradient before it is collected."""
    return bucket.owner.is_pinned or is_hooked(bucket.slots[index].parameter)


# -- embeddings -----------------------------------------------------------------------------------------------------


class _Lookup:
    """The hooks of one embedding, which has its own `sparse` back after each forward."""

    def __init__(self, bucket: Bucket, index: int, to_come: weakref.WeakSet[_ToCome]) -> None:
        self._bucket, self._index, self._to_come = weakref.ref(bucket), index, to_come
        self._was_sparse: bool | None = None
        self._has_other_uses = len(bucket.slots[index].owners) > 1

    def begin(self, module: nn.Embedding, _args: Any) -> None:
        """Before the forward."""
        if torch.compiler.is_compiling():  # compiled code takes no such gradient
            return
        bucket = self._bucket()
        if bucket is None or module.scale_grad_by_freq or _is_looked_at(bucket, self._index):
            return
        if bucket.compute_dtype == torch.float16:  # of which torch adds up no two such gradients
            return
        self._has_other_uses = self._has_other_uses or bool(self._to_come)
        # Autograd adds the rows to what other uses give in another order.
        if not self._has_other_uses or (
            bucket.gradient is not None and bucket.gradient.unsharded.takes_uses(self._index)
        ):
            self._was_sparse, module.sparse = module.sparse, True

    def end(self, module: nn.Embedding, _args: Any, _output: Any) -> None:
        """After it, even if it failed."""
        if self._was_sparse is not None:
            module.sparse, self._was_sparse = self._was_sparse, None


# -- tied weights ---------------------------------------------------------------------------------------------------


class _ToCome:
    """The first use of a weight in a forward, whose backward has not come yet. Its graph has it, and ends it."""

    __slots__ = ("__weakref__",)


class _UseHook:
    """Forward hook of a module with a tied parameter: finds the nodes of the graph that give its gradient.

    Args:
        to_come: the first use, as long as its backward is to come; shared by the hooks of all owners. Uses after it are
            collected one by one.
    """

    def __init__(self, bucket: Bucket, index: int, take: Take, to_come: weakref.WeakSet[_ToCome]) -> None:
        # Weakly: autograd keeps hooks where Python's garbage collector does not look.
        self._bucket, self._index, self._take, self._to_come = weakref.ref(bucket), index, take, to_come

    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor | None:
        bucket = self._bucket()
        if bucket is None or not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return None
        if _is_looked_at(bucket, self._index):
            return None
        parameter = bucket.slots[self._index].parameter
        inputs = {a.grad_fn for a in args if isinstance(a, torch.Tensor)}
        if not self._to_come:
            for node, _ in _givers(output.grad_fn, parameter, inputs)[:1]:
                node.register_hook(uncompiled(self._leaving()))
            return None
        is_exact = bucket.gradient is not None and bucket.gradient.unsharded.takes_uses(self._index)
        if is_exact and args and isinstance(args[0], torch.Tensor):
            layer = _Layer.of(output.grad_fn, args[0], parameter) if _may_be_replaced(output) else None
            if layer is not None:
                return layer.replace(args[0], output, self._multiplying(layer.accumulate))
        for node, place in _givers(output.grad_fn, parameter, inputs):
            node.register_hook(uncompiled(self._taking(node, place)))
        return None

    def _leaving(self) -> Callable[[Any, Any], None]:
        use, to_come = _ToCome(), self._to_come
        to_come.add(use)

        def hook(_given: Any, _received: Any) -> None:
            to_come.discard(use)

        return hook

    def _multiplying(self, accumulate: Node) -> Multiply:
        reference, index, take = self._bucket, self._index, self._take

        def multiply(product: Product) -> torch.Tensor | None:
            bucket = reference()
            if bucket is None or torch.is_grad_enabled() or not torch_private.will_run(accumulate):
                return product.value()
            return None if take(bucket, index, product) else product.value()

        return multiply

    def _taking(self, node: Node, place: int) -> Callable[[Any, Any], tuple[torch.Tensor | None, ...] | None]:
        reference, index, take, accumulate = self._bucket, self._index, self._take, node.next_functions[place][0]
        assert accumulate is not None  # noqa: S101 -- see `_givers`

        def hook(given: tuple[torch.Tensor | None, ...], _received: Any) -> tuple[torch.Tensor | None, ...] | None:
            bucket, gradient = reference(), given[place]
            if bucket is None or gradient is None or not torch_private.will_run(accumulate):
                return None
            return (*given[:place], None, *given[place + 1 :]) if take(bucket, index, gradient) else None

        return hook


# -- large layers, and the node that stands in for one --------------------------------------------------------------


def _layer_hook(bucket: Bucket, index: int) -> Callable[..., torch.Tensor | None]:
    """Forward hook of a large layer, whose product goes into the reduce input. Compiled code stays as it is."""
    reference = weakref.ref(bucket)
    left: weakref.WeakSet[_Use] = weakref.WeakSet()

    def hook(_module: nn.Module, args: Any, output: Any) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return None
        bucket = reference()
        if bucket is None or not args or not isinstance(args[0], torch.Tensor) or not _may_be_replaced(output):
            return None
        layer = _Layer.of(output.grad_fn, args[0], bucket.slots[index].parameter)
        if layer is None:
            return None
        return layer.replace(args[0], output, _Use(reference, index, layer.accumulate, left))

    return hook


class _Use:
    """One use of a large layer, which makes the weight's gradient when backward comes to it.

    Args:
        left: uses of which no backward has come yet. Only the last may be made in the reduce input: autograd would
            keep an earlier one there while it computes others, and if one of those is in a backward inside this one,
            that is collected first.
    """

    __slots__ = ("__weakref__", "_accumulate", "_index", "_left", "_reference")

    def __init__(
        self, reference: weakref.ref[Bucket], index: int, accumulate: Node, left: weakref.WeakSet[_Use]
    ) -> None:
        self._reference, self._index, self._accumulate, self._left = reference, index, accumulate, left
        left.add(self)

    def __call__(self, product: Product) -> torch.Tensor | None:
        """The gradient; None if nobody wants it."""
        is_last = len(self._left) == 1 and self in self._left
        self._left.discard(self)
        will_run = torch_private.will_run(self._accumulate)
        if will_run is False:
            return None
        bucket = self._reference()
        if will_run is None or bucket is None:
            return product.value()
        if bucket.gradient is None or torch.is_grad_enabled() or _is_looked_at(bucket, self._index):
            return product.value()
        piece = bucket.gradient.unsharded.lend(self._index) if is_last else None
        if piece is None or piece.dtype != product.left.dtype:
            return product.value()
        return product.write(piece)


def _may_be_replaced(output: Any) -> bool:
    """Whether a layer's output may be given another graph: it has one, and nothing else hangs on it."""
    return (
        isinstance(output, torch.Tensor)
        and output.grad_fn is not None
        and torch.is_grad_enabled()
        and not torch_private.gradient_hooks(output)
        and not output.retains_grad
        and not torch_private.are_transforms_active()
        and not torch_private.is_forward_mode()
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer, as the graph shows it.

    Attributes:
        weight: shape (outputs, inputs), or (inputs, outputs) if not `is_transposed`.
        bias: shape (outputs,); None without one, or if it wants no gradient.
        is_transposed: whether it is the weight's transpose that inputs are multiplied by.
        accumulate: the node that the weight's gradient goes to.
    """

    weight: nn.Parameter
    bias: torch.Tensor | None
    is_transposed: bool
    accumulate: Node

    @classmethod
    def of(cls, last: Node, hidden: torch.Tensor, weight: nn.Parameter) -> _Layer | None:
        """The layer, if `last` ends `hidden` times `weight` or its transpose, maybe plus a bias, and no more."""
        # Without a graph nothing tells `hidden` from another; of another layout autograd takes the products otherwise.
        if hidden.grad_fn is None or not hidden.is_contiguous():
            return None
        node = last.next_functions[0][0] if last.name() in _VIEWS else last
        if node is None:
            return None
        bias = None
        if node.name() == "AddmmBackward0" and torch_private.is_plain_sum(node):
            (adding, _), *factors = node.next_functions
            if adding is not None:
                bias = getattr(adding, "variable", None)
                if bias is None:
                    return None
        elif node.name() == "MmBackward0":
            factors = list(node.next_functions)
        else:
            return None
        (rows, number), (factor, _) = factors
        if rows is not None and rows is not hidden.grad_fn and rows.name() in _VIEWS:
            rows, number = rows.next_functions[0]
        if rows is not hidden.grad_fn or number != hidden.output_nr or factor is None:
            return None
        is_transposed = factor.name() == "TBackward0"
        accumulate = factor.next_functions[0][0] if is_transposed else factor
        if accumulate is None or getattr(accumulate, "variable", None) is not weight:
            return None
        if bias is not None and bias.shape != (weight.shape[0 if is_transposed else 1],):  # another is spread out
            return None
        return cls(weight, bias, is_transposed, accumulate)

    def replace(self, hidden: torch.Tensor, output: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        """The same output, whose graph is a node that has `multiply` make the weight's gradient."""
        made: torch.Tensor = _Linear.apply(
            hidden, self.weight, self.bias, [output.detach()], self.is_transposed, multiply
        )
        return made


class _Linear(torch.autograd.Function):
    """Stands in for the graph of a linear layer; computes what autograd would, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        _bias: torch.Tensor | None,
        output: list[torch.Tensor],
        is_transposed: bool,
        multiply: Multiply,
    ) -> torch.Tensor:
        """`output` is what the layer has made of the other three; in a list autograd does not take it for an input."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight)
        ctx.is_transposed, ctx.multiply = is_transposed, multiply
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Of the input, of the weight unless that has been taken, and of the bias."""
        if gradient is None:
            return None, None, None, None, None, None
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = of_bias = None
        back = weight if ctx.is_transposed else weight.t()
        outputs, inputs = back.shape
        gradient, rows = gradient.reshape(-1, outputs), hidden.reshape(-1, inputs)
        if ctx.needs_input_grad[0]:
            of_hidden = gradient.mm(back).view(hidden.shape)
        if ctx.needs_input_grad[1]:
            product = Product(gradient.t(), rows) if ctx.is_transposed else Product(rows.t(), gradient)
            of_weight = ctx.multiply(product)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _givers(last: Node, parameter: nn.Parameter, stop: set[Node | None]) -> list[tuple[Node, int]]:
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
