"""What the copy of a batch would lack that another process, or a cache, hands over in its place.

A script may know an example by its identity (`row is SKIP`), hang an attribute on a tensor, or edit memory that its
dataset keeps. Pickling loses all of that without a word, and also where one example in a hundred is made so. An object
that something outside of the batch refers to has more references than its places in the batch account for: CPython
counts them.

    batch = [row, SKIP, row]     row: 2 places, 2 references; SKIP: 1 place, and the name of a global refers to it too

>>> SKIP = object()
>>> lacking([[torch.zeros(2), SKIP]])
'something outside of the batch holds an object of it too'
>>> lacking([[torch.zeros(2), object()]]) is None
True
"""

from __future__ import annotations

import datetime
import enum
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache
from pathlib import PurePath
from sys import getrefcount
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from headway.data.runtime.examples import decode, encode, equal
from headway.data.runtime.kinds import has_own_memory
from headway.runtime.reach import slots_of

SHARED = "something outside of the batch holds an object of it too"
CHANGED = "a batch holds a {}, which does not survive being copied"
VIEWS = "arrays of a batch share memory, and their copies would not"
"""Why a batch has to come from the process that the loop runs in."""

VALUES = (
    str, bytes, int, float, complex, type(None), range, slice, np.generic, np.dtype, torch.dtype, torch.device,
    torch.layout, torch.memory_format, datetime.date, datetime.time, datetime.timedelta, Decimal, PurePath, enum.Enum,
    type, FunctionType, BuiltinFunctionType,
)  # fmt: skip
"""Immutable values, for which nobody goes by identity, and what pickling has by its name."""

TUPLES = (tuple, frozenset)
"""Containers that count as values, but for what is in them: constants of code are such."""

CONTAINERS = frozenset({list, dict, OrderedDict, set, *TUPLES, torch.Size})
"""Containers that are copied entry by entry."""

PICKLED_BY = ("__reduce__", "__reduce_ex__", "__getstate__")
"""Methods by which a class says how its objects are pickled."""


def lacking(holder: list[Any]) -> str | None:
    """Say what copies of the entries of `holder`, to which nothing else may refer, would lack; None if nothing."""
    walk = _Walk()
    try:
        walk.through(holder)
    except Exception as failure:  # whatever an object raises that is looked at
        return CHANGED.format(f"part that raises {type(failure).__name__}")
    if walk.finding is None and any(walk.references[key] > walk.places[key] + _ITSELF for key in walk.references):
        return SHARED
    return walk.finding


class _Walk:
    """One walk through a batch."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}
        """Object -> references to it, as its first place was met."""
        self.places: dict[int, int] = {}
        """Object -> its places in the batch."""
        self.finding: str | None = None
        self._memory: dict[int, int] = {}
        """Address of memory -> the array that owns it, or the tensor that has it."""

    def through(self, parts: Iterable[Any]) -> None:
        """Walk through the entries of one container."""
        for part in parts:
            kind: type = type(part)
            if issubclass(kind, VALUES):
                continue
            key = id(part)
            self.places[key] = self.places.get(key, 0) + 1
            if self.places[key] > 1:
                continue
            # Nothing between the loop and this line may keep a reference to the part.
            if not issubclass(kind, TUPLES):
                self.references[key] = getrefcount(part)
            if kind in (torch.Tensor, torch.nn.Parameter):
                self._tensor(part)
            elif kind is np.ndarray and not part.dtype.hasobject:
                self._array(part)
            elif kind in CONTAINERS:
                self._entries(part)
            else:
                self._object(part)

    def _entries(self, part: Any) -> None:
        if isinstance(part, dict):
            self.through(dict.keys(part))
            self.through(dict.values(part))
        else:
            self.through(part)

    def _tensor(self, part: torch.Tensor) -> None:
        more = not part.is_leaf or part.is_conj() or part.is_neg() or part._backward_hooks or part.__dict__
        if more or part.grad is not None:
            self.finding = CHANGED.format("tensor with more than its numbers")
        elif part.device.type == "cpu" and part.layout is torch.strided and part.numel():
            address = part.untyped_storage().data_ptr()
            if self._memory.setdefault(address, 0) != 0:
                self.finding = VIEWS

    def _array(self, part: np.ndarray[Any, Any]) -> None:
        flags = part.flags
        if not flags.writeable or not (flags.c_contiguous or flags.f_contiguous):
            self.finding = CHANGED.format("view of an array, or one that is read-only,")
            return
        base = part.base
        if isinstance(base, np.ndarray):  # a view: who else holds its memory?
            self.places[id(base)] = self.places.get(id(base), 0) + 1
            self.references.setdefault(id(base), getrefcount(base))
        if part.size:
            address = (part if base is None else base).__array_interface__["data"][0]
            if self._memory.setdefault(address, id(part)) != id(part):
                self.finding = VIEWS

    def _object(self, part: Any) -> None:
        """Look at an object of another class: its attributes, and its entries where it is a container.

        One that says itself how it is pickled is copied here, to see what comes of it.
        """
        kind: type = type(part)
        by_parts = _is_copied_by_parts(kind)
        if not by_parts and not _survives(part):
            self.finding = CHANGED.format(kind.__name__)
        elif not by_parts and id(part) in self.references and _is_itself(part):
            del self.references[id(part)]
        if isinstance(part, (list, dict, set, deque, *TUPLES)):
            self._entries(part)
        if by_parts:
            self.through(getattr(part, "__dict__", {}).values())
            self.through(getattr(part, name) for name in slots_of(kind) if hasattr(part, name))


@lru_cache(maxsize=1024)
def _is_copied_by_parts(kind: type) -> bool:
    """Tell whether pickling copies the attributes and entries of objects of a class, and nothing else."""
    plain = next(base for base in (dict, list, set, tuple, object) if issubclass(kind, base))
    as_ever = all(getattr(kind, name, None) is getattr(plain, name, None) for name in PICKLED_BY)
    in_c = [base for base in kind.__mro__ if has_own_memory(base) and base is not plain]
    return as_ever and not in_c and not hasattr(kind, "__setstate__") and kind is not object


def _survives(part: Any) -> bool:
    try:
        copy = decode(encode(part))
        return equal(copy, part) and (not isinstance(part, torch.Tensor) or equal(copy.__dict__, part.__dict__))
    except Exception:  # it cannot be pickled
        return False


def _is_itself(part: Any) -> bool:
    """Tell whether the copy of an object is that object, such as a missing value of a library."""
    return pickle.loads(pickle.dumps(part)) is part


def _references_of_one() -> int:
    walk = _Walk()
    walk.through([[]])
    return next(iter(walk.references.values())) - 1


_ITSELF = _references_of_one()
"""References to an object that one walk has itself: they are not places in the batch."""
