"""Children of headway's own: forked ones, measurements, and idle ones that nobody is the parent of.

What a forked child says: for work whose traces (open files, threads, draws, a crash) must not stay in this process.

>>> said(lambda: b"done")
(b'done', 0)
>>> said(lambda: os._exit(3)), said(lambda: b"%d" % (1 // 0))
((b'', 3), (b'', 1))

A script may look after its children by a signal handler: it may stop when a child of it ends, or count those that did.
A child that is forked and waited for in a block of `unheard` is not a child of the script's: the handler does not run
for it. Where a child of the script's own ends meanwhile, the signal is raised again after the block.

>>> import os
>>> heard = []
>>> before = signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
>>> with unheard():
...     pid = os.fork()
...     if pid == 0: os._exit(0)
...     _ = os.waitpid(pid, 0)
>>> _ = signal.signal(signal.SIGCHLD, before)
>>> heard
[]

`start_idle` starts a process that works beside a rank in scheduling class idle, as nobody's child. A script that waits
for its children does not meet it, and it gets a core only while nobody else wants one. The program forks, prints the id
of the process that goes on, and ends; what goes on leaves the session, takes class idle, and watches the rank, so that
it ends with it (see `headway.power.burn`, `headway.parallel.fill.worker`).

>>> import sys
>>> start_idle([sys.executable, "-c", "print(4711)"])
4711
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.machine.apart import DETACHED, caches_of, die_with_parent, name_process, own_caches, step_apart
from headway.core.machine.hidden_thread import thread_times
from headway.core.machine.host import readable
from headway.core.machine.interruptions import pass_on, raised_behind
from headway.core.units import NS_PER_S

_waitid = os.waitid  # as it is: remedies wrap the script's


@contextmanager
def unheard() -> Iterator[None]:
    """Leave the script's handler of SIGCHLD out for the length of a block that forks a child and waits for it.

    Outside of the main thread, where Python sets no handlers, it stays.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended_before = _has_ended()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if not ended_before and _has_ended():
            signal.raise_signal(signal.SIGCHLD)


def _has_ended() -> bool:
    """Tell whether a child has ended that nobody has waited for yet."""
    with suppress(ChildProcessError):
        return _waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


@contextmanager
def _unwarned() -> Iterator[None]:
    """Leave out, for a fork, Python's warning of forking beside threads, as every loader does.

    Not by `catch_warnings`: after it Python has forgotten which warnings of the script's it has shown, and shows them
    again.
    """
    filters, ignoring = warnings.filters, ("ignore", None, DeprecationWarning, None, 0)
    filters.insert(0, ignoring)  # type: ignore[attr-defined]  # it is a list, whatever its stub says
    try:
        yield
    finally:
        with suppress(ValueError):  # a handler of a signal has taken all filters away
            filters.remove(ignoring)  # type: ignore[attr-defined]  # the same


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
    with _unwarned(), raised_behind():
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


# Children of a child that ends at once: they work in the background, and this process need not wait for them.

TIMEOUT_S, LATE_TIMEOUT_S = 60, 300
"""Seconds that a child has, and one whose work may be late; it ends itself."""


def detached(work: Callable[[], bytes], run: str = "") -> tuple[int, int]:
    """Run `work` apart in a child of a child; return a pipe that will carry what it returns, and the child's pid.

    b"" comes through the pipe if it fails.
    """
    reading, writing = os.pipe()
    try:
        return reading, start_detached(work, writing, run=run)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


@dataclass(frozen=True, slots=True)
class Aside:
    """Work that a child does before its own, and the pipe for its answer."""

    work: Callable[[], bytes]
    writing: int

    def answer(self) -> None:
        """Do it, and close the pipe: without an answer where it fails."""
        with contextlib.suppress(BaseException):  # then the pipe is closed without an answer
            os.write(self.writing, self.work())
        os.close(self.writing)


def start_detached(
    work: Callable[[], bytes],
    writing: int,
    *,
    forks: bool = False,
    run: str = "",
    first: Aside | None = None,
    late: bool = False,
) -> int:
    """Run `work` apart in a child of a child, which writes what it returns into `writing`; return its process id.

    What `first` is there to do is done before it, and answered at once: one child for two.

    The child between ends at once and is waited for here, so that no wait of the script's meets a process of ours.
    With `forks`, `work` may fork children of its own that step apart themselves. Of a core that others want it gets a
    tenth, `late` work a sixtieth: that may take minutes, and gets a tenth as well where threads wait for cores already.
    Libraries write their caches below `run`, where `settle` removes them.
    """
    caches = caches_of(run) if run else ""
    with unheard(), raised_behind():
        return _start_detached(work, writing, caches, forks=forks, first=first, late=late)


def _start_detached(
    work: Callable[[], bytes], writing: int, caches: str, *, forks: bool, first: Aside | None, late: bool
) -> int:
    told, telling = os.pipe()
    try:
        with _unwarned():
            pid = os.fork()
    except OSError:  # no process is left: then no descriptor is to be lost as well
        os.close(told)
        os.close(telling)
        raise
    if pid == 0:
        try:
            name_process(DETACHED)  # before the fork: the child has the name from its first moment on, and can be ended
            grandchild = os.fork()
            if grandchild:
                os.write(telling, b"%d" % grandchild)
            else:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
                signal.alarm(TIMEOUT_S)
                os.nice(10)  # beside steps that are recorded
                keep = (writing,) if first is None else (writing, first.writing)
                step_apart("end at writes", keep=keep, forks=forks, caches=caches)
                if first is not None:
                    first.answer()
                if late:
                    signal.alarm(LATE_TIMEOUT_S)
                    os.nice(0 if _is_crowded() else 9)
                answer = work()
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
                os.write(writing, answer)
        finally:
            os._exit(0)
    os.close(telling)
    with contextlib.suppress(ChildProcessError):  # a handler of the script may have waited for it already
        os.waitpid(pid, 0)
    try:
        return int(os.read(told, 20) or 0)
    finally:
        os.close(told)


def _is_crowded() -> bool:
    """Whether more threads want a core than there are cores, this one left out; False where nobody says."""
    with contextlib.suppress(OSError), open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split()[3].partition("/")[0]) > (os.cpu_count() or 1) + 1
    return False


def end_detached(pid: int) -> None:
    """End a child of `start_detached`, unless it has ended by itself."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:  # or it is gone
        if file.read().strip() == DETACHED:
            os.kill(pid, signal.SIGKILL)


def run_measurement(module: str, arguments: Sequence[str], *, what: str, longest_s: float, too_late: str) -> str:
    """Run `python -m module arguments` and return what it has printed.

    Raises `InputError`: `too_late` where it takes longer than `longest_s`, and its last words where it fails; `what` is
    measured.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest_s, check=False)
    except subprocess.TimeoutExpired as cause:
        raise InputError(too_late) from cause
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{what} could not be measured: {last}")
    return done.stdout


START_S = 10.0
"""Seconds after which a process that has not come up is given up."""


def is_able() -> bool:
    """Whether this system has what such a process needs: class idle, and handles of processes."""
    return hasattr(os, "SCHED_IDLE") and hasattr(os, "pidfd_open")


def start_idle(command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> int | None:
    """Run a program that forks and prints the id of its child; return that id, None where it says none in time."""
    environ = {"PATH": os.environ.get("PATH", os.defpath)}
    try:
        done = subprocess.run(
            [*command], env=environ, capture_output=True, text=True, timeout=START_S, check=False, pass_fds=pass_fds
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None
