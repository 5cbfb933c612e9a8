"""What all ways to launch have in common: the run folder, streams, what each rank runs, and the report at the end.

What all attempts of a run share: the reader of the ranks' output, drains, the status line, how each rank ended.

Use it as the launcher does: `start` an attempt's ranks, wait for their group,
`finish` it, and ask `again` whether another attempt is to follow. The events
of a failed attempt are written while the next one trains: nothing stands
between a failure and the start of the next attempt that can be done later.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import HEADER, InputError, say_beside
from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import Command, RankEnvironment
from headway.runtime.launching.agent import Group, RankProcess, RankSpec, Signals
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.launching.peers import PeerBoard, RerouteAccount
from headway.runtime.launching.supervision import Failure, RunSupervisor, supervisor_of
from headway.runtime.run_folder.exit_class import (
    BLAME,
    FLUSH_CODE,
    HUNG_CODE,
    OomWatch,
    RankEnd,
    classify,
    exit_status,
    failed_at_exit,
    failure_text,
    first_failure,
    is_secondary,
    traceback_of,
)
from headway.runtime.run_folder.recording import RUNS, Exit, LaunchedRank, RunRecording, claim_folder, next_folder
from headway.runtime.run_folder.streams import Streams

if TYPE_CHECKING:
    from headway.runtime.launching.hang_watch import HangWatch
    from headway.runtime.launching.options import CodeUpdates, LaunchOptions
    from headway.runtime.run_folder.drain import Drainer
    from headway.runtime.run_folder.prometheus import Metrics
    from headway.runtime.run_folder.status import StatusLine


OWED_S = 20.0
"""How long the events of a failed attempt wait for the first steps of the next one before they are written."""


class RankSupervisor:
    """What every attempt needs of the launcher: streams, drains, the status line, and the rows of its ranks."""

    def __init__(self, options: LaunchOptions, recording: RunRecording, streams: Streams, signals: Signals) -> None:
        self.options, self.recording, self.streams, self.signals = options, recording, streams, signals
        self._status: StatusLine | None = None
        self._metrics: Metrics | None = None
        self._hang_watch: HangWatch | None = None
        self._attempt = 0
        self.action = ""
        """What the supervisor decided last."""
        self._secondary: dict[int, bool] = {}
        self._supervisor: RunSupervisor = supervisor_of(options, recording, lambda text: say(options, text))
        self._reroutes = RerouteAccount(recording.path)
        self._owed: Callable[[], None] | None = None
        self._writer: threading.Thread | None = None

    def __enter__(self) -> RankSupervisor:
        """Open the metrics endpoint if one was asked for."""
        if self.options.metrics_port is not None:
            from headway.runtime.run_folder.prometheus import Metrics

            self._metrics = Metrics(self.recording, self.options.metrics_port, self.options.metrics_host)
            say(self.options, f"metrics at {self._metrics.url}")
        return self

    def __exit__(self, *_: object) -> None:
        """Write the events that are still owed, read the rest of the output, close all that was opened."""
        self._supervisor.close()
        self._settle()
        if self._metrics is not None:
            self._metrics.close()
        if self._status is not None:
            self._status.stop()
        self.streams.close()

    def start(self, specs: Sequence[RankSpec], attempt: int, *, plain: bool | None = None) -> Group:
        """Start the ranks, then everything that may take its time."""
        self._attempt = attempt
        group = Group([replace(spec, env=self._supervisor.environment(spec)) for spec in specs])
        group.spawn = self._supervisor.spawn
        group.start(
            lambda spec: self.streams.attach(
                spec.rank,
                plain=spec.rank == 0 if plain is None else plain,
                label=f"{self.options.role}{spec.local_rank}",
                alone=len(specs) == 1,
            )
        )
        self.streams.start()
        drainer = self.recording.begin(attempt, {spec.rank for spec in specs})
        if not self.options.quiet and specs[0].rank == 0 and self._status is None:
            from headway.runtime.run_folder.status import StatusLine

            start_ns = self.recording.start_ns
            world_size, run = self.recording.nproc, self.recording.path
            self._status = StatusLine(self.streams, world_size=world_size, start_ns=start_ns, run=run)
            self._status.start()
        if self._status is not None:
            self._status.follow(drainer)
        if self._metrics is not None:
            self._metrics.follow(drainer)
        with self.recording.problems.kept("reports of hangs"):
            group.overdue = self._watch_for_hangs(drainer)
        self._supervisor.began(attempt, group, drainer)
        if self._reroutes.add not in drainer.listeners:  # a later attempt's drainer carries them over
            drainer.listeners.append(self._reroutes.add)
        group.on_killed = self._note_killed
        due_s = time.monotonic() + OWED_S
        group.look = lambda: self._look(due_s)
        return group

    def _look(self, due_s: float) -> None:
        """Let the supervisor do its work; once the ranks train, have a thread write what the attempt before left."""
        trains = self._supervisor.look()
        self._complete_reroutes()
        if self._owed is not None and (trains or time.monotonic() > due_s):
            owed, self._owed = self._owed, None
            self._writer = threading.Thread(target=owed, name="headway-events", daemon=True)
            self._writer.start()

    def _complete_reroutes(self) -> None:
        with self.recording.problems.kept("the list of incidents"):
            self._reroutes.look()

    def _note_killed(self, rank: RankProcess, board: PeerBoard) -> None:
        """Say that a rank was killed, and whether the job goes on without it."""
        then = "the other ranks do its work" if rank.covered else "no other rank has its stage: the job ends"
        if rank.covered and self._hang_watch is not None:
            self._hang_watch.forgotten.add(rank.pid)
        if rank.covered:
            with self.recording.problems.kept("the list of incidents"):
                self._reroutes.note_killed(self._end_of(rank, None), self._attempt, board)
        say(self.options, f"rank {rank.spec.rank} was killed by signal {-(rank.code or 0)}; {then}")

    def _settle(self) -> None:
        """Write the events of ended attempts, and wait until they are written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._owed is not None:
            owed, self._owed = self._owed, None
            owed()

    def _watch_for_hangs(self, drainer: Drainer) -> Callable[[], bool]:
        """Let the hang watch follow an attempt's drain; returns what says that the attempt is to be ended."""
        from headway.runtime.launching.hang_watch import HangWatch

        if self._hang_watch is None:
            self._hang_watch = HangWatch(
                self.recording.path,
                world_size=self.recording.world_size,
                say=lambda text: say(self.options, text),
                timeout_s=self.options.hang_timeout_s,
                acts_on_proof=bool(self.options.supervisor and self.options.max_restarts),
            )
        watch = self._hang_watch
        watch.begin()
        if watch.look not in drainer.lookers:  # a later attempt's drainer carries them over
            drainer.listeners.append(watch.add)
            drainer.lookers.append(watch.look)
        return lambda: watch.expired

    def is_secondary(self, rank: RankProcess) -> bool:
        """Say whether a rank that ended blames its connection rather than itself."""
        if rank.pid not in self._secondary:
            self.streams.finish(0.2, rank=rank.spec.rank)
            self._secondary[rank.pid] = is_secondary(self._end_of(rank, None))
        return self._secondary[rank.pid]

    def finish(self, group: Group, watch: OomWatch) -> list[RankEnd]:
        """Read what the ranks still had to say, and return how each ended; their events are written later."""
        self.streams.finish()
        hung = self._hung(group)
        ends = [replace(self._end_of(rank, watch), hung=rank.spec.rank in hung) for rank in group.ranks]
        rows = [
            LaunchedRank(r.spec.rank, r.spec.local_rank, r.pid, r.start_ns, r.end_ns, r.code, self._attempt)
            for r in group.ranks
        ]
        self._settle()  # those of the attempt before, should they be owed still
        self._owed = self.recording.close_attempt(rows)
        self._complete_reroutes()
        return ends

    def again(
        self, group: Group, ends: Sequence[RankEnd], restarts_left: int, code: CodeUpdates | None = None,
        *, standbys: int = 0,
    ) -> bool:  # fmt: skip
        """Say whether another attempt follows this one, which failed. The supervisor may undo an update of `code`."""
        first = first_failure(ends)
        down_ns = max((rank.end_ns or 0 for rank in group.ranks), default=0)
        detected_ns = group.detected_ns or down_ns
        failure = Failure(
            self._attempt, classify(first), first, tuple(ends), detected_ns, group.located_ns or detected_ns, down_ns,
            restarts_left, self._hang_watch.report if group.hung and self._hang_watch is not None else None,
            code, standbys,
        )  # fmt: skip
        self.action = self._supervisor.failed(failure)
        return self.action != "stop" and restarts_left > 0

    def _hung(self, group: Group) -> set[int]:
        """Return the ranks that the attempt was ended for: the silent one, or all when none stands out."""
        if self._hang_watch is None:
            return set()
        with self.recording.problems.kept("the report of a hang"):
            self._hang_watch.finish()
        blamed = self._hang_watch.blamed
        own = {rank.spec.rank for rank in group.ranks}
        return ({blamed} if blamed in own else own) if group.hung else set()

    def _end_of(self, rank: RankProcess, watch: OomWatch | None) -> RankEnd:
        tail = self.streams.tail(rank.spec.rank)
        code = rank.code if rank.code is not None else 0
        text = tail.text()
        suspect = code == -9 or "killed by signal: Killed" in text[-4096:]  # the rank, or one of its loader workers
        killed = suspect and not rank.told and watch is not None and watch.killed(rank.pid)
        return RankEnd(
            rank.spec.rank,
            code or int(failed_at_exit(self.recording.path, rank.spec.rank)),
            rank.end_ns or 0,
            text,
            tail.arrival_ns(HEADER.encode()),
            rank.told,
            killed,
            covered=rank.covered,
        )


def say(options: LaunchOptions, text: str) -> None:
    """Write one line of our own on stderr, unless `quiet`."""
    if not options.quiet:
        say_beside(f"headway: {text}\n")


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a launched run ended."""

    code: int
    """Exit status of the first failing rank (128 + signal), 0 when all went well."""
    cls: str
    """ok, user, oom, hang, infra or preempted."""
    first_rank: int | None
    """Global rank that failed first, None when none did."""
    traceback: str | None
    """Its traceback, None without one."""
    seconds: float
    """Launcher start to end, finalisation included."""
    run: Path | None
    """The run folder; None when a signal came before the hosts of a run had met."""
    problems: tuple[str, ...] = ()
    """What the recording lacks, and why."""
    is_first: bool = True
    """Whether this is the only launcher of the run, or the one of its first host that writes run.json."""
    by_ctrl_c: bool = False
    """Whether SIGINT killed the rank: a shell then ends the loop that it runs in."""


def open_recording(
    options: LaunchOptions,
    script: Sequence[str],
    start_ns: int,
    *,
    nproc: int,
    world_size: int | None = None,
    group_rank: int = 0,
    joins: bool = False,
    leads: bool = True,
    attempt: int = 0,
    shared: bool = False,
) -> RunRecording:
    """Make the run folder and its first run.json; where none was named and `RUNS` cannot be had, in a temporary one.

    Raises `InputError` where a folder that was named cannot be written: no rank has been started.
    """

    def opened(path: Path) -> RunRecording:
        recording = RunRecording(
            path.resolve(),
            list(script),
            start_ns,
            nproc=nproc,
            world_size=world_size or nproc,
            group_rank=group_rank,
            joins=joins,
            leads=leads,
            attempt=attempt,
            shared=shared,
            plan=options.apply,
            baseline=options.baseline,
            max_run_bytes=options.max_run_bytes,
        )
        recording.open()
        return recording

    mode, out = options.mode, options.out
    try:
        return opened(claim_folder(out, shared=shared, mode=mode) if out else next_folder(RUNS, script[0], mode))
    except OSError as cause:
        reason = cause.strerror or cause
        if out:
            raise InputError(f"--out {out} cannot be written: {reason}. Name a folder with room.") from cause
        instead = Path(tempfile.mkdtemp(prefix="headway-run-"))
        say(options, f"{RUNS.resolve()} cannot be written ({reason}): this run is recorded in {instead}")
        return opened(instead)


def open_streams(options: LaunchOptions, recording: RunRecording) -> Streams:
    """Return the reader of the ranks' output; logs share a sixteenth of the run folder's bytes."""
    limit = max(recording.max_run_bytes // 16 // (2 * recording.nproc), 1 << 16)
    logs = options.log_dir or recording.path / "logs"
    problems, to_stderr = recording.problems, options.json
    return Streams(logs, problems, limit_bytes=limit, stdout_to_stderr=to_stderr, mode=options.mode)


def specs_of(
    options: LaunchOptions, script: Sequence[str], places: Sequence[RankEnvironment], recording: RunRecording
) -> list[RankSpec]:
    """Return what each rank runs."""
    command = rank_env.argv(script[0], script[1:], Command(options.module, options.no_python))
    base = rank_env.inherited(os.environ)
    specs = []
    for place in places:
        env = base | (rank_env.ALONE if options.is_plain else rank_env.torchrun_env(place, base))
        env |= recorded_env(base, options, recording, place.attempt)
        env["TORCHELASTIC_ERROR_FILE"] = str(recording.path / "logs" / f"r{place.rank}.error.json")
        specs.append(RankSpec(place.rank, place.local_rank, command, env))
    return specs


def recorded_env(
    base: Mapping[str, str], options: LaunchOptions, recording: RunRecording, attempt: int
) -> dict[str, str]:
    """Return headway's own variables for a rank that is recorded."""
    return rank_env.headway_env(
        base,
        run=recording.path,
        rings=recording.live,
        attempt=attempt,
        plan=recording.path / "plan.json" if options.apply else None,
        remedies=options.remedies,
        windows_fraction=options.windows,
        window_at=options.window_at,
        verify=options.verify,
    )


def report(
    options: LaunchOptions,
    recording: RunRecording,
    ends: Sequence[RankEnd],
    signals: Signals,
    *,
    peers: Sequence[Exit] = (),
    output_lost: bool = False,
) -> ExitReport:
    """Class the exit, write the last run.json, and show the first failing rank's traceback last.

    `peers` are the ends that other launchers of this run saw: a fault of its own there explains what looked like a
    stop from outside here. With `output_lost` a run that did not fail exits like Python with output it cannot flush.
    """
    first = first_failure(ends)
    cls = classify(first, preempted=signals.preempted)
    if cls == "ok" and signals.stop:
        cls = "user"  # Ctrl-C, and every rank left with 0
    code = (exit_status(first.code) or HUNG_CODE) if first else FLUSH_CODE * output_lost
    own = Exit(code, cls, first.rank if first else None, traceback_of(first.stderr) if first else None)
    shown = min([own, *peers], key=lambda end: BLAME.index(end.cls))
    recording.end(shown)
    problems = tuple(recording.problems.lines())
    for problem in problems:
        say(options, problem)
    if first is not None:
        say_beside(
            failure_text(first, own, recording.path, interrupted=signal.SIGINT in signals.stop, alone=len(ends) == 1)
        )
    seconds = (time.perf_counter_ns() - recording.start_ns) / 1e9
    is_first = recording.leads and recording.group_rank == 0
    by_ctrl_c = first is not None and first.code == -signal.SIGINT
    told = shown.cls, shown.first_rank, shown.traceback
    return ExitReport(code, *told, seconds, recording.path, problems, is_first, by_ctrl_c)
