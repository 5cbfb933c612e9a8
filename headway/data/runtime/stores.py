"""Whether the code that reads an example stores something outside of its own variables, where the script sees it.

Threads of the training process read ahead of its loop. A counter of the
dataset, a dictionary of what was met, a global: the loop would see it too
early, and nothing could take it back. Looks before and after a reading miss
what one example of 100 does, so the code itself is read.

    __getitem__, __iter__, __call__, .. of what the holders hold    (entry points)
        |  names of attributes and globals, closures, defaults
        v
    functions of the script -> `effects`: what each one stores, until nothing is added

Errors are to one side: code of which it is not clear where it stores counts as storing. What an example is made of is
not followed from the dataset to the collate function, nor is the code of libraries.

>>> script = {"__name__": "__main__"}
>>> exec("class Rows:\\n def __getitem__(self, i):\\n  if i == 77: self.num_bad += 1\\n  return i", script)
>>> stored_outside(script["Rows"]())
'self.num_bad'
>>> stored_outside([1, 2, 3]) is None
True
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial, partialmethod
from types import FunctionType, MethodType, ModuleType
from typing import Any

from headway.data.runtime.effects import CONSTRUCTORS, effect_of
from headway.data.runtime.origins import Effect, Unknown, Value, is_plain
from headway.runtime.reach import attributes, named_by, names_in, of_library, reached

ENTRIES = frozenset({
    "__call__", "__contains__", "__enter__", "__exit__", "__getattr__", "__getattribute__", "__getitem__",
    "__getitems__", "__iter__", "__missing__", "__next__", "forward",
})  # fmt: skip
"""Methods that reading an object may run without naming them."""

CACHED = type(lru_cache(len))
"""The class of functions that keep their results."""

MOST_FUNCTIONS = 128
"""Functions that are followed; also what the depth of calls between them goes by."""

PASSES = 6
"""Times that effects of functions are passed on to their callers at most."""


def stored_outside(*holders: Any) -> str | None:
    """Say what the code that reads an example from `holders` (dataset, collate function) stores outside of its own
    variables, such as "self.num_bad" or "the global SEEN"; None if nothing that is seen.
    """
    try:
        code = _Reading(holders)
    except _TooManyError:
        return "more than could be followed"
    if code.cache is not None:
        return code.cache
    for _ in range(PASSES):
        is_new = False
        for function in code.functions:
            try:
                effect = effect_of(function, code, is_method=function in code.methods)
            except (IndexError, KeyError, ValueError):  # bytecode of a shape that is not known
                return f"what {function.__name__} does, which could not be followed"
            if effect.stored is not None:
                return effect.stored
            for name in sorted(effect.handed & code.bound.get(function, set())):
                return f"the argument {name}"
            is_new = is_new or effect != code.found.get(function)
            code.found[function] = effect
        if not is_new:
            return None
    return "more than could be followed"


class _TooManyError(Exception):
    """Raised where reading may run more functions than are followed."""


class _Reading(Unknown):
    """The functions of a script that reading an example may run."""

    def __init__(self, holders: tuple[Any, ...]) -> None:
        self.functions: dict[FunctionType, None] = {}
        self.methods: set[FunctionType] = set()
        """Those whose first parameter is their object."""
        self.bound: dict[FunctionType, set[str]] = {}
        """Parameters that have one object in all calls: a default, or what a `partial` holds."""
        self.found: dict[FunctionType, Effect] = {}
        self.cache: str | None = None
        self._by_name: dict[str, list[Any]] = defaultdict(list)
        """What attributes of this name hold, in objects and classes."""
        self._named: set[str] = set()
        self._bases: dict[int, type] = {}
        self._known: set[FunctionType] = set()
        self._seen: dict[int, Any] = {}
        self._loose: dict[FunctionType, None] = {}
        """What a call of an object without a name that is known may run."""
        for holder in holders:
            self._take(holder)

    def values_named(self, name: str) -> list[Any]:
        """Return the values that attributes of this name have."""
        return self._by_name.get(name, [])

    def effects(self, callee: Value) -> list[Effect]:
        """Return the effects of the script's functions that a call may run."""
        if callee.known is not None:
            functions = list(self._functions_of(callee.known))
        elif callee.of is not None and callee.of.known is not None and of_library(_module(callee.of.known)):
            functions = []
        elif callee.name in self._by_name:
            functions = [function for value in self._by_name[callee.name] for function in self._functions_of(value)]
        elif callee.of is None or callee.of.label == "self":
            functions = list(self._loose)
        else:
            functions = []
        return [
            self.found.get(function, Effect()) for function in dict.fromkeys(functions) if function in self.functions
        ]

    def _functions_of(self, value: Any) -> Iterator[FunctionType]:
        """Yield the functions that a call of an object runs."""
        value = _unwrapped(value)
        if isinstance(value, FunctionType):
            yield value
        elif not isinstance(value, type):
            for name in ("__call__", "forward"):
                found = getattr(type(value), name, None)
                if isinstance(found, FunctionType):
                    yield found

    def _take(self, holder: Any) -> None:
        """Consider the code of an object, and of all that it holds."""
        if id(holder) in self._seen:
            return
        for value, by_code in list(reached(holder)):
            if by_code or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._look_for_cache(value)
            if isinstance(value, FunctionType):
                self._loose[value] = None
                self._consider(value)
            elif isinstance(value, partial) and isinstance(function := _unwrapped(value.func), FunctionType):
                names = function.__code__.co_varnames[: len(value.args)]
                given = [*zip(names, value.args, strict=False), *value.keywords.items()]
                self._bind(function, {name for name, held in given if not is_plain(held)})
            elif isinstance(value, type):
                self._add_class(value, is_entered=False)
            else:
                self._add_class(type(value), is_entered=True)
                self._add_attributes(value)

    def _add_attributes(self, value: Any) -> None:
        """Know what the attributes of an object hold, and what a dictionary does, such as that of modules."""
        entries = dict(attributes(value))
        if type(value) is dict:
            entries = {name: held for name, held in dict.items(value) if isinstance(name, str)}
        for name, held in entries.items():
            self._by_name[name].append(held)

    def _add_class(self, kind: type, *, is_entered: bool) -> None:
        """Know the attributes of a class of the script's; consider those that are named already."""
        for base in kind.__mro__:
            if of_library(base.__module__):
                continue
            own = list(vars(base).items())
            if id(base) not in self._bases:
                self._bases[id(base)] = base
                for name, held in own:
                    self._by_name[name].append(held)
            for name, held in own:
                function = _unwrapped(held)
                if isinstance(function, FunctionType) and not isinstance(held, staticmethod):
                    self.methods.add(function)
                    self._loose.update({function: None} if is_entered and name in ("__call__", "forward") else {})
                if name in self._named or name in (ENTRIES if is_entered else CONSTRUCTORS):
                    self._use(name, held)

    def _use(self, name: str, held: Any) -> None:
        """Consider what an attribute holds that considered code names."""
        if isinstance(held, cached_property) and not of_library(held.func.__module__):
            self.cache = self.cache or f"the cache of {name}"
        function = _unwrapped(held)
        if isinstance(function, FunctionType):
            self._consider(function)
        else:
            self._take(held)

    def _bind(self, function: FunctionType, names: set[str]) -> None:
        """Know parameters that have one object in all calls."""
        self.bound.setdefault(function, set()).update(names)

    def _look_for_cache(self, value: Any) -> None:
        inner = value.__wrapped__ if type(value) is CACHED else None  # no attribute of a script's object is asked for
        if isinstance(inner, FunctionType) and not of_library(inner.__module__):
            self.cache = self.cache or f"the cache of {inner.__name__}"

    def _consider(self, function: FunctionType) -> None:
        """Consider a function, and what it names."""
        is_library = of_library(function.__globals__.get("__name__"))
        if function in self._known or (is_library and of_library(function.__module__)):
            return
        self._known.add(function)
        if len(self._known) > MOST_FUNCTIONS:
            raise _TooManyError
        if not is_library:  # as a wrapper of `contextlib` is, which has the module of what it wraps
            self.functions[function] = None
            code, defaults = function.__code__, function.__defaults__ or ()
            last = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
            defaulted = [*zip(last, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
            self._bind(function, {name for name, default in defaulted if default is not None and not is_plain(default)})
        names = names_in(function)
        found = {name for name in names.attributes if isinstance(name, str)}
        if "getattr" in names.globals:  # of a name, or of one that begins so
            texts = tuple(text for text in function.__code__.co_consts if isinstance(text, str) and len(text) > 1)
            found |= {name for name in self._by_name if name.startswith(texts)}
        for name in sorted(found - self._named):
            self._named.add(name)
            for held in list(self._by_name.get(name, ())):
                self._use(name, held)
        for part in named_by(function):
            self._take(part)


def _unwrapped(held: Any) -> Any:
    """Return the function of a method, a property and the like."""
    if isinstance(held, property):
        return held.fget
    if isinstance(held, (staticmethod, classmethod, MethodType)):
        return held.__func__
    return held.func if isinstance(held, (cached_property, partial, partialmethod)) else held


def _module(value: Any) -> str | None:
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
