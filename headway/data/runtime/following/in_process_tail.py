"""The rest of a pass, read in the training process: what an iterator does that cannot read ahead any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from headway.data.runtime.following.read_ahead import pass_restorer
from headway.data.runtime.positions.views import View

FORKED = "the script forks during a pass"
"""Why a fork of the training process reads by itself: workers and threads are not there."""


class InProcessTail:
    """Reads batches as a loader without workers does, each when the loop asks for it."""

    def __init__(self, iterator: Any, indices: Iterator[Any], *, pin: bool) -> None:
        """Take over from an iterator of torch's kind: `indices` are those of the batches that are left."""
        self._indices, self._pin = indices, pin
        parts = iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
        self._fetcher = _DatasetKind.create_fetcher(iterator._dataset_kind, *parts)  # type: ignore[no-untyped-call]  # torch has no types for it

    def _next_data(self) -> Any:
        batch = self._fetcher.fetch(next(self._indices))
        return pin_memory(batch) if self._pin else batch  # type: ignore[no-untyped-call]  # nor for this


class AsWritten:
    """Reads the rest of a pass by torch's own iterator, as the script made the loader: by its workers, if it has any.

    It draws from no generator of the script's.
    """

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any]) -> None:
        """Begin; `indices` are those of the batches that are left."""
        self._loader, self._indices = loader, indices  # the latter is replaced where batches are verified
        self._iterator: Any = None

    def _next_data(self) -> Any:
        if self._iterator is None:
            restore = pass_restorer(self._loader)
            view: Any = View(self._loader, _index_sampler=_Rest(self, len(self._loader)), persistent_workers=False)
            kind = _MultiProcessingDataLoaderIter if self._loader.num_workers else _SingleProcessDataLoaderIter
            self._iterator = kind(view)
            restore()
        return self._iterator._next_data()


class _Rest:
    """The index sampler of such an iterator; torch asks it for its iterator more than once."""

    def __init__(self, reader: AsWritten, length: int) -> None:
        self._reader, self._length = reader, length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._reader._indices)

    def __len__(self) -> int:
        return self._length


def failure(error: BaseException) -> str:
    """Return the reason that an error of a remedy's own is for leaving a pass."""
    return f"failed in use: {type(error).__name__}: {error}"


class UnmadeError(Exception):
    """A batch that a worker or a thread did not make. Never seen by a script."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """Why not, of the type that says what it is about (`outcome`)."""
