"""Whether examples of a dataset may be kept: found in a child that reads some, before a cache stands in front of it.

>>> import torch; from torch.utils.data import DataLoader, TensorDataset
>>> uncacheable(DataLoader(TensorDataset(torch.zeros(4, 2))), fresh=False)[0] is None
True
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_examples import aliased, encode, equal, is_plain_data
from headway.data.guard.outcome import OfDataset, read_by
from headway.data.guard.picture import data_of
from headway.data.guard.purity import impurity
from headway.data.guard.trial import in_child, pretend_worker, start_method
from headway.data.guard.watch import GeneratorWatch

LOOKS = 14
"""Examples between the first and the last that are read twice before a dataset is cached."""

LOOK_S = 0.1
"""Time after which no further one is."""


def uncacheable(loader: DataLoader[Any], *, fresh: bool = True) -> tuple[str | None, int]:
    """Say why the examples of this loader's dataset must be read anew each time, or None; and the bytes of one.

    `fresh`: a script that knows nothing of a cache must not get copies of what its dataset has in memory.
    """
    reason = barred(loader)
    return probed(loader, fresh=fresh) if reason is None else (reason, 0)


def barred(loader: DataLoader[Any]) -> str | None:
    """Say why the examples of this loader's dataset may not be kept, or None, as far as no example need be read."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return "its dataset is not map-style: examples have no index to keep them under"
    if len(dataset) == 0:
        return "its dataset is empty"
    if loader.num_workers and (method := start_method(loader)) != "fork":
        return f"its workers start by {method}, and would not share the cache"
    return None


def probed(loader: DataLoader[Any], *, fresh: bool = True) -> tuple[str | None, int]:
    """Say the same by reading some examples in a forked child; and the bytes of one."""
    dataset: Any = loader.dataset

    def probe() -> tuple[str | None, int]:
        last = len(dataset) - 1
        finding = impurity(dataset, [0, last], fresh=fresh)
        if finding is None and not _reads_one_by_one(dataset, [0, last]):
            finding = "what it reads depends on what is read with it"
        finding = finding or _unsteady(dataset)
        example, num_bytes = dataset[0], 0 if finding else len(encode(dataset[0]))
        if finding is None and fresh and not is_plain_data(example):
            finding = "its examples hold more than arrays, contiguous tensors, numbers and text, and copies may differ"
        if finding is None and aliased(example):
            finding = "parts of an example share memory, and parts of a copy would not"
        finding = finding or _differs_in_workers(loader, [0, last])
        return (type(finding)(f"{read_by(dataset)}: {finding}"), 0) if finding else (None, num_bytes)

    # Never here: a dataset may count its readings, and what it opens at its first one must not be there already when
    # the script's own workers are forked.
    return in_child(probe, lose_writes=True)


def _differs_in_workers(loader: Any, indices: list[int]) -> str | None:
    """Say that examples depend on which worker reads them, or on whether one does; for a child that ends with this."""
    here = [loader.dataset[index] for index in indices]
    for number in range(2):
        pretend_worker(loader, number)
        if not equal([loader.dataset[index] for index in indices], here):
            return "an example depends on the worker that reads it"
    return None


def _unsteady(dataset: Any) -> str | None:
    """Say what changes from one reading of an example to the next although it draws from no generator in sight.

    Examples that draw say nothing here: they are not kept when they are missed, others may be.
    """
    watch, began = GeneratorWatch(dataset), time.monotonic()
    for index in sorted({k * len(dataset) // (LOOKS + 1) for k in range(1, LOOKS + 1)}):
        if time.monotonic() - began > LOOK_S:
            break
        first = watch.around(partial(dataset.__getitem__, index), alone=True)
        before = data_of(dataset)
        second = watch.around(partial(dataset.__getitem__, index), alone=True)
        if first.drew is not False or second.drew is not False or not _is_encodable(first.value):
            continue
        if not equal(first.value, second.value):
            return OfDataset(f"reading example {index} twice gave two different results")
        if data_of(dataset) != before:
            return OfDataset(f"reading example {index} changes what the dataset goes by")
    return None


def _is_encodable(example: Any) -> bool:
    """Tell whether an example could be kept at all."""
    try:
        encode(example)
    except Exception as cause:
        pass_on(cause)
        return False
    return True


def _reads_one_by_one(dataset: Any, indices: list[int]) -> bool:
    """Whether a dataset that can read many examples at once gives a list of the same ones as it reads alone."""
    many = getattr(dataset, "__getitems__", None)
    if not many:
        return True
    together = many(indices)
    return type(together) is list and equal(together, [dataset[index] for index in indices])
