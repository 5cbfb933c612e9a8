"""What a job has taken of its epoch from a data server, kept by the client: its state, and what it needs after a crash.

A batch that was handed out but not taken is not gone: only the client knows
what its loop took. It notes the items of all ranks in each batch that it
takes, so that the state of any rank is good for every rank of any world:
an epoch, and one bit per item.

>>> progress = JobProgress(range(6), global_batch=2)
>>> progress.took(np.array([4, 1]))
>>> again = JobProgress(range(6), global_batch=2)
>>> again.load_state_dict(progress.state_dict())
>>> again.epoch, again.remaining().tolist()
(0, [0, 2, 3, 5])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.data.orders.job_order import item_flags, packed_flags, unpacked_flags

Ints = NDArray[np.int64]


class JobProgress:
    """One job's place in its data: the epoch, what it still needs, and the global batches it took in this pass."""

    def __init__(self, items: ArrayLike | range, *, global_batch: int = 1, tail: str = "short") -> None:
        """Begin epoch 0 of `items` (as given to `PreparationScheduler.join`, or none).

        `global_batch` is batch size x world size.
        """
        self._subset = item_flags("client", items, None) if np.size(items) else np.zeros(0, bool)
        self.global_batch, self.tail = global_batch, tail
        self.epoch = 0
        self._base = self._subset.copy()
        self.history: list[Ints] = []
        """Global batches taken since the pass began, in order: for `PreparationScheduler.begin` after a crash."""

    def base(self) -> Ints | None:
        """Return what this pass set out to give, ascending; None when that is every item."""
        return None if bool((self._base == self._subset).all()) else np.flatnonzero(self._base)

    def took(self, everybody: ArrayLike) -> None:
        """Note that the loop took a batch, whose items for all ranks are `FinishedBatch.everybody`."""
        self.history.append(np.asarray(everybody, np.int64))

    def remaining(self) -> Ints:
        """Return the items that are still to come in this epoch, ascending."""
        return np.flatnonzero(self._left())

    def next_epoch(self) -> None:
        """Begin the next epoch, whatever is left of this one."""
        self.epoch += 1
        self._base, self.history = self._subset.copy(), []

    def resume(self) -> None:
        """Begin a pass over what is left: what was taken so far belongs to an earlier one."""
        self._base, self.history = self._left(), []

    def state_dict(self) -> dict[str, Any]:
        """Return {"epoch", "remaining"}: a compressed bitmap of at most items / 8 bytes; the end of an epoch is the
        start of the next."""
        left = self._left()
        count = int(left.sum())
        if not count or (self.tail == "drop" and count < self.global_batch):
            return {"version": 1, "epoch": self.epoch + 1, "remaining": packed_flags(self._subset)}
        return {"version": 1, "epoch": self.epoch, "remaining": packed_flags(left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on whatever rank of whatever world. Raises `InputError` on another's."""
        if state.get("version") != 1:
            raise InputError(f"the state has version {state.get('version')!r}; pass one of version 1, from here.")
        left = unpacked_flags(state["remaining"])
        if left.size != self._subset.size or bool((left & ~self._subset).any()):
            raise InputError(
                f"the state is of {left.size} items, this job reads {self._subset.size}, or others of them. "
                "Load it where the dataset and its subset are the same."
            )
        self.epoch, self._base, self.history = int(state["epoch"]), left, []

    def _left(self) -> NDArray[np.bool_]:
        left = self._base.copy()
        for items in self.history:
            left[items] = False
        return left
