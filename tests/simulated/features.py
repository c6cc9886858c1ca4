"""Programs around training, which are to give the CPU's numbers; as those of `tests.simulated.training`."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.checkpoint import AsyncSaver, load_checkpoint, save_checkpoint
from fullshard.core.errors import ReplicaError
from fullshard.features import register_fsdp_forward_method, shard_model, unsharded
from tests.distributed import place_of
from tests.features.extended.test_composed import Coded
from tests.simulated.training import Case, batch, made, optimizer_of, whole_parameters


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int, place: torch.device) -> torch.Tensor:
    loss: torch.Tensor = model(*batch(step, 0, place))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _on_the_cpu(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.cpu() for value in values]


def leave_out(case: Case, kind: str) -> list[torch.Tensor]:
    """Layers are gathered ahead, by the order of the forward before, and not used; others take their memory."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    numel = sum(parameter.numel() for parameter in model.layers[0].parameters())
    found = []
    for step in range(3):
        model.used = 3
        found.append(_step(model, optimizer, step, place))
        model.used = 1
        with torch.no_grad():
            found.append(model(batch(step, 1, place)[0]))
        found += [torch.full((numel,), 0.5, device=place) for _ in range(3)]
    return _on_the_cpu([*found, *whole_parameters(model)])


def update_beside(case: Case, kind: str) -> list[torch.Tensor]:
    """The script changes weights on a stream of its own, and says when that is over."""
    place = place_of(kind)
    model: Any = made(case, place)
    side = None if kind == "cpu" else torch.Stream(place)
    found = []
    for step in range(3):
        loss = model(*batch(step, 0, place))
        loss.backward()
        found.append(loss.detach())
        if side is not None:
            side.wait_stream(torch.accelerator.current_stream(place))
        with torch.no_grad(), side or contextlib.nullcontext():
            for parameter in model.parameters():
                parameter.mul_(0.75)
                parameter.grad = None
        if side is not None:
            model.set_post_optim_event(side.record_event())
    with torch.no_grad():
        found.append(model(*batch(3, 0, place)))
    return _on_the_cpu([*found, *whole_parameters(model)])


def not_finite_on_one_rank(case: Case, kind: str) -> list[torch.Tensor]:
    """A gradient of the last rank has a NaN in the last rank's interval: all leave the step out."""
    place = place_of(kind)
    model: Any = made(case, place)
    model.set_nonfinite_gradients("skip")
    optimizer = optimizer_of(case, model)
    is_bad = False

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[-1] = math.nan if is_bad else gradient[-1]
        return gradient

    def before(head: Any, _: object) -> None:
        if not head.weight._backward_hooks:
            head.weight.register_hook(spoil)

    model.head.register_forward_pre_hook(before)
    found = []
    for step in range(4):
        is_bad = step % 2 == 1 and dist.get_rank() == dist.get_world_size() - 1
        found.append(_step(model, optimizer, step, place))
    return _on_the_cpu([*found, *whole_parameters(model)])


def compare_replicas(case: Case, kind: str) -> list[torch.Tensor]:
    """Ranks compare weights after each step. A bit of one has flipped, which all ranks are told in the next step."""
    place = place_of(kind)
    model: Any = made(case, place)
    model.set_replica_check("raise", every=1)
    optimizer = optimizer_of(case, model)
    found = [_step(model, optimizer, step, place) for step in range(2)]
    with torch.no_grad():
        flipped = model.layers[1].up.weight.local.view(-1)[3:4]
        before = flipped.clone()
        if dist.get_rank() == 1:
            flipped += 1
        with pytest.raises(ReplicaError, match=r"up\.weight"), torch.enable_grad():
            _step(model, optimizer, 2, place)
        flipped.copy_(before)
    return _on_the_cpu([*found, *whole_parameters(model)])


def take_views(case: Case, kind: str) -> list[torch.Tensor]:
    """A layer's method returns rows of its weight, which are in the loss and read after the layer was freed."""
    place = place_of(kind)
    model: Any = made(case, place)
    layer, optimizer = model.layers[0], optimizer_of(case, model)
    layer.rows = lambda: layer.up.weight[1:3]
    register_fsdp_forward_method(layer, "rows")
    found = []
    for step in range(2):
        rows = layer.rows()
        loss = model(*batch(step, 0, place)) + rows.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), rows.detach()]
    return _on_the_cpu([*found, *whole_parameters(model)])


def look_at_whole(case: Case, kind: str) -> list[torch.Tensor]:
    """Between steps: an evaluation, a sequence that is generated, and weights that are read and changed whole."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    found = []
    for step in range(2):
        found.append(_step(model, optimizer, step, place))
        model.eval()
        with torch.no_grad():
            tokens, _ = batch(10 + step, 0, place)
            found.append(model(tokens))
            for _ in range(3):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
            found.append(tokens)
        model.train()
        with unsharded(model, writeback=True), torch.no_grad():
            found.append(model.layers[0].up.weight.sum())
            model.layers[1].down.weight.mul_(0.5)
    return _on_the_cpu([*found, *whole_parameters(model)])


def fail_half_way(case: Case, kind: str) -> list[torch.Tensor]:
    """Backward ends in an exception while gradients are reduced, and the next forward begins anew."""
    place = place_of(kind)
    model: Any = made(case, place)
    _keep_nothing()
    optimizer = optimizer_of(case, model)
    fails = False

    def fail(gradient: torch.Tensor) -> None:
        if fails:
            raise _FailedError

    model.embedding.register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
    found = []
    for step in range(3):
        fails = True
        for _ in range(2):
            with contextlib.suppress(_FailedError):
                model(*batch(step + 5, 0, place)).backward()
        fails = False
        found.append(_step(model, optimizer, step, place))
    return _on_the_cpu([*found, *whole_parameters(model)])


class _FailedError(Exception):
    """Of `fail_half_way`."""


def _keep_nothing() -> None:
    """From now on this rank's groups keep nothing of work that is dropped before anybody has waited."""
    groups: Any = dist.distributed_c10d._world.pg_map
    for group in groups:
        if hasattr(group, "keeps"):  # one of the simulated device
            group.keeps = False


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """One for all ranks, which are threads of this process."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path, src=0, device=torch.device("cpu"))
    try:
        yield Path(path[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])


def save_meanwhile(case: Case, kind: str) -> list[torch.Tensor]:
    """A checkpoint is written while training goes on, and another when it ends; both are loaded."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    found = []
    with shared_folder() as folder:
        saver = AsyncSaver() if dist.get_world_size() == 1 else None  # its messages would be Gloo's
        for step in range(4):
            found.append(_step(model, optimizer, step, place))
            if step == 1 and saver is not None:
                saver.save(folder / "meanwhile", model=model, optimizer=optimizer)
            elif step == 1:
                save_checkpoint(folder / "meanwhile", model=model, optimizer=optimizer)
        if saver is not None:
            saver.wait()
        save_checkpoint(folder / "end", model=model, optimizer=optimizer)
        for name in ("meanwhile", "end"):
            load_checkpoint(folder / name, model=model, optimizer=optimizer)
            found += whole_parameters(model)
            found += [_step(model, optimizer, 4, place), *whole_parameters(model)]
    return _on_the_cpu(found)


def save_to(folder: str, case: Case, kind: str) -> None:
    """Train, and save."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    for step in range(2):
        _step(model, optimizer, step, place)
    save_checkpoint(Path(folder), model=model, optimizer=optimizer)


def go_on_from(folder: str, case: Case, kind: str) -> list[torch.Tensor]:
    """Load, and train."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    load_checkpoint(Path(folder), model=model, optimizer=optimizer)
    found = [_step(model, optimizer, step, place) for step in range(2)]
    return _on_the_cpu([*found, *whole_parameters(model)])


def pretrained(case: Case, kind: str) -> list[torch.Tensor]:
    """A model of Transformers is read into shards, generates, and is trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    place = place_of(kind)
    size = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=None, pad_token_id=1,
        hidden_act="relu",  # the gradient of silu is put together of other kernels on a device without its own
    )  # fmt: skip
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            torch.manual_seed(3)
            LlamaForCausalLM(size).save_pretrained(folder)
        dist.barrier()
        model: Any = fullshard.from_pretrained(LlamaForCausalLM, folder, attn_implementation="eager")
        shard_model(model, unit_modules=list(model.model.layers), device=place, strategy=case.strategy)
    optimizer = optimizer_of(case, model)
    found = []
    for step in range(2):
        tokens, _ = batch(step, 0, place)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)]
    return _on_the_cpu([*found, *whole_parameters(model)])


def shard_what_loses_its_class() -> None:
    """A parameter of several tensors that becomes a plain one when it is copied."""

    class Losing(Coded):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            if func.overloadpacket.__name__ == "_to_copy":
                return func(args[0].plain(), *args[1:], **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    layer: Any = nn.Linear(4, 4)
    codes = Coded.of(layer.weight)
    layer.weight = nn.Parameter(Losing(codes.codes, codes.scales))
    shard_model(layer, unit_modules=[], device=torch.device("simulated", 0))
