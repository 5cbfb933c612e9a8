"""Collectives in launch order, on one thread and a process group of their own.

Use it where a step of communication follows another one: reduce a bucket in
slices, then gather the slices. A DDP hook that launches the second collective
in `then()` of the first mixes buckets up: callbacks run in the order in which
collectives end, which differs between ranks.

            hook, rank 0             hook, rank 1
    A  |==reduce==|gather|      |==reduce==|......|gather|      gather of A on rank 0
    B  |====reduce====|gather|  |=reduce=|gather|               meets gather of B on rank 1

    lane, every rank:  |reduce A|gather A|reduce B|gather B|

Work is a function of the group that calls collectives as long as it likes and
returns a value; the futures are torch's, as a communication hook returns them:

    lane = CollectiveLane(separate_group("headway-compression"))

    def hook(state, bucket):
        return lane.submit(lambda group: reduced(bucket.buffer(), group))

A group can be created only by all of its ranks together, so `separate_group`
first makes sure that all of them ask for it, and for the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

from headway.core.errors import BackgroundError, Closing, InputError
from headway.core.machine.worker import BackgroundWorker

T = TypeVar("T")

Work = Callable[[dist.ProcessGroup], T]
"""Calls collectives of a group, and returns what its future gives."""

# torch 2.13 renamed them, and warns of the old names.
GATHERED = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTERED = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

POLL_S = 0.005

LONGEST_S = 1800.0
"""How long ranks wait by default for each other before a group is made: as long as torch's collectives do."""


class CollectiveLane(Closing):
    """Runs work with a group, one piece after the other; all ranks submit the same pieces in the same order.

    Close it, or use it in a `with` block. When a piece fails, its future and those of all pieces behind it get the
    error, and later calls raise `BackgroundError`.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device | None = None, capacity: int = 256) -> None:
        """Start the thread; `group` is closed with the lane. `device`, where tensors are on one: there the work waits
        for what its submitter has launched, and whoever waits for a future waits for the work."""
        self.group = group
        self._device = device
        self._stream = None if device is None else torch.Stream(device)
        self._lock = Lock()
        self._pending: list[Future[Any]] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._worker: BackgroundWorker[tuple[Work[Any], Future[Any], torch.Event | None]] = BackgroundWorker(
            self._run, capacity=capacity, name="headway-lane"
        )

    def submit(self, work: Work[T]) -> Future[T]:
        """Queue `work(group)` and return the future of its value. A full queue blocks.

        Raises `BackgroundError` if earlier work failed, `InputError` after `close`.
        """
        future: Future[T] = Future(devices=None if self._device is None else [self._device])
        ready = None
        if self._device is not None:
            ready = torch.Event(self._device)
            ready.record(torch.accelerator.current_stream(self._device))
        with self._lock:
            if self._failure is not None:
                raise BackgroundError(f"{_words(self._failure)} Make a new lane.") from self._failure
            self._pending.append(future)
        try:
            self._worker.put((work, future, ready))
        except BaseException:
            with self._lock:
                if future in self._pending:
                    self._pending.remove(future)
            raise
        return future

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for all work, `timeout_s` at most, and give the group up; closing again does nothing.

        Raises `BackgroundError` where work failed or is not done in time.
        """
        self._worker.close(timeout_s)
        if not self._closed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._closed = True

    def _run(self, entry: tuple[Work[Any], Future[Any], torch.Event | None]) -> None:
        """Do one piece of work and complete its future; on failure all that wait get the error."""
        work, future, ready = entry
        try:
            if self._device is not None and self._stream is not None and ready is not None:
                torch.accelerator.set_device_index(self._device)
                torch.accelerator.set_stream(self._stream)
                self._stream.wait_event(ready)
            value = work(self.group)
        except BaseException as error:
            with self._lock:
                self._failure = error
                waiting, self._pending = self._pending, []
            for each in waiting:
                # torch takes an Exception only, and SystemExit of the work is none.
                own = error if each is future and isinstance(error, Exception) else BackgroundError(_words(error))
                each.set_exception(own)
            raise
        with self._lock:
            self._pending.remove(future)
        future.set_result(value)


def separate_group(
    name: str, *, ranks: Sequence[int] | None = None, backend: str | None = None, timeout_s: float = LONGEST_S,
    connect_s: float | None = None, watch: Callable[[], None] = lambda: None,
) -> dist.ProcessGroup:  # fmt: skip
    """Return a new group over `ranks` (all by default), which nothing else uses; each of them calls this.

    A rank's n-th call for the same ranks meets the n-th calls of the others: they must ask for the same `name`, or
    all get an `InputError`. Raises `BackgroundError` with the missing ranks where not all ask within `timeout_s`,
    `InputError` without a process group, or where this rank is not one of `ranks`. Ranks that have asked may take
    `connect_s` to connect, else torch's `RuntimeError`; that is the timeout of the group, torch's own if not given.
    `watch` is called while ranks are awaited, and may raise: then this rank does not ask any more.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(f"there is no process group to make {name!r} from. Call init_process_group() first.")
    rank, members = dist.get_rank(), sorted(range(dist.get_world_size()) if ranks is None else set(ranks))
    if rank not in members or members[-1] >= dist.get_world_size():
        raise InputError(f"rank {rank} asks for group {name!r} of ranks {members}; call it on those ranks only.")
    store: Any = _get_default_store()
    prefix = f"headway/groups/{'all' if ranks is None else '-'.join(map(str, members))}"
    prefix += f"/{store.add(f'{prefix}/calls-{rank}', 1)}"
    store.set(f"{prefix}/{rank}", name)
    until, missing = time.monotonic() + timeout_s, members
    try:
        while missing := [other for other in missing if not store.check([f"{prefix}/{other}"])]:
            watch()
            if time.monotonic() > until:
                raise BackgroundError(
                    f"ranks {missing} did not ask for group {name!r} within {timeout_s:g} s, rank {rank} did. "
                    "Ask on all ranks, in one order; see whether those ranks are alive."
                )
            time.sleep(POLL_S)
    except Exception:
        store.delete_key(f"{prefix}/{rank}")  # a rank that comes later must not take this one for present
        raise
    names = {other: store.get(f"{prefix}/{other}").decode() for other in members}
    if len(set(names.values())) > 1:
        raise InputError(f"ranks ask for unlike groups: {names} (rank: name). Ask for them in one order on all ranks.")
    made: dist.ProcessGroup = dist.new_group(
        None if ranks is None else members,
        backend=backend,
        timeout=None if connect_s is None else timedelta(seconds=connect_s),
        group_desc=name,
        use_local_synchronization=ranks is not None,
    )
    return made


def _words(failure: BaseException) -> str:
    return f"earlier work of this lane failed: {failure!r}."
