"""Read a loader's first batch the way a worker would, before workers are relied on.

Whether a process of its own may make the batches of a script is decided by what happens, not by what code says: two
forked children read the first examples, and the rules that refuse are few.

    child 1, as the training process    the first batch twice, then the last example: equal? any random number drawn?
                                        anything changed but what the first reading opened or computed once and for all?
    child 2, as a worker                the first batch once: equal to the first child's? anything printed or sent?

A file, a connection or an environment that is open before the workers are forked would be shared by all of them; one
that the first reading in each process opens is not.

Trials of a user's code in a forked child, which can only read: what it is asked, how long it may take.

>>> in_child(lambda: ("it draws", 7))
('it draws', 7)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as _worker

from headway.core.machine.child import said
from headway.core.machine.host import mapped_memory
from headway.core.machine.interruptions import suppress_own
from headway.data.bytes.torch_examples import decode, encode, equal, lost_in_copy
from headway.data.bytes.torch_keyed import generator_states, set_generators
from headway.data.guard.files_read import FilesRead, FileStat, noted
from headway.data.guard.outcome import OfDataset, OfReading
from headway.data.guard.picture import OPEN, Picture, data_of
from headway.data.guard.purity import SEEDED, impurity
from headway.data.guard.watch import Sums, listen_here, noting
from headway.runtime.host.host_memory import address_limit
from headway.runtime.recorder.rereading import collated
from headway.runtime.script.draws import drawn, fingerprints, order_generators, own_generators
from headway.runtime.script.run_delay import read_delay

# Trials of a user's code in a forked child, which can only read: what it is asked, how long it may take.

TIMEOUT_S = 60.0
"""A child that has not answered by then hangs, as a worker would, where the caller gives it no other limit."""

ENDS = {-signal.SIGSEGV: "reading it writes to memory that processes share, or crashes in a forked one"}
"""How a child ends -> what that says of the dataset."""


@dataclass(slots=True)
class Limit:
    """How long each child of one decision may take."""

    seconds: float = TIMEOUT_S
    reached: bool = False
    """Whether a child has not answered by then."""


_LIMIT: ContextVar[Limit | None] = ContextVar("headway_limit", default=None)
"""The limit of the decision that this thread is taking."""

waited_ns = [0]
"""[1] How long the children of `in_child` have waited for a core so far: other load on the host, or a low priority."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[Limit]:
    """Give each child that `in_child` forks in this block so many seconds; the limit tells whether one took them all.

    >>> with limited(0.2) as limit:
    ...     in_child(signal.pause)[0], limit.reached
    ('reading an example in a forked process took over 0.2 s: it waits for a lock of another thread, or hangs', True)
    """
    limit = Limit(seconds)
    token = _LIMIT.set(limit)
    try:
        yield limit
    finally:
        _LIMIT.reset(token)


def in_child(
    work: Callable[[], tuple[str | None, Any]], timeout_s: float | None = None, *, lose_writes: bool = False
) -> tuple[str | None, Any]:
    """Return what `work` returns in a forked child with one intra-op thread; (reason, 0) when it fails there.

    It fails as well when it takes longer than `timeout_s`, by default what `limited` says. The child can only read
    (`core.machine.apart`): neither this process nor the files of the script notice it. A write to shared memory is a
    reason, or is lost with the child.
    """

    def answered() -> bytes:
        torch.set_num_threads(1)
        # What is imported now may ask for it (torch's compiler does), and trying folders out writes to them.
        tempfile.tempdir = tempfile.tempdir or "/tmp"
        try:
            answer: tuple[Any, ...] = *work(), run_delay_ns()
        except Exception as failure:
            answer = f"reading an example in a forked process raised {type(failure).__name__}: {failure}", 0, -1
        return pickle.dumps(answer)

    if (limited_to := address_limit()) is not None:  # nothing that is tried here may be applied then
        return limited_to, 0
    limit = _LIMIT.get() or Limit()
    seconds, began = limit.seconds if timeout_s is None else timeout_s, monotonic()
    try:
        answered_bytes, code = said(answered, seconds, apart="lose writes" if lose_writes else "end at writes")
        answer = pickle.loads(answered_bytes)
    except Exception:
        took = monotonic() - began >= seconds
        limit.reached = limit.reached or took
        reason = f"reading an example ended the forked process that tried it ({code})"
        if took:
            reason = f"reading an example in a forked process took over {seconds:g} s: "
            reason += "it waits for a lock of another thread, or hangs"
        answer = ENDS.get(code, reason), 0
    else:
        waited_ns[0] += max(answer[2], 0)
    return answer[0], answer[1]


def run_delay_ns() -> int:
    """Return how long this process's first thread has waited for a core, -1 if unknown.

    Not by `open_schedstat`, which goes by `os.getpid`: in a child that reads as its parent would, that is the parent's.
    """
    try:
        descriptor = os.open("/proc/self/schedstat", os.O_RDONLY)
    except OSError:
        return -1
    try:
        return read_delay(descriptor)
    finally:
        os.close(descriptor)


SUMMED = "it computes {} of many numbers with {} threads of torch, and a worker's one adds them up in another order"
"""Why workers and threads are refused a dataset whose last bits depend on torch's threads."""

EXAMPLES = 2
"""Examples in the batch that is tried, at most."""


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
    it. `may_draw` as in `impurity`. With `starts` a worker calls the loader's `worker_init_fn` first.
    """
    batches, generators = TriedBatch(loader), order_generators(loader)
    if loader.num_workers:
        return _unfit_for_others(loader, batches, generators, may_draw=may_draw)
    parent, states = os.getpid(), generator_states()  # where both children begin: equal draws
    num_threads = torch.get_num_threads()

    def as_this_process() -> tuple[str | None, Any]:
        os.getpid = lambda: parent
        before = positions()
        finding = Picture(loader.dataset, loader.collate_fn).open_handle
        finding = finding or impurity(batches, [0], generators, may_draw=may_draw, fresh=True)
        finding = finding or _moved(before) or _leaves(loader, batches)
        set_generators(states)
        return finding, b"" if finding else encode(batches[0])

    def as_a_worker() -> tuple[str | None, Any]:
        set_generators(states)  # Python seeds `random` anew in every forked process
        pretend_worker(loader)
        if starts:
            loader.worker_init_fn(0)
        listen_here()
        with noting() as acts, Sums() as sums:
            made = batches[0]
            lost, batch = lost_in_copy(made), encode(made)
        if lost is not None:
            return OfReading(f"another process cannot hand its batches over: {lost}"), b""
        if num_threads > 1 and sums.operator:
            return OfReading(SUMMED.format(sums.operator, num_threads)), b""
        return (OfDataset(f"reading it {acts[0]}") if acts else None), batch

    finding, here = in_child(lambda: with_threads(num_threads, as_this_process))
    if finding is not None:
        return finding, 0
    finding, there = in_child(as_a_worker)
    if finding is not None:
        return finding if isinstance(finding, OfReading) else f"in a worker, {finding}", 0
    same = equal(decode(there), decode(here))
    return (None if same else "in a worker, it reads something else"), len(here)


def read_here(loader: Any) -> None:
    """Read the first examples in this process, after `unfit` has found nothing and the workers were forked.

    What the first reading opens or computes, a script finds in its dataset afterwards, to close a file for example.
    Workers that were forked before have none of it.
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
        before, _ = Picture(read).state, batches[0]
        if finding is None and Picture(read).state != before:
            finding = "reading it changes a variable, and each worker has its own"
        set_generators(states)
        return finding, b"" if finding else encode(batches[0])

    finding, first = in_child(lambda: as_worker(0, loader.num_workers))
    if finding is not None:
        return finding, 0
    finding, last = in_child(lambda: as_worker(loader.num_workers, loader.num_workers + 1))
    if finding is not None:
        return finding, 0
    same = equal(decode(last), decode(first))
    return (None if same else "what is read depends on the worker that reads it"), len(first)


def keeps(loader: Any, *, may_draw: bool = False) -> tuple[str | None, Mapping[str, FileStat]]:
    """Say that workers may not be kept for another pass, or None; and the files that a first reading goes by.

    What the first reading of a worker opens or computes stays for the next pass, where fresh workers would do it anew:
    with the same result, as long as these files and what the training process holds (`outside`) are as they were.
    A further reading may leave nothing, and the first one may ask no other process. Workers draw from generators that
    torch seeds anew in each pass: with `may_draw` they need not.
    """

    def behind() -> object:
        """Return what readings leave behind: of calls of a function that remembers, those that it had to compute."""
        now = Picture(loader.dataset, loader.collate_fn)
        return now.state, [memo[1:] for memo in now.memos]

    def left() -> tuple[str | None, Mapping[str, FileStat]]:
        batches, files, bare, before = TriedBatch(loader), FilesRead(looks=True), behind(), _open_files()
        listen_here()
        if loader.num_workers:
            be_worker(_worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=0, dataset=loader.dataset))
        with files.noting() as noted_files, noting() as acts:
            if loader.num_workers and loader.worker_init_fn is not None:
                loader.worker_init_fn(0)
            batches[0]
        opened = {**{path: noted(path) for path in _open_files() - before}, **noted_files}
        first = behind()
        finding = impurity(batches, [0], order_generators(loader), may_draw=may_draw)
        if finding is not None:
            return finding, {}
        with suppress_own():  # as it would raise in the script's own process
            loader.dataset[len(loader.dataset) - 1]
        if behind() != first:
            return "its workers keep what they read: each pass starts others", {}
        if acts and first != bare:
            return f"its first reading {acts[0]}: each pass starts other workers", {}
        return None, opened

    reason, files = in_child(left)
    return reason, files or {}


def _open_files() -> set[str]:
    """Return the files that this process has open for reading, or maps: native readers open some that nobody noted."""
    paths = {path for path, _ in positions().values()}
    with contextlib.suppress(OSError):
        paths |= {row.path for row in mapped_memory()}
    return {path for path in paths if path.startswith("/")}


def _leaves(loader: Any, batches: TriedBatch) -> str | None:
    """Say that a reading after the first one changes something, or None: each worker would change its own copy.

    What the first reading of all opens or computes is a handle or a memo, which each worker may have for itself.
    """
    read, last = (loader.dataset, loader.collate_fn), len(loader.dataset) - 1

    def state() -> tuple[object, list[int]]:
        now = Picture(read)
        return data_of(read, now), [memo.currsize for memo in now.memos]

    before = state()
    batches[0]
    if data_of(read) != before[0]:
        return "reading it changes a variable that workers would not share"
    if last in (batches.indices or [0]):
        return None
    with suppress_own():  # as it would raise in the script's own process
        loader.dataset[last]
    return None if state() == before else "it keeps something of each example that it reads"


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
    """Say that the readings since `before` moved in a file that was open then; None if not."""
    after = positions()
    moved = [
        path
        for name, (path, position) in before.items()
        if after.get(name, ("", ""))[0] == path and after[name][1] != position
    ]
    return OfDataset(OPEN.format(moved[0])) if moved else None


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


# Does a worker_init_fn that never ran do more than seed? Run in a forked child, as the first worker would run it.
#
# One that only seeds (transformers' `seed_worker`) changes no example of a dataset that draws nothing, so it may run in
# the workers of a loader that was made without any.


def beside_seeding(loader: DataLoader[Any]) -> str | None:
    """Say what the loader's `worker_init_fn` changes beside the generators that torch seeds in workers, or None."""

    def started() -> tuple[str | None, int]:
        pretend_worker(loader)
        assert loader.worker_init_fn is not None
        own = own_generators(loader.dataset, loader.collate_fn, loader.worker_init_fn)
        generators, before = fingerprints(own), _state(loader)
        loader.worker_init_fn(0)
        moved = sorted({*drawn(generators, fingerprints(own))} - SEEDED)
        changed = [*moved, *(name for name, value in _state(loader).items() if value != before[name])]
        return (f"it changes more than seeds ({', '.join(changed)})" if changed else None), 0

    return in_child(started)[0]


def _state(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what the examples of a worker may depend on, beside generators: name in words -> something comparable."""
    return {
        "the dataset": Picture(loader.dataset).state,
        "the collate function": Picture(loader.collate_fn).state,
        "environment variables": dict(os.environ),
        "the working folder": os.getcwd(),
        "torch's defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "open files": positions(),
    }


def start_method(loader: DataLoader[object]) -> str:
    """Return how a loader's workers start, or would; asking Python for its default would settle it for the script."""
    context, known = loader.multiprocessing_context, multiprocessing.get_start_method(allow_none=True)
    return context.get_start_method() if context is not None else known or multiprocessing.get_all_start_methods()[0]
