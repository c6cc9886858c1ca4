"""miles' FSDP actor on a CPU: `miles_actor.py CHECKOUT MODEL PLACE colocate|apart`. Saves what its engine received.

The actor is theirs, from `init` to `update_weights`. Engines, Ray's calls and three names of SGLang are stand-ins.
With `apart`, the engine is another process, which joins miles' group of processes and receives its broadcasts.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import subprocess
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

CHECKOUT, PLACE = sys.argv[1], Path(sys.argv[-2])
ABSENT = ("sglang", "wandb", "tensorboard", "pynvml")


class Settings(argparse.Namespace):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # an option that miles leaves unset


class FlattenedTensorBucket:
    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.named = named_tensors

    def get_metadata(self) -> list[tuple[str, torch.Size]]:
        return [(name, tensor.shape) for name, tensor in self.named]

    def get_flattened_tensor(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.named])


class MultiprocessingSerializer:
    @staticmethod
    def serialize(value: object, output_str: bool) -> str:
        return base64.b64encode(pickle.dumps(value)).decode()


NAMES = {
    **{"FlattenedTensorBucket": FlattenedTensorBucket, "MultiprocessingSerializer": MultiprocessingSerializer},
    "monkey_patch_torch_reductions": lambda: None,
}


class Absent(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NAMES.get(name, type(name, (), {}))


class StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def call_the_cpu_cuda() -> None:
    """Let `cuda` mean the CPU, as miles names it in its code."""
    answers = dict.fromkeys(("set_device", "synchronize", "empty_cache", "memory_allocated", "memory_reserved"), 0)
    answers |= {"current_device": torch.device("cpu"), "mem_get_info": (0, 1), "get_rng_state_all": []}
    for name, answer in answers.items():  # each has a function of its own, which torch.compile wants
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    move, mesh_of = torch.Tensor.to, device_mesh.init_device_mesh
    cpu = {"cuda": "cpu"}
    torch.Tensor.to = lambda self, *rest, **words: move(  # type: ignore[method-assign]
        self, *(cpu.get(each, each) if isinstance(each, str) else each for each in rest), **words
    )
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self.to("cpu")  # type: ignore[assignment]
    device_mesh.init_device_mesh = lambda kind, *rest, **words: mesh_of(cpu.get(kind, kind), *rest, **words)


def serve() -> None:
    """The engine: read a call per line, and receive what it announces."""
    from miles.utils.distributed_utils import init_process_group

    group, found = None, {}
    for line in sys.stdin:
        call = json.loads(line)
        if "address" in call:
            group = init_process_group("gloo", call["address"], rank=1, world_size=2, group_name="miles")
        for name, dtype, shape in call.get("tensors", ()):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(found[name], 0, group=group)
        if "save" in call:
            torch.save(found, call["save"])
        print("done", flush=True)


class Engine:
    """What miles holds for a rollout engine: `engine.method.remote(...)`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.found: dict[str, torch.Tensor] = {}
        self.process: Any = None

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **words: Any) -> Any:
            self.calls.append(name)
            return getattr(type(self), f"do_{name}", lambda *_, **__: None)(self, *args, **words)

        return types.SimpleNamespace(remote=remote)

    def do_update_weights_from_tensor(self, serialized_named_tensors: list[str], **_: Any) -> dict[str, bool]:
        loaded = [pickle.loads(base64.b64decode(each)) for each in serialized_named_tensors]  # noqa: S301
        assert all(torch.equal(each["flattened_tensor"], loaded[0]["flattened_tensor"]) for each in loaded)
        start = 0
        for name, shape in loaded[0]["metadata"]:
            self.found[name] = loaded[0]["flattened_tensor"][start : start + shape.numel()].view(shape)
            start += shape.numel()
        return {"success": True}

    def do_init_weights_update_group(self, address: str, port: int, *_: Any, **__: Any) -> None:
        command = [sys.executable, __file__, CHECKOUT, "engine"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tell(address=f"tcp://{address}:{port}")

    def do_update_weights_from_distributed(self, names: Any, dtypes: Any, shapes: Any, **_: Any) -> None:
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        self.tell(tensors=list(zip(names, kinds, shapes, strict=True)))

    def tell(self, **call: Any) -> None:
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()


def settings(colocate: bool) -> Settings:
    world = int(os.environ["WORLD_SIZE"])
    every = {"hf_checkpoint": sys.argv[2], "attn_implementation": "sdpa", "seed": 1, "keep_fp32_master": True}
    every |= {"colocate": colocate, "offload_train": True, "distributed_backend": "gloo", "dp_replicate_size": 1}
    every |= {"distributed_timeout_minutes": 2, "optimizer": "adam", "lr": 1e-2, "adam_beta1": 0.9}
    every |= {"adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.0, "clip_grad": 1.0, "min_lr": 0.0}
    every |= {"num_rollout": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 1, "global_batch_size": 4}
    every |= {"lr_warmup_iters": 0, "lr_warmup_init": 0.0, "lr_decay_style": "constant", "num_gpus_per_node": world}
    every |= {"use_checkpoint_lr_scheduler": False, "override_lr_scheduler": False, "save": str(PLACE / "saved")}
    return Settings(**every, update_weight_buffer_size=20_000, rollout_num_gpus=1, rollout_num_gpus_per_engine=world)


def begin(kind: Any, args: Settings) -> Any:
    from miles.utils.ft_utils.heartbeat_utils import SimpleHeartbeat

    actor = kind.__new__(kind)  # `__init__` asks Ray for a GPU
    actor._heartbeat = SimpleHeartbeat()
    actor.init(args, "actor", indep_dp_info=types.SimpleNamespace(quorum_id=0))
    return actor


def step(actor: Any, number: int) -> dict[str, torch.Tensor]:
    """What `_train_core` does after it has computed a loss, which needs rollouts."""
    actor.wake_up()
    random = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(3, 60, (2, 12), generator=random)
    actor.optimizer.zero_grad(set_to_none=True)
    batch = {"tokens": tokens, "position_ids": torch.arange(12).expand(2, 12)}
    logits = actor.model(**actor._get_model_inputs_args(batch)).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(actor.model.parameters(), actor.args.clip_grad).full_tensor()
    actor.optimizer.step()
    actor.lr_scheduler.step()
    actor.sleep()
    return {"loss": loss.detach(), "norm": norm}


def main() -> None:
    import on_cpu
    import ray

    on_cpu.prepare()
    ray.get = lambda refs: refs
    ray._private.services.get_node_ip_address = lambda: "127.0.0.1"
    from miles.utils import distributed_utils

    join = distributed_utils.init_process_group
    distributed_utils.init_process_group = lambda backend, **words: join("gloo", **words)
    from miles.backends.fsdp_utils import checkpoint
    from miles.backends.fsdp_utils.actor import FSDPTrainRayActor

    args = settings(sys.argv[4] == "colocate")
    actor, engine = begin(FSDPTrainRayActor, args), Engine()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # miles starts its processes without torchrun
    manager = actor.rollout_manager = Engine()
    found = {"first": step(actor, 1)}
    for version in (1, 2):
        info = {"rollout_engines": [engine], "rollout_engine_lock": None, "has_new_engines": version == 1}
        empty = {"engine_gpu_counts": None, "engine_gpu_offsets": None}
        actor.wake_up()
        actor.update_weights(types.SimpleNamespace(**info, **empty))
        actor.sleep()
        found[f"step {version}"] = step(actor, version + 1)
        if dist.get_rank() == 0:
            torch.save(engine.found, PLACE / f"received-{version}.pt")
    actor.save_model(0)
    found["lost"] = step(actor, 4)
    actor.wake_up()
    args.load = args.save
    checkpoint.finalize_load(actor, checkpoint.load(actor))
    actor.sleep()
    found["loaded"] = step(actor, 4)
    if dist.get_rank() == 0:
        if engine.process is not None:
            engine.tell(save=str(PLACE / "received-2.pt"))
            engine.process.communicate(timeout=60)
        torch.save(found, PLACE / "found.pt")
        (PLACE / "calls.json").write_text(json.dumps([*engine.calls, *manager.calls]))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, CHECKOUT)
    sys.meta_path.insert(0, StandIns())
    if sys.argv[2] == "engine":
        PLACE = Path()
        serve()
    else:
        call_the_cpu_cuda()
        main()
