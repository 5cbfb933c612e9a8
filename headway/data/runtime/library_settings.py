"""The settings of the libraries that a dataset calls: plain values in their modules, which a script may set.

Reading goes by `PIL.ImageFile.LOAD_TRUNCATED_IMAGES` without naming it: the code names `PIL.Image`, whose functions
look it up in a module beside it. So of each library's module that followed code names, and of the modules in the same
folder, the public numbers and texts are compared.

    Image.open(path)     names PIL.Image; beside it PIL.ImageFile, PIL.JpegImagePlugin, ..: about 200 values

>>> import textwrap
>>> script = {"__name__": "__main__", "textwrap": textwrap}
>>> exec("def shortened(text): return textwrap.shorten(text, 9)", script)
>>> found = [(script["shortened"], True)]
>>> before = library_settings(found)
>>> textwrap.WIDTH_MADE = 3
>>> library_settings(found) == before
False
>>> del textwrap.WIDTH_MADE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from headway.runtime.reach import names_in, of_library

SETTINGS = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types of values that count as settings."""


class Settings(dict[str, object]):
    """Module -> its settings. A module that is imported later makes no difference: what goes by it came later too."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Settings) or dict.__eq__(self, other):
            return isinstance(other, Settings)
        return all(self[name] == other[name] for name in self.keys() & other.keys())

    def __ne__(self, other: object) -> bool:
        return not self == other


def library_settings(found: Iterable[tuple[Any, bool]]) -> Settings:
    """Return the settings that the functions in `found`, as `reached` yields them, may go by; 50 us."""
    named: set[str] = set()
    for value, _ in found:
        if type(value) is FunctionType:
            named |= _libraries_of(value)
    settings = Settings()
    for module in _beside(frozenset(named), len(sys.modules)):
        if module.size != len(module.variables):
            module.renew()
        settings[module.name] = () if module.look_up is None else module.settings()
    return settings


_LIBRARIES: WeakKeyDictionary[FunctionType, tuple[object, frozenset[str]]] = WeakKeyDictionary()
"""Function -> its code, and the names of the library's modules that it names, or functions of which it names."""


def _libraries_of(function: FunctionType) -> frozenset[str]:
    known = _LIBRARIES.get(function)
    if known is None or known[0] is not function.__code__:
        # A library's own is not followed.
        modules = [] if of_library(function.__module__) else _modules_named(function)
        known = _LIBRARIES[function] = function.__code__, frozenset(name for name in modules if of_library(name))
    return known[1]


def _modules_named(function: FunctionType) -> list[str]:
    """Return the modules that a function names, and those of what it names."""
    names, scope = names_in(function), function.__globals__
    values = [scope[name] for name in names.globals & scope.keys()]
    values += [sys.modules[name] for name in names.imports & sys.modules.keys()]
    for module in [value for value in values if isinstance(value, ModuleType)]:
        values += [vars(module)[name] for name in names.attributes & vars(module).keys()]
    found = [getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None) for value in values]
    return [name for name in found if isinstance(name, str)]


class _Module:
    """A module and what looks up its settings."""

    __slots__ = ("look_up", "name", "size", "variables")

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name, self.variables = name, vars(module)
        self.renew()

    def renew(self) -> None:
        """Find out which of its variables are settings."""
        self.size = len(self.variables)
        names = [name for name, value in list(self.variables.items()) if type(value) in SETTINGS and name[:1] != "_"]
        # One more, or of a single one no tuple would come.
        self.look_up = itemgetter("__name__", *names) if names else None

    def settings(self) -> object:
        """Return them, and their types: 1 and True are equal."""
        try:
            values = self.look_up(self.variables) if self.look_up is not None else ()
        except KeyError:  # one went, and another came
            return object()
        kinds = tuple(map(type, values))
        return kinds, values if SETTINGS.issuperset(kinds) else tuple(map(id, values))


@lru_cache(maxsize=64)
def _beside(named: frozenset[str], num_modules: int) -> list[_Module]:
    """Return modules by these names, and those in the same folders, where `num_modules` are imported."""
    modules = dict(sys.modules)
    folders = {getattr(modules.get(name), "__package__", None) or name for name in named}
    near = [name for name in modules if name in named | folders or name.rpartition(".")[0] in folders]
    return [_Module(name, modules[name]) for name in near if isinstance(modules[name], ModuleType)]
