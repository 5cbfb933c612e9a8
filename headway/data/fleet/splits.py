"""What a pass over the data consists of when workers prepare it, and what master, workers and readers say of it.

A pass fixes the global sequence and how it falls onto ranks, exactly as a
`DataLoader` of the same seed would deal it. A split is a run of batches of one
rank: it has one reader, so a reader needs no more workers than it is given,
and what was delivered is one number per rank. Units are (epoch, cursor
range), not files: workers compute the items themselves, and stay stateless.

An address is the path of a unix socket, or `tcp://host:port`, which needs the
fleet's token. Batches travel as packed memory (`headway.data.bytes.packing`), never
as pickles: on one machine in a memory file that is handed over, between
machines in the message.

>>> work = FleetPass(num_items=10, batch_size=2, world_size=2, shuffle=False)
>>> work.num_batches(0), work.keys(2, rank=1).items, work.position(1)
(3, [9], 4)
>>> work.splits(rank=0, taken=1, split_batches=2, most=2)
[Split(rank=0, first=0, end=2), Split(rank=0, first=2, end=3)]
>>> [partners(rank, 2, num_workers=5, most=3) for rank in (0, 1)]
[[0, 1, 2], [2, 3, 4]]
>>> message = Fetch(Split(FleetPass(8, 2), 0, 0, 4), generation=7, batch=3)
>>> msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Fetch) == message
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.wire.channel import Channel, Listener, TcpListener, connect, connect_tcp
from headway.data.bytes.account import ThreadTime
from headway.data.bytes.order import Permutation, Sequence, in_order, permute
from headway.data.service.messages import RequestFailed, StatusReply, StatusRequest


class BatchKeys(NamedTuple):
    """The items of one batch, and what their random numbers depend on."""

    items: list[int]
    occurrence: list[int]
    """How often each came before in this pass: 1 where a padded tail begins again."""
    seed: int
    epoch: int
    batch: int
    """Number of the global batch in its epoch."""
    rank: int


@dataclass(frozen=True, slots=True)
class FleetPass:
    """One pass over the data as all its ranks see it; equal passes deal equal batches in any process."""

    num_items: int
    batch_size: int
    """Items per rank and batch."""
    world_size: int = 1
    seed: int = 0
    epoch: int = 0
    start: int = 0
    """Position in the global sequence at which the pass begins."""
    shuffle: bool = True
    tail: str = "short"

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that cannot be."""
        self.sequence()
        derived_seed(self.seed)

    def sequence(self) -> Sequence:
        """Return how positions fall into batches."""
        return Sequence(self.num_items, self.batch_size, self.world_size, tail=self.tail, start=self.start)

    def num_batches(self, rank: int) -> int:
        """Return the batches of `rank` from `start` to the end."""
        return self.sequence().num_batches(rank)

    def position(self, taken: int) -> int:
        """Return the committed cursor once every rank took `taken` batches: what a state holds."""
        return self.sequence().position_after(taken)

    def keys(self, batch: int, rank: int) -> BatchKeys:
        """Return what batch `batch` of `rank` (0 = the first from `start`) is made of."""
        sequence = self.sequence()
        positions = sequence.positions(batch, rank)
        items: list[int] = _order(self.num_items, self.seed, self.epoch, self.shuffle)(
            positions % self.num_items
        ).tolist()
        again: list[int] = (positions // self.num_items).tolist()
        return BatchKeys(items, again, self.seed, self.epoch, self.start // sequence.global_batch + batch, rank)

    def splits(self, rank: int, taken: int, *, split_batches: int, most: int) -> list[Split]:
        """Return the next splits of `rank` after `taken` batches, `most` at most; the first may be partly taken."""
        total, first = self.num_batches(rank), taken // split_batches * split_batches
        starts = range(first, min(total, first + most * split_batches), split_batches)
        return [Split(self, rank, start, min(start + split_batches, total)) for start in starts]


@dataclass(frozen=True, slots=True)
class Split:
    """Batches `first` .. `end` - 1 of one rank of a pass."""

    work: FleetPass = field(repr=False)
    rank: int
    first: int
    end: int


@lru_cache(maxsize=4)
def _order(num_items: int, seed: int, epoch: int, shuffle: bool) -> Permutation:
    return permute(num_items, seed, epoch) if shuffle else in_order(num_items)


def partners(rank: int, num_ranks: int, *, num_workers: int, most: int) -> list[int]:
    """Return which of `num_workers` workers serve `rank`: an arc of them, `most` at most.

    Every rank has min(most, num_workers) workers; every worker has a rank as
    long as there are no more than `most` workers per rank. Raises `InputError`
    on a rank that is not one.
    """
    if not 0 <= rank < num_ranks or most < 1 or num_workers < 0:
        raise InputError(
            f"rank {rank} of {num_ranks} with {most} of {num_workers} workers cannot be. Use ranks 0 to num_ranks - 1 "
            "and at least one worker per rank."
        )
    first = rank * num_workers // num_ranks
    return [(first + k) % num_workers for k in range(min(most, num_workers))]


class SplitPlacement(NamedTuple):
    """Where a reader finds a split."""

    split: Split
    generation: int
    worker: str
    address: str


class WorkerReport(NamedTuple):
    """What a worker says of itself when it beats; counts and seconds since it started."""

    buffered: int = 0
    """Batches that are ready and not fetched."""
    prepared: int = 0
    """Batches made."""
    busy_s: float = 0.0
    """Time spent making them."""


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


class Target(msgspec.Struct, tag=True):
    """How many workers there should be, besides those (by process id) that are about to leave."""

    workers: int
    leaving: list[int]


class GaveUp(msgspec.Struct, tag=True):
    """The sender ends, or starts no more processes; why, for those who use the fleet."""

    why: str


ToMaster = Register | Beat | SplitRequest | Ready | JoinPass | ReadProgress | SplitLost | StatusRequest | GaveUp
FromMaster = PrepareSplit | Revoke | Stop | Joined | Placed | RequestFailed | StatusReply | Target
FromWorker = PackedBatch | BatchMissing | Broken


Address = str | Callable[[], str]
"""Where somebody listens, or what tells where that is now and raises `ChannelClosed` while it is nowhere."""


def dial(address: Address, token: str, timeout_s: float, types: Any) -> Channel:
    """Return a channel to the listener at `address`. Raises `ChannelClosed`, `InputError`."""
    address = address if isinstance(address, str) else address()
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
