"""What single examples rest on in memory that is too large to look through before each batch.

A look at memory (`contents`) reads some megabytes, and some levels into long lists. Of a larger array, or of a longer
list of records, that has an entry per example, the entries of one batch are compared alone: as they were when it was
read, and as they are when the loop asks for it. A split's own index, with a whole number per example, leads to entries
as well.

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

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Subset

from headway.data.guard.content_digest import portrait
from headway.data.guard.contents import MOST_ENTRIES, is_mutable
from headway.data.guard.picture import Picture, size_of
from headway.runtime.script.object_graph import LONG

LARGE_BYTES = 1 << 20
"""Arrays with more bytes are compared by their rows as well."""


class BatchEntries:
    """The large containers of a dataset that have an entry per example; found once, in its picture if there is one."""

    def __init__(self, dataset: Any, walk: Picture | None = None) -> None:
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

    def places(self, indices: list[Any]) -> list[Any]:
        """Return where the entries of examples may lie: at their own indices, and where an index of a split leads."""
        found = list[Any]()
        for index in indices:
            with contextlib.suppress(IndexError, KeyError, TypeError):  # examples have other keys
                for subset in self._subsets:
                    index = subset[index]
                found.append(index)
        own = found.copy()
        for one in self._indices:
            with contextlib.suppress(IndexError, KeyError, TypeError):
                is_array = isinstance(one, (np.ndarray, torch.Tensor))
                found += one[own].tolist() if is_array else [int(one[index]) for index in own]
        return found

    def _entries(self, value: Any, places: list[Any], rows: np.ndarray[Any, Any] | None) -> object:
        """Return what stands for the entries of a container: one digest of all rows of an array, in one step."""
        with contextlib.suppress(IndexError, TypeError):
            if rows is not None and isinstance(value, np.ndarray):
                return xxhash.xxh3_128_digest(np.ascontiguousarray(value[rows]).tobytes())
            if rows is not None and isinstance(value, torch.Tensor):
                taken = value.detach()[torch.from_numpy(rows)].resolve_conj().resolve_neg().contiguous()
                return xxhash.xxh3_128_digest(taken.view(-1).view(torch.uint8).numpy().data)
        return [_entry(value, place) for place in places]


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
