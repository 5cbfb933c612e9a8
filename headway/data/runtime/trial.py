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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from io import IOBase
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as _worker

from headway.data.runtime.aligned import out_of_sight
from headway.data.runtime.circumstances import data_of
from headway.data.runtime.examples import decode, encode, equal
from headway.data.runtime.files_read import FilesRead
from headway.data.runtime.followed_code import unfollowed
from headway.data.runtime.keyed import generator_states, set_generators
from headway.data.runtime.outcome import OfDataset, OfReading
from headway.data.runtime.own_entries import takes_more
from headway.data.runtime.portrait import portrait
from headway.data.runtime.purity import impurity
from headway.data.runtime.surroundings import PLAIN, surroundings
from headway.data.runtime.trial_child import in_child
from headway.data.runtime.visible import listen_here, noting
from headway.data.runtime.watch import Sums
from headway.runtime.reach import reached
from headway.runtime.rereading import collated
from headway.runtime.samplers import order_generators

SUMMED = "it computes {} of many numbers with {} threads of torch, and a worker's one adds them up in another order"
"""Why workers and threads are refused a dataset whose last bits depend on torch's threads."""

EXAMPLES = 2
"""Examples in the batch that is tried, at most."""


CONNECTED = ("begin", "commit", "cursor", "fileno", "recv")
"""Methods by which a connection, a database or a socket is known: one that cannot be pickled is this process's own."""


class TriedBatch:
    """A loader's first few examples, collated: item 0 is that small batch, whatever the index."""

    def __init__(self, loader: Any) -> None:
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self.indices = list(range(min(EXAMPLES, len(loader.dataset), getattr(loader.batch_sampler, "batch_size", 0))))

    def __getitem__(self, _: int) -> Any:
        """Return the batch."""
        return collated(self.dataset, self.collate_fn, self.indices or 0, batched=bool(self.indices))


def unfit(loader: Any, *, may_draw: bool = False, starts: bool = False) -> tuple[str | None, int]:
    """Say why a loader's batches may not be made by (more) workers, or None; and the bytes of the batch tried.

    This process never reads the dataset, which may count its readings where nobody sees it: children do, apart from
    it. One reads as this process would, another as a worker would. `may_draw` as in `impurity`. With `starts` a worker
    calls the loader's `worker_init_fn` first.
    """
    batches, generators = TriedBatch(loader), order_generators(loader)
    if loader.num_workers:
        return _unfit_for_others(loader, batches, generators, may_draw=may_draw)
    parent, states = os.getpid(), generator_states()  # where both children begin: equal draws
    num_threads = torch.get_num_threads()

    def as_this_process() -> tuple[str | None, Any]:
        os.getpid = lambda: parent
        before = positions()
        # Before anything is read: another process, which a dataset may ask, could be asked by this child.
        finding = out_of_sight(loader.dataset, loader.collate_fn)
        finding = finding or handle(loader.dataset) or handle(loader.collate_fn) or _keeps_a_file(loader, batches)
        finding = finding or impurity(batches, [0], generators, may_draw=may_draw, fresh=True)
        finding = finding or handle(loader.dataset) or _moved(before) or _remembers(loader, batches)
        finding = finding or _collects(loader, batches)
        finding = finding or unfollowed((loader.dataset, loader.collate_fn), lambda: _read_both_ends(loader, batches))
        set_generators(states)
        return finding, b"" if finding else encode(batches[0])

    def as_a_worker() -> tuple[str | None, Any]:
        pretend_worker(loader)
        if starts:
            loader.worker_init_fn(0)
        listen_here()
        with noting() as acts, Sums() as sums:
            batch = encode(batches[0])
        if num_threads > 1 and sums.operator:
            return OfReading(SUMMED.format(sums.operator, num_threads)), b""
        return (OfDataset(f"reading it {acts[0]}") if acts else None), batch

    finding, here = in_child(lambda: with_threads(num_threads, as_this_process))
    finding = finding or _sets_by_example(loader, batches)
    if finding is not None:
        return finding, 0
    finding, there = in_child(as_a_worker, follows=False)
    if finding is None:
        finding = takes_more(loader.dataset)
    if finding is not None:
        return finding if isinstance(finding, OfReading) else f"in a worker, {finding}", 0
    same = equal(decode(there), decode(here))
    return (None if same else "in a worker, it reads something else"), len(here)


def _read_both_ends(loader: Any, batches: TriedBatch) -> None:
    """Read the first examples, and the last one, which may raise as it would in the script's own process."""
    batches[0]
    with contextlib.suppress(Exception):
        loader.dataset[len(loader.dataset) - 1]


def read_here(loader: Any) -> None:
    """Read the first examples in this process, after `unfit` has found nothing; raises what reading them raises.

    What the first reading of all sets once, such as a mean, is then what the script's own first reading would have set,
    at the same time. Workers that are forked later have it too, and so has this process where it goes on without them.
    """
    states = generator_states()
    try:
        TriedBatch(loader)[0]
    finally:
        set_generators(states)


def with_threads(num_threads: int, work: Callable[[], tuple[str | None, Any]]) -> tuple[str | None, Any]:
    """Return what `work` returns with so many intra-op threads, in a child that was forked; raises what it raises.

    A sum over many numbers differs in its last bits with how many threads share it. Those of the thread that forked
    are gone in the child, where it would wait for them: a new thread gets new ones.
    """
    if num_threads == 1:
        return work()
    found: Future[tuple[str | None, Any]] = Future()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def working() -> None:
        torch.set_num_threads(num_threads)
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                found.set_result(work())
        except BaseException as failure:  # whatever it is, the caller waits for it
            found.set_exception(failure)

    threading.Thread(target=copy_context().run, args=(working,)).start()
    return found.result()


def _unfit_for_others(
    loader: Any, batches: TriedBatch, generators: list[Any], *, may_draw: bool
) -> tuple[str | None, int]:
    """Say why the batches of the script's own workers may not be made by other ones, or None; and their bytes.

    One child is the first of the workers that there are, another one the last of one worker more.
    """
    states, read = generator_states(), (loader.dataset, loader.collate_fn)

    def as_worker(number: int, num_workers: int) -> tuple[str | None, Any]:
        be_worker(_worker.WorkerInfo(id=number, num_workers=num_workers, seed=0, dataset=loader.dataset))
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(number)
        set_generators(states)  # what an example draws is another question: that of `may_draw`
        finding = impurity(batches, [0], generators, may_draw=may_draw)
        finding = finding or unfollowed((*read, loader.worker_init_fn), lambda: _read_both_ends(loader, batches))
        before, _ = surroundings(read), batches[0]
        if finding is None and surroundings(read) != before:
            finding = "reading it changes a variable, and each worker has its own"
        set_generators(states)
        return finding, b"" if finding else encode(batches[0])

    finding, first = in_child(lambda: as_worker(0, loader.num_workers))
    if finding is not None:
        return finding, 0
    finding, last = in_child(lambda: as_worker(loader.num_workers, loader.num_workers + 1), follows=False)
    if finding is not None:
        return finding, 0
    same = equal(decode(last), decode(first))
    return (None if same else "what is read depends on the worker that reads it"), len(first)


def _keeps_a_file(loader: Any, batches: TriedBatch) -> str | None:
    """Say that only the first reading opens a file, and that the dataset keeps what was in it; None if not.

    Each worker, and this process where it goes on without them, would open it at a moment of its own.
    """
    files, read, states = FilesRead(), (loader.dataset, loader.collate_fn), generator_states()
    before = left_by_readings(read)
    with files.noting() as first:
        batches[0]
    set_generators(states)
    if not first or left_by_readings(read) == before:
        return None
    with files.noting() as second:
        batches[0]
    set_generators(states)
    once = first.keys() - second.keys()
    if not once:
        return None
    return handle(loader.dataset) or f"it keeps what it read first in {min(once)}: workers would read that later"


def _sets_by_example(loader: Any, batches: TriedBatch) -> str | None:
    """Say that what the first reading of all sets depends on which example that is; None if not.

    The script reads in an order of its own, so that another example comes first there than in `read_here`.
    """
    read, last, parent = (loader.dataset, loader.collate_fn), len(loader.dataset) - 1, os.getpid()

    def left_by(indices: Any) -> tuple[str | None, object]:
        def reading() -> tuple[None, str]:
            os.getpid = lambda: parent
            if indices is not None:
                collated(*read, indices, batched=isinstance(indices, list))
            settings = [value for value, by_code in reached(*read) if by_code and isinstance(value, PLAIN)]
            return None, portrait([*read, settings])

        return in_child(reading, follows=False)

    finding, first = left_by(batches.indices or 0)
    if finding is not None or first == left_by(None)[1]:
        return finding
    same = first == left_by([last] if batches.indices else last)[1]
    return None if same else "what its first reading sets depends on the example that is read"


def _collects(loader: Any, batches: TriedBatch) -> str | None:
    """Say that the reading of another example leaves more behind, or None.

    Each worker process would collect its own part. Threads share it, but read ahead: what they keep is made of what
    examples are made of now, and the loop may change that before it comes to them.
    """
    read, last = (loader.dataset, loader.collate_fn), len(loader.dataset) - 1
    if last in (batches.indices or [0]):
        return None
    before = data_of(read)
    with contextlib.suppress(Exception):  # as it would raise in the script's own process
        loader.dataset[last]
    return "it keeps something of each example that it reads" if data_of(read) != before else None


def keeps(loader: Any) -> str | None:
    """Say that reading leaves something behind in a worker, which another pass would find there; None if not."""

    def left() -> tuple[str | None, int]:
        read, batches = (loader.dataset, loader.collate_fn), TriedBatch(loader)
        before = left_by_readings(read)
        batches[0]
        same = before == left_by_readings(read)
        return (None if same else "its workers keep what they read: each pass starts others"), 0

    return in_child(left, follows=False)[0]


def left_by_readings(read: Any) -> object:
    """Return a picture of what readings may leave behind: of all that `read` goes by, and of caches of functions.

    What was found in a cache says nothing of another pass: only what was not.
    """
    caches = [value.cache_info()[1:] for value, _ in reached(read) if hasattr(value, "cache_info")]
    return surroundings(read), caches


def _remembers(loader: Any, batches: TriedBatch) -> str | None:
    """Say that reading sets a variable or an attribute of a class, or moves an iterator or a file on; None if not."""
    read = loader.dataset, loader.collate_fn
    if (finding := out_of_sight(*read)) is not None:
        return finding
    for value, by_code in reached(*read):
        if isinstance(value, IOBase):
            if _is_open_file(value):
                return "it gets at an open file, whose position processes share"
        elif isinstance(value, Iterator):
            return f"it gets at an iterator ({type(value).__name__}), which each reading may move on"
        elif by_code and _is_connection(value):
            return f"it gets at a {type(value).__name__}, which no other process can use"
    before, _ = data_of(read), batches[0]
    return "reading it changes a variable outside of it" if data_of(read) != before else None


def _is_connection(value: Any) -> bool:
    """Say whether an object stands for something outside of Python that its copy in another process would not have."""
    if isinstance(value, (*PLAIN, type, FunctionType, ModuleType, IOBase)):
        return False
    return any(hasattr(type(value), name) for name in CONNECTED) and handle(value) is not None


def _is_open_file(value: IOBase) -> bool:
    """Say whether a file object reads a file of its own: not the script's standard input or output, or memory."""
    try:
        return not value.closed and value.readable() and value.fileno() > 2
    except (OSError, ValueError):
        return False


def pretend_worker(loader: Any, number: int = 0) -> None:
    """Have `torch.utils.data.get_worker_info` say what it says in the first of two workers, or in the second."""
    be_worker(_worker.WorkerInfo(id=number, num_workers=2, seed=0, dataset=loader.dataset))


def be_worker(information: _worker.WorkerInfo) -> None:
    """In a child that stepped apart: be the worker that `information` says, as far as a dataset can tell.

    Collating in a worker takes shared memory, for the way back, which such a child cannot have.
    """
    private = classmethod(lambda cls, size, *, device="cpu": cls(size, device=device))
    setattr(torch.UntypedStorage, "_new_shared", private)  # noqa: B010 - an assignment would not be its type
    _worker._worker_info = information


def _moved(before: dict[str, tuple[str, str]]) -> str | None:
    """Say that the readings since `before` moved in an open file, or left one open; None if not."""
    if not positions().items() - before.items():
        return None
    return "reading it moves in a file that stays open, and workers would share its position"


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


def positions() -> dict[str, tuple[str, str]]:
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
