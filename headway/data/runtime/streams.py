"""Iterable datasets that can say where they are: their state travels with each batch.

An iterable dataset runs in the loader's workers, a copy in each. So its state
is taken there, right after a batch was collated, and sent along; the loop's
position is the state that came with the last batch it took of each worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from headway.core.rng import derived_seed
from headway.data.runtime.keyed import WORD
from headway.data.runtime.views import View, WorkerErrors
from headway.data.runtime.walks import StreamWalk


def has_state(dataset: Any) -> bool:
    """Tell whether a dataset has `state_dict` and `load_state_dict`."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def stream_iterator(loader: Any) -> Any:
    """Return an iterator of `loader` over an iterable dataset; a plain one of torch's where there is no state."""
    if not has_state(loader.dataset):
        return torch.utils.data.DataLoader._get_iterator(loader)
    walk = loader._walk
    seed = derived_seed(loader._seed, "stream", walk.epoch, walk.before.get("batches", 0)) & WORD
    view = View(
        loader,
        collate_fn=Stated(loader.collate_fn, loader.dataset),
        worker_init_fn=StreamStart(loader.worker_init_fn, dict(walk.states)),
        generator=torch.Generator().manual_seed(seed),
    )
    if loader.num_workers == 0:
        if 0 in walk.states:
            loader.dataset.load_state_dict(walk.states[0])
        return StreamInProcess(view)
    loader.check_worker_number_rationality()
    return StreamInWorkers(view)


@dataclass(slots=True)
class Stated:
    """A collate function that adds the worker and the dataset's state to what the user's own makes."""

    user: Callable[[Any], Any]
    dataset: Any

    def __call__(self, examples: Any) -> tuple[Any, int, Any]:
        """Return (batch, worker, state)."""
        batch = self.user(examples)
        info = torch.utils.data.get_worker_info()
        # A spawned worker has unpickled two copies of the dataset: the one that runs is in its worker info.
        dataset: Any
        dataset, worker = (self.dataset, 0) if info is None else (info.dataset, info.id)
        return batch, worker, dataset.state_dict()


@dataclass(slots=True)
class StreamStart:
    """What a worker does first: the user's own function, then it goes on from the state."""

    user: Callable[[int], None] | None
    states: dict[int, Any]

    def __call__(self, worker: int) -> None:
        """Prepare worker number `worker`."""
        if self.user is not None:
            self.user(worker)
        info = torch.utils.data.get_worker_info()
        if info is not None and worker in self.states:
            dataset: Any = info.dataset
            dataset.load_state_dict(self.states[worker])


class NotesState(_BaseDataLoaderIter):
    """Takes off each batch what `Stated` put on it, and keeps it in the walk."""

    walk: StreamWalk

    def __next__(self) -> Any:
        try:
            batch, worker, state = super().__next__()
        except StopIteration:
            self.walk.finished = True
            raise
        self.walk.got(worker, state)
        return batch


class StreamInProcess(NotesState, _SingleProcessDataLoaderIter):
    """Reads the dataset in the caller's process."""

    def __init__(self, view: View) -> None:
        self.walk = view._walk
        super().__init__(view)


class StreamInWorkers(NotesState, WorkerErrors):
    """Reads a copy of the dataset in each worker, in turn; the first turn is that of the state."""

    @property
    def _worker_queue_idx_cycle(self) -> itertools.cycle[int]:
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, _: itertools.cycle[int]) -> None:
        # torch begins every pass at worker 0; one that goes on begins at the worker whose turn it was.
        workers, first = self._num_workers, self.walk.next_worker
        self._turns = itertools.cycle([*range(first, workers), *range(first)])

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.walk = loader._walk
        super()._reset(loader, first_iter)
