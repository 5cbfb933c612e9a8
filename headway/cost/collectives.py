"""How long collectives take: alpha-beta closed forms.

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
from collections.abc import Callable
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


def _check(num_bytes: float, num_ranks: int) -> None:
    """Refuse sizes and rank counts that mean nothing."""
    if not (math.isfinite(num_bytes) and num_bytes >= 0):
        raise InputError(f"num_bytes is {num_bytes}; pass a finite size >= 0.")
    if num_ranks < 1:
        raise InputError(f"num_ranks is {num_ranks}; give at least 1.")
