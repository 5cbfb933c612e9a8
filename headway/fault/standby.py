"""How many hosts wait in reserve, and which of many hosts is faulty when nothing but a replay shows it.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.binomial import binomial
from headway.core.errors import InputError

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
