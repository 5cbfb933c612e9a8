"""A cache that several hosts hold together: each keeps its part of the dataset, and asks the others before storage.

Wrap any source in `Partitioned`, on every host with the same arguments but
`host`. Which host keeps which item follows from the hosts and the seed
(`PartitionMap`): nobody asks around. Who reads an item first takes it from
storage and hands it to its host; from then on it comes from memory, here or
over the network. An item for which its host has no room goes to the next one in its list. What
room is left at last is filled with copies of what other hosts hold.

A host that dies or falls silent costs its readers one timeout: its items come
from storage, then from the next hosts, until it is back. Wrong data is impossible
either way: a payload comes from some host's storage, and stays as it is.

>>> from headway.data.bytes.source import SyntheticJpeg
>>> images = SyntheticJpeg(6, 32, 24, seed=1)
>>> with Partitioned(images, hosts=["127.0.0.1:0"], host="127.0.0.1:0", capacity_bytes=10**6, token="secret") as cached:
...     same = [cached.read(k) == images.read(k) for epoch in range(2) for k in range(6)]
...     found = cached.statistics()
>>> all(same), found.storage_reads, found.local_hits
(True, 6, 6)

The law is CoorDL's (Mohan et al., VLDB 2021): a job reads its dataset from storage once, not once per host and epoch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.wire.channel import TcpListener
from headway.core.wire.wires import MOST_BYTES
from headway.data.bytes.packing import pack, unpack
from headway.data.bytes.source import Source, digest_of
from headway.data.cached.partition import PartitionMap
from headway.data.orders.job_order import DataShareError
from headway.data.partitioned.peers import (
    AWAY,
    BACK,
    LOST,
    THERE,
    Absent,
    CachePeer,
    CacheShare,
    Found,
    Identity,
    PeerServer,
    listen,
    split_address,
)

_log = logging.getLogger(__name__)

UNUSABLE = (*LOST, DataShareError)
"""What a peer may raise once reading has begun: its items come from storage then."""

RAW, PACKED = b"\0", b"\1"
"""Last byte of a payload: the source gave bytes, or something that was packed."""

TICK_S = 0.25
"""Between two looks at hosts that are away, and at room to fill."""

LONGEST_PAUSE_S = 64.0
"""Between two tries to reach a host that stays away; they begin at one tick and double."""

MOST_PAYLOAD_BYTES = MOST_BYTES - 1024
"""Largest item that hosts hold for each other: a message less what is around it."""

MOST_HOSTS = 4096
"""Hosts of one cache: a read of an item that moved looks at each."""


@dataclass(frozen=True, slots=True)
class PartitionedStatistics:
    """What the processes of one host read from where since the start; see `headway.data.partitioned.peers.COUNTS`."""

    local_hits: int
    local_bytes: int
    peer_hits: int
    peer_bytes: int
    storage_reads: int
    storage_bytes: int
    served_hits: int
    served_bytes: int
    copies: int
    peer_losses: int
    settled: int
    held_items: int
    """Items in this host's memory."""
    held_bytes: int
    capacity_bytes: int


class Partitioned:
    """A source whose items are kept in the memory of several hosts. Start it before reading; any thread may read.

    Forked loader workers, and those that get it by pickle, read and fill this
    host's part like the process that started it, which alone answers the other hosts.
    """

    def __init__(
        self,
        source: Source,
        *,
        hosts: Sequence[str] | Mapping[str, str],
        host: str,
        capacity_bytes: int,
        token: str,
        seed: int = 0,
        timeout_s: float = 2.0,
        listener: TcpListener | None = None,
    ) -> None:
        """Share `source` with `hosts`: their addresses ("10.0.0.1:7000"), or name -> address; `host` is this one.

        `capacity_bytes` is what this host may keep, `token` a secret of all
        hosts, `timeout_s` the longest wait for a peer. `listener` is an open
        port for this host (default: one at its address). Raises `InputError`.
        """
        addresses = dict(hosts) if isinstance(hosts, Mapping) else {name: name for name in hosts}
        if not isinstance(hosts, Mapping) and len(addresses) != len(hosts):
            raise InputError(f"hosts are {list(hosts)}; name each once.")
        if not 1 <= len(addresses) <= MOST_HOSTS or not timeout_s > 0:
            raise InputError(f"{len(addresses)} hosts, timeout_s {timeout_s}: pass 1 to {MOST_HOSTS}, a time above 0.")
        self._address = pick(addresses, host, "host")
        self._source, self.host = source, host
        self._token, self._listener = token, listener
        self._map = PartitionMap(len(source), addresses, seed=seed)
        self._numbers = {name: number for number, name in enumerate(self._map.hosts)}
        self._share = CacheShare(len(source), capacity_bytes, own=self._map.items(host), num_hosts=len(addresses))
        group = digest_of([seed, *self._map.hosts])
        self._identity = Identity(host, f"{source.fingerprint()}[{len(source)}]", group)
        self._peers = {
            name: CachePeer(name, address, token, self._identity, timeout_s)
            for name, address in addresses.items()
            if name != host
        }
        self._server: PeerServer | None = None
        self._started = False
        self._closed = threading.Event()
        self._news: list[str] = []
        _ALIVE.add(self)

    def start(self, wait_s: float = 60.0) -> Partitioned:
        """Answer the other hosts, and wait until each of them does; returns itself.

        Who is not there after `wait_s` is named in a warning and counts as
        away. Raises `DataShareError` when a host shares other data, other
        hosts or another seed, `InputError` when the address cannot be had.
        """
        if self._started:
            raise InputError("this cache has been started already. Make another one to begin anew.")
        if self._listener is None:
            self._listener = listen(*split_address(self._address), self._token)
        self._closed.clear()
        self._server = PeerServer(self._listener, self._identity, self._share)
        try:
            self._meet(self._server, wait_s)
        except BaseException:
            self.close()
            self._listener = None
            raise
        self._started = True
        self._warn()
        threading.Thread(target=self._keep_house, name="headway-partitioned", daemon=True).start()
        return self

    def close(self) -> None:
        """Leave: other hosts find this one gone. What it holds stays readable in this process."""
        self._closed.set()
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Partitioned:
        """Start, unless that was done."""
        return self if self._started else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Any:
        """Return item `index`: from this host's memory, else from the host that holds it, else from storage.

        Bytes, or what `headway.data.bytes.packing` can hold; a copy each time. Raises `InputError` before the
        start or outside the dataset, and what the source raises.
        """
        item = operator.index(index)
        if not self._started:
            raise InputError("the cache is not started. Call start(), or use it in a with block.")
        if not 0 <= item < len(self._source):
            raise InputError(
                f"item {item} is not in a source of {len(self._source)}. Use 0 to {len(self._source) - 1}."
            )
        held = self._share.get(item)
        if held is not None:
            self._share.count(local_hits=1, local_bytes=len(held) - 1)
            return _example(held)
        example = self._read_elsewhere(item)
        self._warn()
        return example

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return what the source says of it."""
        return self._source.meta(index)

    def fingerprint(self) -> str:
        """Return the source's."""
        return self._source.fingerprint()

    def statistics(self) -> PartitionedStatistics:
        """Return what this host's processes read so far; counts the items held one by one."""
        share = self._share
        return PartitionedStatistics(
            **share.counts(), held_items=share.held_items, held_bytes=share.held_bytes,
            capacity_bytes=share.capacity_bytes,
        )  # fmt: skip

    def holds(self, index: int) -> bool:
        """Return whether item `index` is in this host's memory."""
        return self._share.get(index) is not None

    def fill(self) -> int:
        """Copy items of other hosts into the room left, a sample of this host's own; returns how many.

        A thread does it once all items of all hosts have found their place.
        """
        held, used = self._share.held_items, self._share.held_bytes
        room = self._share.capacity_bytes - used
        copies = 0
        for item in self._map.copies(self.host, room * held // used if used else 0).tolist():
            if self._share.get(item) is not None:
                continue
            answers = (self._asked(host, item) for _, host in self._holders(item) if host != self.host)
            found = next((answer for answer in answers if isinstance(answer, Found)), None)
            if found is None:
                continue
            if self._closed.is_set() or not self._share.copy(item, bytes(found.payload)):
                break
            copies += 1
        self._share.count(copies=copies)
        return copies

    def __getstate__(self) -> dict[str, Any]:
        """Leave the server behind: a copy in another process reads and fills the same memory."""
        return {**self.__dict__, "_server": None, "_listener": None, "_closed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over all but the server."""
        self.__dict__.update(state, _closed=threading.Event())
        _ALIVE.add(self)

    def after_fork(self) -> None:
        """In a forked child: have locks and connections of its own, and let go of the parent's."""
        self._closed = threading.Event()
        for peer in self._peers.values():
            peer.abandon()
        if self._server is not None:
            self._server.abandon()
        self._server = self._listener = None

    def _read_elsewhere(self, item: int) -> object:
        """Return an item that is not in this host's memory: from the host that holds it, else from storage."""
        holders = self._holders(item)
        for rank, host in holders:
            answer = Absent(self._share.refused(item)) if host == self.host else self._asked(host, item)
            if isinstance(answer, Found):
                self._share.count(peer_hits=1, peer_bytes=len(answer.payload) - 1)
                return _example(answer.payload)
            if isinstance(answer, Absent) and not answer.refused:
                example, payload = self._stored(item)
                self._settle(item, payload, itertools.chain([(rank, host)], holders))
                return example
            if answer is not None:
                self._share.raise_level(item, rank)
        return self._stored(item)[0]

    def _holders(self, item: int) -> Iterator[tuple[int, str]]:
        """Yield the hosts that may hold `item`, best first, each with how many are full when it is; not who is away."""
        level = self._share.level(item)
        if level == 0:
            # Nearly always the answer, and one look into a table.
            owner = self._map.owner(item)
            if not self._away(owner):
                yield 1, owner
        if level < len(self._numbers):
            for rank, host in enumerate(self._map.ranked(item)[max(level, 1) :], start=max(level, 1) + 1):
                if not self._away(host):
                    yield rank, host

    def _away(self, host: str) -> bool:
        return self._share.away(self._numbers[host])

    def _asked(self, host: str, item: int) -> Found | Absent | None:
        """Return the answer of a peer, None where it gives none."""
        try:
            return self._peers[host].get(item)
        except UNUSABLE as error:
            self._lost(host, error)
            return None

    def _settle(self, item: int, payload: bytes, holders: Iterable[tuple[int, str]]) -> None:
        """Give a payload to the first of its hosts that has room for it; one that no message can carry is not kept."""
        if len(payload) > MOST_PAYLOAD_BYTES:
            return
        for rank, host in holders:
            try:
                kept = (self._share if host == self.host else self._peers[host]).keep(item, payload)
            except UNUSABLE as error:
                self._lost(host, error)
                continue
            if kept:
                return
            self._share.raise_level(item, rank)

    def _stored(self, item: int) -> tuple[Any, bytes]:
        """Return item `item` as the source gives it, and as bytes to keep."""
        example = self._source.read(item)
        # As it is, or packed; the last byte tells which.
        plain = isinstance(example, (bytes, bytearray, memoryview))
        payload = b"".join((example, RAW) if plain else (pack(example).to_bytes(), PACKED))
        self._share.count(storage_reads=1, storage_bytes=len(payload) - 1)
        return example, payload

    def _lost(self, host: str, error: Exception) -> None:
        """Note that a host is away; the first time, the next read that needs another host says so.

        The thread that looks after the hosts must not: a warning that is an
        error would end it, and hosts that end one after the other, as all do, would all warn.
        """
        before = self._share.set_standing(self._numbers[host], AWAY)
        if before != AWAY:
            self._share.count(peer_losses=1)
        if before == THERE:
            _log.info("%s is away: %s", host, error)  # where only forked workers read, nobody else says it
            self._news.append(f"{host} is away ({error}). Its items come from storage until it is back.")

    def _warn(self) -> None:
        """Say in the caller's thread which hosts are away since."""
        while self._news:
            with contextlib.suppress(IndexError):  # another thread says it
                warnings.warn(self._news.pop(0), RuntimeWarning, stacklevel=3)

    def _meet(self, server: PeerServer, wait_s: float) -> None:
        """Wait for all peers; one that shares something else may find out before we do."""
        deadline = time.monotonic() + wait_s
        missing = dict(self._peers)
        while missing:
            for host, peer in list(missing.items()):
                try:
                    peer.knock()
                    del missing[host]
                except LOST as error:
                    if time.monotonic() >= deadline:
                        self._lost(host, error)
                        del missing[host]
                if server.stranger is not None:
                    raise server.stranger

    def _keep_house(self) -> None:
        """Look for hosts that are back; fill the room left once everybody has settled."""
        pauses: dict[str, _Pause] = {host: _Pause() for host in self._peers}
        settled = filled = False
        while not self._closed.wait(TICK_S):
            for host, peer in self._peers.items():
                if self._away(host) and pauses[host].over():
                    self._knock(host, peer)
            # Twice in a row: what was refused in the last moment may still be on its way to another host.
            before, settled = settled, not filled and self._all_settled()
            if before and settled:
                filled = True
                self.fill()

    def _knock(self, host: str, peer: CachePeer) -> None:
        try:
            peer.knock()
        except UNUSABLE as error:
            _log.debug("%s is still away: %s", host, error)
        else:
            self._share.set_standing(self._numbers[host], BACK)
            _log.info("%s is back", host)

    def _all_settled(self) -> bool:
        """Return whether the items of all hosts, none of which is away, have found their place."""
        if not self._share.settled or any(map(self._away, self._peers)):
            return False
        for host, peer in self._peers.items():
            try:
                if not peer.settled():
                    return False
            except UNUSABLE as error:
                self._lost(host, error)
                return False
        return True


class _Pause:
    """Time between tries that fail: doubles, and begins anew when there was no reason to try for long."""

    def __init__(self) -> None:
        self._pause_s, self._next = TICK_S, 0.0

    def over(self) -> bool:
        """Return whether it is time to try; that begins the next pause."""
        now = time.monotonic()
        if now < self._next:
            return False
        calm = now > self._next + 2 * LONGEST_PAUSE_S
        self._pause_s = TICK_S if calm else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._next = now + self._pause_s
        return True


def _example(payload: memoryview) -> Any:
    """Return a copy of what the source gave."""
    body = payload[:-1]
    return bytes(body) if payload[-1:] == RAW else unpack(bytearray(body))


_ALIVE: weakref.WeakSet[Partitioned] = weakref.WeakSet()


def _forked() -> None:
    for cached in list(_ALIVE):
        cached.after_fork()


os.register_at_fork(after_in_child=_forked)
