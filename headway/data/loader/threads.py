"""Batches made by threads of this process: each one by all threads at once, delivered in order.

Use it through `DataLoader(workers="threads")` or a `Pipeline`'s loader. The threads claim the examples of a batch one
by one, so a slow example holds up no other; the last to finish collates, and pins. At most `prefetch_factor` x
`num_workers` batches are under way. Threads share one copy of the dataset and hand batches over without copying, but
Python code runs in one of them at a time: `reason_against` measures whether that matters. Times are seconds.

The dataset must be safe to read from several threads, and
`torch.utils.data.get_worker_info()` is None in them, as in the script itself.

>>> class Squares:
...     def begin(self, keys): return [None] * len(keys)
...     def parts(self, keys): return len(keys)
...     def fill(self, making, keys, part): making[part] = keys[part] ** 2
...     def finish(self, making, keys): return making
>>> pool, task = ThreadPool(2), Task(Squares(), [3, 1, 2])
>>> pool.help(task)
>>> task.wait(timeout_s=None), task.result(), pool.close()
(True, [9, 1, 4], None)
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core.errors import InputError
from headway.core.machine.hidden_thread import HiddenThread, forget
from headway.data.bytes import account
from headway.data.bytes.account import ThreadClocks, ThreadTime
from headway.data.bytes.torch_examples import BatchMemory, BatchRows, default_collate
from headway.data.bytes.torch_keyed import Draws, KeyedDataset, Keys, generator_states, reads_batches, set_generators
from headway.data.guard.picture import Picture
from headway.data.guard.purity import impurity
from headway.data.guard.trial import in_child
from headway.data.loader.views import View, Walked, check_process
from headway.data.loader.walks import lock_wait_fraction
from headway.runtime.in_rank.guard import OfScript
from headway.runtime.script.batches import batch_bytes
from headway.runtime.script.draws import drawn, fingerprints, own_generators, restorer

WORKERS = {
    "processes": "torch's worker processes",
    "threads": "threads of this process",
    "auto": "threads where the first examples show that they suit, else processes",
}
LOCK_WAIT = 0.25
"""Fraction of their time that two threads may wait for the interpreter lock before processes win: then each second of
work takes more than 1.3 s, and what processes add (0.5 ms per 224 x 224 image) is less."""
LOOKS = 2
"""Examples that are looked at before threads are chosen."""
LEAVE_S = 5.0
"""How long an iterator that goes waits for examples still being read; a thread that hangs is left behind."""


class BatchWork(Protocol):
    """How a batch is made, part by part: `begin`, then `fill` for every part from any thread, then `finish`."""

    def begin(self, keys: Keys) -> Any:
        """Return the batch in the making."""
        ...

    def parts(self, keys: Keys) -> int:
        """Return how many parts threads may make apart: the examples, or 1."""
        ...

    def fill(self, making: Any, keys: Keys, part: int) -> None:
        """Make one part."""
        ...

    def finish(self, making: Any, keys: Keys) -> Any:
        """Return the finished batch."""
        ...


class MapStyleWork:
    """The work of a map-style dataset: examples under their own seeds, then the collate function under the batch's."""

    def __init__(
        self, dataset: KeyedDataset, collate: Callable[[Any], Any], *, batched: bool, memory: BatchMemory | None = None
    ) -> None:
        """Note the parts; `memory` is that of earlier passes."""
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self._whole = reads_batches(dataset.dataset)
        self._in_rows = batched and collate is default_collate
        self._memory = memory or BatchMemory()

    def begin(self, keys: Keys) -> Making:
        """Return room for the examples, and their seeds."""
        return Making(
            [None] * len(keys), keys.item_seeds(), BatchRows(len(keys), self._memory) if self._in_rows else None
        )

    def parts(self, keys: Keys) -> int:
        """Return the number of examples; 1 for a dataset that reads whole batches."""
        return 1 if self._whole else len(keys)

    def fill(self, making: Making, keys: Keys, part: int) -> None:
        """Read one example, or all."""
        if self._whole:
            with Draws(keys.batch_seed("batch", self.dataset.rank)):
                making.examples[:] = self.dataset.many(keys)
        else:
            with Draws(making.seeds[part]):
                example = self.dataset.one(keys[part])
            making.examples[part] = example if making.rows is None else making.rows.placed(part, example)

    def finish(self, making: Making, keys: Keys) -> Any:
        """Return what the collate function makes of the examples."""
        with Draws(keys.batch_seed("collate", self.dataset.rank)):
            if making.rows is not None:
                return making.rows.collated(making.examples)
            return self.collate(making.examples if self.batched else making.examples[0])


@dataclass(frozen=True, slots=True)
class Making:
    """A batch of `MapStyleWork` in the making."""

    examples: list[Any]
    seeds: list[int]
    rows: BatchRows | None


class Task:
    """One batch in the making. Of several failures that of the first part counts, so it is the same on every run."""

    def __init__(self, work: BatchWork, keys: Keys, pin: Callable[[Any], Any] | None = None) -> None:
        self._work, self._keys, self._pin = work, keys, pin  # the last runs in the thread that finishes the batch
        self._making = work.begin(keys)
        self.files: Mapping[str, Any] = getattr(self._making, "files", {})  # what it was read from, where that is noted
        self._parts = work.parts(keys)
        self._claimed = self._busy = 0
        self._end = max(self._parts, 1)  # a batch of nothing is collated too
        # Reentrant: the garbage collector may drop this very batch while its lock is held.
        self._lock, self._done = threading.RLock(), threading.Event()
        self._failure: tuple[int, BaseException, int] | None = None  # part, exception, thread
        self._batch: Any = None
        self._spent, self._began_ns, self._ended_ns = ThreadTime(), 0, 0
        self._clocked = account.on()
        self._context = copy_context()

    @property
    def keys(self) -> Keys:
        """Its keys."""
        return self._keys

    @property
    def failed(self) -> str:
        """The type of what was raised instead of the batch; '' for a batch that was made."""
        return "" if self._failure is None else type(self._failure[1]).__name__

    def help(self, thread: int) -> None:
        """Make parts of the batch until none is left; the thread that ends the last one finishes the batch."""
        if self._claimed >= self._end:
            return
        self._context.copy().run(self._help, thread)  # its variables are those of the thread that asked for the batch

    def _help(self, thread: int) -> None:
        began = account.clocks() if self._clocked else None
        while (part := self._claim()) is not None:
            try:
                if part < self._parts:
                    self._work.fill(self._making, self._keys, part)
            except BaseException as error:  # whatever it is, it surfaces at the loop's next batch
                self._fail(part, error, thread)
            if self._is_last():
                self._finish(thread, began)
                return
        self._account(began)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the batch is made, or failed; return False when the time is over before."""
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        """Hand the batch over, or raise what its first failure was, with the thread's traceback in the message."""
        if self._failure is None:
            batch, self._batch = self._batch, None
            return batch
        (_, error, thread), self._failure = self._failure, None
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), f"in DataLoader worker thread {thread}")  # type: ignore[no-untyped-call]  # torch has no types for it
        try:
            wrapped.reraise()  # type: ignore[no-untyped-call]  # nor for this
        except BaseException as again:
            for note in getattr(error, "__notes__", ()):
                again.add_note(note)
            # Without torch's frame, which refers to it: no cycle, so that all is freed as soon as the caller is done.
            again.__context__ = None
            raise again.with_traceback(None) from error

    def drop(self) -> None:
        """Make nothing more of it."""
        with self._lock:
            self._end = self._claimed = 0

    def report(self, batch: int, workers: int, size_bytes: Callable[[], int]) -> None:
        """Tell the recorder what batch number `batch` took. Call it inside `next`."""
        if self._clocked:
            account.loaded(
                self._began_ns, self._ended_ns, batch=batch, items=len(self._keys), workers=workers,
                fetch_ns=self._spent.fetch_ns, prep_ns=self._spent.prep_ns, cpu_wait_ns=self._spent.cpu_wait_ns,
                bytes=size_bytes(),
            )  # fmt: skip

    def _claim(self) -> int | None:
        with self._lock:
            if self._claimed >= self._end:
                return None
            self._busy += 1
            self._claimed += 1
            return self._claimed - 1

    def _is_last(self) -> bool:
        with self._lock:
            self._busy -= 1
            return not self._busy and self._claimed >= self._end > 0

    def _fail(self, part: int, error: BaseException, thread: int) -> None:
        with self._lock:
            # Parts are claimed in order: all before this one are made, or being made, and may fail yet.
            self._end = min(self._end, self._claimed)
            if self._failure is None or part < self._failure[0]:
                self._failure = part, error, thread

    def _finish(self, thread: int, began: ThreadClocks | None) -> None:
        try:
            if self._failure is None:
                batch = self._work.finish(self._making, self._keys)
                self._batch = batch if self._pin is None else self._pin(batch)
        except BaseException as error:  # the collate function's
            self._failure = self._parts, error, thread
        self._making = None
        self._account(began)
        self._done.set()

    def _account(self, began: ThreadClocks | None) -> None:
        """Add what this thread spent on the batch."""
        if began is not None:
            ended = account.clocks()
            with self._lock:
                self._spent += began.until(ended)
                self._began_ns = min(self._began_ns or began.wall_ns, began.wall_ns)
                self._ended_ns = max(self._ended_ns, ended.wall_ns)


class ThreadPool:
    """Threads that work on batches in order of arrival, all on the same one. The pool is the parallelism."""

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._stopped, self._pid = False, os.getpid()
        started = threading.Barrier(num_threads + 1)
        ours = torch.get_num_threads()
        self._threads = [
            HiddenThread(partial(self._run, k, started), name=f"headway-loader-{k}") for k in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
            started.wait()
        except RuntimeError:  # no room for another thread: those that have begun end
            started.abort()
            raise
        finally:
            torch.set_num_threads(ours)  # the threads' own setting is also what later threads would begin with

    def __len__(self) -> int:
        return len(self._threads)

    def help(self, task: Task) -> None:
        """Have every thread that comes free work on `task`. Raises `InputError` in a process forked since."""
        check_process(self._pid)
        for _ in self._threads:
            self._tasks.put(task)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the threads run in, and no fork of it."""
        return self._pid == os.getpid()

    def close(self, timeout_s: float = LEAVE_S) -> None:
        """Stop after the examples that are being read now; waits for them `timeout_s` at most."""
        self._stopped = True
        if not self.is_here:
            return
        for _ in self._threads:
            self._tasks.put(None)
        if threading.get_ident() in [thread.ident for thread in self._threads]:
            return  # the garbage collector called, in the middle of a batch
        last = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(last - time.monotonic(), 0))

    def _run(self, number: int, started: threading.Barrier) -> None:
        torch.set_num_threads(1)
        try:
            started.wait()
        except threading.BrokenBarrierError:  # another one did not start
            return
        while not self._stopped:
            task = self._tasks.get()
            if task is None or self._stopped:
                return
            task.help(number)
            forget()  # what reads an example may have asked for its thread
            del task  # it holds a batch


class InThreads(Walked):
    """An iterator over batches made by threads; torch's own base class, so that recorders see each `next`."""

    def __init__(self, view: View, work: BatchWork, holders: Sequence[Any] | None) -> None:
        """Start the threads; `holders` may have random generators of their own (None: they were looked at before).

        Raises `InputError` when the first batch draws from generators that
        all threads share: what it draws would depend on who comes first.
        """
        super().__init__(view)
        self._work = work
        self._window = max(view.prefetch_factor * view.num_workers, 1)
        self._wait_s: float | None = view.timeout or None
        self._ahead: deque[Task] = deque()
        self.of_script = OfScript()
        """Knows what a loop is to be told of."""
        self.under_way: Task | None = None
        """The batch that the loop is given just now."""
        self._pool = ThreadPool(view.num_workers)
        # Runs when the iterator goes, and before the interpreter does.
        self._close = weakref.finalize(self, _close, self._pool, self._ahead)
        if holders is not None:
            self._watch(own_generators(*holders))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.under_way = None
        _drop(self._ahead)

    def _next_data(self) -> Any:
        while len(self._ahead) < self._window and self._begin():
            pass
        if not self._ahead:
            raise StopIteration
        task = self._ahead[0]
        if not task.wait(self._wait_s):
            with self.of_script:
                raise RuntimeError(f"DataLoader timed out after {self._wait_s} seconds")
        self.under_way = self._ahead.popleft()
        self.walk.taken += 1
        data = self._result(task)
        task.report(self._num_yielded, len(self._pool), partial(batch_bytes, data))
        self.under_way = None
        return data

    def _result(self, task: Task) -> Any:
        """Return the batch of a task that has ended."""
        return task.result()

    def _begin(self) -> bool:
        """Hand the next batch to the threads; return False at the end."""
        try:
            keys = self._next_index()  # type: ignore[no-untyped-call]  # nor for this
        except StopIteration:
            return False
        # Pinning 100 MB takes 10 ms. Not a method of this object, which that would keep.
        pin = partial(pin_memory, device=self._pin_memory_device) if self._pin_memory else None
        self._ahead.append(Task(self._work, keys, pin))
        self._pool.help(self._ahead[-1])
        return True

    def _watch(self, own: list[Any]) -> None:
        """Make the first batch, and see whether a generator moves that threads would have to share."""
        restore, states, before = restorer(own), generator_states(), fingerprints(own)
        if not self._begin():
            return
        self._ahead[0].wait(self._wait_s)
        found = drawn(before, fingerprints(own))
        if found:
            self._close()
            set_generators(states)
            restore()
            raise InputError(
                f"the dataset, an operator or the collate function draws from {_names(found)}, which all threads "
                "share: the random numbers would depend on thread timing. Draw from headway.data.generator() or "
                "torch_generator(); in a pipeline declare map(function, random=True), which hands it a generator of "
                "its own; or pass workers='processes'."
            )


def _names(found: Sequence[str]) -> str:
    return ", ".join("a generator of its own" if name == "own" else name for name in found)


def _drop(ahead: deque[Task]) -> None:
    """Forget the batches that nobody will take."""
    for task in ahead:
        task.drop()
    ahead.clear()


def _close(pool: ThreadPool, ahead: deque[Task]) -> None:
    if pool.is_here:  # in a fork nobody works on them, and whoever held their locks is not there
        _drop(ahead)
    pool.close()


def reason_against(work: BatchWork, keys: Keys, dataset: Any = None) -> str | None:
    """Say why worker processes suit better than threads, or None; found in a forked child, from the first `keys`.

    A `dataset` of the user's must be pure and hold nothing that no other
    process could use either (an open file: threads would move each other's
    position). Draws from shared generators and waiting for the interpreter
    lock speak against threads for any work.
    """

    def measured() -> tuple[str | None, int]:
        first = FirstBatch(work, keys.first(LOOKS), dataset)
        if dataset is None:
            before, _ = fingerprints(), first[0]
            found = drawn(before, fingerprints())
            finding = f"it draws from {_names(found)}" if found else None
        else:
            finding = impurity(first, [0]) or Picture(dataset).open_handle
        if finding is None and (waited := lock_wait_fraction(work, keys)) > LOCK_WAIT:
            finding = f"two threads wait {waited:.0%} of their time for the interpreter lock"
        return finding, 0

    return in_child(measured, lose_writes=True)[0]


class FirstBatch:
    """A small batch as a dataset of one: what a probe reads, whatever the index."""

    def __init__(self, work: BatchWork, keys: Keys, dataset: Any) -> None:
        self.work, self.keys, self.dataset = work, keys, dataset

    def __getitem__(self, _: int) -> Any:
        """Return the batch, made anew."""
        making = self.work.begin(self.keys)
        for part in range(self.work.parts(self.keys)):
            self.work.fill(making, self.keys, part)
        return self.work.finish(making, self.keys)
