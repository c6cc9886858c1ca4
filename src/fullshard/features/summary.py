"""The one-line description of a sharded model, which is printed at startup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from fullshard.core.errors import plural
from fullshard.core.offload import Offload
from fullshard.core.sizes import format_count, format_nbytes
from fullshard.core.strategy import STRATEGIES
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import require_units
from fullshard.engine.unit import Unit


@dataclass(frozen=True, slots=True)
class Sharding:
    """A description of how a model is sharded, as seen by this rank. `str()` returns it as one line.

    Attributes:
        units, buckets: number of units and buckets.
        total_numel: number of elements in all parameters that belong to units.
        rank_numel: number of those elements on this rank.
        rank_nbytes: bytes of this rank's main weights, including padding.
        largest_unit: name of the unit that is largest when unsharded; empty for the root.
        largest_unit_nbytes: bytes of that unit when unsharded.
        padding: padding as a fraction of the size of all buckets.
        beneath: description of an earlier split along another axis; empty if there is none.
        world_size, shard_size, replicate_size: number of ranks in total, per shard group and per replicate group.
        strategy: name of the matching row in the strategy table; empty with one rank.
        kept: number of units that stay unsharded between forward and backward although the strategy frees them.
        offload: which parts of the training state are kept in host memory.
        host_nbytes: bytes of shards in host memory, excluding optimizer state and gradients.
        at_rest: forms in which weights are stored as codes, with the number of elements in each; empty if none are.
        packed: which values are rounded before they are sent, or why a request for this has no effect; empty if none.
    """

    units: int
    buckets: int
    total_numel: int
    rank_numel: int
    rank_nbytes: int
    largest_unit: str
    largest_unit_nbytes: int
    padding: float
    beneath: str
    world_size: int
    shard_size: int
    replicate_size: int
    strategy: str
    kept: int
    offload: Offload
    host_nbytes: int
    at_rest: str
    packed: str

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Self:
        """Return the description of a model with these units."""
        buckets = [bucket for unit in units for bucket in unit.buckets]
        mesh, schedule = units[0].mesh, units[0].schedule
        largest = max(units, key=lambda unit: unit.full_nbytes)
        full_numel = sum(bucket.layout.full_numel for bucket in buckets)
        numel = sum(bucket.layout.numel for bucket in buckets)
        # Skip the root, which keeps its parameters under every strategy.
        kept = sum(not unit.reshards_after_forward and unit.asked_to_reshard is not None for unit in units)
        frees = not kept or any(unit.reshards_after_forward for unit in units)
        sizes = mesh.replicate_size, mesh.shard_size
        done = {
            "reshards_after_forward": frees,
            "keeps_parameters": schedule.keeps_parameters,
            "keeps_gradients": schedule.keeps_gradients,
        }
        rows = (row.name for row in STRATEGIES.values() if row.matches(*sizes, **done))
        return cls(
            units=len(units),
            buckets=len(buckets),
            total_numel=sum(p.numel() for bucket in buckets for p in bucket.sharded_parameters),
            rank_numel=sum(p.interval.numel for bucket in buckets for p in bucket.sharded_parameters),
            rank_nbytes=sum(tensor.nbytes for bucket in buckets for tensor in bucket.stored),
            largest_unit=largest.name,
            largest_unit_nbytes=largest.full_nbytes,
            padding=1 - numel / full_numel if full_numel else 0.0,
            beneath=next((p.spec.note for b in buckets for p in b.sharded_parameters if p.spec.note), ""),
            world_size=mesh.world_size,
            shard_size=mesh.shard_size,
            replicate_size=mesh.replicate_size,
            strategy=next(rows, ""),
            kept=kept if frees else 0,
            offload=next((unit.storage.offload for unit in units if unit.storage.offload), Offload()),
            host_nbytes=sum(map(_host_nbytes, buckets)),
            at_rest=_at_rest(buckets),
            packed=_packed(units),
        )

    def __str__(self) -> str:
        share = self.rank_numel / self.total_numel if self.total_numel else 0.0
        packed = "".join(f"; {told}" for told in (self.at_rest, self.packed) if told)
        if self.offload:
            shards = f", {format_nbytes(self.host_nbytes)} of shards" if self.offload.has_shards else ""
            packed += f"; {self.offload} on the host{shards}"
        return (
            f"{self._placement()}: {format_count(self.total_numel)} parameters in {plural(self.units, 'unit')}, "
            f"{plural(self.buckets, 'bucket')}; this rank owns {format_count(self.rank_numel)} ({share:.1%}), "
            f"{format_nbytes(self.rank_nbytes)}; largest unit {format_nbytes(self.largest_unit_nbytes)} unsharded "
            f"({self.largest_unit or 'the root'}); padding {self.padding:.3%}{packed}"
        )

    def _placement(self) -> str:
        if self.world_size == 1 and not self.beneath:
            return "whole on 1 rank"
        strategy = self.strategy + (f" keeping {self.kept} of {self.units} units" if self.kept else "")
        how = ("sharded over " if self.shard_size > 1 else "replicated on ") + plural(self.world_size, "rank")
        beneath = f", beneath it {self.beneath}" if self.beneath else ""
        return f"{how} ({strategy}, {self.replicate_size} x {self.shard_size}){beneath}"


def describe(model: nn.Module) -> Sharding:
    """Return how `model` is sharded. Print the result at startup to verify it.

    Raises:
        LifecycleError: The model is not sharded.
    """
    return Sharding.of(require_units(model))


def _host_nbytes(bucket: Bucket) -> int:
    tensors = {bucket.main} if bucket.plan.main_is_on_host else set()
    if bucket.plan.is_gathered_from_host:
        tensors.add(bucket.compute_shard)
    return sum(tensor.nbytes for tensor in tensors)


def _at_rest(buckets: Sequence[Bucket]) -> str:
    found: dict[str, int] = {}
    for bucket in buckets:
        if bucket.plan.form is not None:
            found[bucket.plan.form.name] = found.get(bucket.plan.form.name, 0) + bucket.layout.numel
    return ", ".join(f"{format_count(numel)} in {name} at rest" for name, numel in found.items())


def _packed(units: Sequence[Unit]) -> str:
    buckets = [bucket for unit in units for bucket in unit.buckets]
    reduced = [bucket for bucket in buckets if bucket.has_gradient]
    mesh, parts = units[0].mesh, []
    for what, how, packings, collectives in (
        ("weights", "gather as", [b.gather_packing for b in buckets], mesh.gather),
        ("gradients", "reduce as", [b.reduce_packing for b in reduced], mesh.reduce),
    ):
        asked = {dtype for unit in units if (dtype := unit.policy.dtypes_of().sent.get(how)) is not None}
        if not asked:
            continue
        wanted = f"{what} sent as {' and '.join(sorted(asked))}"
        packed = sum(packing is not None for packing in packings)
        if not collectives.sends:
            parts.append(f"no {wanted}: the ranks of a shard group share memory, or are one, and send none")
        elif packed < len(packings):
            parts.append(f"{wanted} in {packed} of {len(packings)} buckets, the others as they are")
        else:
            parts.append(wanted)
    return "; ".join(parts)
