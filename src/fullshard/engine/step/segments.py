"""torch's element-wise optimizers update segments: neighbouring slices of a bucket as one tensor.

An optimizer takes microseconds per tensor, whatever its size, and a model with adapters has thousands of small ones.
Only the optimizer's own loop sees segments: its parameter groups, every `.grad` and the state of each parameter stay
what they are without them, the state being views of the segment's.

    segment      slices of one bucket and one parameter group, side by side, that have taken the same steps
    dissolved    back to slices: only some of them got a gradient, or one has a `.grad` of its own

The numbers are those of slices, bit for bit, where the optimizer's kernel treats all elements alike. torch's fused
kernels round the last few elements of a tensor differently, so there the same holds to a rounding.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import optim

from fullshard.comm import torch_private
from fullshard.config.switches import OPTIMIZER
from fullshard.engine.bucket import Bucket, bucket_of
from fullshard.engine.parameter import ShardedParameter, are_same
from fullshard.engine.sharded_tensor import ShardedTensor

SEGMENT_NBYTES = 2**20
"""No segment is longer: time per tensor is nothing for a long one, and some optimizers take temporary memory of its
length several times over."""

ELEMENT_WISE = (
    optim.Adadelta,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.SGD,
)
"""Optimizers that treat elements alike and collect their tensors in `_init_group`. A subclass may do anything."""

ELEMENT_WISE_ALONE = (optim.Adagrad, optim.ASGD, optim.Rprop)
"""The same, but what they keep besides one value per element is each parameter's own: segments of one parameter."""

State = MutableMapping[torch.Tensor, dict[str, Any]]


def use_segments(optimizer: optim.Optimizer) -> None:
    """From now on `optimizer` updates segments where it can. Nothing happens to one that cannot, or the second time."""
    if type(optimizer) in (*ELEMENT_WISE, *ELEMENT_WISE_ALONE) and torch_private.INIT_GROUP not in vars(optimizer):
        setattr(optimizer, torch_private.INIT_GROUP, _InitGroup(optimizer))


def finish_step(optimizer: optim.Optimizer) -> None:
    """Give the parameters what the optimizer has put into the state of segments after its loop."""
    if (init_group := _init_group_of(optimizer)) is not None:
        init_group.take_states(optimizer.state)


def segment_states(optimizer: optim.Optimizer) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
    """The state of every segment, of which its parameters' is views, and the first of them."""
    for segment in _segments_of(optimizer):
        yield from ((segment.parameters[0], value) for value in segment.state.values())


def dissolve_segments(optimizer: optim.Optimizer) -> None:
    """Give every parameter a state of its own, because another optimizer may update it now."""
    if (init_group := _init_group_of(optimizer)) is not None:
        init_group.dissolve(optimizer.state)


def _init_group_of(optimizer: optim.Optimizer) -> _InitGroup | None:
    found = vars(optimizer).get(torch_private.INIT_GROUP)
    return found if isinstance(found, _InitGroup) else None


def _segments_of(optimizer: optim.Optimizer) -> Iterator[_Segment]:
    init_group = _init_group_of(optimizer)
    groups = () if init_group is None else init_group.groups
    return itertools.chain.from_iterable(group.segments() for group in groups)


class _InitGroup:
    """Stands in for `Optimizer._init_group`, which lists a parameter group's tensors, gradients and state."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.groups: list[_Group] = []

    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None  # noqa: S101 -- it is calling
        held = self._group(optimizer, group)
        try:
            tensors = held.prepare(optimizer.state)
            torchs = getattr(type(optimizer), torch_private.INIT_GROUP)
            return torchs(optimizer, {**group, "params": tensors}, *lists)
        finally:  # at once: the optimizer has its lists, and whoever else looks at `state` is to find parameters there
            self.take_states(optimizer.state)

    def _group(self, optimizer: optim.Optimizer, group: dict[str, Any]) -> _Group:
        """What was made of `group`, made again if its parameters have changed since."""
        current = [known for known in self.groups if known.is_current(optimizer.param_groups)]
        for outdated in self.groups:
            if outdated not in current:  # before others are cut, which adopt what each parameter has
                outdated.dissolve(optimizer.state)
        self.groups = current
        for known in self.groups:
            if known.source is group:
                return known
        joins = type(optimizer) in ELEMENT_WISE and OPTIMIZER.read() == "segments"
        self.groups.append(_Group(group, optimizer.state, joins=joins))
        return self.groups[-1]

    def take_states(self, state: State) -> None:
        """Give the parameters what the optimizer has put into the state of segments."""
        for group in self.groups:
            for segment in group.segments():
                segment.take_state(state)

    def dissolve(self, state: State) -> None:
        """Forget all segments."""
        for group in self.groups:
            group.dissolve(state)
        self.groups = []


class _Group:
    """A parameter group and its segments; parameters in none stand for themselves."""

    def __init__(self, source: dict[str, Any], state: State, *, joins: bool) -> None:
        self.source, self._joins = source, joins
        self._parameters = list(source["params"])
        self.items = _cut(self._parameters, state, joins=joins)

    def segments(self) -> Iterator[_Segment]:
        """Those of them."""
        return (item for item in self.items if isinstance(item, _Segment))

    def is_current(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the group is among `groups`, with the parameters that it had."""
        is_same = are_same(self.source["params"], self._parameters)
        return is_same and any(self.source is group for group in groups)

    def dissolve(self, state: State) -> None:
        """Give every parameter a state of its own."""
        for segment in self.segments():
            segment.dissolve(state)

    def prepare(self, state: State) -> list[torch.Tensor]:
        """What the optimizer is to update in place of the group's parameters, with gradients and state in place."""
        if not all(segment.is_published(state) for segment in self.segments()):
            # Somebody has loaded or changed the state of parameters, and that is what counts from here on.
            self.dissolve(state)
            self.items = _cut(self._parameters, state, joins=self._joins)
        items: list[_Segment | torch.Tensor] = []
        for item in self.items:
            alone: list[ShardedParameter] = []
            if isinstance(item, _Segment) and not item.prepare(state):
                item.dissolve(state)
                alone = item.parameters
            elif _is_flat(item) and item.local_grad is not None:
                alone = [item]
            else:
                items.append(item)
            for parameter in alone:
                segment = _Segment([parameter], state)
                segment.prepare(state)  # which can be refused to several only
                items.append(segment)
        self.items = items
        return [item.flat if isinstance(item, _Segment) else item for item in items]


class _Segment:
    """Neighbouring slices of a bucket.

    Attributes:
        parameters: the sharded parameters, in the bucket's order.
        flat: shape (n,); the part of the bucket's main buffer that holds them.
        state: of that, of which the parameters' is views.
    """

    def __init__(self, parameters: list[ShardedParameter], state: State) -> None:
        self.parameters = parameters
        bucket = bucket_of(parameters[0])
        assert bucket.gradient is not None  # noqa: S101 -- its parameters have gradients
        self._gradient = bucket.gradient.main
        slices = [bucket.slices[p._index] for p in parameters]
        held = [part for part in slices if part.stop > part.start] or slices[:1]
        self._start, self._stop = held[0].start, held[-1].stop
        self._slices = [slice(max(0, part.start - self._start), max(0, part.stop - self._start)) for part in slices]
        self.flat = bucket.main[self._start : self._stop].detach()
        self.state: dict[str, Any] = {}
        self._entries: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._adopt(state)

    def _adopt(self, state: State) -> None:
        """Take over state that is there already, a checkpoint's for example."""
        entries = [state.get(parameter, {}) for parameter in self.parameters]
        for key, first in entries[0].items():
            if not isinstance(first, ShardedTensor):
                self.state[key] = first.clone() if isinstance(first, torch.Tensor) else first
            elif len(entries) == 1:
                self.state[key] = first.local
            else:
                self.state[key] = joined = torch.zeros_like(self.flat, dtype=first.dtype)
                for entry, part in zip(entries, self._slices, strict=True):
                    joined[part] = entry[key].local
        if self.state:
            self._publish(state)

    def prepare(self, state: State) -> bool:
        """Set the gradient and put the segment's state into the optimizer's; False if this cannot be."""
        first, last = self.parameters[0], self.parameters[-1]
        if first is last:
            self.flat.grad = first.local_grad
        elif (gradient := self._gradient.published(first._index, last._index)) is not None:
            self.flat.grad = gradient[self._start : self._stop]
        if self.flat.grad is not None:
            state[self.flat] = self.state
        return self.flat.grad is not None or all(parameter.local_grad is None for parameter in self.parameters)

    def take_state(self, state: State) -> None:
        """Take the segment's state out of the optimizer's, and publish it if it is new."""
        taken = state.pop(self.flat, {})
        self.flat.grad = None
        self.state.update(taken)
        if len(self.state) * len(self.parameters) != len(self._values):  # made in this step; views of it stay true
            self._publish(state)

    def _publish(self, state: State) -> None:
        self._entries = [
            {key: _part(value, part, parameter) for key, value in self.state.items()}
            for parameter, part in zip(self.parameters, self._slices, strict=True)
        ]
        self._values = _values_of(self._entries)
        state.update(zip(self.parameters, self._entries, strict=True))

    def is_published(self, state: State) -> bool:
        """Whether the parameters' state is still what was published."""
        now = list(map(state.get, self.parameters))
        if not self._entries:
            return not any(now)
        return are_same(now, self._entries) and are_same(_values_of(self._entries), self._values)

    def dissolve(self, state: State) -> None:
        """Give every parameter a step count of its own, which they shared."""
        for parameter in self.parameters:
            entry = state.get(parameter, {})
            entry.update({key: value.clone() for key, value in entry.items() if _is_scalar(value)})


def _is_flat(item: Any) -> TypeGuard[ShardedParameter]:
    """Whether it is a slice of a bucket that an optimizer may update past its class."""
    return isinstance(item, ShardedParameter) and not item.span.is_by_rows


def _part(value: Any, part: slice, parameter: ShardedParameter) -> Any:
    is_per_element = isinstance(value, torch.Tensor) and value.dim()
    return ShardedTensor(value[part], parameter.span) if is_per_element else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)


def _values_of(entries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, entries)))


def _cut(parameters: Sequence[torch.Tensor], state: State, *, joins: bool) -> list[_Segment | torch.Tensor]:
    """Segments, and the parameters that are in none."""
    items: list[_Segment | torch.Tensor] = []
    by_bucket: dict[Bucket, list[ShardedParameter]] = {}
    for parameter in parameters:
        if _is_flat(parameter) and parameter.local_grad is not None:
            by_bucket.setdefault(bucket_of(parameter), []).append(parameter)
        else:
            items.append(parameter)
    for held in by_bucket.values():
        runs: list[list[ShardedParameter]] = []
        nbytes = 0
        for parameter in sorted(held, key=lambda p: p._index):
            nbytes += parameter.local.nbytes
            if joins and runs and nbytes <= SEGMENT_NBYTES and _may_join(runs[-1][-1], parameter, state):
                runs[-1].append(parameter)
            else:
                runs.append([parameter])
                nbytes = parameter.local.nbytes
        items += [_Segment(run, state) for run in runs]
    return items


def _may_join(left: ShardedParameter, right: ShardedParameter, state: State) -> bool:
    """Whether two slices of a bucket are side by side and their states, if any, differ in nothing but elements."""
    if left._index + 1 != right._index:
        return False
    states = state.get(left) or {}, state.get(right) or {}
    if states[0].keys() != states[1].keys():
        return False
    for a, b in zip(states[0].values(), (states[1][key] for key in states[0]), strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype):
            return False
        are_sharded = isinstance(a, ShardedTensor), isinstance(b, ShardedTensor)
        is_scalar = not any(are_sharded) and a.dim() == b.dim() == 0 and torch.equal(a, b)
        if not (is_scalar or (all(are_sharded) and a.device == left.device == b.device)):
            return False
    return True
