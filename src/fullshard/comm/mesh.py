"""The device mesh, which consists of shard groups and replicate groups, and the process groups for both.

The shard axis is the inner axis, so a shard group consists of consecutive ranks, usually on one host:

                shard axis ->
    replicate    0   1   2   3
    axis  |      4   5   6   7
"""

import hashlib
import os
from collections.abc import Callable, Sequence
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
from fullshard.comm.device import current
from fullshard.comm.select import collectives_for
from fullshard.comm.waiting import PROGRESS, Waiting
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.core.strategy import replicas

TIMEOUT_SECONDS = 1800.0
"""The default time-out of process groups. It is long because ranks load and compile before the first step ends."""
LAUNCH_HINT = (
    "start every rank, for example with `fullshard launch script.py`; unset RANK and WORLD_SIZE to run one process"
)
_SAME_MODEL = "build the same model from the same configuration, and load the same weights, on every rank"


@dataclass(slots=True, eq=False)
class Mesh:
    """The device mesh as seen by this rank. To get a mesh, call `init_mesh`, which caches meshes."""

    device: torch.device
    # Each of these three has its own communicator, so that they do not wait for one another.
    gather: Collectives  # for unsharding
    reduce: Collectives  # for gradients along the shard axis
    replicate: Collectives  # for gradients along the replicate axis
    device_mesh: DeviceMesh  # the matching torch mesh, with the axes (shard,) or (replicate, shard)
    rank: int = 0  # the number of this rank in the job, which error messages report
    ranks: tuple[int, ...] = (0,)  # the job-wide numbers of all ranks in the mesh, in the same order as in its groups
    world_group: dist.ProcessGroup | None = None  # this and the next two are None if the axis has one rank
    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None  # for small messages in host memory; None if there is one rank
    thread: int = field(default_factory=get_ident)  # the creator of the mesh; ranks may be threads of one process
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)
    _neighbors: dict[int, Collectives] = field(default_factory=dict)
    _next_tag: list[int] = field(default_factory=lambda: [0])
    world_size: int = field(init=False)
    shard_rank: int = field(init=False)
    shard_size: int = field(init=False)
    replicate_rank: int = field(init=False)
    replicate_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.world_size = len(self.ranks)
        self.shard_rank, self.shard_size = self.gather.rank, self.gather.size
        self.replicate_rank, self.replicate_size = self.replicate.rank, self.replicate.size

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of the mesh, which acts on behalf of all ranks."""
        return self.rank == self.ranks[0]

    def neighbors(self, size: int) -> Collectives:
        """Return collectives among `size` consecutive shard ranks. These ranks must make the first call together."""
        if size not in self._neighbors:
            assert self.shard_group is not None  # noqa: S101 -- a part of one rank has no neighbors
            first = self.shard_rank // size * size
            ranks = dist.get_process_group_ranks(self.shard_group)[first : first + size]
            group = _made_by(ranks, self.device)
            # Use the kind for a replicate axis, which sends messages. Ranks that share memory need none of this.
            self._neighbors[size] = collectives_for(group, self.device, only_all_reduce=True)
        return self._neighbors[size]

    def take_tags(self, count: int) -> int:
        """Reserve `count` tags, one per bucket, that no current or recent model uses, and return the first tag."""
        first = self._next_tag[0] if self._next_tag[0] + count <= MAX_TAGS else 0
        self._next_tag[0] = first + count
        return first

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """Return all groups in which ranks of the mesh may wait. An entry is None if its group has only one rank."""
        own = (getattr(collectives, "group", None) for collectives in (self.gather, self.reduce, self.replicate))
        return [self.control_group, self.shard_group, self.replicate_group, *own]

    def joined(self, axis: DeviceMesh) -> DeviceMesh:
        """Return `device_mesh` joined with one more axis. Raise `RuntimeError` if torch cannot join them."""
        if axis not in self._joined:
            self._joined[axis] = torch_private.joined([self.device_mesh, axis])
        return self._joined[axis]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of `ranks`. All ranks must call this."""
        if self.control_group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        without = torch_private.without_transforms()  # transforms hide the memory of messages
        with Waiting("exchanging metadata", [self.control_group]), without, torch_private.uncounted():
            dist.all_gather_object(values, value, group=self.control_group)
        return values

    def check_agreement(self, lines: Sequence[str], *, what: str, hint: str = _SAME_MODEL) -> None:
        """Raise an error if `lines` differ between ranks, before the difference causes a hang or wrong numbers.

        All ranks must call this. They compare digests first. The error on every rank names the first rank that differs
        from the mesh's first rank, and the first line that differs.
        """
        digests = self.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
        different = [place for place, other in enumerate(digests) if other != digests[0]]
        if not different:
            return
        everything = self.all_gather_object(list(lines))
        one, other_one = self.ranks[0], self.ranks[different[0]]
        pairs = zip_longest(everything[0], everything[different[0]], fillvalue="nothing more")
        first, other = next((a, b) for a, b in pairs if a != b)
        raise CommunicationError(
            f"ranks disagree about {what}: rank {one} has [{first}], but rank {other_one} has [{other}] "
            f"({len(different)} of {len(digests)} ranks differ from rank {one})",
            hint=hint,
        )


_MARGIN = timedelta(seconds=5)
_CACHE: dict[tuple[object, ...], Mesh] = {}


def join_process_group(**options: Any) -> None:
    """Call torch's `init_process_group`, which waits for all ranks."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"RANK = {os.environ.get('RANK')} and WORLD_SIZE = {os.environ.get('WORLD_SIZE')} are set, but "
            f"{' and '.join(missing)}, which ranks need to find each other, {'is' if len(missing) == 1 else 'are'} not",
            hint=LAUNCH_HINT,
        )
    with PROGRESS.watcher.joining():
        dist.init_process_group(**options)
    PROGRESS.watcher.watch((), current())  # the others may wait for this rank before it makes a mesh


def joined_world_size() -> int:
    """Return the number of ranks. Initialize the default group if `init_mesh` would, but do not create other groups."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_process_group()
    return dist.get_world_size() if dist.is_initialized() else 1


def init_mesh(
    *, shard_size: int | None = None, device: torch.device | None = None, device_mesh: DeviceMesh | None = None
) -> Mesh:
    """Return the mesh of all ranks, with `shard_size` ranks in each shard group (None: all ranks).

    Without an initialized process group, the mesh has only this rank. But if environment variables specify more ranks,
    as under torchrun, the default group is initialized first, as in torch's `fully_shard`.

    Args:
        shard_size: ranks per shard group; must divide the world size. With a `device_mesh`, it must be 1 or omitted.
        device: the device to compute on. Default: the accelerator if there is one, unless `device_mesh` is on CPUs.
        device_mesh: a torch mesh to use instead. A 1-D mesh is the shard axis, or the replicate axis if `shard_size=1`.
            A 2-D mesh is (replicate, shard).

    Raises:
        ConfigError: The size does not divide the world size, or `device_mesh` does not have one or two axes.
    """
    if device is None:
        is_of_cpus = isinstance(device_mesh, DeviceMesh) and device_mesh.device_type == "cpu"
        device = torch.device("cpu") if is_of_cpus else current()
    device = torch.empty(0, device=device).device  # with an index, as in its tensors: `cuda` is not equal to `cuda:0`
    ranks = joined_world_size()
    if device_mesh is not None:
        return _from_device_mesh(device_mesh, device, shard_size)
    if not dist.is_initialized():
        alone = collectives_for(None, device)
        return Mesh(device, alone, alone, alone, torch_private.mesh_without_groups(device.type, [0], 0))
    size = ranks if shard_size is None else shard_size
    replicate_size = replicas(ranks, size)
    return _cached((device, size), lambda: _build(replicate_size, size, device))


def _cached(key: tuple[object, ...], build: Callable[[], Mesh]) -> Mesh:
    """Return the cached mesh for a key, or build it. Remove meshes of destroyed groups, which keep threads alive."""
    key = (dist.group.WORLD, *key)
    if key not in _CACHE:
        for other, mesh in list(_CACHE.items()):
            if other[0] is not dist.group.WORLD and mesh.thread == get_ident():
                del _CACHE[other]
        _CACHE[key] = build()
    return _CACHE[key]


def meshes() -> list[Mesh]:
    """Return the cached meshes of the current default group."""
    return [mesh for key, mesh in list(_CACHE.items()) if key[0] is dist.group.WORLD]


def _build(replicate_size: int, shard_size: int, device: torch.device) -> Mesh:
    """Build a mesh of all ranks."""
    ranks, timeout = range(replicate_size * shard_size), _timeout(device)
    rows = [list(ranks[first : first + shard_size]) for first in ranks[::shard_size]]
    columns = [list(ranks[first::shard_size]) for first in ranks[:shard_size]]
    is_python = torch_private.backend_of(_world(), device) is None
    sends_from_host = "cpu" in dist.Backend.backend_capability.get(dist.get_backend(), ())
    # Use the default group itself if it is written in Python and sends from the host: ranks may be threads.
    backend = None if is_python and sends_from_host else "gloo"
    with Waiting("making process groups", [_world()]):
        if len(ranks) > 1 and torch_private.backend_of(_world(), torch.device("cpu")) is not None:
            _meet(timeout)
        control = dist.new_group(backend=backend, timeout=timeout) if len(ranks) > 1 else None
        shard, replicate, reduce = (_own_group(lists, timeout) for lists in (rows, columns, rows))
    if replicate is not None and shard is not None:
        axes = ("replicate", "shard")
        device_mesh = DeviceMesh.from_group([replicate, shard], device.type, torch.tensor(rows), mesh_dim_names=axes)
    else:  # Without names, like torch's default. Even one rank has a group, because torch's messages need one.
        device_mesh = DeviceMesh.from_group(shard or replicate or _world(), device.type)
    world = _world() if len(ranks) > 1 else None
    return _of_groups(device, device_mesh, ranks, world, control, shard, reduce, replicate)


def _meet(timeout: timedelta) -> None:
    """Wait for all ranks by a message from the host. Unlike torch's wait for its store, this one can be ended."""
    options = dist.AllreduceOptions()
    options.timeout = timeout
    with torch_private.without_transforms(), torch_private.uncounted():
        _world().allreduce([torch.zeros(1, device="cpu")], options).wait()


def _of_groups(
    device: torch.device,
    device_mesh: DeviceMesh,
    ranks: Sequence[int],
    world_group: dist.ProcessGroup | None,
    control_group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None,
    reduce_group: dist.ProcessGroup | None,
    replicate_group: dist.ProcessGroup | None,
) -> Mesh:
    gather, reduce = collectives_for(shard_group, device), collectives_for(reduce_group, device)
    replicate = collectives_for(replicate_group, device, only_all_reduce=True)
    groups = (world_group, shard_group, replicate_group, control_group)
    mesh = Mesh(device, gather, reduce, replicate, device_mesh, dist.get_rank(), tuple(ranks), *groups)
    PROGRESS.watcher.watch(mesh.groups, device)
    return mesh


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None  # noqa: S101 -- the default group is initialized
    return dist.group.WORLD


def _timeout(device: torch.device) -> timedelta:
    """Return slightly more than the user's time-out, so that the watchdog ends waits first with a better error."""
    return torch_private.timeout_of(_world(), device) + _MARGIN


def _made_by(ranks: Sequence[int], device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group. Only the ranks of the new group call this."""
    # torch splits groups off a default group that is bound to a device, and NCCL then waits for all ranks. Suspend it.
    world, timeout = _world(), _timeout(device)
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made: dist.ProcessGroup = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    return made


def _own_group(rank_lists: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create a group per list of ranks (all equally long). Return this rank's group. All ranks must call this."""
    return dist.new_subgroups_by_enumeration(rank_lists, timeout=timeout)[0] if len(rank_lists[0]) > 1 else None


def _from_device_mesh(device_mesh: DeviceMesh, device: torch.device, shard_size: int | None) -> Mesh:
    only_replicates = shard_size == 1 and device_mesh.ndim == 1
    if shard_size is not None and not only_replicates:
        raise ConfigError(
            f"shard_size={shard_size} cannot be combined with {device_mesh}: its axes already define the shard size",
            hint="omit shard_size, or pass 1 with a one-dimensional mesh to replicate along its only axis",
        )
    if device_mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {device_mesh}, which has {device_mesh.ndim} axes",
            hint="select the axes to shard over by name: mesh[SHARD] or mesh[REPLICATE, SHARD]",
        )
    ranks, key = device_mesh.mesh, (device, device_mesh, only_replicates)
    # Lists, because comparing tensors would fail under a default meta device.
    if ranks.flatten().tolist() == list(range(dist.get_world_size())):
        known = init_mesh(shard_size=1 if only_replicates else ranks.shape[-1], device=device)
        return _cached(key, lambda: replace(known, device_mesh=device_mesh))
    return _cached(key, lambda: _submesh(device_mesh, device, only_replicates=only_replicates))


def _check_submesh(device_mesh: DeviceMesh) -> None:
    """Raise an error if shard groups and replicas cannot be built from a mesh that contains only some of the ranks."""
    if device_mesh.get_coordinate() is None:
        raise ConfigError(f"this rank is not in {device_mesh}", hint="call fully_shard only on the ranks of the mesh")
    if device_mesh.ndim == 1:
        return
    if not device_mesh.mesh_dim_names:
        raise ConfigError(
            f"Please init the 2D mesh for HSDP with mesh_dim_names specified: got {device_mesh}",
            hint='name its axes, for example mesh_dim_names=("replicate", "shard")',
        )
    orders = device_mesh.mesh.argsort(dim=1)
    if orders.ne(orders[0]).any():
        raise ConfigError(
            f"the shard groups of {device_mesh} list their ranks in different orders, so replicas would hold "
            "different shards",
            hint="list the ranks of each group in ascending order",
        )


def _submesh(device_mesh: DeviceMesh, device: torch.device, *, only_replicates: bool) -> Mesh:
    """Build a mesh from existing groups of `device_mesh`, because creating new groups would require all ranks."""
    # A mesh with two axes needs one new group. All ranks must then call this together, each with its own mesh.
    # Groups sort their ranks, regardless of their order in the mesh.
    _check_submesh(device_mesh)
    shard = None if only_replicates else device_mesh.get_group(device_mesh.ndim - 1)
    replicate = device_mesh.get_group(0) if only_replicates or device_mesh.ndim == 2 else None
    sizes = [1 if group is None else group.size() for group in (replicate, shard)]
    all_ranks = torch_private.flattened(device_mesh) if min(sizes) > 1 else device_mesh
    world = all_ranks.get_group(0 if all_ranks.ndim == 1 or sizes[1] == 1 else 1)
    ranks = dist.get_process_group_ranks(world)
    control = None
    if len(ranks) > 1:
        host = torch.device("cpu")
        sends = torch_private.backend_of(world, device) is None or torch_private.backend_of(world, host) is not None
        control = world if sends else _made_by(ranks, device, backend="gloo")
    return _of_groups(device, device_mesh, ranks, world, control, shard, shard, replicate)
