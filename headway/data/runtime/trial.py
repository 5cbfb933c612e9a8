"""Read a loader's first batch the way a worker would, before workers are relied on.

Purity of examples is not all that workers need: the collate function moves
into them too, an open file would share its position between them, and a
device cannot be used in a forked process at all. So the first examples are
collated here and in a child that is forked for it, and compared.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from headway.data.child import said
from headway.data.runtime.examples import decode, encode, equal
from headway.data.runtime.keyed import generators_kept
from headway.data.runtime.purity import impurity

TIMEOUT_S = 60.0
"""A child that has not answered by then hangs, as a worker would."""

EXAMPLES = 2
"""Examples in the batch that is tried, at most."""


class TriedBatch:
    """A loader's first few examples, collated: item 0 is that small batch, whatever the index."""

    def __init__(self, loader: Any) -> None:
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self.indices = list(range(min(EXAMPLES, len(loader.dataset), getattr(loader.batch_sampler, "batch_size", 0))))

    def __getitem__(self, _: int) -> Any:
        """Return the batch."""
        if not self.indices:  # the loader does not batch: one example at a time
            return self.collate_fn(self.dataset[0])
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate_fn(many(self.indices) if many else [self.dataset[index] for index in self.indices])


def unfit(loader: Any, *, may_draw: bool = False) -> tuple[str | None, int]:
    """Say why a loader's batches may not be made by (more) workers, or None; and the bytes of the batch tried.

    The dataset is read in this process only if the script reads it here too: what it opens at its first reading
    would be inherited by the script's own workers. `may_draw` as in `impurity`.
    """
    batches = TriedBatch(loader)
    if loader.num_workers:
        return in_child(lambda: (impurity(batches, [0], may_draw=may_draw), len(encode(batches[0]))))
    before = _positions()
    finding = impurity(batches, [0], may_draw=may_draw) or handle(loader.dataset)
    if finding is None and _positions().items() - before.items():
        finding = "reading it moves in a file that stays open, and workers would share its position"
    if finding is not None:
        return finding, 0
    reading, payload = in_child(lambda: (None, encode(batches[0])))
    if reading is not None:
        return f"in a worker, {reading}", 0
    with generators_kept():  # the child began with the same states: equal draws
        same = equal(decode(payload), batches[0])
    return (None if same else "in a worker, it reads something else"), len(payload)


def in_child(work: Callable[[], tuple[str | None, Any]]) -> tuple[str | None, Any]:
    """Return what `work` returns in a forked child with one intra-op thread; (reason, 0) when it fails there."""

    def answered() -> bytes:
        torch.set_num_threads(1)
        try:
            answer = work()
        except Exception as failure:
            answer = f"the probe of an example raised {type(failure).__name__}: {failure}", 0
        return pickle.dumps(answer)

    try:
        answer = pickle.loads(said(answered, TIMEOUT_S)[0])
    except Exception:
        answer = "the probe of an example ended or hung in a forked process", 0
    return answer[0], answer[1]


class _Handles(pickle.Pickler):
    """A pickler that passes over plain data and code: what it fails at holds something of the operating system."""

    def persistent_id(self, obj: Any) -> Any:
        return "" if isinstance(obj, (torch.Tensor, np.ndarray, FunctionType, ModuleType, type)) else None


class _Nowhere:
    """A file that forgets."""

    def write(self, data: Any) -> int:
        return len(data)


def handle(dataset: Any) -> str | None:
    """Say that `dataset` holds a file, a connection or the like, which forked processes cannot share; None if not."""
    try:
        _Handles(_Nowhere(), protocol=5).dump(dataset)
    except Exception as failure:
        return f"it holds what no other process can use ({failure})"
    return None


def _positions() -> dict[str, tuple[str, str]]:
    """Return path and position of every regular file that this process has open for reading."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the listing's own descriptor is closed by now
            if stat.S_ISREG(os.fstat(int(name)).st_mode):
                with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as file:
                    position, flags = (file.readline().split()[1] for _ in range(2))
                if int(flags, 8) & os.O_ACCMODE != os.O_WRONLY:
                    found[name] = (os.readlink(f"/proc/self/fd/{name}"), position)
    return found
