"""Supervises the attempts of a run: notes each failure, decides what follows, starts later attempts warm.

`headway run --max-restarts N` has one of these (`headway.runtime.launching.supervision`
is the joint). RUN/incidents.json is written whole at each change; a failure to
write it costs the account, never the job.

What to do after a failure: the cheapest remedy first, a dearer one when the same thing happens again.

    restart in place -> exclude the host, or a standby takes its place -> undo the last change of the code
        -> replay in two phases to find the host -> stop

`decide` is a pure function of the incident, those before it and the limits of
the job (ByteRobust, SOSP 2025, section 4; the rules that stop a job are ours).
Nobody is excluded on a guess: a host goes when the same one is blamed again
with at least `SURE`, or at once where the evidence is `certain`.

>>> seen = Seen("user", step=7, error="ValueError: x")
>>> limits = RecoveryLimits(restarts_left=3)
>>> decide(seen, [], limits).action, decide(seen, [seen], limits).action
('restart', 'stop')
>>> lost = Seen("infra", hosts=("b",))
>>> decide(lost, [lost], RecoveryLimits(restarts_left=3, standbys=1)).action
'standby'
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import InputError
from headway.fault.incidents import AttemptProgress, Suspicion, suspects
from headway.fault.torch_guard import BadLossError, BadLossStop
from headway.fault.warm import Warm
from headway.ledger.hang import localise
from headway.ledger.hang_reports import WatchReport, frames, of_watch
from headway.runtime.in_rank.state_account import RESTORE_UP_TO
from headway.runtime.launching.supervision import HALTED, Failure, RunSupervisor
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

# What to do after a failure: the cheapest remedy first, a dearer one when the same thing happens again.

ACTIONS: dict[str, str] = {
    "reroute": "go on without the killed rank, whose peers do its work (the launcher does it: no attempt fails)",
    "restart": "start all ranks again where they were",
    "standby": "a standby host takes the place of the blamed one",
    "exclude": "go on without the blamed host",
    "rollback": "go back to the code before the last update",
    "replay": "train on halves of the hosts, twice divided, to find the faulty one",
    "stop": "give up, and say why",
}
"""Action -> meaning, in the order in which they are tried."""

SURE = 0.5
"""Confidence from which on a blamed host may be excluded when it is blamed again."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision needs to know of a failure."""

    cls: str
    """Exit class of the rank that failed first."""

    step: int = 0
    """Steps that all ranks had completed, counted over all attempts; 0 = not even one."""

    checkpoint: int | None = None
    """The newest committed checkpoint; None = the job saves none that are seen."""

    error: str = ""
    """Last line of the traceback, '' where a signal or nothing in particular ended it."""

    hosts: tuple[str, ...] = ()
    """The blamed hosts."""

    confidence: float = 1.0
    """In them, from 0 to 1."""

    certain: bool = False
    """Whether the evidence needs no second failure: a device that is gone, a disk that does not answer."""

    action: str = ""
    """What was done about it, for those before."""


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """What the job and its user allow."""

    restarts_left: int
    """Attempts that may follow."""

    standbys: int = 0
    """Standby hosts that wait."""

    spare_hosts: int = 0
    """Hosts beyond the fewest that the job takes."""

    updated: bool = False
    """Whether the code was changed since the job began, and the version before is at hand."""

    can_replay: bool = False
    """Whether a two-phase replay is possible: several hosts, and somebody to run it."""

    no_progress: int = 3
    """Failures in a row without a new checkpoint, and without a step beyond the furthest, after which it stops."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("restarts_left", "standbys", "spare_hosts"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 0. Pass 0 for none.")
        if self.no_progress < 1:
            raise InputError(f"no_progress is {self.no_progress}; it must be at least 1. Pass 3.")


@dataclass(frozen=True, slots=True)
class RecoveryDecision:
    """What to do, and why."""

    action: str
    """One of `ACTIONS`."""

    reason: str
    """One clause."""


def decide(incident: Seen, history: Sequence[Seen], limits: RecoveryLimits) -> RecoveryDecision:
    """Return what to do about `incident`, which follows those of `history`, oldest first.

    An error of the script at a step that it has failed at before, in the same words, would come again. Errors before
    the first step do not count: a server that did not answer may answer now, and such a restart costs little.
    """
    if limits.restarts_left == 0:
        return RecoveryDecision("stop", "no restart is left")
    before = history[-1] if history else None
    if incident.cls == "user" and before is not None and _same_error(incident, before):
        if limits.updated and before.action != "rollback":
            return RecoveryDecision(
                "rollback", f"the same error came again at step {incident.step}, after the code was changed"
            )
        return RecoveryDecision("stop", f"the same error came again at step {incident.step}: {incident.error}")
    if _without_progress(incident, history) >= limits.no_progress:
        return _stuck(incident, history, limits)
    if incident.cls != "user" and incident.hosts and (incident.certain or _blamed_again(incident, before)):
        return _without_host(incident, limits)
    return RecoveryDecision("restart", "nothing says that it would come again")


def _same_error(one: Seen, other: Seen) -> bool:
    return bool(one.error) and (one.error, one.step) == (other.error, other.step) and one.step > 0


def _without_progress(incident: Seen, history: Sequence[Seen]) -> int:
    """Return how many failures in a row, this one included, brought neither a checkpoint nor a further step.

    A job without any checkpoint is judged by its steps alone, and one that fails in its set-up not at all.
    """
    row = [*history, incident]
    count = 0
    for index in range(len(row) - 1, 0, -1):
        now, earlier = row[index], row[:index]
        furthest = max(one.step for one in earlier)
        newest = max((one.checkpoint for one in earlier if one.checkpoint is not None), default=-1)
        newer = now.checkpoint is not None and now.checkpoint > newest
        if newer or now.step > furthest or not furthest:
            break
        count += 1
    return count


def _stuck(incident: Seen, history: Sequence[Seen], limits: RecoveryLimits) -> RecoveryDecision:
    """Return the next rung for a job that fails again and again at one place."""
    done = {one.action for one in history}
    if limits.updated and "rollback" not in done:
        return RecoveryDecision("rollback", "it makes no progress since the code was changed")
    if limits.can_replay and "replay" not in done:
        return RecoveryDecision("replay", "it makes no progress, and nobody in particular is to blame")
    count = _without_progress(incident, history)
    return RecoveryDecision("stop", f"{count} restarts in a row brought neither a new checkpoint nor a further step")


def _blamed_again(incident: Seen, before: Seen | None) -> bool:
    return before is not None and min(incident.confidence, before.confidence) >= SURE and bool(
        {*incident.hosts} & {*before.hosts}
    )  # fmt: skip


def _without_host(incident: Seen, limits: RecoveryLimits) -> RecoveryDecision:
    """Return how to go on without the blamed hosts, or with them where there is no other way."""
    who = ", ".join(incident.hosts)
    if limits.standbys >= len(incident.hosts):
        return RecoveryDecision("standby", f"{who} is to blame again, and a standby host waits")
    if limits.spare_hosts >= len(incident.hosts):
        return RecoveryDecision("exclude", f"{who} is to blame again, and the job can go on without it")
    return RecoveryDecision("restart", f"{who} is to blame again, but the job needs it")


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
