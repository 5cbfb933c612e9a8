"""Gradients summed over equal ranks by a ring, a tree or parameter servers: what each lane of the network is busy with.

A hop occupies one lane, the busier of its two ends, for latency + bytes / rate; a RECV has only what it takes beyond
its SEND as its own time, never the wait for the sender. Equal ranks advance in step, so one lane of each kind tells
the whole. `benchmarks/_hops.py` expands the same algorithms to every hop. Times are int64 ns, sizes bytes.

>>> ring = Network("ring", 4, LinkSpec("wire", bytes_per_s=1e9, latency_s=1e-6, source="doctest"))
>>> int(ring.sync_ns(4000))  # 2 (p - 1) rounds; the closed form
12000
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.cost.specs import LinkSpec

Ints = NDArray[np.int64]

ALGORITHMS = dict.fromkeys(("ring", "tree", "parameter_server"))
"""Of an all-reduce, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class HopStage:
    """One lane of the symmetric view: what the busiest link of that kind does for one part of a bucket."""

    job_ns: Ints
    """[...] Time of one job, for each size asked for."""

    jobs: int
    """Jobs per part, one after the other."""


@dataclass(frozen=True, slots=True)
class Network:
    """How gradients are summed over equal ranks."""

    algorithm: str
    """One of `ALGORITHMS`."""

    num_ranks: int
    """Workers, p."""

    link: LinkSpec
    """What each hop crosses (pushes only, when `pull_link` is given)."""

    num_servers: int = 0
    """Parameter servers; 0 for rings and trees."""

    pull_link: LinkSpec | None = None
    """What pulls from parameter servers cross; None = `link`."""

    recv_ns: int = 0
    """Own time of each RECV after its SEND has ended: adding and copying what arrived."""

    def __post_init__(self) -> None:
        """Check the fields; raises `InputError`."""
        pick(ALGORITHMS, self.algorithm, "algorithm")
        if self.num_ranks < 1 or self.recv_ns < 0:
            raise InputError(
                f"num_ranks is {self.num_ranks}, recv_ns {self.recv_ns}; give at least 1 rank and a time >= 0."
            )
        if (self.num_servers > 0) != (self.algorithm == "parameter_server"):
            raise InputError(
                f"num_servers is {self.num_servers} with {self.algorithm!r}; give servers to 'parameter_server', and "
                "to nothing else."
            )

    def hop_ns(self, num_bytes: ArrayLike, *, pull: bool = False) -> Ints:
        """Return the time that a lane is occupied by one hop of `num_bytes` (any shape; ns, rounded)."""
        link = (self.pull_link or self.link) if pull else self.link
        seconds = link.latency_s + np.asarray(num_bytes, np.float64) / link.bytes_per_s
        return np.asarray(np.rint(seconds * NS_PER_S).astype(np.int64))

    def stages(self, part_bytes: ArrayLike) -> tuple[HopStage, ...]:
        """Return the lanes that one part of a bucket passes one after the other, seen by symmetry.

        Equal ranks advance in step, so one lane of each kind tells the whole.
        Exact for rings, for parameter servers and for trees of 2^d - 1 ranks;
        an upper bound for other trees. None for one rank without servers.
        """
        size = np.asarray(part_bytes, np.int64)
        if self.algorithm == "parameter_server":
            chunk = _ceil(size, self.num_servers)
            busy, jobs = (self.num_ranks, 1) if self.num_servers <= self.num_ranks else (1, self.num_servers)
            return tuple(HopStage(busy * self.hop_ns(chunk, pull=pull), jobs) for pull in (False, True))
        if self.num_ranks == 1:
            return ()
        if self.algorithm == "ring":
            rounds = 2 * (self.num_ranks - 1)
            hop = self.hop_ns(_ceil(size, self.num_ranks))
            return (HopStage(rounds * hop + (rounds - 1) * self.recv_ns, 1),)
        children = min(2, self.num_ranks - 1)
        depth = self.num_ranks.bit_length() - 1
        return (HopStage(children * self.hop_ns(size), 1),) * (2 * depth)

    def sync_ns(self, num_bytes: ArrayLike, parts: ArrayLike = 1) -> Ints:
        """Return t_sync: the time to sum `num_bytes` in `parts` equal parts over idle links (any shapes).

        Parts pass the stages as a pipeline: the sum of the stages, and all
        but one job on the slowest.
        """
        size, cuts = np.asarray(num_bytes, np.int64), np.asarray(parts, np.int64)
        stages = self.stages(_ceil(size, cuts))
        if not stages:
            return np.zeros(np.broadcast(size, cuts).shape, np.int64)
        first = np.sum([stage.job_ns + self.recv_ns for stage in stages], axis=0)
        slowest = np.max([stage.job_ns for stage in stages], axis=0)
        return np.asarray(first + (cuts * stages[0].jobs - 1) * slowest)


def _ceil(count: ArrayLike, parts: ArrayLike) -> Ints:
    """Return the size of each of `parts` equal parts, rounded up."""
    return np.asarray((np.asarray(count, np.int64) + np.asarray(parts, np.int64) - 1) // np.asarray(parts, np.int64))
