"""One warm fork server for the whole test session: `on_ranks(function, n, *args)` runs a function on n ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tests.made.pool import RankPool

MAX_RANKS = 4


@lru_cache(maxsize=1)
def pool() -> RankPool:
    """Return the session's pool; its fork server starts at the first call."""
    return RankPool()


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run a module-level function on up to four gloo ranks, 60 s at most; returns the results by rank."""
    assert world_size <= MAX_RANKS, "tests use at most four ranks"
    return pool().run(function, world_size, *args, **options)
