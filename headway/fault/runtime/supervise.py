"""Supervises the attempts of a run: notes each failure, decides what follows, starts later attempts warm.

`headway run --max-restarts N` has one of these (`headway.runtime.launching.supervision`
is the joint). RUN/incidents.json is written whole at each change; a failure to
write it costs the account, never the job.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import InputError
from headway.fault.ladder import SURE, RecoveryDecision, RecoveryLimits, Seen, decide
from headway.fault.outliers import Suspicion, suspects
from headway.fault.runtime.incidents import AttemptProgress
from headway.fault.runtime.loss_guard import BadLossError, BadLossStop
from headway.fault.runtime.warm import Warm
from headway.ledger.jobs.hang import localise
from headway.ledger.jobs.hang_reports import WatchReport, frames, of_watch
from headway.runtime.in_rank.state_account import RESTORE_UP_TO
from headway.runtime.launching.hang_proof import HALTED
from headway.runtime.launching.supervision import Failure, RunSupervisor
from headway.runtime.run_folder import redact
from headway.runtime.run_folder.exit_class import RankEnd, is_secondary, traceback_of
from headway.runtime.run_folder.problems import Problems
from headway.trace.recording.incident import Blamed, Incident, write_incidents
from headway.trace.rings.rank_tables import json_object

if TYPE_CHECKING:
    from headway.runtime.launching.agent import Group, RankSpec
    from headway.runtime.launching.options import LaunchOptions
    from headway.runtime.run_folder.drain import Drainer
    from headway.runtime.run_folder.recording import RunRecording


class JobSupervisor(RunSupervisor):
    """The supervisor of one host's ranks."""

    def __init__(
        self, run: Path, warm: Warm, problems: Problems, say: Callable[[str], None], *, group_rank: int = 0
    ) -> None:
        """`say` prints one line; `group_rank` is the index of this host."""
        self.run, self._warm, self._problems, self._say = run, warm, problems, say
        self._group_rank = group_rank
        self.incidents: list[Incident] = []
        """All failures so far."""
        self._seen: list[Seen] = []
        self._progress = AttemptProgress(-1, 0)
        self._before: AttemptProgress | None = None
        self._up_to: int | None = None  # newest checkpoint that the next attempt may go on from, of those that are seen

    def spawn(self, spec: RankSpec, stdout_fd: int, stderr_fd: int) -> int | None:
        """Fork a rank of a later attempt from the warm process, where that is the same as a cold start."""
        return self._warm.spawn(spec, stdout_fd, stderr_fd) if self.incidents else None

    def environment(self, spec: RankSpec) -> Mapping[str, str]:
        """Have ranks note what they import, until that is known; and keep them from checkpoints that are suspect."""
        env = self._warm.noting(spec)
        return env if self._up_to is None else {**env, RESTORE_UP_TO: str(self._up_to)}

    def began(self, attempt: int, group: Group, drainer: Drainer) -> None:
        """Follow the steps of an attempt."""
        progress = self._progress = AttemptProgress(attempt, len(group.ranks))
        drainer.listeners[:] = [
            one for one in drainer.listeners if getattr(one, "__func__", None) is not AttemptProgress.add
        ]
        drainer.listeners.append(progress.add)
        if self._warm.wants_notes:
            self._warm.began([rank.spec for rank in group.ranks])
        if not self.incidents:
            return
        warm = all(rank.warm for rank in group.ranks)
        reason = None if warm else self._warm.reason or "some ranks were forked, others not"
        self.incidents[-1] = msgspec.structs.replace(self.incidents[-1], warm=warm, cold_reason=reason)
        self._write()

    def look(self) -> bool:
        """Complete the account of the last failure once all ranks have made a step again."""
        first_step_ns = self._progress.first_step_ns
        if first_step_ns is not None and self.incidents and self.incidents[-1].first_step_ns is None:
            self._amend(first_step_ns)
        if first_step_ns is not None:
            self._warm.trains()
        return first_step_ns is not None

    def _amend(self, first_step_ns: int | None) -> None:
        """Add to the last incident what the attempt after it shows."""
        before, now, last = self._before, self._progress, self.incidents[-1]
        if before is None or now.attempt <= last.attempt:
            return
        lost = before.lost_to(now) if first_step_ns is not None else None
        self.incidents[-1] = msgspec.structs.replace(
            last, first_step_ns=first_step_ns, restored=now.source, lost_steps=lost
        )
        self._write()

    def failed(self, failure: Failure) -> str:
        """Note a failed attempt; returns what is to be done, one of `ACTIONS`."""
        self.look()
        progress, first = self._progress, failure.first
        suspicion = _suspicion(failure)
        ranks = suspicion.ranks
        seen = Seen(
            failure.cls,
            step=progress.base + progress.steps,
            checkpoint=max((one for one in (progress.commit, progress.restored) if one is not None), default=None),
            error=_error_of(first),
            # A host whose ranks only lost the others is not to blame: theirs say so.
            hosts=(socket.gethostname(),) if ranks and suspicion.confidence == 1.0 else (),
            confidence=suspicion.confidence,
        )
        self._up_to = self._sound(progress) if BadLossError.__name__ in seen.error else None
        if self._up_to is not None:  # behind another checkpoint it is another error
            seen = replace(seen, error=f"{seen.error} (next: checkpoints up to {self._up_to})")
        code = failure.code
        updated = code is not None and code.updated
        decision = decide(seen, self._seen, RecoveryLimits(failure.restarts_left, failure.standbys, updated=updated))
        if BadLossStop.__name__ in seen.error:
            decision = RecoveryDecision("stop", "the guard of losses was told to stop the job")
        if decision.action == "rollback" and code is not None:
            code.undo()
        self._seen.append(replace(seen, action=decision.action))
        self.incidents.append(
            Incident(
                number=len(self.incidents),
                attempt=failure.attempt,
                cls=failure.cls,
                suspects=Blamed(ranks, [socket.gethostname()] if ranks else [], suspicion.group, seen.confidence),
                detected_ns=failure.detected_ns,
                located_ns=failure.located_ns,
                down_ns=failure.down_ns,
                decided_ns=time.perf_counter_ns(),
                action=decision.action,
                reason=decision.reason,
                step=seen.step,
                checkpoint=seen.checkpoint,
                trained_from_ns=progress.first_step_ns,
                trained_until_ns=progress.last_ns or None,
                evidence="; ".join(part for part in (_evidence(first), suspicion.reason) if part),
            )
        )
        self._before = progress
        self._write()
        if decision.action == "stop" and failure.restarts_left:
            self._say(f"no further attempt: {decision.reason}")
        return decision.action

    def _sound(self, progress: AttemptProgress) -> int | None:
        """Return the newest checkpoint behind which a good loss followed; one further back at a second meeting.

        None where the job has none that is seen; where none of them is left it begins anew.
        """
        again = self._up_to is not None and progress.sound == progress.restored
        if progress.sound is not None and not again:
            return progress.sound
        oldest = progress.restored if again else min((one[2] for one in progress.copied), default=None)
        return self._up_to if oldest is None else oldest - 1

    def _write(self) -> None:
        try:
            write_incidents(self.run, self.incidents, group_rank=self._group_rank)
        except OSError as cause:
            self._problems.add("the list of incidents", cause)

    def close(self) -> None:
        """Complete the last account, and end the warm process."""
        try:
            self.look()
        finally:
            self._warm.close()


def _suspicion(failure: Failure) -> Suspicion:
    """Return who is to blame: the rank that failed first; for a hang the ranks that live stacks and waits name."""
    hung = [end.rank for end in failure.ends if end.hung]
    if not hung:
        first = failure.first
        sure = first is not None and not is_secondary(first)
        return Suspicion([first.rank] if first is not None else [], None, 1.0 if sure else 0.5, "")
    found = Suspicion([], None, 0.0, "")
    if failure.hang is not None:
        found = of_hang(json_object(failure.hang))
    if found.ranks:
        return found
    blamed = hung if len(hung) < len(failure.ends) or len(hung) == 1 else []
    return Suspicion(blamed, None, SURE if blamed else 0.0, found.reason)


def of_hang(report: Mapping[str, Any]) -> Suspicion:
    """Return who is suspected by a report of the hang watch; ranks that are halted before anybody else."""
    try:
        watched = WatchReport.of(report)
        rows = watched.ranks
        halted = [row.rank for row in rows if (row.state or "")[:1] in HALTED]
        if halted and len(halted) < len(rows):
            return Suspicion(halted, None, 1.0, "stopped, while others run")
        reports = of_watch(watched)
        stacks = {row.rank: found for row in rows if (found := frames(row.stack or ""))}
        return suspects(stacks, reports.mesh, localise(*reports[:2], groups=reports.groups))
    except InputError as cause:
        return Suspicion([], None, 0.0, str(cause))


def _error_of(end: RankEnd | None) -> str:
    """Return the last line of a rank's traceback, '' without one."""
    found = traceback_of(end.stderr) if end is not None else None
    return redact.text(found.rstrip().rpartition("\n")[2][:500]) if found else ""


def _evidence(end: RankEnd | None) -> str:
    """Say in a few words how a rank ended."""
    if end is None:
        return ""
    how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
    how = "no progress" if end.hung else "killed by the kernel for memory" if end.oom_killed else how
    error = _error_of(end)
    return f"rank {end.rank}: {how}" + (f", {error}" if error else "")


def supervisor(options: LaunchOptions, recording: RunRecording, say: Callable[[str], None]) -> RunSupervisor:
    """Return what supervises a run; the catalog names this function."""
    warm = Warm(recording.live, options.warm)
    return JobSupervisor(recording.path, warm, recording.problems, say, group_rank=recording.group_rank)
