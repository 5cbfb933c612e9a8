"""A profiler of an emulated accelerator: it shows what is launched while it is on, and slows the host meanwhile.

It stands in for what headway's deep windows switch. While it is on the host takes `slower` times as much longer
between two launches; once it was on, `stays` times, as a library does that stays attached.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from headway.runtime.in_rank import windows

now = time.perf_counter_ns


class EmulatedProfiler:
    """Rows of launches, kernels and copies, in the form in which Kineto writes them."""

    def __init__(self, slower: float, stays: float) -> None:
        self._slower = {"off": 0.0, "on": slower, "was on": stays}
        self._state, self._last_ns = "off", now()
        self._events: list[dict[str, Any]] = []
        windows.low_level_start, windows.low_level_stop = self.start, self.stop

    def start(self, **_: bool) -> None:
        """Switch it on."""
        self._state, self._events = "on", []

    def stop(self, **_: bool) -> EmulatedProfiler:
        """Switch it off."""
        self._state = "was on"
        return self

    def save(self, path: str) -> None:
        """Write what it saw."""
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": time.time_ns() - now(), "traceEvents": self._events}))

    def launched(self, start_ns: int, end_ns: int, *, works: bool) -> None:
        """Note what was launched just now and runs from `start_ns` to `end_ns`."""
        at = now()
        if self._state == "on":
            number = len(self._events)
            category, name = ("kernel", "gemm") if works else ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)")
            self._row("cuda_runtime", "cudaLaunchKernel", at, 1000, (99, 99), correlation=number)
            self._row(category, name, start_ns, end_ns - start_ns, (0, 7), correlation=number, stream=7)
        if slower := self._slower[self._state]:
            time.sleep(slower * (at - self._last_ns) / 1e9)
        self._last_ns = now()

    def _row(self, category: str, name: str, start_ns: int, length_ns: int, lane: tuple[int, int], **args: int) -> None:
        row = {"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1], "args": args}
        self._events.append({**row, "ts": start_ns / 1000, "dur": length_ns / 1000})
