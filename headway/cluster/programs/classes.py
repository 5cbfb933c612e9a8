"""Jobs that share devices, class by class: what 2,048 jobs could do in two million pairs, in a few thousand columns.

Jobs of one class have equal rates, alone and with every other class. By
symmetry and convexity the best allocation of classes is as good as that of
jobs, so the program has a pair per two classes. Its totals are then handed
down to jobs so that each job gets an equal part and few partners:

    class a: 3 jobs, class b: 2 jobs, together Q = 1.2        0 .4 |.8 | 1.2    jobs of a
    lay both ends to end and cut at every border:             0   .6   | 1.2    jobs of b
    (a0, b0) .4   (a1, b0) .2   (a1, b1) .2   (a2, b1) .4

A pair that does no better than taking turns is left out: where
shared_a / alone_a + shared_b / alone_b <= 1, turns give both as much.
"""

from __future__ import annotations

import itertools

import numpy as np

from headway.cluster.programs.maxmin import Indices, JobGroups, Values

GAIN = 1e-9
"""Sharing has to be worth more than taking turns by this much."""


def class_pairs(rates: Values, shared: Values, scale: Values, count: Values) -> tuple[Indices, Values]:
    """Return the pairs of classes [P, 2] worth sharing and their rates [P, 2, W], 0 where taking turns is as good.

    `rates` [G, W] alone, `shared` [G, G, W] of the first class beside the second, `scale` and `count` [G].
    """
    both = np.stack((shared, shared.transpose(1, 0, 2)), axis=2)  # [G, G, 2, W]
    alone = np.maximum(rates, 1e-300)
    gain = both[:, :, 0] / alone[:, None] + both[:, :, 1] / alone[None]
    useful = (gain > 1 + GAIN) & (both > 0).all(axis=2)
    upper = np.triu(np.ones((len(rates), len(rates)), np.bool_)) & (scale[:, None] == scale)
    np.fill_diagonal(upper, count > 1)
    pairs = np.argwhere(upper & useful.any(axis=2))
    return pairs, np.where(useful[pairs[:, 0], pairs[:, 1]][:, None], both[pairs[:, 0], pairs[:, 1]], 0.0)


def hand_down(groups: JobGroups, group: Indices, q: Values) -> tuple[Indices, Values]:
    """Split totals of class pairs `q` [P, W] into pairs of jobs: rows [K, 2] of jobs and their times [K, W]."""
    members = [np.flatnonzero(group == g) for g in range(len(groups.count))]
    found: dict[tuple[int, int], Values] = {}
    for pair in np.flatnonzero(q.max(axis=1, initial=0.0) > 1e-9):
        a, b = (members[g] for g in groups.pairs[pair])
        if groups.pairs[pair, 0] == groups.pairs[pair, 1]:  # each job with its two neighbours in a ring
            parts = [(int(a[i]), int(a[(i + 1) % a.size]), 1.0 / a.size) for i in range(a.size)]
        else:
            borders = np.unique(
                np.concatenate((np.arange(a.size + 1) / a.size, np.arange(b.size + 1) / b.size)).round(12)
            )
            middle = (borders[1:] + borders[:-1]) / 2
            ends = zip(
                (middle * a.size).astype(np.int64), (middle * b.size).astype(np.int64), np.diff(borders), strict=True
            )
            parts = [(int(a[i]), int(b[k]), float(part)) for i, k, part in ends]
        for first, second, part in parts:
            key = (min(first, second), max(first, second))
            found[key] = found.get(key, 0.0) + part * q[pair]
    keys = list(itertools.chain(found))
    return np.array(keys, np.int64).reshape(-1, 2), np.array([found[key] for key in keys]).reshape(-1, q.shape[1])
