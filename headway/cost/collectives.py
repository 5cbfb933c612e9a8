"""How long collectives take: alpha-beta closed forms, and fits of alpha and beta to measurements.

A message of n bytes takes alpha + n / rate on a link. Every algorithm here
is then `rounds(p) * alpha + volume(p) * n / rate` for p ranks, where n is the
full buffer: what one rank holds before an all-reduce, reduce-scatter or
all-to-all, and after an all-gather. (Thakur et al., "Optimization of
collective communication operations in MPICH", 2005; the pipelined double
tree is Sanders et al., 2009.) Links are used in both directions; nothing
else shares them.

>>> link = LinkSpec("example", bytes_per_s=1e9, latency_s=1e-5, source="doctest")
>>> round(collective_seconds("all_reduce", 1e6, num_ranks=4, link=link), 9)
0.00156
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.specs import LinkSpec


@dataclass(frozen=True, slots=True)
class Form:
    """One algorithm as a linear form in alpha and n / rate."""

    rounds: Callable[[int], float]
    """Number of ranks -> messages one after the other."""

    volume: Callable[[int], float]
    """Number of ranks -> buffers' worth of bytes that pass one link, one after the other."""


def _depth(p: int) -> int:
    """Return the height of a binary tree over p ranks."""
    return (p - 1).bit_length()


COLLECTIVES: dict[str, dict[str, Form]] = {
    "all_reduce": {
        "ring": Form(lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
        "halving": Form(lambda p: 2 * _depth(p), lambda p: 2 * (p - 1) / p),
        "tree": Form(lambda p: 2 * _depth(p), lambda p: 2.0 * (p > 1)),
        "direct": Form(lambda p: float(_depth(p)), lambda p: float(_depth(p))),
    },
    "reduce_scatter": {
        "ring": Form(lambda p: p - 1, lambda p: (p - 1) / p),
        "halving": Form(lambda p: float(_depth(p)), lambda p: (p - 1) / p),
    },
    "all_gather": {
        "ring": Form(lambda p: p - 1, lambda p: (p - 1) / p),
        "doubling": Form(lambda p: float(_depth(p)), lambda p: (p - 1) / p),
    },
    "all_to_all": {"pairwise": Form(lambda p: p - 1, lambda p: (p - 1) / p)},
    "broadcast": {
        "tree": Form(lambda p: float(_depth(p)), lambda p: float(_depth(p))),
        "pipeline": Form(lambda p: p - 1, lambda p: 1.0 * (p > 1)),
    },
    "send": {"direct": Form(lambda p: 1.0, lambda p: 1.0)},
}
"""Collective -> algorithm -> form; the first algorithm of each is its default.

`halving`, `doubling` and `direct` (recursive doubling of whole buffers) are
exact for powers of two. `tree` and `pipeline` split the buffer so finely that
all links stay busy, and count one message per hop.
"""


def collective_form(kind: str, algorithm: str | None = None) -> Form:
    """Return the form of a collective; raises `UnknownNameError` with the nearest names."""
    table = pick(COLLECTIVES, kind, "collective")
    return pick(table, algorithm or next(iter(table)), f"algorithm of {kind}")


def collective_seconds(
    kind: str, num_bytes: float, *, num_ranks: int, link: LinkSpec, algorithm: str | None = None
) -> float:
    """Return the time of one collective over equal links; 0 for one rank.

    Raises `InputError` on negative sizes or fewer than one rank,
    `UnknownNameError` on names that the table does not list.
    """
    form = collective_form(kind, algorithm)
    _check(num_bytes, num_ranks)
    if num_ranks == 1:
        return 0.0
    return form.rounds(num_ranks) * link.latency_s + form.volume(num_ranks) * num_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Fit:
    """A link as measurements show it."""

    link: LinkSpec
    """Fitted latency and rate."""

    error_fraction: float
    """Mean of |fitted - measured| / measured over the measurements."""

    num_measurements: int
    """How many there were."""


def fit(
    measured: Sequence[tuple[float, float]],
    *,
    kind: str = "send",
    num_ranks: int = 2,
    algorithm: str | None = None,
    name: str = "fitted",
) -> Fit:
    """Fit latency and rate, neither negative, to (bytes, seconds) of one collective by least squares.

    The squares are of relative errors: a microsecond matters to a small message and not to a
    large one. Raises `InputError` with fewer than two different sizes, with
    values that are not positive and finite, or when time does not grow with size.
    """
    form = collective_form(kind, algorithm)
    _check(1, num_ranks)
    if num_ranks < 2:
        raise InputError("one rank sends nothing; measure with num_ranks of at least 2.")
    for num_bytes, seconds in measured:
        if not (0 < num_bytes < math.inf and 0 < seconds < math.inf):
            raise InputError(f"the measurement ({num_bytes} B, {seconds} s) is not positive and finite; leave it out.")
    if len({num_bytes for num_bytes, _ in measured}) < 2:
        raise InputError("latency and rate cannot be told apart from one size; measure at least two sizes.")
    # seconds = alpha * rounds + (1 / rate) * volume * bytes; divided by the seconds measured.
    rows = [(form.rounds(num_ranks) / t, form.volume(num_ranks) * n / t) for n, t in measured]
    alpha, inverse = _nonnegative_least_squares(rows)
    if inverse <= 0:
        raise InputError("the times do not grow with the size; measure larger messages.")
    error = sum(abs(alpha * a + inverse * b - 1) for a, b in rows) / len(rows)
    link = LinkSpec(name, bytes_per_s=1 / inverse, latency_s=alpha, source=f"fit of {len(rows)} measurements of {kind}")
    return Fit(link, error, len(rows))


def _nonnegative_least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return x, y >= 0 that minimise the sum of (x a + y b - 1)^2."""
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    # Scaled so that the determinant does not cancel: latencies are 1e-6, inverse rates 1e-10.
    determinant = 1 - ab * ab / (aa * bb)
    x = (a / aa - ab * b / (aa * bb)) / determinant if determinant > 0 else -1.0
    y = (b / bb - ab * a / (aa * bb)) / determinant if determinant > 0 else -1.0
    if x >= 0 and y >= 0:
        return x, y
    # One of them is at its bound: the better of the two.
    return min(((0.0, b / bb), (a / aa, 0.0)), key=lambda at: sum((at[0] * r[0] + at[1] * r[1] - 1) ** 2 for r in rows))


def _check(num_bytes: float, num_ranks: int) -> None:
    """Refuse sizes and rank counts that mean nothing."""
    if not (math.isfinite(num_bytes) and num_bytes >= 0):
        raise InputError(f"num_bytes is {num_bytes}; pass a finite size >= 0.")
    if num_ranks < 1:
        raise InputError(f"num_ranks is {num_ranks}; give at least 1.")
