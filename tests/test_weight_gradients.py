"""Gradients of weights, made where they are to be, against those that autograd makes and adds up.

pytest tests/test_weight_gradients.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from fullshard.config.switches import GRADIENTS
from fullshard.engine import MixedPrecisionPolicy, fully_shard, no_sync
from fullshard.engine.lookup import units_of
from tests.differential import own_part
from tests.distributed import end_workers, run_ranks
from tests.memory import PeakGrowth

VOCABULARY, WIDTH = 50, 6
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Tied(nn.Module):
    """An embedding that is the output layer too, and one with a padding row that is nothing else."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(16, width, padding_idx=0)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, *, with_embedding: bool = True, with_head: bool = True) -> torch.Tensor:
        if not with_embedding:
            return self.head(torch.ones(3, WIDTH, dtype=self.head.weight.dtype))  # type: ignore[no-any-return]
        places = torch.arange(tokens.shape[-1])
        hidden: torch.Tensor = torch.tanh(self.embedding(tokens) + self.positions(places))
        return self.head(hidden) if with_head else hidden


Step = Callable[[Tied, torch.Tensor], None]


def plain(model: Tied, tokens: torch.Tensor) -> None:
    model(tokens).square().mean().backward()


def without_head(model: Tied, tokens: torch.Tensor) -> None:
    model(tokens, with_head=False).square().mean().backward()


def without_embedding(model: Tied, tokens: torch.Tensor) -> None:
    """Its first place is not used, so nothing but the end of backward tells that the gradient is there."""
    model(tokens, with_embedding=False).square().mean().backward()


def twice(model: Tied, tokens: torch.Tensor) -> None:
    """Two forwards, then the backward of both."""
    (model(tokens).square().mean() + model(tokens.flip(0)).square().mean()).backward()


def micro_batches(model: Tied, tokens: torch.Tensor) -> None:
    for part in tokens.split(2):
        model(part).square().mean().backward()


def unreduced(model: Tied, tokens: torch.Tensor) -> None:
    """The second backward adds to what the first has left."""
    with no_sync(model):
        model(tokens[:2]).square().mean().backward()
    model(tokens[2:]).square().mean().backward()


def checkpointed(model: Tied, tokens: torch.Tensor) -> None:
    inner = model.head.forward
    setattr(model.head, "forward", lambda x: checkpoint(inner, x, use_reentrant=False))  # noqa: B010 -- mypy
    model(tokens).square().mean().backward()


def scaled(model: Tied, tokens: torch.Tensor) -> None:
    """What the head returns is not its product alone."""
    inner = model.head.forward
    setattr(model.head, "forward", lambda x: inner(x) * 2)  # noqa: B010 -- mypy
    model(tokens).square().mean().backward()


def squared(model: Tied, tokens: torch.Tensor) -> None:
    """Autograd's graph comes to the product on two ways."""
    inner = model.head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = inner(x)
        return y * y

    setattr(model.head, "forward", forward)  # noqa: B010 -- mypy
    model(tokens).square().mean().backward()


def changed_in_place(model: Tied, tokens: torch.Tensor) -> None:
    model(tokens).mul_(2).square().mean().backward()


def looked_at(model: Tied, tokens: torch.Tensor) -> None:
    """A hook of the user's sees the whole sum."""
    seen: list[torch.Tensor] = []
    handles = []

    def watch(module: nn.Module, _args: object) -> None:
        assert isinstance(module, Tied)
        handles.append(module.embedding.weight.register_hook(lambda gradient: seen.append(gradient.clone())))

    model.register_forward_pre_hook(watch)
    model(tokens).square().mean().backward()
    assert len(seen) == 1 and not seen[0].is_sparse
    assert int((seen[0].abs().sum(1) > 0).sum()) == VOCABULARY  # the head's part is in it


def for_its_caller(model: Tied, tokens: torch.Tensor) -> None:
    """`torch.autograd.grad` gives its caller the gradient; the backward after it is as ever."""
    loss = model(tokens).square().mean()
    weight = model.embedding.weight  # the sharded one at rest; the graph has the original
    assert weight.grad is None
    original = next(node for node in _leaves(loss.grad_fn) if node.shape == (VOCABULARY, WIDTH))
    [gradient] = torch.autograd.grad(loss, [original], retain_graph=True)
    assert gradient.shape == (VOCABULARY, WIDTH)
    assert int((gradient.to_dense().abs().sum(1) > 0).sum()) == VOCABULARY
    loss.backward()


def _leaves(node: torch.autograd.graph.Node | None) -> list[torch.Tensor]:
    if node is None:
        return []
    if hasattr(node, "variable"):
        return [node.variable]
    return [leaf for following, _ in node.next_functions for leaf in _leaves(following)]


STEPS: list[Step] = [
    plain, without_head, without_embedding, twice, micro_batches, unreduced, checkpointed, scaled, squared,
    changed_in_place, looked_at, for_its_caller,
]  # fmt: skip


def gradients(step: Step, switch: str, policy: MixedPrecisionPolicy | None = None) -> list[torch.Tensor | None]:
    os.environ[GRADIENTS.name] = switch
    torch.manual_seed(3)
    model = Tied()
    fully_shard(model, mp_policy=policy)
    step(model, torch.tensor([[1, 2, 2, 49], [7, 1, 1, 1], [0, 48, 3, 3], [5, 6, 5, 6]]))
    assert not model.embedding.sparse
    return [None if parameter.grad is None else own_part(parameter.grad) for parameter in model.parameters()]


def check(policy: MixedPrecisionPolicy | None) -> None:
    for step in STEPS:
        for mine, theirs in zip(gradients(step, "uses", policy), gradients(step, "whole", policy), strict=True):
            assert (mine is None) == (theirs is None), step.__name__
            if mine is None or theirs is None:
                continue
            if step is twice and policy is not None:  # the first step that finds a second lookup has its rows added up
                apart = 0.0 if not mine.numel() else ((mine - theirs).abs().max() / theirs.abs().max()).item()
                assert apart <= 2**-7, (policy, apart)
            else:
                assert torch.equal(mine, theirs), (step.__name__, policy)


def check_product() -> None:
    """The head's gradient is a product in the reduce input, so that autograd has none to add up."""
    os.environ[GRADIENTS.name] = "uses"
    model = Tied()
    fully_shard(model)
    out = model(torch.tensor([[1, 2]]))
    assert out.grad_fn is not None and type(out.grad_fn).__name__ == "_LinearBackward"


class Folded(nn.Linear):
    """A layer with more paths through its graph than anybody could follow one by one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        for _ in range(50):
            hidden = (hidden + hidden.tanh()) / 2
        return hidden


def check_paths() -> None:
    os.environ[GRADIENTS.name] = "uses"
    model = Tied()
    weight = model.head.weight
    model.head = Folded(WIDTH, VOCABULARY, bias=False)
    model.head.weight = weight
    fully_shard(model)
    plain(model, torch.tensor([[1, 2]]))


def check_all() -> None:
    check(None)
    check(MIXED)
    check_product()
    check_paths()
    float16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    assert all(gradient is not None for gradient in gradients(twice, "uses", float16))  # which torch cannot add sparse


def test_gradients_are_those_of_autograds_sum() -> None:
    run_ranks(check_all, 2)


# -- memory that is lent ----------------------------------------------------------------------------------------------


def check_lent() -> None:
    layer = nn.Linear(2, 2)
    fully_shard(layer, mp_policy=MIXED)
    [bucket] = units_of(layer)[0].buckets
    weight, bias = bucket.originals.parameters
    assert bucket.gradient is not None
    unsharded, ones = bucket.gradient.unsharded, torch.ones(2, dtype=torch.bfloat16)

    def lent(value: float) -> torch.Tensor:
        piece = unsharded.lend(0)
        assert piece is not None and unsharded.lend(0) is None
        assert unsharded.takes_uses(0), "nothing is there yet that it would be added to"
        return piece.fill_(value).view(2, 2)

    def collect(index: int, gradient: torch.Tensor) -> bool:
        original = (weight, bias)[index]
        original.grad = gradient
        return unsharded.collect(index, original)

    def handed_over() -> list[list[float]]:
        full, layout = unsharded.hand_over(), bucket.layout
        places = zip(layout.offsets, layout.specs, strict=True)
        return [full[offset : offset + spec.numel].tolist() for offset, spec in places]

    for is_kept in (False, True):  # until another backward, or not
        lent(7)
        assert unsharded.take(1, ones)
        if is_kept:
            unsharded.end_backward()
        assert handed_over() == [[0, 0, 0, 0], [1, 1]], "what was made there was not collected"
        unsharded.end_backward()

    gradient = lent(3)
    assert not collect(1, ones) and not collect(1, ones)  # the second is added, for which the memory becomes wider
    assert collect(0, gradient) and collect(0, torch.ones_like(gradient))
    assert handed_over() == [[4, 4, 4, 4], [2, 2]]


def test_what_is_lent_counts_once_it_is_collected() -> None:
    run_ranks(check_lent, 2)


# -- three uses and more ----------------------------------------------------------------------------------------------


class Many(nn.Module):
    """A weight with six uses, over several units, and an embedding that is called three times.

    Owners are defined in another order than they are called in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"head": nn.Linear(WIDTH, VOCABULARY, bias=False), "mix": nn.Linear(WIDTH, WIDTH)})
            for _ in range(2)
        )
        self.first, self.second = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        for block in self.blocks:
            block["head"].weight = self.last.weight  # type: ignore[index]
        self.first.weight = self.second.weight = self.last.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[-1])
        hidden: torch.Tensor = self.first(tokens) + self.positions(places)
        loss = hidden.new_zeros(())
        for block in self.blocks:
            hidden = torch.tanh(block["mix"](hidden)) + self.positions(places % 3)  # type: ignore[index]
            loss = loss + block["head"](hidden).square().mean()  # type: ignore[index]
            hidden = hidden + self.second(tokens.flip(1))
        total: torch.Tensor = loss + self.last(hidden).square().mean()
        return total


def many(switch: str, accumulates: bool) -> list[torch.Tensor | None]:
    os.environ[GRADIENTS.name] = switch
    torch.manual_seed(4)
    model = Many()
    for block in model.blocks:
        fully_shard(block["mix"])  # type: ignore[index]
    fully_shard(model)
    tokens = torch.randint(VOCABULARY, (2, 4, 11), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = [model(part) for part in tokens]
    if accumulates:  # backwards of two graphs, the later one first, and so the one whose first use is not the first
        losses[1].backward()
        losses[0].backward()
    else:
        (losses[0] + losses[1]).backward()
    return [None if parameter.grad is None else own_part(parameter.grad) for parameter in model.parameters()]


def check_many() -> None:
    for accumulates in (False, True):
        for mine, theirs in zip(many("uses", accumulates), many("whole", accumulates), strict=True):
            assert mine is not None and theirs is not None and torch.equal(mine, theirs), accumulates


def test_the_sum_over_many_uses_is_autograds() -> None:
    run_ranks(check_many, 2)


# -- large layers ---------------------------------------------------------------------------------------------------

WIDE = 512
"""A square matrix of it is 1 MiB, from which on products are made in the reduce input."""


class Wide(nn.Module):
    """Large layers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDE)
        self.plain = nn.Linear(WIDE, WIDE, bias=False)
        self.biased = nn.Linear(WIDE, 2 * WIDE)
        self.back = Conv1D(WIDE, 2 * WIDE)
        self.last = nn.Linear(WIDE, 4)
        self.names: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        self.names = []
        for layer in (self.plain, self.biased, self.back):
            x = layer(x)
            self.names.append(type(x.grad_fn).__name__)
            x = torch.nn.functional.gelu(x)
        return self.last(x)  # type: ignore[no-any-return]


WideStep = Callable[[Wide, torch.Tensor], None]


def wide_plain(model: Wide, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def wide_rows(model: Wide, x: torch.Tensor) -> None:
    """Inputs of two dimensions, which no view makes so."""
    model(x.flatten(0, 1)).square().mean().backward()


def wide_twice(model: Wide, x: torch.Tensor) -> None:
    """One of the layers is used twice, so that autograd adds up what its uses give."""
    hidden = torch.tanh(model.plain(torch.tanh(model.plain(torch.tanh(model.first(x))))))
    model.last(hidden).square().mean().backward()


def wide_micro_batches(model: Wide, x: torch.Tensor) -> None:
    for part in x.split(2):
        model(part).square().mean().backward()


def wide_unreduced(model: Wide, x: torch.Tensor) -> None:
    with no_sync(model):
        model(x[:2]).square().mean().backward()
    model(x[2:]).square().mean().backward()


def wide_checkpointed(model: Wide, x: torch.Tensor) -> None:
    hidden = torch.tanh(model.first(x))

    def middle(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model.back(torch.tanh(model.biased(model.plain(hidden)))))

    for reentrant in (False, True):
        hidden = checkpoint(middle, hidden, use_reentrant=reentrant)
    model.last(hidden).square().mean().backward()


def wide_in_a_backward_inside(model: Wide, x: torch.Tensor) -> None:
    """Two uses in one graph and one in a backward inside its backward, which ends between theirs."""
    hidden = model.plain(torch.tanh(model.first(x)))
    hidden = checkpoint(lambda h: torch.tanh(model.plain(h)), hidden, use_reentrant=True)
    model.last(torch.tanh(model.plain(hidden))).square().mean().backward()


def wide_with_output_hooks(model: Wide, x: torch.Tensor) -> None:
    """On a layer's output, from a hook of its own and from outside; and a change of it in place."""
    seen: list[torch.Tensor] = []
    hidden = model.biased(model.plain(torch.tanh(model.first(x))))
    hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
    hidden.retain_grad()
    out = model.back(torch.tanh(hidden))
    out *= 2
    model.last(torch.relu_(out)).square().mean().backward()
    assert len(seen) == 1 and torch.equal(seen[0], hidden.grad)


class Nothing(torch.autograd.Function):
    """Gives no gradient back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> None:
        return None


def wide_without_a_gradient(model: Wide, x: torch.Tensor) -> None:
    """A layer that gets none has none, rather than zeros."""
    hidden = model.plain(torch.tanh(model.first(x)))
    cut: torch.Tensor = Nothing.apply(model.back(model.biased(hidden)))
    model.last(torch.tanh(cut + hidden)).square().mean().backward()


def wide_of_another_layout(model: Wide, x: torch.Tensor) -> None:
    hidden = torch.tanh(model.first(x.flatten(0, 1))).t().contiguous().t()
    model.last(torch.tanh(model.plain(hidden))).square().mean().backward()


def wide_under_autocast(model: Wide, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()


def wide_with_hooks(model: Wide, x: torch.Tensor) -> None:
    """Of the user's: on a layer's output and on its gradients."""
    seen: list[torch.Tensor] = []
    model.biased.register_forward_hook(lambda _module, _args, output: output * 2)
    model.back.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].clone()))
    model(x).square().mean().backward()
    assert seen


def wide_after_failure(model: Wide, x: torch.Tensor) -> None:
    """A backward that has failed half way leaves nothing that the next one would take for its own."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("in backward")

    hidden = model.first(x)
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        model.last(torch.tanh(model.plain(torch.tanh(hidden)))).square().mean().backward()
    model.zero_grad()
    model(x).square().mean().backward()


def wide_for_its_caller(model: Wide, x: torch.Tensor) -> None:
    """`torch.autograd.grad` gives its caller a weight's gradient, which is not in the reduce input."""
    loss = model(x).square().mean()
    original = next(leaf for leaf in _leaves(loss.grad_fn) if leaf.shape == (2 * WIDE, WIDE))
    [gradient] = torch.autograd.grad(loss, [original], retain_graph=True)
    before = gradient.clone()
    loss.backward()
    assert torch.equal(gradient, before)


def wide_second_derivatives(model: Wide, x: torch.Tensor) -> None:
    """A penalty on gradients, which have a graph themselves. On one rank only."""
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    [slope] = torch.autograd.grad(loss, [x], create_graph=True)
    (loss + slope.square().sum()).backward()


WIDE_STEPS: list[WideStep] = [
    wide_plain, wide_rows, wide_twice, wide_micro_batches, wide_unreduced, wide_checkpointed, wide_of_another_layout,
    wide_under_autocast, wide_with_hooks, wide_after_failure, wide_for_its_caller, wide_in_a_backward_inside,
    wide_with_output_hooks, wide_without_a_gradient,
]  # fmt: skip


def wide_gradients(
    step: WideStep, switch: str, policy: MixedPrecisionPolicy | None, *, layers_are_units: bool = False
) -> list[torch.Tensor | None]:
    os.environ[GRADIENTS.name] = switch
    torch.manual_seed(3)
    model = Wide()
    for layer in (model.plain, model.biased, model.back) if layers_are_units else ():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if policy is not None:  # some steps call a layer and not the model, which would cast its inputs
        for layer in (model.first, model.plain, model.biased, model.back):
            layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    for _ in range(2):  # the second time onto what the first has published
        step(model, torch.randn(4, 3, 8))
    names = {"_LinearBackward"} if switch == "uses" else {"ViewBackward0", "UnsafeViewBackward0"}
    if policy is None and step is wide_plain:
        assert set(model.names) == names
    return [None if parameter.grad is None else own_part(parameter.grad) for parameter in model.parameters()]


def check_wide(steps: list[WideStep]) -> None:
    for step in steps:
        for policy, are_units in [(None, False), (None, True), (MIXED, False), (HALF, False)]:
            if step is not wide_plain and (policy is HALF or (policy and step is wide_second_derivatives)):
                continue
            mine, theirs = (
                wide_gradients(step, switch, policy, layers_are_units=are_units) for switch in ("uses", "whole")
            )
            for a, b in zip(mine, theirs, strict=True):
                assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)), step.__name__


def check_wide_over(comm: str, steps: list[WideStep]) -> None:
    if comm == "gloo":
        os.environ["FULLSHARD_COMM"] = comm
    try:
        check_wide(steps)
    finally:
        os.environ.pop("FULLSHARD_COMM", None)


@pytest.mark.parametrize("comm", ["shared memory", pytest.param("gloo", marks=pytest.mark.full)])
def test_large_layers(comm: str) -> None:
    """The same bit for bit, whatever else happens to the layers."""
    run_ranks(check_wide_over, 2, comm, WIDE_STEPS)
    run_ranks(check_wide, 1, [wide_second_derivatives])


class Thrice(nn.Module):
    """An embedding that nothing is tied to, looked up three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(self.embed(part) * (i + 1)) for i, part in enumerate(tokens)]).square().sum()


def thrice(switch: str, policy: MixedPrecisionPolicy | None) -> list[torch.Tensor]:
    """The gradients of two steps."""
    os.environ[GRADIENTS.name] = switch
    torch.manual_seed(3)
    model = Thrice()
    fully_shard(model, mp_policy=policy)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(torch.randint(7, (3, 50))).backward()
        assert model.embed.weight.grad is not None
        found.append(own_part(model.embed.weight.grad))
    return found


def check_thrice(comm: str) -> None:
    os.environ["FULLSHARD_COMM"] = comm
    for policy in (None, MIXED):
        # Where another dtype collects, the first step that finds a second lookup has its rows added up: see `check`.
        first = 1 if comm == "gloo" and policy is not None else 0
        for mine, theirs in zip(thrice("uses", policy)[first:], thrice("whole", policy)[first:], strict=True):
            assert torch.equal(mine, theirs), policy


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_lookups_are_added_up_in_autograds_order(comm: str) -> None:
    run_ranks(check_thrice, 2, comm)


class Large(Wide):
    """The same with a layer that is most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.biased, self.back = nn.Linear(WIDE, 32 * WIDE), Conv1D(WIDE, 32 * WIDE)


def large_peak(switch: str, policy: MixedPrecisionPolicy | None) -> int:
    """Most that a second step takes over what is there before it, in tenths of one of the large weights."""
    os.environ[GRADIENTS.name] = switch
    model = Large()
    fully_shard(model, mp_policy=policy)
    for _ in range(2):
        model.zero_grad()
        with PeakGrowth() as growth:
            model(torch.randn(1, 8)).square().mean().backward()
    return growth.nbytes * 10 // (32 * WIDE * WIDE * 4)


def test_no_product_is_copied() -> None:
    """What autograd makes beside the reduce input, a weight of 32 MiB or half of that, is not there."""
    end_workers()  # what others took before counts as free memory; from here on it is the same in every run
    for policy, tenths in ((None, 8), (MIXED, 4)):
        whole, uses = (run_ranks(large_peak, 2, switch, policy)[0] for switch in ("whole", "uses"))
        print(f"tenths of the weight: {whole} with autograd's products, {uses} with those in the reduce input")
        assert whole >= uses + tenths


def head_in_parts(model: Tied, tokens: torch.Tensor) -> None:
    """Parts of a loss that are each a backward inside one, after the head's gradient and before the embedding's."""
    hidden = model(tokens, with_head=False)

    def loss(part: torch.Tensor) -> torch.Tensor:
        return model.head(part).float().square().mean()  # type: ignore[no-any-return]

    parts = sum(checkpoint(loss, part, use_reentrant=True) for part in hidden.repeat(32, 1, 1).split(1))
    (parts + model.head(hidden).float().square().mean()).backward()


def mixed_gradients(comm: str) -> list[list[float]]:
    """Of steps that add to what they have collected within one backward."""
    os.environ["FULLSHARD_COMM"] = comm
    found = [g.tolist() for g in gradients(unreduced, "uses", MIXED) if g is not None]
    for wide in (wide_twice, wide_checkpointed, wide_in_a_backward_inside, wide_unreduced):
        found += [g.tolist() for g in wide_gradients(wide, "uses", MIXED) if g is not None]
    return found


def test_sums_are_those_of_collecting_in_the_wider_dtype() -> None:
    """Gloo's reductions do not cast, so that there everything is collected in float32."""
    shared, gloo = (run_ranks(mixed_gradients, 2, comm) for comm in ("auto", "gloo"))
    assert shared == gloo


def parts_gradients(comm: str) -> torch.Tensor:
    os.environ["FULLSHARD_COMM"] = comm
    return torch.cat([g.flatten() for g in gradients(head_in_parts, "uses", MIXED) if g is not None])


def test_a_sum_is_continued_by_its_own_backward_only() -> None:
    """What other backwards add is added in float32: 128 parts in bfloat16 would be one part in a hundred off."""
    for shared, gloo in zip(*(run_ranks(parts_gradients, 2, comm) for comm in ("auto", "gloo")), strict=True):
        apart = ((shared - gloo).abs().max() / gloo.abs().max()).item()
        print(apart)
        assert apart <= 2**-8


class Uneven(nn.Module):
    """Uses one layer or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor, *, takes_first: bool) -> torch.Tensor:
        return self.first(x) if takes_first else self.second(x)  # type: ignore[no-any-return]


def uneven_gradients(comm: str) -> list[list[float] | None]:
    """Of ranks of which only one adds to what it has collected in half precision, another one in each of two steps."""
    os.environ["FULLSHARD_COMM"] = comm
    torch.manual_seed(3)
    model, rank = Uneven(), dist.get_rank()
    fully_shard(model, mp_policy=MIXED)
    found = []
    for adding in range(2):
        for last in (False, True):
            model.set_is_last_backward(last)  # type: ignore[operator]
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * adding + 2 * rank + last))
            with contextlib.nullcontext() if last else no_sync(model):
                model(x, takes_first=not last or rank == adding).float().square().mean().backward()
        found += [None if p.grad is None else own_part(p.grad).tolist() for p in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_collect_in_different_dtypes(size: int) -> None:
    """Reductions read what each rank has, in the dtype it has it in."""
    shared, gloo = (run_ranks(uneven_gradients, size, comm) for comm in ("auto", "gloo"))
    assert shared == gloo
    assert any(values for found in shared for values in found)


def check_compiled() -> None:
    """No hook of a large layer breaks the graph of what is compiled."""
    os.environ[GRADIENTS.name] = "uses"
    inner = Wide()
    model = nn.Sequential(inner, nn.Tanh())
    fully_shard(inner)
    fully_shard(model)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def middle(x: torch.Tensor) -> torch.Tensor:
        return inner.back(torch.tanh(inner.biased(inner.plain(x))))  # type: ignore[no-any-return]

    setattr(inner, "forward", torch.compile(middle, backend=backend, fullgraph=True))  # noqa: B010 -- mypy
    for _ in range(2):
        model(torch.randn(2, 3, WIDE)).sum().backward()
    assert len(graphs) == 1
    assert inner.plain._forward_hooks


def test_compiled_large_layers() -> None:
    run_ranks(check_compiled, 1)


def peak(switch: str) -> int:
    """Most that a second step takes over what is there before it, in weights of the model's size."""
    os.environ[GRADIENTS.name] = switch
    model = Tied(40_000, 256)
    fully_shard(model)
    weight = 40_000 * 256 * 4
    tokens = torch.arange(4)[None]
    for _ in range(2):
        model.zero_grad()
        with PeakGrowth() as growth:
            model(tokens).square().mean().backward()
    return growth.nbytes * 10 // weight


@pytest.mark.full
def test_peak_of_a_tied_weight() -> None:
    """The weight is mapped, and nothing beside it; the head's product, the embedding's and their sum are autograd's."""
    whole, uses = run_ranks(peak, 2, "whole")[0], run_ranks(peak, 2, "uses")[0]
    print(f"tenths of the weight: {whole} with autograd's sum, {uses} use by use")
    assert uses <= 12 and whole >= uses + 22
