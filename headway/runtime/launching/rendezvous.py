"""How hosts meet, so that a signal ends every wait for them.

torch's stores wait for other hosts in C++, where no Python signal handler
runs: Ctrl-C would be obeyed when the wait is over, up to 15 minutes later.
Here a host first sees that somebody answers before it makes a store, and asks
the store whether a key is there before it reads it; between two looks Python
handles signals. Timeouts are seconds.

>>> is_local("127.0.0.1"), is_local("192.0.2.1")
(True, False)
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed import (  # type: ignore[attr-defined]  # its stub lists no stores
    DistError,
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from headway.runtime.host.reserve import Reserve

C10D_PORT = 29400
"""Port of a c10d rendezvous whose endpoint names none: torch's own default."""

CONNECT_S = 10.0
"""Seconds that making a store may take once something answers at its address."""

CONNECTS_S = 60
"""Seconds to wait for the host of a c10d store, torch's own; `--rdzv-conf read_timeout=N` changes it."""

FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25
"""Seconds between looks at a store: doubled from the first to the last."""


class PolledStore:
    """A store whose waits are looks with sleeps between them; everything else is the store's own."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """Hand on what does not wait."""
        return getattr(self._store, name)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once every key is there. Raises torch's `DistStoreError` when the time is over."""
        limit_s = (timeout or self._store.timeout).total_seconds()
        if not poll(lambda: self._store.check(list(keys)), limit_s):
            raise DistStoreError(f"waited {limit_s:g} s for {', '.join(keys)}. Check that every host still runs.")

    def get(self, key: str) -> bytes:
        """Return the value of `key` once it is there."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys` once all are there."""
        self.wait(keys)
        values: list[bytes] = self._store.multi_get(list(keys))
        return values


@dataclass(slots=True)
class Hosts(RendezvousHandler):
    """A rendezvous of torch's that hands out a `PolledStore`."""

    inner: RendezvousHandler
    """Decides who takes part."""

    reserve: Reserve | None = None
    """Says when this host may join, where some wait in reserve."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts."""
        if self.reserve is not None:
            self.reserve.await_turn()
        info = self.inner.next_rendezvous()
        return RendezvousInfo(PolledStore(info.store), info.rank, info.world_size, info.bootstrap_store_info)  # type: ignore[arg-type]  # a store by behaviour

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Say whether the ranks may use the agents' store."""
        return bool(self.inner.use_agent_store)

    def is_closed(self) -> bool:
        """Say whether nobody may join any more."""
        return self.inner.is_closed()

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self.inner.set_closed()  # type: ignore[no-untyped-call]  # torch has no types for it

    def num_nodes_waiting(self) -> int:
        """Return the number of hosts that wait to join."""
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous."""
        return self.inner.shutdown()


class StaticHosts(RendezvousHandler):
    """All hosts are known by number, host 0 keeps the store: torch's static rendezvous, meeting by looks."""

    def __init__(self, host: str, port: int, *, rank: int, num_hosts: int, run_id: str, timeout_s: float) -> None:
        self._host, self._port, self._rank, self._num_hosts = host, port, rank, num_hosts
        self._run_id, self._timeout_s = run_id, timeout_s
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts. Raises `RendezvousTimeoutError` when they do not come in time."""
        deadline = time.monotonic() + self._timeout_s
        if self._store is None:
            self._store = self._serve() if self._rank == 0 else self._connect(deadline)
        store = PolledStore(PrefixStore(self._run_id, self._store))
        store.set(f"headway/host/{self._rank}", "here")
        try:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
            store.wait([f"headway/host/{rank}" for rank in range(self._num_hosts)], left)
        except DistStoreError as cause:
            missing = [rank for rank in range(self._num_hosts) if not store.check([f"headway/host/{rank}"])]
            words = f"host {', '.join(map(str, missing))} of {self._num_hosts} did not come in {self._timeout_s:g} s"
            raise RendezvousTimeoutError(words) from cause
        return RendezvousInfo(store, self._rank, self._num_hosts, RendezvousStoreInfo(self._host, self._port))  # type: ignore[arg-type]  # a store by behaviour

    def _serve(self) -> TCPStore:
        try:
            return TCPStore(
                self._host, self._port, is_master=True, timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except DistError as cause:
            raise RendezvousConnectionError(f"host 0 cannot keep the store at {self._host}:{self._port}") from cause

    def _connect(self, deadline: float) -> TCPStore:
        while await_answer(self._host, self._port, deadline - time.monotonic()):
            try:
                store = TCPStore(
                    self._host, self._port, is_master=False, timeout=timedelta(seconds=CONNECT_S),
                    wait_for_workers=False, multi_tenant=True,
                )  # fmt: skip
            except DistError:
                continue  # whoever answered has gone again
            store.set_timeout(timedelta(seconds=self._timeout_s))
            return store
        raise RendezvousTimeoutError(f"host 0 did not answer at {self._host}:{self._port} in {self._timeout_s:g} s")

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Ranks have a store of their own in each attempt."""
        return False

    def is_closed(self) -> bool:
        """Never: the hosts are known."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """None: the hosts are known."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to shut down."""
        return True


def why_ended(cause: Exception, endpoint: str, *, was_met: bool) -> str:
    """Say in one sentence why a rendezvous ended; `was_met`: its store has answered before.

    >>> why_ended(RendezvousClosedError(), "a:1", was_met=True)
    'another host has closed it, because the job ended there.'
    """
    if was_met and isinstance(cause, (RendezvousConnectionError, DistNetworkError)):
        return (
            f"the host of its store, {endpoint}, does not answer any more: that host is lost, or the network to it, "
            "and no host goes on without it. Start the job again on all hosts."
        )
    if isinstance(cause, RendezvousClosedError):
        return "another host has closed it, because the job ended there."
    return " ".join(str(cause).split()) or type(cause).__name__


def open_rendezvous(
    backend: str,
    endpoint: str,
    settings: Mapping[str, Any],
    *,
    run_id: str,
    hosts: tuple[int, int],
    local_addr: str | None,
    standby: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> RendezvousHandler:
    """Return how this host meets the others; `hosts` are (fewest, most). Raises torch's `RendezvousError`.

    With `standby` > 0, hosts beyond the most wait in reserve; `say` prints a line about this one.
    """
    if backend == "static":
        host, port = parse_rendezvous_endpoint(endpoint, -1)
        return StaticHosts(
            host, port, rank=int(settings["rank"]), num_hosts=hosts[1], run_id=run_id,
            timeout_s=float(settings["timeout"]),
        )  # fmt: skip

    def parameters(**more: Any) -> RendezvousParameters:
        return RendezvousParameters(backend, endpoint, run_id, *hosts, local_addr, **{**settings, **more})

    def meet(keeps: bool) -> Hosts:
        given = parameters(is_host=str(keeps).lower())
        state, store = create_backend(given)
        reserve = Reserve(store, state, run_id, hosts[1], settings, keeps, say) if standby else None
        return Hosts(create_handler(store, state, given), reserve)

    if backend != "c10d" or settings.get("store_type", "tcp") != "tcp":
        return Hosts(registry.get_rendezvous_handler(parameters()))
    return _meet_c10d(meet, *parse_rendezvous_endpoint(endpoint, C10D_PORT), settings)


def _meet_c10d(meet: Callable[[bool], Hosts], host: str, port: int, settings: Mapping[str, Any]) -> Hosts:
    """Keep the store if its address is this host's and nobody does so yet; else join the one who does."""
    limit_s = float(settings.get("read_timeout", CONNECTS_S))
    deadline = time.monotonic() + limit_s
    while True:
        serves = "is_host" not in settings and is_local(host) and not answers(host, port)
        keeps = RendezvousParameters("c10d", "", "", 1, 1, **settings).get_as_bool("is_host", serves)
        if not keeps and not await_answer(host, port, deadline - time.monotonic()):
            raise RendezvousTimeoutError(f"no host keeps a store at {host}:{port}: none answered in {limit_s:g} s")
        try:
            return meet(bool(keeps))
        except RendezvousConnectionError:
            if time.monotonic() > deadline or (keeps and "is_host" in settings):
                raise  # else somebody was quicker, or has gone again


def is_local(host: str) -> bool:
    """Say whether `host` is an address of this host: whether one can listen there."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def answers(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Say whether somebody listens at this address."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def await_answer(host: str, port: int, timeout_s: float) -> bool:
    """Wait until somebody listens at this address; returns whether anybody does."""
    return poll(lambda: answers(host, port), timeout_s)


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Look until `done()` holds or the time is over; returns whether it holds. A signal's handler runs in between."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, LAST_LOOK_S)
    return True
