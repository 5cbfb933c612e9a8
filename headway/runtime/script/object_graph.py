"""What an object can get at: its attributes, what they hold, and what its functions name outside of themselves.

A dataset draws from a generator, or goes by an epoch, that may be its own
attribute, sit in a transform, in a closure, in a global variable of its
module, or in a class. Whatever looks for such things walks here, nearest
first, so that a bound on the number of objects leaves out what is far away.

    dataset -> attributes, slots, items of short containers -> ...
       |
       +-- its class's functions -> closures, defaults, attributes, the globals and modules that their code names -> ...

>>> from types import SimpleNamespace
>>> transform = SimpleNamespace(scale=2.5)
>>> [value for value, _ in reached(SimpleNamespace(rows=[7], transform=transform)) if isinstance(value, (int, float))]
[7, 2.5]
"""

from __future__ import annotations

import builtins
import logging
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import ItemsView, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from dis import get_instructions
from functools import cache, partial
from itertools import chain, islice
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

DEPTH = 12
"""Objects inside each other that are followed: with a subset and two nested transforms a setting is the tenth."""

MOST_OBJECTS = 2048
"""Objects that are looked into; plain numbers and texts do not count."""

MOST_INSTALLED = 512
"""The same, where there are any to which only the code of installed packages leads."""

LONG = 128
"""A container with more entries holds data, and is not looked into."""

LEAVES = (str, bytes, bytearray, bool, int, float, complex, type(None))
PLAIN = frozenset(LEAVES)
CODE = frozenset({FunctionType, MethodType, BuiltinMethodType, partial, type})
"""Types of entries that lead to code of their own."""

SCANNED = 4096
"""Entries of a long container of which the types are found, evenly spread."""

CONTAINERS: tuple[Any, ...] = (list, tuple, dict, deque, set, frozenset)

VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LIBRARIES = frozenset({*sys.stdlib_module_names, "headway", "numpy", "torch", "PIL", "pandas", "scipy", "pytest"})
"""Top-level modules whose code is not looked into: what it draws from, a script handed it or is global."""


OWN, BY_CODE, BY_PACKAGE, AGAIN = 0, 1, 2, -1
"""How an object is reached: by attributes and entries alone, by what code names (a global, a cell), or by what only the
code of an installed package names. And the number of references of one that was met before, or is not looked into."""


def reached(*holders: Any) -> Iterator[tuple[Any, int]]:
    """Yield each object that `holders` get at, nearest first, and how (`OWN`, `BY_CODE`, `BY_PACKAGE`)."""
    return ((value, how) for value, how, num_parts in walked(*holders) if num_parts != AGAIN)


def walked(*holders: Any, packages: bool = True, code: bool = True) -> Iterator[tuple[Any, int, int]]:
    """Yield each reference in what `holders` get at, nearest first: the object, how it is reached, and how many
    references it has itself (`AGAIN` where they were not followed). In this order the numbers tell the whole graph.

    What only the code of an installed package leads to comes last, and is left out without `packages`: a look before
    each batch has no time for the hundreds of objects of a large package, which scripts do not change. Without `code`
    no function and no class is followed.
    """
    seen: dict[int, Any] = {}  # the objects too: some are made for this walk, and no other may get their address
    queue = deque((holder, 0, OWN) for holder in holders)
    later: deque[tuple[Any, int, int]] = deque()
    while (queue and len(seen) < MOST_OBJECTS) or (later and len(seen) < MOST_INSTALLED):
        is_near = bool(queue) and len(seen) < MOST_OBJECTS
        value, depth, how = queue.popleft() if is_near else later.popleft()
        if isinstance(value, LEAVES):
            yield value, how, 0
            continue
        if id(value) in seen:
            yield value, how, AGAIN
            continue
        seen[id(value)] = value
        parts = parts_of(value) if how == OWN or depth < DEPTH else []
        named = _named(value) if code and depth < DEPTH else []
        near = [part for part, by_package in named if is_near and not by_package]
        yield value, how, len(parts) + len(near)
        (queue if is_near else later).extend((part, depth + 1, how) for part in parts)
        queue.extend((part, depth + 1, BY_CODE) for part in near)
        if packages and len(near) < len(named):
            later.extend((part, depth + 1, BY_PACKAGE) for part, by_package in named if by_package or not is_near)
    for value, _, how in islice(queue, MOST_OBJECTS):
        yield value, how, AGAIN


def parts_of(value: Any) -> list[Any]:
    """Return the attributes or entries of an object."""
    if isinstance(value, (type, FunctionType, CodeType, ModuleType)):
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):  # such as `get` of a dictionary
        owner = value.__self__  # that of a function in C++ is a record of its types
        is_none = isinstance(owner, (ModuleType, type)) or type(owner).__name__.startswith(("PyCapsule", "pybind11_"))
        return [] if is_none else [owner]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, ReferenceType):
        return [value()]
    if isinstance(value, ContextVar):
        return [value.get(None)]
    if isinstance(value, (attrgetter, itemgetter, methodcaller)):
        return [value.__reduce__()]
    if isinstance(value, BaseException):
        return [value.args, *attributes(value).values()]
    if isinstance(value, VIEWS):
        return [value.mapping]
    entries: list[Any] = []
    if isinstance(value, CONTAINERS):
        entries = _entries(value)
        entries += [value.default_factory] if isinstance(value, defaultdict) else []
    elif isinstance(value, MappingProxyType):
        entries = [value | {}]  # of whatever size: a dictionary of its own now
    return entries + list(attributes(value).values())


def _entries(value: Any) -> list[Any]:
    """Return the entries of a container, keys of a dictionary too; of a long one what only code follows from.

    That is the functions in it, and one entry of each type: whose class is what others of the type go by. No method of
    a class of the script's is called.
    """
    base = next(base for base in CONTAINERS if isinstance(value, base))
    if base is dict:
        pairs = [*islice(dict.items(value), SCANNED)]
        some = [entry for _, entry in pairs] + [key for key, _ in pairs if type(key) not in PLAIN]
    elif base in (list, tuple) and len(value) > SCANNED:
        some = [*base.__getitem__(value, slice(None, None, -(-len(value) // SCANNED)))]
    else:
        some = [*islice(base.__iter__(value), SCANNED)]
    if len(value) <= LONG:
        return some
    kinds = set(map(type, some)) - PLAIN
    if not kinds:
        return []
    found = list({type(entry): entry for entry in reversed(some) if type(entry) in kinds}.values())
    return found + [entry for entry in some if type(entry) in CODE] if kinds & CODE else found


def items_of(mapping: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return the entries of a dictionary in its order; no method of a class of the script's is called."""
    return mapping.items() if type(mapping) is OrderedDict else dict.items(mapping)


COMPILERS = ("numba.", "llvmlite.")
"""Packages whose compiled functions hold their whole compiler; to them, what a function names is constant."""


def attributes(value: Any) -> dict[str, object]:
    """Return the attributes of an object by name: those in slots too, and the columns of a pandas table.

    A logger has none: what it gets at are all others, and no data. The slots of a library's object hold what it has
    computed, a path its own text. The second of two normal draws, which a generator of Python's keeps, is its state.

    >>> attributes(slice(3)), attributes(lambda: 0), attributes(logging.getLogger())
    ({}, {}, {})
    """
    if isinstance(value, (logging.Logger, logging.Handler)):
        return {}
    found: dict[str, Any] = getattr(value, "__dict__", {})
    kind: type = type(value)
    if not isinstance(found, (dict, MappingProxyType)) or kind.__module__.startswith(COMPILERS):
        return {}  # it answers to any name, as a handle of a library; or is a compiler's
    if isinstance(value, random.Random):
        found = {name: part for name, part in found.items() if name != "gauss_next"}
    if (names := slots_of(kind)) and not of_library(kind.__module__):
        found = {**found, **{name: getattr(value, name) for name in names if hasattr(value, name)}}
    if kind.__module__.startswith("pandas."):  # its table is a class in C, which has neither
        columns = [getattr(column, "_ndarray", column) for column in getattr(found.get("_mgr"), "arrays", ())]
        found = {**found, **{f"column {number}": column for number, column in enumerate(columns)}}
    return found


_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
"""Class -> its slots. Weak: a script's class that lived on would keep its module's files from being flushed at exit."""


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and of its bases, as `getattr` takes them.

    >>> class Level:
    ...     __slots__ = ("now", "__last")
    >>> slots_of(Level), slots_of(int)
    (('now', '_Level__last'), ())
    """
    if (known := _SLOTS.get(kind)) is not None:
        return known
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    _SLOTS[kind] = tuple(name for name in found if name not in ("__dict__", "__weakref__"))
    return _SLOTS[kind]


OF_PYTHON = frozenset({"__slotnames__", "__dict__", "__weakref__"})
"""Attributes of classes that copying an instance adds, and that Python makes."""


def _named(value: Any) -> list[tuple[Any, bool]]:
    """Return what the code of a function, a class, or an object's class names outside of itself.

    And of each whether that is the code of an installed package.
    """
    if isinstance(value, FunctionType):
        by_package = is_installed(value.__module__)
        return [(part, by_package) for part in named_by(value)]
    if isinstance(value, (CodeType, ModuleType, MethodType, list, tuple, dict)):
        return []
    kind = value if isinstance(value, type) else type(value)
    parts: list[tuple[Any, bool]] = []
    for base in (*kind.__mro__, type(kind)):  # and what makes the class: another class
        if isinstance(base.__module__, str) and not of_library(base.__module__):
            by_package = is_installed(base.__module__)
            own = [part for name, part in vars(base).items() if name not in OF_PYTHON]
            parts += [(getattr(part, "__func__", getattr(part, "fget", part)), by_package) for part in own]
    return [(part, by_package) for part, by_package in parts if part is not None]


@cache
def is_installed(module: str | None) -> bool:
    """Tell whether a module is part of an installed package, and not of the script."""
    place = getattr(sys.modules.get((module or "").partition(".")[0]), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(PurePath(place).parts)


def named_by(function: FunctionType) -> list[Any]:
    """Return cells, defaults, attributes, and the globals that the code names: `name`, and `module.name`."""
    if of_library(function.__module__) and of_library(function.__globals__.get("__name__")):
        return []  # a script's wrapper of a library's function has that one's module
    parts = closure_of(function)
    parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    names = names_in(function)
    scope = function.__globals__
    named = [scope[name] for name in sorted(names.globals & scope.keys())]
    named += [_BUILTINS[name] for name in sorted((names.globals & _BUILTINS.keys()) - scope.keys())]
    if not names.globals.isdisjoint(ANY_GLOBAL):
        named += [value for name, value in scope.items() if not name.startswith("__") and _is_setting(value)]
    parts += [found for found in named if not isinstance(found, ModuleType)]
    modules = [found for found in named if isinstance(found, ModuleType)]
    parts += _of_modules(modules + _imported(names.imports, scope), names.attributes)
    return parts + (_subclasses([*parts, *scope.values()]) if SUBCLASSES in names.attributes else [])


SUBCLASSES = "__subclasses__"
"""The name by which code finds classes that nothing else leads to."""


def _subclasses(values: list[Any]) -> list[Any]:
    """Return the subclasses of the script's classes among `values`, and theirs."""
    found: dict[int, Any] = {}
    left = [value for value in values if isinstance(value, type) and not of_library(value.__module__)]
    while left and len(found) < MOST_OBJECTS:
        below: list[type] = type.__subclasses__(left.pop())
        kinds = [kind for kind in below if id(kind) not in found]
        found |= {id(kind): kind for kind in kinds}
        left += kinds
    return list(found.values())


_BUILTINS = vars(builtins)

ANY_GLOBAL = frozenset({"globals", "vars", "locals", "eval", "exec", "_getframe"})
"""Names of functions by which code may get at any variable of its module."""

BY_NAME = frozenset({"getattr", "attrgetter", "__dict__", "modules", "import_module", "__import__", *ANY_GLOBAL})
"""Names by which code looks others up that are texts."""


def _is_setting(value: Any) -> bool:
    """Tell whether a global variable is plain data, or an object of the script's: no function, class or module."""
    return not isinstance(value, (type, FunctionType, BuiltinMethodType, ModuleType))


@dataclass(frozen=True, slots=True)
class NamesUsed:
    """The names that a function and those inside of it look up."""

    code: CodeType
    """The code that was looked at."""
    globals: set[str]
    attributes: set[str]
    """Of any object, and so of a module."""
    imports: set[str]
    """Modules that it imports itself."""


_NAMES: WeakKeyDictionary[FunctionType, NamesUsed] = WeakKeyDictionary()
"""Function -> its names."""


def names_in(function: FunctionType) -> NamesUsed:
    """Return the names that a function looks up: found once."""
    code = function.__code__
    known = _NAMES.get(function)
    if known is None or known.code is not code:
        known = _NAMES[function] = NamesUsed(code, set(), set(), set())
        for instruction in chain.from_iterable(map(get_instructions, codes_in(code))):
            name = instruction.opname
            if name == "IMPORT_NAME":
                known.imports.add(instruction.argval)
            elif name.endswith(("_NAME", "GLOBAL", "GLOBALS")):
                known.globals.add(instruction.argval)
            elif name.endswith(("_ATTR", "_METHOD", "_FROM")):
                known.attributes.add(instruction.argval)
        if not BY_NAME.isdisjoint(known.globals | known.attributes):
            texts = {text for inner in codes_in(code) for text in inner.co_consts if isinstance(text, str)}
            for names in (known.globals, known.attributes, known.imports):
                names |= texts
    return known


def _imported(names: set[str], scope: dict[str, Any]) -> list[ModuleType]:
    """Return the modules, of a script's, that a function imports by these names, which may be relative."""
    package = scope.get("__package__") or ""
    paths = [path for name in sorted(names) for path in (name, name.partition(".")[0], f"{package}.{name}".strip("."))]
    found = [sys.modules.get(path) for path in paths]
    return [module for module in found if isinstance(module, ModuleType) and not of_library(module.__name__)]


def _of_modules(modules: list[ModuleType], names: set[str]) -> list[Any]:
    """Return what code with these names may look up in `modules` and in the script's modules inside them.

    Of a library's module that is no function and no class.
    """
    parts, seen, stack = [], set(), modules[::-1]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        is_library = of_library(module.__name__)
        for found in (vars(module)[name] for name in sorted(names & vars(module).keys())):
            if found is sys.modules:
                continue  # those that code may look up there, `names_in` has by their names
            if not isinstance(found, ModuleType):
                is_own = isinstance(found, (type, FunctionType)) and of_library(found.__module__)
                parts += [] if is_library and is_own else [found]
            elif not of_library(found.__name__):
                stack.append(found)
    return parts


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions inside of it."""
    yield code
    for inner in islice(code.co_consts, LONG):
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def of_library(module: str | None) -> bool:
    """Tell whether a module is one whose code is not looked into.

    >>> of_library("torch.utils.data"), of_library("__main__"), of_library(None)
    (True, False, False)
    """
    name = module if isinstance(module, str) else ""  # of a class made in C it may be anything
    return name.partition(".")[0] in _LIBRARIES


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
