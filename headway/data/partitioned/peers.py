"""How the hosts of a partitioned cache ask each other for items: over TCP, with a shared token.

`PeerServer` answers for one host's `CacheShare`; `CachePeer` is the way to another host,
for any number of threads. A peer that is dead, silent for `timeout_s` or
wrong raises one of LOST, and the caller goes to storage. Requests name items by
number; sizes come with the payloads.

>>> share = CacheShare(num_items=4, capacity_bytes=100, own=[0, 3], num_hosts=2)
>>> listener = listen("127.0.0.1", 0, token="secret")
>>> server = PeerServer(listener, Identity("a", "4 items", "seed 0"), share)
>>> peer = CachePeer("a", f"127.0.0.1:{listener.port}", "secret", Identity("b", "4 items", "seed 0"))
>>> peer.get(3), peer.keep(3, b"jpeg"), bytes(peer.get(3).payload), peer.settled()
(Absent(refused=False), True, b'jpeg', False)
>>> peer.close(), server.close()
(None, None)

What one host of a partitioned cache holds and knows, in memory that all its processes share.

A `CacheShare` keeps payloads by item (`headway.core.machine.arena`: never evicted, as in
CoorDL), which items it had no room for, how far down each item's list of
hosts is full, which hosts are away, and counts of what was read from where.
Forked loader workers see and change all of it; by pickle other processes of
the user get at the same memory. Any thread may call anything.

>>> share = CacheShare(num_items=4, capacity_bytes=10, own=[0, 1], num_hosts=2)
>>> share.keep(0, b"jpeg"), share.keep(1, b"a longer one"), share.refused(1), bytes(share.get(0))
(True, False, True, b'jpeg')
>>> share.count(local_hits=1, local_bytes=4)
>>> share.counts()["local_hits"], share.held_items, share.held_bytes, share.settled
(1, 1, 4, True)
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.machine.arena import Arena
from headway.core.machine.host import readable
from headway.core.wire.channel import Channel, ChannelClosed, TcpListener, connect_tcp
from headway.data.orders.job_order import DataShareError

COUNTS: dict[str, str] = {
    "local_hits": "reads that this host's own memory served", "local_bytes": "their bytes",
    "peer_hits": "reads that another host served", "peer_bytes": "their bytes",
    "storage_reads": "reads of the source", "storage_bytes": "their bytes",
    "served_hits": "reads of other hosts that this one served", "served_bytes": "bytes that were sent for them",
    "copies": "items of other hosts that were fetched into room left over",
    "peer_losses": "times that another host was found dead or silent",
    "settled": "items of this host's own that it holds, or has no room for",
}  # fmt: skip
"""What is counted, over all processes of a host."""

THERE, AWAY, BACK = range(3)
"""Standing of another host: never missed; found dead or silent; seen again since."""

_PLACE = {name: index for index, name in enumerate(COUNTS)}


class CacheShare:
    """One host's part of the cache. Hosts go by number, 0..num_hosts - 1."""

    def __init__(self, num_items: int, capacity_bytes: int, *, own: ArrayLike, num_hosts: int) -> None:
        """Begin empty; `own` are the [k] items that are this host's. Raises `InputError` on 0 items or bytes."""
        extra_bytes = 8 * (len(COUNTS) + num_hosts) + 3 * num_items
        self._arena = Arena(num_items, capacity_bytes, extra_bytes=extra_bytes)
        self.num_items = num_items
        """Items are numbered 0..num_items - 1."""
        self._num_hosts = num_hosts
        self._own = np.zeros(num_items, np.bool_)
        self._own[np.asarray(own, np.int64)] = True
        self._lay_out()

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the payloads may take."""
        return self._arena.capacity_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the payloads take now."""
        return self._arena.used_bytes

    @property
    def held_items(self) -> int:
        """Items that are here; counts them one by one."""
        return self._arena.num_filled

    def get(self, item: int) -> memoryview | None:
        """Return the payload of `item` without copying it, or None when it is not here."""
        return self._arena.get(item)

    @property
    def settled(self) -> bool:
        """Whether each of this host's own items is here, or had no room."""
        return int(self._counts[_PLACE["settled"]]) >= int(self._own.sum())

    def keep(self, item: int, payload: bytes) -> bool:
        """Store a payload, or return False where it does not fit; then it is never asked for again."""
        with self._arena.turn:
            known = self._refused[item] or self._arena.get(item) is not None
            kept = not self._refused[item] and self._arena.put(item, payload)
            self._refused[item] = not kept
        if self._own[item] and not known:
            self.count(settled=1)
        return kept

    def copy(self, item: int, payload: bytes) -> bool:
        """Store a payload that another host holds too, if there is room."""
        with self._arena.turn:
            if self._arena.capacity_bytes - self._arena.used_bytes < len(payload):
                return False
            return self._arena.put(item, payload)

    def refused(self, item: int) -> bool:
        """Return whether `item` had no room here."""
        return bool(self._refused[item])

    def level(self, item: int) -> int:
        """Return how many hosts, from the front of the item's list, are known to have had no room for it."""
        return int(self._level[item])

    def raise_level(self, item: int, level: int) -> None:
        """Note that host number `level` of the item's list has no room either, if that is known of those before it."""
        if self._level[item] == level - 1:
            self._level[item] = level

    def away(self, host: int) -> bool:
        """Return whether host number `host` is AWAY."""
        return bool(self._standing[host] == AWAY)

    def set_standing(self, host: int, standing: int) -> int:
        """Note whether a host is THERE, AWAY or BACK; returns what it was before."""
        with self._arena:
            before = int(self._standing[host])
            self._standing[host] = standing
        return before

    def count(self, **numbers: int) -> None:
        """Add to counts of COUNTS."""
        with self._arena:
            for name, number in numbers.items():
                self._counts[_PLACE[name]] += number

    def counts(self) -> dict[str, int]:
        """Return all counts of COUNTS."""
        return dict(zip(COUNTS, self._counts.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Name the memory: a copy in another process is the same share."""
        return {name: self.__dict__[name] for name in ("_arena", "num_items", "_num_hosts", "_own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the sender's memory."""
        self.__dict__.update(state)
        self._lay_out()

    def _lay_out(self) -> None:
        """Name the parts of the memory."""
        whole: NDArray[np.uint8] = np.frombuffer(self._arena.extra, np.uint8)
        numbers, levels = 8 * (len(COUNTS) + self._num_hosts), 2 * self.num_items
        self._counts = whole[:numbers].view(np.int64)[: len(COUNTS)]
        self._standing = whole[:numbers].view(np.int64)[len(COUNTS) :]
        self._level = whole[numbers : numbers + levels].view(np.uint16)
        self._refused = whole[numbers + levels :]


LOST = (ChannelClosed, TimeoutError)
"""What a call of `CachePeer` raises when its host cannot be counted on."""


class Identity(msgspec.Struct, tag=True, frozen=True):
    """First message in both directions: who speaks, and what both must agree on."""

    host: str
    dataset: str
    """Fingerprint of the source."""
    group: str
    """Hosts and seed: what the places of the items follow from."""


class Get(msgspec.Struct, tag=True):
    """Asks for an item."""

    item: int


class Found(msgspec.Struct, tag=True):
    """The item."""

    payload: memoryview


class Absent(msgspec.Struct, tag=True):
    """The item is not here; `refused`: there was no room for it, and never will be."""

    refused: bool


class Put(msgspec.Struct, tag=True):
    """Offers an item that was read from storage."""

    item: int
    payload: bytes


class PutResult(msgspec.Struct, tag=True):
    """Whether there was room for it."""

    kept: bool


class AskSettled(msgspec.Struct, tag=True):
    """Asks whether all items of a host have found their place."""


class Settled(msgspec.Struct, tag=True):
    """Whether they have."""

    settled: bool


AGAIN_S = 0.2
"""Longest try to connect again to a host that was there a moment ago; who is reading waits for it."""

REQUESTS = Identity | Get | Put | AskSettled
ANSWERS = Identity | Found | Absent | PutResult | Settled


def listen(address: str, port: int, token: str) -> TcpListener:
    """Listen for peers that hold `token`; port 0 takes any that is free. Raises `InputError`."""
    return TcpListener(address, port, token, types=REQUESTS)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" ("[::1]:7000" for IPv6). Raises `InputError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{address!r} is no address of a peer. Give host:port, such as 10.0.0.1:7000.")
    return host.strip("[]"), int(port)


class PeerServer:
    """Answers other hosts, a thread for each of their connections. It belongs to the process that made it."""

    def __init__(self, listener: TcpListener, identity: Identity, share: CacheShare) -> None:
        """Begin to answer from `share`."""
        self._listener, self._identity, self._share = listener, identity, share
        self.stranger: DataShareError | None = None
        """Set once a host came that shares something else; it is told so by our answer."""
        self._channels: set[Channel] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="headway-peers", daemon=True).start()

    def close(self) -> None:
        """Stop answering; peers find this host gone."""
        self._closed.set()
        self._listener.close()
        for channel in list(self._channels):
            channel.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, which must end when the parent does."""
        self._listener.abandon()
        for channel in self._channels:
            channel.abandon()
        self._channels = set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                # Closing a socket wakes nobody who polls it.
                if readable(self._listener.fileno(), 0.2) and not self._closed.is_set():
                    channel = self._listener.accept(0.0)
                    threading.Thread(target=self._serve, args=(channel,), name="headway-peer", daemon=True).start()
            except (*LOST, OSError):
                continue  # a stranger without the token, or one that left again

    def _serve(self, channel: Channel) -> None:
        self._channels.add(channel)
        try:
            while not self._closed.is_set():
                answer = self._answer(channel.receive()[0])
                if answer is None:
                    channel.close("it asked for an item that is not in the dataset")
                else:
                    channel.send(answer)
        except LOST:
            pass  # it will connect again if it needs us
        finally:
            self._channels.discard(channel)
            channel.close()

    def _answer(self, request: msgspec.Struct) -> msgspec.Struct | None:
        if isinstance(request, Identity):
            try:
                check_same(self._identity, request)
            except DataShareError as error:
                self.stranger = error
            return self._identity
        if isinstance(request, AskSettled):
            return Settled(self._share.settled)
        if not isinstance(request, (Get, Put)) or not 0 <= request.item < self._share.num_items:
            return None
        if isinstance(request, Put):
            return PutResult(self._share.keep(request.item, request.payload))
        payload = self._share.get(request.item)
        if payload is None:
            return Absent(self._share.refused(request.item))
        self._share.count(served_hits=1, served_bytes=len(payload))
        return Found(payload)


class CachePeer:
    """The way to another host: connections are made when needed, one per thread that asks at the same time."""

    def __init__(self, host: str, address: str, token: str, identity: Identity, timeout_s: float = 2.0) -> None:
        """Connect to nothing yet. Raises `InputError` on a bad address."""
        self.host = host
        self.address = address
        self._where, self._token, self._identity, self._timeout_s = split_address(address), token, identity, timeout_s
        self._idle: list[Channel] = []

    def get(self, item: int) -> Found | Absent:
        """Return the item, or why it is not there. Raises one of LOST, `DataShareError`."""
        answer: Found | Absent = self._ask(Get(item), (Found, Absent))
        return answer

    def keep(self, item: int, payload: bytes) -> bool:
        """Offer an item; returns whether there was room for it. Raises as `get` does."""
        return bool(self._ask(Put(item, payload), (PutResult,)).kept)

    def settled(self) -> bool:
        """Return whether all items that are the host's own have found their place. Raises as `get` does."""
        return bool(self._ask(AskSettled(), (Settled,)).settled)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connections behind."""
        return {**self.__dict__, "_idle": []}

    def knock(self) -> None:
        """Connect anew, to see whether the host is there. Raises as `get` does."""
        self._idle.append(self._connected(self._timeout_s))

    def close(self) -> None:
        """Close the connections that nobody uses now."""
        while self._idle:
            self._idle.pop().close()

    def abandon(self) -> None:
        """In a forked child: leave the parent's connections to the parent."""
        for channel in self._idle:
            channel.abandon()
        self._idle = []

    def _ask(self, request: msgspec.Struct, answers: tuple[type[msgspec.Struct], ...]) -> Any:
        try:
            channel = self._idle.pop()
        except IndexError:
            return self._asked(self._connected(self._timeout_s), request, answers)
        try:
            return self._asked(channel, request, answers)
        except ChannelClosed:
            # The host may have begun anew since; then all connections of before are dead.
            self.close()
            return self._asked(self._connected(min(self._timeout_s, AGAIN_S)), request, answers)

    def _asked(self, channel: Channel, request: msgspec.Struct, answers: tuple[type[msgspec.Struct], ...]) -> Any:
        try:
            channel.send(request, timeout_s=self._timeout_s)
            answer, _ = channel.receive(self._timeout_s)
            if not isinstance(answer, answers):
                raise ChannelClosed(f"{self.host} answered {request} with {answer}. Run one release on all hosts.")
        except BaseException:
            channel.close()  # an answer that comes late must not be taken for that to the next question
            raise
        self._idle.append(channel)
        return answer

    def _connected(self, timeout_s: float) -> Channel:
        channel = connect_tcp(*self._where, self._token, timeout_s, types=ANSWERS)
        try:
            channel.send(self._identity, timeout_s=self._timeout_s)
            self._check(channel.receive(self._timeout_s)[0])
        except BaseException:
            channel.close()
            raise
        return channel

    def _check(self, theirs: object) -> None:
        if not isinstance(theirs, Identity):
            raise ChannelClosed(f"{self.host} did not say what it shares. Run one release on all hosts.")
        check_same(self._identity, theirs)
        if theirs.host != self.host:
            raise DataShareError(f"{self.address} is {theirs.host}, not {self.host}. Give each host its own address.")


def check_same(ours: Identity, theirs: Identity) -> None:
    """Raise `DataShareError` when another host shares other data, or in another cache."""
    for what, one, other in (("data", ours.dataset, theirs.dataset), ("a cache", ours.group, theirs.group)):
        if one != other:
            raise DataShareError(
                f"{ours.host} shares {what} {one}, {theirs.host} {other}. Give all hosts the same source, hosts and "
                "seed."
            )
