"""`torch.tpu.distributed` and the backend `tpu_dist`, whose collectives go through host memory and Gloo."""

from __future__ import annotations

import math
import os
import sys
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated import device

_c10d: Any = torch._C._distributed_c10d
ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
HOST_TPUS = int(os.environ["SIMULATED_TPUS"])
_SUM, _MAX = 0, 4


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """As torch_tpu's: what is set stays."""
    names = [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if nnodes is not None and names and nnodes != len(names):
        raise ValueError(f"expected nnodes to match the number of hosts in TPU_WORKER_HOSTNAMES ({len(names)})")
    if len(names) > 1:
        os.environ.setdefault("NODE_RANK", os.environ.get("JOB_COMPLETION_INDEX", "0"))
    count = HOST_TPUS if nproc_per_node is None else nproc_per_node
    if count > HOST_TPUS:
        raise RuntimeError(f"No TPU topology found for count: {count}")
    hosts = names or ["localhost"]
    os.environ.setdefault(ADDRESSES, ",".join(f"{host}:{8070 + i}" for host in hosts for i in range(count)))
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", f"{count},1,1")


def topology_aware_mesh(mesh_shape: tuple[int, ...]) -> torch.Tensor:
    """As torch_tpu's of two axes: on these chips other ranks are neighbours, row by row turned about."""
    assert dist.is_initialized() and dist.get_world_size() == math.prod(mesh_shape)
    replicas, shards = mesh_shape
    ranks = torch.arange(replicas * shards).view(shards, replicas).T.clone()
    ranks[::2] = ranks[::2].flip(1)
    return ranks


class _Done(_c10d.Work):
    """Over when it was issued."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return True


class TpuGroup(_c10d.ProcessGroup):
    """Tensors of the TPU by way of the host, added up in the order of ranks; those of the host by Gloo.

    torch combines a backend that is written in Python with no other, so this is both.
    """

    is_in_order = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        addresses = os.environ.get(ADDRESSES, "").split(",")
        assert dist.is_initialized() or len(addresses) == size, (
            f"{ADDRESSES} has {len(addresses)} addresses, not {size}"
        )
        self._member, self._members = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "tpu_dist"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _everyones(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self._members)]
        self._gloo.allgather([found], [own]).wait()
        return found

    @staticmethod
    def _total(terms: list[torch.Tensor], options: Any) -> torch.Tensor:
        given = options.reduceOp
        reduce = int(given.op if hasattr(given, "op") else given)
        assert reduce in (_SUM, _MAX), f"reduction {reduce} is not supported"
        total = terms[0].clone()
        for term in terms[1:]:
            total = total + term if reduce == _SUM else total.maximum(term)
        return total

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        # Of several ranks Gloo adds up in an order of its own, and what runs on the CPU is compared.
        if tensors[0].device.type == "cpu" and not tensors[0].is_floating_point():
            return self._gloo.allreduce(tensors, options)
        tensors[0].copy_(self._total(self._everyones(tensors[0]), options))
        return _Done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if tensors[0].device.type == "cpu":
            return self._gloo.broadcast(tensors, options)
        tensors[0].copy_(self._everyones(tensors[0])[options.rootRank])
        return _Done(tensors)

    def allgather(self, outputs: Any, inputs: list[torch.Tensor], options: Any = None) -> Any:
        if inputs[0].device.type == "cpu":
            return self._gloo.allgather(outputs, inputs, *([options] if options else []))
        for output, found in zip(outputs[0], self._everyones(inputs[0]), strict=True):
            output.copy_(found)
        return _Done(outputs[0])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        if given.device.type == "cpu":
            return self._gloo._allgather_base(output, given)
        output.view(-1).copy_(torch.cat([found.view(-1) for found in self._everyones(given)]))
        return _Done([output])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        terms = [found.view(-1).chunk(self._members)[self._member] for found in self._everyones(given)]
        output.view(-1).copy_(self._total(terms, options))
        return _Done([output])

    def all_to_all_single(self, output: Any, given: Any, source: list[int], to: list[int], options: Any = None) -> Any:
        assert len({*source, *to}) <= 1, "the simulated TPU exchanges parts of one size"
        found = self._everyones(given)
        output.view(-1).copy_(torch.cat([each.view(-1).chunk(self._members)[self._member] for each in found]))
        return _Done([output])

    def scatter(self, outputs: list[torch.Tensor], inputs: Any, options: Any) -> Any:
        assert outputs[0].device.type == "cpu", "not of the simulated TPU"
        return self._gloo.scatter(outputs, inputs, options)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        assert tensors[0].device.type == "cpu", "not of the simulated TPU"
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        assert tensors[0].device.type == "cpu", "not of the simulated TPU"
        return self._gloo.recv(tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> TpuGroup:
    return TpuGroup(store, rank, size, timeout)


dist.Backend.register_backend("tpu_dist", _group, devices=["tpu"])

module: Any = torch.get_device_module("tpu")
module.distributed = types.ModuleType("torch.tpu.distributed")
module.distributed.set_tpu_launch_env = set_tpu_launch_env
module.distributed.topology_aware_mesh = topology_aware_mesh
sys.modules["torch.tpu.distributed"] = module.distributed
module.device_count = staticmethod(lambda: HOST_TPUS)
module.get_device_name = staticmethod(lambda device=None: "TPU v0")
os.register_at_fork(after_in_child=lambda: os._exit(86))
assert device.IS_TPU
