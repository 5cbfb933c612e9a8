"""Where steps end, from the order of updates alone.

A step ends when the first optimizer of its cycle repeats: step k reaches from
the end of the last update of cycle k - 1 to the end of the last update of
cycle k. An update counts when a gradient was computed since that optimizer's
last one. Times in ns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LONGEST_INNER = 16
"""Mean updates in a row up to which those of an inner loop belong to one step: longer runs are phases."""


def counted(optimizer: Ints, end_ns: Ints, gradient_ns: Ints) -> NDArray[np.bool_]:
    """Say of each update [n], in order of their ends, whether a gradient began since its optimizer's update before.

    `gradient_ns` [m], sorted, are the starts of backwards; without any, all count: gradients that nobody saw.

        gradients    g       g        g  g
        updates   A     A  A    B  A        A      A's first and third were given no new gradient
        counts    -     x  -    x  x        x

    >>> counted(np.array([0, 0, 0]), np.array([5, 15, 25]), np.array([3, 22])).tolist()
    [True, False, True]
    """
    if not len(gradient_ns):
        return np.ones(len(optimizer), bool)
    # Where the number of gradients has not grown since the update before, that one did not count either, or took
    # them: so each update is compared with its neighbour only.
    before = np.searchsorted(gradient_ns, end_ns)
    order = np.argsort(optimizer, kind="stable")
    found, of = before[order], optimizer[order]
    same = np.concatenate([[False], of[1:] == of[:-1]]) if len(of) else np.zeros(0, bool)
    grown = found > np.where(same, np.concatenate([[0], found[:-1]]) if len(found) else found, 0)
    counts = np.empty(len(optimizer), bool)
    counts[order] = grown
    return counts


def cycles(optimizer: Ints, loops: Mapping[int, int] | None = None) -> Ints:
    """Return the index of the last update of each complete cycle; `optimizer` [n] in order of time.

    When a phase ends, and its first optimizer never comes back, the updates
    beyond the longest cycle seen so far open a new phase. `loops` says in how
    many loops each optimizer's update stands: what an inner loop repeats
    before an update outside of it is one cycle (several critic updates for
    one of the generator).
    """
    kept = _without_inner(optimizer, loops or {})
    return kept[_cycles(optimizer[kept])]


def _without_inner(optimizer: Ints, loops: Mapping[int, int]) -> Ints:
    """Return the indices [m] of the updates without those that an inner loop repeats; of these the last ones stay.

    updates   d d d g d d d g        d in two loops, g in one
    stay          3 4     7 8 ...
    """
    n = len(optimizer)
    if not n or len(set(loops.values())) < 2:
        return np.arange(n)
    last = np.flatnonzero(np.concatenate([optimizer[1:] != optimizer[:-1], [True]]))
    of, lengths = optimizer[last], np.diff(last, prepend=-1)
    depth = np.array([loops.get(int(index), 0) for index in np.unique(of)])[np.searchsorted(np.unique(of), of)]
    inner = []
    for index in np.unique(of):
        runs = np.flatnonzero(of[:-1] == index)
        if len(runs) > 1 and (depth[runs + 1] < depth[runs]).all() and lengths[runs].mean() <= LONGEST_INNER:
            inner.append(index)
    stays = ~np.isin(optimizer, inner)
    stays[last] = True
    return np.flatnonzero(stays)


def _cycles(optimizer: Ints) -> Ints:
    n, start = len(optimizer), 0
    ends: list[Ints] = []
    longest = 0
    while start < n:
        heads = start + np.flatnonzero(optimizer[start:] == optimizer[start])
        lengths = np.diff(heads)
        if len(lengths):
            ends.append(heads[1:] - 1)
            longest = max(longest, int(lengths.max()))
        tail = n - int(heads[-1])
        # In a phase that has shown its cycle, an optimizer that was no part of it begins the next phase.
        foreign = ~np.isin(optimizer[heads[-1] :], optimizer[start : heads[-1]]) if len(lengths) else np.zeros(1, bool)
        own = int(foreign.argmax())
        if not 0 < own <= longest:
            own = _until_repeat(optimizer[heads[-1] :])
        if not len(lengths) and not ends:
            longest = own  # the only cycle there is
        if (tail <= longest and not foreign.any()) or own == tail:
            if tail >= (int(lengths[-1]) if len(lengths) else tail):
                ends.append(np.array([n - 1]))
            break
        ends.append(np.array([heads[-1] + own - 1]))
        start = int(heads[-1]) + own
    return np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)


def _until_repeat(optimizer: Ints) -> int:
    """Return how many updates come before any optimizer of `optimizer` [n >= 1] is seen a second time."""
    size = 16  # looked through in doubling windows: a script with a new optimizer per task has very many phases
    while True:
        _, first = np.unique(optimizer[:size], return_index=True)
        repeats = np.ones(min(size, len(optimizer)), bool)
        repeats[first] = False
        if repeats.any():
            return int(repeats.argmax())
        if size >= len(optimizer):
            return len(optimizer)
        size *= 2


def step_of(moment_ns: Ints, bounds_ns: Ints) -> NDArray[np.int32]:
    """Return the step of each moment: -1 before step 0, the number of steps after the last.

    >>> step_of(np.array([3, 4, 22, 42]), np.array([4, 22, 42])).tolist()
    [-1, 0, 1, 2]
    """
    if not len(bounds_ns):
        return np.full(len(moment_ns), -1, np.int32)
    return (np.searchsorted(bounds_ns, moment_ns, side="right") - 1).astype(np.int32)
