"""How much of a training thread's computing on the host was waiting for a core: taken out of what it computed.

Now and then at a step the recorder marks how long the training thread, and the pool of threads that computes with it,
were ready to run while no core was free (`host.cpu`, run delay). Between two marks that time is spread over what the
thread computed, in proportion to its duration:

    marks          |d = 40                                             |d = 540 ms
    thread         |- forward 600 -|- backward 1,200 -|- update 200 ms -|
    no core             150              300                50

Where the thread and its pool waited in turns, the two delays add up; where they waited at once, the longer one counts.
One that has a core spins while another has none. Where samples of its code told for how long
(`headway.runtime.script.run_delay`), what it computed is known: its CPU time less what it spun, and less what it made
of loads. The rest was waiting, as far as marks say that anything was: a step that computes 4 ms took up to 290 beside
three busy processes, and what waiting leaves of it would be mostly the error of the waiting. Elsewhere marks hold the
longer delays, and by how much the sum is more: it counts as far as each forward, backward and update still computes for
as long as the fastest of its kind, and forward and backward together for no longer than on one thread, which a child of
the recorded process has timed (`headway.compute.torch_rehearsal`): operators that are short beside a slice of the
scheduler's wait in turns, long ones at once.

Waiting inside a load of the training thread is known by itself (`input.cpu_wait`) and left out. Times in int64 ns.

While the run goes on, nothing is known behind the last mark: `shares_from` gives it the share of the last span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS, NS_PER_S
from headway.ledger.booking.rows import RankRows
from headway.ledger.buckets import SUB_CODE, SUBS, bucket_of_sub
from headway.sim.recorded.core_use import unspun_ns
from headway.trace.events.intervals import Ints, Pieces
from headway.trace.rings.rank_tables import CallFlops

SPAN_NS = 500 * NS_PER_MS
"""Marks so close together count as one: the threads of a pool are looked at four times a second."""

MOST_WAITING = 0.99
"""Of what a thread computed, at most this share was waiting: it did compute."""

COMPUTES = np.array(
    [
        bucket_of_sub(sub) == "useful"
        or sub in ("host.script", "host.gc", "eval.forward", "eval.other", "eval.rollout")
        for sub in SUBS
    ]
)
"""[len(SUBS)] Whether the thread computes, and is not blocked, in a sub-line."""


MADE = ("input.prep", "input.collate")
"""Names of what a load of the training thread computes."""

OF_MODEL = [SUB_CODE["useful.forward"], SUB_CODE["useful.backward"]]
"""Sub-lines of what a model's call computes."""


class Marks(NamedTuple):
    """What the recorder marked, at instants at least `SPAN_NS` apart; empty where it is not known."""

    moment_ns: Ints
    """[k] When."""
    waited_ns: Ints
    """[k] Time without a core so far."""
    most_ns: Ints
    """[k] The same where the threads of the pool never waited at once."""

    spent_ns: NDArray[np.float64]
    """[k] CPU time so far, without what the thread spun or worked for headway; NaN where no samples told it."""


def marks(rows: RankRows) -> Marks:
    """Return the marks of a rank."""
    picked = rows.of("host.cpu")
    waited = rows.column("seq", picked)
    if len(picked) < 2 or bool((waited < 0).any()):
        return Marks(picked[:0], picked[:0], picked[:0], np.zeros(0))
    moment_ns = rows.start_ns[picked]
    more_ns = NS_PER_MS * np.maximum(rows.column("peer", picked).astype(np.int64), 0)
    spins = rows.of("host.spins")
    spent_ns = unspun_ns(moment_ns, rows.column("corr", picked), rows.start_ns[spins], rows.column("corr", spins))
    told = ~np.isnan(spent_ns)
    looked = np.flatnonzero(told | ~np.logical_or.accumulate(told))  # from the first samples on, marks that have some
    chosen = looked[_spaced(moment_ns[looked])]
    return Marks(moment_ns[chosen], waited[chosen], (waited + more_ns)[chosen], spent_ns[chosen])


def _spaced(moment_ns: Ints) -> list[int]:
    """Return which of the sorted instants are at least `SPAN_NS` apart; the first and the last one always are."""
    chosen = [0]
    for index in range(1, len(moment_ns)):
        if moment_ns[index] - moment_ns[chosen[-1]] >= SPAN_NS or index == len(moment_ns) - 1:
            chosen.append(index)
    return chosen


def shares_from(moment_ns: Ints, cpu_ns: Ints, waited: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Return [k] instants, and [k] for how much of its computing from each on the thread had no core (none: unknown).

    `moment_ns`, `cpu_ns` and `waited` [n] are marks in order: when, the thread's CPU time so far, and what it waited.
    """
    if len(moment_ns) < 2 or bool((waited < 0).any()):
        return moment_ns[:0], np.zeros(0)
    chosen = _spaced(moment_ns)
    spent, delayed = np.diff(cpu_ns[chosen]), np.diff(waited[chosen])
    share = np.clip(delayed / np.maximum(spent + delayed, 1), 0.0, MOST_WAITING)
    return moment_ns[chosen], np.append(share, share[-1])


def most_of_steps(rows: RankRows, step_start: Ints, calls: Sequence[CallFlops]) -> NDArray[np.float64]:
    """Return [steps + 2] the ns that forward and backward of each step take on one thread; inf where nobody timed them.

    `step_start` [steps] are their begins, `calls` what is known of calls of the models. Outer columns are no steps.
    """
    picked = rows.of("forward")
    timed = {call.model: call.rehearsed.step_s for call in calls if call.rehearsed is not None}
    models, which = np.unique(rows.column("corr", picked), return_inverse=True)
    call_s = np.array([timed.get(int(model)) or np.inf for model in models])
    columns = np.searchsorted(step_start, rows.start_ns[picked], side="right")
    most_ns = NS_PER_S * np.bincount(columns, weights=call_s[which], minlength=len(step_start) + 2)
    return np.where(most_ns > 0, most_ns, np.inf)


def without_core(
    rows: RankRows, marked: Marks, pieces: Pieces, sub: Ints, step: Ints, most_ns: NDArray[np.float64]
) -> Ints:
    """Return [n] the ns of each piece in which its thread had no core; pieces must not straddle a mark.

    `sub` and `step` are their sub-lines and numbers of steps, `most_ns` is of `most_of_steps`.
    """
    marked_ns = marked.moment_ns
    nothing = np.zeros(len(sub), np.int64)
    if len(marked_ns) < 2:
        return nothing
    computes = COMPUTES[sub]
    span = np.searchsorted(marked_ns, pieces.start_ns, side="right") - 1
    inside: NDArray[np.bool_] = computes & (span >= 0) & (span < len(marked_ns) - 1)
    spans = len(marked_ns) - 1
    loaded = _of_rows(rows, rows.of("input.cpu_wait"), marked_ns)
    computed = np.bincount(span[inside], weights=pieces.duration_ns[inside], minlength=spans)
    low, high = ((np.diff(ns) - loaded) / np.maximum(computed, 1.0) for ns in (marked.waited_ns, marked.most_ns))
    fastest_ns = _fastest(pieces.duration_ns, sub, step, inside, most_ns)
    undisturbed = np.bincount(span[inside], weights=fastest_ns, minlength=spans)
    sampled = np.diff(marked.spent_ns) - _fed(rows, marked, loaded)
    told = ~np.isnan(sampled)
    low[told], undisturbed[told] = 0.0, np.maximum(sampled[told], 0.0)
    high = np.minimum(high, 1 - undisturbed / np.maximum(computed, 1.0))
    share = np.clip(np.maximum(low, high), 0.0, np.where(told, 1.0, MOST_WAITING))
    return np.where(inside, np.rint(pieces.duration_ns * share[np.clip(span, 0, spans - 1)]), 0).astype(np.int64)


def _fed(rows: RankRows, marked: Marks, loaded: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [k - 1] the CPU ns that loads of the training thread took, with what is about them.

    There the thread had a core for as much of the time as elsewhere between the marks. `loaded` is what loads waited.
    """
    marked_ns = marked.moment_ns
    begins, loads = rows.of("input.next"), rows.of("input.load")
    around = np.searchsorted(rows.start_ns[begins], rows.start_ns[loads], side="right") - 1
    nexts = np.unique(begins[around[around >= 0]])
    about = _of_rows(rows, nexts, marked_ns) - _of_rows(rows, loads, marked_ns)
    spent, waited = np.diff(marked.spent_ns), np.diff(marked.waited_ns) - loaded
    on_core = spent / np.maximum(spent + waited, 1.0)
    return _of_rows(rows, rows.of(*MADE), marked_ns) + np.maximum(about, 0.0) * on_core


def _of_rows(rows: RankRows, picked: Ints, marked_ns: Ints) -> NDArray[np.float64]:
    """Return [k - 1] the ns of those rows that begin between two marks."""
    spans = len(marked_ns) - 1
    span = np.searchsorted(marked_ns, rows.start_ns[picked], side="right") - 1
    within = (span >= 0) & (span < spans)
    duration_ns = (rows.end_ns - rows.start_ns)[picked][within]
    return np.bincount(span[within], weights=duration_ns, minlength=spans).astype(np.float64)


def _fastest(
    duration_ns: Ints, sub: Ints, step: Ints, inside: NDArray[np.bool_], most_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the ns of each piece inside, had its sub-line taken in its step what it takes in the fastest step.

    A sub-line counts in the steps that have it; the outer steps are none. Those of the model take `most_ns` at most.
    """
    subs, steps, ns = sub[inside], step[inside], duration_ns[inside].astype(np.float64)
    of_both = np.zeros((len(SUBS), int(steps.max(initial=0)) + 1))
    np.add.at(of_both, (subs, steps), ns)
    inner = of_both[:, 1:-1]
    floors = np.where(inner > 0, inner, np.inf).min(axis=1, initial=np.inf)
    floors = np.where(np.isinf(floors), of_both.max(axis=1), floors)
    fastest: NDArray[np.float64] = ns * np.minimum(floors[subs] / np.maximum(of_both[subs, steps], 1.0), 1.0)
    of_model = np.isin(subs, OF_MODEL)
    model_ns = np.bincount(steps[of_model], weights=fastest[of_model], minlength=len(most_ns))
    fastest[of_model] *= np.minimum(most_ns / np.maximum(model_ns, 1.0), 1.0)[steps[of_model]]
    return fastest


CODE = SUB_CODE["host.cpu_wait"]
"""Sub-line of that time."""
