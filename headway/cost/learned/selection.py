"""Which samples to measure on a new device: at random, or one near the centre of each of k clusters of the sources.

>>> points = np.array([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]])
>>> sorted(clusters(points, 2, np.random.default_rng(0)).tolist())
[1, 4]
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

ROUNDS = 30
"""Most rounds of k-means; it ends earlier when no point moves."""


class SelectionFn(Protocol):
    """Chooses samples. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return [size] different indices into `points` [n, d]; `size` <= n."""
        ...


def random(points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose uniformly."""
    return rng.choice(len(points), size, replace=False)


def clusters(points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose the sample nearest to the centre of each cluster, largest cluster first (CDMPP, arXiv 2311.09690).

    Lloyd's k-means from randomly chosen points. A cluster whose nearest sample is taken gives its next nearest.
    """
    centres = points[rng.choice(len(points), size, replace=False)]
    owner = np.full(len(points), -1)
    for _ in range(ROUNDS):
        # |p - c|^2 = |p|^2 - 2 p.c + |c|^2, and |p|^2 does not matter for which centre is nearest.
        nearest = (np.square(centres).sum(1) - 2 * points @ centres.T).argmin(1)
        if (nearest == owner).all():
            break
        owner = nearest
        count = np.bincount(owner, minlength=size)
        sums = np.stack([np.bincount(owner, column, minlength=size) for column in points.T], axis=1)
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres)
    chosen: list[int] = []
    taken = np.zeros(len(points), bool)
    for cluster in np.argsort(-np.bincount(owner, minlength=size), kind="stable"):
        distance = np.square(points - centres[cluster]).sum(1)
        chosen.append(int(np.where(taken, np.inf, distance).argmin()))
        taken[chosen[-1]] = True
    return np.array(chosen, np.int64)


SELECTIONS: dict[str, SelectionFn] = {"random": random, "clusters": clusters}
"""Every way to choose what to measure. Adding one is adding a line here."""
