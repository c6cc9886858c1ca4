"""One forward of a unit that may have a backward, and the hooks that track backward through the unit.

    outputs   Each output has a hook, which runs when its gradient exists and backward is about to enter the unit.
    inputs    Each input passes through an identity with a hook. Once all hooks have run, backward has left the unit.

An error in a hook surfaces in `loss.backward()`, so the hook adds the name of the unit to the error.
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
    """One forward of a unit that may have a backward.

    Attributes:
        number: a counter over the calls of all models. Backward reaches calls with higher numbers first.
        previous: the unit whose forward ended last before this call ended. Backward needs it next. If the unit contains
            others, this is the last of them.
        is_active: whether backward has reached an output but not yet all inputs.
        is_done: whether backward has left the call. This is reset if backward returns to it (`retain_graph`).
        left_in: torch's number for the last backward that left the call.
        first_node: torch's number for the first node in its graph; infinite for a call made during backward.
        has_inputs: whether any input of the call requires a gradient.
        inputs_left: the number of inputs whose gradients have yet to arrive in this backward, while the call is active.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.first_node = torch_private.next_node() if torch_private.backward_under_way() == -1 else math.inf
        self.previous: Unit | None = None
        self.is_active = self.is_done = self.has_inputs = False
        self.inputs_left = 0
        self.left_in: int | None = None
        self._below_outputs: list[Node] = []  # the inputs' identities if there are any, otherwise other nodes
        self._givers: list[Node | None] = []  # nodes that produced the inputs, or their bases if they are views

    def reach(self) -> None:
        """Record that backward has reached the call, and count the inputs whose gradients it will compute."""
        inputs = self._below_outputs if self.has_inputs else []
        self.inputs_left = sum(torch_private.will_run(node) is not False for node in inputs)

    def begin(self) -> None:
        """Record that backward is about to enter the call."""
        self.is_active, self.is_done = True, False

    def end(self) -> None:
        """Record that backward has left the call."""
        self.is_active, self.is_done, self.left_in = False, True, torch_private.backward_under_way()

    @property
    def is_in_backward(self) -> bool:
        """Return whether the current backward reaches the call, or True if no backward is in progress.

        Also return True if the answer is unknown. It is not enough that the graph still exists: a rank that keeps the
        loss of an evaluation would wait for a backward that never comes.
        """
        if self.is_active or not self._below_outputs or torch_private.backward_under_way() == -1:
            return True
        # `torch.autograd.grad` also reaches the nodes with gradients that it returns to its caller.
        return any(torch_private.will_run(node) is not False for node in self._below_outputs)

    def watch_inputs(self, unit: Unit, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Insert an identity before every input that requires a gradient, to detect when that gradient is complete.

        Only this unit uses the identity's output. If other modules also read the input, the gradient of the input
        itself is complete much later. The identity is a view, so that the unit may still modify its input in place,
        which a custom autograd function would prevent. Tensors in lists and dicts are skipped: the unit may have to
        modify these containers, and would modify a copy.
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
        """Register hooks that run when backward reaches an output. Return False if no output requires a gradient."""
        hook = _reached(unit, self)
        givers, self._givers = self._givers, []
        inputs = self._below_outputs if self.has_inputs else []
        outputs: list[Node] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            giver = tensor.grad_fn
            if not tensor.requires_grad or giver is None:
                return tensor
            outputs.append(giver)
            if any(giver is node for node in inputs):  # an unchanged input; by then, backward has left the unit
                return tensor
            base = tensor._base
            if base is not None and base.grad_fn is not None and not any(base.grad_fn is node for node in givers):
                # A view loses its tensor hooks if changed in place later. The node of its base stays in the graph.
                # An input passed on unchanged (T5's position bias) has a node of another unit. Backward reaches it long
                # after it has left this unit, which would be gathered again and stay unsharded to the end.
                base.grad_fn.register_prehook(hook)
                outputs.append(base.grad_fn)
            tensor.register_hook(hook)
            return tensor

        map_tensors(watch, output)
        if outputs and not self.has_inputs:
            self._below_outputs = _below(outputs)
        return bool(outputs)


class Calls:
    """The calls of one unit that may still have a backward. A call is removed when its graph is freed."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[Call]] = set()

    def add(self, call: Call) -> None:
        """Add a call. Only a weak reference to it is kept."""
        self._references.add(weakref.ref(call, self._references.discard))

    def clear(self) -> None:
        """Discard all calls. Autograd may still return to their graphs, but not as part of the current step."""
        self._references.clear()

    def live(self) -> list[Call]:
        """Return the calls whose graphs still exist."""
        # Copy first: a call may be freed at any time, even while a tuple is built, which removes it from the set.
        return list(filter(None, map(operator.call, self._references.copy()))) if self._references else []

    def pending(self) -> list[Call]:
        """Return the calls that the current backward still has to reach or to leave."""
        return [call for call in self.live() if not call.is_done and call.is_in_backward]

    @property
    def are_expected(self) -> bool:
        """Return whether autograd may return to one of the calls, in the current backward if one is in progress."""
        backward = torch_private.backward_under_way()
        return any(call.is_in_backward and (backward == -1 or call.left_in != backward) for call in self.live())


def _below(outputs: Sequence[Node]) -> list[Node]:
    """Return the nearest nodes that precede all of `outputs` in the graph, except nodes that accumulate gradients."""
    # The call may own these. If it owned a node that leads to an output, whose hook owns the call (the logits beside
    # the loss), the graph would never be freed, because Python's garbage collector does not traverse it.
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
    """Return the gradient hook for the outputs of a unit. The hook holds a strong reference to the call."""

    def hook(_gradient: Any) -> None:
        try:
            unit.pre_backward(call)
        except BaseException as error:
            locate(error, unit, "pre-backward")
            raise

    torch_private.keep_compiler_out(hook)
    return hook


def _passed(unit: Unit, call: Call) -> Callable[[Any, Any], None]:
    """Return the hook for a unit's inputs. It refers to the call weakly, because inputs may outlive the outputs."""
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
    """Add a note with the rank, unit and phase to an error, unless the error is fullshard's own and names them."""
    if not isinstance(error, FullshardError):
        error.add_note(f"fullshard: rank {unit.mesh.rank}, {unit}, {phase}")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook function so that compilers do not trace it."""

    def hook(*args: Any) -> Any:
        return function(*args)

    torch_private.keep_compiler_out(hook)
    return hook
