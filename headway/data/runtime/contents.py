"""What is in the memory that a dataset reads from, to the last entry: a digest that any edit between two looks changes.

A picture (`headway.data.runtime.purity`) samples long lists and large arrays, and knows an edit of a tensor by its
version only, which a numpy view of the same memory does not move. Here all of it is read, as long as that takes about
a millisecond; of what is larger only size and identity count, and the picture's samples are what shows an edit.

    array, tensor, bytearray      its bytes
    file mapped for reading       when it was last written
    long list, dict, set, deque   which objects are in it, the versions or bytes of those, and what a record holds

>>> rows = [torch.zeros(2) for _ in range(500)]
>>> before = contents([rows])
>>> rows[77] = rows[77] + 1
>>> contents([rows]) == before
False
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

from headway.runtime.reach import LONG

MOST_BYTES = 1 << 23
"""Bytes that one look reads: 0.5 to 1 ms."""

MOST_ENTRIES = 1 << 18
"""Entries of long containers that one look compares by identity: 1 ms."""

MOST_INSIDE = 1 << 12
"""Tensors and arrays in long containers that one look reads: 1 to 2 ms."""

DEARER = 3
"""Entries as which one tensor or array counts that lies in an entry itself."""

KINDS = (torch.Tensor, np.ndarray, bytearray, array)
"""What has bytes that may be edited in place."""

LONGER = (list, tuple, dict, set, frozenset, deque)
"""Containers that may be long; what is in the shorter ones, a walk by `reached` has met."""


def contents(values: Iterable[Any]) -> object:
    """Return something comparable that stands for all that is in `values`, each as `reached` yields it."""
    look = _Look()
    return [found for value in values if (found := look.of(value)) is not None]


class _Look:
    """One look, and what it may still read."""

    def __init__(self) -> None:
        self._bytes, self._entries, self._inside = MOST_BYTES, MOST_ENTRIES, MOST_INSIDE

    def of(self, value: Any) -> object:
        """Return what stands for the content of one value, None where it has none of this kind."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (bytearray, array)):
            return self._digest(memoryview(value).cast("B")) if value else 0
        if isinstance(value, LONGER) and (len(value) > LONG or isinstance(value, (set, frozenset, deque))):
            return self._container(value)
        return None

    def _tensor(self, value: torch.Tensor) -> object:
        """Bytes of a plain tensor of the processor's; of others, versions say enough in a picture."""
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.device.type != "cpu" or value.is_quantized or not value.is_contiguous():
            return None
        if value.numel() == 0 or value.nbytes > self._bytes:
            return value.nbytes
        return self._digest(value.detach().view(-1).view(torch.uint8).numpy().data)

    def _array(self, value: np.ndarray[Any, Any]) -> object:
        mapped = file_of(value)
        if mapped is not None and mapped.mode == "r":
            return written(mapped)
        if value.dtype.hasobject:
            return self._container(value.ravel().tolist()) if value.size <= self._entries else value.size
        if value.size == 0 or value.nbytes > self._bytes:
            return value.nbytes
        return self._digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def _container(self, value: Any) -> object:
        """Which objects are in it, in order, and what is in those tensors and arrays."""
        if len(value) > self._entries:
            return len(value)
        self._entries -= len(value)
        parts: Any = value
        if type(value) not in (list, tuple):
            parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        identities = xxhash.xxh3_128_digest(_addresses(parts))
        held = _mutable(identities, parts)
        self._inside -= len(held)
        inside = [self._part(parts[place]) for place in held] if self._inside >= 0 else len(held)
        return identities, inside

    def _part(self, part: Any) -> object:
        """What stands for an entry of a long container: of a short container or an object in it, what that holds."""
        if isinstance(part, torch.Tensor):
            return 0 if part.is_inference() else part._version
        if isinstance(part, Mapping):
            return self._held(part.values())
        if isinstance(part, (list, set)):
            return self._held(part)
        return self._held(_attributes(part)) if _has_attributes(type(part)) else self.of(part)

    def _held(self, values: Iterable[Any]) -> object:
        """Which objects they are; of tensors and arrays among them the bytes, while there are not many."""
        found = []
        for value in values:
            digest = None
            if isinstance(value, KINDS) and self._inside > 0:
                self._inside -= DEARER
                digest = self.of(value)
            found.append(id(value) if digest is None else digest)
        return tuple(found)

    def _digest(self, raw: Any) -> object:
        self._bytes -= raw.nbytes
        return xxhash.xxh3_128_digest(raw) if self._bytes >= 0 else raw.nbytes


_MUTABLE: dict[bytes, list[int]] = {}
"""Identities of the entries of a container -> which of its entries may be edited in place; of some containers."""


def _mutable(identities: bytes, parts: list[Any]) -> list[int]:
    """Return which of `parts` may be edited in place: their types are looked at once, while they are the same."""
    found = _MUTABLE.get(identities)
    if found is None:
        if len(_MUTABLE) > LONG:
            _MUTABLE.clear()
        kinds = {kind for kind in set(map(type, parts)) if is_mutable(kind)}
        found = [place for place, part in enumerate(parts) if type(part) in kinds] if kinds else []
        _MUTABLE[identities] = found
    return found


def is_mutable(kind: type) -> bool:
    """Tell whether objects of a class may be edited in place."""
    return issubclass(kind, (*KINDS, list, dict, set)) or _has_attributes(kind)


def _has_attributes(kind: type) -> bool:
    """Tell whether objects of a script's class keep attributes, which may be set in place."""
    if kind.__module__ == "builtins" or issubclass(kind, (type, BaseException)):
        return False
    return kind.__dictoffset__ != 0 or hasattr(kind, "__dataclass_fields__")


def _attributes(value: Any) -> list[Any]:
    """Return what such an object holds."""
    fields = getattr(type(value), "__dataclass_fields__", {})
    held = getattr(value, "__dict__", {})
    return [*held.values(), *(getattr(value, name, None) for name in fields if name not in held)]


def _addresses(parts: list[Any] | tuple[Any, ...]) -> Any:
    """Return the addresses of the objects in a list or tuple, [8 n] bytes: 1 ns each, as CPython keeps them."""
    if not _memory_tells():
        return np.fromiter(map(id, parts), np.uint64, len(parts)).data
    return _entries(parts)


def _entries(parts: list[Any] | tuple[Any, ...]) -> Any:
    first = id(parts) + tuple.__basicsize__
    if isinstance(parts, list) and parts:  # a list has a pointer to its entries in the place of the first one
        first = ctypes.c_void_p.from_address(first).value or 0
    return (ctypes.c_char * (8 * len(parts))).from_address(first)


@cache
def _memory_tells() -> bool:
    """Tell whether lists and tuples are laid out in memory as `_entries` reads them, in this Python."""
    parts = [object() for _ in range(LONG)]
    same = tuple(parts)
    wanted = np.fromiter(map(id, parts), np.uint64, len(parts)).tobytes()
    laid_out = (list.__basicsize__, tuple.__basicsize__, list.__itemsize__, tuple.__itemsize__) == (40, 24, 0, 8)
    return laid_out and bytes(_entries(parts)) == bytes(_entries(same)) == wanted


def file_of(value: np.ndarray[Any, Any]) -> np.memmap[Any, Any] | None:
    """Return the memory-mapped file that an array is, or is a view of; None for memory of the process's own."""
    base: Any = value
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.filename is not None:
            return base
        base = base.base
    return None


def written(mapped: np.memmap[Any, Any]) -> object:
    """Return when the file of a memory-mapped array was last written, and its size; None where it has no name."""
    try:
        facts = os.stat(str(mapped.filename))
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
