"""Tensor parallelism combined with sharding: each rank's part of a layer, and the messages in a tensor-parallel group.

Layers are split as Transformers splits Llama and related models (`base_model_tp_plan`). The weights of projections into
attention and into the feed-forward part are split by rows, and those of projections out of them by columns. The same
applies to experts. The head is split by vocabulary entries. Norms, the embedding, and the biases of weights that are
split by columns are not split. Between these parts, each rank has the complete activations. Within them, it computes
with its own heads and its share of the feed-forward width.

    forward of a layer    2 all-reduces of (tokens, hidden), after attention and after the feed-forward part
    backward              2 all-reduces of the gradients of the parts' inputs; recomputation repeats those of forward
    head                  an all-gather of logits (tokens, vocabulary); in backward, an all-reduce for the head's input

PEFT splits the second factor of an adapter whose layer is split by rows, and the first factor if it is by columns. The
other factor is not split. The products of split first factors are summed in forward, (tokens, rank) each, and the
gradients of the inputs of split second factors in backward.
"""

import dataclasses

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block, ModelShape, ParameterShape, UnitShape

_CUT = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0) | {"o_proj": 1, "down_proj": 1}
_OF_EXPERTS = {"gate_up_proj": 1, "down_proj": 2}
"""The dim along which stacked weights are split. Their first dim is the expert."""

_RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}


def tiled(model: ModelShape, parts: int) -> ModelShape:
    """Return the part of the model that one rank of a tensor-parallel group with `parts` ranks holds.

    Raises:
        ConfigError: Transformers does not split the layers in this way, or they cannot be split evenly.
    """
    if parts == 1:
        return model
    if model.tied or not all(_is_cut(unit) for unit in model.units if unit.block is not None):
        why = "its head is its embedding" if model.tied else "its layers are not Llama's"
        raise ConfigError(
            f"the planner does not support tensor parallelism for {model.name}, because {why}", hint="remove tp"
        )
    if stacks := [p.name for p in model.parameters if p.folded_rank and _dim(p) is not None]:
        raise ConfigError(
            f"tensor parallelism splits {stacks[0]}, but its adapter cannot be split",
            hint="set lora_targets to layers that are not experts, or remove tp",
        )
    cut = model.map(lambda unit, p: [_tile(p, parts)])
    units = [
        dataclasses.replace(unit, block=unit.block and _tile_of_block(model.name, unit.block, parts))
        for unit in cut.units
    ]
    dropout = any(block.adapters is not None and block.adapters.dropout for block in model.blocks)
    return dataclasses.replace(cut, units=tuple(units)).with_adapters(dropout=dropout)


def _is_cut(unit: UnitShape) -> bool:
    """Return whether every matrix of a layer except the gates of experts is split by Llama's rules."""
    whole = [p.name for p in unit.parameters if p.role == "matrix" and _dim(p) is None]
    return any(_dim(p) is not None for p in unit.parameters) and all(
        name.endswith((".gate.weight", "_gate.weight")) for name in whole
    )


def _dim(parameter: ParameterShape) -> int | None:
    """Return the dim along which a parameter is split, or None if every rank has the complete parameter."""
    layer, _, factor = parameter.name.partition(".lora_")
    if factor:
        dim = _CUT.get(layer.rpartition(".")[2])
        return dim if dim == (factor[0] == "A") else None
    *path, module, last = ["", *parameter.name.split(".")]
    if path and module == "experts":
        return _OF_EXPERTS.get(last)
    dim = 0 if parameter.role == "head" else _CUT.get(module)
    return None if dim == 1 and last != "weight" else dim


def _tile(parameter: ParameterShape, parts: int) -> ParameterShape:
    if (dim := _dim(parameter)) is None:
        return parameter
    shape = tuple(-(-size // parts) if d == dim else size for d, size in enumerate(parameter.shape))
    return dataclasses.replace(parameter, shape=shape, tiles=parts)


def _tile_of_block(name: str, block: Block, parts: int) -> Block:
    widths = {n: getattr(block, n) for n in ("heads", "kv_heads", "intermediate", "shared_intermediate")}
    if uneven := [f"{width} {what}" for what, width in widths.items() if width % parts]:
        raise ConfigError(
            f"tensor parallelism of {name}: {uneven[0]} cannot be divided evenly among {parts} ranks",
            hint="choose a tp that divides this number",
        )
    return dataclasses.replace(block, **{what: width // parts for what, width in widths.items()})


def groups_of(cluster: Cluster, parts: int) -> tuple[int, int]:
    """Divide a cluster into tensor-parallel groups: return (number of groups, number of groups per host).

    Parameters are then sharded over the groups.

    Raises:
        ConfigError: the devices or the hosts cannot be divided into such groups.
    """
    if cluster.count % parts or (cluster.per_host % parts and parts % cluster.per_host):
        raise ConfigError(
            f"{cluster} cannot be divided into tensor-parallel groups of {parts}",
            hint="use a divisor of the number of devices",
        )
    return cluster.count // parts, max(1, cluster.per_host // parts)


def messages_of_layer(block: Block, job: Job) -> tuple[list[int], list[int]]:
    """Return the bytes of a layer's all-reduces in forward and backward: of both parts together, then of adapters."""
    width = job.tokens * itemsize(job.compute_dtype)
    nbytes, summed = 2 * width * block.hidden, block.adapters.summed if block.adapters else ((), ())
    forward, backward = ([width * rank for rank in ranks] for ranks in summed)
    again = forward * (job.checkpointing != "none")
    return [nbytes, *forward], [round(nbytes * (1 + _RECOMPUTED[job.checkpointing])), *again, *backward]


def messages_of_head(model: ModelShape, job: Job) -> tuple[int, int]:
    """Return the bytes of the head's messages: the gathered logits, and the reduced gradient of the head's input."""
    width = job.tokens * itemsize(job.compute_dtype)
    return width * model.vocab, width * 2 * model.hidden


def sent_nbytes(model: ModelShape, job: Job) -> int:
    """Return the bytes that a rank sends within its tensor-parallel group in a step."""
    layers = sum(2 * sum(map(sum, messages_of_layer(block, job))) for block in model.blocks)
    return (layers + sum(messages_of_head(model, job))) * (job.tp - 1) // job.tp * job.accumulation
