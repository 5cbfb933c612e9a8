"""Runs a pipeline: batches made by threads, or by worker processes where the interpreter lock is the limit.

The loader is `headway.data.DataLoader` with the dataset replaced: order,
ranks and state are its own. Threads take a few examples at a time from a
bounded window of batches and write them straight into the batch's array;
batches come out in order. "auto" measures on the first examples how much of
their time two threads wait for the interpreter lock.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.data.runtime.chain import DROPPED, Chain
from headway.data.runtime.keyed import WORD, Keys, generator_states, generators_kept
from headway.data.runtime.loader import DataLoader, InProcess, InWorkers, KeysOf
from headway.data.runtime.views import View
from headway.runtime.probe_input import read_delay

WORKERS = {
    "auto": "threads, unless two of them mostly wait for the interpreter lock",
    "threads": "threads of this process",
    "processes": "torch's worker processes",
}
ON_ERROR = {"raise": "the loop gets the exception", "skip": "the example is left out, and counted"}
LOCK_WAIT = 0.25
"""Fraction of their time that two threads may wait for the interpreter lock before processes win: then each second of
work takes more than 1.3 s, and what processes add (0.5 ms per 224 x 224 image) is less."""
CHUNK = 4
"""Examples that a thread takes at once: few, so that a slow one holds up few others."""


class Batches:
    """What stands in for the dataset: hands out whole batches for `Keys`, in any process."""

    def __init__(self, chain: Chain, name: str, on_error: str, collate: Callable[[list[Any]], Any] | None) -> None:
        self.chain, self._name, self.on_error, self.collate = chain, name, on_error, collate
        self.images = any(stage.kind == "decode" for stage in chain.stages)
        self.counts = multiprocessing.Array("q", 2)
        """Examples skipped after an error, dropped by a filter; shared with worker processes."""

    def __len__(self) -> int:
        return len(self.chain.source)

    def fingerprint(self) -> str:
        """Return what tells this data from other data."""
        return self._name

    def __getitems__(self, keys: Keys) -> Any:
        """Return the batch for `keys`, made in this thread."""
        assembly = Assembly(keys)
        self.fill(assembly, range(len(keys)))
        return self.collated(assembly)

    def fill(self, assembly: Assembly, places: range) -> None:
        """Make the examples at `places` of a batch."""
        for place in places:
            index = assembly.keys[place]
            try:
                value = self.chain.run(index, assembly.seeds[place])
            except Exception:
                if self.on_error == "raise":
                    raise
                self._count(0)
                continue
            if value is DROPPED:
                self._count(1)
            else:
                assembly.put(place, value)

    def _count(self, which: int) -> None:
        with self.counts.get_lock():
            self.counts[which] += 1

    def collated(self, assembly: Assembly) -> Any:
        """Return the finished batch: {"data", "ids", labels...}, or what the user's collate function makes."""
        kept = [place for place, here in enumerate(assembly.here) if here]
        if self.collate is not None:
            return self.collate([assembly.values[place] for place in kept])
        ids = [assembly.keys[place] for place in kept]
        batch = {"data": self._data(assembly, kept), "ids": torch.tensor(ids, dtype=torch.int64)}
        rows = [self.chain.source.meta(index) for index in ids] if hasattr(self.chain.source, "meta") else []
        for name in rows[0] if rows else ():
            column = [row[name] for row in rows]
            numbers = all(isinstance(value, (int, float)) for value in column)
            batch[name] = torch.tensor(column) if numbers else column
        return batch

    def _data(self, assembly: Assembly, kept: list[int]) -> Any:
        if assembly.array is None:
            values = [assembly.values[place] for place in kept]
            numbers = values and all(isinstance(value, (int, float)) for value in values)
            return torch.tensor(values) if numbers or not values else values
        array = assembly.array if len(kept) == len(assembly.here) else assembly.array[kept]
        data = torch.from_numpy(array)
        # Pixels stay where they are, [B, H, W, C] in memory: torch calls that channels_last.
        return data.permute(0, 3, 1, 2) if self.images and data.dim() == 4 else data


class Assembly:
    """A batch in the making: arrays of one shape go straight into one array, anything else into a list."""

    def __init__(self, keys: Keys, *, apart: bool = False) -> None:
        self.keys, self.seeds = keys, keys.item_seeds()
        self.here = [False] * len(keys)
        self.values: list[Any] = [None] * len(keys)
        self.array: np.ndarray[Any, np.dtype[Any]] | None = None
        self.left = 0
        """Chunks that are not done."""
        self.lock = threading.Lock()
        self._apart = apart

    def put(self, place: int, value: Any) -> None:
        """Write one example. Raises `InputError` when its shape or type is not that of the first."""
        if isinstance(value, torch.Tensor):
            value = value.numpy()
        if self._apart or not isinstance(value, np.ndarray) or value.dtype.hasobject:
            self.values[place] = value
        else:
            with self.lock:
                if self.array is None:
                    self.array = np.empty((len(self.keys), *value.shape), value.dtype)
            if value.shape != self.array.shape[1:] or value.dtype != self.array.dtype:
                raise InputError(
                    f"example {self.keys[place]} is {value.dtype}{list(value.shape)}, the batch {self.array.dtype}"
                    f"{list(self.array.shape[1:])}. Resize or crop to one size, or pass a collate_fn."
                )
            self.array[place] = value
        self.here[place] = True


class PipelineLoader(DataLoader):
    """Loads the batches of a `Pipeline`; made by `Pipeline.loader`.

    A batch is a dict: `data` (images: [B, C, H, W], channels_last), `ids`
    int64[B], and what the source knows besides. `skipped` and `dropped` count
    the examples that errors and filters took.
    """

    def __init__(
        self, chain: Chain, *, name: str, workers: str = "auto", on_error: str = "raise", **options: Any
    ) -> None:
        """Raise `InputError` on an unknown `workers` or `on_error`, and what `DataLoader` raises."""
        pick(WORKERS, workers, "kind of workers")
        pick(ON_ERROR, on_error, "answer to errors")
        if options.get("batch_size", 1) is None and options.get("batch_sampler") is None:
            raise InputError("batch_size=None is not for pipelines, which make batches. Pass 1 or more.")
        if options.get("cache_bytes"):
            raise InputError("cache_bytes is not for pipelines. Put .cache(num_bytes) behind an operator.")
        collate = options.pop("collate_fn", None)
        with warnings.catch_warnings():
            # More threads than cores are no warning; for processes it is said when they start.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            super().__init__(Batches(chain, name, on_error, collate), collate_fn=_as_it_is, **options)
        self._kind = workers

    @property
    def skipped(self) -> int:
        """Examples left out after an error."""
        return int(self.dataset.counts[0])  # type: ignore[attr-defined]  # the dataset is ours

    @property
    def dropped(self) -> int:
        """Examples that a filter took."""
        return int(self.dataset.counts[1])  # type: ignore[attr-defined]  # the dataset is ours

    def _get_iterator(self) -> Any:
        view = View(
            self,
            _index_sampler=KeysOf(self),
            generator=torch.Generator().manual_seed(derived_seed(self._seed, "workers") & WORD),
        )
        if self.num_workers == 0:
            return InProcess(view)
        if self._kind == "auto" and len(self):
            self._kind = better_workers(self.dataset.chain)  # type: ignore[attr-defined]  # the dataset is ours
        if self._kind == "processes":
            self.check_worker_number_rationality()
            return InWorkers(view)
        check_draws(self.dataset.chain)  # type: ignore[attr-defined]  # the dataset is ours
        return InThreads(
            View(view, num_workers=0, timeout=0), self.num_workers, self.prefetch_factor or 2, self.timeout
        )


def _as_it_is(batch: Any) -> Any:
    """Collate nothing: batches are made whole (a named function, so that worker processes can be spawned)."""
    return batch


class InThreads(InProcess):
    """An iterator over batches made by threads; torch's own base class, so that recorders see each `next`."""

    def __init__(self, view: View, num_threads: int, prefetch: int, timeout: float) -> None:
        super().__init__(view)
        self._batches: Batches = view.dataset
        self._window, self._wait = max(prefetch * num_threads, 1), timeout or None
        self._ahead: deque[Future[Any]] = deque()
        self._ended = False
        self._pool = Pool(num_threads)
        # Runs when the iterator goes, and before the interpreter does.
        weakref.finalize(self, self._pool.close)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.walk = loader._walk
        self._ahead.clear()
        self._ended = False

    def _next_data(self) -> Any:
        while not self._ended and len(self._ahead) < self._window:
            try:
                keys = self._next_index()  # type: ignore[no-untyped-call]  # torch has no types for its iterators
            except StopIteration:
                self._ended = True
                break
            self._ahead.append(self._begun(keys))
        if not self._ahead:
            raise StopIteration
        self.walk.taken += 1
        try:
            data = self._ahead.popleft().result(self._wait)
        except FutureTimeout:
            raise RuntimeError(f"DataLoader timed out after {self._wait} seconds") from None
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]  # nor for this
        return data

    def _begun(self, keys: Keys) -> Future[Any]:
        """Hand a batch to the threads, a few examples at a time."""
        future: Future[Any] = Future()
        assembly = Assembly(keys, apart=self._batches.collate is not None)
        chunks = [range(k, min(k + CHUNK, len(keys))) for k in range(0, len(keys), CHUNK)]
        assembly.left = len(chunks)
        batches = self._batches
        for places in chunks:
            self._pool.put(partial(_chunk, batches, assembly, places, future))
        return future


def _chunk(batches: Batches, assembly: Assembly, places: range, future: Future[Any]) -> None:
    """Make some examples of a batch; the last chunk finishes it, the first failure ends it."""
    try:
        if not future.done():
            batches.fill(assembly, places)
        with assembly.lock:
            assembly.left -= 1
            last = assembly.left == 0
        if last and not future.done():
            future.set_result(batches.collated(assembly))
    except BaseException as error:  # whatever it is, it surfaces at the loop's next batch
        with assembly.lock:
            if not future.done():
                future.set_exception(error)


class Pool:
    """Threads that run what they are given, in order of arrival. Each uses one core: the pool is the parallelism."""

    def __init__(self, num_threads: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = False
        started = threading.Barrier(num_threads + 1)
        ours = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._run, args=(started,), name=f"headway-pipeline-{k}", daemon=True)
            for k in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        started.wait()
        torch.set_num_threads(ours)  # the threads' own setting is also what later threads would begin with

    def put(self, work: Callable[[], None]) -> None:
        """Queue something to run."""
        self._work.put(work)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after what is running now; the rest is dropped."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self, started: threading.Barrier) -> None:
        torch.set_num_threads(1)
        started.wait()
        while not self._stopped:
            work = self._work.get()
            if work is None or self._stopped:
                return
            work()
            del work  # it holds a batch


def check_draws(chain: Chain) -> None:
    """Raise `InputError` when the first example draws from a global generator: in threads nothing would key it."""
    with generators_kept():
        before = _comparable(generator_states())
        try:
            chain.run(0, 0)
        except Exception:  # the loop will meet it, and its policy
            return
        drew = _comparable(generator_states()) != before
    if drew:
        raise InputError(
            "an operator draws from random, numpy.random or torch, whose state all threads share. Declare it: "
            "map(function, random=True) hands it a generator of its own; or pass workers='processes'."
        )


def _comparable(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return generator states with their arrays as bytes."""
    python, numbers, tensor = states
    return python, [part.tobytes() if isinstance(part, np.ndarray) else part for part in numbers], tensor.tolist()


def better_workers(chain: Chain) -> str:
    """Return "threads" or "processes", whichever suits the first examples: see `lock_wait_fraction`."""
    try:
        return "processes" if lock_wait_fraction(chain) > LOCK_WAIT else "threads"
    except Exception:  # an example that fails is the loop's to meet, under its policy
        return "threads"


def lock_wait_fraction(chain: Chain, seconds: float = 0.15) -> float:
    """Return the fraction of their time that two threads wait for each other, beyond what one waits for storage.

    Waiting is wall time without CPU time and without run delay, and run delay
    is no time of theirs: so other load on the host does not count. 0 where the kernel reports no run delay.
    Takes `seconds` twice; pure Python comes out near 0.5.
    """
    chain.run(0, 0)
    alone = _waited(chain, seconds, threading.Barrier(1))
    found: list[float] = []
    failed: list[Exception] = []
    together = threading.Barrier(2)

    def measure() -> None:
        try:
            found.append(_waited(chain, seconds, together))
        except Exception as error:  # raised below, in the caller's thread
            failed.append(error)

    threads = [threading.Thread(target=measure, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(sum(found) / len(found) - alone, 0.0)


def _waited(chain: Chain, seconds: float, together: threading.Barrier) -> float:
    """Return the fraction of this thread's time in which it neither ran nor could; it runs examples for `seconds`."""
    try:
        statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        statistics = -1
    together.wait()
    try:
        delay, cpu, start = read_delay(statistics), time.thread_time_ns(), time.perf_counter_ns()
        index, wall = 0, 0
        while wall < seconds * NS_PER_S:
            chain.run(index % len(chain.source), index)
            index, wall = index + 1, time.perf_counter_ns() - start
        spent, after = time.thread_time_ns() - cpu, read_delay(statistics)
    finally:
        if statistics >= 0:
            os.close(statistics)
    if delay < 0 or after < 0:
        return 0.0
    waited = max(wall - spent - (after - delay), 0)
    return waited / max(waited + spent, 1)
