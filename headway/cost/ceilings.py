"""What a device reaches: rates measured once with `headway doctor --device`, else the data sheet's with a margin.

A product of large matrices reaches four fifths of the data sheet's rate on an H100 and an H200, and a copy inside the
device four fifths of the memory's (measured, docs/devices.md), so that is what is taken of a device nobody measured.

    time of a kernel >= max(operations / rate of its dtype, bytes / rate of the memory)      (the roofline model)

>>> ceilings_of("NVIDIA H200").flops_per_s["tf32"] < shipped().device("H200-SXM-141GB").peak("tf32")
True
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headway.core.files.regular_file import whole_file
from headway.cost.specs import shipped

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
