"""Where steps begin and end, from the optimizer updates alone.

A step ends when the first optimizer of its cycle repeats: step k reaches from
the end of the last update of cycle k - 1 to the end of the last update of
cycle k. Times in ns.

>>> bounds = step_bounds(np.array([0, 1, 0, 1]), np.array([10, 20, 30, 40]), np.array([2, 2, 2, 2]), first_ns=4)
>>> bounds.tolist()
[4, 22, 42]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cycles(optimizer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the last update of each complete cycle; `optimizer` [n] in order of time.

    When a phase ends, and its first optimizer never comes back, the updates
    beyond the longest cycle seen so far open a new phase.
    """
    n, start = len(optimizer), 0
    ends: list[NDArray[np.int64]] = []
    longest = 0
    while start < n:
        heads = start + np.flatnonzero(optimizer[start:] == optimizer[start])
        lengths = np.diff(heads)
        if len(lengths):
            ends.append(heads[1:] - 1)
            longest = max(longest, int(lengths.max()))
        tail = n - int(heads[-1])
        own = _until_repeat(optimizer[heads[-1] :])
        if not len(lengths) and not ends:
            longest = own  # the only cycle there is
        if tail <= longest or own == tail:
            if tail >= (int(lengths[-1]) if len(lengths) else tail):
                ends.append(np.array([n - 1]))
            break
        ends.append(np.array([heads[-1] + own - 1]))
        start = int(heads[-1]) + own
    return np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)


def _until_repeat(optimizer: NDArray[np.int64]) -> int:
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


def step_bounds(
    optimizer: NDArray[np.int64], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64], *, first_ns: int | None
) -> NDArray[np.int64]:
    """Return [steps + 1]: start of step 0, then the end of each complete step; empty without any.

    `first_ns` is the first event of training (an iterator made, a first wait);
    None, or a later one, makes step 0 begin with its first update.
    """
    last = cycles(optimizer)
    if not len(last):
        return np.empty(0, np.int64)
    ends = np.maximum.accumulate(start_ns[last] + duration_ns[last])
    begin = int(start_ns[0]) if first_ns is None else min(int(first_ns), int(start_ns[0]))
    return np.concatenate([[begin], ends]).astype(np.int64)


def step_of(moment_ns: NDArray[np.int64], bounds_ns: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the step of each moment: -1 before step 0, the number of steps after the last.

    >>> step_of(np.array([3, 4, 22, 42]), np.array([4, 22, 42])).tolist()
    [-1, 0, 1, 2]
    """
    if not len(bounds_ns):
        return np.full(len(moment_ns), -1, np.int32)
    return (np.searchsorted(bounds_ns, moment_ns, side="right") - 1).astype(np.int32)
