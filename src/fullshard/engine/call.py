"""One forward of a unit that autograd may come back to, and the signs that backward has reached or passed it.

    outputs    a hook on each        the gradient of an output is there: backward is about to enter the unit
    inputs     an identity each      those of all inputs are there: backward has left it (without any: `HooklessCalls`)

An error in a hook surfaces far away, from `loss.backward()`, so the hook adds the unit to it.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

from fullshard.comm import torch_private
from fullshard.core.errors import FullshardError
from fullshard.engine.precision import map_tensors

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

_numbers = itertools.count()


class Call:
    """One forward of a unit whose backward may come.

    Attributes:
        number: higher for later calls, across all models; backward comes to higher ones first.
        previous: the unit whose forward ended just before this one; backward will want it next. For a unit around
            others, the last of those.
        is_active: backward has reached the outputs and not yet all inputs.
        is_done: backward has left it, and has not come back since (`retain_graph`).
        left_in: torch's number of the backward that was the last to leave it.
        first_node: torch's number for the first node of its graph; infinite for a call that backward itself has made.
        has_inputs: whether any input of the call wants a gradient.
        inputs_left: while it is active, inputs whose gradient is still to come in this backward.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.first_node = torch_private.next_node() if torch_private.backward_under_way() == -1 else math.inf
        self.previous: Unit | None = None
        self.is_active = self.is_done = self.has_inputs = False
        self.inputs_left = 0
        self.left_in: int | None = None
        self._below_outputs: list[Node] = []  # the inputs' identities, or else other nodes
        self._givers: list[Node | None] = []  # nodes that made the inputs, or the tensors they are views of

    def reach(self) -> None:
        """Note that backward has reached the call, and will reach those of its inputs that are in the loss."""
        inputs = self._below_outputs if self.has_inputs else []
        self.inputs_left = sum(torch_private.will_run(node) is not False for node in inputs)

    def begin(self) -> None:
        """Note that backward is about to enter the call."""
        self.is_active, self.is_done = True, False

    def end(self) -> None:
        """Note that backward has left the call."""
        self.is_active, self.is_done, self.left_in = False, True, torch_private.backward_under_way()

    @property
    def is_in_backward(self) -> bool:
        """Return whether the backward under way comes to the call; True where nothing can tell, as outside backward.

        A live graph proves nothing: a rank that has kept the loss of an evaluation would wait for its backward.
        """
        if self.is_active or not self._below_outputs or torch_private.backward_under_way() == -1:
            return True
        # `torch.autograd.grad` also comes to the nodes whose gradients it hands to its caller.
        return any(torch_private.will_run(node) is not False for node in self._below_outputs)

    def watch_inputs(self, unit: Unit, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Put an identity in front of every input that wants a gradient, to learn when that gradient is complete.

        The identity makes it this unit's own: a tensor that other modules read too is complete much later. A view
        does not forbid the unit to change its input in place, as a custom autograd function would. Lists and dicts are
        left as they are: the unit may be meant to change them, and would change a copy.
        """
        done = _passed(unit, self)

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            view = tensor.view_as(tensor)
            assert view.grad_fn is not None and view._base is not None  # noqa: S101 -- a view that requires grad
            view.grad_fn.register_hook(done)
            self._below_outputs.append(view.grad_fn)
            self._givers.append(view._base.grad_fn)
            self.has_inputs = True
            return view

        watched = {key: map_tensors(watch, value, into_mutable=False) for key, value in kwargs.items()}
        return map_tensors(watch, args, into_mutable=False), watched

    def watch_outputs(self, unit: Unit, output: Any) -> bool:
        """Register hooks that tell when backward reaches an output; return False if none has a graph."""
        hook = _reached(unit, self)
        givers, self._givers = self._givers, []
        inputs = self._below_outputs if self.has_inputs else []
        outputs: list[Node] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            giver = tensor.grad_fn
            if not tensor.requires_grad or giver is None:
                return tensor
            outputs.append(giver)
            if any(giver is node for node in inputs):  # an unchanged input: backward has left the unit by then
                return tensor
            base = tensor._base
            if base is not None and base.grad_fn is not None and not any(base.grad_fn is node for node in givers):
                # A view changed in place later on loses its tensor hooks; the node of its base stays in the graph.
                # The node of an input that is passed on unchanged (T5's position bias) is another unit's: backward gets
                # there long after it has left this unit, which would be gathered again and stay whole to the end.
                base.grad_fn.register_prehook(hook)
                outputs.append(base.grad_fn)
            tensor.register_hook(hook)
            return tensor

        map_tensors(watch, output)
        if outputs and not self.has_inputs:
            self._below_outputs = _below(outputs)
        return bool(outputs)


class Calls:
    """The forwards of one unit that autograd may come back to, for as long as their graphs live."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[Call]] = set()

    def add(self, call: Call) -> None:
        """Add a forward."""
        self._references.add(weakref.ref(call, self._references.discard))

    def clear(self) -> None:
        """Forget all forwards: a live graph may come back, but no longer belongs to the step."""
        self._references.clear()

    def live(self) -> list[Call]:
        """Return the forwards whose graphs are there."""
        # Copy first: a call may die at any moment (even while a tuple is made), and removes its reference from the set.
        return list(filter(None, map(operator.call, self._references.copy()))) if self._references else []

    def pending(self) -> list[Call]:
        """Return the forwards that the backward under way is to come to, or is in."""
        return [call for call in self.live() if not call.is_done and call.is_in_backward]

    @property
    def are_expected(self) -> bool:
        """Return whether autograd, or this backward if one is under way, may come back to one of them."""
        backward = torch_private.backward_under_way()
        return any(call.is_in_backward and (backward == -1 or call.left_in != backward) for call in self.live())


def _below(outputs: Sequence[Node]) -> list[Node]:
    """Return the nodes below all of `outputs` in a graph; those that accumulate gradients have higher numbers.

    None of these nodes leads to an output, whose hook owns the call. If the call owned one that does (of the logits
    beside the loss, say), the graph would never be freed: Python's garbage collector does not look into it.
    """
    first = min(map(torch_private.number_of, outputs))
    found: list[Node] = []
    ahead, seen = list(outputs), set(outputs)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                (found if torch_private.number_of(node) < first else ahead).append(node)
    return found


def _reached(unit: Unit, call: Call) -> Callable[[Any], None]:
    """Return the gradient hook of a unit's outputs; it owns the call."""

    def hook(_gradient: Any) -> None:
        try:
            unit.pre_backward(call)
        except BaseException as error:
            locate(error, unit, "pre-backward")
            raise

    torch_private.keep_compiler_out(hook)
    return hook


def _passed(unit: Unit, call: Call) -> Callable[[Any, Any], None]:
    """Return the hook of the identities in front of a unit's inputs.

    It holds the call weakly: inputs may outlive the graph of this unit, whose outputs own the call.
    """
    reference = weakref.ref(call)

    def hook(_grad_inputs: Any, _grad_outputs: Any) -> None:
        call = reference()
        if call is None:
            return
        call.inputs_left -= 1
        if call.is_active and not call.inputs_left:
            try:
                unit.post_backward(call)
            except BaseException as error:
                locate(error, unit, "post-backward")
                raise

    torch_private.keep_compiler_out(hook)
    return hook


def locate(error: BaseException, unit: Unit, phase: str) -> None:
    """Add rank, unit and phase to an error that does not say them."""
    if not isinstance(error, FullshardError):
        error.add_note(f"fullshard: rank {unit.mesh.rank}, unit {unit.name!r}, {phase}")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` wrapped so that compilers stay out of it, as a hook must."""

    def hook(*args: Any) -> Any:
        return function(*args)

    torch_private.keep_compiler_out(hook)
    return hook
