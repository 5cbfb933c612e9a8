"""`RayFleet`: a fleet whose master and workers are Ray actors, for jobs that span many hosts.

The master is the one that processes use (`headway.data.fleet.master.Master`), the
part of a worker that prepares is theirs too; what Ray does is to place actors,
to start them again, and to move batches as objects. Batches, states and
guarantees are those of `headway.data.fleet.torch_fleet`. Call `ray.init` first;
Ray sends `data` to its workers by pickle, as everything.

    ray.init()
    with RayFleet(pipeline, num_workers=16) as fleet:
        for batch in fleet.batches(32, shuffle=True):
            ...

Another process (a rank) joins with `RayFleet(pipeline, name=fleet.name)`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from headway.core.errors import BackgroundError, InputError
from headway.data.bytes.packing import unpack
from headway.data.fleet.autoscale import Autoscaler
from headway.data.fleet.hub import Scaling
from headway.data.fleet.master import Master, SplitPlacement, WorkerReport
from headway.data.fleet.reader import AHEAD, Delivered, PrepareError, this_process
from headway.data.fleet.splits import FleetPass, Split
from headway.data.fleet.torch_fleet import FleetLoader, Loaded, check_first, prepared, worker_bounds
from headway.data.fleet.worker import SplitPreparer
from headway.data.loader.loader import fingerprint
from headway.data.service.torch_preparers import restored

NAMESPACE = "headway"
LOOK_S = 0.25
"""How often a reader that waits asks where its batches are."""
IDLE_S = 0.02
FETCHES = 8
"""Fetches that a worker answers at once."""


class MasterActor:
    """A `Master` as an actor: its methods, and the clock that a loop would be."""

    def __init__(self, num_items: int, bounds: tuple[int, int], period_s: float, **settings: Any) -> None:
        self._master = Master(num_items, **settings)
        self._scaling = Scaling(Autoscaler(*bounds), period_s, looked_s=time.monotonic())
        self._life = secrets.token_hex(4)
        """Readers name the master that they joined: one that was started again does not know them."""

    def register(self, worker: str) -> None:
        """Let a worker in, which begins with nothing: what it had before is prepared again."""
        self._master.gone(worker)
        self._master.register(worker, worker)

    def turn(
        self, worker: str, report: WorkerReport, ready: list[tuple[Split, int]], room: bool
    ) -> tuple[bool, list[tuple[Split, int]], tuple[Split, int, int] | None]:
        """Hear a worker; returns whether it is known, which of its leases ended, and its next one, if there is any."""
        self._master.tick()
        if worker not in self._master.workers:
            return False, [], None
        self._master.beat(worker, report)
        for split, generation in ready:
            self._master.ready(worker, split, generation)
        lease = self._master.next_split(worker, room=room)
        begin = None if lease is None else (lease.key, lease.generation, self._master.begin(lease.key))
        return True, self._master.revoked(worker), begin

    def join(self, client: str, work: FleetPass, rank: int, taken: int, data: str) -> str:
        """Let a reader in (see `Master.join`); returns which master this is."""
        self._master.join(client, work, rank, taken, data=data)
        return self._life

    def took(
        self, client: str, life: str, taken: int, waited_s: float
    ) -> tuple[list[SplitPlacement], str | None] | None:
        """Hear a reader; returns where its next splits are and an error for it if there is one; None: join again."""
        self._master.tick()
        if life != self._life:
            return None
        self._master.took(client, taken, waited_s)
        return self._master.placements(client), self._master.broken(client)

    def lost(self, client: str, split: Split, generation: int) -> None:
        """Hear that a reader cannot get a split."""
        self._master.lost(client, split, generation)

    def leave(self, client: str) -> None:
        """Hear that a reader is gone."""
        self._master.leave(client)

    def scale(self) -> tuple[int, list[str]]:
        """Return how many workers there should be, and which have drained."""
        wanted = self._scaling.scaler.decide(self._scaling.load(self._master, time.monotonic()))
        serving = [name for name, worker in self._master.workers.items() if not worker.draining]
        for name in sorted(serving, key=self._master.num_held)[: max(len(serving) - wanted, 0)]:
            self._master.drain(name)
        return wanted, self._master.drained()

    def statistics(self) -> dict[str, object]:
        """Return what the master counts."""
        return self._master.statistics()


class WorkerActor:
    """A preparer as an actor: a thread asks the master for splits, readers fetch batches."""

    def __init__(self, name: str, master: Any, data: Any, collate_fn: Any) -> None:
        torch.set_num_threads(1)
        self._name, self._master = name, master
        self._preparer = SplitPreparer(prepared(data, collate_fn)[1], on_change=lambda: None)
        self._thread = threading.Thread(target=self._run, name="headway-ray-worker", daemon=True)
        self._thread.start()

    def fetch(self, split: Split, generation: int, batch: int) -> Delivered | None:
        """Return a batch once it is ready; None when this worker does not have it, or no longer."""
        try:
            while (packed := self._preparer.take(split, generation, batch, timeout_s=1.0)) is None:
                pass
        except KeyError:
            return None
        if packed.error:
            return Delivered(error=packed.error)
        # An array, so that Ray keeps it as memory that readers map and do not copy.
        return Delivered(np.frombuffer(packed.body(), np.uint8), packed.spent)

    def alive(self) -> int:
        """Return the process id."""
        return os.getpid()

    def _run(self) -> None:
        import ray

        known = False
        while True:
            try:
                if not known:
                    ray.get(self._master.register.remote(self._name))
                ready = [self._preparer.finished.popleft() for _ in range(len(self._preparer.finished))]
                known, ended, begin = ray.get(
                    self._master.turn.remote(self._name, self._preparer.report(), ready, self._preparer.has_room())
                )
            except ray.exceptions.RayError:  # the master is being started again
                known, ended, begin = False, [], None
            if not known:
                self._preparer.keep([])
            for split, generation in ended:
                self._preparer.revoke(split, generation)
            if begin is not None:
                self._preparer.begin(*begin)
            else:
                time.sleep(IDLE_S)


class RayFleet:
    """Workers on a Ray cluster for one dataset or pipeline. Close it, or use it in a `with` block."""

    def __init__(
        self,
        data: Any,
        *,
        num_workers: int | str = "auto",
        most_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str = "",
        period_s: float = 5.0,
        patience_s: float = 60.0,
        num_cpus: float = 1.0,
        **settings: Any,
    ) -> None:
        """Start the fleet called `name` (default: a new one), or join it where it runs.

        `num_cpus` is what each worker asks of the cluster; `settings` are
        those of `Master` (lease_s, split_batches, window, most_workers as
        `workers_per_reader`, checkpoint). Raises `InputError` before
        `ray.init`, and when the first examples cannot be prepared.
        """
        import ray

        if not ray.is_initialized():
            raise InputError("Ray is not connected. Call ray.init() first.")
        self.dataset, make = prepared(data, collate_fn)
        self.name, self.patience_s = name or f"fleet-{secrets.token_hex(4)}", patience_s
        self._data, self._collate_fn, self._num_cpus = data, collate_fn, num_cpus
        self.fingerprint = fingerprint(self.dataset)
        bounds = worker_bounds(num_workers, most_workers)
        self.num_workers = bounds["num_workers"]
        self._workers: dict[str, Any] = {}
        self._next, self._closed = 0, threading.Event()
        self._scaler: threading.Thread | None = None
        with contextlib.suppress(ValueError):
            self._master, self._started = ray.get_actor(f"{self.name}-master", NAMESPACE), False
            return
        check_first(make, len(self.dataset))
        settings["most_workers"] = settings.pop("workers_per_reader", 4)
        # The master restarts by itself, and from its checkpoint where one is given; readers know where they are.
        options = {"name": f"{self.name}-master", "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
        self._master = ray.remote(**options)(MasterActor).remote(
            len(self.dataset), (bounds["least_workers"], bounds["most_workers"]), period_s,
            data=self.fingerprint, **settings,
        )  # fmt: skip
        self._started = True
        for _ in range(bounds["num_workers"]):
            self._start_worker()
        if bounds["least_workers"] < bounds["most_workers"]:
            self._scaler = threading.Thread(
                target=self._scale, args=(period_s,), name="headway-ray-scaler", daemon=True
            )
            self._scaler.start()

    def __enter__(self) -> RayFleet:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after a block that ended well, once the readers of other processes have left."""
        self.close(self.patience_s if kind is None else 0.0)

    def batches(self, batch_size: int | None = None, shuffle: bool | None = None, **options: Any) -> FleetLoader:
        """Return a loader of the fleet's batches; arguments and states are those of `headway.data.DataLoader`."""
        return FleetLoader(self, batch_size, shuffle, **options)

    def reader(self, work: FleetPass, rank: int) -> Iterator[Loaded]:
        """Return an iterator over the batches of one rank of a pass, from its beginning."""
        return RayReader(self._master, work, rank, data=self.fingerprint, patience_s=self.patience_s)

    def statistics(self) -> dict[str, Any]:
        """Return what the master counts."""
        import ray

        found: dict[str, Any] = ray.get(self._master.statistics.remote(), timeout=self.patience_s)
        return found

    def close(self, timeout_s: float = 0.0) -> None:
        """End the fleet if it was started here, after other readers left or `timeout_s` is over."""
        import ray

        if not self._started or self._closed.is_set():
            return
        wait_for_readers(self.statistics, timeout_s)
        self._closed.set()
        if self._scaler is not None:
            self._scaler.join(self.patience_s)
        for actor in (*self._workers.values(), self._master):
            ray.kill(actor, no_restart=True)

    def _start_worker(self) -> None:
        import ray

        name, self._next = f"{self.name}-w{self._next}", self._next + 1
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": self._num_cpus, "max_restarts": -1}
        actor = ray.remote(**options, max_concurrency=FETCHES)(WorkerActor)
        self._workers[name] = actor.remote(name, self._master, self._data, self._collate_fn)

    def _scale(self, period_s: float) -> None:
        """Start workers and end drained ones as the master says, once per period."""
        import ray

        leaving: set[str] = set()
        while not self._closed.wait(period_s):
            with contextlib.suppress(ray.exceptions.RayError):  # a master that is being started again says it later
                wanted, drained = ray.get(self._master.scale.remote(), timeout=self.patience_s)
                statistics = self.statistics()["workers"]
                leaving |= {name for name, worker in statistics.items() if worker["draining"]}
                for name in [name for name in drained if name in self._workers]:
                    ray.kill(self._workers.pop(name), no_restart=True)
                for _ in range(wanted - len(set(self._workers) - leaving)):
                    self._start_worker()


def wait_for_readers(statistics: Callable[[], dict[str, Any]], timeout_s: float) -> None:
    """Wait until only readers of this process are left, or `timeout_s` is over."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if all(reader.startswith(f"{this_process()}/") for reader in statistics()["readers"]):
            return
        time.sleep(0.1)


class RayReader(Iterator[Loaded]):
    """The batches of one rank, in order, fetched ahead as objects of Ray."""

    def __init__(self, master: Any, work: FleetPass, rank: int, *, data: str, patience_s: float) -> None:
        """Read a pass from its beginning; it is joined at the first `next`."""
        self._master, self._work, self._rank, self._data, self._patience_s = master, work, rank, data, patience_s
        self._client = f"{this_process()}/{time.monotonic_ns()}"
        self._num_batches = work.num_batches(rank)
        self._taken, self._waited_s, self._life = 0, 0.0, ""
        self._placements: list[SplitPlacement] = []
        self._coming: dict[Any, tuple[SplitPlacement, int]] = {}
        """Object to come -> who makes it, and which batch it is."""
        self._asked: set[tuple[Split, int, int]] = set()
        self._have: dict[int, Delivered] = {}

    def __next__(self) -> Loaded:
        """Return the next batch. Raises `PrepareError`, `InputError`, `BackgroundError`."""
        if self._taken >= self._num_batches:
            self._look()
            self._master.leave.remote(self._client)
            raise StopIteration
        begun_s = seen_s = time.monotonic()
        self._collect(timeout_s=0.0)
        while self._taken not in self._have:
            if self._look():
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s > self._patience_s:
                raise BackgroundError(
                    f"the fleet has had no master for {self._patience_s:g} s. Start it again and go on from the last "
                    "state: nothing that was taken before it comes again."
                )
            self._fetch()
            self._collect(LOOK_S)
        self._waited_s += time.monotonic() - begun_s
        fetched = self._have.pop(self._taken)
        if fetched.error:
            self._have[self._taken] = fetched  # and again at each further call: an epoch never just ends early
            raise PrepareError(f"batch {self._taken} of rank {self._rank} could not be prepared:\n{fetched.error}")
        self._taken += 1
        self._fetch()  # while the loop is busy
        # Ray's memory is shared and read-only; what the loop gets is its own.
        batch = unpack(fetched.body.data, marked=restored)
        return Loaded(batch, fetched.spent, fetched.body.nbytes)

    def _look(self) -> bool:
        """Tell the master how far the loop is, and hear where batches are; False while there is no master."""
        import ray

        try:
            if not self._life:
                join = self._master.join.remote(self._client, self._work, self._rank, self._taken, self._data)
                self._life = ray.get(join)
            said = ray.get(self._master.took.remote(self._client, self._life, self._taken, self._waited_s))
        except ray.exceptions.RayTaskError as failed:
            if isinstance(failed.cause, InputError):
                raise failed.cause from None
            raise
        except ray.exceptions.RayError:
            self._life = ""
            return False
        if said is None:  # a master that was started again does not know this reader
            self._life = ""
            return True
        self._placements, error = said
        if error:
            raise InputError(error)
        return True

    def _fetch(self) -> None:
        """Ask workers for the batches that the loop needs soon, each once per lease."""
        import ray

        for batch in range(self._taken, min(self._taken + AHEAD, self._num_batches)):
            for place in self._placements if batch not in self._have else ():
                key = (place.split, place.generation, batch)
                if place.split.first <= batch < place.split.end and key not in self._asked:
                    self._asked.add(key)
                    try:
                        worker = ray.get_actor(place.worker, NAMESPACE)
                        self._coming[worker.fetch.remote(*key)] = (place, batch)
                    except (ValueError, ray.exceptions.RayError):
                        self._lost(place)

    def _collect(self, timeout_s: float) -> None:
        """Take in what has come, waiting for the next batch if it is under way."""
        import ray

        if not self._coming:
            time.sleep(min(timeout_s, IDLE_S))
            return
        first = [ref for ref, (_, batch) in self._coming.items() if batch == self._taken] or list(self._coming)
        ray.wait(first, num_returns=1, timeout=timeout_s)
        for ref in ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)[0]:
            place, batch = self._coming.pop(ref)
            try:
                fetched = ray.get(ref)
            except ray.exceptions.RayError:  # its worker died
                fetched = None
            if fetched is not None and batch >= self._taken:
                self._have.setdefault(batch, fetched)
            elif batch >= self._taken and batch not in self._have:
                self._lost(place)

    def _lost(self, place: SplitPlacement) -> None:
        """Tell the master that a lease is of no use."""
        self._master.lost.remote(self._client, place.split, place.generation)
