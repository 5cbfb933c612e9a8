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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import FIRST, LAST, Intervals, merged
from headway.trace.events.vocabulary import KIND
from headway.trace.recording.rows import BACKWARD, CODE, ON_DEVICE, RecordedRows, counted, cycles, outermost

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
    ways: tuple[Callable[[], Basis], ...] = (
        lambda: _by_optimizer(main, loops or {}),
        lambda: _by_backward(main),
        lambda: _of_all("grad", outermost(main.where(main.name == GRAD))),
        lambda: _of_all("replay", _outer_replays(main), cycled=True),
        lambda: _of_all("inference", main.where(main.name == FORWARD).by_end(), cycled=True),
    )
    return next((found for way in ways if len((found := way()).ends_ns)), Basis("", np.empty(0, np.int64)))


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


# Which forwards learn, and where a rank evaluates: derived when a run is finalised, from rows of its training thread.
#
# A forward learns when a backward of its step follows. Evaluation is forwards of a trained model that do not learn,
# and the time around them: from `eval()`, or the first batch of a loader that training does not use, to `train()`, or
# the end of the last of them. A model without a parameter of a trained one (a teacher, a target network) is part of the
# step that asks it; asked for several batches of a loader that training does not use, it is evaluated: the model that
# copies are trained of and averaged into. Times in int64 ns on CLOCK_MONOTONIC; arrays are [n].
#
#     train  F B U | F B U |                       | F B U
#     eval           eval() n f n f n f train()
#                    [----------------------)            F learns, f does not, n = next(loader)

Bools = NDArray[np.bool_]

MODE, NEXT, ITER = (CODE[name] for name in ("mode", "input.next", "input.iter"))
EVAL, MARKED = (CODE[name] for name in ("eval", "eval.mark"))

ENABLED, TRAINING, LEARNS, SAMPLES = 1, 2, 4, 8
"""Bits of `seq` of a forward; the last two are set here."""

MIN_STEPS, ALIKE = 10, 0.8
"""Steps from which the usual number of forwards is known, and the share of them that must have it."""


def mark_learning(rows: RecordedRows, gradients: GradientCalls, basis: Basis) -> None:
    """Set `LEARNS` in the forwards among `rows` that a gradient of their step follows, or holds. Changes them.

    One in training mode may wait for its backward to the end of the step (micro-batches, pipelines). One of a model
    in eval mode is only followed by its own: before the next forward in training mode, before `train()`.
    """
    at = np.flatnonzero(rows.name == FORWARD)
    if not len(at) or not len(gradients.start_ns):
        return
    start, end = rows.start_ns[at], rows.start_ns[at] + rows.duration_ns[at]
    limit = np.concatenate([basis.ends_ns, [LAST]])[np.searchsorted(basis.ends_ns, end, side="left")]
    quiet = rows.seq[at] & TRAINING == 0
    turns = np.concatenate(
        [start[~quiet], rows.start_ns[(rows.name == MODE) & (rows.seq == 1)]],
    )
    turns = np.concatenate([np.sort(turns), [LAST]])
    limit = np.where(quiet, np.minimum(limit, turns[np.searchsorted(turns, start, side="right")]), limit)
    follows = np.concatenate([gradients.start_ns, [LAST]])[np.searchsorted(gradients.start_ns, end, side="left")]
    before = np.searchsorted(gradients.start_ns, start, side="right") - 1
    inside = (before >= 0) & (end <= gradients.end_ns[before])  # torch.func calls the module within
    learns = ((rows.seq[at] & ENABLED > 0) & (follows < limit)) | inside
    waiting = np.flatnonzero((rows.seq[at] & ENABLED > 0) & ~quiet & ~inside)
    waiting = waiting[np.argsort(start[waiting], kind="stable")]
    of_gradients = np.searchsorted(basis.ends_ns, gradients.start_ns, side="right")
    samples = waiting[_beyond_usual(np.searchsorted(basis.ends_ns, start[waiting], side="right"), of_gradients)]
    learns[samples] = False
    rows.seq[at] |= LEARNS * learns
    rows.seq[at[samples]] |= SAMPLES


def _beyond_usual(step: Ints, of_gradients: Ints) -> Bools:
    """Tell which forwards in training mode, [n] by their `step` in order, are no part of it but sample from the model.

    Both have gradients on, and the backward of the step follows both. Where nearly all steps have the same number of
    forwards, the first ones of a step that has more are samples, unless it has more backwards as well.

        step 8   step 9   sampling     step 10
        F B U    F B U    n n n n n    F B U      usual: 1 forward; step 10 has 6 of them and 1 backward
    """
    steps, head, inverse, count = np.unique(step, return_index=True, return_inverse=True, return_counts=True)
    if len(steps) < MIN_STEPS:
        return np.zeros(len(step), bool)
    backwards = np.bincount(of_gradients, minlength=steps[-1] + 1)[steps]
    usual, usual_backwards = np.bincount(count).argmax(), np.bincount(backwards).argmax()
    alike = float((count == usual).mean()) >= ALIKE
    more = np.where(alike & (backwards <= usual_backwards), count - usual, 0)
    found: Bools = np.arange(len(step)) - head[inverse] < more[inverse]
    return found


@dataclass(frozen=True, slots=True)
class _Moments:
    """What is looked at, in order of start."""

    forward: RecordedRows
    learns: Bools
    """[forwards]"""
    idle: Bools
    """[forwards] Of a trained model, and not learning; or of another that is evaluated."""
    work_start: Ints
    work_end: Ints
    """[m] Learning forwards, gradients and updates; ends accumulated, so that they never fall."""


ROLLOUT = 2
"""`seq` of a row of evaluation in which a policy acted."""


def evaluations(main: RecordedRows, gradients: GradientCalls, *, acts: bool = False) -> RecordedRows:
    """Return the spans of evaluation, disjoint and in order; `main` has its learning forwards marked.

    Where models are policies that act (`acts`), spans in training mode that take no batch of a loader are rollouts.
    """
    moments = _moments(main, gradients)
    own = _own_input(main, moments)
    moments = replace(moments, idle=moments.idle | _fed_apart(main, moments, own))
    spans, model, plain = _spans(main, moments, own)
    rows = _with_marks(main, spans, model)
    if acts and len(spans[0]):
        of_rollout = np.searchsorted(rows.start_ns, spans[0][plain], side="right") - 1
        rows.seq[of_rollout] = np.where(rows.seq[of_rollout] == 0, ROLLOUT, rows.seq[of_rollout])
    return rows


def _moments(main: RecordedRows, gradients: GradientCalls) -> _Moments:
    forward = main.where(main.name == FORWARD)
    forward = forward.where(np.argsort(forward.start_ns, kind="stable"))
    learns = forward.seq & LEARNS > 0
    trained = np.isin(forward.corr, np.unique(forward.corr[learns & (forward.corr >= 0)]))
    apart = (forward.seq & ENABLED == 0) | (forward.seq & TRAINING == 0) | (forward.seq & SAMPLES > 0)
    idle = trained & ~learns & apart
    learning, updates = forward.where(learns), main.where(main.name == OPTIMIZER)
    start = np.concatenate([learning.start_ns, gradients.start_ns, updates.start_ns])
    end = np.concatenate([(learning.start_ns + learning.duration_ns), gradients.end_ns,
                          updates.start_ns + updates.duration_ns])  # fmt: skip
    order = np.argsort(start, kind="stable")
    return _Moments(forward, learns, idle, start[order], np.maximum.accumulate(end[order]))


def _own_input(main: RecordedRows, moments: _Moments) -> RecordedRows:
    """Return iterators made and batches taken that training does not use, in order of start.

    An iterator is training's when most of its batches are followed by a forward that learns before the next batch.
    """
    rows = main.where((main.name == NEXT) | (main.name == ITER))
    rows = rows.where(np.argsort(rows.start_ns, kind="stable"))
    taken = np.flatnonzero((rows.name == NEXT) & (rows.seq >= 0))
    if not len(taken):
        return rows.where(taken)
    every = np.flatnonzero(rows.name == NEXT)
    until = np.concatenate([rows.start_ns[every], [LAST]])[np.searchsorted(every, taken, side="right")]
    learning = moments.forward.start_ns[moments.learns]
    feeds = np.searchsorted(learning, until) > np.searchsorted(learning, rows.start_ns[taken])
    iterators, of = np.unique(rows.corr[taken], return_inverse=True)
    used = np.bincount(of, weights=feeds) * 2 >= np.bincount(of)
    return rows.where(~np.isin(rows.corr, iterators[used]))


def _fed_apart(main: RecordedRows, moments: _Moments, unused: RecordedRows) -> Bools:
    """Tell which forwards of models that are not trained evaluate: several in a row take `unused` batches."""
    forward, batches = moments.forward, main.where((main.name == NEXT) & (main.seq >= 0))
    batches = batches.where(np.argsort(batches.start_ns, kind="stable"))
    newest = np.searchsorted(batches.start_ns, forward.start_ns) - 1
    taken_apart = np.append(np.isin(batches.corr, unused.corr[unused.name == NEXT]), False)  # the last: none before
    quiet = (forward.seq & ENABLED == 0) | (forward.seq & TRAINING == 0)
    stretch = np.searchsorted(moments.work_start, forward.start_ns, side="right")
    picked = taken_apart[newest] & quiet & ~moments.learns & ~moments.idle & (stretch > 0)
    several: Bools = picked & (np.bincount(stretch, weights=picked)[stretch] > 1)
    return several


def _spans(main: RecordedRows, moments: _Moments, own: RecordedRows) -> tuple[Intervals, Ints, NDArray[np.bool_]]:
    """Return the spans that forwards which do not learn make, the model of each, and where it stayed in training mode.

    The last one also says that no batch of a loader was taken there.
    These forwards are taken together between two moments of learning, `low` and `high`.
    """
    idle = moments.forward.where(moments.idle)
    if not len(idle):
        return (idle.start_ns, idle.start_ns), idle.corr, np.zeros(0, np.bool_)
    at = np.searchsorted(moments.work_start, idle.start_ns, side="right")
    head = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
    tail = np.concatenate([head[1:], [len(at)]]) - 1
    first, last = idle.start_ns[head], np.maximum.reduceat(idle.start_ns + idle.duration_ns, head)
    low = np.concatenate([[FIRST], moments.work_end])[at[head]]
    high = np.concatenate([moments.work_start, [LAST]])[at[head]]
    mode = main.where(main.name == MODE)
    mode = mode.where(np.argsort(mode.start_ns, kind="stable"))
    to_train, to_eval = mode.start_ns[mode.seq == 1], mode.start_ns[mode.seq == 0]
    # eval() after the last train() before the first of them; before anything was learned it may be a model's making.
    since = np.maximum(low, np.concatenate([[FIRST], to_train])[np.searchsorted(to_train, first)])
    turned = _next(to_eval, since)
    begin = np.where((turned < first) & (low > FIRST), turned, first)
    own_start, own_end = own.start_ns, own.start_ns + own.duration_ns
    fed = _next(own_start, since)
    begin = np.minimum(begin, np.where(fed < first, fed, first))
    until = np.minimum(high, _next(to_train, last))
    later = np.searchsorted(own_start, np.minimum(until, LAST - 1), side="right") - 1
    taken = np.concatenate([own_end, [FIRST]])[later]
    end = np.where(until < high, until, np.maximum(last, np.where(later >= 0, taken, FIRST)))
    end = np.minimum(np.maximum(end, last), np.maximum(high, last))
    # One forward without gradients, in training mode and on the step's own batch, is part of the step.
    quiet = np.bitwise_or.reduceat(np.where(idle.seq & TRAINING == 0, 1, 0), head) > 0
    real = quiet | (tail > head) | (fed < first)
    plain = ~quiet & (fed >= until)
    return (begin[real], end[real]), idle.corr[head[real]], plain[real]


def _next(moments: Ints, after: Ints) -> Ints:
    """Return the first of the sorted `moments` that is not before each of `after`, `LAST` without one."""
    found: Ints = np.concatenate([moments, [LAST]])[np.searchsorted(moments, after)]
    return found


def _with_marks(main: RecordedRows, spans: Intervals, model: Ints) -> RecordedRows:
    """Return the spans joined with those that the script marked itself, as rows."""
    marks = main.where(main.name == MARKED)
    start, end = merged(
        np.concatenate([spans[0], marks.start_ns]), np.concatenate([spans[1], marks.start_ns + marks.duration_ns])
    )
    rows = RecordedRows.of(EVAL, start, end - start, kind=KIND["MARK"], seq=np.zeros(len(start), np.int64))
    if len(spans[0]):
        at = np.searchsorted(start, spans[0], side="right") - 1
        rows.corr[at[::-1]] = model[::-1]  # of several, the first
    of_mark = np.searchsorted(start, marks.start_ns[marks.duration_ns > 0], side="right") - 1
    rows.seq[of_mark] = 1
    return rows
