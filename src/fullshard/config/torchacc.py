"""TorchAcc's `Config`: every field by its dotted name, and what becomes of it here.

A row without a target is used by `fullshard.integrations.torchacc` itself: the loader's fields, and the choice of what
is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fullshard.config.dialect import Dialect, Key, Problem, Reading, Settings, Status, refuse, shown
from fullshard.config.origin import Entry

_PIPELINE = "pipeline parallelism is not supported, so there is nothing to steer"
_ONE = (None, 1)


def _mode(mode: str) -> Callable[[Any], Settings]:
    return lambda value: {"precision.mode": mode} if value else {}


def _shard_size(size: Any) -> Settings:
    # One row for every size: the mesh is (world size / size) x size, so 1 replicates and the world size only shards.
    return {"sharding.strategy": "HYBRID_SHARD", "sharding.shard_size": size}


def _elsewhere(value: Any) -> Settings:
    return {}


def _classes(value: Any) -> Settings:
    return {"sharding.wrap_classes": tuple(value)}


def _finish(reading: Reading) -> None:
    """Fields that mean nothing without another one, or contradict another one."""
    given = reading.entries
    rules = (
        ("memory.gc_cls", "memory.gc", "set config.memory.gc = True"),
        ("memory.gc_cnt", "memory.gc", "set config.memory.gc = True"),
        ("dataloader.num_buckets", "dataloader.max_length", "set max_length, or list the lengths in buckets"),
    )
    for name, needed, hint in rules:
        if name in given and needed not in given:
            message = f"{name} = {shown(given[name].value)} means nothing without {needed}"
            reading.problems.append(Problem((given[name].origin,), message, hint))
    buckets, longest = given.get("dataloader.buckets"), given.get("dataloader.max_length")
    if buckets and longest:
        message = "dataloader.buckets and dataloader.max_length both say how long batches are"
        reading.problems.append(Problem((buckets.origin, longest.origin), message, "keep one of the two"))
    padding = given.get("dataloader.pad_value_dict")
    if padding and not buckets and not longest:
        message = "dataloader.pad_value_dict means nothing without dataloader.buckets or dataloader.max_length"
        reading.problems.append(Problem((padding.origin,), message, "set buckets to the lengths to pad to"))


TORCHACC = Dialect(
    "TorchAcc's Config",
    (
        Key("backend", Status.NO_EFFECT, because="there is one engine, for every device"),
        Key("compute.fp16", target="precision.mode", read=_mode("fp16")),
        Key("compute.bf16", target="precision.mode", read=_mode("bf16")),
        Key(
            "compute.acc_scaled_dot_attn",
            Status.NO_EFFECT,
            because="torch's own scaled_dot_product_attention is left in place; it takes the fastest kernel there is",
        ),
        Key("compute.disable_kernel_patches", Status.NO_EFFECT, because="no kernels are patched in any case"),
        Key("memory.gc", target="sharding.activation_checkpointing"),
        Key("memory.gc_cls", because="these modules are checkpointed instead of the units", read=_elsewhere),
        Key("memory.gc_cnt", because="only so many are checkpointed, the first ones", read=_elsewhere),
        Key(
            "dist.dp.size",
            because="the number of shard groups; another number than follows from the world size is an error",
            read=_elsewhere,
        ),
        Key("dist.tp.size", Status.REFUSED, because="tensor parallelism is not there", unset=_ONE),
        Key("dist.pp.size", Status.REFUSED, because="pipeline parallelism is not there", unset=_ONE),
        Key("dist.pp.num_micro_batches", Status.NO_EFFECT, because=_PIPELINE),
        Key("dist.pp.input_names", Status.NO_EFFECT, because=_PIPELINE),
        Key("dist.pp.split_points", Status.NO_EFFECT, because=_PIPELINE),
        Key("dist.pp.broadcast_loss", Status.NO_EFFECT, because=_PIPELINE),
        Key("dist.fsdp.size", target="sharding.shard_size", read=_shard_size),
        Key("dist.fsdp.wrap_layer_cls", target="sharding.wrap_classes", read=_classes),
        Key(
            "dist.fsdp.flatten_parameters",
            Status.NO_EFFECT,
            because="units are always one flat buffer, and parameters stay separate for the optimizer all the same",
        ),
        Key(
            "dist.fsdp.sync_module_states",
            Status.NO_EFFECT,
            because="every rank takes rank 0's weights in any case, so all start equal",
        ),
        Key("dist.fsdp.use_spmd", Status.NO_EFFECT, because="there is one engine, with one process per device"),
        Key(
            "dist.fsdp.shard_output_callable",
            Status.REFUSED,
            because="outputs belong to each rank alone, so there is no global tensor to annotate",
        ),
        Key("dist.sp.size", Status.REFUSED, because="sequence parallelism is not there", unset=_ONE),
        Key("dist.topology", because="dp comes before fsdp, if both are more than 1", read=_elsewhere),
        Key("dataloader.buckets", because="batches are padded to these lengths", read=_elsewhere),
        Key(
            "dataloader.max_length",
            because="instead of buckets: the longest, the others at equal distances below it",
            read=_elsewhere,
        ),
        Key("dataloader.num_buckets", because="how many buckets, with max_length; None is 8", read=_elsewhere),
        Key("dataloader.pad_value_dict", because="by key of a batch, what to pad with", read=_elsewhere),
    ),
    finish=_finish,
)


def check_sizes(given: Mapping[str, Entry], world_size: int) -> None:
    """Compare the sizes with the ranks there are.

    Args:
        given: the fields that were set, by dotted name; `dist.fsdp.size` among them.
        world_size: ranks of the job.

    Raises:
        ConfigError: sizes whose product is not the world size, or a topology that cannot be laid out.
    """
    shard = given["dist.fsdp.size"]
    replicas, order = given.get("dist.dp.size"), given.get("dist.topology")
    problems = []
    if world_size % shard.value:
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        message = f"dist.fsdp.size = {shard.value} does not divide the world size, {world_size}"
        hint = f"start {shard.value} processes (or a multiple of it), or use one of {divisors}"
        problems.append(Problem((shard.origin,), message, hint))
    elif replicas is not None and replicas.value is not None and replicas.value * shard.value != world_size:
        message = (
            f"dist.dp.size = {replicas.value} times dist.fsdp.size = {shard.value} is {replicas.value * shard.value}, "
            f"and the world size is {world_size}"
        )
        problems.append(Problem((replicas.origin, shard.origin), message, "leave dp.size out: it follows"))
    elif order is not None and 1 < shard.value < world_size and _is_inside(order.value, "dp", "fsdp"):
        message = f"dist.topology = {shown(order.value)} puts replicas next to each other; shard groups are neighbours"
        problems.append(Problem((order.origin,), message, "put 'dp' before 'fsdp'"))
    refuse(problems)


def _is_inside(order: list[str], inner: str, outer: str) -> bool:
    return order.index(inner) > order.index(outer)
