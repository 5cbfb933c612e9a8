"""The purity probe: may this dataset's examples be kept, or be made in another process?

A dataset is pure when reading an example changes nothing and depends on
nothing but its index. The probe reads a few examples twice and looks for every
difference it can see: between the results, in the random number states, in
the dataset's own attributes. It restores what it disturbed.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_examples import decode, encode, equal, memory
from headway.data.bytes.torch_keyed import generator_states, set_generators
from headway.data.guard.outcome import OfDataset
from headway.runtime.script.draws import drawn, fingerprints, own_generators, restorer
from headway.runtime.script.object_graph import VIEWS, attributes, items_of, parts_of

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
                if may_draw:
                    set_generators(states)
                if torch.get_num_threads() > 1 and equal(first, dataset[index]):
                    return f"reading example {index} with one intra-op thread, as workers do, gives another result"
                return OfDataset(f"reading example {index} twice gave two different results")
            if fresh and memory(first) & memory(second):
                return f"reading example {index} returns memory that the dataset keeps, or uses again"
            if picture(dataset) != attributes:
                return OfDataset(f"reading example {index} changes attributes of the dataset")
            if not equal(decode(encode(first)), first):
                return f"a copy of example {index} is not equal to it: it holds objects that a pickle does not keep"
    except Exception as failure:
        pass_on(failure)
        return f"reading an example in a test process raised {type(failure).__name__}: {failure}"
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


MOST_VALUES = 4096
"""Values that a picture looks into, nearest first; of what lies beyond only the identity counts."""

FEW = 64
"""A longer container is seen by this many of its entries."""

NUMBERS = frozenset({bool, int, float, complex, type(None)})

LONG_TEXT = 1 << 16
"""A longer text is seen by its identity, a shorter one by its hash at least."""


def picture(value: object) -> object:
    """Return what is cheap to see of a dataset: unequal to an earlier one when somebody has changed it since.

    Attributes are followed to objects inside (a transform, the dataset of a subset); small values are kept as they
    are, arrays and long containers by identity, size and some of their content. A change that only shows in the rest
    of a long container, or outside the dataset, is not seen.
    """
    seen: set[int] = set()
    queue, found = deque([value]), list[object]()
    while queue and len(found) < MOST_VALUES:
        part = queue.popleft()
        token = _small(part)
        if token is None and id(part) not in seen:
            seen.add(id(part))
            inside = _inside(part)
            queue += inside
            # The identity of a tuple says nothing: some are made for this look at what is in them.
            token = id(part) if type(part) is not tuple else 0, id(type(part)), len(inside), _size(part)
        found.append(id(part) if token is None else token)
    return found, [id(part) for part in islice(queue, MOST_VALUES)]


def _small(value: Any) -> object:
    """Return what stands for a value without any inside; None for another one."""
    if type(value) in NUMBERS or isinstance(value, (int, float, complex)):
        return type(value), value
    if isinstance(value, (str, bytes)):
        return value if len(value) <= FEW else hash(value) if len(value) <= LONG_TEXT else id(value)
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.shape, _sample(value)
    if isinstance(value, (np.generic, PurePath)):  # a path notes in itself what was asked of it
        return type(value), repr(value)
    return id(value) if isinstance(value, (type, ModuleType, FunctionType)) else None


def _inside(value: Any) -> list[Any]:
    """Return the entries and attributes of an object, or some of them. No code of a script's runs."""
    entries: Iterable[Any] = ()
    if isinstance(value, dict):
        entries = chain.from_iterable(islice(items_of(value), FEW))
    elif isinstance(value, (list, tuple)):
        step = slice(None, None, max(1, len(value) // FEW))
        entries = list.__getitem__(value, step) if isinstance(value, list) else tuple.__getitem__(value, step)
    elif isinstance(value, (MappingProxyType, *VIEWS)):
        mapping: Any = getattr(value, "mapping", value)
        entries = chain.from_iterable(islice(items_of(mapping | {}), FEW))
    elif isinstance(value, (MethodType, BuiltinMethodType, partial, ReferenceType)):
        entries = parts_of(value)
    return [*entries, *chain.from_iterable(attributes(value).items())]


def _size(value: Any) -> int:
    return len(value) if type(value) in (dict, OrderedDict, list, tuple, set, bytearray) else -1


def _sample(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of some entries; none of a file's, which would have to be read."""
    if array.dtype.hasobject or isinstance(array, np.memmap) or isinstance(array.base, np.memmap):
        return 0
    return zlib.crc32(array.flat[:: max(1, array.size // 1024)].tobytes())
