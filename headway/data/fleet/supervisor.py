"""The process that starts the others of a fleet: master and workers are its forks, and it starts them again.

It is forked from the user's process once, before anything else happens there,
and stays single-threaded: so workers may be forked at any time, and inherit
what prepares the data without a pickle. It holds nothing that could be lost:
when it is killed, the user's process starts another (`keeper`), and the master
goes on from its checkpoint. When the user's process goes, all of them go. When
masters keep ending it gives up, and says why (`hub`).

A `FleetSettings` says what a fleet is; `start` brings it up.

Keeps a fleet's supervisor running: the process that reads from the fleet starts it again when it is killed.

Master and workers go with their supervisor. The next one begins with the
master's checkpoint; readers come back by themselves, and nothing that a loop
took comes again. A supervisor that ends by itself (its masters keep ending) is
not started again, nor one that is killed `MAX_QUICK` times in a row as soon
as it runs: then the fleet has ended. Readers of this process learn why from
`Keeper.failure`, all others from a process that refuses them (`hub`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.core.errors import HeadwayError, InputError
from headway.core.machine.apart import name_process
from headway.core.machine.host import readable
from headway.core.wire.channel import Channel, ChannelClosed, Listener, TcpListener, pair
from headway.core.wire.loop import ServiceLoop
from headway.data.fleet.autoscale import Autoscaler
from headway.data.fleet.hub import START_AGAIN, Hub, Scaling, ended_with, refuse_all
from headway.data.fleet.master import Master
from headway.data.fleet.splits import SCHEME, GaveUp, Target, ToMaster, listen
from headway.data.fleet.worker import Make, serve
from headway.runtime.launching.agent import die_with

MAX_ENDS, ENDS_S = 20, 10.0
"""So many workers may end unasked within so many seconds before no more are started."""
LOOK_S = 1.0
"""How often the supervisor looks whether its parent lives: others may hold the parent's end of their channel."""
QUICK_S = 2.0
TAKEN_S = 1.0
"""How long a master waits for its address: one whose supervisor was killed a moment ago may not be gone yet."""
SEND_S = 1.0
"""Longest that the other end may leave a message unread."""
MAX_QUICK = 5
"""So many masters may end within `QUICK_S` of their start before the fleet ends."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What a fleet is, but for what it prepares."""

    folder: Path
    """Where sockets and the master's checkpoint lie; for this fleet alone."""
    num_items: int
    data: str = ""
    """Fingerprint of the data; readers that expect another are refused."""
    num_workers: int = 1
    """At the start, and for ever when `most_workers` equals `least_workers`."""
    least_workers: int = 1
    most_workers: int = 1
    period_s: float = 5.0
    """How often the number of workers is looked at."""
    split_batches: int = 4
    window: int = 8
    """Splits per reader that may be out."""
    workers_per_reader: int = 4
    lease_s: float = 10.0
    patience_s: float = 30.0
    """How long workers wait for a master to come back."""
    host: str = ""
    """Address of this host for readers and workers on others; empty: unix sockets."""
    port: int = 0
    token: str = ""
    """Secret for those from other hosts."""

    def __post_init__(self) -> None:
        """Raise `InputError` on bounds that leave no choice."""
        if not 1 <= self.least_workers <= self.num_workers <= self.most_workers:
            raise InputError(
                f"{self.num_workers} workers lie outside {self.least_workers}..{self.most_workers}. Pass 1 or more, "
                "within the bounds."
            )
        if self.host and not (self.token and self.port):
            raise InputError(f"a fleet at {self.host} needs a port and a token. Pass both.")

    @property
    def address(self) -> str:
        """Where the master listens."""
        return f"{SCHEME}{self.host}:{self.port}" if self.host else str(self.folder / "master")

    def worker_address(self, number: int) -> str:
        """Where worker `number` listens."""
        return f"{SCHEME}{self.host}:0" if self.host else str(self.folder / f"w{number}")


def start(make: Make, settings: FleetSettings, *, sweeps: bool = False, refuses: str = "") -> tuple[int, Channel]:
    """Fork a supervisor; returns its process id, and the channel that keeps the fleet up as long as it is open.

    With `sweeps` the fleet's folder goes with it, however the user's process ends. One that gives up sends a
    `GaveUp` and ends. With `refuses`, the reason why the fleet has ended, the process runs no fleet: it tells
    all who come to the master's address.
    """
    ours, theirs = pair(types=GaveUp)

    def supervise() -> None:
        ours.abandon()
        name_process("headway-fleet")
        if refuses:
            refuse_all(settings.address, settings.token, refuses, theirs)
        elif why := FleetSupervisor(make, settings, theirs).run():
            with contextlib.suppress(ChannelClosed, TimeoutError):
                theirs.send(GaveUp(why), timeout_s=SEND_S)
                return  # the process that refuses is next, and needs the folder
        if sweeps:
            shutil.rmtree(settings.folder, ignore_errors=True)

    # The kernel's word for it would come with the end of this thread: the supervisor looks for its parent itself.
    pid = forked(supervise, die_too=False)
    theirs.abandon()
    return pid, ours


def forked(function: Callable[[], object], *, die_too: bool = True) -> int:
    """Run `function` in a fork of this process, which dies with this thread if `die_too`; returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if die_too:
            die_with(parent)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the user's process's to answer
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # a worker is one core; and a pool of threads does not survive a fork
        function()
        code = 0
    except BaseException:  # it ends here, whatever it is: nothing of the parent's may run on in the child
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


class FleetSupervisor:
    """Keeps one master and the wanted number of workers running."""

    def __init__(self, make: Make, settings: FleetSettings, user: Channel) -> None:
        """`user` is connected to the user's process: its end is the end of the fleet."""
        self._make, self._settings, self._user = make, settings, user
        self._parent = os.getppid()
        self._loop, self._left = ServiceLoop(patience_s=math.inf), threading.Event()
        self._loop.watch(user, self._left.set)
        self._hub: Channel | None = None
        self._master_pid, self._begun_s, self._quick = 0, 0.0, 0
        self._pids: set[int] = set()
        self._workers: set[int] = set()
        self._leaving: set[int] = set()
        self._wanted, self._next = settings.num_workers, 0
        self._ends: collections.deque[float] = collections.deque(maxlen=MAX_ENDS)
        self._gave_up, self._master_error, self._why = "", "", ""

    def run(self) -> str:
        """Run until the user's process goes; returns why it ends earlier, as when masters keep ending, else nothing."""
        try:
            self._start_master()
            while os.getppid() == self._parent and not (self._left.is_set() or self._why):
                while len(self._workers - self._leaving) < self._wanted and not self._gave_up:
                    run = functools.partial(run_worker, self._make, self._settings, self._next)
                    self._workers.add(self._fork(run))
                    self._next += 1
                self._loop.turn(LOOK_S)
            return "" if self._left.is_set() else self._why
        except Exception as error:  # as when the system lets it start no more processes
            traceback.print_exc()
            return f"the fleet's supervisor failed with {type(error).__name__}: {error}. {START_AGAIN}"
        finally:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _start_master(self) -> None:
        ours, theirs = pair(types=Target | GaveUp)
        settings = self._settings

        def run() -> None:
            ours.abandon()
            try:
                run_master(settings, theirs)
            except Exception as error:
                with contextlib.suppress(ChannelClosed, TimeoutError):
                    theirs.send(GaveUp(f"{type(error).__name__}: {error}"), timeout_s=SEND_S)
                raise

        self._master_error = ""
        self._master_pid, self._begun_s = self._fork(run), time.monotonic()
        theirs.abandon()
        self._hub = ours
        self._loop.add(ours, self._hear, self._lose)
        if self._gave_up:
            self._loop.send(ours, GaveUp(self._gave_up))

    def _fork(self, run: Callable[[], object]) -> int:
        def child() -> None:
            # Closed, not shut down: the connections live on in the parent.
            self._user.abandon()
            if self._hub is not None:
                self._hub.abandon()
            self._loop.close()
            run()

        pid = forked(child)
        self._pids.add(pid)
        if not self._loop.watch_process(pid, lambda: self._ended(pid)):
            raise HeadwayError(f"process {pid} of the fleet cannot be watched. Allow this process more open files.")
        return pid

    def _hear(self, _: Channel, message: msgspec.Struct) -> None:
        """Do what the master says about the number of workers; note why it ends."""
        if isinstance(message, GaveUp):
            self._master_error = message.why
        elif isinstance(message, Target):
            self._wanted, self._leaving = message.workers, set(message.leaving) & self._workers

    def _lose(self, channel: Channel, _: str = "") -> None:
        self._loop.drop(channel)
        self._hub = None

    def _ended(self, pid: int) -> None:
        """Reap a process and see to its successor, or note why there is to be none of anything."""
        self._pids.discard(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if pid == self._master_pid:
            if self._hub is not None:
                self._loop.hear(self._hub)
            if self._hub is not None:
                self._lose(self._hub)
            self._quick = self._quick + 1 if time.monotonic() - self._begun_s < QUICK_S else 0
            if self._quick >= MAX_QUICK:
                error = f" ({self._master_error})" if self._master_error else ""
                self._why = (
                    f"{MAX_QUICK} masters of the fleet in a row ended within {QUICK_S:g} s of their start, the last "
                    f"with {ended_with(code)}{error}, so no more are started. {START_AGAIN}"
                )
                return
            self._start_master()
            return
        self._workers.discard(pid)
        if code:
            self._ends.append(time.monotonic())
            if len(self._ends) == MAX_ENDS and self._ends[-1] - self._ends[0] < ENDS_S:
                self._gave_up = (
                    f"{MAX_ENDS} workers of the fleet ended within {ENDS_S:g} s, the last with {ended_with(code)}. "
                    "Look for the cause in their output, remove it, and start the fleet again."
                )
                if self._hub is not None:
                    self._loop.send(self._hub, GaveUp(self._gave_up))


def run_master(settings: FleetSettings, supervisor: Channel | None) -> None:
    """Be the master's process until the supervisor goes."""
    name_process("headway-master")
    master = Master(
        settings.num_items,
        data=settings.data,
        split_batches=settings.split_batches,
        window=settings.window,
        most_workers=settings.workers_per_reader,
        lease_s=settings.lease_s,
        checkpoint=settings.folder / "master.json",
    )
    scaling = None
    if settings.least_workers < settings.most_workers:
        scaling = Scaling(Autoscaler(settings.least_workers, settings.most_workers), settings.period_s)
    listener = _listening(settings)
    Hub(master, listener, supervisor=supervisor, num_workers=settings.num_workers, scaling=scaling).run()


def _listening(settings: FleetSettings) -> Listener | TcpListener:
    """Return the master's listener. Raises `InputError` when another process has the address for long."""
    until_s = time.monotonic() + TAKEN_S
    while True:
        try:
            return listen(settings.address, settings.token, ToMaster)[0]
        except InputError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def run_worker(make: Make, settings: FleetSettings, number: int) -> None:
    """Be worker `number` until the master says stop."""
    name, address = f"w{number}", settings.worker_address(number)
    name_process(f"headway-{name}")
    serve(
        name, settings.address, address, make,
        token=settings.token, lease_s=settings.lease_s, patience_s=settings.patience_s,
    )  # fmt: skip


LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


class Keeper:
    """One supervisor at a time, of the process that made this object. Close it to end the fleet."""

    def __init__(self, make: Make, settings: FleetSettings, *, sweeps: bool = False) -> None:
        """Start the fleet; with `sweeps` its folder goes with it, however this process ends."""
        self._make, self._settings, self._sweeps = make, settings, sweeps
        self._pid, self._lock, self._closed = os.getpid(), threading.RLock(), False
        self.failure = ""
        """Why the fleet has ended, for its user; empty as long as it has not, or was closed."""
        self.supervisor, self._channel = start(make, settings, sweeps=sweeps)
        """Process id of the supervisor that runs now, after a failure that of the process that tells others of it."""
        self._thread = threading.Thread(target=self._watch, name="headway-fleet-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the fleet end; a collector may call it in any thread. In a fork of the process that made it: nothing."""
        if self._pid == os.getpid():
            with self._lock:
                self._closed = True
                self._channel.close()

    def close(self) -> None:
        """End the fleet and wait for its end; doing it again is fine."""
        self.stop()
        if self._pid == os.getpid():
            self._thread.join()

    def _watch(self) -> None:
        """Wait for the supervisor's end; start another where it was killed, else one that says why there is none."""
        num_quick = 0
        while True:
            begun_s = time.monotonic()
            code = _waited_for(self.supervisor)
            with self._lock:
                if self._closed or self.failure:
                    return
                num_quick = num_quick + 1 if time.monotonic() - begun_s < QUICK_S else 0
                self.failure = self._why_ended(code, num_quick)
                if self.failure:
                    LOG.error("the fleet has ended: %s", self.failure)
                else:
                    LOG.warning("the fleet's supervisor ended with %s; another one is started", ended_with(code))
                self._channel.close()
                try:
                    self.supervisor, self._channel = start(
                        self._make, self._settings, sweeps=self._sweeps, refuses=self.failure
                    )
                except Exception as error:  # as when the system lets us start no more processes
                    self.failure = self.failure or (
                        f"the fleet's supervisor ended with {ended_with(code)}, and another one cannot be started "
                        f"({type(error).__name__}: {error}). {START_AGAIN}"
                    )
                    LOG.exception("no process tells others that the fleet has ended: %s", self.failure)
                    return
                if self._closed:  # by a collector, while this thread started it
                    self._channel.close()

    def _why_ended(self, code: int | None, num_quick: int) -> str:
        """Return why there is to be no other supervisor after one that ended with `code`, else nothing."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            said: str = self._channel.receive(timeout_s=0.0)[0].why
            return said
        if code is not None and code >= 0:
            return (
                f"the fleet's supervisor ended with {ended_with(code)}: its traceback is in the output of this "
                f"process. {START_AGAIN}"
            )
        if num_quick >= MAX_QUICK:
            return (
                f"{MAX_QUICK} supervisors of the fleet in a row ended within {QUICK_S:g} s of their start, the last "
                f"with {ended_with(code)}, so no more are started. {START_AGAIN}"
            )
        return ""


def _waited_for(pid: int) -> int | None:
    """Wait until a child has ended; return its exit code, minus the signal that ended it, or None when it is lost."""
    # Not with waitpid alone: where the script waits for any child, it may take this one's end first.
    with contextlib.suppress(OSError):  # it has ended already, or this process can open no more files
        pidfd = os.pidfd_open(pid)
        try:
            readable(pidfd, None)
        finally:
            os.close(pidfd)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
