"""Data sheet figures for devices and their links, and the fractions of these peaks that training reaches."""

import dataclasses
import difflib
import json
import math
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.switches import COMM
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError, plural
from fullshard.core.files import read_object, write_text
from fullshard.core.paths import local_path
from fullshard.core.sizes import GIB

GB = 10**9
TERA = 10**12

CONTEXT = 2**29
"""Bytes of a device that CUDA's context and kernels use. They took 300 MB with PyTorch (pytorch issue 107667), and 484
MiB on an RTX 3090 together with NCCL's communicator of one rank, which has no buffers (nccl pull request 2366)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator in a typical host. Speeds are peak values per device, in one direction."""

    name: str
    memory: int
    flops: float  # matrix FLOP/s in bfloat16, dense
    flops_fp32: float  # matrix FLOP/s in float32 (TF32 if the device has it)
    memory_bandwidth: float
    link: float  # bytes per second between devices of a host, in one direction
    network: float  # bytes per second between hosts, per device, in one direction
    per_host: int
    source: str
    # Fraction of `flops` that the matrix products of training reach. Large products reach four fifths of the peak on an
    # A100. They reach two thirds on an H100, whose clock slows down under load. The products of a training step reach a
    # sixth less. Elementwise operations are counted separately. For AMD's devices, large products are those of
    # `mamf-finder` (stas00/ml-engineering, compute/accelerator). For the L40S and the cards RTX, they are torch's with
    # 8,192 rows (zzc0721/torch-performance-test-data). Some exceed the data sheet.
    efficiency: float = 0.55
    link_efficiency: float = 0.75  # fraction of `link` and `network` that large transfers reach
    # Device memory in bytes that the runtime and the communication library use on several devices. With one
    # communicator, NCCL took 0.53 to 0.67 GiB on A100 (nccl issue 964) and 1.6 GB elsewhere (issue 864).
    framework: int = 3 * 2**29
    rack: int = 0  # number of devices that `link` connects across hosts, or 0 if it only connects devices of one host
    # Whether `flops` applies to bfloat16, or only to float16. PyTorch has flash attention for the same devices, because
    # on NVIDIA's devices both require compute capability 8.0.
    has_bfloat16: bool = True
    # Fraction of `flops` that FlashAttention 2 reaches (`plan/attention`). It was written for the A100. On the H100 the
    # fraction is smaller, because matrix products are faster there.
    flash: float = 0.59
    host_memory: int = 0  # bytes of memory of a typical host, or 0 if it does not limit a plan
    is_unified: bool = False  # whether the host and its device share one memory, so that offloading saves nothing
    # Fraction of `memory_bandwidth` that PyTorch's operations reach; 0 if it is `link_efficiency`.
    memory_efficiency: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Return whether ranks compute on the host's CPU. If they do, all their work takes CPU time."""
        return self.framework == 0

    @property
    def can_offload(self) -> bool:
        """Return whether host memory is another memory than the device's."""
        return not (self.is_cpu or self.is_unified)

    @property
    def memory_speed(self) -> float:
        """The memory bandwidth that large transfers reach, in bytes per second."""
        return self.memory_bandwidth * (self.memory_efficiency or self.link_efficiency)

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in a dtype."""
        return self.flops_fp32 if itemsize(dtype) == 4 else self.flops

    def link_seconds(self, inside: float, across: float) -> tuple[float, float]:
        """Return the seconds that `inside` bytes take within a host, and that `across` bytes take between hosts."""
        return inside / (self.link * self.link_efficiency), across / (self.network * self.link_efficiency)


def _device(name: str, row: dict[str, Any]) -> Device:
    """Build a device from its row in `devices.toml`, which explains the units."""
    given = {key: value for key, value in row.items() if key in Device.__dataclass_fields__}
    flops, flops_fp32 = (TERA * value for value in row["flops"])
    speeds = {"memory_bandwidth": row["bandwidth"] * GB, "link": row["link"] * GB, "network": row["network"] * GB}
    sizes = {"memory": round(row["memory"] * GB), "host_memory": row.get("host_memory", 0) * GIB}
    return Device(**{"name": name, "per_host": 8, **given, **speeds, **sizes, "flops": flops, "flops_fp32": flops_fp32})


_ROWS = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))

DEVICES: dict[str, Device] = {name: _device(name, row) for name, row in _ROWS.items()}

_ALIASES = {alias: name for name, row in _ROWS.items() for alias in row.get("aliases", ())}
_BRANDS = ("nvidia", "amd", "instinct", "geforce", "tesla")


def find_device(name: str) -> Device:
    """Return the device with this name, in any common spelling, or read it from a calibration file (`.json`)."""
    if name.endswith(".json"):
        return read_calibration(local_path(name))
    found = _row_called(name)
    if found is None and re.match(r"(apple)?m[1-9](pro|max|ultra)?$", _key(name)):
        raise ConfigError(
            f"{name} is not supported: PyTorch has no collectives for Apple's GPUs",
            hint="plan for the processor's cores: measure them with --calibrate, or use 2xCPU",
        )
    if found is None:
        by_key = _names()
        close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.6)
        shown = {by_key[key]: None for key in close} or DEVICES
        names = ", ".join(f"{known} ({DEVICES[known].memory / GIB:.0f} GiB)" for known in shown)
        raise ConfigError(
            f"unknown hardware {name!r}",
            hint=textwrap.fill(f"{'did you mean' if close else 'use one of'} {names}; or --calibrate", 74),
        )
    return DEVICES[found]


_FORM = re.compile(r"[-_ ](?:sxm\d?|hbm\d?e?|ac)(?=[-_ ]|$)", re.IGNORECASE)
_MEMORY = re.compile(r"[-_ ](\d+) ?gi?b(?=[-_ ]|$)", re.IGNORECASE)


def _row_called(name: str) -> str | None:
    """Return the name of the `DEVICES` row that matches `name`, or None if there is no such row.

    `name` may be the name that a driver reports, such as `NVIDIA A100-SXM4-40GB` or `NVIDIA H100 80GB HBM3`. If it
    contains a memory size, that size must match the row. The row may state up to 10 % more, because drivers report GiB.
    """
    by_key, plain = _names(), _FORM.sub("", name)
    found = by_key.get(_key(name)) or by_key.get(_key(plain))
    memory = _MEMORY.search(plain)
    if found is None and memory is not None:
        found = by_key.get(_key(_MEMORY.sub("", plain)))
        if found is not None and not 0.95 < DEVICES[found].memory / (int(memory[1]) * GB) < 1.1:
            return None
    return found


def _names() -> dict[str, str]:
    """Return a mapping from every spelling of a row's name, without punctuation and brands, to the row's name."""
    return {_key(known): known for known in DEVICES} | _ALIASES


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for brand in _BRANDS:
        key = key.removeprefix(brand)
    return key


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of equal devices on one or more hosts."""

    device: Device
    count: int
    hosts: int
    shares_memory: bool = True  # whether ranks on one host's CPUs share memory (not if FULLSHARD_COMM=gloo)

    @property
    def per_host(self) -> int:
        """The number of devices on each host."""
        return self.count // self.hosts

    @property
    def framework(self) -> int:
        """The bytes of each device that the runtime uses, and on several devices the communication library."""
        return min(CONTEXT, self.device.framework) if self.count == 1 else self.device.framework

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name} in {plural(self.hosts, 'host')}"


def split_devices(text: str) -> tuple[int | None, str]:
    """Split `8xH100`, `8*H100`, `8 H100`, `H100x8` or `H100:8` into number and kind. A lone kind has None."""
    text = text.strip()
    if _key(text) in _names():
        return None, text
    if text.isdecimal():
        raise ConfigError(
            f"devices {text!r} is a number without a kind of device", hint=f"add the kind, for example {text}xH100"
        )
    turned = re.fullmatch(r"(\S.*?)\s*[x*:\N{MULTIPLICATION SIGN}]\s*([1-9]\d*)", text, re.IGNORECASE)
    if turned is not None and _key(turned[1]) in _names():
        return int(turned[2]), turned[1]
    match = re.fullmatch(r"(?:(\d+)(?:\s*[x*\N{MULTIPLICATION SIGN}]\s*|\s+|(?=[^\W\d])))?(\S.*)", text, re.IGNORECASE)
    if match is None or match[1] == "0":
        raise ConfigError(
            f"devices must be a number and a kind of device, got {text!r}", hint="use a value such as 8xH100"
        )
    return None if match[1] is None else int(match[1]), match[2]


def parse_cluster(text: str, hosts: int | None = None, host_memory: int | None = None) -> Cluster:
    """Return the cluster of a text such as `8xH100`, on few hosts, by default with a typical host's memory in bytes."""
    number, name = split_devices(text)
    device, count = find_device(name), number or 1
    if hosts is None:
        hosts = max(1, -(-count // device.per_host))
    if hosts < 1 or count % hosts:
        raise ConfigError(
            f"{plural(count, 'device')} cannot be divided evenly among {plural(hosts, 'host')}",
            hint="use a multiple of the number of hosts",
        )
    if host_memory is not None and host_memory < GIB:
        raise ConfigError(f"the memory of a host is {host_memory} bytes", hint="add a unit, as in 512GiB")
    if host_memory is not None and not device.can_offload:
        raise ConfigError(
            f"the memory of a host cannot be set for {device.name}, which computes in it", hint="remove --host-memory"
        )
    if host_memory is not None:
        device = dataclasses.replace(device, host_memory=host_memory)
    if hosts > 1 and count <= device.rack:
        device = dataclasses.replace(device, network=device.link)
    return Cluster(device, count, hosts, shares_memory=COMM.read() != "gloo")


def check_rank(rank: int, count: int) -> None:
    """Raise `ConfigError` if a job of `count` ranks does not have a rank with this number."""
    if not 0 <= rank < count:
        raise ConfigError(f"a job of {plural(count, 'rank')} has no rank {rank}", hint="ranks are numbered from 0")


def write_calibration(device: Device, path: Path) -> None:
    """Write a device's measured speeds to a JSON file that `find_device` can read."""
    write_text(path, json.dumps(dataclasses.asdict(device), indent=2) + "\n")


def read_calibration(path: Path) -> Device:
    """Read a device from a file that `write_calibration` wrote."""
    try:
        device = Device(**read_object(path))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a calibration file: {error}", hint="create one with fullshard plan --calibrate"
        ) from None
    needed = ("memory", "flops", "flops_fp32", "memory_bandwidth", "link", "network", "per_host", "efficiency")
    wrong = [name for name in needed if not _is_finite(getattr(device, name)) or getattr(device, name) <= 0]
    wrong += ["rack"] if not _is_finite(device.rack) or device.rack < 0 else []
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} must be positive", hint="calibrate again")
    return device


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
