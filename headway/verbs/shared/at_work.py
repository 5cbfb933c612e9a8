"""What stands on stderr while a verb that may take long is at work.

⠹ headway plan  12 s                         a terminal: from the first second on, gone before the answer
headway: comm bench has worked for 20 s      elsewhere: a line every 10 s
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from headway.core.errors import say_beside
from headway.core.machine.hidden_thread import HiddenThread
from headway.report.paper import screen_of

LONG = frozenset({
    "plan", "why", "report", "whatif", "compare", "doctor", "comm bench", "comm options", "comm strategy",
    "cost calibrate", "cost predict", "ckpt export", "ckpt convert", "ckpt verify", "ckpt repair", "fault probe",
    "fault sim", "power plan", "power check", "cluster sim", "cluster compare", "cluster batch", "parallel plan",
    "parallel simulate", "model grow",
})  # fmt: skip
"""Verbs that say so."""

FIRST_S, TURN_S, LINE_S = 1.0, 0.25, 10.0
"""When a terminal is told first, how often its line moves, and how often a line is written elsewhere."""

FRAMES, ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
"""What turns before the line."""


class _Line:
    """The line of the verb that is at work."""

    def __init__(self, verb: str) -> None:
        self.verb, self.ended = verb, threading.Event()
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"
        self._thread = HiddenThread(self._tell, name="headway-at-work").start()

    def end(self) -> None:
        self.ended.set()
        self._thread.join()

    def _tell(self) -> None:
        begin, terminal, turn = time.monotonic(), self._terminal, 0
        frames = FRAMES if screen_of(sys.stderr)["unicode"] else ASCII_FRAMES
        if self.ended.wait(FIRST_S if terminal else LINE_S):
            return
        while True:
            spent_s = time.monotonic() - begin
            if terminal:
                say_beside(f"{CLEAR}{frames[turn % len(frames)]} headway {self.verb}  {spent_s:.0f} s")
            else:
                say_beside(f"headway: {self.verb} has worked for {spent_s:.0f} s\n")
            turn += 1
            if self.ended.wait(TURN_S if terminal else LINE_S):
                break
        if terminal:
            say_beside(CLEAR)


CLEAR = "\r\033[2K"
"""Empties the line of a terminal."""

_lines: list[_Line] = []
"""That of this process's verb, if it is at work."""


@contextlib.contextmanager
def at_work(verb: str) -> Iterator[None]:
    """Say on stderr that `verb` is at work while the block runs, until `stop`; nothing if it is none of `LONG`."""
    if verb in LONG and sys.stderr is not None:
        _lines.append(_Line(verb))
    try:
        yield
    finally:
        stop()


def stop() -> None:
    """Take the line away: the answer comes now."""
    while _lines:
        _lines.pop().end()
