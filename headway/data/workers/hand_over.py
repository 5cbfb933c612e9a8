"""How a worker hands a batch to the training process: packed where it is made, so that whatever fails fails there.

torch packs a batch in the thread that feeds a queue, where a failure is printed, and the training process waits for
ever. Batches of less than a megabyte travel as bytes: that takes neither shared memory nor an open file, of which a
loop that keeps its batches would need one per tensor, nor the worker's help. Larger ones travel through shared memory,
as torch's own do, and for each tensor the training process asks the worker for the open file: a thread there answers
three messages, each when it gets Python's lock and a core, which the load that the worker is at does not give up at
once. Beside two workers on two cores that took 3.3 ms of a batch of 200 KB; as bytes in a pipe with room for it, .8.

    worker                                                training process
    fetch -> packed(batch): PickledBatch(bytes, shared) ── queue ──> PickledBatch.batch()
         \\-> any failure:   Unmade(reason)              ── queue ──> the batch is read there
"""

from __future__ import annotations

import copy
import fcntl
import io
import multiprocessing.process
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import util
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import ManagerWatchdog
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from headway.data.bytes import account
from headway.data.bytes.torch_examples import encode_plain, lost_in_copy
from headway.data.bytes.torch_keyed import set_generators
from headway.data.guard.files_read import FILE, FilesRead, FileStat, changed, written_since
from headway.data.guard.outcome import OfDataset
from headway.data.guard.picture import BatchEntries, data_of
from headway.data.guard.process_state import Looks
from headway.data.guard.watch import GeneratorWatch, listen_here, noting
from headway.data.loader.read_ahead import pass_restorer
from headway.data.loader.views import View

SMALL_BYTES = 15 << 16
"""A batch of no more bytes travels through the queue itself."""

PIPE_BYTES = 1 << 20
"""What the queue's pipe holds: what Linux allows everybody by default. A batch that waits there needs no worker."""

OPEN_FRACTION = 0.25
"""Where more than this fraction of the files that may be open are, batches are copied out of shared memory."""


CHANGES = "reading a batch changes what the dataset goes by"
"""Why a batch is not handed over: the script would not find the change, and other workers not either."""


@dataclass(frozen=True, slots=True)
class Unmade:
    """What a worker hands over in place of a batch that it could not make, or may not."""

    reason: str


@dataclass(frozen=True, slots=True)
class PinnedBatch:
    """A batch in pinned memory."""

    value: Any
    files: Mapping[str, FileStat] = field(default_factory=dict)
    entries: list[object] = field(default_factory=list)

    def batch(self) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True)
class PickledBatch:
    """A batch on its way."""

    payload: bytes
    shared: bool
    """Whether its tensors are in shared memory."""
    files: Mapping[str, FileStat] = field(default_factory=dict)
    """What it was read from, as that was."""
    entries: list[object] = field(default_factory=list)
    """What stands for its entries in large containers of the dataset (`aligned`)."""

    def batch(self) -> Any:
        """Return the batch: once."""
        batch = pickle.loads(self.payload)
        return copy.deepcopy(batch) if self.shared and _is_crowded() else batch

    def pin_memory(self) -> PinnedBatch:
        """Return it in pinned memory; torch's thread for that asks."""
        return PinnedBatch(pin_memory(pickle.loads(self.payload)), self.files, self.entries)  # type: ignore[no-untyped-call]  # torch has no types for it


def outdated(batch: PickledBatch | PinnedBatch) -> str | None:
    """Say which file the script has written since a batch was read from it, None when none was."""
    path = changed(batch.files)
    return path and OfDataset(FILE.format(path))


def packed(batch: Any) -> PickledBatch:
    """Pack a batch; raises whatever its parts raise when they cannot be handed to another process."""
    small = encode_plain(batch, SMALL_BYTES)
    if small is not None:
        return PickledBatch(small, shared=False)
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(batch)
    return PickledBatch(buffer.getvalue(), shared=True)


def make_room(queue: Any) -> None:
    """Let the pipe of a queue of batches hold a whole one, where the system allows it."""
    with suppress(OSError):
        fcntl.fcntl(queue._writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _is_crowded() -> bool:
    """Tell whether this process has many files open, for what it may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return False
    return len(os.listdir("/proc/self/fd")) > OPEN_FRACTION * limit


@dataclass(frozen=True, slots=True)
class WorkerBegins:
    """What a worker of a loader whose script has none does first, as its `worker_init_fn`.

    From then on, code in it finds what it would find in the training process: no worker information, the same
    generators. A batch that draws from them, prints, logs, changes files or what the dataset goes by, or fails, is not
    made here.
    """

    states: tuple[Any, ...] | None
    """Where the generators of the training process were; None where the worker may draw from its own."""
    looks_at_each: bool = False
    """Whether it is looked at what each batch leaves behind, however long that takes."""
    began_ns: int = field(default_factory=time.time_ns)
    """When the workers were started: no file that they read may be newer."""
    process_name: str = field(default_factory=lambda: multiprocessing.current_process().name)
    """What multiprocessing calls the training process."""
    training_process: int = field(default_factory=os.getpid)
    """Its number."""

    def __call__(self, worker: int) -> None:
        """Prepare this process, which is number `worker`."""
        account.loads_as(worker)  # torch's own word for it is hidden from here on
        by_server = isinstance(multiprocessing.current_process(), ForkServerProcess)  # which ends with that process
        parent = os.getppid() if by_server else self.training_process
        util.Finalize(None, _drop_batches, args=(parent,), exitpriority=FIRST_OF_ALL)
        torch_worker.ManagerWatchdog = partial(_watch, parent)  # type: ignore[misc, assignment]  # in this process only
        information, torch_worker._worker_info = torch_worker._worker_info, None
        multiprocessing.current_process().name = self.process_name
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # its stub does not have it
        if self.states is not None:
            _drop_handlers()
            set_generators(self.states)
            output = os.memfd_create("headway-output")  # what is printed ahead of the loop is for nobody to see
            os.dup2(output, 1)
            os.close(output)
        packing = _packing(_MapDatasetFetcher.fetch, self, getattr(information, "dataset", None))
        _MapDatasetFetcher.fetch = packing  # type: ignore[method-assign]  # one of torch's own, in this process only


FIRST_OF_ALL = 100
"""Priority at the end of a process: above those of multiprocessing's own, of which one joins the thread of a queue."""


def _watch(parent: int) -> ManagerWatchdog:
    """Return torch's watch over the process that started a worker.

    torch asks the system who that is, which in a worker that begins after the training process was killed names
    another, and the worker waits for ever.
    """
    watchdog = ManagerWatchdog()
    watchdog.manager_pid = parent
    return watchdog


def _drop_batches(parent: int) -> None:
    """Where the training process is gone, do not wait until it has taken what is queued: a full pipe stays full."""
    if os.getppid() != parent:
        for last in [*util._finalizer_registry.values()]:  # type: ignore[attr-defined]  # its stub does not have it
            if last._callback is Queue._finalize_join:  # type: ignore[attr-defined]  # nor this
                last.cancel()


def _drop_handlers() -> None:
    """Take the script's signal handlers from this process: a signal to its group is the training process's to handle.

    What would end a process still does.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_default = number in (signal.SIGTERM, signal.SIGCHLD)
            signal.signal(number, signal.SIG_DFL if is_default else signal.SIG_IGN)


def _packing(
    fetch: Callable[[Any, Any], Any], begins: WorkerBegins, dataset: Any
) -> Callable[[Any, Any], PickledBatch | Unmade]:
    """Wrap the function of a worker that makes batches: it returns one packed, or why there is none.

    `dataset` is the script's: in front of the one that a fetcher reads may be a cache, whose entries are no change.
    """
    aligned = BatchEntries(dataset)
    watch: GeneratorWatch | None = None
    data: Any = None
    looks = Looks(passes=2, each_batch=begins.looks_at_each)  # a worker does not know of passes
    files = FilesRead(looks=True)
    listen_here()

    def as_before(read: object) -> bool:
        """Say whether what batches are read from is as it was behind the batch that was looked at last."""
        nonlocal data
        data, before = data_of(read), data
        return before is None or data == before

    def read(fetcher: Any, index: Any) -> list[Any] | Unmade:
        """Return a list of one batch, to which nothing else refers, or why it may not be handed over."""
        nonlocal watch
        if begins.states is None:
            return [fetch(fetcher, index)]
        watch = watch or GeneratorWatch((dataset, fetcher.collate_fn))
        printed = os.fstat(1).st_size
        reading = watch.around(lambda: fetch(fetcher, index), alone=True)
        sys.stdout.flush()
        if os.fstat(1).st_size != printed:
            return Unmade(OfDataset("reading a batch prints"))
        # What the first reading of all opens, or computes once and for all, each worker has for itself.
        if not looks.are_alike((dataset, fetcher.collate_fn), lambda: as_before((dataset, fetcher.collate_fn))):
            return Unmade(OfDataset(CHANGES))
        return [reading.value] if reading.drew is False else Unmade(OfDataset("a batch draws random numbers"))

    def packing(fetcher: Any, index: Any) -> PickledBatch | Unmade:
        acts: list[str] = []
        try:
            unseen = nullcontext(acts) if begins.states is None else noting(ahead=True)
            with files.noting() as noted, unseen as acts:  # not around packing: there torch opens files of its own
                made = read(fetcher, index)
            if isinstance(made, Unmade):
                return made
            if acts:
                return Unmade(OfDataset(f"reading a batch {acts[0]}"))
            if (path := written_since(noted, begins.began_ns)) is not None:
                return Unmade(OfDataset(FILE.format(path)))
            if begins.states is not None and (lost := lost_in_copy(made[0])) is not None:
                return Unmade(f"a batch cannot be handed over by another process: {lost}")
            entries = aligned.of(index if isinstance(index, list) else [index])
            return replace(packed(made[0]), files=noted, entries=entries)
        except BaseException as failure:  # whatever it is, the training process meets it where the script would
            if acts:
                return Unmade(OfDataset(f"reading a batch {acts[0]}"))
            return Unmade(f"a batch raised {type(failure).__name__}")

    return packing


# The rest of a pass, read in the training process: what an iterator does that cannot read ahead any more.

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


def not_started(what: str, error: Exception) -> str:
    """Return why a pass has no workers, or threads: they cannot be started, or those that were kept are gone."""
    if isinstance(error, UnmadeError):
        return error.reason
    return f"its {what} could not be started: {type(error).__name__}: {error}"
