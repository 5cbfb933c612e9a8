"""One picture of what a loader's batches are read from: its objects are walked once, and each rule reads the picture.

    read ── walked ──> state      the graph: which objects, in which order, small values as they are
                       data       the same without what only packages name, and what is in memory (`contents`)
                       reached    the objects: what is open, functions that remember, entries per example

>>> from types import SimpleNamespace
>>> dataset = SimpleNamespace(epoch=1)
>>> before = data_of(dataset)
>>> dataset.epoch = 2
>>> data_of(dataset) == before
False

A change is not seen where it shows in the middle of a container too long to be looked through, in what a library keeps
in C, or, beyond `object_graph.MOST_OBJECTS` objects, in what those hold.
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import IOBase
from itertools import chain, islice
from mmap import mmap
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Subset

from headway.core.machine.interruptions import pass_on, suppress_own
from headway.data.guard.content_digest import portrait
from headway.data.guard.contents import MOST_ENTRIES, contents, is_mutable
from headway.data.guard.outcome import OfDataset
from headway.data.guard.process_state import circumstances
from headway.runtime.script.object_graph import (
    AGAIN,
    BY_PACKAGE,
    COMPILERS,
    LEAVES,
    LONG,
    OWN,
    PLAIN,
    is_installed,
    items_of,
    walked,
)

FEW = 64
"""Entries by which a container is seen that has more than `LONG`."""

NUMBERS = frozenset({bool, int, float, complex, type(None)})

LONG_TEXT = 1 << 16
"""A longer text is seen by its identity, a shorter one by its hash at least."""

SIZED = frozenset({dict, OrderedDict, list, tuple, set, bytearray})
"""Types whose length belongs to their state."""

MADE = frozenset({tuple, dict, OrderedDict, MappingProxyType, MethodType, ReferenceType})
"""Types of which an object may be made anew at each look: what is in it counts, not which one it is."""

OPEN = "it reads from {}, open before its workers start, which they would share: open it in __getitem__ when it is None"
"""Why a dataset with an open file or connection is left alone."""

NEVER_OPEN = (*LEAVES, list, tuple, dict, set, np.ndarray, torch.Tensor, type, FunctionType, ModuleType, mmap)

CONNECTED = ("begin", "close", "commit", "cursor", "fileno", "isOpened", "recv", "seek")
"""Methods by which a connection, a database, an environment or a file of a library is known."""


LARGE_BYTES = 1 << 20
"""Arrays with more bytes are compared by their rows as well."""


class Picture:
    """What `read` gets at, as it is now; 0.1 to 1 ms.

    It keeps the objects alive that it met, so let go of it before the script runs on. What its properties return can be
    kept: of two pictures they are equal where nobody has changed anything in between.
    """

    __slots__ = ("_num_near", "_num_near_tokens", "_tokens", "reached")

    def __init__(self, *read: Any, packages: bool = True, code: bool = True) -> None:
        """Walk. `packages`: also to what only code of installed packages names; `code`: to what any code names."""
        self._tokens = tokens = list[object]()
        self.reached = list[tuple[Any, int]]()
        """The objects, nearest first, and how each is reached (`object_graph.OWN`, ...)."""
        self._num_near = self._num_near_tokens = 0
        for value, how, num_parts in walked(*read, packages=packages, code=code):
            tokens.append(_token(value, num_parts))
            if num_parts != AGAIN:
                self.reached.append((value, how))
            if how != BY_PACKAGE:  # those come first
                self._num_near, self._num_near_tokens = len(self.reached), len(tokens)

    @property
    def state(self) -> object:
        """The graph of all objects."""
        return self._tokens

    @property
    def data(self) -> tuple[object, object]:
        """The graph but for what only code of packages names, and what is in the memory of its objects."""
        near = islice(self.reached, self._num_near)
        return self._tokens[: self._num_near_tokens], contents(value for value, _ in near)

    @property
    def memos(self) -> list[Any]:
        """What functions that remember their results say of that: hits, misses, largest and present number."""
        return [value.cache_info() for value, _ in self.reached if hasattr(value, "cache_info")]

    @property
    def open_handle(self) -> str | None:
        """Why workers may not share what is open of the operating system's, None where nothing is."""
        return self.handle and OfDataset(OPEN.format(self.handle))

    @property
    def handle(self) -> str | None:
        """What is open of the operating system's, None where nothing is.

        What only the code of installed packages leads to is theirs to handle.
        """
        for value, how in self.reached:
            if _is_open(value) and (how == OWN or not is_installed(type(value).__module__)):
                return f"an open {type(value).__qualname__}"
        return None


def size_of(dataset: Any) -> int:
    """Return how many examples a dataset has; -1 for one without a length, or whose length fails."""
    try:
        return len(dataset)
    except Exception as cause:
        pass_on(cause)
        return -1


def picture(value: object) -> object:
    """Return the state of what `value` gets at by attributes and entries alone; no code of a script's runs."""
    return Picture(value, code=False).state


def data_of(read: Any, walk: Picture | None = None) -> tuple[object, object]:
    """Return what reading itself may change: what `read` holds and its code names. `walk` is its picture, if taken.

    Where a look fails twice, as where another thread changes a container meanwhile, it is equal to no other.
    """
    for _ in range(2):
        with suppress_own():  # whatever an object raises: the loop asked for a batch, not for a picture
            return (walk or Picture(read, packages=False)).data
    return object(), object()


def outside(read: Any, walk: Picture | None = None) -> tuple[object, ...]:
    """Return what all that is in `read`, a dataset and a collate function, goes by: `data_of` it, and `circumstances`.

    It takes 0.2 to 1 ms, and up to 2 ms more where there is much in memory to look through.
    """
    return *data_of(read, walk), circumstances()


def _token(value: Any, num_parts: int) -> object:
    """Return what stands for one reference: a small value itself, else which object it is and how many it leads to."""
    if (leaf := _leaf(value)) is not None:
        return leaf
    if num_parts == AGAIN:
        return id(value)
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), 0 if value.is_inference() else value._version, num_parts
    if isinstance(value, np.ndarray):
        return id(value), value.shape, _sample(value), num_parts
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return id(value.__self__), value.__qualname__, num_parts
    if isinstance(value, ModuleType):
        return id(value)
    size = len(value) if type(value) in SIZED else -1
    return 0 if type(value) in MADE else id(value), id(type(value)), num_parts, size, _names(value)


def _leaf(value: Any) -> object:
    """Return what stands for a value without any inside; None for another one."""
    if type(value) in NUMBERS or isinstance(value, (int, float, complex)):
        return type(value), value
    if isinstance(value, (str, bytes)):
        return value if len(value) <= FEW else hash(value) if len(value) <= LONG_TEXT else id(value)
    if isinstance(value, (np.generic, PurePath)):  # a path notes in itself what was asked of it
        return type(value), repr(value)
    return None


def _names(value: Any) -> object:
    """Return what the walk leaves out: names of attributes, texts that are keys; some of the entries of many."""
    if not isinstance(value, (dict, list, tuple)):
        names = getattr(value, "__dict__", None)
        return tuple(names) if type(names) is dict and not type(value).__module__.startswith(COMPILERS) else ()
    if len(value) <= LONG:
        return tuple(key if type(key) in PLAIN else 0 for key, _ in items_of(value)) if isinstance(value, dict) else ()
    if isinstance(value, dict):
        some = chain.from_iterable(islice(items_of(value), FEW))
    else:
        base: Any = list if isinstance(value, list) else tuple
        some = base.__getitem__(value, slice(None, None, len(value) // FEW))
    return tuple(_leaf(entry) or id(entry) for entry in some)


def _sample(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of some entries; none of a file's, which would have to be read."""
    if array.dtype.hasobject or isinstance(array, np.memmap) or isinstance(array.base, np.memmap):
        return 0
    return zlib.crc32(array.flat[:: max(1, array.size // 1024)].tobytes())


def _is_open(value: Any) -> bool:
    """Say whether an object is open in this process and could not be used in another one."""
    if isinstance(value, IOBase):  # not the script's standard input or output, or memory
        with suppress(OSError, ValueError):
            return not value.closed and value.readable() and value.fileno() > 2
        return False
    if isinstance(value, NEVER_OPEN) or not any(hasattr(type(value), name) for name in CONNECTED):
        return False
    try:
        pickle.dumps(value)
    except Exception as cause:  # whatever a class raises that cannot be in another process
        pass_on(cause)
        return True
    return False


class BatchEntries:
    """What single examples rest on in memory that is too large to look through before each batch.

    A look at memory (`contents`) reads some megabytes, and some levels into long lists. Of a larger array, or of a
    longer list of records, that has an entry per example, the entries of one batch are compared alone: as they were
    when it was read, and as they are when the loop asks for it. A split's own index, with a whole number per example,
    leads to entries as well.

    >>> class Rows:
    ...     def __init__(self): self.x = np.zeros((1000, 1000), np.float32)
    ...     def __len__(self): return 1000
    >>> rows = Rows()
    >>> aligned = BatchEntries(rows)
    >>> before = aligned.of([3, 4])
    >>> rows.x[5] = 1
    >>> aligned.of([3, 4]) == before
    True
    >>> rows.x[4, 7] = 1
    >>> aligned.of([3, 4]) == before
    False
    """

    def __init__(self, dataset: Any, walk: Picture | None = None) -> None:
        """Find the containers, in `walk` if that is given: a picture of the dataset, and perhaps of more."""
        self._subsets = []
        while type(dataset) is Subset:
            self._subsets.append(dataset.indices)
            dataset = dataset.dataset
        size = size_of(dataset)
        values = [value for value, _ in (walk or Picture(dataset)).reached]
        self.large = [value for value in values if _is_large(value, size)]
        self._indices = [value for value in values if self.large and _is_index(value, size)]

    def of(self, indices: Iterable[Any]) -> list[object]:
        """Return what stands for the entries of these examples; [] where there is nothing to compare."""
        if not self.large:
            return []
        places = self.places(list(indices))
        rows = np.array(places, np.int64) if all(type(place) is int for place in places) else None
        return [self._entries(value, places, rows) for value in self.large]

    def each(self, indices: Sequence[object]) -> list[list[object]]:
        """Return what `of` returns for each example alone; arrays are read once for all of them.

        >>> aligned = BatchEntries(np.arange(6.0).reshape(3, 2))
        >>> aligned.each([2, 0]) == [aligned.of([2]), aligned.of([0])]
        True
        """
        if not self.large:
            return [[] for _ in indices]
        numbers, width = self.places(list(indices)), 1 + len(self._indices)
        plain = len(numbers) == len(indices) * width and all(type(place) is int for place in numbers)
        if not numbers or not plain or not all(isinstance(value, (np.ndarray, torch.Tensor)) for value in self.large):
            return [self.of([index]) for index in indices]
        flat = np.array(numbers, np.int64).reshape(width, -1).T.reshape(-1)  # those of an example side by side
        try:
            read = [_rows(value, flat) for value in self.large]
        except (IndexError, TypeError):
            return [self.of([index]) for index in indices]
        sizes = [len(data) // len(indices) for data in read]
        return [
            [xxhash.xxh3_128_digest(data[k * size : (k + 1) * size]) for data, size in zip(read, sizes, strict=True)]
            for k in range(len(indices))
        ]

    def places(self, indices: list[Any]) -> list[Any]:
        """Return where the entries of examples may lie: at their own indices, and where an index of a split leads."""
        found = list[Any]()
        for index in indices:
            with suppress(IndexError, KeyError, TypeError):  # examples have other keys
                for subset in self._subsets:
                    index = subset[index]
                found.append(index)
        own = found.copy()
        for one in self._indices:
            with suppress(IndexError, KeyError, TypeError):
                is_array = isinstance(one, (np.ndarray, torch.Tensor))
                found += one[own].tolist() if is_array else [int(one[index]) for index in own]
        return found

    def _entries(self, value: Any, places: list[Any], rows: np.ndarray[Any, Any] | None) -> object:
        """Return what stands for the entries of a container: one digest of all rows of an array, in one step."""
        with suppress(IndexError, TypeError):
            if rows is not None and isinstance(value, (np.ndarray, torch.Tensor)):
                return xxhash.xxh3_128_digest(_rows(value, rows))
        return [_entry(value, place) for place in places]


def _rows(value: object, rows: NDArray[np.int64]) -> memoryview:
    """Return the bytes of some rows of an array or a tensor; raises `IndexError` outside of it."""
    if isinstance(value, np.ndarray):
        return memoryview(np.ascontiguousarray(value[rows]).tobytes())
    assert isinstance(value, torch.Tensor)
    taken = value.detach()[torch.from_numpy(rows)].resolve_conj().resolve_neg().contiguous()
    return taken.view(-1).view(torch.uint8).numpy().data


def _entry(value: Any, place: Any) -> object:
    try:
        entry = value[place]
    except (IndexError, KeyError, TypeError):
        return None
    if isinstance(entry, torch.Tensor):
        entry = entry.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    if isinstance(entry, (np.ndarray, np.generic)):
        return xxhash.xxh3_128_digest(np.ascontiguousarray(entry).tobytes())
    return portrait(entry)


def _is_large(value: Any, size: int) -> bool:
    """Tell whether `value` has an entry for each of `size` examples, or more, and is too large to be looked through."""
    if isinstance(value, np.ndarray):
        plain = not value.dtype.hasobject
    elif isinstance(value, torch.Tensor):
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    else:
        # Of numbers and texts a look compares which objects they are, in a list that is not too long.
        is_long = isinstance(value, list) and len(value) > LONG and len(value) >= size > 0
        return is_long and (len(value) > MOST_ENTRIES or is_mutable(type(value[0])))
    return plain and value.ndim > 0 and len(value) >= size > 0 and value.nbytes > LARGE_BYTES


def _is_index(value: Any, size: int) -> bool:
    """Tell whether `value` has a whole number for each of `size` examples: the place, perhaps, of each in a table."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        whole = value.dtype.kind in "iu" if isinstance(value, np.ndarray) else value.dtype in (torch.int64, torch.int32)
        return whole and value.ndim == 1 and len(value) == size
    return isinstance(value, (list, tuple, range)) and len(value) == size > 0 and type(value[0]) is int
