"""What the steps of a rank are counted by: decided from everything it recorded, when the run is finalised.

By updates of an optimizer where there are any that a gradient led to; else by backwards that began with fresh
gradients; else by gradients that no backward computed; by replays of captured graphs where these do the work; else,
where nothing was trained, by forwards. Times in int64 ns on CLOCK_MONOTONIC.

>>> from headway.trace.events.vocabulary import KIND
>>> rows = RecordedRows.of(OPTIMIZER, np.array([10, 30]), np.array([5, 5]), kind=KIND["OPTIM"], corr=np.zeros(2))
>>> found = basis_of(rows)
>>> found.name, found.ends_ns.tolist()
('optimizer', [15, 35])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.steps import counted, cycles
from headway.trace.recording.rows import RecordedRows
from headway.trace.recording.segments import BACKWARD, CODE, ON_DEVICE, outermost

Ints = NDArray[np.int64]

OPTIMIZER, FORWARD = CODE["optimizer.step"], CODE["forward"]
GRAD, REPLAY = CODE["segment.grad"], CODE["graph.replay"]

BASES: dict[str, str] = {
    "optimizer": "steps are counted by updates of the optimizer",
    "backward": "steps are counted by backward passes",
    "grad": "steps are counted by calls that compute gradients",
    "replay": "steps are counted by replays of captured graphs",
    "inference": "no training step: inference, iterations are counted by forward passes",
    "": "no step",
}
"""Name of a basis -> what is said of it; '' where nothing that counts was recorded."""


@dataclass(frozen=True, slots=True)
class GradientCalls:
    """The outermost calls that computed gradients, in order."""

    start_ns: Ints
    """[n] Begin of each."""

    end_ns: Ints
    """[n] End of each; not always rising where one call lies in an update of the one before."""


@dataclass(frozen=True, slots=True)
class Basis:
    """How steps are counted, and where they end."""

    name: str
    """A key of `BASES`."""

    ends_ns: Ints
    """[steps] End of each complete step, not falling."""

    first_ns: int = -1
    """Begin of the first event that counts; -1 without one."""

    update_start_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """[m] Begin of every update that counts, in order; empty without an optimizer."""


def host_backwards(main: RecordedRows) -> RecordedRows:
    """Return the outermost backwards on the host's clock, in order."""
    return outermost(main.where((main.name == BACKWARD) & (main.corr != ON_DEVICE)))


def gradients_of(main: RecordedRows) -> GradientCalls:
    """Return what computed gradients on the training thread: backwards, or where there is none the other ways."""
    found = host_backwards(main)
    if not len(found):
        found = outermost(main.where(main.name == GRAD))
    return GradientCalls(found.start_ns, found.start_ns + found.duration_ns)


def basis_of(main: RecordedRows, loops: Mapping[int, int] | None = None) -> Basis:
    """Return what the steps in the rows of a training thread are counted by; `loops` as for `cycles`."""
    for found in (_by_optimizer(main, loops or {}), _by_backward(main), _by_grad(main), _by_replay(main)):
        if len(found.ends_ns):
            return found
    return _by_forward(main)


def _by_optimizer(main: RecordedRows, loops: Mapping[int, int]) -> Basis:
    updates = main.where(main.name == OPTIMIZER).by_end()
    every = np.sort(main.start_ns[((main.name == BACKWARD) & (main.corr != ON_DEVICE)) | (main.name == GRAD)])
    updates = updates.where(counted(updates.corr, updates.start_ns + updates.duration_ns, every))
    ends = (updates.start_ns + updates.duration_ns)[cycles(updates.corr, loops)]
    if not len(ends):
        return Basis("", ends)
    # A training step that was captured whole: the updates that warmed it up are followed by replays alone.
    replays = _outer_replays(main)
    later = replays.where(replays.start_ns >= ends[-1])
    name = "replay" if len(later) > len(ends) else "optimizer"
    if name == "replay":
        ends = np.concatenate([ends, (later.start_ns + later.duration_ns)[cycles(later.corr)]])
    return Basis(name, np.maximum.accumulate(ends), int(updates.start_ns.min()), np.sort(updates.start_ns))


def _by_backward(main: RecordedRows) -> Basis:
    """A step ends with the last backward before the next one that begins with fresh gradients.

    backwards   B   b   b   B   b   b   B        B: fresh gradients
    step ends               |           |   |    the last one: with the recording
                        ^           ^       ^    i. e. at the end of the backward before
    """
    backward = host_backwards(main)
    ends = backward.start_ns + backward.duration_ns
    last = np.concatenate([backward.peer[1:] == 1, [True]])[: len(ends)]
    return Basis("backward", np.maximum.accumulate(ends[last]), int(backward.start_ns[0]) if len(ends) else -1)


def _by_grad(main: RecordedRows) -> Basis:
    return _of_all("grad", outermost(main.where(main.name == GRAD)))


def _by_replay(main: RecordedRows) -> Basis:
    return _of_all("replay", _outer_replays(main), cycled=True)


def _by_forward(main: RecordedRows) -> Basis:
    found = _of_all("inference", main.where(main.name == FORWARD).by_end(), cycled=True)
    return found if len(found.ends_ns) else Basis("", found.ends_ns)


def _of_all(name: str, events: RecordedRows, *, cycled: bool = False) -> Basis:
    """Return a basis by which every event ends a step, or with `cycled` every cycle of their `corr`."""
    ends = events.start_ns + events.duration_ns
    first = int(events.start_ns.min()) if len(ends) else -1
    return Basis(name, np.maximum.accumulate(ends[cycles(events.corr)] if cycled else ends), first)


def _outer_replays(main: RecordedRows) -> RecordedRows:
    """Return the replays that neither a module's call nor a backward made: theirs are part of those."""
    rows = main.where(np.isin(main.name, [FORWARD, REPLAY]) | ((main.name == BACKWARD) & (main.corr != ON_DEVICE)))
    rows = outermost(rows) if (rows.name == REPLAY).any() else rows
    return rows.where(rows.name == REPLAY)
