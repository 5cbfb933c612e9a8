"""What torch's own iterators see of a loader, and those iterators with the loader's walk in their hand.

Torch's iterators do the loading wherever they can; ours only say what is to
be read next, and count what the training loop took.
"""

from __future__ import annotations

import contextvars
import enum
import os
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from headway.core.errors import InputError
from headway.data.bytes.torch_keyed import Keys, generators_kept
from headway.data.loader.walks import OrderWalk, SamplerWalk


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
