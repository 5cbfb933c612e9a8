"""Which forwards learn, and where a rank evaluates: derived when a run is finalised, from rows of its training thread.

A forward learns when a backward of its step follows. Evaluation is forwards of a trained model that do not learn,
and the time around them: from `eval()`, or the first batch of a loader that training does not use, to `train()`, or
the end of the last of them. A model without a parameter of a trained one (a teacher, a target network) is part of the
step that asks it. Times in int64 ns on CLOCK_MONOTONIC; arrays are [n].

    train  F B U | F B U |                       | F B U
    eval           eval() n f n f n f train()
                   [----------------------)            F learns, f does not, n = next(loader)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import FIRST, LAST, Intervals, merged
from headway.trace.events.vocabulary import KIND
from headway.trace.recording.basis import Basis, GradientCalls
from headway.trace.recording.rows import RecordedRows
from headway.trace.recording.segments import CODE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FORWARD, MODE, NEXT, ITER = (CODE[name] for name in ("forward", "mode", "input.next", "input.iter"))
OPTIMIZER, EVAL, MARKED = (CODE[name] for name in ("optimizer.step", "eval", "eval.mark"))

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
    """[forwards] Of a trained model, and not learning."""
    work_start: Ints
    work_end: Ints
    """[m] Learning forwards, gradients and updates; ends accumulated, so that they never fall."""


def evaluations(main: RecordedRows, gradients: GradientCalls) -> RecordedRows:
    """Return the spans of evaluation, disjoint and in order; `main` has its learning forwards marked."""
    moments = _moments(main, gradients)
    own = _own_input(main, moments)
    spans, model = _spans(main, moments, own)
    return _with_marks(main, spans, model)


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


def _spans(main: RecordedRows, moments: _Moments, own: RecordedRows) -> tuple[Intervals, Ints]:
    """Return the spans that forwards which do not learn make, and the model of each.

    These forwards are taken together between two moments of learning, `low` and `high`.
    """
    idle = moments.forward.where(moments.idle)
    if not len(idle):
        return (idle.start_ns, idle.start_ns), idle.corr
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
    return (begin[real], end[real]), idle.corr[head[real]]


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
