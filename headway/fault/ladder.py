"""What to do after a failure: the cheapest remedy first, a dearer one when the same thing happens again.

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

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.errors import InputError

ACTIONS: dict[str, str] = {
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
