"""What a forked child says: for work whose traces (open files, threads, draws, a crash) must not stay in this process.

>>> said(lambda: b"done")
(b'done', 0)
>>> said(lambda: os._exit(3)), said(lambda: b"%d" % (1 // 0))
((b'', 3), (b'', 1))
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable

from headway.core.machine.apart import die_with_parent, step_apart
from headway.core.machine.host import readable
from headway.core.machine.interruptions import raised_behind
from headway.core.machine.own_children import unheard

LONGEST_S = 86400.0
"""A child that has worked for so long without an answer hangs, unless the caller says otherwise."""


def said(work: Callable[[], bytes], timeout_s: float = LONGEST_S, *, apart: str = "") -> tuple[bytes, int]:
    """Return what `work` returned in a forked child, and how that ended: an exit code, or minus a signal.

    One that raises, dies, or says nothing for `timeout_s` seconds and is ended, has said b"". Where the script has its
    children waited for by others, nobody knows how it ended: 0 then. With `apart`, a key of
    `headway.core.machine.apart.SHARED`, `work` can only read.
    """
    with unheard():
        return _said(work, timeout_s, apart)


def _said(work: Callable[[], bytes], timeout_s: float, apart: str) -> tuple[bytes, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, as every loader does
        with raised_behind():
            pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            if apart:
                die_with_parent()
                step_apart(apart, keep=(writing,))
            answer = work()
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    parts = []
    with os.fdopen(reading, "rb", buffering=0) as file:
        while readable(file.fileno(), timeout_s):
            parts.append(file.read(1 << 16))
            if not parts[-1]:
                break
        else:
            os.kill(pid, signal.SIGKILL)
            parts.clear()
    status = 0
    with contextlib.suppress(ChildProcessError):  # a handler of the script may have waited for it already
        _, status = os.waitpid(pid, 0)
    return b"".join(parts), os.waitstatus_to_exitcode(status)
