"""Steps of fullshard and of torch's engines in virtual time: the same models, devices, costs and launches.

    python -m benchmarks.virtual_time [--cases 8B-8 70B-64 ...] [--engines fullshard fsdp2 fsdp1]

Each engine's own code runs, unchanged, on `fullshard.api.virtual`: kernels, collectives and launches take what a model
of the device says. One unit per transformer layer, bfloat16
with float32 main weights, reduction and optimizer state, torch's fused AdamW; the host waits at the end of each step.
`muon` is fullshard with `fullshard.optim.Muon`, as the rank that has most to do.
Writes `benchmarks/results/virtual-time.json`, case by case.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Shard

from benchmarks.record import RESULTS
from fullshard.api.virtual.attention import register
from fullshard.api.virtual.device import VirtualDevice, VirtualEvent, VirtualStream
from fullshard.api.virtual.group import name_groups, playing
from fullshard.api.virtual.rehearsal import fused_optimizers, last_step
from fullshard.api.virtual.simulation import NoWeights, transformers_model
from fullshard.comm.mesh import init_mesh
from fullshard.core.sizes import GIB
from fullshard.features import MixedPrecisionPolicy, keep_head, meta_parameters, shard_model
from fullshard.features.meta_device import WEIGHTS
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import embedding_modules, unit_modules
from fullshard.optim import Muon
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.library import MODELS

RECORD = RESULTS / "virtual-time.json"


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained on what.

    Attributes:
        model: a name in `plan.library`.
        devices: how many of what.
        tokens: of the one sequence of a rank.
        checkpointing: whether layers are recomputed.
        lora: rank of adapters on all linear layers of a frozen model in bfloat16; 0: everything is trained.
        apart: whether the embedding and the head are units of their own, in all engines.
    """

    model: str
    devices: str
    tokens: int
    checkpointing: bool
    lora: int = 0
    apart: bool = False


_PLACES = {
    "8B-8": ("Llama-3.1-8B", "8xH100", 4096, 0),
    "8B-64": ("Llama-3.1-8B", "64xH100", 4096, 0),
    "8B-64-8k": ("Llama-3.1-8B", "64xH100", 8192, 0),
    "70B-64": ("Llama-3.1-70B", "64xH100", 2048, 0),
    "70B-1024": ("Llama-3.1-70B", "1024xH100", 2048, 0),
    "lora-70B-8": ("Llama-3.1-70B", "8xH100", 1024, 16),
    "mixtral-16": ("Mixtral-8x7B", "16xH100", 2048, 0),
}
CASES = {
    name + ("-checkpointed" if again else "") + ("-apart" if apart else ""): Case(
        model, devices, tokens, bool(again), lora, bool(apart)
    )
    for name, (model, devices, tokens, lora) in _PLACES.items()
    for again in (0, 1)
    for apart in (0, 1)
}


class Handle:
    """What torch's engines ask of the module of a device, `torch.cuda` for CUDA."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def Stream(self, *_: Any, **__: Any) -> VirtualStream:
        return VirtualStream(self._device, f"stream {len(self._device.clock.streams)}")

    def Event(self, *_: Any, **__: Any) -> VirtualEvent:
        return VirtualEvent(self._device)

    def current_stream(self, *_: Any) -> VirtualStream:
        return self._device.current

    def stream(self, stream: VirtualStream) -> VirtualStream:
        return stream

    def synchronize(self, *_: Any) -> None:
        self._device.clock.block_all()

    def set_device(self, *_: Any) -> None:
        """There is one."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    is_initialized = is_available


@contextlib.contextmanager
def handle_for(device: VirtualDevice) -> Iterator[None]:
    """Within it torch's engines find the device where they look for one."""
    torch.meta = Handle(device)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.meta  # type: ignore[attr-defined]


def build(case: Case) -> nn.Module:
    """The model on the meta device: it stands for one that has its weights."""
    values = {**MODELS[case.model], "max_position_embeddings": 131072}
    with meta_parameters():
        model = transformers_model(values, attention=register(Job(), parse_cluster(case.devices).device))()
        model = model.to(torch.bfloat16) if case.lora else model.float()
        if case.lora:
            model = _adapted(model, case.lora)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    return model


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=True)
    return adapted


def _parts(model: nn.Module, case: Case) -> tuple[list[nn.Module], tuple[nn.Module, ...]]:
    units = [unit for unit in unit_modules(model) if unit is not model]
    apart = embedding_modules(model) if case.apart else ()
    if case.checkpointing:
        checkpoint_modules(model, units, reentrant=False, selective=False)
    return units, apart


def with_fullshard(model: nn.Module, case: Case) -> nn.Module:
    """Sharded as `Accelerator` does it."""
    units, apart = _parts(model, case)
    model.__dict__[WEIGHTS] = NoWeights()
    mesh = init_mesh(device=torch.device("meta"))
    name_groups(mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(model, unit_modules=[*units, *apart], strategy="FULL_SHARD", mesh=mesh, mp_policy=policy)
    if apart:
        keep_head(apart[1])
    return model


def with_fsdp2(model: nn.Module, case: Case) -> nn.Module:
    """Sharded as torch's documentation does it: layer by layer, then the whole.

    Experts are cut along their second dim where there are fewer than ranks, as torchtitan does: along the first each
    would be padded to the number of ranks.
    """
    units, apart = _parts(model, case)
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("meta", (ranks,))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": TorchPolicy(torch.bfloat16, torch.float32),
        "shard_placement_fn": lambda weight: Shard(1) if weight.ndim == 3 and len(weight) < ranks else None,
    }
    for unit in units:
        fully_shard(unit, **settings)
    for number, unit in enumerate(apart):  # the head is wanted again at once
        fully_shard(unit, **settings, reshard_after_forward=number == 0)
    fully_shard(model, **settings)
    return model


def with_fsdp1(model: nn.Module, case: Case) -> nn.Module:
    """Wrapped layer by layer, with torch's defaults but for the dtypes.

    Raises:
        ValueError: adapters, whose float32 it does not flatten together with a base in bfloat16.
    """
    if case.lora:
        raise ValueError("FSDP1 refuses adapters in float32 in one unit with a base in bfloat16: leave it out")
    units, apart = _parts(model, case)
    wrapped = {*units, *apart}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in wrapped),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


ENGINES: dict[str, Callable[[nn.Module, Case], nn.Module]] = {
    "fullshard": with_fullshard,
    "fsdp2": with_fsdp2,
    "fsdp1": with_fsdp1,
    "muon": with_fullshard,
}


@contextlib.contextmanager
def values_are_there() -> Iterator[None]:
    """Torch's engines take parameters on the meta device for real ones on a device that has streams."""
    from torch.distributed.fsdp import _common_utils, _flat_param, _init_utils, _runtime_utils
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp1
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def init_handle(state: Any, *_: Any) -> Any:
        state._device_handle = _common_utils._FSDPDeviceHandle(torch.device("meta"))
        return state

    def record(tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    places: list[tuple[Any, str, Any]] = [
        (FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (fsdp1, "_init_device_handle", init_handle),
        (_init_utils, "_need_to_materialize_module", lambda *_: (False, False)),
        (_flat_param, "_no_dispatch_record_stream", record),
        (_runtime_utils, "_no_dispatch_record_stream", record),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in places:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def measure(engine: str, case: Case) -> dict[str, float | int]:
    """A step's figures."""
    figures, work = played(engine, case, 0)
    return figures if not work else played(engine, case, work.index(max(work)))[0]


def played(engine: str, case: Case, rank: int) -> tuple[dict[str, float | int], list[int]]:
    """A step's figures on one rank; and how much each rank has to do with whole matrices."""
    cluster = parse_cluster(case.devices)
    device = VirtualDevice(cluster)
    model = build(case)
    with (
        playing(device, rank, cluster.count),
        device.running(),
        handle_for(device),
        values_are_there(),
        fused_optimizers(),
    ):
        model = ENGINES[engine](model, case)
        if engine == "muon":
            optimizer = Muon(model, adjust_lr_fn="match_rms_adamw")
            figures = last_step(device, model, optimizer, Job.of({"seq_len": case.tokens})).figures()
            return figures, optimizer._whole[0].dealing.work()
        trained = [p for p in model.parameters() if p.requires_grad]
        made = torch.optim.AdamW(trained, fused=True)
        return last_step(device, model, made, Job.of({"seq_len": case.tokens})).figures(), []


def main() -> None:
    """Run cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--engines", nargs="+", default=["fullshard", "fsdp2"], choices=ENGINES)
    arguments = parser.parse_args()
    for name in arguments.cases:
        for engine in arguments.engines:
            figures = measure(engine, CASES[name])
            gc.collect()
            record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
            record["host"] = asdict(HostCosts())
            entry = record.setdefault("cases", {}).setdefault(name, {"case": asdict(CASES[name])})
            entry[engine] = figures
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            ms = {key: f"{1e3 * figures[key]:.1f} ms" for key in ("seconds", "exposed", "idle", "host")}
            gib = {key: f"{figures[key] / GIB:.2f} GiB" for key in ("peak_allocated",)}
            print(name, engine, *(f"{key} {value}" for key, value in {**ms, **gib}.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
