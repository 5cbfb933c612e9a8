"""`RayFleet`: a fleet whose master and workers are Ray actors, for jobs that span many hosts.

Ray places the actors and starts them again; what they do, and how batches
travel (over TCP, with a secret that the fleet makes up), is what the
processes of `headway.data.fleet.torch_fleet` do: batches, states and
guarantees are theirs. Call `ray.init` first; Ray sends `data` to its workers
by pickle, as everything.

    ray.init()
    with RayFleet(pipeline, num_workers=16) as fleet:
        for batch in fleet.batches(32, shuffle=True):
            ...

Another process (a rank) joins with `RayFleet(pipeline, name=fleet.name)`.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from headway.core.errors import HeadwayError, InputError
from headway.core.wire.wires import ChannelClosed
from headway.data.fleet.autoscale import Autoscaler
from headway.data.fleet.hub import Hub, Scaling
from headway.data.fleet.master import Master
from headway.data.fleet.reader import this_process
from headway.data.fleet.splits import SCHEME, ToMaster, listen
from headway.data.fleet.torch_fleet import AnyFleet, check_first, prepared, worker_bounds
from headway.data.fleet.worker import serve
from headway.data.loader.loader import fingerprint

NAMESPACE = "headway"
LOOK_S = 0.5
"""Longest wait for Ray's answer where the master is."""
IDLE_S = 0.05


class MasterActor:
    """A `Hub` as an actor."""

    def __init__(
        self, num_items: int, num_workers: int, bounds: tuple[int, int], period_s: float, token: str, **settings: Any
    ) -> None:
        listener, self._address = listen(_here(), token, ToMaster)
        scaling = Scaling(Autoscaler(*bounds), period_s) if bounds[0] < bounds[1] else None
        self._token = token
        hub = Hub(Master(num_items, **settings), listener, num_workers=num_workers, scaling=scaling)
        _start(hub.run)

    def where(self) -> tuple[str, str]:
        """Return the address at which this master listens, and the fleet's secret."""
        return self._address, self._token


class WorkerActor:
    """A worker's process as an actor."""

    def __init__(
        self, name: str, master: MasterAddress, token: str, data: Any, collate_fn: Any, lease_s: float
    ) -> None:
        torch.set_num_threads(1)
        make = prepared(data, collate_fn)[1]
        _start(lambda: serve(name, master, _here(), make, token=token, lease_s=lease_s, patience_s=math.inf))

    def alive(self) -> int:
        """Return the process id."""
        return os.getpid()


class MasterAddress:
    """Where the master of a fleet listens now: elsewhere each time that Ray has started it again."""

    def __init__(self, name: str, master: Any) -> None:
        self._name, self._master = name, master

    def __str__(self) -> str:
        """Return the name of the fleet."""
        return self._name

    def __call__(self) -> str:
        """Ask Ray. Raises `ChannelClosed` while there is no master."""
        import ray

        try:
            address: str = ray.get(self._master.where.remote(), timeout=LOOK_S)[0]
        except ray.exceptions.RayError as error:
            time.sleep(IDLE_S)
            raise ChannelClosed(f"Ray has no master for it: {error}") from error
        return address


class RayFleet(AnyFleet):
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
        dataset, make = prepared(data, collate_fn)
        self.name, bounds = name or f"fleet-{secrets.token_hex(4)}", worker_bounds(num_workers, most_workers)
        self._data, self._collate_fn, self._num_cpus = data, collate_fn, num_cpus
        self._lease_s = settings.get("lease_s", 10.0)
        self._workers: dict[str, Any] = {}
        self._next, self._closed = 0, threading.Event()
        self._scaler: threading.Thread | None = None
        self._started, token = False, ""
        try:
            self._master = ray.get_actor(f"{self.name}-master", NAMESPACE)
            token = ray.get(self._master.where.remote(), timeout=patience_s)[1]
        except ValueError:
            check_first(make, len(dataset))
            self._started, token = True, secrets.token_hex(32)
            settings["most_workers"] = settings.pop("workers_per_reader", 4)
            # The master restarts by itself, and from its checkpoint where one is given; readers know where they are.
            options = {"name": f"{self.name}-master", "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
            self._master = ray.remote(**options)(MasterActor).remote(
                len(dataset), bounds["num_workers"], (bounds["least_workers"], bounds["most_workers"]), period_s, token,
                data=fingerprint(dataset), **settings,
            )  # fmt: skip
        super().__init__(
            dataset, bounds["num_workers"], MasterAddress(self.name, self._master), fingerprint(dataset), token,
            patience_s,
        )  # fmt: skip
        for _ in range(bounds["num_workers"] if self._started else 0):
            self._start_worker()
        if self._started and bounds["least_workers"] < bounds["most_workers"]:
            self._scaler = threading.Thread(
                target=self._scale, args=(period_s,), name="headway-ray-scaler", daemon=True
            )
            self._scaler.start()

    def close(self, timeout_s: float = 0.0) -> None:
        """End the fleet if it was started here, after other readers left or `timeout_s` is over."""
        import ray

        if not self._started or self._closed.is_set():
            return
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with contextlib.suppress(HeadwayError, TimeoutError):  # a master that is being started again says it later
                if all(reader.startswith(f"{this_process()}/") for reader in self.statistics()["readers"]):
                    break
            time.sleep(0.1)
        self._closed.set()
        if self._scaler is not None:
            self._scaler.join(self.patience_s)
        for actor in (*self._workers.values(), self._master):
            ray.kill(actor, no_restart=True)

    def _start_worker(self) -> None:
        import ray

        name, self._next = f"{self.name}-w{self._next}", self._next + 1
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": self._num_cpus, "max_restarts": -1}
        self._workers[name] = ray.remote(**options)(WorkerActor).remote(
            name, self.address, self.token, self._data, self._collate_fn, self._lease_s
        )

    def _scale(self, period_s: float) -> None:
        """Start workers and end drained ones as the master says, once per period."""
        import ray

        leaving: set[str] = set()
        while not self._closed.wait(period_s):
            try:
                told = self.statistics()
            except (HeadwayError, TimeoutError):  # a master that is being started again says it later
                continue
            here = told["workers"]
            gone = leaving - here.keys()
            leaving = {name for name, worker in here.items() if worker["draining"]}
            for name in gone & self._workers.keys():
                ray.kill(self._workers.pop(name), no_restart=True)
            for _ in range(told["wanted"] - len(self._workers.keys() - leaving)):
                self._start_worker()


def _here() -> str:
    """Return an address of this host, at any port that is free."""
    import ray

    return f"{SCHEME}{ray.util.get_node_ip_address()}:0"


def _start(act: Callable[[], None]) -> None:
    """Run `act` in a thread; should it fail, the actor ends, and Ray starts another."""

    def run() -> None:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, name="headway-ray", daemon=True).start()
