"""The device mesh: which ranks share a shard, which hold copies, and the process groups between them.

Ranks are laid out with the shard axis inside, so a shard group is a run of neighbouring ranks (usually one host):

                shard axis ->
    replicate    0   1   2   3
    axis  |      4   5   6   7
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import torch_private
from fullshard.comm.base import MAX_TAGS, Collectives
from fullshard.comm.device import current, require_gloo
from fullshard.comm.join import join_process_group
from fullshard.comm.select import collectives_for
from fullshard.comm.stalls import STALLS, meet
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.core.place import PLACE
from fullshard.core.strategy import replicas

_HINT = "build the same model from the same configuration, and load the same weights, on every rank"


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """A rank's place among all ranks. Get one from `init_mesh`, which caches them.

    Attributes:
        device: where this rank computes.
        rank: as the job numbers it, which is how errors name it.
        ranks, world_size: all ranks of the mesh in the order of its groups, numbered so, too; and how many they are.
        shard_rank, shard_size: the same along the shard axis.
        replicate_rank, replicate_size: the same along the replicate axis.
        world_group, shard_group, replicate_group: process groups; None where the axis has one rank.
        control_group: a group for small host-side messages; None with one rank.
        gather, reduce, replicate: collectives for unsharding, for gradients along the shard axis, and for gradients
            along the replicate axis, each on a communicator of its own so that none waits for another.
        device_mesh: torch's name for it: (shard,) or (replicate, shard).
        thread: that made it; ranks may be threads of one process.
    """

    device: torch.device
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    world_size: int = 1
    shard_rank: int = 0
    shard_size: int = 1
    replicate_rank: int = 0
    replicate_size: int = 1
    world_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    gather: Collectives = field(kw_only=True)
    reduce: Collectives = field(kw_only=True)
    replicate: Collectives = field(kw_only=True)
    device_mesh: DeviceMesh = field(kw_only=True)
    thread: int = field(default_factory=get_ident)
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)
    _neighbours: dict[int, Collectives] = field(default_factory=dict)
    _next_tag: list[int] = field(default_factory=lambda: [0])
    _shardings: list[int] = field(default_factory=lambda: [0, 0])
    _agreed: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def is_first(self) -> bool:
        """Return whether this rank speaks for all ranks of the mesh."""
        return self.rank == self.ranks[0]

    def rank_at(self, shard_rank: int) -> int:
        """Return the rank of the job that has that place in this rank's shard group."""
        # A mesh may lay its ranks out in another order than theirs.
        return self.rank if self.shard_group is None else dist.get_global_rank(self.shard_group, shard_rank)

    def neighbours(self, size: int) -> Collectives:
        """Return gathers among runs of `size` ranks of the shard axis. A collective of the run the first time."""
        if size not in self._neighbours:
            assert self.shard_group is not None  # noqa: S101 -- a part of one rank has no neighbours
            first = self.shard_rank // size * size
            ranks = dist.get_process_group_ranks(self.shard_group)[first : first + size]
            group = _made_by(ranks, self.device)
            # Those of a replicate axis, which send messages: where ranks share memory none of this is needed.
            self._neighbours[size] = collectives_for(group, self.device, only_all_reduce=True)
        return self._neighbours[size]

    def take_tags(self, count: int) -> int:
        """Return the first of so many tags that no other model has now or had of late: there are as many as buckets.

        It is the same on every rank if all ranks take as many.
        """
        first = self._next_tag[0] if self._next_tag[0] + count <= MAX_TAGS else 0
        self._next_tag[0] = first + count
        return first

    def watch(self) -> None:
        """Have waits in its groups watched."""
        STALLS.watch(self._groups, self.device)

    @property
    def _groups(self) -> list[dist.ProcessGroup | None]:
        own = (getattr(collectives, "group", None) for collectives in (self.gather, self.reduce, self.replicate))
        return [self.control_group, self.shard_group, self.replicate_group, *own]

    def note_failure(self, what: str, error: BaseException | None) -> None:
        """Note that an error on this rank has ended what all ranks of the mesh do together: a backward, say."""
        if self.control_group is not None:
            STALLS.note_failure(self.control_group, what)
            if error is not None:
                STALLS.explain_failures(error)

    def forget_failures(self) -> None:
        """Forget earlier failures of some ranks: all ranks of the mesh are at the same place."""
        for group in self._groups:
            if group is not None:
                STALLS.forget_failures(group)

    @contextmanager
    def doing_alike(self, what: str) -> Iterator[None]:
        """Let all ranks of the mesh do the same, and wait for one another; a rank that fails tells the others."""
        try:
            with PLACE.waiting(what):
                yield
        except BaseException as error:
            self.note_failure(what, error)
            raise

    def begin_sharding(self) -> None:
        """Note that a model, or a part of it, is about to be sharded."""
        self._shardings[0] += 1

    def end_sharding(self) -> None:
        """Note that a model is sharded; a sharding that fails does not get here."""
        self._shardings[1] += 1

    def agree_on_shardings(self) -> None:
        """Note that all ranks of the mesh have the same model, whatever has failed before on some."""
        self._agreed[:] = self._shardings

    def compare_shardings(self) -> None:
        """Compare shardings before whole tensors are gathered, which would miss a tensor that a rank could not shard.

        A collective of the shard group. Else, if the ranks meet on accelerators, it names one that does not come.

        Raises:
            CommunicationError: A sharding failed on some rank and was done on others, or a rank does not come.
        """
        if self.shard_group is None:
            return
        if self._shardings == self._agreed:
            meet(self.shard_group, self.device, "gathering a whole tensor")
            return
        begun, done = self._shardings
        hint = "see why it failed there; after a sharding that some ranks failed in, make a new process group"
        done_here = [f"{done} of {begun} shardings done"]
        self.check_agreement(done_here, what="what is sharded", hint=hint, group=self.shard_group)
        self.agree_on_shardings()

    def joined(self, axis: DeviceMesh) -> DeviceMesh:
        """Return `device_mesh` with one more axis beside its own. Raises `RuntimeError` if it cannot."""
        if axis not in self._joined:
            self._joined[axis] = torch_private.joined([self.device_mesh, axis])
        return self._joined[axis]

    def all_gather_object(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return every rank's `value`, in the order of `ranks`. A collective over the mesh, or over a group of it.

        Raises:
            CommunicationError: A rank did not take part in time.
        """
        group = group or self.control_group
        if group is None:
            return [value]
        values: list[Any] = [None] * group.size()
        without = torch_private.without_transforms()  # those have no message's memory
        with (
            PLACE.waiting("comparing notes"),
            without,
            torch_private.uncounted(),
            STALLS.explaining("comparing notes with the other ranks"),
        ):
            dist.all_gather_object(values, value, group=group)
        return values

    def check_agreement(
        self, lines: Sequence[str], *, what: str, hint: str = _HINT, group: dist.ProcessGroup | None = None
    ) -> None:
        """Compare `lines` over all ranks, or those of a group, before a difference is a hang or a wrong number.

        By digest; a collective.

        Raises:
            CommunicationError: on every rank, naming the first rank that differs from the first one, rank 0 mostly, and
                the first line that does.
        """
        digests = self.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
        different = [place for place, other in enumerate(digests) if other != digests[0]]
        if not different:
            return
        everything = self.all_gather_object(list(lines), group)
        ranks = self.ranks if group is None else dist.get_process_group_ranks(group)
        one, other_one = ranks[0], ranks[different[0]]
        pairs = zip_longest(everything[0], everything[different[0]], fillvalue="(nothing)")
        first, other = next((a, b) for a, b in pairs if a != b)
        raise CommunicationError(
            f"ranks disagree about {what}: rank {one} has [{first}], rank {other_one} has [{other}] ({len(different)} "
            f"of {len(digests)} ranks differ from rank {one})",
            hint=hint,
        )


_MARGIN = timedelta(seconds=5)
_CACHE: dict[tuple[object, ...], Mesh] = {}


def joined_world_size() -> int:
    """Return the number of ranks. Initialises the default group as `init_mesh` does, and makes no other."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_process_group()
    return dist.get_world_size() if dist.is_initialized() else 1


def init_mesh(
    *, shard_size: int | None = None, device: torch.device | None = None, device_mesh: DeviceMesh | None = None
) -> Mesh:
    """Return the mesh of all ranks with shard groups of `shard_size` ranks (None: all of them).

    Without an initialised process group this is one rank alone, unless the environment says that there are more
    (torchrun), in which case the default group is initialised as torch's `fully_shard` does.

    Args:
        shard_size: ranks per shard group; divides the world size. With a `device_mesh` 1 or left out.
        device: where to compute; the accelerator if there is one, unless `device_mesh` is of CPUs.
        device_mesh: a torch mesh to use instead: 1-D is the shard axis, or with `shard_size=1` the replicate axis; 2-D
            is (replicate, shard).

    Raises:
        ConfigError: The size does not divide the world size, or the mesh has other than 1 or 2 axes.
    """
    if device is None:
        is_of_cpus = isinstance(device_mesh, DeviceMesh) and device_mesh.device_type == "cpu"
        device = torch.device("cpu") if is_of_cpus else current()
    device = torch.empty(0, device=device).device  # with its index, as its tensors have it: `cuda` is not `cuda:0`
    ranks = joined_world_size()
    require_gloo(device, dist.group.WORLD if dist.is_initialized() else None)
    if device_mesh is not None:
        only_replicates = shard_size == 1 and device_mesh.ndim == 1
        if shard_size is not None and not only_replicates:
            raise ConfigError(
                f"shard_size={shard_size} with {device_mesh}: its axes say how many ranks share",
                hint="leave shard_size out, or pass 1 with a mesh of one axis, along which every rank is to have all",
            )
        return _from_device_mesh(device_mesh, device, only_replicates=only_replicates)
    if not dist.is_initialized():
        alone = collectives_for(None, device)
        device_mesh = torch_private.mesh_without_groups(device.type, [0], 0)
        return Mesh(device, gather=alone, reduce=alone, replicate=alone, device_mesh=device_mesh)
    shard_size = ranks if shard_size is None else shard_size
    replicate_size = replicas(ranks, shard_size)
    key = (dist.group.WORLD, device, shard_size)
    if key not in _CACHE:
        _forget_destroyed()
        _CACHE[key] = _build(replicate_size, shard_size, device)
        _CACHE[key].watch()
    return _CACHE[key]


def _forget_destroyed() -> None:
    """Forget the meshes of destroyed groups, which would otherwise keep their threads."""
    for key, mesh in list(_CACHE.items()):
        if key[0] is not dist.group.WORLD and mesh.thread == get_ident():
            del _CACHE[key]


def data_parallel(device_mesh: Any, dims: Any) -> Mesh:
    """Return the mesh of a device mesh's data-parallel part. All ranks of `device_mesh` make it together.

    Args:
        device_mesh: of any axes, which have names.
        dims: torch's `DataParallelMeshDims`. Several axes to shard along, or to replicate along, are taken as one.

    Raises:
        ConfigError: An axis does not exist, is named twice or is out of order, or `device_mesh` is no mesh of torch's.
    """
    names = (device_mesh.mesh_dim_names if isinstance(device_mesh, DeviceMesh) else None) or ()
    wanted = [tuple(dims.replicate_names), tuple(dims.shard_names)]
    named = [name for part in wanted for name in part]
    unknown = [name for name in named if name not in names]
    if unknown:
        raise ConfigError(
            f"dp_mesh_dims = {dims} of a mesh with axes {names}: {unknown} not found in mesh.mesh_dim_names",
            hint="name axes of the mesh that fully_shard is given",
        )
    if len(set(named)) < len(named) or any(list(part) != sorted(part, key=names.index) for part in wanted):
        raise ConfigError(
            f"dp_mesh_dims = {dims} of a mesh with axes {names}",
            hint="name each axis once, in the order that they have in the mesh",
        )
    parts = [device_mesh[part] if part else None for part in wanted]
    replicate, shard = (torch_private.flattened(p) if p is not None and p.ndim > 1 else p for p in parts)
    if shard is None:
        return init_mesh(device_mesh=replicate, shard_size=1)
    return init_mesh(device_mesh=shard if replicate is None else torch_private.joined([replicate, shard]))


def mesh_of(device_mesh: DeviceMesh) -> Mesh | None:
    """Return the mesh that was made of this torch mesh, or that made it; None if there is none."""
    if not dist.is_initialized():
        return init_mesh(device=torch.device(device_mesh.device_type))  # of one process alone, which are all alike
    own = (mesh for key, mesh in list(_CACHE.items()) if key[0] is dist.group.WORLD)
    alike = (mesh for mesh in own if mesh.device_mesh == device_mesh)
    return next((mesh for mesh in alike if mesh.shard_size == device_mesh.shape[-1]), None)  # not one that replicates


def _build(replicate_size: int, shard_size: int, device: torch.device) -> Mesh:
    rank = dist.get_rank()
    replicate_rank, shard_rank = divmod(rank, shard_size)
    rows = [list(range(r * shard_size, (r + 1) * shard_size)) for r in range(replicate_size)]
    columns = [[row[s] for row in rows] for s in range(shard_size)]
    world_size = dist.get_world_size()
    timeout = _timeout(device)
    control = None if world_size == 1 else dist.new_group(backend=_control_backend(device), timeout=timeout)
    shard_group = _own_group(rows, timeout)
    replicate_group = _own_group(columns, timeout)
    return Mesh(
        device,
        rank=rank,
        ranks=tuple(range(world_size)),
        world_size=world_size,
        shard_rank=shard_rank,
        shard_size=shard_size,
        replicate_rank=replicate_rank,
        replicate_size=replicate_size,
        world_group=dist.group.WORLD if world_size > 1 else None,
        shard_group=shard_group,
        replicate_group=replicate_group,
        control_group=control,
        gather=collectives_for(shard_group, device),
        reduce=collectives_for(_own_group(rows, timeout), device),
        replicate=collectives_for(replicate_group, device, only_all_reduce=True),
        device_mesh=_device_mesh(replicate_group, shard_group, rows, device),
    )


def _device_mesh(
    replicate_group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None,
    rows: list[list[int]],
    device: torch.device,
) -> DeviceMesh:
    """Return torch's mesh of the existing groups: each further group would have threads of its own."""
    if replicate_group is not None and shard_group is not None:
        groups = [replicate_group, shard_group]
        return DeviceMesh.from_group(groups, device.type, torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    group = shard_group or replicate_group or dist.group.WORLD  # of one rank; torch's messages over a mesh need one
    assert group is not None  # noqa: S101 -- the default group is initialised
    return DeviceMesh.from_group(group, device.type)  # without names, as torch's own default has it


def _timeout(device: torch.device) -> timedelta:
    """Return a little more than the user's time-out, so that the watch over waits ends them first, and says more."""
    assert dist.group.WORLD is not None  # noqa: S101 -- the default group is initialised
    return torch_private.timeout_of(dist.group.WORLD, device) + _MARGIN


def _control_backend(device: torch.device) -> str | None:
    """Return Gloo; None for the ranks' own, if that is in Python and sends from the host: ranks may be threads."""
    assert dist.group.WORLD is not None  # noqa: S101 -- the default group is initialised
    is_python = torch_private.backend_of(dist.group.WORLD, device) is None
    sends_from_host = "cpu" in dist.Backend.backend_capability.get(dist.get_backend(), ())
    return None if is_python and sends_from_host else "gloo"


def _messages_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group itself if it can send from the host; else a Gloo group that its ranks alone make."""
    is_python = torch_private.backend_of(group, device) is None
    if is_python or torch_private.backend_of(group, torch.device("cpu")) is not None:
        return group
    return _made_by(dist.get_process_group_ranks(group), device, backend="gloo")


def _made_by(ranks: Sequence[int], device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group that its ranks alone make.

    If the default group is bound to a device, torch splits the new group off it. NCCL does that on all ranks of the
    default group, or hangs.
    """
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 -- the default group is initialised
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=_timeout(device), backend=backend, use_local_synchronization=True
        )
    finally:
        world.bound_device_id = bound
    return made


def _own_group(rank_lists: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make one group per list, all of a length, and return the one this rank is in. All ranks take part in all."""
    return dist.new_subgroups_by_enumeration(rank_lists, timeout=timeout)[0] if len(rank_lists[0]) > 1 else None


def _from_device_mesh(device_mesh: DeviceMesh, device: torch.device, *, only_replicates: bool) -> Mesh:
    if device_mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {device_mesh} of {device_mesh.ndim} axes",
            hint="pass the part of it to shard over: mesh[SHARD] or mesh[REPLICATE, SHARD], by the names of its axes",
        )
    ranks, key = device_mesh.mesh, (dist.group.WORLD, device, device_mesh, only_replicates)
    if ranks.flatten().tolist() == list(range(dist.get_world_size())):  # tensors might be made on the meta device
        known = init_mesh(shard_size=1 if only_replicates else ranks.shape[-1], device=device)
        return _CACHE.setdefault(key, replace(known, device_mesh=device_mesh))
    if key not in _CACHE:
        _forget_destroyed()
        _check_part(device_mesh)
        _CACHE[key] = _part(device_mesh, device, only_replicates=only_replicates)
        _CACHE[key].watch()
    return _CACHE[key]


def _check_part(device_mesh: DeviceMesh) -> None:
    """Refuse a part of the world that shard groups and replicas cannot be made of."""
    if device_mesh.get_coordinate() is None:
        raise ConfigError(f"this rank is not in {device_mesh}", hint="call fully_shard on the ranks of the mesh only")
    if device_mesh.ndim == 1:
        return
    if not device_mesh.mesh_dim_names:
        raise ConfigError(
            f"Please init the 2D mesh for HSDP with mesh_dim_names specified: got {device_mesh}",
            hint='for example mesh_dim_names=("replicate", "shard")',
        )
    orders = device_mesh.mesh.argsort(dim=1)
    if orders.ne(orders[0]).any():
        raise ConfigError(
            f"the shard groups of {device_mesh} list their ranks in different orders: replicas would hold other shards",
            hint="list the ranks of each group in ascending order",
        )


def _part(device_mesh: DeviceMesh, device: torch.device, *, only_replicates: bool) -> Mesh:
    """Return the mesh of a part of the world (tensor or pipeline parallelism owns the rest).

    It uses the part's own groups, because making new ones needs all ranks. For the one new group, that of a mesh of two
    axes, all ranks call this together, each with its own part.
    """
    ranks = device_mesh.mesh.reshape(-1, 1 if only_replicates else device_mesh.mesh.shape[-1])
    shard_group = None if only_replicates else device_mesh.get_group(device_mesh.ndim - 1)
    replicate_group = device_mesh.get_group(0) if only_replicates or device_mesh.ndim == 2 else None
    longest = device_mesh.ndim - 1 if ranks.shape[1] > 1 else 0
    all_ranks = torch_private.flattened(device_mesh) if min(ranks.shape) > 1 else device_mesh
    world_group = all_ranks.get_group(0 if all_ranks.ndim == 1 else longest)
    return Mesh(
        device,
        rank=dist.get_rank(),
        ranks=tuple(dist.get_process_group_ranks(world_group)),
        world_size=ranks.numel(),
        # A group sorts its ranks, whatever place the mesh gives them.
        shard_rank=0 if shard_group is None else dist.get_rank(shard_group),
        shard_size=ranks.shape[1],
        replicate_rank=0 if replicate_group is None else dist.get_rank(replicate_group),
        replicate_size=ranks.shape[0],
        world_group=world_group,
        shard_group=shard_group,
        replicate_group=replicate_group,
        control_group=_messages_of(world_group, device) if ranks.numel() > 1 else None,
        gather=collectives_for(shard_group, device),
        reduce=collectives_for(shard_group, device),
        replicate=collectives_for(replicate_group, device, only_all_reduce=True),
        device_mesh=device_mesh,
    )
