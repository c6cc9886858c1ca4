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
        CommunicationError: on every rank, naming the first rank that differs from the mesh's first one, rank 0 mostly,
            and the first line that does.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = mesh.all_gather_object(digest)
    different = [place for place, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    everything = mesh.all_gather_object(list(lines))
    one, other_one = mesh.ranks[0], mesh.ranks[different[0]]
    pairs = zip_longest(everything[0], everything[different[0]], fillvalue="(nothing)")
    first, other = next((a, b) for a, b in pairs if a != b)
    raise CommunicationError(
        f"ranks disagree about {what}: rank {one} has [{first}], rank {other_one} has [{other}] ({len(different)} of "
        f"{len(digests)} ranks differ from rank {one})",
        hint=hint,
    )
