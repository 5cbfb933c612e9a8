"""One configuration for each job, within the devices there are: the multiple-choice knapsack, solved exactly.

    values[j, c]    what job j is worth in configuration c; -inf = not possible
    usage[c, w]     devices of type w that configuration c takes
    capacity[w]     devices of each type

Dynamic programming over jobs and free devices. With P = prod(capacity + 1)
states it takes O(jobs x configurations x P) time: 30 jobs with 18 sizes on 64
devices take about a millisecond.

>>> elastic([[0, 3, 5], [0, 4, 6]], [0, 1, 2], 3).tolist()
[2, 1]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError

MOST_STATES = 1_000_000
"""States of the free devices; more types and devices than that are refused."""


def elastic(values: ArrayLike, usage: ArrayLike, capacity: ArrayLike) -> NDArray[np.int64]:
    """Return the configuration [J] of each job with the largest sum of values; ties take the first configuration.

    `usage` is [C] for one device type, [C, W] for several. Raises `InputError` on NaN,
    usage below 0, shapes that do not match, and where no choice fits.
    """
    worth, room = np.asarray(values, np.float64), np.atleast_1d(np.asarray(capacity, np.int64))
    takes = np.asarray(usage, np.int64)
    takes = takes[:, None] if takes.ndim == 1 else takes
    if worth.ndim != 2 or takes.shape != (worth.shape[1], room.size):
        raise InputError(
            f"values have shape {list(worth.shape)}, usage {list(takes.shape)}, capacity {list(room.shape)}; "
            "pass values [jobs, configurations], usage [configurations, types], capacity [types]."
        )
    if np.isnan(worth).any() or np.isposinf(worth).any() or (takes < 0).any() or (room < 0).any():
        raise InputError("values must be numbers or -inf, usage and capacity >= 0. Use -inf for what is not possible.")
    size = room + 1
    num_states = int(np.prod(size.astype(np.float64)))
    if num_states > MOST_STATES:
        raise InputError(f"{num_states:,} states of free devices; at most {MOST_STATES:,}. Group hosts into one type.")
    # States in mixed radix; from[c, s] = the state that is left once configuration c is taken, or the last one: none.
    grid = np.stack(np.unravel_index(np.arange(num_states), tuple(size.tolist())), axis=-1)
    left = grid[None] - takes[:, None]
    stride = np.append(np.cumprod(size[:0:-1])[::-1], 1)
    source = np.where((left >= 0).all(axis=2), left @ stride, num_states)
    best, picks = np.append(np.zeros(num_states), -np.inf), np.zeros((len(worth), num_states), np.int64)
    for job, row in enumerate(worth):
        ways = best[source] + row[:, None]
        picks[job] = ways.argmax(axis=0)
        best[:-1] = np.take_along_axis(ways, picks[job][None], 0)[0]
    if np.isneginf(best[num_states - 1]):
        raise InputError("no choice of configurations fits the capacity; give every job one that takes nothing.")
    state, chosen = num_states - 1, np.zeros(len(worth), np.int64)
    for job in reversed(range(len(worth))):
        chosen[job] = picks[job, state]
        state = int(source[chosen[job], state])
    return chosen
