"""The joint between the launcher and what supervises its attempts: who starts ranks warm, and who decides on a restart.

The launcher knows no room: `LaunchOptions.supervisor` names a function
"module:function" that makes a `RunSupervisor`. Without one every failed attempt
is started again, cold, as often as was asked for. A supervisor that fails is
left out from then on, with one line that says why: the job goes on without it.
Times in ns on CLOCK_MONOTONIC.

>>> Unsupervised().failed(Failure(0, "user", None, (), 0, 0, 0, 1)), Unsupervised().spawn(None, 1, 2)
('restart', None)

When a standstill is proven, so that a job may be ended for it although nobody gave a timeout.

Two things prove one, if they are so at each of `LOOKS` looks: a rank that runs no code while others do (stopped, a
zombie, in uninterruptible sleep); and a rank that is updates ahead of all others, which wait in operations of many
ranks with the same stacks each time: it has skipped what they wait for. A rank that is merely not there yet proves
nothing, however long it takes: it may evaluate, or read, without a word. For that one a user gives a timeout.

>>> waits = {"rank": 0, "state": "S", "op": "comm.wait", "step": 7, "stack": "in wait", "since_ns": 7}
>>> proven([[waits, {**waits, "rank": 1, "op": None, "step": step}] for step in (40, 60, 80)])
[1]
>>> proven([[waits, {**waits, "rank": 1, "op": None}]] * 3), proven([[waits, {**waits, "rank": 1, "state": "T"}]] * 3)
([], [1])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.tables import resolved

if TYPE_CHECKING:
    from headway.runtime.launching.agent import Group, RankSpec
    from headway.runtime.launching.options import CodeUpdates, LaunchOptions
    from headway.runtime.run_folder.drain import Drainer
    from headway.runtime.run_folder.exit_class import RankEnd
    from headway.runtime.run_folder.recording import RunRecording


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, once all its ranks are gone."""

    attempt: int
    """Its number."""

    cls: str
    """Exit class of the rank that failed first (`headway.runtime.run_folder.exit_class.CLASSES`)."""

    first: RankEnd | None
    """How that rank ended."""

    ends: Sequence[RankEnd]
    """How each rank of this host ended."""

    detected_ns: int
    """When the launcher saw that a rank had ended, or made no progress."""

    located_ns: int
    """When it was clear which of them was the first."""

    down_ns: int
    """When the last rank was gone."""

    restarts_left: int
    """Attempts that may follow."""

    hang: Path | None = None
    """What the hang watch found, for an attempt that was ended for making no progress."""

    code: CodeUpdates | None = None
    """The code of the job, where it may have been updated."""

    standbys: int = 0
    """Hosts that wait in reserve."""


class RunSupervisor(ABC):
    """Follows the attempts of a run in the launcher; called in its main thread."""

    @abstractmethod
    def spawn(self, spec: RankSpec, stdout_fd: int, stderr_fd: int) -> int | None:
        """Start a rank as a child of this process; returns its process id, None where it is to be started cold."""

    @abstractmethod
    def environment(self, spec: RankSpec) -> Mapping[str, str]:
        """Return the environment of a rank that is to be started."""

    @abstractmethod
    def began(self, attempt: int, group: Group, drainer: Drainer) -> None:
        """Follow an attempt whose ranks have been started."""

    @abstractmethod
    def look(self) -> bool:
        """Do what is due, a few times a second; says whether all ranks of the attempt have made a step."""

    @abstractmethod
    def failed(self, failure: Failure) -> str:
        """Note a failed attempt; returns what is to be done: 'stop', 'standby' (this host leaves), or go on."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything: the run is over."""


class Unsupervised(RunSupervisor):
    """Starts every attempt cold, and another one after each failure."""

    def spawn(self, spec: RankSpec, stdout_fd: int, stderr_fd: int) -> int | None:
        """Start nothing."""
        return None

    def environment(self, spec: RankSpec) -> Mapping[str, str]:
        """Add nothing."""
        return spec.env

    def began(self, attempt: int, group: Group, drainer: Drainer) -> None:
        """Follow nothing."""

    def look(self) -> bool:
        """Say no."""
        return False

    def failed(self, failure: Failure) -> str:
        """Go on."""
        return "restart"

    def close(self) -> None:
        """Hold nothing."""


class Guarded(RunSupervisor):
    """Hands everything on to another supervisor until that one raises; from then on it is as if there were none."""

    def __init__(self, inner: RunSupervisor, say: Callable[[str], None]) -> None:
        self._inner, self._say = inner, say
        self._instead = Unsupervised()

    def spawn(self, spec: RankSpec, stdout_fd: int, stderr_fd: int) -> int | None:
        """Start a rank warm, or let it be started cold."""
        try:
            return self._inner.spawn(spec, stdout_fd, stderr_fd)
        except Exception as cause:
            self._leave(cause)
            return None

    def environment(self, spec: RankSpec) -> Mapping[str, str]:
        """Return the environment of a rank."""
        try:
            return self._inner.environment(spec)
        except Exception as cause:
            self._leave(cause)
            return spec.env

    def began(self, attempt: int, group: Group, drainer: Drainer) -> None:
        """Follow an attempt."""
        try:
            self._inner.began(attempt, group, drainer)
        except Exception as cause:
            self._leave(cause)

    def look(self) -> bool:
        """Do what is due."""
        try:
            return self._inner.look()
        except Exception as cause:
            self._leave(cause)
            return False

    def failed(self, failure: Failure) -> str:
        """Note a failed attempt."""
        try:
            return self._inner.failed(failure)
        except Exception as cause:
            self._leave(cause)
            return "restart"

    def close(self) -> None:
        """Let go of everything."""
        try:
            self._inner.close()
        except Exception as cause:
            self._leave(cause)

    def _leave(self, cause: Exception) -> None:
        failed, self._inner = self._inner, self._instead
        self._say(f"restarts are not supervised any more: {type(cause).__name__}: {cause}")
        try:
            failed.close()
        except Exception as second:
            self._say(f"what supervised them could not be closed: {type(second).__name__}: {second}")


def supervisor_of(options: LaunchOptions, recording: RunRecording, say: Callable[[str], None]) -> RunSupervisor:
    """Return what supervises the attempts of a run: what the options name, where there may be more than one."""
    if not options.supervisor or not options.max_restarts:
        return Unsupervised()
    try:
        made: RunSupervisor = resolved(options.supervisor)(options, recording, say)
    except Exception as cause:  # a run folder on a full disk, say: the job is what matters
        say(f"restarts are not supervised: {type(cause).__name__}: {cause}")
        return Unsupervised()
    return Guarded(made, say)


# When a standstill is proven, so that a job may be ended for it although nobody gave a timeout.

LOOKS = 3
"""So many looks must agree."""

LOOK_S = 1.0
"""Seconds between two of them."""

HALTED = frozenset("TZXD")
"""States of a process that runs no code: stopped, zombie, gone, in uninterruptible sleep. One that a debugger holds
(`t`) is none of them: somebody looks at it."""

AHEAD_STEPS = 2
"""Updates by which ranks that wait for each other at every step can never be apart."""


def proven(looks: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """Return the ranks that a standstill is proven to be due to, [] where it is not proven.

    `looks` are the rows of the hang watch, oldest first.
    """
    if len(looks) < LOOKS or any([row["rank"] for row in look] != [row["rank"] for row in looks[0]] for look in looks):
        return []
    by_rank = list(zip(*looks, strict=True))
    halted = [rows[0]["rank"] for rows in by_rank if all(str(row["state"])[:1] in HALTED for row in rows)]
    if halted:
        return halted if len(halted) < len(by_rank) else []
    waiting = [rows for rows in by_rank if all(_waits_as(row, rows[0]) for row in rows)]
    rest = [rows for rows in by_rank if rows not in waiting]
    reached = max((rows[0]["step"] for rows in waiting), default=None)
    if len(rest) != 1 or reached is None or any(row["step"] < reached + AHEAD_STEPS for row in rest[0]):
        return []
    return [rest[0][0]["rank"]]


def _waits_as(row: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Say whether a rank waits in an operation of many ranks, as it did at the first look."""
    same = all(row.get(key) == first.get(key) for key in ("op", "since_ns", "step", "stack"))
    return same and str(row["op"] or "").startswith("comm.")
