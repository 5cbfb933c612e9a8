"""The line that a run shows of itself while it goes on: step, steps/s, goodput, top loss.

On a terminal it is one line below the ranks' output, wiped before anything
else is printed and never drawn while a rank's own line is unfinished (a
progress bar). Elsewhere it is a plain line every ten seconds. Figures are
live estimates from the records drained so far; the ledger of the finished run
decides. Times in ns on CLOCK_MONOTONIC.

>>> progress = Progress(start_ns=0, world_size=1)
>>> progress.line(now_ns=2_000_000_000)
'starting up for 2 s'
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from headway.core.units import format_seconds
from headway.runtime.drain import Drainer
from headway.runtime.streams import Streams, write_all
from headway.trace.records import RingHeader
from headway.trace.vocabulary import SPANS

LOSSES = {
    "input.next": "input", "comm.wait": "comm", "comm.collective": "comm", "checkpoint.save": "checkpoint",
    "checkpoint.load": "checkpoint", "host.gc": "gc", "host.logging": "logging", "host.compile": "compile",
}  # fmt: skip
"""Recorded name -> the loss that the line counts it to; what lies inside another of these is left out."""

RATE_WINDOW_S = 10.0
PLAIN_EVERY_S = 10.0
REDRAW_S = 0.5

_CODES = {SPANS[name].code: loss for name, loss in LOSSES.items()}
_STEP = SPANS["optimizer.step"].code


class Progress:
    """What the records drained so far say of the run; fed by one thread, read by another."""

    def __init__(self, *, start_ns: int, world_size: int) -> None:
        self._start_ns = start_ns
        self._world_size = max(world_size, 1)
        self._lock = threading.Lock()
        self._lost_ns: dict[str, int] = {}
        self._first_ns: dict[int, int] = {}
        self._updates: dict[int, dict[int, int]] = {}
        self._history: deque[tuple[int, int]] = deque()

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Take in what was drained from one process; only ranks' main threads count."""
        if header.role not in ("main", "spawned"):
            return
        main = records[records["lane"] == 0]
        steps = main[main["code"] == _STEP]
        with self._lock:
            for code, loss in _CODES.items():
                spent = int(main["duration_ns"][main["code"] == code].sum())
                if spent:
                    self._lost_ns[loss] = self._lost_ns.get(loss, 0) + spent
            if len(steps):
                self._first_ns.setdefault(header.rank, int(steps["start_ns"][0]))
                updates = self._updates.setdefault(header.rank, {})
                for optimizer, count in zip(*np.unique(steps["a"], return_counts=True), strict=True):
                    updates[int(optimizer)] = updates.get(int(optimizer), 0) + int(count)
                if header.rank == min(self._updates):
                    self._history.append((time.perf_counter_ns(), self.steps))

    @property
    def steps(self) -> int:
        """Optimizer steps so far of the lowest rank; of several optimizers, the one met first counts."""
        if not self._updates:
            return 0
        updates = self._updates[min(self._updates)]
        return updates[min(updates)]

    def line(self, now_ns: int) -> str:
        """Return the line as plain text."""
        with self._lock:
            wall_ns = max(now_ns - self._start_ns, 1)
            if not self._first_ns:
                return f"starting up for {format_seconds(wall_ns / 1e9)}"
            total_ns = wall_ns * self._world_size
            startup_ns = sum(first - self._start_ns for first in self._first_ns.values())
            startup_ns += (self._world_size - len(self._first_ns)) * wall_ns
            lost = {"startup": max(startup_ns, 0), **self._lost_ns}
            goodput = max(1 - sum(lost.values()) / total_ns, 0.0)
            top = max(lost, key=lambda loss: lost[loss])
            return (
                f"step {self.steps} | {self._rate(now_ns):.3g} steps/s | goodput {goodput:.0%} | "
                f"top loss {top} {min(lost[top] / total_ns, 1):.0%}"
            )

    def _rate(self, now_ns: int) -> float:
        """Steps per second over the last window."""
        while len(self._history) > 2 and now_ns - self._history[0][0] > RATE_WINDOW_S * 1e9:
            self._history.popleft()
        if len(self._history) < 2:
            return 0.0
        (begin, before), (end, after) = self._history[0], self._history[-1]
        return (after - before) / max(end - begin, 1) * 1e9


class StatusLine:
    """Shows `Progress` on stderr until it is stopped."""

    def __init__(self, streams: Streams, *, world_size: int, start_ns: int | None = None) -> None:
        self.progress = Progress(start_ns=start_ns or time.perf_counter_ns(), world_size=world_size)
        self._streams = streams
        self._terminal = os.isatty(2) and os.environ.get("TERM", "") != "dumb"
        self._drawn = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-status", daemon=True)

    def follow(self, drainer: Drainer) -> None:
        """Read what `drainer` drains; a later attempt's drainer carries the listener over."""
        if self.progress.add not in drainer.listeners:
            drainer.listeners.append(self.progress.add)

    def start(self) -> None:
        """Begin to show the line."""
        if self._terminal:
            self._streams.before_output = self.wipe
        self._thread.start()

    def stop(self) -> None:
        """Take the line away."""
        self._done.set()
        self._thread.join(2.0)
        self._streams.before_output = None
        self.wipe()

    def wipe(self) -> None:
        """Clear the line if it is there: something else is about to be printed."""
        with self._lock:
            if self._drawn:
                self._write("\r\x1b[2K")
                self._drawn = False

    def _run(self) -> None:
        while not self._done.wait(REDRAW_S if self._terminal else PLAIN_EVERY_S):
            text = self.progress.line(time.perf_counter_ns())
            if not self._terminal:
                self._write(f"headway: {text}\n")
            elif self._streams.at_line_start:
                styled = _styled(text)
                with self._lock:
                    self._write("\r\x1b[2K" + styled)
                    self._drawn = True

    @staticmethod
    def _write(text: str) -> None:
        try:
            write_all(2, text.encode())
        except OSError:
            return  # nobody reads stderr any more; the run goes on


def _styled(text: str) -> str:
    """Return the line as the terminal wants it: cut to its width, in colour unless NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stderr, force_terminal=True)
    line = Text("headway ", style="bold cyan")
    line.append(text)
    line.truncate(max(console.width - 1, 8), overflow="ellipsis")
    with console.capture() as capture:
        console.print(line, end="", soft_wrap=True)
    return capture.get()
