"""`Fleet`: worker processes that prepare a dataset or a pipeline for all ranks of a job, here and on other hosts.

Use it where one training process cannot feed its accelerator, or where ranks
differ in what they need: workers belong to the job, not to a rank, and their
number follows demand. Batches are those of a `DataLoader` of the same
arguments, bit for bit, and so are the states: a fleet, its workers, its
master and the readers may die and come back, and each item is still delivered
exactly once. See `headway.data.fleet.master` for how.

    with Fleet(pipeline, num_workers="auto") as fleet:
        for batch in fleet.batches(32, shuffle=True):
            ...

Each rank writes the same: on one host the first rank to come starts the fleet
and the others join it. Hosts have fleets of their own, unless `host`, `port`
and `token` name one for all (`join=True` on the others); `work_for` adds
workers from any host that has the data.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core.errors import BackgroundError, InputError
from headway.core.files.private import runtime_directory
from headway.core.machine.child import said
from headway.core.machine.host import host_cores
from headway.data.bytes import account
from headway.data.bytes.packing import unpack
from headway.data.bytes.source import digest_of
from headway.data.bytes.torch_keyed import KeyedDataset, Keys
from headway.data.fleet.reader import FleetReader
from headway.data.fleet.splits import Address, BatchKeys, FleetPass, FromMaster, dial
from headway.data.fleet.supervisor import FleetSettings, Keeper
from headway.data.fleet.worker import Make, MemfdBatch, serve
from headway.data.loader.loader import DataLoader, fingerprint
from headway.data.loader.views import InProcess, KeysOf, View, check_process
from headway.data.loader.walks import OrderWalk
from headway.data.pipeline.pipeline import Pipeline
from headway.data.service.messages import RequestFailed, StatusRequest
from headway.data.service.torch_preparers import plain, restored

CHECKED = 2
"""Examples that are prepared before a fleet starts."""


class AnyFleet:
    """What a `FleetLoader` reads, and scripts hold: a fleet of processes, or of Ray's actors."""

    def __init__(
        self, dataset: Any, num_workers: int, address: Address, data: str, token: str, patience_s: float
    ) -> None:
        self.dataset = dataset
        """What stands for the data in states."""
        self.num_workers = num_workers
        """Workers at the start."""
        self.address, self.token, self.patience_s, self.fingerprint = address, token, patience_s, data

    def batches(self, batch_size: int | None = None, shuffle: bool | None = None, **options: Any) -> FleetLoader:
        """Return a loader of the fleet's batches; arguments and states are those of `headway.data.DataLoader`.

        A pipeline's own `batch` and `shuffle` are the defaults.
        """
        return FleetLoader(self, batch_size, shuffle, **options)

    def reader(self, work: FleetPass, rank: int) -> FleetReader:
        """Return an iterator over the packed batches of one rank of a pass, from its beginning."""
        return FleetReader(
            self.address, work, rank, data=self.fingerprint, token=self.token, patience_s=self.patience_s,
            failure=self._failure(),
        )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Return what the master counts: workers, leases, batches taken, waiting.

        Raises `BackgroundError` with the reason when the fleet has ended, `ChannelClosed` and `TimeoutError` when
        no master answers.
        """
        if why := self._failure()():
            raise BackgroundError(why)
        with contextlib.closing(dial(self.address, self.token, 5.0, FromMaster)) as channel:
            channel.send(StatusRequest())
            answer, _ = channel.receive(timeout_s=5.0)
        if isinstance(answer, RequestFailed):
            raise answer.error()
        statistics: dict[str, Any] = answer.facts
        return statistics

    def close(self, timeout_s: float = 0.0) -> None:
        """End the fleet if it was started here."""

    def _failure(self) -> Callable[[], str]:
        """Return what tells why the fleet has ended, '' while it has not; a reader may keep it, and not the fleet."""
        return str

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after a block that ended well, once those of other processes are done with it."""
        self.close(self.patience_s if kind is None else 0.0)


class Fleet(AnyFleet):
    """Worker processes for one dataset or pipeline. Close it, or use it in a `with` block."""

    def __init__(
        self,
        data: Any,
        *,
        num_workers: int | str = "auto",
        most_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        folder: str | Path | None = None,
        host: str = "",
        port: int = 0,
        token: str = "",
        join: bool = False,
        **settings: Any,
    ) -> None:
        """Start the fleet of `data`, or join the one that another rank of this host started.

        `data` is a `Pipeline` or a map-style dataset. "auto" follows demand
        between 1 and `most_workers` (default: the cores of this host).
        `folder` is where sockets and the master's checkpoint lie (default: one
        per job and dataset). With `host`, `port` and `token` the fleet is
        reached over TCP; ranks of other hosts pass the same and `join=True`.
        `settings` are those of `FleetSettings`: lease_s, patience_s, period_s,
        split_batches, window, workers_per_reader.

        Raises `InputError` when the first examples cannot be prepared, so
        that a bad pipeline ends here and not in a worker.
        """
        dataset, self._make = prepared(data, collate_fn)
        size, name = len(dataset), fingerprint(dataset)
        bounds = worker_bounds(num_workers, most_workers)
        checked = FleetSettings(Path(), size, data=name, host=host, port=port, token=token, **bounds, **settings)
        self._folder = _folder(folder, name, join=join)
        self.settings = replace(checked, folder=self._folder)
        super().__init__(dataset, bounds["num_workers"], self.settings.address, name, token, self.settings.patience_s)
        self._keeper: Keeper | None = None
        self._pid = os.getpid()
        self._lock = -1 if join else _lock(self._folder / "fleet.lock", fcntl.LOCK_EX)
        # Those who joined hold this one together, and the fleet outlasts them.
        self._users = -1 if self._lock >= 0 else _lock(self._folder / "users.lock", fcntl.LOCK_SH)
        self._own_folder = folder is None and (join or self._lock >= 0)
        if self._lock >= 0:
            try:
                check_first(self._make, size)
                # What a job has named, its next attempt may go on from; nobody finds another folder again.
                sweeps = folder is None and not _job_name()
                self._keeper = Keeper(self._make, self.settings, sweeps=sweeps)
                weakref.finalize(self, self._keeper.stop)
            except BaseException:
                self.close()
                raise

    @property
    def started_here(self) -> bool:
        """Whether this process started the fleet; it ends with it."""
        return self._keeper is not None

    def close(self, timeout_s: float = 0.0) -> None:
        """End the fleet if it was started here, after those who joined have closed it or `timeout_s` is over.

        In a fork of the process that made this object it does nothing: the fleet is not the fork's to end.
        """
        if self._pid != os.getpid():
            return
        if self._users >= 0:
            os.close(self._users)
            self._users = -1
        if self._keeper is not None:
            self._wait_for_users(timeout_s)
            self._keeper.close()
            self._keeper = None
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _wait_for_users(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while (users := _lock(self._folder / "users.lock", fcntl.LOCK_EX)) < 0 and time.monotonic() < until_s:
            time.sleep(0.05)
        if users >= 0:
            os.close(users)

    def _failure(self) -> Callable[[], str]:
        return functools.partial(_failure, self._keeper)


class FleetLoader(DataLoader):
    """A `headway.data.DataLoader` whose batches a fleet prepares: `isinstance`, order, states and `len` are its own.

    Batch size and shuffling default to a pipeline's own, else to 1 and False.
    """

    def __init__(
        self, fleet: AnyFleet, batch_size: int | None = None, shuffle: bool | None = None, **options: Any
    ) -> None:
        """Raise what `DataLoader` raises, and `InputError` on arguments that are for loading in this process."""
        known = {"seed", "rank", "world_size", "tail", "drop_last", "pin_memory", "pin_memory_device"}
        if wrong := sorted(set(options) - known):
            raise InputError(f"{wrong[0]} is not for a fleet's batches. Pass any of: {', '.join(sorted(known))}.")
        pipeline = getattr(fleet.dataset, "pipeline", None)
        size = batch_size or getattr(pipeline, "batch_size", None) or 1
        mixed = getattr(pipeline, "shuffled", False) if shuffle is None else shuffle
        super().__init__(fleet.dataset, size, mixed, **options)
        self.fleet = fleet

    def _get_iterator(self) -> Any:
        self._used = "fleet"
        return InFleet(View(self, dataset=self._keyed(), _index_sampler=KeysOf(self), num_workers=0), self)


class InFleet(InProcess):
    """An iterator over batches of a fleet; torch's own base class, so that recorders see each `next`."""

    def __init__(self, view: View, loader: FleetLoader) -> None:
        super().__init__(view)
        walk = loader._walk
        assert isinstance(walk, OrderWalk)
        dealt = walk.sequence
        work = FleetPass(
            dealt.num_items, dealt.batch_size, dealt.world_size,
            seed=walk.seed, epoch=walk.epoch, start=dealt.start, shuffle=loader._shuffle, tail=dealt.tail,
        )  # fmt: skip
        self._reader, self._num_fleet = loader.fleet.reader(work, walk.rank), loader.fleet.num_workers
        self._pid = os.getpid()

    def _next_data(self) -> Any:
        check_process(self._pid)
        # First the batch: one that cannot be made is not passed over.
        packed, spent = next(self._reader)
        batch = unpack(packed, marked=restored)
        keys = self._next_index()  # type: ignore[no-untyped-call]  # torch has no types for its iterators
        self.walk.taken += 1
        ended_ns, all_ns = time.perf_counter_ns(), spent.fetch_ns + spent.prep_ns + spent.cpu_wait_ns
        account.loaded(
            ended_ns - all_ns, ended_ns, batch=self._num_yielded, items=len(keys), bytes=len(packed),
            fetch_ns=spent.fetch_ns, prep_ns=spent.prep_ns, cpu_wait_ns=spent.cpu_wait_ns, workers=self._num_fleet,
        )  # fmt: skip
        if self._pin_memory:
            batch = pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]  # nor for this
        return batch


def prepared(data: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Make]:
    """Return what stands for `data` in states, and what prepares its batches. Raises `InputError`."""
    if isinstance(data, Pipeline):
        options: dict[str, Any] = {} if collate_fn is None else {"collate_fn": collate_fn}
        batches: Any = data.loader(batch_size=1, shuffle=False, **options).dataset
        batches.pipeline = data

        def from_pipeline(keys: BatchKeys) -> Any:
            batches.rank = keys.rank
            return plain(batches.__getitems__(_keys(keys)))

        return batches, from_pipeline
    streams = isinstance(data, IterableDataset)
    if streams or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise InputError(
            f"{type(data).__name__} has no length or cannot be indexed, so its work cannot be divided. Pass a Pipeline "
            "or a map-style dataset."
        )
    collate = collate_fn or default_collate

    def from_dataset(keys: BatchKeys) -> Any:
        return plain(collate(KeyedDataset(data, keys.rank).__getitems__(_keys(keys))))

    return data, from_dataset


def check_first(make: Make, num_items: int) -> None:
    """Prepare and pack the first examples in a fork of this process. Raises `InputError` with what went wrong there.

    In a fork: a dataset may open files at its first example, and workers that inherit those would share them.
    """
    if not num_items:
        return
    work = FleetPass(num_items, min(CHECKED, num_items), shuffle=False)

    def check() -> bytes:
        torch.set_num_threads(1)
        try:
            MemfdBatch.of(make(work.keys(0, 0))).close()
        except BaseException:  # sys.exit() of a dataset too
            return traceback.format_exc().encode(errors="replace")
        return b""

    error, code = said(check)
    if error or code:
        raise InputError(
            f"the first {work.batch_size} examples cannot be prepared, so no fleet was started. Fix this first:\n"
            + (error.decode() or f"the process that tried ended with {code}.")
        )


def work_for(address: str, data: Any, *, token: str = "", host: str = "", name: str = "", **options: Any) -> None:
    """Be a worker of the fleet at `address` until it says stop: for processes of other hosts that have the data.

    `host` is this host's address as readers see it; `options` are those of `headway.data.fleet.worker.serve`.
    Raises `BackgroundError` with the reason when the fleet has ended.
    """
    torch.set_num_threads(1)
    name = name or f"{os.uname().nodename}-{os.getpid()}"
    at = f"tcp://{host}:0" if host else str(runtime_directory() / f"worker-{os.getpid()}")
    serve(name, address, at, prepared(data)[1], token=token, guest=True, **options)


def _keys(keys: BatchKeys) -> Keys:
    return Keys(keys.items, keys.occurrence, seed=keys.seed, epoch=keys.epoch, batch=keys.batch)


def worker_bounds(num_workers: int | str, most_workers: int | None) -> dict[str, int]:
    """Return the settings that say how many workers there are. Raises `InputError`."""
    if num_workers == "auto":
        most = most_workers or host_cores()
        return {"num_workers": min(2, most), "least_workers": 1, "most_workers": most}
    if not isinstance(num_workers, int) or num_workers < 1:
        raise InputError(f"num_workers is {num_workers!r}; pass 1 or more, or 'auto'.")
    most = most_workers or num_workers
    return {"num_workers": num_workers, "least_workers": num_workers, "most_workers": most}


def _folder(folder: str | Path | None, name: str, *, join: bool) -> Path:
    """Return where the fleet's sockets lie: the same folder for all ranks of a job on this host."""
    if folder is not None:
        found = Path(folder)
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        return found
    job = _job_name()
    if join or not job:
        return Path(tempfile.mkdtemp(prefix="fleet-", dir=runtime_directory()))
    found = runtime_directory() / f"fleet-{digest_of([job, name])}"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _job_name() -> str:
    """Return what all ranks of this job, and its next attempt, know it by; empty where there is no launcher."""
    keys = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return "-".join(filter(None, (os.environ.get(key) for key in keys)))


def _failure(keeper: Keeper | None) -> str:
    """Return why a fleet that was started here has ended, else nothing."""
    return "" if keeper is None else keeper.failure


def _lock(path: Path, kind: int) -> int:
    """Return the descriptor of a lock of that kind (flock's), -1 when others are in the way."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return -1
    return lock
