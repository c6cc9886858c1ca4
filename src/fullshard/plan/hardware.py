"""Data sheet figures for devices and their links, and the fractions of these peaks that training reaches."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.switches import COMM
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_object, write_text
from fullshard.core.paths import local_path
from fullshard.core.sizes import GIB

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator in a typical host. Speeds are peak values per device, in one direction.

    Attributes:
        flops: matrix FLOP/s in bfloat16, dense.
        flops_fp32: matrix FLOP/s in float32 (TF32 if the device has it).
        link: bytes per second between devices of a host, in one direction.
        network: bytes per second between hosts, per device, in one direction.
        efficiency: fraction of `flops` that the matrix products of training reach. Large products reach four fifths of
            the peak on an A100. They reach two thirds on an H100, whose clock slows down under load. The products of a
            training step reach a sixth less. Elementwise operations are counted separately. For AMD's devices, large
            products are those of `mamf-finder` (stas00/ml-engineering, compute/accelerator). For the L40S and the cards
            RTX, they are torch's with 8,192 rows (zzc0721/torch-performance-test-data). Some exceed the data sheet.
        link_efficiency: fraction of `link`, `network` and `memory_bandwidth` that large transfers reach.
        framework: device memory in bytes that the runtime and the communication library use.
        rack: number of devices that `link` connects across hosts, or 0 if it only connects devices of one host.
        has_bfloat16: whether `flops` applies to bfloat16, or only to float16. PyTorch has flash attention for the same
            devices, because on NVIDIA's devices both require compute capability 8.0.
        host_memory: bytes of memory of a typical host, or 0 if it does not limit a plan.
        is_unified: whether the host and its device share one memory, so that offloading saves nothing.
        flash: fraction of `flops` that FlashAttention 2 reaches (`plan/attention`). It was written for the A100. On the
            H100 the fraction is smaller, because matrix products are faster there.
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
    rack: int = 0
    has_bfloat16: bool = True
    flash: float = 0.59
    host_memory: int = 0
    is_unified: bool = False

    @property
    def is_cpu(self) -> bool:
        """Return whether ranks compute on the host's CPU. All their work then takes the host's time."""
        return self.framework == 0

    @property
    def can_offload(self) -> bool:
        """Return whether host memory is another memory than the device's."""
        return not (self.is_cpu or self.is_unified)

    @property
    def memory_speed(self) -> float:
        """The memory bandwidth that large transfers reach, in bytes per second."""
        return self.memory_bandwidth * self.link_efficiency

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in a dtype."""
        return self.flops_fp32 if itemsize(dtype) == 4 else self.flops

    def link_seconds(self, inside: float, across: float) -> tuple[float, float]:
        """Return the seconds that `inside` bytes take within a host, and that `across` bytes take between hosts."""
        return inside / (self.link * self.link_efficiency), across / (self.network * self.link_efficiency)


def _gpu(
    name: str,
    memory: float,
    flops: tuple[float, float],
    bandwidth: float,
    link: float,
    network: float,
    source: str,
    efficiency: float = 0.55,
    **more: Any,
) -> Device:
    """Build the table row of a GPU: memory in GB, FLOP/s in TFLOP/s (bf16, fp32), bandwidths in GB/s."""
    speeds = (flops[0] * TERA, flops[1] * TERA, bandwidth * GB, link * GB, network * GB)
    more["host_memory"] = round(
        more.pop("host", _HOSTS.get(name.rpartition("-")[0] or name, _HOSTS.get(name, 256))) * GIB
    )
    return Device(name, round(memory * GB), *speeds, more.pop("per_host", 8), source, efficiency, **more)


_DGX = 2000 * GB / GIB
_HOSTS = {
    "A100": 1152, "A800": 1152, "H100": _DGX, "H800": _DGX, "H20": _DGX, "H200": _DGX, "B200": _DGX, "B300": _DGX,
    "GB200": 960 * GB / GIB, "GB300": 960 * GB / GIB, "MI300X": 1850, "MI325X": 2048, "MI355X": 3072,
    "L40S": 1536, "L40": 1024, "L4": 768, "A10G": 768, "A40": 512, "V100": 768, "V100-16": 488, "T4": 384,
    "RTX5090": 64, "RTX4090": 64, "RTX3090": 64,
}  # fmt: skip
"""GiB of memory of a typical host, by name of the device. H100 to B300: NVIDIA's DGX data sheets (2 TB). GB200, GB300:
480 GB for each of two Grace processors (NVIDIA's NVL72 page). Cloud instances: A100 p4d and p4de, L40S g6e, L4 g6, A10G
g5, V100 p3dn and p3, T4 g4dn.metal (AWS, largest size), MI300X ND MI300X v5 (Azure), MI355X BM.GPU.MI355X (Oracle).
Assumptions: 64 for consumer cards, 256 for workstation cards, and A800, H800, H20, MI325X, L40 and A40 as comparable
servers. `--host-memory` says otherwise."""


_A100 = "NVIDIA A100 data sheet 2022; 8 x 200 Gb/s per host (DGX A100)"
_A100_PCIE = "NVIDIA A100 data sheet 2022, PCIe 4.0 x16 (without bridges); 200 Gb/s per host and pair"
_IN_A_RACK = "links reach 72 in a rack, 4 in a host; between racks"

_FASTER: dict[str, Any] = {"flash": 0.305}  # measured on an H100, assumed for AMD's
_BLACKWELL: dict[str, Any] = {"flash": 0.9 * 358 / 2250}  # version 2 with heads of 128: tritonbench, pull request 171

# Memory is as the driver reports it if that is less than the name suggests (39.6 GiB for 40 GB).
_ALL = (
    _gpu("A100-40", 42.3, (312, 156), 1555, 300, 25, _A100, 0.67),
    _gpu("A100-80", 84.9, (312, 156), 2039, 300, 25, _A100, 0.67),
    _gpu("A100-PCIe", 84.9, (312, 156), 1935, 32, 12.5, _A100_PCIE, 0.6),
    _gpu("A800", 84.9, (312, 156), 2039, 200, 25, "NVIDIA A800 data sheet 2022: an A100 with 400 GB/s of NVLink", 0.67),
    _gpu("H100", 85.0, (989, 494), 3350, 450, 50, "NVIDIA H100 SXM data sheet; 8 x 400 Gb/s per host", **_FASTER),
    _gpu("H100-PCIe", 85.0, (756, 378), 2000, 64, 25, "NVIDIA H100 PCIe data sheet; PCIe 5.0 x16", **_FASTER),
    _gpu("H100-NVL", 100.2, (835, 417), 3938, 64, 25, "NVIDIA H100 NVL data sheet; PCIe 5.0 x16", **_FASTER),
    _gpu("H800", 85.0, (989, 494), 3350, 200, 50, "NVIDIA H800 SXM data sheet 2023: an H100 with 400 GB/s of NVLink",
         **_FASTER),
    _gpu("H20", 102.6, (148, 74), 4000, 450, 50, "NVIDIA H20 data sheet 2023; 8 x 400 Gb/s per host", 0.8),
    _gpu("H200", 150.1, (989, 494), 4800, 450, 50, "NVIDIA H200 SXM data sheet; 8 x 400 Gb/s per host (DGX H200)",
         **_FASTER),
    _gpu("H200-NVL", 150.1, (835, 417), 4800, 64, 25, "NVIDIA H200 NVL data sheet 2024; PCIe 5.0 x16", **_FASTER),
    _gpu("B200", 191.5, (2250, 1125), 8000, 900, 50, "NVIDIA DGX B200 data sheet; 8 x 400 Gb/s per host", **_BLACKWELL),
    _gpu("B300", 287.4, (2250, 1125), 8000, 900, 100, "NVIDIA DGX B300 data sheet 2025; 8 x 800 Gb/s per host",
         **_BLACKWELL),
    _gpu("GB200", 197.6, (2500, 1250), 8000, 900, 50, f"NVIDIA GB200 NVL72 page 2024; {_IN_A_RACK} 400 Gb/s each",
         per_host=4, rack=72, **_BLACKWELL),
    _gpu("GB300", 297.7, (2500, 1250), 8000, 900, 100, f"NVIDIA GB300 NVL72 page 2025; {_IN_A_RACK} 800 Gb/s each",
         per_host=4, rack=72, **_BLACKWELL),
    _gpu("GB10", 130.7, (125, 62.5), 273, 25, 25, "NVIDIA DGX Spark data sheet 2025: 200 Gb/s; dense bfloat16 is "
         "an eighth of the 1 PFLOP/s in FP4 with sparsity", per_host=1, host=0, is_unified=True, **_BLACKWELL),
    _gpu("MI300X", 205.8, (1307, 653), 5300, 448, 50, "AMD Instinct MI300X data sheet; 8 x 400 Gb/s per host",
         0.43, **_FASTER),
    _gpu("MI325X", 274.4, (1307, 653), 6000, 448, 50, "AMD Instinct MI325X data sheet 2024; 8 x 400 Gb/s per host",
         0.5, **_FASTER),
    _gpu("MI355X", 308.8, (2516, 157), 8000, 537, 50, "AMD Instinct MI355X data sheet 2025 (no TF32); 8 x 400 Gb/s",
         0.52, **_FASTER),
    _gpu("L40S", 48.3, (362, 183), 864, 32, 12.5, "NVIDIA L40S data sheet; PCIe 4.0 x16", 0.62),
    _gpu("L40", 48.3, (181, 90.5), 864, 32, 12.5, "NVIDIA L40 data sheet 2022; PCIe 4.0 x16"),
    _gpu("L4", 24.2, (121, 60), 300, 32, 6.2, "NVIDIA L4 data sheet 2023; PCIe 4.0 x16, 400 Gb/s per host of 8"),
    _gpu("A10G", 23.7, (70, 35), 600, 16, 3.1, "NVIDIA A10 data sheet, AWS g5; PCIe 4.0 x8, 25 Gb/s"),
    _gpu("A40", 48.3, (150, 74.8), 696, 32, 12.5, "NVIDIA A40 data sheet 2021; PCIe 4.0 x16"),
    _gpu("RTX-A6000", 51.0, (155, 77.4), 768, 32, 3.1, "NVIDIA RTX A6000 data sheet 2021; PCIe 4.0 x16, 25 Gb/s", 0.66),
    _gpu("RTX6000-Ada", 51.0, (364, 182), 960, 32, 3.1, "NVIDIA RTX 6000 Ada data sheet 2023; PCIe 4.0 x16, 25 Gb/s"),
    _gpu("RTX-PRO-6000", 102.6, (504, 252), 1792, 64, 12.5, "NVIDIA RTX PRO 6000 Blackwell data sheet 2025; PCIe 5.0",
         0.68),
    _gpu("RTX5090", 34.2, (210, 105), 1792, 64, 3.1, "NVIDIA RTX Blackwell architecture paper 2025; PCIe 5.0, 25 Gb/s",
         0.94),
    _gpu("RTX4090", 25.4, (165, 82.6), 1008, 32, 3.1, "NVIDIA Ada architecture paper; PCIe 4.0 x16, 25 Gb/s", 0.82),
    _gpu("RTX3090", 25.4, (71, 35.6), 936, 16, 3.1, "NVIDIA Ampere GA102 paper; PCIe 4.0 x8 each of two, 25 Gb/s",
         0.9, per_host=4),
    _gpu("V100", 34.1, (125, 15.7), 900, 150, 12.5, "NVIDIA V100 SXM2 data sheet 2018, fp16; DGX-1: 4 x 100 Gb/s",
         has_bfloat16=False),
    _gpu("V100-16", 16.9, (125, 15.7), 900, 150, 12.5, "NVIDIA V100 SXM2 data sheet 2018, fp16; DGX-1: 4 x 100 Gb/s",
         has_bfloat16=False),
    _gpu("V100-PCIe", 34.1, (112, 14), 900, 16, 3.1, "NVIDIA V100 PCIe data sheet 2018, fp16; PCIe 3.0 x16, 25 Gb/s",
         has_bfloat16=False),
    _gpu("T4", 15.6, (65, 8.1), 320, 16, 3.1, "NVIDIA T4 data sheet 2019, fp16; PCIe 3.0 x16, 25 Gb/s", 0.4,
         has_bfloat16=False),
    Device(
        "CPU", 16 * GB, 0.1 * TERA, 0.1 * TERA, 20 * GB, 2 * GB, 1 * GB, 2,
        "a two-core server of 2020 with AVX-512, float32; measure yours with --calibrate",
        framework=0,
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}

_ALIASES = {
    alias: name
    for name, aliases in {
        "A100-80": "a100 a100sxm a10080gb",
        "A100-PCIe": "a10080gbpcie",
        "A100-40": "a10040gb a100pcie40gb",
        "H100": "h10080gb h10080 h100sxm h100sxm5",
        "H200": "h200sxm",
        "GB200": "gb200nvl72",
        "GB300": "gb300nvl72",
        "GB10": "dgxspark spark gb10superchip",
        "V100": "v10032gb v10032",
        "V100-16": "v10016gb",
        "RTX5090": "5090",
        "RTX4090": "4090",
        "RTX3090": "3090",
        "A10G": "a10",
        "RTX-A6000": "a6000 rtxa6000",
        "RTX6000-Ada": "6000ada rtx6000adageneration",
        "RTX-PRO-6000": "pro6000 rtxpro6000blackwell rtxpro6000blackwellserveredition "
        "rtxpro6000blackwellworkstationedition",
    }.items()
    for alias in aliases.split()
}
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
        names = ", ".join(dict.fromkeys(by_key[key] for key in close)) if close else ", ".join(DEVICES)
        raise ConfigError(
            f"unknown hardware {name!r}",
            hint=f"{'did you mean ' if close else 'use one of '}{names}; or measure it with --calibrate",
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

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name} in {self.hosts} host{'s' if self.hosts > 1 else ''}"


def split_devices(text: str) -> tuple[int | None, str]:
    """Split a description of devices, such as `8xH100`, into the number of devices and the name of their kind.

    Other accepted forms are `8*H100`, `8 H100`, `H100x8` and `H100:8`. The number is None if the text only names a
    kind, such as `H100` or `4090`.
    """
    text = text.strip()
    if _key(text) in _names():
        return None, text
    if text.isdecimal():
        raise ConfigError(
            f"devices {text!r} is a number without a kind of device",
            hint=f"add the kind, for example {text}xH100",
        )
    turned = re.fullmatch(r"(\S.*?)\s*[x*:\N{MULTIPLICATION SIGN}]\s*([1-9]\d*)", text, re.IGNORECASE)
    if turned is not None and _key(turned[1]) in _names():
        return int(turned[2]), turned[1]
    match = re.fullmatch(r"(?:(\d+)(?:\s*[x*\N{MULTIPLICATION SIGN}]\s*|\s+|(?=[^\W\d])))?(\S.*)", text, re.IGNORECASE)
    if match is None or match[1] == "0":
        raise ConfigError(
            f"devices must be a number and a kind of device, got {text!r}",
            hint="use a value such as 8xH100",
        )
    return None if match[1] is None else int(match[1]), match[2]


def parse_cluster(text: str, hosts: int | None = None, host_memory: int | None = None) -> Cluster:
    """Return the cluster that a text such as `8xH100` describes, by default on as few hosts as possible.

    `host_memory` is the memory of each host in bytes, if it is not that of a typical host.
    """
    number, name = split_devices(text)
    device, count = find_device(name), number or 1
    if hosts is None:
        hosts = max(1, -(-count // device.per_host))
    if hosts < 1 or count % hosts:
        raise ConfigError(
            f"{count} devices cannot be divided evenly among {hosts} hosts",
            hint="use a multiple of the number of hosts",
        )
    if host_memory is not None and not device.can_offload:
        raise ConfigError(
            f"the memory of a host cannot be set for {device.name}, which computes in it",
            hint="remove --host-memory",
        )
    if host_memory is not None:
        device = dataclasses.replace(device, host_memory=host_memory)
    if hosts > 1 and count <= device.rack:
        device = dataclasses.replace(device, network=device.link)
    return Cluster(device, count, hosts, shares_memory=COMM.read() != "gloo")


def check_rank(rank: int, count: int) -> None:
    """Raise `ConfigError` if a job of `count` ranks does not have a rank with this number."""
    if not 0 <= rank < count:
        raise ConfigError(f"rank {rank} does not exist in a job of {count} ranks", hint="ranks are numbered from 0")


def write_calibration(device: Device, path: Path) -> None:
    """Write a device's measured speeds to a JSON file that `find_device` can read."""
    write_text(path, json.dumps(dataclasses.asdict(device), indent=2) + "\n")


def read_calibration(path: Path) -> Device:
    """Read a device from a file that `write_calibration` wrote."""
    try:
        device = Device(**read_object(path))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a calibration file: {error}",
            hint="create one with fullshard plan --calibrate",
        ) from None
    needed = ("memory", "flops", "flops_fp32", "memory_bandwidth", "link", "network", "per_host", "efficiency")
    wrong = [name for name in needed if not _is_finite(getattr(device, name)) or getattr(device, name) <= 0]
    wrong += ["rack"] if not _is_finite(device.rack) or device.rack < 0 else []
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} must be positive", hint="calibrate again")
    return device


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
