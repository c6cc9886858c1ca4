"""The addresses and interfaces of this host."""

import errno
import ipaddress
import socket
import sys
import time

import psutil

from fullshard.core.errors import ConfigError

DEFAULT_PORT = 29500
"""The rendezvous port if no port is given."""


def resolve(host: str, timeout_seconds: float) -> str:
    """Return the address of `host`. Retry, because a cluster may be starting, and raise `ConfigError` in the end."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            # Prefer IPv4, which Gloo and NCCL also try first.
            return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"main_process_ip is {host}, which cannot be resolved: {error.strerror}",
                    hint="set it to the address of the host with machine rank 0",
                ) from None
            time.sleep(0.5)


def listen(address: str, port: int, *, must: bool) -> socket.socket | None:
    """Open a socket that listens only on `address`. Unless `must`, return None if it is in use or another host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if not must and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        if error.errno == errno.EADDRNOTAVAIL:
            hint = f"{address} is not an address of this host; correct the address or the machine rank"
        else:
            hint = "give another main_process_port on every host, because another job may be using this one"
        raise ConfigError(f"cannot listen on {address} port {port}: {error.strerror}", hint=hint) from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with `address`, for Gloo, or None if the system does not provide it."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    wanted = str(ipaddress.ip_address(address))
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == wanted.partition("%")[0] for each in found):
            return str(name)
    return None
