"""What is in the memory that a dataset reads from: a digest that changes with an edit between two looks.

A picture (`headway.data.guard.picture`) samples long lists and large arrays, and knows an edit of a tensor by
its version only, which a numpy view of the same memory does not move. Here all of it is read, to the last entry, as
long as that takes about a millisecond; of what is larger, size and some entries count.

    array, tensor, bytearray      its bytes, in whatever order a view has them; as an image or a column has
    file mapped for reading       when it was last written, and its bytes
    file in memory, value of C    its position, and its bytes
    lock                          whether it is taken
    long list, dict, set, deque   which objects are in it: numbers and texts by value too, tensors and arrays by
                                  version or bytes, and by what an object holds; also three levels further inside

Of any other object of a library's nothing is read: comparing batches with the script's own finds a change there.

>>> rows = [torch.zeros(2) for _ in range(500)]
>>> before = contents([rows])
>>> rows[77] = rows[77] + 1
>>> contents([rows]) == before
False
"""

from __future__ import annotations

import ctypes
import io
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.runtime.script.object_graph import LONG, items_of

_CData: Any = ctypes.c_int.__mro__[-2]
"""Base of all numbers, arrays and structures of C, such as the values that processes share."""

POINTERS: tuple[Any, ...] = (
    ctypes._Pointer, ctypes.CFUNCTYPE(None).__mro__[1], ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p,
    ctypes.py_object,
)  # fmt: skip
"""Values of C that lead to memory elsewhere."""

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

IN_MEMORY = (io.BytesIO, io.StringIO)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
"""Types of entries that are compared by value: one made in the place of another, which is gone, has its address."""

LONGER = (list, tuple, dict, set, frozenset, deque)
"""Containers that may be long; what is in the shorter ones, a picture has met."""


def contents(values: Iterable[Any]) -> object:
    """Return something comparable that stands for all that is in `values`, each as `reached` yields it."""
    look = _ContentDigest()
    return [found for value in values if (found := look.of(value)) is not None]


class _ContentDigest:
    """One look, and what it may still read."""

    def __init__(self) -> None:
        self._bytes, self._entries, self._inside, self._hashed = MOST_BYTES, MOST_ENTRIES, MOST_INSIDE, MOST_HASHED

    def of(self, value: Any) -> object:
        """Return what stands for the content of one value, None where it has none of this kind."""
        kind: type = type(value)
        look = _look_for(kind)
        return None if look is None else look(self, value)

    def tensor(self, value: torch.Tensor) -> object:
        """Bytes of a tensor of the processor's, between its first and its last element; of others, the version says
        enough in a picture.
        """
        if value.device.type != "cpu":
            return None
        parts = _memory_of(value)
        return None if parts is None else [self._memory(part) for part in parts]

    def _memory(self, part: torch.Tensor) -> object:
        if part.numel() == 0:
            return 0
        # A lazily conjugated or negated tensor is seen as it lies in memory.
        raw = torch._neg_view(part) if part.is_neg() else part
        raw = raw.conj() if raw.is_conj() else raw
        raw = raw.detach()
        if raw.is_contiguous():
            flat = raw.view(-1)
        else:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(raw.shape, raw.stride(), strict=True))
            flat = torch.as_strided(raw, (extent,), (1,))
            if flat.nbytes > self._bytes >= raw.nbytes:  # few rows of many
                flat = raw.contiguous().view(-1)
        if flat.nbytes > self._bytes:  # another tensor may lie in its place, and have its address
            some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous()
            return flat.nbytes, some.view(torch.uint8).numpy().tobytes()
        return self._digest(flat.view(torch.uint8).numpy().data)

    def array(self, value: np.ndarray[Any, Any]) -> object:
        """Bytes of an array; of one of objects, those."""
        mapped = file_of(value)
        if value.dtype.hasobject:
            return value.size if value.size > self._entries else self.container(value.ravel().tolist(), is_made=True)
        written_last = written(mapped) if mapped is not None and mapped.mode == "r" else None
        if value.nbytes == 0 or value.nbytes > self._bytes:
            return value.nbytes, written_last
        # A write through memory that is mapped elsewhere may leave the file's times as they were.
        return written_last, self._digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def raw(self, value: Any) -> object:
        """Bytes of what gives out its memory."""
        if isinstance(value, _CData) and (value._objects or isinstance(value, POINTERS)):
            return None  # it leads to memory elsewhere
        view = memoryview(value)
        if not view.nbytes:
            return 0
        is_plain = view.c_contiguous and view.format in ("B", "b", "c")
        return self._digest(view.cast("B") if is_plain else memoryview(view.tobytes()))

    def storage(self, value: torch.UntypedStorage) -> object:
        """Bytes of the memory under tensors."""
        if value.device.type != "cpu":
            return value.data_ptr()
        return self.tensor(torch.empty(0, dtype=torch.uint8).set_(value))

    def file(self, value: io.BytesIO | io.StringIO) -> object:
        """Position and content of a file in memory."""
        if value.closed:
            return -1
        inside = value.getvalue()  # of a file that is only read, this copies nothing
        raw = inside.encode("utf-8", "surrogatepass") if isinstance(inside, str) else inside
        return value.tell(), self._digest(memoryview(raw))

    def image(self, value: Any) -> object:
        """Pixels of an image of PIL's that is in memory."""
        if getattr(value, "_im", None) is None and value.__dict__.get("im") is None:
            return None
        if 4 * value.width * value.height > self._bytes:
            return value.size
        return self._digest(memoryview(value.tobytes()))

    def column(self, value: Any) -> object:
        """Bytes of the arrays in a table of Arrow's; what it may not write, as a mapped file, nobody may."""
        if hasattr(value, "columns"):
            return [self.column(part) for part in value.columns]
        if hasattr(value, "chunks"):
            return [self.column(part) for part in value.chunks]
        buffers = value.buffers() if hasattr(value, "buffers") else [value]
        return [self._digest(memoryview(part)) for part in buffers if part is not None and part.is_mutable]

    def lock(self, value: Any) -> object:
        """Whether it is taken; of one that a thread may take several times, also by whom."""
        return value.locked() if type(value) is LOCKS[0] else repr(value)

    def tokenizer(self, value: Any) -> object:
        """Size of the vocabulary and all settings of a tokenizer of Hugging Face; 7 us. Entries are only ever added."""
        parts = (value.normalizer, value.pre_tokenizer, value.post_processor)
        inside = [None if part is None else part.__getstate__() for part in parts]
        return value.get_vocab_size(), str(value.truncation), str(value.padding), inside

    def container(self, value: Any, *, is_made: bool = False) -> object:
        """Which objects are in it, in order, and what is in those that may be edited; `is_made`: for this look.

        A picture has met the entries of a short list or dictionary.
        """
        if len(value) <= LONG and not is_made and not isinstance(value, (set, frozenset, deque)):
            return None
        if len(value) > self._entries:
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
        self._hashed -= len(parts) if entries.plain else 0
        return identities, inside, hash(tuple(parts)) if entries.plain and self._hashed >= 0 else 0

    def _part(self, part: Any) -> object:
        """What stands for an entry of a long container: of a short container or an object in it, what that holds."""
        if isinstance(part, torch.Tensor):
            return 0 if part.is_inference() else part._version
        inside = None if _is_looked_at(type(part)) else _inside(part)
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
            kind: type = type(value)
            if kind in PLAIN:
                found.append(value)
            elif _is_looked_at(kind):
                self._inside -= DEARER
                found.append(self.of(value) if self._inside > 0 else None)
            else:
                inside = _inside(value) if levels else None
                self._inside -= 1 if inside is None else len(inside)
                found.append((id(value), self._each_of(inside, levels - 1) if inside and self._inside > 0 else None))
        return tuple(found)

    def _digest(self, raw: Any) -> object:
        self._bytes -= raw.nbytes
        return xxhash.xxh3_128_digest(raw) if self._bytes >= 0 else raw.nbytes


LOOKS: tuple[tuple[type | tuple[type, ...], Callable[[_ContentDigest, Any], object]], ...] = (
    (torch.Tensor, _ContentDigest.tensor),
    (np.ndarray, _ContentDigest.array),
    ((bytearray, array, memoryview, _CData), _ContentDigest.raw),
    (torch.UntypedStorage, _ContentDigest.storage),
    (IN_MEMORY, _ContentDigest.file),
    (LONGER, _ContentDigest.container),
    (LOCKS, _ContentDigest.lock),
)
"""Class -> how what is in its objects is read."""

NAMED_LOOKS = {
    "PIL.Image.Image": _ContentDigest.image,
    "pyarrow.lib.Array": _ContentDigest.column, "pyarrow.lib.Buffer": _ContentDigest.column,
    "pyarrow.lib.ChunkedArray": _ContentDigest.column, "pyarrow.lib._Tabular": _ContentDigest.column,
    "tokenizers.Tokenizer": _ContentDigest.tokenizer,
}  # fmt: skip
"""The same for classes of packages that not every script imports."""


_LOOKS_FOR: WeakKeyDictionary[type, Callable[[_ContentDigest, Any], object] | None] = WeakKeyDictionary()
"""Class -> how what is in its objects is read. Weak, so that a script's classes end with it."""


def _look_for(kind: type[Any]) -> Callable[[_ContentDigest, Any], object] | None:
    """Return how what is in objects of a class is read; None where it shows in a picture, or nowhere."""
    if kind in _LOOKS_FOR:
        return _LOOKS_FOR[kind]
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    named = [NAMED_LOOKS[name] for name in names if name in NAMED_LOOKS]
    found = next((look for known, look in LOOKS if issubclass(kind, known)), named[0] if named else None)
    _LOOKS_FOR[kind] = found
    return found


def _is_looked_at(kind: type) -> bool:
    """Tell whether objects of a class have content that is neither attributes nor entries."""
    return _look_for(kind) is not None and not issubclass(kind, LONGER)


def _memory_of(value: torch.Tensor) -> list[torch.Tensor] | None:
    """Return plain tensors on all the memory that a tensor of the processor's reads; None where it does not tell."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        if is_traceable_wrapper_subclass(value):
            return []  # its tensors are attributes
        with torch._C.DisableTorchFunctionSubclass():
            value = value.as_subclass(torch.Tensor)
    if value.is_nested or value.is_mkldnn:
        return None
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    if value.is_quantized:
        return [torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())]
    return [value]


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
        kinds: set[type] = set(map(type, parts))
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
    is_value = issubclass(kind, (tuple, frozenset))
    return (not is_value and _look_for(kind) is not None) or _has_attributes(kind)


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


def written(mapped: np.memmap[Any, Any]) -> object:
    """Return when the file of a memory-mapped array was last written, and its size; None where it has no name."""
    try:
        facts = os.stat(str(mapped.filename))
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
