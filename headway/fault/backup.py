"""Which rank keeps a copy of another one's state, so that no eviction of a parallel group takes both.

A whole tensor, pipeline or data parallel group may be evicted to be sure of
one faulty member (ByteRobust, section 5.3). So a rank and the holder of its
copy share no such group, and are not on one host. A shift along two axes does
it, and gives every rank one copy to hold; the shift is searched so that not
even the two hosts share a group, where that is possible. Where no shift does,
a matching is searched.

>>> backup_peers(Mesh({"tp": 2, "pp": 2, "dp": 2}), ranks_per_host=2)
[6, 7, 4, 5, 2, 3, 0, 1]

How many hosts wait in reserve, and which of many hosts is faulty when nothing but a replay shows it.

`standby_size` is the number of hosts that fail on one day, at a quantile: of
`hosts` that fail independently with probability `p_daily` the binomial's
(ByteRobust, section 5.2, P99). `dual_phase` finds a faulty host with two
replays on groups of hosts (section 4.3): the groups of the first are blocks,
those of the second take every n-th host.

    hosts 0..5, groups of 2       first: [0 1] [2 3] [4 5]      second, n = 3: [0 3] [1 4] [2 5]
    a fault in block 1 and in class 0: host 3

>>> [standby_size(hosts, 1.2e-3) for hosts in (128, 256, 512, 1024)]
[2, 2, 3, 4]
>>> dual_phase(6, 2).suspects(1, 0)
[3]

What to prepare for failures: how often to save, how many hosts in reserve, where copies go.

The interval and the ETTR are those of `headway.ledger.answers.metrics`: exponential
failures with mean `mtbf_s`, which may strike in saves and restarts too.

>>> found = prepare(mtbf_s=11_124.0, restart_s=600.0, save_s=10.0)
>>> round(found.interval_s), round(found.ettr, 3), round(found.ettr_first_order, 3)
(465, 0.908, 0.906)
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.core.rng import binomial
from headway.ledger.answers.metrics import ettr, ettr_first_order, optimal_interval_s

Ranks = NDArray[np.int64]

MOST_RANKS, MOST_MATCHED = 1 << 19, 1 << 12
"""Ranks that are placed in seconds: by a shift, and by a matching."""


def backup_peers(mesh: Mesh, ranks_per_host: int) -> list[int]:
    """Return for each rank the one that holds its copy: a permutation of the ranks.

    Along a single axis (data parallel alone) all ranks share its group: there the peer is the same rank of the next
    host. Raises `InputError` where hosts and mesh do not fit, and where there is no such peer.
    """
    world = mesh.world_size
    if world > MOST_RANKS:
        raise InputError(f"{world:.3g} ranks are more than the {MOST_RANKS:,} that are placed. Give a smaller mesh.")
    if ranks_per_host < 1 or world % ranks_per_host:
        raise InputError(
            f"{mesh.product()} = {world} ranks do not fill hosts of {ranks_per_host}. Change a degree of the mesh, or "
            "--ranks-per-host."
        )
    hosts = np.arange(world) // ranks_per_host
    if world == ranks_per_host:
        raise InputError(f"all {world} ranks are on one host: no copy would survive it. Use the checkpoint's folder.")
    sizes = [size for _, size in mesh.axes if size > 1]
    if len(sizes) < 2:
        return ((np.arange(world) + ranks_per_host) % world).tolist()
    places = _coordinates(sizes)
    allowed = None
    for strict in (True, False):
        for shift in _shifts(sizes):
            peers = _ranks((places + np.array(shift)) % np.array(sizes), sizes)
            if (hosts[peers] == hosts).any():
                continue
            if not strict or not _hosts_meet(places, peers, ranks_per_host):
                return [int(peer) for peer in peers]
    if world > MOST_MATCHED:
        raise InputError(
            f"no shift of {mesh.product()} leads to another host and group, and {world} ranks are more than the "
            f"{MOST_MATCHED:,} that are matched one by one. Give a third axis, or --ranks-per-host 1."
        )
    allowed = (hosts[:, None] != hosts[None, :]) & (_differing(places, places) >= 2)
    return _matched(allowed)


def _coordinates(sizes: list[int]) -> Ranks:
    """Return [world, axes]: the place of each rank, the fastest axis first.

    sizes 2, 3:   rank 0 -> 0 0 | 1 -> 1 0 | 2 -> 0 1 | 3 -> 1 1 | 4 -> 0 2 | 5 -> 1 2
    """
    rank, columns = np.arange(int(np.prod(sizes))), []
    for size in sizes:
        columns.append(rank % size)
        rank = rank // size
    return np.stack(columns, axis=1)


def _ranks(places: Ranks, sizes: list[int]) -> Ranks:
    """Return the ranks at these places: the inverse of `_coordinates`."""
    strides = np.cumprod([1, *sizes[:-1]])
    ranks: Ranks = places @ strides
    return ranks


def _shifts(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return the shifts along two axes or more, the slowest axes first: those lead to other hosts soonest."""
    every = itertools.product(*(range(size) for size in reversed(sizes)))
    shifts = [tuple(reversed(one)) for one in every if sum(step > 0 for step in one) >= 2]
    return sorted(shifts, key=lambda shift: (sum(step > 0 for step in shift), [-(step > 0) for step in shift[::-1]]))


def _differing(one: Ranks, other: Ranks) -> Ranks:
    """Return [n, m]: along how many axes two places differ; ranks that differ along one only share a group."""
    found: Ranks = (one[:, None, :] != other[None, :, :]).sum(axis=2)
    return found


def _hosts_meet(places: Ranks, peers: Ranks, ranks_per_host: int) -> bool:
    """Say whether, for some rank, a rank on its peer's host shares a group with it."""
    mates = (peers // ranks_per_host)[:, None] * ranks_per_host + np.arange(ranks_per_host)
    return bool(((places[mates] != places[:, None, :]).sum(axis=2) < 2).any())


def _matched(allowed: NDArray[np.bool_]) -> list[int]:
    """Return a perfect matching of the ranks with allowed peers, by augmenting paths. Raises `InputError`."""
    holder_of: dict[int, int] = {}  # peer -> rank that it holds the copy of
    options = [np.flatnonzero(row).tolist() for row in allowed]
    for start in range(len(options)):
        # Breadth first: ranks on the frontier look for a peer that is free, or whose rank may move on to another one.
        came: dict[int, int] = {}
        frontier, free = [start], -1
        while frontier and free < 0:
            rank = frontier.pop(0)
            for peer in options[rank]:
                if peer not in came:
                    came[peer] = rank
                    if peer not in holder_of:
                        free = peer
                        break
                    frontier.append(holder_of[peer])
        if free < 0:
            raise InputError(
                "no assignment of peers keeps every copy off its own host and groups. Use more hosts, or other degrees."
            )
        while True:  # hand the peers along the path on, from its end
            rank = came[free]
            before = next((peer for peer, held in holder_of.items() if held == rank), -1)
            holder_of[free] = rank
            if before < 0 or rank == start:
                break
            del holder_of[before]
            free = before
    peers = {rank: peer for peer, rank in holder_of.items()}
    return [peers[rank] for rank in range(len(options))]


# How many hosts wait in reserve, and which of many hosts is faulty when nothing but a replay shows it.

MOST_HOSTS = 1_000_000
"""Hosts of a job, at most."""


def standby_size(hosts: int, p_daily: float, quantile: float = 0.99) -> int:
    """Return the least k with P(X <= k) >= quantile, X ~ Binomial(hosts, p_daily).

    Raises `InputError` for probabilities outside (0, 1) and for less than one host.
    """
    for name, value in {"p_daily": p_daily, "quantile": quantile}.items():
        if not 0 < value < 1:
            raise InputError(f"{name} is {value}; it is a probability between 0 and 1. Pass 0.0012 for 1 in 833.")
    if not 1 <= hosts <= MOST_HOSTS:
        raise InputError(f"hosts is {hosts}; it must be 1 to {MOST_HOSTS:,}. Pass the number of hosts of the job.")
    total = 0.0
    for count, probability in enumerate(binomial(hosts, p_daily)):
        total += probability
        if total >= quantile:
            return count
    return hosts


@dataclass(frozen=True, slots=True)
class DualPhase:
    """Two divisions of hosts 0..hosts-1 into groups."""

    hosts: int
    """Number of hosts, z."""

    group_size: int
    """Hosts of a group of the first phase, m."""

    @property
    def num_groups(self) -> int:
        """Number of groups of the first phase, and stride of those of the second: n = z / m."""
        return self.hosts // self.group_size

    def first(self, a: int) -> list[int]:
        """Return the hosts of group `a` of the first phase: x // m = a."""
        self._check(a)
        return list(range(a * self.group_size, (a + 1) * self.group_size))

    def second(self, b: int) -> list[int]:
        """Return the hosts of group `b` of the second phase: x mod n = b."""
        self._check(b)
        return list(range(b, self.hosts, self.num_groups))

    def suspects(self, a: int, b: int) -> list[int]:
        """Return the hosts that both failing groups hold: one where m <= n, else up to ceil(m / n)."""
        return sorted({*self.first(a)} & {*self.second(b)})

    def _check(self, group: int) -> None:
        if not 0 <= group < self.num_groups:
            raise InputError(f"there is no group {group}; each phase has {self.num_groups}, counted from 0.")


def dual_phase(hosts: int, group_size: int) -> DualPhase:
    """Return the two divisions. Raises `InputError` unless `group_size` divides `hosts`.

    A group holds whole pipelines: its size is a multiple of the hosts of one.
    """
    if hosts < 1 or group_size < 1 or hosts % group_size:
        near = [size for size in range(1, max(hosts, 1) + 1) if hosts > 0 and hosts % size == 0]
        fits = ", ".join(map(str, sorted(near, key=lambda size: (abs(size - group_size), size))[:3])) or "none"
        raise InputError(
            f"groups of {group_size} do not divide {hosts} hosts. Add hosts that are known to be good, or choose one "
            f"of the nearest sizes: {fits}."
        )
    return DualPhase(hosts, group_size)


LONGEST_S = 1e10
"""Some 300 years: times of a job are shorter."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The answer of `headway fault plan`."""

    interval_s: float
    """Work between saves, s: as asked for, or what maximises `ettr`."""

    ettr: float
    """Expected: 1 / (wall seconds per useful second)."""

    ettr_first_order: float
    """By the first-order form."""

    standby_hosts: int | None = None
    """Hosts in reserve; None where no number of hosts was given."""

    backup_peer: list[int] | None = None
    """Rank -> the rank that holds its copy; None without a mesh."""

    def to_json(self) -> dict[str, object]:
        """Return the object of `--json`."""
        return asdict(self)


def prepare(
    *, mtbf_s: float, restart_s: float, save_s: float, interval_s: float | None = None, hosts: int | None = None,
    p_daily: float | None = None, mesh: Mesh | None = None, ranks_per_host: int | None = None,
) -> Preparation:  # fmt: skip
    """Return what to prepare. Raises `InputError` on values out of range, and where one of a pair is missing."""
    if (hosts is None) != (p_daily is None):
        raise InputError("hosts and p_daily belong together: the number of hosts, and the chance that one fails a day.")
    if (mesh is None) != (ranks_per_host is None):
        raise InputError("mesh and ranks_per_host belong together. Pass both, such as tp=8,pp=4,dp=16 and 8.")
    given = {"mtbf_s": mtbf_s, "restart_s": restart_s, "save_s": save_s, "interval_s": interval_s or 0.0}
    for name, value in given.items():
        if value > LONGEST_S:
            raise InputError(f"{name} is {value:.3g}; it must be at most {LONGEST_S:.0g} seconds. Pass seconds.")
    if interval_s is None:
        interval_s = optimal_interval_s(mtbf_s, save_s=save_s)
    values = {"restart_s": restart_s, "interval_s": interval_s, "save_s": save_s}
    return Preparation(
        interval_s,
        ettr(mtbf_s, **values),
        ettr_first_order(mtbf_s, **values),
        standby_size(hosts, p_daily) if hosts is not None and p_daily is not None else None,
        backup_peers(mesh, ranks_per_host) if mesh is not None and ranks_per_host is not None else None,
    )
