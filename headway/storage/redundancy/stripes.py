"""Which bytes of which ranks protect each other: stripes over the images of a checkpoint.

All images count as long as the longest. Each is cut into k segments, and
stripe t takes one segment of each of k ranks, and m segments of parity that
lie with m further ranks: ranks stand in a circle, stripe t begins at place t,
its parities take places t .. t + m - 1, its data the k places after these.
So there are as many stripes as ranks, every rank holds k data and m parity
segments, and k does not depend on the number of ranks. With k + m ranks or
more a stripe meets no rank twice, and any m rank directories may be lost.

Neighbours in the circle lie in different failure domains as far as there are
any: see `circle`.

>>> stripes = Stripes(k=4, m=2, circle=(0, 1, 2, 3, 4, 5), segment_bytes=4096)
>>> stripes.parity(0), stripes.data(0)
([(0, 0), (1, 1)], [(2, 0), (3, 1), (4, 2), (5, 3)])
>>> stripes.tolerated({rank: rank for rank in range(6)})
2
>>> circle({0: "a", 1: "a", 2: "b", 3: "b"})
(0, 2, 1, 3)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from headway.core.errors import InputError

MAX_MEMBERS = 16
"""Widest stripe that `+m` makes: a wider one saves little space, and each repair reads k times what was lost."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """How the images of one checkpoint are cut and who holds which parity."""

    k: int
    """Data segments of a stripe, and of an image."""

    m: int
    """Parity segments of a stripe, and of a rank."""

    circle: tuple[int, ...]
    """[world_size] Ranks in the order in which stripes take them."""

    segment_bytes: int
    """Length of a segment: k of them hold the longest image."""

    def data(self, stripe: int) -> list[tuple[int, int]]:
        """Return the [k] data of a stripe: (rank, which segment of its image)."""
        return [(self._at(stripe + self.m + segment), segment) for segment in range(self.k)]

    def parity(self, stripe: int) -> list[tuple[int, int]]:
        """Return the [m] parities of a stripe: (rank, which segment of its parity)."""
        return [(self._at(stripe + slot), slot) for slot in range(self.m)]

    def stripe_of_data(self, rank: int, segment: int) -> int:
        """Return the stripe that a segment of a rank's image belongs to."""
        return (self.circle.index(rank) - self.m - segment) % len(self.circle)

    def stripe_of_parity(self, rank: int, slot: int) -> int:
        """Return the stripe that a segment of a rank's parity belongs to."""
        return (self.circle.index(rank) - slot) % len(self.circle)

    def guardians(self, rank: int, count: int) -> list[int]:
        """Return the `count` ranks after this one in the circle, who keep copies for it; a lone rank keeps its own."""
        place, others = self.circle.index(rank), len(self.circle) - 1
        return [self._at(place + step) for step in range(1, min(count, others) + 1)] or [rank]

    def tolerated(self, domains: Mapping[int, Hashable]) -> int:
        """Return how many domains (rank -> domain) may be lost, whichever they are, with nothing lost for good."""
        return min(self._tolerated(stripe, domains) for stripe in range(len(self.circle)))

    def _tolerated(self, stripe: int, domains: Mapping[int, Hashable]) -> int:
        """Return the same for one stripe: its fullest domains must not hold more than m members between them."""
        held = Counter(domains[rank] for rank, _ in (*self.data(stripe), *self.parity(stripe)))
        left, lost = self.m, 0
        for _, count in held.most_common():
            left -= count
            if left < 0:
                break
            lost += 1
        return lost

    def _at(self, place: int) -> int:
        return self.circle[place % len(self.circle)]


def scheme_of(redundancy: str, world_size: int) -> tuple[int, int] | None:
    """Return (k, m) of `none` (None), `xor` (as `+1`), `+m` (k from the world size) or `k+m`.

    Raises `InputError` on any other text.

    >>> scheme_of("+2", 6), scheme_of("xor", 64), scheme_of("8+2", 2), scheme_of("none", 4)
    ((4, 2), (15, 1), (8, 2), None)
    """
    if redundancy == "none":
        return None
    match = re.fullmatch(r"(\d*)\+(\d+)", "+1" if redundancy == "xor" else redundancy)
    m = int(match[2]) if match else 0
    if match is None or m < 1 or match[1] == "0" or int(match[1] or 1) + m > 256:
        raise InputError(
            f"the redundancy {redundancy!r} is none. Write none, xor, +m (such as +2: any two ranks may be lost) or "
            "k+m (such as 8+2), at most 256 in all."
        )
    return (int(match[1]) if match[1] else max(1, min(world_size, MAX_MEMBERS) - m)), m


def circle(domains: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks so that those of one domain stand as far apart as they can.

    `domains` gives each rank's host, or `rack/host`: hosts of one rack stand apart, and ranks of one host.
    """
    return tuple(
        rank for _, rank in _spread([(tuple(path.split("/")), rank) for rank, path in sorted(domains.items())])
    )


def _spread(ranks: list[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int]]:
    """Order (path, rank) so that equal first names are evenly spaced, then the same inside each name."""
    groups: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for path, rank in ranks:
        groups.setdefault(path[0] if path else "", []).append((path[1:], rank))
    if len(ranks) <= 1 or not any(path for path, _ in ranks):
        return ranks
    # Entry i of n stands at (i + 1/2) / n of the way round: each name is spaced evenly by itself.
    placed = [
        ((index + 0.5) / len(inner), order, entry)
        for order, inner in enumerate(_spread(group) for group in groups.values())
        for index, entry in enumerate(inner)
    ]
    return [entry for _, _, entry in sorted(placed, key=lambda place: place[:2])]
