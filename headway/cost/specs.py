"""What hardware can do: devices, links, hosts and disks, each with where its figures come from.

The shipped tables are the TOML files beside this one. A user's own file adds
to them or replaces entries, with the same keys, in tables named `devices`,
`links`, `hosts`, `disks`. Rates are per second, sizes in bytes, powers in
watts; peak rates are dense and per device.

>>> shipped().device("A100-SXM4-80GB").flops_per_s["bf16"]
312000000000000.0
>>> shipped().device("V100-SXM2")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: device 'V100-SXM2' has several forms. Choose V100-SXM2-16GB or V100-SXM2-32GB.

What a device reaches: rates measured once with `headway doctor --device`, else the data sheet's with a margin.

A product of large matrices reaches four fifths of the data sheet's rate on an H100 and an H200, and a copy inside the
device four fifths of the memory's (measured, docs/devices.md), so that is what is taken of a device nobody measured.

    time of a kernel >= max(operations / rate of its dtype, bytes / rate of the memory)      (the roofline model)

>>> ceilings_of("NVIDIA H200").flops_per_s["tf32"] < shipped().device("H200-SXM-141GB").peak("tf32")
True
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.core.errors import FormatError, UnknownNameError
from headway.core.files.safe_files import read_toml, whole_file
from headway.core.tables import pick, suggestion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    """Key in the table."""

    memory_bytes: float
    """Memory on the device."""

    memory_bytes_per_s: float
    """Peak bandwidth of that memory."""

    tdp_w: float
    """Thermal design power."""

    link: str
    """Name of the link to the other devices of its host."""

    flops_per_s: Mapping[str, float]
    """dtype (fp64, fp32, tf32, bf16, fp16, fp8, int8) -> peak dense operations per second."""

    source: str
    """Document that states the figures."""

    aliases: tuple[str, ...] = ()
    """Names under which drivers report it."""

    def peak(self, dtype: str) -> float:
        """Return the peak operations per second in `dtype`; raises `UnknownNameError` when none is stated."""
        return pick(self.flops_per_s, dtype, f"dtype of {self.name}")


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction of a connection: sending n bytes takes `latency_s + n / bytes_per_s`."""

    name: str
    """Key in the table."""

    bytes_per_s: float
    """Rate in one direction."""

    latency_s: float
    """Time of an empty message."""

    source: str
    """Document or measurement that states the figures."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message of `num_bytes`."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One machine with devices."""

    name: str
    """Key in the table."""

    device: str
    """Name of its devices."""

    num_devices: int
    """How many."""

    num_cores: int
    """Physical CPU cores."""

    memory_bytes: float
    """Main memory."""

    link: str
    """Name of the link of each adapter towards other hosts."""

    num_links: int
    """Number of such adapters."""

    source: str
    """Document that states the figures."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Storage."""

    name: str
    """Key in the table."""

    read_bytes_per_s: float
    """Sequential read rate."""

    write_bytes_per_s: float
    """Sequential write rate."""

    latency_s: float
    """Time to the first byte of a random read."""

    reads_per_s: float
    """Small random reads per second."""

    source: str
    """Document or measurement that states the figures."""


@dataclass(frozen=True, slots=True)
class Specs:
    """Tables of hardware by name."""

    devices: Mapping[str, DeviceSpec] = field(default_factory=dict)
    """Accelerators."""

    links: Mapping[str, LinkSpec] = field(default_factory=dict)
    """Connections."""

    hosts: Mapping[str, HostSpec] = field(default_factory=dict)
    """Hosts; their devices and links are in the other tables."""

    disks: Mapping[str, Disk] = field(default_factory=dict)
    """Storage."""

    def __post_init__(self) -> None:
        """See that every name that an entry mentions exists; raises `UnknownNameError`."""
        for device in self.devices.values():
            pick(self.links, device.link, f"link of device {device.name}")
        for host in self.hosts.values():
            pick(self.devices, host.device, f"device of host {host.name}")
            pick(self.links, host.link, f"link of host {host.name}")

    def device(self, name: str) -> DeviceSpec:
        """Return a device by table name or reported name; raises `UnknownNameError` with the nearest ones."""
        found = self.reported(name)
        variants = sorted(known for known in self.devices if name and known.lower().startswith(f"{name.lower()}-"))
        if found is None and variants:
            raise UnknownNameError(f"device {name!r} has several forms. Choose {' or '.join(variants)}.")
        return found or pick(self.devices, name, "device")

    def link(self, name: str) -> LinkSpec:
        """Return a link; raises `UnknownNameError` with the nearest ones."""
        return pick(self.links, name, "link")

    def host(self, name: str) -> HostSpec:
        """Return a host; raises `UnknownNameError` with the nearest ones."""
        return pick(self.hosts, name, "host")

    def disk(self, name: str) -> Disk:
        """Return a disk; raises `UnknownNameError` with the nearest ones."""
        return pick(self.disks, name, "disk")

    def reported(self, name: str) -> DeviceSpec | None:
        """Return the device that a driver calls `name` (as `torch.cuda.get_device_name` does), None if unlisted.

        >>> shipped().reported("NVIDIA H100 80GB HBM3").name, shipped().reported("cpu")
        ('H100-SXM5-80GB', None)
        """
        wanted = name.strip().lower()
        for device in self.devices.values():
            if wanted in (device.name.lower(), *(alias.lower() for alias in device.aliases)):
                return device
        return None


KINDS: dict[str, type] = {"devices": DeviceSpec, "links": LinkSpec, "hosts": HostSpec, "disks": Disk}
"""Table of a TOML file -> what its entries are."""


@cache
def shipped() -> Specs:
    """Return the tables that come with the library."""
    here = Path(__file__).parent
    return Specs(**{kind: _entries(read_toml(here / f"{kind}.toml"), kind, f"{kind}.toml") for kind in KINDS})


def with_entries(content: Mapping[str, object], path: object) -> Specs:
    """Return the shipped tables with the entries of `content`, read from `path`, added or replaced.

    Raises `FormatError` naming table, entry and key.
    """
    for kind in content:
        if kind not in KINDS:
            raise FormatError(f"{path}: unknown table {kind!r}. {suggestion(KINDS, kind)}")
    known = shipped()
    return Specs(**{kind: {**getattr(known, kind), **_entries(content.get(kind, {}), kind, path)} for kind in KINDS})


def _entries(table: object, kind: str, path: object) -> dict[str, Any]:
    """Turn one table into checked entries."""
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise FormatError(f"{path}: {kind} must hold tables; write them as [{kind}.NAME] with keys below.")
    return {name: _entry({**row, "name": name}, KINDS[kind], f"{path}: {kind}.{name}") for name, row in table.items()}


def _entry(row: dict[str, Any], wanted: type[T], where: str) -> T:
    """Build one entry; every key must be known, every number positive."""
    names = [part.name for part in fields(wanted)]  # type: ignore[arg-type]  # KINDS holds dataclasses only
    for key in row:
        if key not in names:
            raise FormatError(f"{where} has an unknown key {key!r}. {suggestion(set(names) - {'name'}, key)}")
    try:
        entry = msgspec.convert(row, wanted)
    except msgspec.ValidationError as cause:
        raise FormatError(f"{where}: {cause}. Correct that key.") from cause
    for key, value in row.items():
        numbers = value if isinstance(value, dict) else {key: value}
        for part, number in numbers.items():
            if isinstance(number, (int, float)) and not (math.isfinite(number) and number > 0):
                raise FormatError(f"{where}: {part} is {number}; write a finite number > 0.")
    return entry


TYPICAL = 0.8
"""Share of a data sheet's rate that large products and copies reach."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one device."""

    flops_per_s: Mapping[str, float]
    """dtype (fp32, tf32, bf16, fp16) -> operations per second of a large matrix product."""

    bytes_per_s: float
    """Bytes read and written per second by a large copy inside the device."""

    launch_s: float | None = None
    """Host time of one small operation, the way through torch included; None where it was not measured."""

    is_measured: bool = False
    """Whether they were measured on this host's own device."""


def path_of_measured() -> Path:
    """Return the file that holds what was measured, of every device by the name that its driver gives it."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "headway" / "ceilings.json"


def measured() -> dict[str, Ceilings]:
    """Return what was measured, by device; what cannot be read counts as not measured."""
    try:
        return msgspec.json.decode(path_of_measured().read_bytes(), type=dict[str, Ceilings])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def keep(device_name: str, rates: Ceilings) -> Path:
    """Keep what was measured of a device; returns the file."""
    path = path_of_measured()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        draft.write_bytes(msgspec.json.encode({**measured(), device_name: rates}))
    return path


def ceilings_of(device_name: str) -> Ceilings | None:
    """Return the rates of a device by the name that its driver gives it; None for one that nobody knows."""
    known = measured().get(device_name)
    if known is not None:
        return known
    sheet = shipped().reported(device_name)
    if sheet is None:
        return None
    rates = {dtype: TYPICAL * rate for dtype, rate in sheet.flops_per_s.items()}
    return Ceilings(flops_per_s=rates, bytes_per_s=TYPICAL * sheet.memory_bytes_per_s)
