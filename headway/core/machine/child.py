"""What a forked child says: for work whose traces (open files, threads, draws, a crash) must not stay in this process.

>>> said(lambda: b"done")
(b'done', 0)
>>> said(lambda: os._exit(3)), said(lambda: b"%d" % (1 // 0))
((b'', 3), (b'', 1))
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable

from headway.core.machine.apart import caches_of, die_with_parent, own_caches, step_apart
from headway.core.machine.hidden_thread import thread_times
from headway.core.machine.host import readable
from headway.core.machine.interruptions import pass_on, raised_behind
from headway.core.machine.own_children import unheard
from headway.core.units import NS_PER_S

EXTENSION = 3.0
"""How much longer than it may a child works that computes: times the time that it has."""

LONGEST_S = 86400.0
"""A child that has worked for so long without an answer hangs, unless the caller says otherwise."""


def said(work: Callable[[], bytes], timeout_s: float = LONGEST_S, *, apart: str = "") -> tuple[bytes, int]:
    """Return what `work` returned in a forked child, and how that ended: an exit code, or minus a signal.

    One that raises, dies, or says nothing for `timeout_s` seconds and is ended, has said b"". Where the script has its
    children waited for by others, nobody knows how it ended: 0 then. With `apart`, a key of
    `headway.core.machine.apart.SHARED`, `work` can only read, and its libraries write caches that are thrown away.
    """
    with unheard(), contextlib.ExitStack() as stack:
        caches = _folder_of_caches(stack) if apart else ""
        return _said(work, timeout_s, apart, caches)


def _folder_of_caches(stack: contextlib.ExitStack) -> str:
    """Return a folder for the caches of libraries in children: one for all children of a recorded run.

    What one of them has compiled, the others find. '' where there is no room for it: then the child has none.
    """
    run = os.environ.get("HEADWAY_RUN", "")
    if own_caches:
        return own_caches[0]
    if os.path.isdir(run):
        return caches_of(run)
    try:
        folder = os.path.realpath(tempfile.mkdtemp(prefix="headway-apart-"))
    except OSError:
        return ""
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _said(work: Callable[[], bytes], timeout_s: float, apart: str, caches: str) -> tuple[bytes, int]:
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
                step_apart(apart, keep=(writing,), caches=caches)
            answer = work()
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    parts = []
    with os.fdopen(reading, "rb", buffering=0) as file:
        while _answers(file.fileno(), pid, timeout_s):
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


def _answers(reading: int, pid: int, timeout_s: float) -> bool:
    """Whether a child answers within `timeout_s`; one that computes, or wants to, has `EXTENSION` times as long more.

    It compiles, on a busy host perhaps. One that hangs waits for a lock, or for another thread: it computes nothing.
    """
    if readable(reading, timeout_s):
        return True
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError as cause:  # a handler of the script may have waited for it already
        pass_on(cause)
        return False
    busy_ns = sum(sum(thread_times(int(tid), pid)) for tid in threads)  # CPU time, and waiting for a core
    return busy_ns / NS_PER_S > timeout_s / 2 and readable(reading, EXTENSION * timeout_s)
