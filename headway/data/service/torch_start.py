"""How a data server is started: by its first client, which forks one off, or by hand in a process of its own.

An arbitrary dataset (one with a lambda, one of `__main__`) cannot be sent to
another process, and must not be unpickled by one. So the first client forks:
its grandchild, in a session of its own, has the dataset already. It lets go of
every socket, pipe and terminal that it inherited, and keeps what memory the
client had at that moment: start a server before the model is built where that
matters, or by hand (`headway data serve MODULE:NAME`). What it says goes into
a log beside its socket, which is gone again when it ends in good order.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import math
import os
import secrets
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import HeadwayError
from headway.core.files.private import runtime_directory
from headway.core.machine.host import readable
from headway.core.wire.channel import ChannelClosed, Listener, connect, hold_lock, sweep_logs
from headway.data.guard.content_digest import portrait
from headway.data.service.messages import FROM_CLIENT, FROM_SERVER
from headway.data.service.server import Daemon
from headway.data.service.stock import DataServer
from headway.data.service.torch_preparers import identity, preparer_of
from headway.runtime.in_rank import bootstrap

START_S = 120.0
"""Longest that a server may take to look at its dataset; one that takes longer hangs in it, and is ended."""

RETRY_S = 0.02
"""How often a caller with a deadline looks whether another one has started the server."""

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


def start(path: Path, dataset: Any, options: DataServer, *, timeout_s: float | None = None) -> None:
    """Start a server for `dataset` at `path`, unless one is there; returns when it can be connected to.

    Raises `HeadwayError` when it does not come up: with what it said; `ChannelClosed` when it was killed while it
    started, and another try may succeed; `TimeoutError` when it is not there within
    `timeout_s`: it goes on to start then, and who asks later finds it.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    starting = _starting(path)
    lock = _hold(starting, deadline)  # whoever waits here finds the server that the first one started
    try:
        if _listens(path):
            return
        sweep_logs(path.parent, "data-*.log")
        log = path.with_suffix(".log")
        reads, writes = os.pipe()
        try:
            _fork(lambda: _serve(path, dataset, options, writes), log, keep=writes)
        finally:
            os.close(writes)
        said = _said(reads, deadline)
        if not said:
            raise ChannelClosed(f"it was killed while it started; see {log}{_last_line(log)}")
        if said != b"ready":
            raise HeadwayError(f"the data server did not start: {said.decode(errors='replace')}")
    finally:
        starting.unlink(missing_ok=True)
        os.close(lock)


def path_for(dataset: Any) -> Path:
    """Return where the server of a dataset listens."""
    return runtime_directory() / f"data-{portrait(identity(dataset))[:16]}.sock"


def run(path: Path, dataset: Any, options: DataServer, ready: Callable[[], object] = lambda: None) -> None:
    """Serve `dataset` at `path` in this process, until idle or told to end; call `ready` once clients may come."""
    torch.set_num_threads(1)  # the threads that prepare are the parallelism
    # Before the look at the dataset, which may take long: who comes meanwhile waits.
    listener = Listener(path, types=FROM_CLIENT)
    try:
        preparer = preparer_of(dataset)
        daemon = Daemon(listener, preparer, options, seed=secrets.randbits(60))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        os.register_at_fork(after_in_child=daemon.abandon)
        for note in preparer.notes:
            LOG.warning("%s", note)
        ready()
        daemon.run()
    finally:
        listener.close()


def _starting(path: Path) -> Path:
    """Return the lock file of those who start a server at `path`."""
    return Path(f"{path}.start")


def _hold(starting: Path, deadline: float) -> int:
    """Return the held lock. Raises `TimeoutError` when another caller still starts a server at `deadline`."""
    while deadline < math.inf:
        try:
            return hold_lock(starting, wait=False)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process still starts the data server: {starting} is locked.") from None
            time.sleep(RETRY_S)
    return hold_lock(starting, wait=True)


def _listens(path: Path) -> bool:
    """Whether a server is there."""
    try:
        connect(path, 0.0, types=FROM_SERVER).close()
    except ChannelClosed:
        return False
    return True


def _said(reads: int, deadline: float) -> bytes:
    """Return what the starting server says before it begins, or goes. Raises `TimeoutError` at `deadline`."""
    ends, said = time.monotonic() + START_S, b""
    try:
        while readable(reads, min(ends, deadline) - time.monotonic()):
            piece = os.read(reads, 65536)
            said += piece
            if not piece or said == b"ready":
                return said
        if deadline < ends:
            raise TimeoutError("the data server still looks at its dataset.")
        return f"it did not within {START_S:.0f} s".encode()
    finally:
        os.close(reads)


def _last_line(log: Path) -> str:
    """Return the last line of a log as an error adds it; empty where there is none."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")


def _fork(act: Callable[[], None], log: Path, *, keep: int) -> None:
    """Run `act` in a detached grandchild, which belongs to nobody, and return."""
    gc_was_on = gc.isenabled()
    gc.disable()  # what the child would collect is the parent's to end: its workers, its files
    child = os.fork()
    if child:
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the kernel has taken note already
            os.waitpid(child, 0)
        if gc_was_on:
            gc.enable()
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        _detach(log, keep)
        act()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _detach(log: Path, keep: int) -> None:
    """Leave everything of the parent's behind but its memory and the files that it reads."""
    gc.freeze()
    gc.enable()
    nowhere = os.open(os.devnull, os.O_RDWR)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (keep, nowhere, said) and not _is_read(number):
            # Not closed: its number stays taken, or an object of the parent's that closes it later would close ours.
            with contextlib.suppress(OSError):
                os.dup2(nowhere, number, inheritable=False)
    for stream, source in ((0, nowhere), (1, said), (2, said)):
        os.dup2(source, stream)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(k, m, closefd=False) for k, m in ((0, "r"), (1, "w"), (2, "w")))
    signal.set_wakeup_fd(-1)
    ignored = {signal.SIGPIPE, signal.SIGXFSZ}  # as Python has them: a write that fails shall raise
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *ignored}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    bootstrap.leave()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", force=True)


def _is_read(number: int) -> bool:
    """Whether a descriptor is a file that can only be read, a folder, or memory: what a dataset may need."""
    try:
        mode = os.fstat(number).st_mode
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        memory = os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
    except OSError:
        return False
    return stat.S_ISDIR(mode) or memory or (stat.S_ISREG(mode) and flags & os.O_ACCMODE == os.O_RDONLY)


def _serve(path: Path, dataset: Any, options: DataServer, tells: int) -> None:
    """Serve, tell the client that waits, and leave nothing behind."""
    waits = True

    def tell(what: bytes) -> None:
        nonlocal waits
        if waits:
            waits = False
            with contextlib.suppress(BrokenPipeError):  # it does not wait any more; the next one finds us
                os.write(tells, what)

    def ready() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        tell(b"ready")
        os.close(tells)

    # A server that hangs in its dataset must not stay for ever; its starter, which says so, goes first.
    signal.setitimer(signal.ITIMER_REAL, START_S + 1.0)
    try:
        run(path, dataset, options, ready)
    except BaseException as error:
        tell(f"{type(error).__name__}: {error}".encode())  # who waits goes on when we end: then the log is whole
        raise
    with contextlib.suppress(OSError):  # somebody starts another one, whose log it is now; or the folder is gone
        starting = _starting(path)
        lock = hold_lock(starting, wait=False)
        if not path.exists():
            path.with_suffix(".log").unlink(missing_ok=True)
        starting.unlink()
        os.close(lock)
