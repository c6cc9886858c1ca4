"""Checks that all ranks are about to do the same, before a disagreement becomes a hang or wrong numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from fullshard.comm.mesh import Mesh
from fullshard.core.errors import CommunicationError

_HINT = "build the same model from the same configuration, and load the same weights, on every rank"


def check_agreement(mesh: Mesh, lines: Sequence[str], *, what: str, hint: str = _HINT) -> None:
    """Compare `lines` over all ranks by digest; a collective.

    Raises:
        CommunicationError: on every rank, naming the first rank that differs from rank 0 and the first line that does.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = mesh.all_gather_object(digest)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    everything = mesh.all_gather_object(list(lines))
    rank = different[0]
    pairs = zip_longest(everything[0], everything[rank], fillvalue="(nothing)")
    first, other = next((a, b) for a, b in pairs if a != b)
    raise CommunicationError(
        f"ranks disagree about {what}: rank 0 has [{first}], rank {rank} has [{other}] ({len(different)} of "
        f"{len(digests)} ranks differ from rank 0)",
        hint=hint,
    )
