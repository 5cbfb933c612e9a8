"""What the script does between an update and the next forward: samples of the training thread's stack, only then.

A thread that the script does not see looks a hundred times a second at most whether the training thread is in that gap
(one flag, set and cleared on the way), and only then takes its stack. The loop is the deepest frame that the stack
shares with that of an update; its line, and the function called there, own the sample. Where a probe owns the time
already (a wait in next(loader), a save), or headway works for itself, the sample goes. While gaps are short, and once
much was seen, it looks ten times a second; each sample counts for the time since the look before, so that the estimates
stay unbiased.

>>> gap = GapStacks()
>>> gap.report()
[]
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from headway.core.processes.hidden_thread import HiddenThread
from headway.runtime.script.script_lines import feeds, is_ours, line_of, runs_cells

PERIOD_S, RELAXED_S = 0.01, 0.1
"""Seconds between two looks; the second where the first ones found little, or enough."""

LOOKS = 64
"""Looks after which it is decided anew how often to look."""

ENOUGH = 2000
"""Samples after which ten looks a second do."""

FEW = 4
"""Samples that count in `LOOKS` looks, below which looks become rare: each takes the interpreter from the training."""

MOST_LINES = 20
"""Lines that are reported."""

MOST_PLACES = 1024
"""Different places that are counted."""

UNTIMED = ("fsync",)
"""Functions of this package around a call of the script whose time no probe owns."""

Place = tuple[CodeType, int, str]
"""Code of the loop, its line, name of the function called there ('' for none of Python's)."""


@dataclass(slots=True)
class GapStacks:
    """The gap of this process and what was seen in it; the lists are bound by the probes and changed in place."""

    open: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether an update has ended and no forward has begun since."""

    asks: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether the next update is to note the frames of its stack."""

    asks_forward: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether the next forward is to note the line of the loop that it is called from."""

    resumed: list[int] = field(default_factory=lambda: [0])
    """[1] When headway's own work on the training thread ended last: no sample counts for the time before.

    That work may hold the interpreter, so that nobody looks while it goes on.
    """

    write: Callable[[], None] | None = None
    """Writes the tables; called on the training thread when much has come."""

    _trainer: list[int] = field(default_factory=lambda: [0])
    _seen: dict[Place, list[int]] = field(default_factory=dict)
    _loop: dict[int, CodeType] = field(default_factory=dict)
    _forwards: dict[CodeType, int] = field(default_factory=dict)
    _samples: int = 0
    _write_at: int = 32
    _stop: threading.Event | None = None

    def follow(self, trainer: list[int], write: Callable[[], None]) -> None:
        """Begin to look at the thread whose identifier is in `trainer`."""
        if self._stop is None:
            self._trainer, self.write, self._stop = trainer, write, threading.Event()
            self.asks[0] = True
            stop = self._stop
            HiddenThread(lambda: self._run(stop), name="headway-gap").start()

    def stop(self) -> None:
        """Look no more."""
        if self._stop is not None:
            self._stop.set()

    def note_loop(self) -> None:
        """Note the frames below an update, or a backward, of the training thread, which calls this."""
        self.asks[0] = False
        frame: FrameType | None = sys._getframe(1)
        found: dict[int, CodeType] = {}
        while frame is not None:
            found[id(frame)] = frame.f_code  # a frame itself would keep everything in it alive
            frame = frame.f_back
        self._loop = found
        if self._samples >= self._write_at and self.write is not None:
            self._write_at = 2 * self._samples
            self.write()

    def note_forward(self) -> None:
        """Note the line of the loop from which a forward is called, on the training thread."""
        self.asks_forward[0] = False
        loop = self._shared(sys._getframe(1))[0]
        if loop is not None:
            self._forwards[loop.f_code] = loop.f_lineno

    def report(self) -> list[dict[str, Any]]:
        """Return the lines that took most time: {"line", "function", "ns", "count", "feeds_forward"} each."""
        seen = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {
                "line": line_of(code, line),
                "function": function,
                "ns": ns,
                "count": count,
                "feeds_forward": code in self._forwards and feeds(code, line, self._forwards[code]),
            }
            for (code, line, function), (ns, count) in seen[:MOST_LINES]
        ]

    def _run(self, stop: threading.Event) -> None:
        period, looks, hits, last = PERIOD_S, 0, 0, time.perf_counter_ns()
        while not stop.wait(period):
            moment = time.perf_counter_ns()
            if self.open[0]:
                since = max(moment - max(last, self.resumed[0]), 0)
                hits += self._sample(min(since, int(2e9 * period)))
            last = moment
            looks += 1
            if looks == LOOKS:
                period = RELAXED_S if hits < FEW or self._samples >= ENOUGH else PERIOD_S
                looks = hits = 0
            if looks % (LOOKS // 2 if period == PERIOD_S else FEW) == 0:
                self.asks[0] = True  # the loop may have moved into another function

    def _sample(self, ns: int) -> bool:
        """Take the stack of the training thread, which counts for `ns`; returns whether the script's own code ran."""
        frame = sys._current_frames().get(self._trainer[0])
        loop, below = self._shared(frame)
        if loop is None or not self.open[0]:
            return False
        while frame is not None and frame is not loop:
            if is_ours(frame.f_code) and frame.f_code.co_name not in UNTIMED:
                return False  # in a handler, a save, a wait that a probe times
            frame = frame.f_back
        place = (loop.f_code, loop.f_lineno, below.f_code.co_name if below is not None else "")
        entry = self._seen.get(place)
        if entry is None:
            if len(self._seen) >= MOST_PLACES:
                return True
            entry = self._seen[place] = [0, 0]
        entry[0] += ns
        entry[1] += 1
        self._samples += 1
        self.asks_forward[0] = True
        return True

    def _shared(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """Return the deepest frame of a stack that is also one of an update's, and the frame called there.

        The cell of a notebook that trained has ended when a later one runs: that one's frame stands for the loop's.
        """
        frames: list[FrameType] = []
        while frame is not None and self._loop.get(id(frame)) is not frame.f_code:
            frames.append(frame)
            frame = frame.f_back
        if frame is None:
            return None, None
        frames.append(frame)
        cells = [k for k in range(len(frames) - 1) if runs_cells(frames[k + 1]) and not runs_cells(frames[k])]
        place = cells[-1] if cells else len(frames) - 1
        return frames[place], frames[place - 1] if place else None
