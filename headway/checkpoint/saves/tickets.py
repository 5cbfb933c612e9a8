"""What a save hands back: whether it is durable yet, and what became of it.

>>> ticket = SaveTicket(40, listen=lambda timeout_s: None)
>>> ticket.done()
False
>>> ticket.settle(Commit(40, "/ckpts/step-40", "d0be", 4096, 0.2))
>>> ticket.result().path
'/ckpts/step-40'

At which steps a job saves, the same on all its ranks, and what its steps take.

Alone, a rank asks its policy at every step. Among several, rank 0's policy
names the next step as a save begins, so that all know it long before: ranks
that decided for themselves would not save the same steps.

>>> meter = StepMeter(clock=iter([10.0, 10.5]).__next__)
>>> meter.step(under_way=False), meter.stall(0.1)
(None, None)
>>> meter.step(under_way=False)
StepTiming(step_s=0.5, stall_s=0.1, saved=False, in_flight=False, durable_s=None)
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.checkpoint.policy import CheckpointPolicy, StepTiming
from headway.checkpoint.restores.exchange import Agreement
from headway.core.errors import BackgroundError
from headway.runtime.launching.peers import PeerBoard, peers_of
from headway.runtime.launching.save_and_leave import VARIABLE

MOST_FAILED, FAILING_S = 3, 600.0
"""After so many failed saves in a row, over so many seconds, the training loop gets an error and no more warnings: a
disk that is full for a moment ends no job that saves every second."""

LISTEN_S = 0.2
"""Longest single wait for the agent's next word."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that is visible and durable."""

    step: int
    path: str
    """Its folder."""
    root: str
    """Merkle root over its files, hex."""
    num_bytes: int
    """Of all its files."""
    durable_s: float
    """From the start of the save to the commit."""


@dataclass(slots=True)
class FailedSaves:
    """The saves in a row that failed in the background, and the checkpoint before them."""

    count: int = 0
    since_s: float = 0.0
    """When the first of them failed, on the monotonic clock."""
    newest: str = ""
    """Folder of the newest checkpoint that this process committed; '' = none."""

    def failed(self) -> None:
        """Count one more."""
        self.since_s = self.since_s if self.count else time.monotonic()
        self.count += 1

    def committed(self, path: str) -> None:
        """Begin anew: there is a checkpoint."""
        self.count, self.newest = 0, path

    @property
    def end_the_job(self) -> bool:
        """Whether a job that goes on loses more than one that ends."""
        return self.count >= MOST_FAILED and time.monotonic() - self.since_s >= FAILING_S

    def warning(self, text: str) -> str:
        """Return a failure's text with how many failed, and how many end the job."""
        limits = f"{MOST_FAILED} in a row over {FAILING_S / 60:.0f} minutes end the job"
        return f"{text} ({self.count} of {MOST_FAILED}: {limits})" if self.count else text

    def error(self, text: str) -> str:
        """Return a failure's text with the checkpoint that there is."""
        return f"{text} {f'The newest checkpoint is {self.newest}.' if self.newest else 'No save has succeeded yet.'}"


class SaveTicket:
    """One save. It is over when the checkpoint is committed, or can never be."""

    def __init__(self, step: int, *, listen: Callable[[float], None]) -> None:
        """`listen(timeout_s)` hears what the agent has to say of any save."""
        self.step = step
        """Step that is saved."""
        self.blocked_s = 0.0
        """How long training stood still for it: waiting for earlier saves, and the copy."""
        self.persist_s = 0.0
        """How long this rank's part took to reach the disk; 0 until it has."""
        self._listen = listen
        self._commit: Commit | None = None
        self._failure: str | None = None
        self.is_told = False
        """Whether the caller knows of the failure already."""

    @classmethod
    def refused(cls, step: int, why: str) -> SaveTicket:
        """Return the ticket of a save that was not begun; its caller knows why."""
        ticket = cls(step, listen=lambda timeout_s: None)
        ticket.settle(why.rstrip("."))
        ticket.is_told = True
        return ticket

    def __repr__(self) -> str:
        state = "committed" if self._commit else f"failed: {self._failure}" if self._failure else "under way"
        return f"SaveTicket(step={self.step}, blocked_s={self.blocked_s:.4f}, {state})"

    @property
    def commit(self) -> Commit | None:
        """The checkpoint, once it is durable."""
        return self._commit

    @property
    def failure(self) -> str | None:
        """Why there will be none."""
        return self._failure

    def done(self) -> bool:
        """Whether the save is over, well or not; never waits."""
        if not self._is_over():
            self._listen(0.0)
        return self._is_over()

    def result(self, timeout_s: float | None = None) -> Commit:
        """Wait until the checkpoint is durable and return it.

        Raises `BackgroundError` when it will never be, `TimeoutError` when it is not after `timeout_s`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"step {self.step} is not durable after {timeout_s} s. Wait longer; it goes on.")
            self._listen(LISTEN_S if until is None else min(LISTEN_S, max(until - time.monotonic(), 0.0)))
        if self._commit is None:
            raise self.error()
        return self._commit

    def error(self) -> BackgroundError:
        """Return the failure as an error; it counts as told."""
        self.is_told = True
        return BackgroundError(
            f"the checkpoint of step {self.step} was not written: {self._failure}. Remove the cause; the next save "
            "tries again, and older checkpoints stand."
        )

    def settle(self, outcome: Commit | str) -> None:
        """Note how the save ended: a commit, or why there is none."""
        if isinstance(outcome, str):
            self._failure = outcome
        else:
            self._commit = outcome

    def _is_over(self) -> bool:
        return self._commit is not None or self._failure is not None


def why_refused() -> str:
    """Return why no save can begin: a rank was killed, and others do its work (`headway.parallel.elastic`); else ''."""
    board = _peers(os.environ.get(VARIABLE, ""))
    killed = sorted(board.killed()) if board is not None else []
    if board is None or not killed:
        return ""
    return (
        f"rank {', '.join(map(str, killed))} was killed and others do its work: no checkpoint can be saved, since each "
        f"of the {board.num_ranks} ranks writes a part. The job goes on; start it again to save, it then continues "
        "from the last checkpoint."
    )


@functools.cache
def _peers(board: str) -> PeerBoard | None:
    slot = peers_of({VARIABLE: board})
    return None if slot is None else slot[0]


# At which steps a job saves, the same on all its ranks, and what its steps take.


class SaveSchedule:
    """Which step is saved next."""

    def __init__(self, policy: CheckpointPolicy, agreement: Agreement) -> None:
        self._policy, self._agreement = policy, agreement
        self._last: int | None = None
        self._next: int | None = None
        self._was_refused = False

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`. Ranks other than 0 may wait here for rank 0 to reach its last save.

        Where no save can begin, one is due once, which says so.
        """
        if why_refused():
            before, self._was_refused = self._was_refused, True
            return not before
        if self._last is None:
            self.saved(step - 1)  # nothing is saved yet: the first interval begins where we are
        assert self._last is not None
        if self._agreement.world_size == 1:
            return step - self._last >= self._policy.interval()
        return step >= self._hear()

    def saved(self, step: int) -> None:
        """Note that a save of `step` begins, or that it was restored: the next interval begins there."""
        if self._agreement.world_size > 1 and self._last is not None:
            self._hear()  # words are heard in the order in which they were said
        self._last, self._next = step, None
        if self._agreement.world_size > 1 and self._agreement.rank == 0:
            self._hear()

    def _hear(self) -> int:
        """Return the next step to save, as rank 0 says."""
        if self._next is None:
            last = self._last or 0
            self._next = int(self._agreement.word("next", lambda: str(last + self._policy.interval())))
        return self._next


class StepMeter:
    """Measures steps, from one end to the next, for the policy. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._stall_s, self._saved, self._was_under_way = 0.0, False, False
        self._durable_s: float | None = None

    def restart(self) -> None:
        """Forget the step under way: something else took place in it."""
        self._last_s = None
        self._forget()

    def stall(self, stall_s: float, *, saved: bool = False) -> None:
        """Note that training stood still for a save; `saved` when that save began."""
        self._stall_s += stall_s
        self._saved = self._saved or saved

    def durable(self, durable_s: float) -> None:
        """Note that a save is committed, so long after it began."""
        self._durable_s = durable_s

    def step(self, *, under_way: bool) -> StepTiming | None:
        """Return what the step that ends now took, None for the first; `under_way` if a save is."""
        now_s, timing = self._clock(), None
        if self._last_s is not None and now_s > self._last_s:
            step_s = now_s - self._last_s
            in_flight = under_way or self._saved or self._was_under_way
            timing = StepTiming(step_s, min(self._stall_s, step_s), self._saved, in_flight, self._durable_s)
        self._last_s = now_s
        self._forget(under_way)
        return timing

    def _forget(self, under_way: bool = False) -> None:
        self._was_under_way = under_way
        self._stall_s, self._saved, self._durable_s = 0.0, False, None
