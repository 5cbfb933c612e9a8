"""Look a name up in a literal table; a miss names the nearest valid entry.

Strategies stand in plain dicts (`SCHEDULES`, `POLICIES`, ...). There are no
registries: adding one is adding a line.

>>> pick({"gpipe": 1, "1f1b": 2}, "1F1b", "schedule")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: unknown schedule '1F1b'. Did you mean '1f1b'? Choose one of: 1f1b, gpipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from headway.core.errors import UnknownNameError

T = TypeVar("T")


class Named(dict[str, T]):
    """A table whose users index it: a miss answers as `pick` does.

    >>> Named("schedule", {"gpipe": 1})["GPIPE"]
    Traceback (most recent call last):
    headway.core.errors.UnknownNameError: unknown schedule 'GPIPE'. Did you mean 'gpipe'? Choose one of: gpipe.
    """

    def __init__(self, what: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self._what = what

    def __missing__(self, name: str) -> T:
        return pick(self, name, self._what)


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """Return `table[name]`, or raise `UnknownNameError` with the nearest valid names."""
    if name in table:
        return table[name]
    raise UnknownNameError(f"unknown {what} {name!r}. {suggestion(table, name)}")


def suggestion(names: Iterable[str], name: str) -> str:
    """Say which of `names` is nearest to `name`, and list them all."""
    valid = sorted(names)
    by_lower = {n.lower(): n for n in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"Did you mean {by_lower[close[0]]!r}? " if close else ""
    return f"{hint}Choose one of: {', '.join(valid)}."
