"""The line that a run shows of itself while it goes on: step, steps/s, MFU where it is known, goodput, top loss.

On a terminal it is one line below the ranks' output, wiped before anything
else is printed and never drawn while a rank's own line is unfinished (a
progress bar). Elsewhere it is a plain line every ten seconds. Figures are
live estimates from the records drained so far; the ledger of the finished run
decides. Times in ns on CLOCK_MONOTONIC.

>>> progress = RunStatus(start_ns=0, world_size=1)
>>> progress.line(now_ns=2_000_000_000)
'starting up for 2 s'
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.units import format_fraction, format_rate, format_seconds
from headway.runtime.run_folder.drain import Drainer
from headway.runtime.run_folder.streams import Streams, write_all
from headway.trace.rings.records import RingHeader

if TYPE_CHECKING:
    from headway.ledger.live_ledger import LiveLedger
    from headway.ledger.live_mfu import LiveMfu

PLAIN_EVERY_S = 10.0
REDRAW_S = 0.5
QUIET_S = 5.0
"""After so long without a step the line says so."""


class RunStatus:
    """What the records drained so far say of the run, in one line; fed by one thread, read by another."""

    def __init__(self, *, start_ns: int, world_size: int, run: Path | None = None) -> None:
        self._start_ns, self._world_size, self._run = start_ns, world_size, run
        self._mfu: LiveMfu | None = None
        self._lock = threading.Lock()
        self._ledger: LiveLedger | None = None

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Take in what was drained from one process."""
        self._account.add(header, records)

    def line(self, now_ns: int) -> str:
        """Return the line as plain text."""
        figures = self._account.figures(now_ns)
        if not any(rank.begun for rank in figures.ranks):
            return f"starting up for {format_seconds(max(now_ns - self._start_ns, 1) / 1e9)}"
        amounts = figures.bucket_ns
        total_ns = max(sum(amounts.values()), 1)
        top = max((name for name in amounts if name != "useful"), key=lambda name: amounts[name])
        idle_s = (now_ns - max(rank.last_step_ns for rank in figures.ranks)) / 1e9
        # What comes after the last step, the writing of results say, does not slow the steps down.
        waits = f" | no step for {format_seconds(idle_s)}" if idle_s > QUIET_S and figures.steps else ""
        grown = f" | steps take {figures.slower:g}x as long as at first" if figures.slower > 1 else ""
        share = self._mfu.of(figures) if self._mfu is not None else None
        used = "" if share is None else f" | MFU {format_fraction(share)}"
        # The first step alone has no rate: it holds what comes once.
        rate = f" | {format_rate(figures.steps_per_s_then)} steps/s" if figures.steps_per_s_then > 0 else ""
        return (
            f"step {figures.steps}{rate}{waits}{grown}{used} | "
            f"goodput {format_fraction(figures.goodput, 0) if figures.tells_goodput else 'unknown'} | "
            f"top loss {top} {format_fraction(amounts[top] / total_ns, 0)}"
        )

    @property
    def _account(self) -> LiveLedger:
        """The account; made in the thread that first needs it, since loading it takes the launcher a moment."""
        from headway.ledger.live_ledger import LiveLedger
        from headway.ledger.live_mfu import LiveMfu

        with self._lock:
            if self._ledger is None:
                self._mfu = LiveMfu(self._run) if self._run is not None else None
                self._ledger = LiveLedger(start_ns=self._start_ns, world_size=self._world_size)
            return self._ledger


class StatusLine:
    """Shows `RunStatus` on stderr until it is stopped."""

    def __init__(
        self, streams: Streams, *, world_size: int, start_ns: int | None = None, run: Path | None = None
    ) -> None:
        self.progress = RunStatus(start_ns=start_ns or time.perf_counter_ns(), world_size=world_size, run=run)
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
                begin = "" if self._streams.at_line_start else "\n"  # a rank printed half a line
                self._streams.at_line_start = True
                self._write(f"{begin}headway: {text}\n")
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
    line = Text.assemble(("headway ", "bold cyan"), text)
    line.truncate(max(console.width - 1, 8), overflow="ellipsis")
    with console.capture() as capture:
        console.print(line, end="", soft_wrap=True)
    return capture.get()
