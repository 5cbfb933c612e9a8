"""The server of a service: the engine's rounds on a wall clock, carried out by an executor, and asked over a socket.

    submit, cancel -> Listener -> ServiceLoop -> events -> EventLog     the log first, then the act
                                     |                        |
       clock, processes that end ----+---> ServiceState <-----+
                                                |  who is to run where (engine)
                                                +----> reconcile: ask to leave, end, start -> Executor

What happened is handled at the time when it did: rounds and ends of jobs in their order, not when the loop woke up. So
deterministic jobs on a fast clock lead to the decisions of the simulation. A server that was killed replays its log,
asks the executor what is alive, and goes on: of an attempt that it noted and did not start, the executor knows nothing.
"""

from __future__ import annotations

import getpass
import logging
import math
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from headway.cluster.service.executors import (
    GRACE_S,
    Executor,
    ExecutorMaker,
    JobAttempt,
    JobCondition,
    LocalExecutor,
    RayExecutor,
)  # fmt: skip
from headway.cluster.service.kueue import KueueExecutor, SlurmExecutor
from headway.cluster.service.state import ENDED, MOST_LOST, JobExplanation, QueueRow, ServiceJob, ServiceState
from headway.cluster.service.store import (
    AttemptAsked,
    AttemptEnded,
    AttemptRunning,
    AttemptStarting,
    Event,
    EventLog,
    JobCancelled,
    JobFigures,
    JobSubmitted,
    RoundAdvanced,
    ServerBegan,
)
from headway.core.errors import HeadwayError, InputError
from headway.core.files.private import private_folder, runtime_directory
from headway.core.files.safe_files import whole_file
from headway.core.machine.host import host_id
from headway.core.wire.channel import (
    MOST_PATH_BYTES,
    Channel,
    ChannelClosed,
    Listener,
    TcpListener,
    connect,
    connect_tcp,
)  # fmt: skip
from headway.core.wire.loop import ServiceLoop

LOG = logging.getLogger(__name__)

EXECUTORS: Mapping[str, ExecutorMaker] = {
    "local": LocalExecutor,
    "ray": RayExecutor,
    "slurm": SlurmExecutor,
    "kueue": KueueExecutor,
}
"""What carries out a service's decisions, by name."""

LOOK_S = 1.0
"""How often jobs are looked at, besides when a process of this host ends."""

RETRY_S = 30.0
"""How long a job waits that could not be started."""

LOST_CODES = (137, 143, -9, -15)
"""Exit codes of a job that somebody else ended: SIGKILL and SIGTERM."""


class SubmitJob(msgspec.Struct, frozen=True, tag=True):
    """A script is to run."""

    name: str
    scale: int
    command: list[str]
    folder: str
    fewest: int = 0


class AskQueue(msgspec.Struct, frozen=True, tag=True):
    """How is everything?"""


class CancelJob(msgspec.Struct, frozen=True, tag=True):
    """A job, by id or name, is wanted no more."""

    job: str


class ExplainJob(msgspec.Struct, frozen=True, tag=True):
    """Why does a job, by id or name, run or wait?"""

    job: str


class QueueAnswer(msgspec.Struct, frozen=True, tag=True):
    """How everything is."""

    round: int
    jobs: list[QueueRow]


class JobAnswer(msgspec.Struct, frozen=True, tag=True):
    """One job."""

    job: QueueRow


class ExplainAnswer(msgspec.Struct, frozen=True, tag=True):
    """Why it runs or waits."""

    job: JobExplanation


Question = SubmitJob | AskQueue | CancelJob | ExplainJob
"""What a server is sent."""

JobEnd = tuple[float, JobCondition]
"""When an attempt ended, and how it was then."""

Answer = QueueAnswer | JobAnswer | ExplainAnswer
"""What it replies; of what it refuses, it closes the channel with the reason."""


def socket_of(folder: Path) -> Path:
    """Return where the server of a folder listens: in it, or in the runtime folder where its path is too long."""
    path = folder.absolute() / "server.sock"
    if len(os.fsencode(path)) + len(".lock") <= MOST_PATH_BYTES:
        return path
    return runtime_directory() / f"cluster-{zlib.crc32(os.fsencode(folder.resolve())):08x}.sock"


def folder_of(path: Path) -> Path:
    """Return the folder of a service; raises `InputError` where something else is there."""
    if path.exists() and not path.is_dir():
        raise InputError(
            f"--dir {path} is a file, a service has a folder. Name a folder, such as {path.parent / 'jobs'}."
        )
    return path


def log_of(folder: Path) -> Path:
    """Return the log of a folder's service."""
    return folder / "log.sqlite"


def token_of(folder: Path, *, make: bool = False) -> str:
    """Return the secret that callers on other hosts prove, which only this user can read; empty where there is none."""
    path = folder / "token"
    if make:
        with suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_hex(32))
    return path.read_text() if path.is_file() else ""


def called(folder: Path) -> Channel:
    """Return a channel to the server of a folder, here or on another host; raises `ChannelClosed`, where none runs."""
    try:
        return connect(socket_of(folder_of(folder)), 0.5, types=Answer)
    except ChannelClosed:
        with suppress(OSError, ValueError):
            host, port = (folder / "address").read_text().rsplit(":", 1)
            return connect_tcp(host, int(port), token_of(folder), 0.5, types=Answer)
        raise


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """How a service shares its devices."""

    pools: Mapping[str, int]
    """Device type -> slots."""

    policy: str = "las"
    """A name of `policies.table.SERVED`."""

    round_s: float = 360.0
    """How long a job keeps its devices at least, unless it ends."""

    executor: str = "local"
    """A name of `EXECUTORS`."""

    port: int | None = None
    """Port for callers on other hosts that see the folder, where its token lies; 0: a free one, None: none."""


class ServiceServer:
    """One server of one folder. `turn` it until it is told to `stop`; jobs outlive it."""

    def __init__(
        self, folder: Path, options: SharingOptions, executor: Executor, *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME), boot: str = "",
        look_s: float = LOOK_S,
    ) -> None:  # fmt: skip
        """Begin, or go on from the folder's log. `clock` is in seconds since `boot`, a start of the host.

        Raises `InputError` where another server has the folder, `FormatError` on a log that is none.
        """
        private_folder(folder)
        self._options, self._executor, self._clock, self._look_s = options, executor, clock, look_s
        self._boot, self._conditions, self._ends = boot or host_id(), dict[str, JobCondition](), dict[str, JobEnd]()
        self._not_before_s: dict[str, float] = {}
        self._watched: set[tuple[str, int]] = set()
        self._told: set[tuple[str, int]] = set()
        self._looked_s, self._stopped = -math.inf, False
        with ExitStack() as opened:
            self._listener = opened.enter_context(closing(Listener(socket_of(folder), types=Question)))
            self._log = opened.enter_context(EventLog(log_of(folder)))
            self.loop = opened.enter_context(ServiceLoop())
            events = self._log.read()
            self.state = ServiceState.replay(events)
            # The service's clock goes on while no server runs; where the host started anew, from the last event.
            self._last_s = max((event.at_s for event in events), default=0.0)
            served, start_s = self.state.served, clock()
            same = served is not None and served.boot == self._boot and served.boot_s <= start_s
            self._origin_s = served.boot_s - served.at_s if same and served is not None else start_s - self._last_s
            self._note(self._served(dict(executor.slots())))
            self.loop.listen(self._listener, self._answer)
            if options.port is not None:
                try:
                    tcp = TcpListener("", options.port, token_of(folder, make=True), types=Question)
                except (OSError, OverflowError) as error:
                    raise InputError(f"--port {options.port} cannot be had ({error}). Pass 0 for a free one.") from None
                self.loop.listen(opened.enter_context(closing(tcp)), self._answer)
                opened.callback((folder / "address").unlink, missing_ok=True)
                with whole_file(folder / "address") as draft:
                    draft.write_text(f"{socket.gethostname()}:{tcp.port}")
            self._opened = opened.pop_all()

    def now_s(self) -> float:
        """Return the time of the service, which never goes back."""
        self._last_s = max(self._last_s, self._clock() - self._origin_s)
        return self._last_s

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            self.turn(self._look_s)

    def stop(self) -> None:
        """End `run` soon; any thread and signal handler may call it."""
        self._stopped = True
        self.loop.ring()

    def turn(self, timeout_s: float) -> None:
        """Wait for what happens next, at most so long, and do what follows from it."""
        wait_s = self.state.due_s() - self.now_s()
        self.loop.turn(min(timeout_s, max(wait_s, 0.0)))
        self._log.check()
        now_s = self.now_s()
        pools = dict(self._executor.slots())
        if self.state.served is not None and pools != self.state.served.pools:
            self._note(self._served(pools))
        self._look(now_s, at_once=self.state.due_s() <= now_s)
        while True:
            at_s = max(min(min((end_s for end_s, _ in self._ends.values()), default=math.inf), self.state.due_s()), 0.0)
            if at_s > now_s:
                break
            self._step(at_s)
            self._look(now_s, at_once=True)
        self._reconcile(now_s)

    def submit(self, request: SubmitJob, *, at_s: float | None = None) -> ServiceJob:
        """Let a job come, now or later; raises `InputError` on one that can never run."""
        most = max(self.state.engine.cluster.count.tolist())
        if request.scale < 1:
            raise InputError(f"--scale is {request.scale}; a job has at least one slot. Pass 1 to {most}.")
        if not 0 <= request.fewest <= request.scale:
            raise InputError(
                f"--fewest is {request.fewest}; pass 1 to --scale, {request.scale}, or leave it out for exactly that."
            )
        if (request.fewest or request.scale) > most:
            raise InputError(f"scale is {request.scale}; a job has 1 to {most} slots of one type here. Pass --scale 1.")
        if not request.name.isprintable():
            raise InputError(f"--name is {request.name!r}; a name is one line of printable text. Pass such a name.")
        if not request.command:
            raise InputError("no script was given. Put it behind --, as in: headway cluster submit -- train.py")
        number = len(self.state.jobs) + 1
        job = f"job{number}"
        arrival_s = self.now_s() if at_s is None else at_s
        name = request.name or f"{Path(request.command[0]).stem}-{number}"
        self._note(
            JobSubmitted(
                at_s=arrival_s, job=job, name=name, scale=request.scale, command=request.command,
                folder=request.folder, owner=getpass.getuser(), fewest=request.fewest,
            )
        )  # fmt: skip
        return self.state.jobs[job]

    def cancel(self, job: ServiceJob) -> None:
        """End a job, now or as soon as it can be; raises `InputError` where it has ended."""
        if job.state in ENDED:
            raise InputError(f"job {job.id} is {job.state} already. Name one that waits or runs.")
        self._note(JobCancelled(at_s=self.now_s(), job=job.id))
        if not job.is_alive:
            self._note(AttemptEnded(at_s=self.now_s(), job=job.id, how="cancelled", steps=0.0, reason="cancelled"))

    def close(self) -> None:
        """Let callers go, and the folder; jobs that run go on."""
        self._opened.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _answer(self, channel: Channel, message: msgspec.Struct) -> msgspec.Struct | None:
        del channel
        state = self.state
        if isinstance(message, SubmitJob):
            return JobAnswer(self._row(self.submit(message)))
        if isinstance(message, CancelJob):
            job = state.job(message.job)
            self.cancel(job)
            self._reconcile(self.now_s())
            return JobAnswer(self._row(job))
        if isinstance(message, ExplainJob):
            return ExplainAnswer(state.explain(state.job(message.job), price=True))
        return QueueAnswer(state.round, self._rows())

    def _rows(self) -> list[QueueRow]:
        """Return a row per job, with the steps that those that run have done by now."""
        rows = self.state.rows()
        for row, job in zip(rows, self.state.jobs.values(), strict=True):
            if job.is_alive and job.id in self._conditions:
                row["steps_done"] = int(max(job.steps + self._conditions[job.id].steps, row["steps_done"]))
        return rows

    def _row(self, job: ServiceJob) -> QueueRow:
        return self._rows()[job.index]

    def _note(self, *events: Event) -> None:
        """Change the state by events, and write them; what follows from them is done afterwards."""
        for event in events:
            self.state.apply(event)
        self._log.append(events)

    def _served(self, pools: dict[str, int]) -> ServerBegan:
        options, at_s = self._options, self.now_s()
        return ServerBegan(
            at_s=at_s, pools=pools, policy=options.policy, round_s=options.round_s, executor=options.executor,
            boot=self._boot, boot_s=self._origin_s + at_s,
        )  # fmt: skip

    def _look(self, now_s: float, *, at_once: bool) -> None:
        """Ask the executor how jobs are; note which have ended, and when."""
        live = [job for job in self.state.live() if job.id not in self._ends]
        if not live or (not at_once and time.monotonic() - self._looked_s < self._look_s):
            return
        self._looked_s = time.monotonic()
        try:
            states = self._executor.alive([job.as_attempt() for job in live])
        except HeadwayError as error:  # a scheduler that does not answer: its jobs are as they were
            LOG.warning("jobs cannot be looked at: %s", error)
            return
        for job in live:
            condition = self._conditions[job.id] = states[job.id]
            if not condition.alive:
                self._ends[job.id] = (
                    max(now_s if condition.end_s is None else condition.end_s, job.began_s),
                    condition,
                )
            elif condition.pid and (job.id, condition.pid) not in self._watched:
                self._watched.add((job.id, condition.pid))
                self.loop.watch_process(condition.pid, self._hurry)

    def _hurry(self) -> None:
        """Look at the jobs at once: a process has ended."""
        self._looked_s = -math.inf

    def _step(self, at_s: float) -> None:
        """Do what is due at a moment: jobs that have ended by then, then the engine, then what it decided."""
        for name in [name for name, (end_s, _) in self._ends.items() if end_s <= at_s]:
            end_s, condition = self._ends.pop(name)
            self._note(self._ended(self.state.jobs[name], end_s, condition))
        if self.state.due_s() <= at_s:
            self._advance(at_s)
        self._reconcile(at_s)

    def _ended(self, job: ServiceJob, end_s: float, condition: JobCondition) -> AttemptEnded:
        """Return how an attempt ended."""
        code, asked = condition.code, not math.isnan(job.asked_s)
        how, reason = "failed", f"its script ended with code {code}: see jobs/{job.id}/{job.attempt}/out"
        if job.is_unwanted and code != 0:
            how, reason = "cancelled", "cancelled"
        elif code == 0:
            how, reason = "done", "done"
        elif asked:
            how, reason = "left", ""
        elif code is None or code in LOST_CODES:
            how, reason = "lost", ""
            if job.lost + 1 >= MOST_LOST and not condition.steps:
                how, reason = "failed", f"{MOST_LOST} attempts in a row were lost before they did a step"
        LOG.info("%s: attempt %d %s (code %s)", job.id, job.attempt, how, code)
        return AttemptEnded(at_s=end_s, job=job.id, how=how, steps=condition.steps, reason=reason)

    def _advance(self, at_s: float) -> None:
        """Let the engine go on, with what jobs did; what it decides is written before it is done."""
        did, fixed, cluster = {}, [], self.state.engine.following_cluster()
        for job in self.state.running_jobs():
            condition = self._conditions.get(job.id)
            alive = job.is_alive and condition is not None and condition.alive
            since_s = self.state.since_s(job)
            runs_s = at_s - max(since_s, job.began_s) if job.is_alive else 0.0
            if job.state in ENDED or job.is_lost:
                runs_s = max(job.finish_s, since_s) - since_s if job.state in ENDED else at_s - since_s
            steps = job.steps + (condition.steps if alive and condition is not None else 0.0) - job.credited
            rates = self.state.with_rate(job, condition.steps_per_s) if alive and condition is not None else []
            did[job.id] = JobFigures(
                max(runs_s, 0.0), max(steps, 0.0), job.is_lost or job.state in ENDED, job.state in ENDED, rates
            )
            stays = condition is None or not condition.can_leave
            if job.state == "running" and stays and self.state.exists(job.slots, cluster):
                fixed.append(job.id)
        runs = self.state.advance(at_s, did, fixed)
        event = RoundAdvanced(at_s=at_s, did=did, fixed=fixed, runs=runs)
        self._log.append([event])
        self.state.now_s = max(self.state.now_s, at_s)

    def _reconcile(self, at_s: float) -> None:
        """Bring what runs in line with what is decided: ask those that are to go, start those whose slots are free."""
        state, asked = self.state, False
        for job in state.live():
            condition = self._conditions.get(job.id)
            stays = list(job.slots) == state.runs.get(job.id) and not job.is_unwanted
            if stays or job.id in self._ends:
                continue
            gone = job.is_unwanted or not state.exists(job.slots)
            if job.state == "running" and condition is not None and (condition.can_leave or gone):
                gently = condition.can_leave and not job.is_unwanted
                self._note(AttemptAsked(at_s=at_s, job=job.id, gently=gently))
                self._tell(self._executor.ask_to_leave if gently else self._executor.end, job)
                asked = True
            elif job.state == "leaving" and (job.id, job.attempt) not in self._told:  # by a server that may have died
                self._tell(self._executor.end if gone else self._executor.ask_to_leave, job)
            elif job.state == "leaving" and at_s - job.asked_s > GRACE_S + 10.0:
                self._tell(self._executor.end, job)
        if asked:
            self._look(at_s, at_once=True)
            for name in [name for name, (end_s, _) in self._ends.items() if end_s <= at_s]:
                end_s, condition = self._ends.pop(name)
                self._note(self._ended(state.jobs[name], end_s, condition))
        taken = {slot for job in state.live() for slot in job.slots}
        for name, slots in state.runs.items():
            job = state.jobs[name]
            ready = job.state == "waiting" and not job.is_unwanted and at_s >= self._not_before_s.get(name, -math.inf)
            if ready and not taken.intersection(slots):
                self._start(job, slots, at_s)
                taken.update(slots)

    def _tell(self, what: Callable[[JobAttempt], None], job: ServiceJob) -> None:
        """Tell the executor what becomes of a job; where that fails, it is ended after its grace."""
        self._told.add((job.id, job.attempt))
        try:
            what(job.as_attempt())
        except (HeadwayError, OSError) as error:
            LOG.warning("%s cannot be told: %s", job.id, error)

    def _start(self, job: ServiceJob, slots: list[str], at_s: float) -> None:
        """Start an attempt; the log has it before it is there."""
        self._conditions.pop(job.id, None)
        self._note(AttemptStarting(at_s=at_s, job=job.id, attempt=job.attempt + 1, slots=slots))
        try:
            handle = self._executor.start(job.as_attempt())
        except (HeadwayError, OSError) as error:
            LOG.warning("%s cannot be started: %s", job.id, error)
            self._not_before_s[job.id] = at_s + RETRY_S
            how, reason = "lost" if job.lost + 1 < MOST_LOST else "failed", f"it cannot be started: {error}"
            self._note(AttemptEnded(at_s=at_s, job=job.id, how=how, steps=0.0, reason=reason))
            return
        self._note(AttemptRunning(at_s=at_s, job=job.id, handle=handle))
        LOG.info("%s: attempt %d on %s", job.id, job.attempt, ", ".join(slots))
