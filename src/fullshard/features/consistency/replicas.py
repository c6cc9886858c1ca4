"""Compare the weights of replicas, and find the parameter and the rank if a bit has flipped.

Each rank sums its weights as 64-bit integers in one pass, which detects any single flipped bit. Parameters are compared
one by one only if these sums differ. The values that most replicas hold are taken as correct.
"""

import hashlib
from collections import Counter

import torch

from fullshard.comm import torch_private
from fullshard.core.errors import ReplicaError, first_of, plural
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.process import this_process
from fullshard.engine.kinds import inner_tensors
from fullshard.engine.schedule import Schedule

_SHOWN = 3
_FACTOR = 1_000_003


@torch.no_grad()
def digest(model: Schedule) -> int:
    """Return a signed 64-bit digest of this rank's weights. It changes if any single bit of them flips."""
    stored = [tensor for unit in model.units for bucket in unit.buckets for tensor in bucket.stored]
    parts = [_sum(tensor).to(model.mesh.device) for tensor in stored]
    found = 0
    for part in torch.stack(parts).tolist() if parts else ():
        found = (found * _FACTOR + part) & (2**64 - 1)  # an odd factor loses no bit
    return found - 2**64 if found >= 2**63 else found


def find_difference(model: Schedule) -> None:
    """Raise a `ReplicaError` on all ranks if a parameter differs between replicas. This is a collective."""
    mesh, names, odd, is_even = model.mesh, dict[str, None](), dict[int, str](), False
    found = mesh.all_gather_object((mesh.rank, mesh.shard_rank, this_process(), _hashes(model)))
    for column in range(mesh.shard_size):
        held = [(rank, where, hashes) for rank, place, where, hashes in found if place == column]
        for name in held[0][2]:
            values = [hashes[name] for _, _, hashes in held]
            right, count = Counter(values).most_common(1)[0]
            if count == len(values):
                continue
            names[name] = None
            is_draw = 2 * count <= len(values)
            is_even |= is_draw
            odd |= {r: where for (r, where, _), v in zip(held, values, strict=True) if is_draw or v != right}
    if not names:
        return
    ranks = " and ".join(f"rank {rank} ({odd[rank]})" for rank in sorted(odd))
    text = f"replicas hold different weights: {first_of(list(names), _SHOWN)} of {ranks}"
    text += "" if is_even else f", unlike {plural(mesh.replicate_size - 1, 'other replica')}"
    if mesh.is_first:  # before the error ends the run, so that the report contains this
        JOURNAL.note(Happening.REPLICA, text, rank=min(odd), ranks=sorted(odd), parameters=list(names)[:_SHOWN])
    hint = "the replicas are evenly split, so the correct values are unknown: " if is_even else ""
    raise ReplicaError(
        f"rank {mesh.rank}, step {model.steps + 1} of this process: {text}",
        hint=f"{hint}resume from a checkpoint; if the same host is reported repeatedly, its memory is probably faulty",
    )


@torch.no_grad()
def _hashes(model: Schedule) -> dict[str, bytes]:
    """Return a hash of this rank's part of each parameter, keyed by parameter name."""
    found = {}
    for unit in model.units:
        for bucket in unit.buckets:
            for index, parameter in enumerate(bucket.sharded_parameters):
                weights = bucket.weights(index)
                is_plain = not torch_private.has_own_dispatch(type(weights))
                hashed = hashlib.blake2b(digest_size=8)
                for tensor in [weights] if is_plain else inner_tensors(weights).values():
                    values = tensor.detach().reshape(-1, 1).view(torch.uint8)
                    hashed.update(values.cpu().contiguous().numpy().data)
                found[parameter.name] = hashed.digest()
    return found


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum of the tensor's contents, which changes if any single bit flips."""
    words = torch.int64 if tensor.nbytes % 8 == tensor.storage_offset() * tensor.itemsize % 8 == 0 else torch.uint8
    return tensor.detach().reshape(-1).view(words).sum(dtype=torch.int64)
