"""The iterator of worker processes over a script's own loader, which the script cannot tell from its own.

It reads the loader through a view: what the script sees of the loader is what it made. Whatever goes wrong in a
worker, and whatever the script changes that workers have as it was, ends them: from that very batch on the pass is
read in the training process, by the indices that its sampler gave, so that the script meets its own batch or its own
exception.

What is headway's own to go wrong in the training process ends them too; the script's own workers, if it has any, read
the rest then.

    indices    0   1   2   3   4   5   6            from the script's sampler, a few ahead
    workers    made........  X                      batch 3 fails, or the dataset has changed
    process                  3   4   5   6          read here, each when the loop asks for it
"""

from __future__ import annotations

import multiprocessing.process
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from headway.core.machine.hidden_thread import hide
from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_keyed import generator_states
from headway.data.guard.files_read import changed, noted
from headway.data.guard.picture import BatchEntries, Picture, outside
from headway.data.guard.process_state import LISTENS, Looks, listens
from headway.data.guard.trial import read_here
from headway.data.guard.verification import FOLLOWED
from headway.data.loader.read_ahead import CHANGED, DeferredSeed, JustInTimeSampler
from headway.data.loader.views import View
from headway.data.workers.hand_over import (
    FORKED,
    AsWritten,
    InProcessTail,
    PickledBatch,
    PinnedBatch,
    Unmade,
    UnmadeError,
    WorkerBegins,
    failure,
    make_room,
    outdated,
)
from headway.runtime.in_rank.guard import OfScript

DRAWN_BETWEEN = "the script draws random numbers, or changes data or sampler, between iter(loader) and the first batch"
ALIVE_S = 0.5
"""How often a process that waits for a batch looks whether the workers are alive."""

PATIENCE_S = 300.0
"""Workers of a loader that was made without, and that hand over nothing for so long, hang: on a lock, for example, that
another thread had when they were forked."""


@dataclass(frozen=True, slots=True)
class IteratorSettings:
    """What iterators are made with."""

    num_workers: int
    prefetch_factor: int
    keep: bool
    """Whether the workers stay for the next pass."""
    pin_memory: bool
    may_draw: bool
    """Whether workers may draw random numbers of their own."""
    opened: tuple[str, ...] = ()
    """Files that what a worker keeps from its first reading goes by."""


@dataclass(slots=True)
class Waited:
    """How long the training thread has waited for the batches of a pass."""

    started_ns: int = field(default_factory=perf_counter_ns)
    """When the pass began."""
    wait_ns: int = 0
    num_batches: int = 0


class ScriptWorkers(_MultiProcessingDataLoaderIter):
    """Batches of a script's loader, made by more workers than it has."""

    _index_sampler: JustInTimeSampler

    def __init__(
        self, loader: DataLoader[Any], settings: IteratorSettings, ended: Callable[[ScriptWorkers], None],
        left: Callable[[str], None], looks: Looks, *, reads_first: bool = False,
    ) -> None:  # fmt: skip
        """Start the workers; `ended` is called at the end of a pass, `left` with the reason when one leaves them.

        `looks` are the loader's, of all its passes.
        With `reads_first` this process reads the first examples once the workers are there (`trial.read_here`).
        """
        self._settings, self._ended, self._left = settings, ended, left
        self._own_workers, self._pid = loader.num_workers, os.getpid()
        self._script_pins = loader.pin_memory and torch.accelerator.is_available()
        self._begins = WorkerBegins(None if settings.may_draw else generator_states(), looks.each_batch)
        self.is_torchs = loader.num_workers > 0 and loader.persistent_workers
        """Whether torch keeps this iterator for the script."""
        self.waited = Waited()
        self._loader, self._of_script = weakref.ref(loader), OfScript()
        self._num_in_vain, self._is_aside = 0, False
        self._opened = {path: noted(path) for path in settings.opened}  # before a worker reads them
        self._single: Any = None
        self._draws = None if self._own_workers else DeferredSeed(loader)
        read = loader.dataset, loader.collate_fn
        self._shutdown = True  # until there are workers
        walk = Picture(read)
        if not (self._own_workers or reads_first) and (handle := walk.open_handle):
            raise RuntimeError(handle)  # workers would be forked with what this process opened at its first reading
        self._seen, self._aligned = outside(read, walk), BatchEntries(loader.dataset, walk)
        del walk  # it keeps objects of the script's alive
        self._looks = looks
        looks.begin()
        try:
            with nullcontext() if self._own_workers else _uncounted():
                super().__init__(self._view(loader))
        except BaseException:  # the host has no more processes, or this one no more files to open
            self._shutdown = True  # or torch would wait for workers that are not all there
            _end(getattr(self, "_workers", []), self._pid)
            raise
        make_room(self._worker_result_queue)
        if not self._own_workers:
            if reads_first:
                read_here(loader)
                self._seen = outside(read)
            self._hide()
            weakref.finalize(self, _end, self._workers, self._pid)
        if self._draws is not None:
            self._draws.later()

    def begin(self, loader: DataLoader[Any]) -> None:
        """Begin another pass on the same workers, with the draws of a new iterator."""
        draws = None if self._own_workers else DeferredSeed(loader)
        seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._base_seed = int(seed.item())
        self._reset(loader)
        if draws is not None:
            draws.later()
        self._draws = draws
        self._looks.begin()

    def suits(self, loader: DataLoader[Any]) -> bool:
        """Tell whether these workers would make of another pass what fresh ones would."""
        alive = self._single is None and not self._shutdown and self._pid == os.getpid()
        alive = alive and all(worker.is_alive() for worker in self._workers)
        same = alive and changed(self._opened) is None
        return same and self._seen == outside((loader.dataset, loader.collate_fn))

    def leave(self, reason: str) -> None:
        """End the workers and read the rest of the pass in this process."""
        if self._single is None and not self._own_workers:
            self._read_here()
            if self._pid == os.getpid():
                self._left(reason)

    def step_aside(self) -> bool:
        """Read the rest of a pass in this process, from the next batch on; say whether it will be.

        Nothing speaks against workers in another pass. Those that the script has stay.
        """
        self._is_aside = not self._own_workers
        return self._is_aside

    def _read_here(self) -> None:
        self._single = InProcessTail(self, self._index_sampler.rest(), pin=self._script_pins)
        if self._pid == os.getpid():
            self._abandon()

    def release(self) -> None:
        """Read the sampler as torch does from now on."""
        self._index_sampler.free = 1 << 62
        if self._index_sampler.owes and not self._shutdown:
            self._try_put_index()

    def _view(self, loader: DataLoader[Any]) -> View:
        settings = self._settings
        view = View(
            loader, num_workers=settings.num_workers, prefetch_factor=settings.prefetch_factor,
            persistent_workers=settings.keep, pin_memory=settings.pin_memory, _index_sampler=loader._index_sampler,
        )  # fmt: skip
        if not self._own_workers:
            view.__dict__.update(worker_init_fn=self._begins, in_order=True, timeout=0)
            # By name: starting processes by Python's default would settle it, and the script may set another one yet.
            view.__dict__.update(multiprocessing_context=multiprocessing.get_context("fork"))
        return view

    def _hide(self) -> None:
        """Take the workers out of what a script sees of its child processes, and of what raises when one ends."""
        for worker in self._workers:
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]  # its stub does not have it
        signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]  # it is torch's own, in C
        self._worker_pids_set = False

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        source = loader.headway_loader if isinstance(loader, View) else loader
        self._index_sampler = JustInTimeSampler(source, self._own_workers * (source.prefetch_factor or 2))
        self.waited = Waited()
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        super()._try_put_index()
        for queue in () if self._own_workers else self._index_queues:
            hide(getattr(queue, "_thread", None))  # the first put into it has started one

    def _next_data(self) -> Any:
        if self._single is None:
            cause: Exception | None = None
            try:
                batch = self._ahead()
            except StopIteration:
                raise
            except Exception as error:
                if error in self._of_script or error in self._index_sampler.of_script:
                    raise
                cause = error
            if self._single is None:
                if cause is None:
                    return batch
                self._fail(cause)
        # Outside of the handler: the script's own exceptions have no context.
        return self._single._next_data()

    def _ahead(self) -> Any:
        """Return a batch that workers have made, or None where the pass has left them."""
        before_ns = perf_counter_ns()
        is_begun = self._draws is None or self._draws.now()
        draws, self._draws = self._draws, None
        if draws is not None and not is_begun:
            if draws.may_be_repeated():  # another loader's iterator was made in between, for example
                self._reset(draws.loader)
            else:
                self._start_over(draws, DRAWN_BETWEEN)
        elif self._single is None and not self._own_workers:
            if self._pid != os.getpid():
                self.leave(FORKED)
            elif listens():
                self.leave(LISTENS)
            elif self._is_aside:
                self._read_here()
            elif self._index_sampler.is_resized:
                self.leave(CHANGED)
            elif not self._looks.are_alike((self._dataset, self._collate_fn), self._is_as_read):
                self.leave(self._looks.reason(CHANGED))
        if self._single is not None:
            return None
        self._index_sampler.begun += 1
        try:
            if self._index_sampler.owes:
                self._try_put_index()
            batch = super()._next_data()  # type: ignore[no-untyped-call]  # torch has no types for its iterators
        except StopIteration:
            is_watched = not self._own_workers and self._pid == os.getpid()
            read = self._dataset, self._collate_fn
            if not is_watched or self._looks.are_alike_now(read, self._is_as_read):
                self._ended(self)
            else:
                self._left(self._looks.reason(CHANGED))
                self._abandon()
            raise
        except UnmadeError as unmade:
            self.leave(unmade.reason)
        if self._single is not None:
            return None
        self.waited.wait_ns += perf_counter_ns() - before_ns
        self.waited.num_batches += 1
        if self._index_sampler.under_way:
            self._index_sampler.under_way.popleft()
        return batch

    def _is_as_read(self) -> bool:
        """Say whether the loader still goes by what workers read it by."""
        return self._seen == outside((self._dataset, self._collate_fn))

    def _fail(self, cause: Exception) -> None:
        """Have the rest of the pass read as the script made the loader, because of what has failed here."""
        reason, draws = failure(cause), self._draws
        if draws is not None:
            self._draws = None
            self._start_over(draws, reason)
            return
        self.__dict__.pop(FOLLOWED, None)
        loader, indices = self._loader(), self._index_sampler.rest()
        if loader is not None and self._own_workers:
            self._single = AsWritten(loader, indices)
        else:
            self._single = InProcessTail(self, indices, pin=self._script_pins)
        if loader is not None and loader._iterator is self:  # torch would keep it for the next pass
            loader._iterator = None
        self._left(reason)
        self._abandon()

    def _start_over(self, draws: DeferredSeed, reason: str) -> None:
        """Let this pass, which has not handed out a batch, run as the script made the loader.

        Without workers, the sampler would have drawn its order now, and not when the iterator was made.
        """
        self.__dict__.pop(FOLLOWED, None)
        again = DeferredSeed(draws.loader)
        self._single = draws.loader._get_iterator()
        again.restore()  # it draws a seed, as the iterator in its place has done
        self._left(reason)
        self._abandon()

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        if not self._own_workers:
            _check_made(data)
            self._check_entries(data)
        if isinstance(data, ExceptionWrapper):
            with self._of_script:
                return super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]  # nor for this
        data = super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]  # nor for this
        return data.batch() if isinstance(data, (PickledBatch, PinnedBatch)) else data

    def _check_entries(self, data: Any) -> None:
        """Raise `UnmadeError` where the script has changed what this batch was read from, too large for each look."""
        entries = getattr(data, "entries", None)
        if entries and self._index_sampler.under_way:
            index = self._index_sampler.under_way[0]
            if self._aligned.of(index if isinstance(index, list) else [index]) != entries:
                raise UnmadeError(CHANGED)

    def _try_get_data(self, timeout: float = ALIVE_S) -> tuple[bool, Any]:
        if self._own_workers:
            with self._of_script:  # a worker of the script's that died, or its timeout
                found: tuple[bool, Any] = super()._try_get_data()  # type: ignore[no-untyped-call]  # nor for this
                return found
        try:
            found = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]  # nor for this
        except Exception as failure:  # a worker that ended, or a message that nobody can read
            pass_on(failure)
            raise UnmadeError(f"a worker failed: {failure}") from None
        self._num_in_vain = 0 if found[0] else self._num_in_vain + 1
        if self._num_in_vain * timeout >= PATIENCE_S:
            raise UnmadeError(f"its workers made no batch for {PATIENCE_S:.0f} s")
        return found

    def _shutdown_workers(self) -> None:
        if self._pid == os.getpid():  # else they are another process's
            super()._shutdown_workers()

    def _abandon(self) -> None:
        """End the workers at once, whatever they do: none of them is asked, and no lock is taken that one may hold.

        A signal that can be handled would run the script's handlers in each of them.
        """
        if self._shutdown or self._pid != os.getpid():
            return
        self._shutdown = True
        _end(self._workers, self._pid)
        if self._pin_memory:
            self._pin_memory_thread_done_event.set()
        for queue in (*self._index_queues, self._worker_result_queue):
            queue.cancel_join_thread()
        for queue in self._index_queues:
            queue.close()


@contextmanager
def _uncounted() -> Iterator[None]:
    """Start processes that Python does not count: the script's own ones keep the names that they have without these."""
    names, name = vars(multiprocessing.process), "_process_counter"
    counter, names[name] = names[name], count(1)
    try:
        yield
    finally:
        names[name] = counter


def _check_made(data: Any) -> None:
    """Raise `UnmadeError` where a worker handed over no batch."""
    if isinstance(data, ExceptionWrapper):
        raise UnmadeError("a worker failed")
    if isinstance(data, Unmade):
        raise UnmadeError(data.reason)
    if isinstance(data, (PickledBatch, PinnedBatch)) and (reason := outdated(data)) is not None:
        raise UnmadeError(reason)


def _end(workers: list[Any], pid: int) -> None:
    """End workers of process `pid`, unless this is a fork of it."""
    if pid == os.getpid():
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
