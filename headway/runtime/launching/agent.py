"""The ranks of one host, as processes: started, watched, signalled, stopped.

No torch here: a rank starts before anything heavy is imported. Each rank
leads a session of its own and dies with the launcher, however the launcher
dies. Times in ns on CLOCK_MONOTONIC, grace in seconds.

>>> group = Group([RankSpec(0, 0, ("/bin/sh", "-c", "exit 3"), {})])
>>> group.start(lambda spec: (1, 2))
>>> with Signals() as signals: group.wait(signals, grace_s=1.0)
>>> group.ranks[0].code
3
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from headway.core.errors import say_beside
from headway.core.wire.loop import Waker
from headway.runtime.launching.peers import PeerBoard
from headway.runtime.launching.save_and_leave import ASK_FRACTION, LeaveBoard

PR_SET_PDEATHSIG = 1
SETTLE_S = 1.0
"""How long the others may go on when the first rank to go blames its connection: the guilty one is about to exit."""

_LIBC = ctypes.CDLL(None, use_errno=True)


QUIET_S = 2.0
"""How long a script that got Ctrl-C may go on before that is said."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank runs."""

    rank: int
    """Global rank."""

    local_rank: int
    """Rank on this host."""

    argv: tuple[str, ...]
    """Program and arguments."""

    env: Mapping[str, str]
    """Its whole environment."""


Spawn = Callable[[RankSpec, int, int], "int | None"]
"""Starts a rank that writes to these two descriptors, as a child of this process; returns its id, None to leave it."""


class RankProcess:
    """One rank while it runs, and how it ended."""

    def __init__(self, spec: RankSpec, stdout_fd: int, stderr_fd: int, *, spawn: Spawn | None = None) -> None:
        """Start it: by `spawn`, where that does."""
        self.spec = spec
        self.told = False
        """Whether it was sent a signal before it ended."""
        self.code: int | None = None
        """Exit code, minus the signal when one killed it; None while it runs."""
        self.covered = False
        """Whether it was killed, and the other ranks do its work."""
        self.end_ns: int | None = None
        parent = os.getpid()
        self.start_ns = time.perf_counter_ns()
        pid = spawn(spec, stdout_fd, stderr_fd) if spawn is not None else None
        self.warm = pid is not None
        """Whether it was forked from a process that had imported what it needs."""
        self._process = (
            None
            if pid is not None
            else subprocess.Popen(
                spec.argv,
                env=dict(spec.env),
                stdout=stdout_fd,
                stderr=stderr_fd,
                start_new_session=True,
                close_fds=False,  # what the launcher was given to hand on, as in `train.py <(zcat rows.gz)`
                # Runs in the child between fork and exec; it calls into libc only.
                # Asked, not killed: a script that saves when it is told to end does so here, too.
                preexec_fn=lambda: die_with(parent, signal.SIGTERM),
            )
        )
        self.pid = self._process.pid if self._process is not None else pid or 0
        try:
            self.pidfd: int | None = os.pidfd_open(self.pid)
        except OSError:
            self.pidfd = None

    def poll(self) -> int | None:
        """Return the exit code once the process is gone, else None."""
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.end_ns = time.perf_counter_ns()
            if self.told or self._failed():
                # While the zombie stands its id cannot be reused, so this group is surely the rank's own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.code = self._process.wait() if self._process is not None else _reaped(self.pid)
            if self.pidfd is not None:
                os.close(self.pidfd)
                self.pidfd = None
        return self.code

    def send(self, number: int, *, whole_group: bool = False) -> None:
        """Signal the rank, or its whole process group; a rank that is gone is left alone."""
        if self.poll() is None:
            self.told = self.told or number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if whole_group else os.kill)(self.pid, number)

    def _failed(self) -> bool:
        """Say whether the zombie ended with another code than 0; what a clean rank left running is left alone."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None and (found.si_code != os.CLD_EXITED or found.si_status != 0)


def _reaped(pid: int) -> int:
    """Return the exit code of a child that has ended, minus the signal when one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when process `parent`, which started it, ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died in between
        os._exit(1)


class Signals:
    """Signals that reached the launcher: counted here, acted upon by `Group.wait`."""

    STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    PASS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)

    def __init__(self) -> None:
        self.stop: list[int] = []
        """Stop signals received, in order."""
        self.passing: list[int] = []
        """Signals to hand on to the ranks as they are."""
        self._wake = Waker()
        self._previous: dict[int, object] = {}
        self.on_stop: Callable[[], None] | None = None
        """Called in the handler: breaks a wait that only an exception can end (a rendezvous)."""

    @property
    def preempted(self) -> bool:
        """Whether the first stop signal was SIGTERM or SIGHUP (a scheduler, a lost terminal), not Ctrl-C."""
        return bool(self.stop) and self.stop[0] != signal.SIGINT

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a signal arrives."""
        return self._wake.fileno()

    def drain(self) -> None:
        """Make `fileno` quiet again."""
        self._wake.clear()

    def __enter__(self) -> Signals:
        """Install the handlers; outside the main thread Python allows none, and signals stay the caller's."""
        if threading.current_thread() is threading.main_thread():
            for number in (*self.STOP, *self.PASS):
                if signal.getsignal(number) == signal.SIG_IGN:
                    continue  # under nohup, or in the background of a shell: the ranks ignore it as well
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]  # a handler as signal.signal returned it
        self._previous.clear()
        self._wake.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        (self.stop if number in self.STOP else self.passing).append(number)
        self._wake.ring()
        if self.on_stop is not None and number in self.STOP:
            self.on_stop()


class Group:
    """All ranks of one host and one attempt."""

    def __init__(self, specs: Sequence[RankSpec]) -> None:
        self._specs = list(specs)
        self.ranks: list[RankProcess] = []
        """The rank processes, by local rank, once started."""
        self.overdue: Callable[[], bool] = lambda: False
        """Asked at every step: whether the ranks are to be stopped because they make no progress."""
        self.hung = False
        """Whether they were."""
        self.spawn: Spawn | None = None
        """What may start ranks in place of this process."""
        self.look: Callable[[], None] = lambda: None
        """Called at every step while ranks run."""
        self.detected_ns: int | None = None
        """When it was seen that a rank had failed, or that they made no progress."""
        self.located_ns: int | None = None
        """When it was known which of them failed first."""
        self.saves_first = True
        """Whether ranks that can are asked to save and leave before SIGTERM is forwarded to them."""
        self._board: LeaveBoard | None = None
        self._peers: PeerBoard | None = None
        self.on_killed: Callable[[RankProcess, PeerBoard], None] = lambda rank, board: None
        """Called with a killed rank of a job that goes on without ranks, where it can: then the rank is `covered`."""

    def start(self, attach: Callable[[RankSpec], tuple[int, int]]) -> None:
        """Start every rank; `attach` gives the (stdout, stderr) descriptors it writes to, which are closed here."""
        self._board = LeaveBoard.make(len(self._specs))
        self._peers = PeerBoard(self._board.descriptor, len(self._specs))
        try:
            for index, spec in enumerate(self._specs):
                ends = attach(spec)
                spec = replace(spec, env={**spec.env, **self._board.variable(index)})
                try:
                    self.ranks.append(RankProcess(spec, *ends, spawn=self.spawn))
                finally:
                    for fd in ends:
                        if fd > 2:
                            os.close(fd)
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    @property
    def running(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.poll() is None]

    @property
    def failed(self) -> bool:
        """Whether a rank has ended with another code than 0, and the others cannot do without it."""
        return any(rank.poll() not in (None, 0) and not rank.covered for rank in self.ranks)

    def wait(
        self, signals: Signals, *, grace_s: float, is_secondary: Callable[[RankProcess], bool] | None = None
    ) -> None:
        """Return when every rank is gone: by itself, after a peer's failure, or after a stop signal.

        A rank that was killed is done without where the others can (`peers`). After another failure they get SIGTERM,
        and SIGKILL after `grace_s`; a stop signal is forwarded as it came, a second one kills at once.
        Before a first SIGTERM ranks that can save have `ASK_FRACTION` of the grace to do so and leave.
        """
        while self.running:
            if not self.step(signals, grace_s=grace_s, is_secondary=is_secondary):
                return

    def step(
        self,
        signals: Signals,
        *,
        grace_s: float,
        is_secondary: Callable[[RankProcess], bool] | None = None,
        timeout_s: float = 0.2,
    ) -> bool:
        """Watch for at most `timeout_s`; returns False once no rank runs any more."""
        self._sleep(signals, timeout_s)
        self.look()
        for index, rank in enumerate(self.ranks):
            if rank.poll() == 0 and self._peers is not None:
                self._peers.note_end(index)
        for number in signals.passing:
            self.tell(number)
        signals.passing.clear()
        if signals.stop:
            self._obey(signals, grace_s)
        elif self.failed and self.running and not self._do_without():
            self.detected_ns = self._first_end_ns()
            first = [rank for rank in self.ranks if rank.code not in (None, 0) and not rank.covered]
            if is_secondary is not None and all(is_secondary(rank) for rank in first):
                self._wait_for(
                    lambda: any(r.code not in (None, 0) and not is_secondary(r) for r in self.ranks), SETTLE_S
                )
            self.located_ns = time.perf_counter_ns()
            self.stop(grace_s=grace_s, signals=signals)
        elif self.running and self.overdue():
            self.hung, self.detected_ns = True, time.perf_counter_ns()
            self.stop(grace_s=grace_s, signals=signals)
        return bool(self.running)

    def _do_without(self) -> bool:
        """Let the others run after ranks were killed, where they said that they can; returns whether they do."""
        lost = [index for index, rank in enumerate(self.ranks) if rank.code not in (None, 0) and not rank.covered]
        ended = [self.ranks[index] for index in lost]
        if self._peers is None or any(rank.told or (rank.code or 0) > 0 for rank in ended):
            return False
        covered = self._peers.cover(lost)
        for rank in ended if self._peers.all_announced() else ():
            rank.covered = covered
            self.on_killed(rank, self._peers)
        return covered

    def _first_end_ns(self) -> int | None:
        return min(
            (rank.end_ns for rank in self.ranks if rank.code not in (None, 0) and rank.end_ns and not rank.covered),
            default=None,
        )

    def tell(self, number: int, *, whole_group: bool = False) -> None:
        """Send `number` to every rank that runs."""
        for rank in self.ranks:
            rank.send(number, whole_group=whole_group)

    def stop(
        self, *, grace_s: float, number: int = signal.SIGTERM, signals: Signals | None = None, known: int = 0
    ) -> None:
        """Send `number`, wait up to `grace_s`, then kill what is left with everything it started.

        A stop signal that arrives meanwhile ends the grace: one more in `signals` than those that were `known`.
        """
        before = known or (len(signals.stop) if signals else 0)
        if self.running and grace_s > 0:
            self.tell(number)
            self.tell(signal.SIGCONT)  # a stopped rank takes the signal only then
            at_once_s = min(QUIET_S, grace_s) if number == signal.SIGINT and signals is not None else grace_s
            self._wait_for(lambda: signals is not None and len(signals.stop) > before, at_once_s)
            if self.running and signals is not None and len(signals.stop) <= before and grace_s > at_once_s:
                say_beside(f"headway: Ctrl-C reached the script, which has {grace_s:.0f} s; again ends it now\n")
                self._wait_for(lambda: len(signals.stop) > before, grace_s - at_once_s)
        if self.running:
            self.tell(signal.SIGKILL, whole_group=True)
            self._wait_for(lambda: False, 30.0)

    def _obey(self, signals: Signals, grace_s: float) -> None:
        known = len(signals.stop)  # before anything is done: the next one may come at any moment
        until_s = time.monotonic() + grace_s
        if known == 1 and signals.stop[0] == signal.SIGTERM and self.saves_first:
            self._ask(lambda: len(signals.stop) > known, ASK_FRACTION * grace_s)
        left_s = max(until_s - time.monotonic(), 0.0) if known == len(signals.stop) == 1 else 0.0
        self.stop(grace_s=left_s, number=signals.stop[0], signals=signals, known=known)

    def _ask(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Ask the ranks to save and leave, and wait until one of them has ended: where all can."""
        before = len(self.running)
        if self._board is not None and self._board.ask(deadline_s):
            self._wait_for(lambda: done() or len(self.running) < before, deadline_s)

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Return when no rank runs, when `done()` holds, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.running and not done() and (left := deadline - time.monotonic()) > 0:
            self._sleep(None, min(left, 0.05))

    def _sleep(self, signals: Signals | None, timeout_s: float) -> None:
        """Sleep until a rank ends, a signal arrives or `timeout_s` is over."""
        poller = select.poll()
        watched = self.running
        for rank in watched:
            if rank.pidfd is not None:
                poller.register(rank.pidfd, select.POLLIN)
        if signals is not None:
            poller.register(signals.fileno(), select.POLLIN)
        if not watched:
            return
        seen = poller.poll((timeout_s if all(rank.pidfd is not None for rank in watched) else 0.02) * 1000)
        if signals is not None and any(fd == signals.fileno() for fd, _ in seen):
            signals.drain()
