"""What a literal table names is loaded on first use: "module:attribute", and public names of a package (PEP 562).

>>> load, names = lazily("headway.core", {"GIB": "headway.core.units:GIB"})
>>> load("GIB"), names()
(1073741824, ['GIB'])
>>> resolved("headway.core.units:GIB")
1073741824
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


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
