"""Where a value is from: made by the function itself, handed to it, or outside of it, such as a part of its object.

`headway.data.runtime.effects` runs bytecode over these. Of two paths that
meet the value from further away counts.

>>> row = found_by_name([], "ROWS", "the global ROWS").part()
>>> row.level == OUTSIDE, row.joined(NEW).label
(True, 'the global ROWS')
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from headway.runtime.reach import LEAVES, LONG, of_library

FRESH, HANDED, OUTSIDE = range(3)

MUTATING = frozenset({
    "__delattr__", "__delitem__", "__iadd__", "__setattr__", "__setitem__", "add", "append", "appendleft", "clear",
    "difference_update", "discard", "extend", "extendleft", "fill", "insert", "intersection_update", "move_to_end",
    "pop", "popitem", "popleft", "put", "put_nowait", "readinto", "readline", "remove", "resize", "reverse", "rotate",
    "seek", "send", "setdefault", "sort", "subtract", "symmetric_difference_update", "update", "write", "writelines",
    "writerow", "writerows",
})  # fmt: skip
"""Methods that change their object; so do those of torch with one underscore at the end."""

OF_LISTS = frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse"})
"""Of these, the ones that no view has: a slice with such a method is a copy."""

ON_FIRST = frozenset({
    "copyto", "delattr", "delitem", "fill_diagonal", "heapify", "heappop", "heappush", "heappushpop", "heapreplace",
    "insort", "insort_left", "insort_right", "next", "place", "put_along_axis", "putmask", "setattr", "setitem",
    "shuffle",
})  # fmt: skip
"""Functions that change their first argument."""

HANDING = frozenset({
    "__getattribute__", "__getitem__", "__iter__", "detach", "diagonal", "expand", "flatten", "get", "items", "keys",
    "narrow", "numpy", "permute", "pop", "popitem", "popleft", "ravel", "reshape", "select", "setdefault", "squeeze",
    "swapaxes", "t", "transpose", "unbind", "unsqueeze", "values", "view",
})  # fmt: skip
"""Methods that give out their object's memory, or parts of the object."""

SHARING = frozenset({
    "as_strided", "as_tensor", "asarray", "ascontiguousarray", "atleast_1d", "atleast_2d", "cast", "from_numpy",
    "frombuffer", "getattr", "max", "memoryview", "min", "next", "super", "type", "vars",
})  # fmt: skip
"""Functions whose result is their argument, a part of it, or shares its memory."""

GATHERING = frozenset({
    "chain", "cycle", "deque", "dict", "enumerate", "filter", "frozenset", "islice", "iter", "list", "map", "reversed",
    "set", "sorted", "tuple", "zip",
})  # fmt: skip
"""Functions whose result is fresh, with the items of their arguments inside."""


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a value."""

    level: int = FRESH
    inner: int = FRESH
    """The level of what is inside of it."""
    label: str = ""
    """Where it is from, in words."""
    name: str = ""
    """The name that it was looked up by."""
    of: Value | None = None
    """The object that it is an attribute of."""
    parameters: frozenset[str] = frozenset()
    """Those that it may be, or may be a part of."""
    known: Any = None
    """The module, class or function that it is."""
    is_slice: bool = False

    def part(self, label: str = "") -> Value:
        """Return an item or an attribute of it."""
        level = max(self.level, self.inner)
        return Value(level, level, label or self.label, parameters=self.parameters)

    def joined(self, other: Value) -> Value:
        """Return what is known of a value that is one of the two."""
        upper = other if other.level > self.level else self
        return Value(
            upper.level,
            max(self.inner, other.inner),
            upper.label,
            self.name if self.name == other.name else "",
            (upper.of or self.of or other.of) if self.name == other.name else None,
            self.parameters | other.parameters,
            self.known if self.known is other.known else None,
            self.is_slice and other.is_slice,
        )


NEW = Value()
NULL = Value(name="NULL")
"""What the interpreter pushes beside a function that is no method."""


@dataclass
class Effect:
    """What one function does, as far as its code says."""

    stored: str | None = None
    """What it stores in that is outside."""
    handed: set[str] = field(default_factory=set)
    """The parameters that it stores in."""
    returns: Value = NEW
    parameters: tuple[str, ...] = ()
    """In their order, one that takes all further ones last."""
    is_method: bool = False

    def arguments(
        self, args: Sequence[Value], words: Sequence[str] | None, *, bound: bool
    ) -> Iterator[tuple[str, Value]]:
        """Yield parameters and what a call passes for them; `words` None: it is not known which is which."""
        names = self.parameters[1:] if bound and self.is_method else self.parameters
        if words is None:
            yield from ((name, value) for value in args for name in names)
            return
        num_plain = len(args) - len(words)
        yield from ((names[min(i, len(names) - 1)], value) for i, value in enumerate(args[:num_plain]) if names)
        for word, value in zip(words, args[num_plain:], strict=True):
            yield from ((name, value) for name in ((word,) if word in names else names[-1:]))


class Unknown:
    """What is known of the rest of a script: here, nothing."""

    def effects(self, callee: Value) -> list[Effect]:
        """Return the effects of the script's functions that a call may run."""
        return []

    def values_named(self, name: str) -> list[Any]:
        """Return the values that attributes of this name have."""
        return []


def found_by_name(found: Any, name: str, label: str) -> Value:
    """Return what is known of an object that a function finds by name."""
    if is_plain(found):
        return Value(label=label, name=name)
    known = found if isinstance(found, (ModuleType, type, FunctionType, BuiltinFunctionType)) else None
    return Value(OUTSIDE, OUTSIDE, label, name, known=known)


def around(values: Sequence[Value]) -> Value:
    """Return what is known of a new container of these values."""
    if not values:
        return NEW
    upper = max(values, key=lambda value: max(value.level, value.inner))
    level = max(upper.level, upper.inner)
    return Value(inner=level, label=upper.label, parameters=frozenset().union(*(value.parameters for value in values)))


def changes(method: str) -> bool:
    """Tell whether a method of this name changes its object."""
    return method in MUTATING or (method.endswith("_") and not method.endswith("__"))


def meet(one: Value | None, other: Value | None) -> Value:
    """Return what is known of a variable on two paths; None: without a value there."""
    if one is None or other is None:
        return one or other or NEW
    return one.joined(other)


def popped(stack: list[Value]) -> Value:
    """Take the uppermost value."""
    return stack.pop() if stack else Value(OUTSIDE, OUTSIDE)


def is_scripts(value: Any, method: str) -> bool:
    """Tell whether a method of an object is the script's."""
    found = getattr(type(value), method, None)
    return isinstance(found, FunctionType) and not of_library(found.__globals__.get("__name__"))


def has_plain_items(value: Any) -> bool:
    """Tell whether the items of an object are numbers and texts, which nobody changes."""
    if type(value).__module__ == "numpy":
        return getattr(value, "ndim", 0) == 1 and value.dtype.kind not in "OV"
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (None,)
    return bool(items) and all(map(is_plain, islice(items, LONG)))


def is_plain(value: Any) -> bool:
    """Tell whether an object is a number or a text; None may become anything else.

    >>> is_plain(3), is_plain(None), is_plain(bytearray(3))
    (True, False, False)
    """
    return isinstance(value, LEAVES) and not isinstance(value, (bytearray, type(None)))
