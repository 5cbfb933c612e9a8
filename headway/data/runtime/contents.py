"""What is in the memory that a dataset reads from: a digest that changes with an edit between two looks.

A picture (`headway.data.runtime.purity`) samples long lists and large arrays, and knows an edit of a tensor by its
version only, which a numpy view of the same memory does not move. Here all of it is read, to the last entry, as long
as that takes about a millisecond; what is larger counts as left out (`left_out`).

    array, tensor, bytearray      its bytes
    file mapped for reading       when it was last written, and its bytes
    file in memory, value of C    its position; its bytes
    long list, dict, set, deque   which objects are in it: numbers and texts by value too, tensors and arrays by
                                  version or bytes, and by what an object holds; also three levels further inside

>>> rows = [torch.zeros(2) for _ in range(500)]
>>> before = contents([rows])
>>> rows[77] = rows[77] + 1
>>> contents([rows]) == before
False
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash

from headway.data.runtime.purity import FEW
from headway.runtime.reach import LONG, items_of

_CData: Any = ctypes.c_int.__mro__[-2]
"""Base of all numbers, arrays and structures of C, such as the values that processes share."""

MOST_BYTES = 1 << 23
"""Bytes that one look reads: 0.5 to 1 ms."""

MOST_ENTRIES = 1 << 18
"""Entries of long containers that one look compares by identity: 1 ms."""

MOST_INSIDE = 1 << 12
"""Tensors, arrays and short containers in long ones that one look reads: 1 to 2 ms."""

MOST_HASHED = 1 << 14
"""Numbers and texts in long containers that one look compares by value too: 0.2 ms."""

SAMPLED = 1024
"""Entries of a larger tensor that a look reads; those of an array, a picture samples."""

DEARER = 3
"""Entries as which one tensor or array counts that lies in an entry itself."""

PLAIN_PER_ENTRY = 8
"""Numbers and texts in an entry that count as one entry."""

LEVELS = 3
"""Containers and objects inside each other that are followed within an entry of a long container."""

KINDS = (torch.Tensor, np.ndarray, bytearray, array)
"""What has bytes that may be edited in place."""

PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
"""Types of entries that are compared by value: one made in the place of another, which is gone, has its address."""

LONGER = (list, tuple, dict, set, frozenset, deque)
"""Containers that may be long; what is in the shorter ones, a picture has met."""


def contents(values: Iterable[Any]) -> object:
    """Return something comparable that stands for all that is in `values`, each as `reached` yields it."""
    look = _Look()
    return [found for value in values if (found := look.of(value)) is not None]


def left_out(values: Iterable[Any]) -> list[Any]:
    """Return those of `values` of which `contents` does not read all: an edit of them may not be seen."""
    look = _Look()
    for value in values:
        look.of(value)
    return look.left_out


class _Look:
    """One look, and what it may still read."""

    def __init__(self) -> None:
        self.left_out: list[Any] = []
        """What was too large, or came too late."""
        self._bytes, self._entries, self._inside, self._hashed = MOST_BYTES, MOST_ENTRIES, MOST_INSIDE, MOST_HASHED

    def of(self, value: Any) -> object:
        """Return what stands for the content of one value, None where it has none of this kind."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (bytearray, array)):
            return self._digest(value, memoryview(value).cast("B")) if value else 0
        if isinstance(value, memoryview):
            return self._digest(value, memoryview(value.tobytes())) if value.nbytes <= self._bytes else value.nbytes
        if isinstance(value, (io.BytesIO, io.StringIO)):
            return value.tell() if not value.closed else -1
        if isinstance(value, _CData) and ctypes.sizeof(value) <= self._bytes:
            return bytes(memoryview(value))
        if isinstance(value, LONGER) and (len(value) > FEW or isinstance(value, (set, frozenset, deque))):
            return self._container(value)
        return None

    def _tensor(self, value: torch.Tensor) -> object:
        """Bytes of a plain tensor of the processor's; of others, versions say enough in a picture."""
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        plain = plain and value.device.type == "cpu" and not value.is_quantized and not value.is_nested
        if not plain or not value.is_contiguous():
            return None
        if value.numel() == 0:
            return 0
        # A lazily conjugated or negated tensor is seen as it lies in memory.
        raw = torch._neg_view(value) if value.is_neg() else value
        raw = raw.conj() if raw.is_conj() else raw
        flat = raw.detach().view(-1)
        if value.nbytes > self._bytes:  # another tensor may lie in its place, and have its address
            self.left_out.append(value)
            some = flat[:: max(1, value.numel() // SAMPLED)].contiguous()
            return value.nbytes, some.view(torch.uint8).numpy().tobytes()
        return self._digest(value, flat.view(torch.uint8).numpy().data)

    def _array(self, value: np.ndarray[Any, Any]) -> object:
        mapped = file_of(value)
        if value.dtype.hasobject:
            if value.size > self._entries:
                self.left_out.append(value)
                return value.size
            return self._container(value.ravel().tolist(), value)
        written_last = written(mapped) if mapped is not None and mapped.mode == "r" else None
        if value.nbytes == 0 or value.nbytes > self._bytes:
            self.left_out += [value] if value.nbytes else []
            return value.nbytes, written_last
        # A write through memory that is mapped elsewhere may leave the file's times as they were.
        return written_last, self._digest(value, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def _container(self, value: Any, whole: Any = None) -> object:
        """Which objects are in it, in order, and what is in those that may be edited; `whole` is what it is made of."""
        if len(value) > self._entries:
            self.left_out.append(value if whole is None else whole)
            return len(value)
        self._entries -= len(value)
        parts: Any = value
        if type(value) not in (list, tuple):
            parts = [*chain.from_iterable(items_of(value))] if isinstance(value, dict) else list(value)
        identities = xxhash.xxh3_128_digest(_addresses(parts))
        entries = _entries_of(identities, parts)
        count = len(entries.mutable) + len(entries.within)
        self._inside -= count
        inside: Any = count
        if self._inside >= 0:
            inside = [self._part(parts[place]) for place in entries.mutable]
            inside += [self._part(parts[place][inner]) for place, inner in entries.within]
        if count and self._inside < 0:
            self.left_out.append(value if whole is None else whole)
        self._hashed -= len(parts) if entries.plain else 0
        return identities, inside, hash(tuple(parts)) if entries.plain and self._hashed >= 0 else 0

    def _part(self, part: Any) -> object:
        """What stands for an entry of a long container: of a short container or an object in it, what that holds."""
        if isinstance(part, torch.Tensor):
            return 0 if part.is_inference() else part._version
        inside = _inside(part)
        return self.of(part) if inside is None else self._each_of(inside, LEVELS)

    def _each_of(self, values: list[Any], levels: int) -> object:
        """Which objects they are: of tensors and arrays the bytes, of others what is in them, while there are not many.

        Numbers and texts by value: one that is made in the place of another may get its address.
        """
        found: list[object] = []
        self._inside -= len(values) // PLAIN_PER_ENTRY
        if self._inside < 0:
            return len(values)
        for value in values:
            kind = type(value)
            if kind in PLAIN:
                found.append(value)
            elif isinstance(value, KINDS):
                self._inside -= DEARER
                found.append(self.of(value) if self._inside > 0 else None)
            else:
                inside = _inside(value) if levels else None
                self._inside -= 1 if inside is None else len(inside)
                found.append((id(value), self._each_of(inside, levels - 1) if inside and self._inside > 0 else None))
        return tuple(found)

    def _digest(self, value: Any, raw: Any) -> object:
        self._bytes -= raw.nbytes
        if self._bytes < 0:
            self.left_out.append(value)
        return xxhash.xxh3_128_digest(raw) if self._bytes >= 0 else raw.nbytes


def _inside(value: Any) -> list[Any] | None:
    """Return what a short container or an object of the script's holds; None for anything else."""
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    return _attributes(value) if _has_attributes(type(value)) else None


@dataclass(frozen=True, slots=True)
class _Entries:
    """What is known of the entries of a container, while they are the same."""

    mutable: list[int]
    """Which of them may be edited in place."""
    within: list[tuple[int, int]]
    """Which tuple, and which of its entries, may be edited in place."""
    plain: bool
    """Whether they are not many, and all numbers, texts, or tuples of such."""


_ENTRIES: dict[bytes, _Entries] = {}
"""Identities of the entries of a container -> what is known of them; of some containers."""


def _entries_of(identities: bytes, parts: list[Any]) -> _Entries:
    """Return what is known of `parts`: their types are looked at once, while they are the same."""
    found = _ENTRIES.get(identities)
    if found is None:
        if len(_ENTRIES) > LONG:
            _ENTRIES.clear()
        kinds = set(map(type, parts))
        edited = {kind for kind in kinds if is_mutable(kind)}
        is_short = len(parts) <= MOST_HASHED
        mutable = [place for place, part in enumerate(parts if edited else ()) if type(part) in edited]
        tuples = [(place, part) for place, part in enumerate(parts) if type(part) is tuple] if is_short else []
        within = [(place, k) for place, part in tuples for k, inner in enumerate(part) if isinstance(inner, KINDS)]
        plain = is_short and kinds <= {*PLAIN, tuple} and all(PLAIN.issuperset(map(type, part)) for _, part in tuples)
        found = _ENTRIES[identities] = _Entries(mutable, within, plain)
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
    own = getattr(value, "__dict__", {})
    return [*own.values(), *(getattr(value, name, None) for name in fields if name not in own)]


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


def is_written(file: io.IOBase) -> bool:
    """Tell whether a file of the script's own is open for writing; log handlers' are noticed when they are used."""
    handlers = logging._handlerList  # type: ignore[attr-defined]  # its stub does not have it
    if any(getattr(handler(), "stream", None) is file for handler in handlers):
        return False
    try:
        return not file.closed and file.writable() and file.fileno() > 2
    except (OSError, ValueError):  # it lies in memory
        return False


def written(mapped: np.memmap[Any, Any]) -> object:
    """Return when the file of a memory-mapped array was last written, and its size; None where it has no name."""
    try:
        facts = os.stat(str(mapped.filename))
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
