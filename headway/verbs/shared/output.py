"""What every verb does last: print one JSON object, or text for a person.

While a verb that may take long is at work, stderr says so:

⠹ headway plan  12 s                         a terminal: from the first second on, gone before the answer
headway: comm bench has worked for 20 s      elsewhere: a line every 10 s
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headway.core.errors import InputError, say_beside
from headway.core.machine.hidden_thread import HiddenThread
from headway.report.paper import ScreenOptions, screen_of

if TYPE_CHECKING:
    from headway.report.page.live_server import LiveSource

AsJson = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]
"""The option --json of a verb."""


def emit(answer: Mapping[str, Any], render: Callable[[ScreenOptions], str], *, as_json: bool) -> int:
    """Print `answer` as exactly one JSON object, or the text that `render` makes for this screen; return 0."""
    stop()
    if as_json:
        print(json.dumps(finite(answer), allow_nan=False))
    else:
        print(render(screen_of(sys.stdout)).rstrip("\n"))
    return 0


def emit_beside(render: Callable[[ScreenOptions], str]) -> None:
    """Print the text that `render` makes on stderr: stdout belongs to the script that was run."""
    stop()
    say_beside(render(screen_of(sys.stderr)).rstrip("\n") + "\n")


def finite(value: Any) -> Any:
    """Return `value` with what JSON cannot hold replaced: NaN and infinities by null, numpy scalars by numbers."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def serve_page(
    source: LiveSource, answer: Callable[[str], tuple[Mapping[str, object], str]], *, host: str, port: int,
    allow_origin: Sequence[str], as_json: bool,
) -> int:  # fmt: skip
    """Serve `source` until Ctrl-C, return 0; what `answer` makes of the address is printed before, as JSON or as text.

    Raises `InputError` for an address that cannot be bound, or a
    misspelt origin.
    """
    from headway.report.page.live_server import Allowed, LiveServer, listening, server_of  # loads a web server

    allowed = Allowed.of(host, allow_origin)
    with listening(host, port) as bound:
        source.poll()
        shown = f"[{host}]" if ":" in host else host
        token = secrets.token_urlsafe(16)
        row, line = answer(f"http://{shown}:{bound.getsockname()[1]}/?token={token}")
        emit(row, lambda _: f"{line}   Ctrl-C ends it", as_json=as_json)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
            server_of(LiveServer(source, allowed, token)).run(sockets=[bound])
    return 0


def imported(target: str, example: str, *, absent: str = "nothing to import", form: str = "MODULE:NAME") -> Any:
    """Import `target`, written as MODULE:NAME, as Python would from the current folder; raises `InputError`.

    `absent` is what a target that is written otherwise does not name, `form` how a verb writes it, as in `example`.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise InputError(f"{target!r} names {absent}. Write {form}, such as {example}.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot import {target}: {error}. Run this where Python finds the module.") from error


LONG = frozenset({
    "plan", "why", "report", "whatif", "compare", "doctor", "comm bench", "comm options", "comm strategy",
    "cost calibrate", "cost predict", "ckpt export", "ckpt convert", "ckpt verify", "ckpt repair", "fault probe",
    "fault sim", "power plan", "power check", "cluster sim", "cluster compare", "cluster batch", "parallel plan",
    "parallel simulate", "model grow",
})  # fmt: skip
"""Verbs that say that they are at work."""

FIRST_S, TURN_S, LINE_S = 1.0, 0.25, 10.0
"""When a terminal is told first, how often its line moves, and how often a line is written elsewhere."""

FRAMES, ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
"""What turns before the line."""

CLEAR = "\r\033[2K"
"""Empties the line of a terminal."""


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
