"""Whether an example is made of its own entries alone, of containers too large to be compared before each batch.

`Aligned` compares the entries of one batch, at the places where those of its examples lie. An example that is made of
more (a window of frames, a pair out of a bank) would not show a change of the rest. So in a child the rest is taken
away, one example is read, and has to be what it was:

    array, 256 MiB     | rest: no access, or other bytes | own entry | rest: no access, or other bytes |
    list of records    other objects in the place of all entries but its own

>>> frames = np.zeros((1 << 18, 8))
>>> class Rows:
...     def __init__(self, width): self.frames, self.width = frames, width
...     def __len__(self): return len(self.frames)
...     def __getitem__(self, index): return self.frames[index : index + self.width].sum()
>>> takes_more(Rows(1)), takes_more(Rows(4))
(None, 'reading an example takes more of what it holds than is compared before each batch')
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from functools import partial
from typing import Any

import numpy as np

from headway.data.runtime.aligned import Aligned
from headway.data.runtime.contents import file_of, left_out
from headway.data.runtime.examples import decode, encode, equal
from headway.data.runtime.outcome import OfDataset
from headway.data.runtime.trial_child import ENDS, in_child
from headway.runtime.reach import reached

MORE = "reading an example takes more of what it holds than is compared before each batch"
"""Why a dataset is left alone: a change of the rest would go unnoticed."""

OTHER_BYTE = 0xA5
"""What stands in the place of bytes that are no entry of the example."""

Range = tuple[int, int]
"""First address, and the one behind the last."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Gone:
    """What stands in the place of entries that are none of the example."""


def takes_more(dataset: Any) -> str | None:
    """Say that an example of `dataset` is made of more than its own entries; None if not, or if all is compared.

    What its first reading sets must be set. A child reads; nothing changes here.
    """
    aligned = Aligned(dataset)
    uncompared = {id(value) for value in left_out(value for value, _ in reached(dataset))}
    large = [value for value in aligned.large if id(value) in uncompared]
    if not large:
        return None
    index = len(dataset) // 2

    def tried() -> tuple[str | None, int]:
        before = encode(dataset[index])
        _take_away(large, aligned.places(index))
        try:
            same = equal(decode(encode(dataset[index])), decode(before))
        except Exception:  # whatever it does with what is not there
            same = False
        return (None if same else MORE), 0

    finding = in_child(tried, follows=False)[0]
    return OfDataset(MORE) if finding in (MORE, ENDS[-signal.SIGSEGV]) else finding


def _take_away(large: list[Any], places: list[Any]) -> None:
    """Leave nothing in this process of `large` containers but their entries at `places`."""
    wholes, kept = list[Range](), list[Range]()
    for value in large:
        if isinstance(value, list):
            own = {place: list.__getitem__(value, place) for place in places if _has(value, place)}
            list.__setitem__(value, slice(None), [_Gone()] * len(value))
            for place, entry in own.items():
                list.__setitem__(value, place, entry)
        elif (whole := _memory_of(value)) is not None:
            wholes.append(whole)
            entries = [value[place : place + 1 or None] for place in map(int, filter(partial(_has, value), places))]
            kept += [_extent(entry) for entry in entries]
    for whole in wholes:
        _close(whole, [one for one in sorted(kept) if one[0] < whole[1] and whole[0] < one[1]])


def _has(value: Any, place: Any) -> bool:
    """Tell whether `place` is the number of an entry."""
    return isinstance(place, (int, np.integer)) and bool(-len(value) <= place < len(value))


def _memory_of(value: Any) -> Range | None:
    """Return where an array or tensor lies; None where a look knows more of it, or it does not change."""
    if isinstance(value, np.ndarray) and (file_of(value) is not None or not _is_writeable(value)):
        return None  # a file has times
    return _extent(value)


def _extent(value: Any) -> Range:
    """Return the addresses of an array or tensor, from its first element to the end of its last."""
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value)
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return value.data_ptr(), value.data_ptr() + extent * value.element_size()


def _is_writeable(value: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array, or one that it is a view of, may be written to."""
    owner: Any = value
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return isinstance(owner, (bytearray, mmap.mmap)) or (isinstance(owner, memoryview) and not owner.readonly)


def _close(whole: Range, kept: list[Range]) -> None:
    """Take the access to the pages of `whole` that no kept range touches, and write other bytes into the rest."""
    page, start = mmap.PAGESIZE, whole[0]
    saved = [(low, ctypes.string_at(low, high - low)) for low, high in kept]
    for low, high in [*kept, (whole[1], whole[1])]:
        first, last = -(-start // page) * page, low // page * page
        if last > first:
            ctypes.memset(start, OTHER_BYTE, first - start)
            ctypes.memset(last, OTHER_BYTE, low - last)
            if _LIBC.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 0):
                raise OSError(ctypes.get_errno(), "pages cannot be protected")
        elif low > start:
            ctypes.memset(start, OTHER_BYTE, low - start)
        start = max(start, high)
    for address, data in saved:
        ctypes.memmove(address, data, len(data))
