"""What an object can get at: its attributes, what they hold, and what its functions name outside of themselves.

A dataset draws from a generator, or goes by an epoch, that may be its own
attribute, sit in a transform, in a closure, in a global variable of its
module, or in a class. Whatever looks for such things walks here, nearest
first, so that a bound on the number of objects leaves out what is far away.

    dataset -> attributes, items of short containers -> ...
       |
       +-- its class's functions -> closures, defaults, the globals that their code names -> ...

>>> from types import SimpleNamespace
>>> transform = SimpleNamespace(scale=2.5)
>>> [value for value, _ in reached(SimpleNamespace(rows=[7], transform=transform)) if isinstance(value, (int, float))]
[7, 2.5]
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

DEPTH = 6
"""Objects inside each other that are followed."""

MOST_OBJECTS = 512
"""Objects that are looked into; plain numbers and texts do not count."""

LONG = 128
"""A container with more entries holds data, and is not looked into."""

LEAVES = (str, bytes, bytearray, bool, int, float, complex, type(None))
_LIBRARIES = frozenset({*sys.stdlib_module_names, "headway", "numpy", "torch", "PIL", "pandas", "scipy", "pytest"})
"""Top-level modules whose code is not looked into: what it draws from, a script handed it or is global."""


def reached(*holders: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each object that `holders` get at, nearest first, and whether only code leads there (a global, a cell)."""
    seen: set[int] = set()
    queue = deque((holder, 0, False) for holder in holders)
    while queue and len(seen) < MOST_OBJECTS:
        value, depth, outside = queue.popleft()
        if id(value) in seen:
            continue
        if not isinstance(value, LEAVES):
            seen.add(id(value))
        yield value, outside
        if depth < DEPTH:
            queue += [(part, depth + 1, outside) for part in _held(value)]
            queue += [(part, depth + 1, True) for part in _named(value)]


def _held(value: Any) -> list[Any]:
    """Return the attributes or entries of an object."""
    if isinstance(value, (*LEAVES, type, FunctionType, CodeType, ModuleType)):
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) <= LONG else []
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= LONG else []
    return list(getattr(value, "__dict__", {}).values())


def _named(value: Any) -> list[Any]:
    """Return what the code of a function, a class, or an object's class names outside of itself."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, (*LEAVES, CodeType, ModuleType, MethodType, list, tuple, dict)):
        return []
    kind = value if isinstance(value, type) else type(value)
    parts: list[Any] = []
    for base in kind.__mro__:
        if not _of_library(base.__module__):
            parts += [getattr(part, "__func__", getattr(part, "fget", part)) for part in vars(base).values()]
    return [part for part in parts if part is not None]


def _of_function(function: FunctionType) -> list[Any]:
    """Return cells, defaults, and the globals that the code names: `name`, and `module.name`."""
    if _of_library(function.__module__):
        return []
    parts = closure_of(function)
    parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = set(_names(function.__code__))
    scope = function.__globals__
    for name in names & scope.keys():
        found = scope[name]
        if isinstance(found, ModuleType):
            parts += [
                vars(found)[inner] for inner in names & vars(found).keys() if _is_worth(found, vars(found)[inner])
            ]
        else:
            parts.append(found)
    return parts


def _is_worth(module: ModuleType, value: Any) -> bool:
    """Tell whether what a module holds is to be followed: anything of a script's, of a library's only instances."""
    if isinstance(value, ModuleType):
        return False
    return not _of_library(module.__name__) or not isinstance(value, (type, FunctionType, *LEAVES))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions inside of it look up."""
    yield from code.co_names
    for inner in islice(code.co_consts, LONG):
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def closure_of(function: FunctionType) -> list[Any]:
    """Return the values of the variables that a function has from around it; one without a value yet is left out.

    >>> closure_of((lambda size: lambda: size)(3)), closure_of(closure_of)
    ([3], [])
    """
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return False
    return True
