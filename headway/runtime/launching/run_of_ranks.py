"""What all ways to launch have in common: the run folder, streams, what each rank runs, and the report at the end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import InputError
from headway.core.machine.beside import say_beside
from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import Command, RankEnvironment
from headway.runtime.launching.agent import RankSpec, Signals
from headway.runtime.launching.attempts import say
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.run_folder.exit_class import (
    BLAME,
    FLUSH_CODE,
    HUNG_CODE,
    RankEnd,
    classify,
    exit_status,
    failure_text,
    first_failure,
    traceback_of,
)
from headway.runtime.run_folder.recording import RUNS, Exit, RunRecording, claim_folder, next_folder
from headway.runtime.run_folder.streams import Streams


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
