"""What torch's own iterators see of a loader, and those iterators with the loader's walk in their hand.

Torch's iterators do the loading wherever they can; ours only say what is to
be read next, and count what the training loop took.

Iterable datasets that can say where they are: their state travels with each batch.

An iterable dataset runs in the loader's workers, a copy in each. So its state
is taken there, right after a batch was collated, and sent along; the loop's
position is the state that came with the last batch it took of each worker.

A worker that is at its end sends so, with the state that its dataset has then:
with the rest of its examples, or in a batch of nothing, which the loop does
not see. One that goes on from there gives nothing more in that pass.

    worker 0   batch  batch  (nothing, over)
    worker 1   batch  batch   batch   rest + over
"""

from __future__ import annotations

import contextvars
import enum
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.data.bytes.torch_keyed import WORD, Keys, generators_kept
from headway.data.loader.walks import OrderWalk, SamplerWalk, StreamWalk


class View:
    """Some attributes replaced, the user's own left alone: torch's iterators read attributes and nothing else."""

    def __init__(self, loader: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, headway_loader=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.headway_loader, name)


class Empty(enum.Enum):
    """A batch of which filters and errors left nothing; an enum, so that it is itself again behind a process."""

    BATCH = enum.auto()


class KeysOf:
    """The index sampler of a walk; torch asks it for an iterator at each pass.

    It leaves the loader free to go: one that keeps its iterator would never be
    freed, nor its workers end, if that iterator kept it.
    """

    def __init__(self, loader: Any) -> None:
        self.walk, self.loader = loader._walk, weakref.ref(loader)
        self._seen: tuple[Keys | None, Iterator[Keys]] | None = None
        """The first keys, looked at before the pass began, and the rest."""

    def __iter__(self) -> Iterator[Keys]:
        # Not a generator: the walk begins here, inside `iter(loader)`, where a recorder knows whose it is.
        # torch asks twice, and uses the second answer: what was looked at has to be in both.
        if self._seen is None:
            keys: Iterator[Keys] = self.walk.keys()
            return keys
        first, rest = self._seen
        return iter(()) if first is None else chain([first], rest)

    def __len__(self) -> int:
        loader = self.loader()
        if loader is None:
            raise TypeError("the loader of this iterator is gone, and its length with it. Keep the loader.")
        return len(loader)

    def follow(self, walk: OrderWalk | SamplerWalk) -> None:
        """Go on with the pass of `walk`."""
        if walk is not self.walk:
            self.walk, self._seen = walk, None

    def first(self) -> Keys | None:
        """Return the keys of the first batch without taking them; None when there is none."""
        rest = self.walk.keys()
        self._seen = next(rest, None), rest
        return self._seen[0]


def check_process(pid: int) -> None:
    """Raise `InputError` in a fork of process `pid`, whose iterator it is: two would take each other's batches."""
    if pid != os.getpid():
        raise InputError(f"this iterator belongs to process {pid}, of which this one is a fork. Call iter() again.")


class Walked(_BaseDataLoaderIter):
    """An iterator over the keys of a walk, which learns when it is at its end."""

    walk: OrderWalk | SamplerWalk

    def __init__(self, view: View) -> None:
        self.walk = view._walk
        super().__init__(view)  # type: ignore[arg-type]  # it stands in for a loader

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.walk = loader._walk
        self._index_sampler.follow(self.walk)
        super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        try:
            while (data := super().__next__()) is Empty.BATCH:
                pass  # its examples are counted; a loop could do nothing with it
            return data
        except StopIteration:
            self.walk.finished = True
            loader = self._index_sampler.loader()
            if loader is not None:
                loader._ended()
            raise


class InProcess(Walked, _SingleProcessDataLoaderIter):
    """Loads in the caller's process and thread, and leaves the caller's random generators alone."""

    def _next_data(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call]  # torch has no types for its iterators
        self.walk.taken += 1
        # A batch that raises was taken too: the caller's next `next` gets the one after it, as with workers.
        with generators_kept():
            # In a context of its own: what is seeded for the collate function ends with it.
            data = contextvars.copy_context().run(self._dataset_fetcher.fetch, index)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]  # nor for this
        return data


class WorkerErrors(_MultiProcessingDataLoaderIter):
    """Raises a worker's error without torch's frames; its message has the worker's own traceback.

    torch's frame that raises it also refers to it: such a cycle would be freed late, its queues first, and torch then
    waits 5 s for each worker. And a fork of the process that started the workers leaves them alone: torch's iterator
    would end them when the fork's copy of it goes, and the loop of the first process would wait for ever.
    """

    def __init__(self, view: View) -> None:
        self._pid = os.getpid()
        super().__init__(view)

    def _shutdown_workers(self) -> None:
        if self._pid == os.getpid():
            super()._shutdown_workers()

    def __next__(self) -> Any:
        check_process(self._pid)
        try:
            return super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            error.__context__ = None
            raise error.with_traceback(None) from None


class InWorkers(Walked, WorkerErrors):
    """Loads in worker processes; the walk counts what came out of them in order."""

    def __next__(self) -> Any:
        try:
            return super().__next__()
        finally:
            self.walk.taken = self._rcvd_idx


def has_state(dataset: Any) -> bool:
    """Tell whether a dataset has `state_dict` and `load_state_dict`."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def stream_iterator(loader: Any) -> Any:
    """Return an iterator of `loader` over an iterable dataset; a plain one of torch's where there is no state."""
    if not has_state(loader.dataset):
        return torch.utils.data.DataLoader._get_iterator(loader)
    walk = loader._walk
    seed = derived_seed(loader._seed, "stream", walk.epoch, walk.before.get("batches", 0)) & WORD
    least = loader.batch_size if loader.drop_last else 1
    view = View(
        loader,
        drop_last=False,  # torch would drop the end of a worker whose examples fill its batches
        dataset=Ending(loader.dataset, is_over=loader.num_workers == 0 and 0 in walk.over),
        collate_fn=Stated(loader.collate_fn, loader.dataset, loader._auto_collation, least or 1),
        worker_init_fn=StreamStart(loader.worker_init_fn, dict(walk.states), frozenset(walk.over)),
        generator=torch.Generator().manual_seed(seed),
    )
    if loader.num_workers == 0:
        if 0 in walk.states:
            loader.dataset.load_state_dict(walk.states[0])
        return StreamInProcess(view)
    loader.check_worker_number_rationality()
    return StreamInWorkers(view)


class End(enum.Enum):
    """What stands behind the last example; an enum, so that it is itself again behind a process."""

    OF_EXAMPLES = enum.auto()


class Ending:
    """An iterable dataset, `End.OF_EXAMPLES` behind its examples; with `is_over` its first pass has none of these."""

    def __init__(self, dataset: Any, *, is_over: bool = False) -> None:
        self.dataset, self.is_over = dataset, is_over

    def __iter__(self) -> Iterator[Any]:
        is_over, self.is_over = self.is_over, False
        return EndingIterator(iter(()) if is_over else iter(self.dataset))


class EndingIterator:
    """The iterator of an `Ending`. Not a generator, which an exception would end: the dataset's may go on."""

    def __init__(self, examples: Iterator[Any]) -> None:
        self._examples, self._ended = examples, False

    def __iter__(self) -> EndingIterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return next(self._examples)
        except StopIteration:
            self._ended = True
            return End.OF_EXAMPLES


@dataclass(slots=True)
class Stated:
    """A collate function that adds the worker, the dataset's state and whether it is at its end to the user's own."""

    user: Callable[[Any], Any]
    dataset: Any
    is_batched: bool
    least: int
    """Examples below which a batch is dropped."""

    def __call__(self, examples: Any) -> tuple[Any, int, Any, bool]:
        """Return (batch or `Empty.BATCH`, worker, state, whether it is over)."""
        is_over = (examples[-1] if self.is_batched else examples) is End.OF_EXAMPLES
        rest = examples[:-1] if is_over and self.is_batched else examples
        is_empty = is_over and (not self.is_batched or len(rest) < self.least)
        batch = Empty.BATCH if is_empty else self.user(rest)
        info = torch.utils.data.get_worker_info()
        # A spawned worker has unpickled two copies of the dataset: the one that runs is in its worker info.
        dataset: Any
        dataset, worker = (self.dataset, 0) if info is None else (info.dataset, info.id)
        return batch, worker, dataset.state_dict(), is_over


@dataclass(slots=True)
class StreamStart:
    """What a worker does first: the user's own function, then it goes on from the state."""

    user: Callable[[int], None] | None
    states: dict[int, Any]
    over: frozenset[int]

    def __call__(self, worker: int) -> None:
        """Prepare worker number `worker`."""
        info: Any = torch.utils.data.get_worker_info()
        ending: Ending = info.dataset
        ending.is_over = worker in self.over
        object.__setattr__(info, "dataset", ending.dataset)  # what the script's own code finds there
        if self.user is not None:
            self.user(worker)
        if worker in self.states:
            ending.dataset.load_state_dict(self.states[worker])


class NotesState(_BaseDataLoaderIter):
    """Takes off each batch what `Stated` put on it, and keeps it in the walk."""

    walk: StreamWalk

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.walk.finished = True
            raise

    def _next_data(self) -> Any:
        while True:
            made: tuple[Any, int, Any, bool] = super()._next_data()
            batch, worker, state, is_over = made
            is_batch = batch is not Empty.BATCH
            self.walk.got(worker, state, num_batches=int(is_batch), is_over=is_over)
            if is_batch:
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
