"""Context, sequence and expert parallelism combined with sharding: each rank's part, and the messages in each group.

The ranks have the order (replicas, shards, cp, sp, tp), and parameters are sharded over shards x cp x sp. The cp x sp
ranks of a group share each sequence, so a layer, the logits and the loss have T = micro-batch x sequence / (cp x sp)
tokens per rank. With w for the widths of keys and values together, q for that of queries, and b for the bytes of an
element, a layer also sends and holds the following. All of it is per rank:

    cp, forward     an all-gather of keys and values, cp T w b. It is torch's ring with the rotation `allgather`, the
                    default of Accelerate's cp_comm_strategy. All but the first of cp blocks of attention wait for it
    cp, backward    the same all-gather. The gradients of a block of keys and values travel around the ring in float32,
                    in cp rounds of 4 T w bytes. All but the last of them pass while the next block is computed
    cp, memory      in backward: what was gathered and its input, the gradients of q, k and v as sums in float32, one
                    block's gradients, and one round that is sent and one that is received
    sp, forward     Ulysses' all-to-alls of q, k and v before attention, and of the output after it. Each rank then has
                    all tokens and 1/sp of the heads. If sp exceeds the key and value heads, these are repeated first
    sp, backward    the same for the gradients
    sp, memory      the output is saved in both forms; an all-to-all holds what it sends and what it receives
    ep              a rank holds 1/ep of the experts, sharded over the other ranks of the shard group, and reduced over
                    them. Each token is sent once per expert that it chose, T k H b in all, and comes back. Backward
                    sends the gradients of both. The busiest rank has `ep_imbalance` times this work, and all wait for
                    it: the router decides how much it is, so it is an assumption. With `experts` kernel, a token is
                    sent once to each other host and once to each other rank on a host (DeepEP). Of n equally likely
                    places, the k experts of a token are in n (1 - (1 - 1/n)^k)

Full checkpointing repeats what forward sends. Selective checkpointing keeps the output of a ring, so it only repeats
all-to-alls: in Ulysses, what it keeps has not been exchanged yet. With a causal mask and torch's load balancing (each
rank has a chunk from the beginning and one from the end), each block is the same amount of work, and the attention of a
sequence takes each rank 1/cp of its FLOP.

The sources are `_templated_ring_attention` and its backward in torch/distributed/tensor/experimental, Ulysses' paper
(arXiv 2309.14509, section 3.2), and `AllToAllEP` in transformers/distributed/expert_parallel.py. In the latter, the
host waits in each layer for the number of tokens that arrive.
"""

import dataclasses
from typing import Literal, NamedTuple

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError, plural
from fullshard.plan.attention import WRITTEN_OUT, what_runs
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block, ModelShape, ParameterShape, UnitShape
from fullshard.plan.traffic import carried, exchanged, passed_on

Axis = Literal["cp", "sp", "ep"]


class Message(NamedTuple):
    """The bytes that one rank receives in one kind of exchange of a layer, and the group it receives them from."""

    axis: Axis
    nbytes: float
    ranks: int
    stride: int  # the difference between the numbers of neighboring ranks of the group
    rounds: int = 1  # number of messages to the next rank of a ring, or 1 for another collective
    is_gather: bool = False  # whether all ranks receive the same bytes
    since: tuple[float, float] = (0.0, 0.0)  # fractions of attention's forward and backward after the exchange's start
    hidden: tuple[float, float] = (0.0, 0.0)  # fractions of those before anything waits for it
    least: float = 0.0  # the fraction of the exchange that nothing hides
    chosen: int = 0  # number of experts per token if a token is sent to each rank only once, and otherwise 0

    def links(self, ranks_per_host: int) -> tuple[float, float]:
        """Return the bytes on the busiest device's links inside its host and between hosts."""
        if self.rounds > 1:
            return passed_on(self.nbytes, self.ranks, stride=self.stride, ranks_per_host=ranks_per_host)
        if self.is_gather:
            whole = self.nbytes * self.ranks / (self.ranks - 1)
            return carried(whole, self.ranks, stride=self.stride, ranks_per_host=ranks_per_host)
        if self.chosen and (hosts := self.ranks * self.stride // ranks_per_host) > 1:
            each = self.nbytes / _others(self.ranks, self.chosen)
            return self.nbytes * (1 - hosts / self.ranks), each * _others(hosts, self.chosen)
        return exchanged(self.nbytes, self.ranks, stride=self.stride, ranks_per_host=ranks_per_host)


def messages_of(block: Block, job: Job) -> tuple[list[Message], list[Message]]:
    """Return what a layer exchanges for one micro-batch, in forward and in backward, which includes recomputation."""
    forward, repeated, backward = [], [], []
    width, tokens = itemsize(job.compute_dtype), job.tokens
    both, keys = _widths(block, job)
    if job.cp > 1:
        part, stride = 1 / job.cp, job.sp * job.tp
        nbytes: float = (job.cp - 1) * tokens * keys * width
        gather = Message("cp", nbytes, job.cp, stride, is_gather=True, since=(1.0, 0.0), hidden=(part, 0.0))
        forward.append(gather)
        repeated += [gather._replace(since=(1.0, 1.0))] * (job.checkpointing == "full")
        backward.append(gather._replace(since=(0.0, 1.0), hidden=(0.0, part)))
        nbytes, after = job.cp * tokens * keys * 4, (0.0, 1 - part)
        backward.append(Message("cp", nbytes, job.cp, stride, rounds=job.cp, since=after, hidden=after, least=part))
    if job.sp > 1:
        outputs = block.heads * (block.value_dim or block.head_dim)
        sizes = (both - outputs, keys / 2, keys / 2, outputs)
        each = [Message("sp", size * width * tokens * (1 - 1 / job.sp), job.sp, job.tp) for size in sizes]
        forward += each
        repeated += each * (job.checkpointing != "none")
        backward += each
    if job.ep > 1 and block.experts:
        chosen = block.experts_per_token if job.experts == "kernel" else 0
        times = _others(job.ep, chosen) if chosen else block.experts_per_token * (job.ep - 1) / job.ep
        nbytes = tokens * times * block.hidden * width * block.load
        there_and_back = [Message("ep", nbytes, job.ep, 1, chosen=chosen)] * 2
        forward += there_and_back
        repeated += there_and_back * (job.checkpointing != "none")
        backward += there_and_back
    return forward, [*repeated, *backward]


def _others(places: int, chosen: int) -> float:
    """Return in how many of the other places a token's experts are on average, if all places are equally likely."""
    return (places - 1) * (1 - (1 - 1 / places) ** chosen)


def sent_nbytes(model: ModelShape, job: Job) -> dict[str, int]:
    """Return the bytes that a rank sends in a step in its cp, sp and ep groups, by the names in `Traffic`."""
    total = dict.fromkeys(("cp_nbytes", "sp_nbytes", "ep_nbytes"), 0.0)
    for block in model.blocks:
        for message in (message for way in messages_of(block, job) for message in way):
            total[f"{message.axis}_nbytes"] += message.nbytes
    return {name: round(nbytes * job.accumulation) for name, nbytes in total.items()}


def saved_twice(block: Block, job: Job, *, is_repeated: bool) -> int:
    """Return the elements per token that exchanging heads adds to a layer: its output, and copied keys and values."""
    if job.sp == 1:
        return 0
    sizes = block.head_dim + (block.value_dim or block.head_dim)
    copies = 0 if is_repeated else _widths(block, job)[1] - block.kv_heads * sizes
    return block.heads * (block.value_dim or block.head_dim) + copies


def exchanging_nbytes(block: Block, job: Job) -> int:
    """Return the bytes per token of the temporaries for exchanging heads, keys and values in backward."""
    width = itemsize(job.compute_dtype)
    both, keys = _widths(block, job)
    sent = block.heads * block.head_dim + keys
    ring = (job.cp + 1) * keys * width + (4 + width) * sent + 2 * 4 * keys if job.cp > 1 else 0
    return ring + (2 * width * (both - block.heads * block.head_dim + sent) if job.sp > 1 else 0)


def moved_nbytes(block: Block, job: Job) -> tuple[int, int]:
    """Return the bytes per token that a layer reads and writes to arrange messages, in forward and in backward.

    Sent data is copied in the order of the ranks, and received data in the order of the heads or tokens. A ring merges
    the output of each further block in float32 (a cast, two differences and a product, 32 + 3 b bytes per element), and
    adds the gradients of each block to the sums.
    """
    width, (both, keys) = itemsize(job.compute_dtype), _widths(block, job)
    heads = 4 * width * (both + keys) if job.sp > 1 else 0
    is_copied = job.ep > 1 and job.experts != "kernel"  # DeepEP copies while it sends
    copies = heads + (4 * width * block.experts_per_token * block.hidden if is_copied else 0)
    if job.cp == 1:
        return copies, copies
    outputs = block.heads * (block.value_dim or block.head_dim)
    merged, added = (job.cp - 1) * (32 + 3 * width) * outputs, job.cp * (8 + width) * (both - outputs + keys)
    return copies + merged, copies + added + job.cp * 8 * keys


def _widths(block: Block, job: Job) -> tuple[int, int]:
    """Return the widths per token of queries and output, and of keys and values with the copies of Ulysses."""
    sizes = block.head_dim + (block.value_dim or block.head_dim)
    return block.heads * sizes, max(block.kv_heads, job.sp) * sizes


def dealt(model: ModelShape, job: Job) -> ModelShape:
    """Return the part of the model that one rank of an expert-parallel group holds: 1/ep of each layer's experts.

    Raises:
        ConfigError: the model has no experts, or they cannot be divided evenly.
    """
    experts = {block.experts for block in model.blocks if block.experts}
    if job.experts != "grouped" and not experts:
        raise ConfigError(
            f"experts {job.experts} says how experts compute, but {model.name} has none",
            hint="remove experts, or plan a mixture-of-experts model",
        )
    if job.ep == 1:
        return model
    if not experts:
        raise ConfigError(
            f"ep {job.ep} divides the experts of a model, but {model.name} has none",
            hint="remove ep, or plan a mixture-of-experts model",
        )
    if uneven := [number for number in experts if number % job.ep]:
        raise ConfigError(
            f"ep {job.ep}: the {uneven[0]} experts of {model.name} cannot be divided evenly among {job.ep} ranks",
            hint="choose an ep that divides them",
        )

    def deal(unit: UnitShape, parameter: ParameterShape) -> list[ParameterShape]:
        if unit.block is None or not unit.block.experts or ".experts." not in parameter.name:
            return [parameter]
        dim = 1 if ".lora_B." in parameter.name else 0  # whose columns are the ranks of all experts' adapters
        shape = tuple(size // job.ep if d == dim else size for d, size in enumerate(parameter.shape))
        return [dataclasses.replace(parameter, shape=shape, tiles=job.ep, of_experts=True)]

    units = []
    for unit in model.map(deal).units:
        block = unit.block
        if block is not None and block.experts:
            adapters = block.adapters and dataclasses.replace(block.adapters, folded=block.adapters.folded // job.ep)
            block = dataclasses.replace(block, load=job.load, adapters=adapters)
        units.append(dataclasses.replace(unit, block=block))
    return dataclasses.replace(model, units=tuple(units))


def check_groups(model: ModelShape, job: Job, cluster: Cluster, *, groups: int, shard_size: int) -> None:
    """Raise `ConfigError` if the model, or its `groups` of `shard_size` ranks, cannot be divided as the job says."""
    axes, needed = f"cp {job.cp} x sp {job.sp}", job.shared_by
    if groups % needed:
        ranks = plural(cluster.count, "rank") + (f" in tensor-parallel groups of {job.tp}" if job.tp > 1 else "")
        raise ConfigError(
            f"{axes} = {needed} ranks share each sequence, which does not divide the {ranks}",
            hint="choose cp and sp whose product divides the ranks",
        )
    for axis, size in ((axes, needed), (f"ep {job.ep}", job.ep)):
        if shard_size % size:
            raise ConfigError(
                f"{axis} requires a shard group of a multiple of {size} ranks, but {job.strategy} has {shard_size}",
                hint="use FULL_SHARD, or another shard_size",
            )
    if needed > 1:
        _check_attention(model, job, cluster, axes)


def _check_attention(model: ModelShape, job: Job, cluster: Cluster, axes: str) -> None:
    """Raise `ConfigError` if the layers of a model cannot divide a sequence."""
    blocks = set(model.blocks)
    if not blocks or model.encoder_decoder:
        why = "has an encoder" if blocks else "has layers whose computation is unknown"
        raise ConfigError(
            f"{axes}: {model.name} {why}, so the planner cannot divide its sequences", hint="remove cp and sp"
        )
    if any(".linear_attn." in parameter.name for parameter in model.parameters):
        raise ConfigError(
            f"{axes}: layers of {model.name} carry a state through the sequence, which cannot be divided among ranks",
            hint="remove cp and sp",
        )
    windows = sorted({block.window for block in blocks if block.window})
    if job.cp > 1 and windows:
        raise ConfigError(
            f"cp {job.cp}: ring attention has no sliding window, but layers of {model.name} have one of {windows[0]}",
            hint="use sp instead, or a model without windows",
        )
    if job.cp > 1 and any(what_runs(block, job, cluster.device) in WRITTEN_OUT for block in blocks):
        raise ConfigError(
            f"cp {job.cp}: ring attention requires a fused kernel, which a {cluster.device.name} does not have in "
            f"{job.compute_dtype}",
            hint="use precision bf16 or fp16",
        )
    for block in blocks:
        if block.heads % job.sp or (block.kv_heads % job.sp and job.sp % block.kv_heads):
            raise ConfigError(
                f"sp {job.sp}: {model.name} has {block.heads} query heads and {block.kv_heads} key and value heads "
                "per rank, expected an sp that divides both, or divides the first and is a multiple of the second",
                hint="choose another sp, or use cp",
            )
