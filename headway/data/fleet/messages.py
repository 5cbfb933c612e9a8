"""What master, workers and readers of a fleet tell each other, and how they reach each other.

An address is the path of a unix socket, or `tcp://host:port`, which needs the
fleet's token. Batches travel as packed memory (`headway.data.bytes.packing`), never
as pickles: on one machine in a memory file that is handed over, between
machines in the message.

>>> message = Fetch(Split(FleetPass(8, 2), 0, 0, 4), generation=7, batch=3)
>>> msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromReader) == message
True
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import BackgroundError, InputError
from headway.core.wire.channel import Channel, Listener, TcpListener, connect, connect_tcp
from headway.data.bytes.account import ThreadTime
from headway.data.fleet.master import SplitPlacement, WorkerReport
from headway.data.fleet.splits import FleetPass, Split

SCHEME = "tcp://"


class Register(msgspec.Struct, tag=True):
    """A worker is here, and still has these leases from before; a guest was not started by this fleet."""

    name: str
    address: str
    pid: int
    held: list[tuple[Split, int]]
    guest: bool = False


class Beat(msgspec.Struct, tag=True):
    """A worker lives."""

    report: WorkerReport


class SplitRequest(msgspec.Struct, tag=True):
    """A worker takes another split: any, or without `room` only one that a reader waits for."""

    room: bool


class Ready(msgspec.Struct, tag=True):
    """A worker has prepared a split."""

    split: Split
    generation: int


class PrepareSplit(msgspec.Struct, tag=True):
    """Prepare a split, from batch `first` on."""

    split: Split
    generation: int
    first: int


class Revoke(msgspec.Struct, tag=True):
    """These leases ended: drop what is left of them. `kept` are the only ones left, after a registration."""

    leases: list[tuple[Split, int]]
    kept: list[tuple[Split, int]] | None = None


class Stop(msgspec.Struct, tag=True):
    """Nobody needs this worker any more."""


class JoinPass(msgspec.Struct, tag=True):
    """A reader wants one rank of a pass, after `taken` batches (None: after what the master knows it took)."""

    client: str
    work: FleetPass
    rank: int
    taken: int | None
    data: str | None


class Joined(msgspec.Struct, tag=True):
    """The reader is in, after `taken` batches."""

    taken: int


class ReadProgress(msgspec.Struct, tag=True):
    """The reader's loop has taken so many batches, and has waited so long for them in all."""

    taken: int
    waited_s: float


class SplitLost(msgspec.Struct, tag=True):
    """The reader cannot get a split from the worker that holds it."""

    split: Split
    generation: int


class Placed(msgspec.Struct, tag=True):
    """Where the reader's next splits are."""

    placements: list[SplitPlacement]


class RequestRefused(msgspec.Struct, tag=True):
    """The master does not do what a reader or worker asked for; why, for its user."""

    why: str
    fatal: bool = False
    """The fleet has ended: nobody gets anything from it any more."""

    def error(self) -> InputError | BackgroundError:
        """Return what the peer that was refused raises: `BackgroundError` when the fleet has ended."""
        return BackgroundError(self.why) if self.fatal else InputError(self.why)


class Fetch(msgspec.Struct, tag=True):
    """A reader wants a batch from a worker."""

    split: Split
    generation: int
    batch: int


class PackedBatch(msgspec.Struct, tag=True):
    """A packed batch: `num_bytes` in the memory file that comes with it, or here; and what making it took."""

    split: Split
    batch: int
    num_bytes: int
    spent: ThreadTime
    body: bytes = b""


class BatchMissing(msgspec.Struct, tag=True):
    """The worker no longer has this batch, or never had."""

    split: Split
    generation: int
    batch: int


class Broken(msgspec.Struct, tag=True):
    """Preparing this batch raised; the worker's traceback."""

    split: Split
    batch: int
    error: str


class FleetStatusRequest(msgspec.Struct, tag=True):
    """What does the fleet do?"""


class FleetStatusReply(msgspec.Struct, tag=True):
    """What the fleet does."""

    statistics: dict[str, Any]


class Target(msgspec.Struct, tag=True):
    """How many workers there should be, besides those (by process id) that are about to leave."""

    workers: int
    leaving: list[int]


class GaveUp(msgspec.Struct, tag=True):
    """The sender ends, or starts no more processes; why, for those who use the fleet."""

    why: str


ToMaster = Register | Beat | SplitRequest | Ready | JoinPass | ReadProgress | SplitLost | FleetStatusRequest | GaveUp
FromMaster = PrepareSplit | Revoke | Stop | Joined | Placed | RequestRefused | FleetStatusReply | Target
FromReader = Fetch
FromWorker = PackedBatch | BatchMissing | Broken


def dial(address: str, token: str, timeout_s: float, types: Any) -> Channel:
    """Return a channel to whoever listens at `address`. Raises `ChannelClosed`, `InputError`."""
    if not address.startswith(SCHEME):
        return connect(address, timeout_s, types=types)
    return connect_tcp(*_host_and_port(address), token, timeout_s, types=types)


def listen(address: str, token: str, types: Any) -> tuple[Listener | TcpListener, str]:
    """Listen at `address` (port 0: any); returns the listener and the address that others dial."""
    if not address.startswith(SCHEME):
        return Listener(address, types=types), address
    host, port = _host_and_port(address)
    listener = TcpListener(host, port, token, types=types)
    return listener, f"{SCHEME}{host}:{listener.port}"


def _host_and_port(address: str) -> tuple[str, int]:
    """Return what is behind the scheme of `address`. Raises `InputError`."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if not port.isdigit():
        raise InputError(f"{address!r} is no address. Write tcp://host:port, or the path of a socket.")
    return host, int(port)
