"""The rest of a pass, read in the training process: what an iterator does that cannot read ahead any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind

FORKED = "the script forks during a pass"
"""Why a fork of the training process reads by itself: workers and threads are not there."""


class Alone:
    """Reads batches as a loader without workers does, each when the loop asks for it."""

    def __init__(self, iterator: Any, indices: Iterator[Any], *, pin: bool) -> None:
        """Take over from an iterator of torch's kind: `indices` are those of the batches that are left."""
        self._indices, self._pin = indices, pin
        parts = iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
        self._fetcher = _DatasetKind.create_fetcher(iterator._dataset_kind, *parts)  # type: ignore[no-untyped-call]  # torch has no types for it

    def _next_data(self) -> Any:
        batch = self._fetcher.fetch(next(self._indices))
        return pin_memory(batch) if self._pin else batch  # type: ignore[no-untyped-call]  # nor for this


class UnmadeError(Exception):
    """A batch that a worker or a thread did not make. Never seen by a script."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """Why not, of the type that says what it is about (`outcome`)."""
