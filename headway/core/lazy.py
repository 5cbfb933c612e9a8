"""Public names of a package that are loaded on first use (PEP 562), from one literal table.

>>> load, names = lazily("headway.core", {"GIB": "headway.core.units:GIB"})
>>> load("GIB"), names()
(1073741824, ['GIB'])
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package` for `public`: name -> "module:attribute", or "module" itself."""

    def load(name: str) -> object:
        """Resolve a public name and keep it."""
        target = public.get(name)
        if target is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has: {', '.join(sorted(public))}")
        module, _, attribute = target.partition(":")
        value: object = importlib.import_module(module)
        value = getattr(value, attribute) if attribute else value
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        """List the public names, loaded or not, and none of the package's own."""
        return sorted(public)

    return load, names
