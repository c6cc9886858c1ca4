"""Devices and the links between them, from the makers' data sheets, and how much of that real training reaches."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator, in a host as it is usually built. Speeds are peaks, per device and direction.

    Attributes:
        name: for people.
        memory: bytes.
        flops: matrix FLOP/s in bfloat16, dense.
        flops_fp32: matrix FLOP/s in float32 (TF32 where the device has it).
        memory_bandwidth: bytes per second.
        link: bytes per second between devices of a host, one direction.
        network: bytes per second between hosts, per device, one direction.
        per_host: devices in a host.
        source: where the figures come from.
        efficiency: part of `flops` that matrix products of training reach: large products reach four fifths of the peak
            on an A100 and two thirds on an H100, whose clock falls under load; a step's mix a sixth less. Elementwise
            work is counted apart.
        link_efficiency: part of `link`, `network` and `memory_bandwidth` that large transfers reach.
        framework: bytes the runtime and the communication library hold on the device.
        fresh_bandwidth: bytes per second at which memory new to the process is written, on a CPU; 0: not counted.
        replicate_link: bytes per second in an all-reduce inside a host, where that takes another way; 0: `link`.
        op_seconds: what an operation costs however small it is, where nothing else runs meanwhile: on a CPU.
        unit_seconds: what the engine costs per unit and micro-batch, hooks and starting collectives, on a CPU.
    """

    name: str
    memory: int
    flops: float
    flops_fp32: float
    memory_bandwidth: float
    link: float
    network: float
    per_host: int
    source: str
    efficiency: float = 0.55
    link_efficiency: float = 0.75
    framework: int = 3 * 2**29
    fresh_bandwidth: float = 0.0
    replicate_link: float = 0.0
    op_seconds: float = 0.0
    unit_seconds: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on the host's processors, so that whatever they do takes their time."""
        return self.framework == 0


def _gpu(
    name: str,
    memory: float,
    flops: tuple[float, float],
    bandwidth: float,
    link: float,
    network: float,
    source: str,
    efficiency: float = 0.55,
) -> Device:
    """Memory in GB, FLOP/s in TFLOP/s (bf16, fp32), bandwidths in GB/s."""
    per_host = 8 if link > 64 else 4
    speeds = (flops[0] * TERA, flops[1] * TERA, bandwidth * GB, link * GB, network * GB)
    return Device(name, round(memory * GB), *speeds, per_host, source, efficiency)


_A100 = "NVIDIA A100 data sheet 2022; 8 x 200 Gb/s per host (DGX A100)"

# Memory is what the driver reports where it is less than the name says (40 GB: 39.6 GiB and so on).
_ALL = (
    _gpu("A100-40", 42.3, (312, 156), 1555, 300, 25, _A100, 0.67),
    _gpu("A100-80", 84.9, (312, 156), 2039, 300, 25, _A100, 0.67),
    _gpu("H100", 85.0, (989, 494), 3350, 450, 50, "NVIDIA H100 SXM data sheet; 8 x 400 Gb/s per host (DGX H100)"),
    _gpu("H200", 150.1, (989, 494), 4800, 450, 50, "NVIDIA H200 SXM data sheet; 8 x 400 Gb/s per host (DGX H200)"),
    _gpu("B200", 191.5, (2250, 1125), 8000, 900, 50, "NVIDIA DGX B200 data sheet; 8 x 400 Gb/s per host"),
    _gpu("MI300X", 205.8, (1307, 653), 5300, 448, 50, "AMD Instinct MI300X data sheet; 8 x 400 Gb/s per host"),
    _gpu("L40S", 48.3, (362, 183), 864, 32, 12.5, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
    _gpu("RTX4090", 25.4, (165, 82.6), 1008, 32, 3.1, "NVIDIA Ada architecture paper; PCIe 4.0 x16, 25 Gb/s"),
    _gpu("RTX3090", 25.4, (71, 35.6), 936, 16, 3.1, "NVIDIA Ampere GA102 paper; PCIe 4.0 x8 each of two, 25 Gb/s"),
    _gpu("A10G", 23.7, (70, 35), 600, 16, 3.1, "NVIDIA A10 data sheet, AWS g5; PCIe 4.0 x8, 25 Gb/s"),
    Device(
        "TPU-v5e", 16 * GB, 197 * TERA, 98 * TERA, 819 * GB, 50 * GB, 50 * GB, 256,
        "Google Cloud TPU v5e page: 1,600 Gb/s of links per chip, 4 directions; a slice is one host here",
    ),
    Device(
        "TPU-v5p", 95 * GB, 459 * TERA, 229 * TERA, 2765 * GB, 150 * GB, 150 * GB, 8960,
        "Google Cloud TPU v5p page: 4,800 Gb/s of links per chip, 6 directions; a pod is one host here",
    ),
    Device(
        "CPU", 16 * GB, 0.1 * TERA, 0.1 * TERA, 20 * GB, 2 * GB, 1 * GB, 2,
        "a two-core server of 2020 with AVX-512, float32; measure yours with --calibrate",
        framework=0,
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}

_ALIASES = {
    "a100": "A100-80",
    "a10080gb": "A100-80",
    "a10040gb": "A100-40",
    "h10080gb": "H100",
    "h10080": "H100",
    "4090": "RTX4090",
    "3090": "RTX3090",
    "v5e": "TPU-v5e",
    "v5p": "TPU-v5p",
}


def find_device(name: str) -> Device:
    """The row for a name in any spelling, or the calibration file at that path.

    Raises:
        ConfigError: neither; with suggestions.
    """
    if name.endswith(".json"):
        return read_calibration(local_path(name))
    by_key = _names()
    found = by_key.get(_key(name))
    if found is None:
        close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.4)
        names = ", ".join(dict.fromkeys(by_key[key] for key in close)) if close else ", ".join(DEVICES)
        raise ConfigError(
            f"unknown hardware {name!r}", hint=f"{'did you mean ' if close else 'known are '}{names}; or --calibrate"
        )
    return DEVICES[found]


def _names() -> dict[str, str]:
    """Every spelling without marks, and the row it names."""
    return {_key(known): known for known in DEVICES} | _ALIASES


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True, slots=True)
class Cluster:
    """Some devices of one kind.

    Attributes:
        device: the kind.
        count: devices, which is the number of ranks.
        hosts: how many hosts they are in.
    """

    device: Device
    count: int
    hosts: int

    @property
    def per_host(self) -> int:
        """Devices in each host."""
        return self.count // self.hosts

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name} in {self.hosts} host{'s' if self.hosts > 1 else ''}"


def split_devices(text: str) -> tuple[int | None, str]:
    """How many and of what: `8xH100`, `8*H100`, `8 H100`, `8H100`; `H100`, or `4090`, says nothing of how many.

    Raises:
        ConfigError: another form.
    """
    text = text.strip()
    if _key(text) in _names():
        return None, text
    match = re.fullmatch(r"(?:(\d+)(?:\s*[x*\N{MULTIPLICATION SIGN}]\s*|\s+|(?=[^\W\d])))?(\S.*)", text, re.IGNORECASE)
    if match is None or match[1] == "0":
        raise ConfigError(f"devices {text!r}: expected a number and a kind", hint="write it as 8xH100")
    return None if match[1] is None else int(match[1]), match[2]


def parse_cluster(text: str, hosts: int | None = None) -> Cluster:
    """`8xH100`, `1024 x h100`, `8 H100` or `H100` (one).

    Args:
        text: how many of what.
        hosts: in how many hosts; None: full hosts of the usual size, or one that is not full.

    Raises:
        ConfigError: another form, unknown hardware, or devices that the hosts cannot share equally.
    """
    number, name = split_devices(text)
    device, count = find_device(name), number or 1
    if hosts is None:
        hosts = max(1, -(-count // device.per_host))
    if hosts < 1 or count % hosts:
        raise ConfigError(
            f"{count} devices cannot be shared equally by {hosts} hosts", hint="use a multiple of the hosts"
        )
    return Cluster(device, count, hosts)


def write_calibration(device: Device, path: Path) -> None:
    """Write a device's figures as JSON, for `find_device`."""
    path.write_text(json.dumps(dataclasses.asdict(device), indent=2) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> Device:
    """A device from a file that `write_calibration` wrote.

    Raises:
        ConfigError: the file cannot be read, or does not hold a device's figures.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        device = Device(**values)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no calibration: {error}", hint="make one with fullshard plan --calibrate") from None
    wrong = [
        name
        for name in ("memory", "flops", "flops_fp32", "memory_bandwidth", "link", "network", "per_host", "efficiency")
        if not isinstance(getattr(device, name), int | float) or getattr(device, name) <= 0
    ]
    optional = ("fresh_bandwidth", "replicate_link", "op_seconds", "unit_seconds")
    wrong += [name for name in optional if not isinstance(getattr(device, name), int | float)]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} must be positive", hint="calibrate again")
    return device
