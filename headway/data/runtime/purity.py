"""The purity probe: may this dataset's examples be kept, or be made in another process?

A dataset is pure when reading an example changes nothing and depends on
nothing but its index. The probe reads a few examples twice and looks for every
difference it can see: between the results, in the random number states, in
the dataset's own attributes. It restores what it disturbed.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from headway.data.runtime.examples import decode, encode, equal, memory
from headway.data.runtime.keyed import generator_states, set_generators
from headway.data.runtime.outcome import OfDataset
from headway.runtime.draws import drawn, fingerprints, own_generators, restorer

SEEDED = {"random", "numpy", "torch"}
"""Generators that torch seeds in each loader worker, differently from all others."""


def impurity(
    dataset: Any, indices: Sequence[int], holders: Sequence[Any] = (), *, may_draw: bool = False, fresh: bool = False
) -> str | None:
    """Say why the examples of `dataset` may not be kept, or None when the probe found nothing.

    Reads each of `indices` twice. An exception of the dataset is a finding, not a failure. With `may_draw`, it may
    draw from the generators that torch seeds anew in each worker: then equal draws must give equal examples.
    `holders` may have generators of their own, which count as the dataset's. `fresh`: each reading must return memory
    of its own, as what another process made has: else a loop that changes one batch, or keeps it, would see.
    """
    own = own_generators(dataset, *holders)
    states, before, restore_own = generator_states(), fingerprints(own), restorer(own)
    try:
        for index in indices:
            if may_draw:
                set_generators(states)
            first = dataset[index]
            attributes = picture(dataset)  # after the first reading: opening a file lazily is no impurity
            found = drawn(before, fingerprints(own))
            if may_draw:
                set_generators(states)
            second = _read_as_a_worker_would(dataset, index)
            found = sorted({*found, *drawn(before, fingerprints(own))})
            if found and not (may_draw and {*found} <= SEEDED):
                return OfDataset(f"reading example {index} draws random numbers")
            if not equal(first, second):
                return OfDataset(f"reading example {index} twice gave two different results")
            if fresh and memory(first) & memory(second):
                return f"reading example {index} returns memory that the dataset keeps, or uses again"
            if picture(dataset) != attributes:
                return OfDataset(f"reading example {index} changes attributes of the dataset")
            if not equal(decode(encode(first)), first):
                return f"example {index} does not survive being copied"
    except Exception as failure:
        return f"the probe of an example raised {type(failure).__name__}: {failure}"
    finally:
        set_generators(states)
        restore_own()
    return None


def _read_as_a_worker_would(dataset: Any, index: int) -> Any:
    """Read with one intra-op thread, as loader workers do: a sum over more threads may differ in its last bit."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return dataset[index]
    finally:
        torch.set_num_threads(num_threads)


def picture(value: object) -> object:
    """Return what is cheap to see of a dataset: unequal to an earlier one when somebody has changed it since.

    Attributes are followed to objects inside (a transform, the dataset of a subset); small values are kept as they
    are, arrays and long containers by identity, size and some of their content. A change that only shows in the rest
    of a long container, or outside the dataset, is not seen.
    """
    return _picture(value, DEPTH, [MOST_VALUES])


DEPTH = 5
"""Objects and containers inside each other that a picture follows."""

MOST_VALUES = 4096
"""Values that a picture looks into; of what lies beyond only the identity counts."""

FEW = 64
"""A longer container is seen by this many of its entries, a longer text by identity."""


def _picture(value: Any, depth: int, left: list[int]) -> object:
    left[0] -= 1
    if isinstance(value, (bool, int, float, type(None))) or (isinstance(value, (str, bytes)) and len(value) <= FEW):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.shape, _sample(value)
    # Everything from here on belongs to the dataset, not to this look at it: the identity of a temporary says nothing.
    if depth == 0 or left[0] < 0 or isinstance(value, (type, ModuleType, FunctionType)):
        return id(value)
    if isinstance(value, Mapping):
        inside: Any = (
            list(chain.from_iterable(islice(value.items(), FEW))) if type(value) in (dict, OrderedDict) else []
        )
    elif type(value) in (list, tuple):
        inside = value if len(value) <= FEW else value[:: len(value) // FEW]
    else:
        inside = list(chain.from_iterable(getattr(value, "__dict__", {}).items()))
    size = len(value) if type(value) in (dict, OrderedDict, list, tuple, set, bytearray) else -1
    return id(value) if type(value) is not tuple else 0, size, [_picture(part, depth - 1, left) for part in inside]


def _sample(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of some entries; none of a file's, which would have to be read."""
    if array.dtype.hasobject or isinstance(array, np.memmap) or isinstance(array.base, np.memmap):
        return 0
    return zlib.crc32(array.flat[:: max(1, array.size // 1024)].tobytes())
