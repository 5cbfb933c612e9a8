"""Literal tables: a name looked up, where a miss names the nearest valid entry; and what a table names, loaded late.

Strategies stand in plain dicts (`SCHEDULES`, `POLICIES`, ...). There are no
registries: adding one is adding a line.

>>> pick({"gpipe": 1, "1f1b": 2}, "1F1b", "schedule")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: unknown schedule '1F1b'. Did you mean '1f1b'? Choose one of: 1f1b, gpipe.

An entry "module:attribute" is loaded on first use, and so are the public names of a package (PEP 562).

>>> load, names = lazily("headway.core", {"GIB": "headway.core.units:GIB"})
>>> load("GIB"), names()
(1073741824, ['GIB'])
>>> resolved("headway.core.units:GIB")
1073741824
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

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
    import difflib  # every process of a job imports this module, and few meet a miss

    valid = sorted(names)
    by_lower = {n.lower(): n for n in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"Did you mean {by_lower[close[0]]!r}? " if close else ""
    return f"{hint}Choose one of: {', '.join(valid)}."


def resolved(target: str) -> Any:
    """Import and return what "module:attribute" names, or "module" itself."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def lazily(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package` for `public`: name -> "module:attribute", or "module" itself."""

    def load(name: str) -> object:
        """Resolve a public name and keep it."""
        target = public.get(name)
        if target is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has: {', '.join(sorted(public))}")
        value: object = resolved(target)
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        """List the public names, loaded or not, and none of the package's own."""
        return sorted(public)

    return load, names
