"""Errors in place of waits that only another rank could end: for a key in a store, or for a value that a rank sends."""

import functools
import inspect
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.api.rehearsal.group import polled, unknown
from fullshard.core.errors import CommunicationError
from fullshard.core.imports import Replaced

GRACE = timedelta(seconds=5)
"""How long a rehearsal waits for a key. A thread of the script may still set it."""

POLLS, POLL_SECONDS, FLAG = 100, 5.0, 16
"""A script that has asked this often, over this many seconds, for a value of at most so many numbers waits for it."""


def replacements() -> dict[Replaced, Callable[..., Any]]:
    """Return replacements for torch's functions that could wait forever."""
    get, multi_get, wait, check, add = (
        Replaced.of(dist.Store, n) for n in ("get", "multi_get", "wait", "check", "add")
    )

    def await_keys(store: Any, keys: list[str], patience: timedelta) -> None:
        try:
            wait.torchs(store, keys, min(patience, GRACE))
        except RuntimeError as error:
            if patience <= GRACE:  # the script expects that the wait may end this way
                raise
            missing = ", ".join(repr(key) for key in keys if not check.torchs(store, [key])) or str(error)
            raise _endless(f"the key {missing} of a store", "has waited for") from error

    def get_keys(place: Replaced) -> Callable[..., Any]:
        def read(store: Any, keys: Any) -> Any:
            await_keys(store, [keys] if isinstance(keys, str) else keys, store.timeout)
            found = place.torchs(store, keys)
            note(f"the key {keys!r} of a store, which stays {found!r}")
            return found

        return functools.wraps(place.torchs)(read)

    def find(store: Any, keys: list[str]) -> bool:
        found: bool = check.torchs(store, keys)
        if not found:
            note(f"the key {', '.join(repr(key) for key in keys if not check.torchs(store, [key]))} of a store")
        return found

    def count(store: Any, key: str, amount: int) -> int:
        total: int = add.torchs(store, key, amount)
        if not amount:
            note(f"the key {key!r} of a store, which stays {total}")
        return total

    return {
        get: get_keys(get),
        multi_get: get_keys(multi_get),
        wait: lambda store, keys, timeout=None: await_keys(store, keys, timeout or store.timeout),
        check: find,
        add: count,
        torch_private.ranks_awaited: lambda *given, **named: None,
        **{place: _receive(place) for place in (Replaced.of(dist, name) for name in ("broadcast", "recv"))},
    }


def note(what: str) -> None:
    """Record that the main thread asks for a value of another rank. Raise a `CommunicationError` if it never stops."""
    if threading.current_thread() is not threading.main_thread():
        return
    now = time.monotonic()
    count, since = polled.get(what, (1, now))
    polled[what] = count + 1, since
    if count >= POLLS and now - since >= POLL_SECONDS:
        raise _endless(what, f"has asked {count} times for")


def _endless(what: str, asks: str) -> CommunicationError:
    unknown[what] += 1
    return CommunicationError(
        f"rank {dist.get_rank() if dist.is_initialized() else 0} {asks} {what}, which another rank would change, but "
        "no other rank exists in a rehearsal",
        hint="skip this wait in a rehearsal, or rehearse the rank that needs no other",
    )


def _receive(place: Replaced) -> Callable[..., Any]:
    """Wrap a function that receives a tensor. A small one is a flag for which the script may wait in a loop."""
    signature = inspect.signature(place.torchs)

    @functools.wraps(place.torchs)
    def receive(*given: Any, **named: Any) -> Any:
        made = place.torchs(*given, **named)
        words = signature.bind(*given, **named).arguments
        tensor, root = words["tensor"], sender(words)
        if root != dist.get_rank() and torch.is_tensor(tensor) and tensor.numel() <= FLAG:
            note(f"{place.name} from rank {root}")
        return made

    return receive


def sender(words: dict[str, Any]) -> int | None:
    """Return the rank that sends, from the arguments of a function of `torch.distributed`."""
    if words.get("group_src") is None:
        root: int | None = words.get("src", 0)
        return root
    return int(dist.get_process_group_ranks(words.get("group") or dist.group.WORLD)[words["group_src"]])
