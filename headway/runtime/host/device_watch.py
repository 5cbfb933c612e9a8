"""Follows what a host's devices do while the ranks train: utilisation, memory, clock, power and temperature.

The launcher asks the driver's library (NVML) once a second, in a thread of its
own, since a driver may take its time; nothing of it runs inside a rank. Import
it only where the host has devices. Times on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pynvml

from headway.core.machine.host_load import COST_FRACTION, MOST_READINGS
from headway.core.units import NS_PER_S
from headway.trace.recording.host_series import DeviceGauges, DeviceSeries

SAMPLE_S = 1.0
"""Seconds between two readings, at least; they take `COST_FRACTION` of a core at most."""

LAST_READING_S = 1.0
"""Seconds for which the end of an attempt waits for a reading that is under way, at most."""

Questions = Mapping[str, Callable[[object], float]]

GAUGES: Final[Questions] = {
    "utilization_fraction": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "memory_bytes": lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
    "clock_hz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6,
    "power_w": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "temperature_c": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
}
"""Field of `DeviceGauges` -> what the library is asked for at each reading."""

LIMITS: Final[Questions] = {
    "memory_total_bytes": lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    "power_limit_w": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "clock_limit_hz": lambda handle: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6,
}
"""The same, asked once."""


class DeviceWatch:
    """Follows the devices that CUDA_VISIBLE_DEVICES names; where NVML does not answer there is no series, and no word.

    `failed` is told any other failure; it is called in the watch's thread.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._at_s: list[float] = []
        self._readings: dict[DeviceGauges, list[dict[str, float | None]]] = {}
        self._start_ns = time.perf_counter_ns()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-devices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more readings."""
        self._done.set()
        self._thread.join(LAST_READING_S)

    def series(self) -> DeviceSeries | None:
        """Return what was read; a reading that the driver still holds up is left out."""
        at_s = tuple(self._at_s)
        rows = {gauges: readings[: len(at_s)] for gauges, readings in self._readings.items()}
        return DeviceSeries.of(self._start_ns, at_s, rows)

    def _run(self) -> None:
        try:
            with contextlib.suppress(pynvml.NVMLError):
                self._follow()
        except Exception as cause:  # whatever it is, the job goes on
            self._failed("what the devices did", cause)

    def _follow(self) -> None:
        """Take readings until it is stopped."""
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), list(map(pynvml.nvmlDeviceGetUUID, handles)))
        names = {index: str(pynvml.nvmlDeviceGetName(handles[index])) for index in visible}
        asked = {
            DeviceGauges.of(index, name, _answers(LIMITS, handles[index])): handles[index]
            for index, name in names.items()
        }
        self._readings = {gauges: [] for gauges in asked}
        interval_s = SAMPLE_S
        while asked and not self._done.wait(interval_s):
            begin_s = time.perf_counter()
            for gauges, handle in asked.items():
                self._readings[gauges].append(_answers(GAUGES, handle))
            end_s = time.perf_counter()
            self._at_s.append(end_s - self._start_ns / NS_PER_S)
            if len(self._at_s) > MOST_READINGS:
                del self._at_s[:-1:2]  # each stands for the time since the one before
                for readings in self._readings.values():
                    del readings[:-1:2]
            interval_s = max(SAMPLE_S, (end_s - begin_s) / COST_FRACTION)


def visible_devices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, as indices into `uuids`; all where it is None.

    Numbers count in NVML's order (CUDA's own may differ where models are mixed). As in CUDA the list ends at the first
    name that no device has; a part of a device (MIG) has none.

    >>> visible_devices("1,GPU-a,7,0", ["GPU-abc", "GPU-b"]), visible_devices(None, ["GPU-a"])
    ([1, 0], [0])
    """
    chosen = list[int]()
    for name in map(str.strip, variable.split(",")) if variable is not None else map(str, range(len(uuids))):
        rows = [i for i, uuid in enumerate(uuids) if name == str(i) or (name[:4] == "GPU-" and uuid.startswith(name))]
        if len(rows) != 1:
            break
        chosen += rows
    return list(dict.fromkeys(chosen))


def _answers(questions: Questions, handle: object) -> dict[str, float | None]:
    """Return what the library says of a device; None where it does not tell."""
    answers: dict[str, float | None] = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask(handle)
        except pynvml.NVMLError:
            answers[name] = None
    return answers
