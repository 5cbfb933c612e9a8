"""A thread that the script does not see: `threading.enumerate()` and `active_count()` leave it out.

A script may wait for all threads that it finds, `for thread in threading.enumerate(): thread.join()`. A thread of
headway's that goes on as long as the process does would make it wait for ever. So what runs in a process of the
script's is started below the `threading` module, which then knows nothing of it. Like a daemon thread it does not keep
the interpreter from ending.

>>> ran = []
>>> thread = HiddenThread(lambda: ran.append(threading.active_count()), name="headway-example").start()
>>> before = threading.active_count()
>>> thread.join()
>>> ran == [before], thread.is_alive()
(True, False)

And what the scheduler counts of any thread, here because every rank imports it: nothing heavy comes along.

>>> min(thread_times(threading.get_native_id())) >= 0, thread_times(-1)
(True, (0, 0))
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable

from headway.core.machine.interruptions import pass_on

running: dict[int, str] = {}
"""Identifier -> name of each such thread that runs."""


class HiddenThread:
    """Calls `run` once, in a thread of its own. What it raises goes to `sys.unraisablehook`."""

    def __init__(self, run: Callable[[], object], *, name: str) -> None:
        self.name = name
        self.ident = 0
        """Identifier, as `threading.get_ident()` returns it in the thread; 0 before it runs."""
        self._run = run
        self._ended = _thread.allocate_lock()
        self._pid = 0

    def start(self) -> HiddenThread:
        """Start it; returns itself. Raises `RuntimeError` where the system gives no more threads."""
        self._ended.acquire()
        self._pid = os.getpid()
        try:
            _thread.start_new_thread(self._main, ())
        except RuntimeError:
            self._ended.release()
            raise
        return self

    def is_alive(self) -> bool:
        """Whether it was started, by this process, and has not ended: a fork has no copy of it."""
        return self._pid == os.getpid() and self._ended.locked()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, `timeout_s` at most."""
        if self.is_alive() and self._ended.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            self._ended.release()

    def _main(self) -> None:
        self.ident = _thread.get_ident()
        running[self.ident] = self.name
        try:
            self._run()
        finally:
            forget()
            del running[self.ident]
            self._ended.release()


def forget() -> None:
    """Take the calling thread out of what `threading` knows, where code that it ran asked for `current_thread()`.

    That enters a stand-in for a thread which `threading` did not start, and leaves it there for good.
    """
    ident = _thread.get_ident()
    if isinstance(threading._active.get(ident), threading._DummyThread):  # type: ignore[attr-defined]  # not in the stubs
        threading._active.pop(ident, None)  # type: ignore[attr-defined]  # nor this


def hide(thread: threading.Thread | None) -> None:
    """Take a thread that a library has started here for headway out of what `threading` knows; it ends as ever."""
    if thread is not None and threading._active.pop(thread.ident, None):  # type: ignore[attr-defined]  # not in the stubs
        vars(thread)["_delete"] = lambda: None  # what does that as it ends


def thread_times(tid: int, pid: int | str = "self") -> tuple[int, int]:
    """Return the CPU time and the run delay of a thread of a process, ns; zeros where it has ended, or is not told."""
    try:
        descriptor = os.open(f"/proc/{pid}/task/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(descriptor, 96).split()
        finally:
            os.close(descriptor)
        return int(fields[0]), int(fields[1])
    except (OSError, ValueError, IndexError) as cause:
        pass_on(cause)  # a time-out is an OSError
        return 0, 0
