"""Programs that divide sequences or experts among ranks, as those of `tests.simulated.features`.

With one rank, a program trains on whole batches: the reference for the others. Ranks are threads of one process here,
so what a library keeps once per process is kept for each rank by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections import UserList, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fullshard.api import context_parallel as ours
from fullshard.features import clip_grad_norm_, shard_model
from fullshard.features.sequence_parallel import cut_batch, split_sequences
from fullshard.integrations.transformers import at_load
from tests.distributed import place_of
from tests.simulated.features import shared_folder
from tests.simulated.training import OFFLOADS, Case, whole_parameters

TOKENS, LENGTH, ROWS, STEPS = 32, 8, 4, 3
SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
    "hidden_act": "relu",  # as in `tests.simulated.features.pretrained`
}  # fmt: skip

EXPERTS = {"moe_intermediate_size": 8, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2}


def after_step(place: torch.device) -> None:
    """Called after each step. Tests replace it."""


def context_parallel(case: Case, kind: str) -> list[torch.Tensor]:
    """torch cuts the sequences, and attention gathers keys and values."""
    place = place_of(kind)
    model: Any = _llama("sdpa")
    if case.ranks > 1:
        ours.prepare(model, "allgather")
    _shard(model, case, place)
    mesh = init_device_mesh(kind, (case.ranks,))

    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = _batch(step, place)
        cut = ours.divided(mesh, [tokens, targets], [1, 1], {tokens, targets})
        with cut if case.ranks > 1 else contextlib.nullcontext():
            loss: torch.Tensor = model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
            loss.backward()
        return loss

    _patch_by_rank()
    return _train(model, loss_of, place)


def sequence_parallel(case: Case, kind: str) -> list[torch.Tensor]:
    """Ranks exchange heads for parts of sequences, which are padded on the right."""
    place = place_of(kind)
    model: Any = _llama("eager")
    if case.ranks > 1:
        split_sequences(model, dist.group.WORLD)  # type: ignore[arg-type]
        # The masks of a forward are those of the model that entered its forward last: a rank, here.
        model.model.layers[0].register_forward_pre_hook(lambda *_: dist.barrier())
    _shard(model, case, place)

    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = _batch(step, place)
        real = torch.arange(LENGTH, device=place) < LENGTH - torch.arange(ROWS, device=place)[:, None]
        batch: dict[str, Any] = {"input_ids": tokens, "attention_mask": real.long()}
        batch["shift_labels"] = targets.where(real, -100)
        if case.ranks > 1:
            batch = cut_batch(batch, rank=dist.get_rank(), size=case.ranks)
        labels = batch["shift_labels"]
        loss: torch.Tensor = model(**batch, labels=labels, num_items_in_batch=real.sum(), use_cache=False).loss
        loss = loss * case.ranks
        loss.backward()
        return loss

    return _train(model, loss_of, place)


def expert_parallel(case: Case, kind: str) -> list[torch.Tensor]:
    """Transformers sends tokens to the ranks of their experts, beneath the engine."""
    place = place_of(kind)
    kernels: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = Qwen3MoeConfig(**SHAPE, **kernels, **EXPERTS)
    torch.manual_seed(3)
    model: Any = Qwen3MoeForCausalLM(config)
    sizes = {"fsdp_size": case.ranks, "ep_size": 2, "fsdp_cpu_offload": case.offload == "everything"}
    if case.ranks > 1:
        with shared_folder() as folder:
            model.save_pretrained(folder)  # which only the first rank does
            dist.barrier()
            vars(at_load)["current"] = lambda: torch.device(kind)  # the same for all ranks, which are threads
            model = at_load.load_sharded(Qwen3MoeForCausalLM, folder, sizes, dtype=torch.float32, **kernels)
    else:
        _shard(model, case, place)

    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = _batch(step, place)
        rows = slice(dist.get_rank(), None, case.ranks)
        logits = model(input_ids=tokens[rows], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten())
        loss.backward()
        return loss

    return _train(model, loss_of, place)


def _llama(attention: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=attention))
    return model


def _shard(model: Any, case: Case, place: torch.device) -> None:
    policy = OFFLOADS[case.offload](activations=case.activations == "on host")
    shard_model(model, unit_modules=list(model.model.layers), device=place, offload_policy=policy)


def _batch(step: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the next ones, the same on all ranks."""
    tokens = torch.randint(2, TOKENS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)).to(place)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _train(model: Any, loss_of: Callable[[int], torch.Tensor], place: torch.device) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    found = []
    for step in range(STEPS):
        found.append(loss_of(step).detach())
        found.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
        after_step(place)
    return [value.cpu() for value in (*found, *whole_parameters(model))]


# -- what is patched for all of a process, by rank ----------------------------------------------------------------


class _OfEachRank:
    """A module of which every rank changes the attributes for itself."""

    def __init__(self, module: Any) -> None:
        vars(self).update(module=module, before=dict(vars(module)), own=defaultdict(dict))

    def __getattr__(self, name: str) -> Any:
        from tests.simulated.group import rank_here

        return self.own[rank_here()].get(name, self.before[name])

    def __setattr__(self, name: str, value: Any) -> None:
        from tests.simulated.group import rank_here

        self.own[rank_here()][name] = value


class _ListOfEachRank(UserList[Any]):
    def __init__(self) -> None:
        self.own: dict[int, list[Any]] = defaultdict(list)

    @property
    def data(self) -> list[Any]:  # type: ignore[override]
        from tests.simulated.group import rank_here

        return self.own[rank_here()]


@functools.cache
def _patch_by_rank() -> None:
    """Have every rank patch torch's attention for itself, and keep its own blocks, for good in this process."""
    by_rank: Any = _OfEachRank(functional)

    def attention(*args: Any, **kwargs: Any) -> Any:
        return by_rank.scaled_dot_product_attention(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    ours.F = torchs.F = by_rank
    vars(ours)["_BLOCKS"] = _ListOfEachRank()
    torch.backends.cuda.enable_flash_sdp(False)  # also that of CPUs, which is another kernel than the device's
