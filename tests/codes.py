"""All erasure codes of n members, and all ways to keep just enough of them."""

from collections.abc import Iterator
from itertools import combinations


def shapes(n: int) -> Iterator[tuple[int, int]]:
    """Yield every (k, m) with k + m = n."""
    return ((k, n - k) for k in range(1, n))


def survivors(k: int, m: int) -> Iterator[tuple[int, ...]]:
    """Yield the members that are left after each pattern of exactly m losses; fewer losses leave a superset."""
    return combinations(range(k + m), k)
