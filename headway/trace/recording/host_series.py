"""Load and memory of the host, and what its devices did, over the time of a run, as the launcher sampled them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.machine.host import affinity_cores
from headway.core.machine.host_load import MOST_READINGS, HostCounters, other_cores
from headway.core.machine.host_load import spans as spans_of


class HostSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Load and memory over the time of a run, [n] spans without gaps; run.json holds it as `host_series`."""

    start_ns: int = 0
    """When the first span began, on the clock of the run."""

    end_s: tuple[float, ...] = ()
    """End of each span, seconds since then."""

    own_cores: tuple[float, ...] = ()
    """Mean cores that the job kept busy."""

    other_cores: tuple[float, ...] = ()
    """Mean cores that other processes kept busy."""

    memory_bytes: tuple[int, ...] = ()
    """Memory of the job's processes at the end of the span."""

    cores: int = 0
    """Cores of the affinity."""

    rank_bytes: tuple[int, ...] = ()
    """Memory of the ranks at the end of the span, without files and shared memory; () = not known."""

    worker_bytes: tuple[int, ...] = ()
    """Memory of the ranks' children, loader workers, shared pages split among who shares them."""

    @classmethod
    def of(cls, readings: Sequence[HostCounters], most: int = 240) -> HostSeries:
        """Return what readings say, in at most `most` spans of equal numbers of them."""
        spans = spans_of(readings) if len(readings) > 1 else []
        width = -(-len(spans) // most) if spans else 1
        groups = [(spans[at][0], spans[min(at + width, len(spans)) - 1][1]) for at in range(0, len(spans), width)]
        start_s = readings[0].at_s if readings else 0.0
        shared = any(last.shares_bytes[0] for _, last in groups)
        return cls(
            start_ns=round(start_s * 1e9),
            end_s=tuple(round(last.at_s - start_s, 3) for _, last in groups),
            own_cores=tuple(
                round((last.own_s - first.own_s) / max(last.at_s - first.at_s, 1e-9), 3) for first, last in groups
            ),
            other_cores=tuple(round(other_cores(first, last), 3) for first, last in groups),
            memory_bytes=tuple(last.memory_bytes for _, last in groups),
            cores=affinity_cores(),
            rank_bytes=tuple(last.shares_bytes[0] for _, last in groups) if shared else (),
            worker_bytes=tuple(last.shares_bytes[1] for _, last in groups) if shared else (),
        )

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> HostSeries | None:
        """Return what run.json says; None for a run recorded without it, or with something else there."""
        try:
            found = msgspec.convert(facts.get("host_series"), cls)
        except msgspec.ValidationError:
            return None
        columns: tuple[Sequence[float], ...] = (found.end_s, found.own_cores, found.other_cores, found.memory_bytes)
        columns += tuple(column for column in (found.rank_bytes, found.worker_bytes) if column)
        values = [value for column in columns for value in column]
        ends = [0.0, *found.end_s]
        fits = len({len(column) for column in columns}) == 1 and 0 < len(found.end_s) <= MOST_READINGS
        fits = fits and all(0 <= value < 1e18 for value in values) and all(a < b for a, b in itertools.pairwise(ends))
        return found if fits and found.cores >= 0 else None


class DeviceGauges(msgspec.Struct, frozen=True, kw_only=True):
    """One device over the time of a run, [n] spans; () = the driver never told, None = not in that span."""

    index: int = 0
    """Number of the device, as the driver counts."""
    name: str = ""
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    clock_limit_hz: float | None = None
    utilization_fraction: tuple[float | None, ...] = ()
    """Mean share of the span in which some kernel ran; it does not say how full the device was."""
    memory_bytes: tuple[int | None, ...] = ()
    """Most memory in the span, of all processes."""
    clock_hz: tuple[float | None, ...] = ()
    """Mean clock of the multiprocessors."""
    power_w: tuple[float | None, ...] = ()
    """Mean."""
    temperature_c: tuple[float | None, ...] = ()
    """Highest."""

    @classmethod
    def of(cls, index: int, name: str, more: Mapping[str, object]) -> DeviceGauges:
        """Return a device of which `more` fields are known."""
        return msgspec.structs.replace(cls(index=index, name=name), **more)

    @property
    def columns(self) -> list[tuple[float | None, ...]]:
        """What the driver told over time."""
        return [column for column in msgspec.structs.astuple(self) if isinstance(column, tuple) and column]

    @property
    def was_used(self) -> bool:
        """Whether some kernel ran; where the driver does not tell, whether memory was taken or given back."""
        return any(self.utilization_fraction or (len(set(self.memory_bytes)) > 1,))


class DeviceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that worked while the ranks ran, [n] spans without gaps; run.json holds it as `device_series`."""

    start_ns: int = 0
    """When the first span began, on the clock of the run."""

    end_s: tuple[float, ...] = ()
    """End of each span, seconds since then."""

    devices: tuple[DeviceGauges, ...] = ()

    @classmethod
    def of(
        cls,
        start_ns: int,
        at_s: Sequence[float],
        readings: Mapping[DeviceGauges, Sequence[Mapping[str, float | None]]],
        num_spans: int = 240,
    ) -> DeviceSeries | None:
        """Return what the readings of each device, [n] at `at_s`, say in at most `num_spans` spans; None without any.

        A reading stands for the time since the one before. Devices that were not used are left out.
        """
        width = max(1, -(-len(at_s) // num_spans))
        ends = tuple(round(at_s[min(first + width, len(at_s)) - 1], 3) for first in range(0, len(at_s), width))
        devices = [
            msgspec.structs.replace(
                device, **{name: _spans([row[name] for row in rows], width, name) for name in rows[0]}
            )
            for device, rows in readings.items()
            if rows
        ]
        used = tuple(device for device in devices if device.was_used)
        return cls(start_ns=start_ns, end_s=ends, devices=used) if used else None

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> DeviceSeries | None:
        """Return what run.json says; None for a run recorded without it, or with something else there."""
        try:
            series = msgspec.convert(facts.get("device_series"), cls)
        except msgspec.ValidationError:
            return None
        columns = [column for device in series.devices for column in device.columns]
        fits = 0 < len(series.end_s) <= MOST_READINGS and all(len(column) == len(series.end_s) for column in columns)
        fits = fits and all(value is None or 0 <= value < 1e18 for column in columns for value in column)
        fits = fits and all(a < b for a, b in itertools.pairwise((0.0, *series.end_s)))
        return series if fits and columns else None


def _spans(values: Sequence[float | None], width: int, name: str) -> tuple[float | None, ...]:
    """Return the mean of each `width` values that are known, of memory and temperature the largest; () without one."""
    groups = [[x for x in values[first : first + width] if x is not None] for first in range(0, len(values), width)]
    peak = name in ("memory_bytes", "temperature_c")
    spans = tuple((max(row) if peak else round(sum(row) / len(row), 4)) if row else None for row in groups)
    return spans if any(row is not None for row in spans) else ()
