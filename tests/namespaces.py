"""Hosts on one machine: network namespaces with cables to one bridge. Needs root and `ip` (package iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = os.getpid() % 100000


def can_have_namespaces() -> bool:
    """Whether this process may make them."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def cable_of(host: int) -> str:
    """The interface of a host, the first of which is 0."""
    return f"fv{_OWN}n{host}"


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Their names; the addresses are 10.77.0.1, 10.77.0.2 and so on."""
    # The bridge has a namespace of its own, so nothing of it is seen outside.
    switch, *names = bridge(), *(f"fs{os.getpid()}{number}" for number in range(count))
    for name in (switch, *names):
        ip("netns", "add", name)
    try:
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            end = cable_of(host)
            ip("-n", switch, "link", "add", f"to{host}", "type", "veth", "peer", "name", end, "netns", name)
            ip("-n", switch, "link", "set", f"to{host}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in (switch, *names):
            ip("netns", "del", name)


def bridge() -> str:
    """The namespace with the other ends of the cables, `to0`, `to1` and so on, while there are namespaces."""
    return f"fs{os.getpid()}bridge"


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
