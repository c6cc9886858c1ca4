"""Two hosts on one machine: network namespaces with a cable between them. Needs root and `ip` (package iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = tuple(f"fv{os.getpid() % 100000}{letter}" for letter in "ab")
"""The interfaces at its ends."""


def can_have_namespaces() -> bool:
    """Whether this process may make them."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Their names; the addresses are 10.77.0.1 and 10.77.0.2."""
    first, second = names = (f"fs{os.getpid()}a", f"fs{os.getpid()}b")
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for number, (name, end) in enumerate(zip(names, CABLE, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for name in names:
            ip("netns", "del", name)


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
