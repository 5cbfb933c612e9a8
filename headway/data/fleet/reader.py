"""A reader: the batches of one rank, in the order of their pass, from whichever workers have them.

Batches are fetched ahead by a thread of the reader's. What counts is how many
the loop took (`taken`): batches that were fetched and not taken are fetched
again by whoever reads on, and a batch that comes twice is used once. Workers
and masters may die meanwhile; the reader waits for their successors up to
`patience_s`, and then ends with one clear error. A fleet that has ended says
why, and the reader raises that at once.

>>> inbox = Inbox(taken=3, num_batches=9)
>>> inbox.put(4, b"later"), inbox.put(3, b"now"), inbox.put(3, b"again")
(True, True, False)
>>> inbox.take(), inbox.taken, list(inbox.needs(ahead=3))
(b'now', 4, [5, 6])
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from headway.core.errors import BackgroundError, HeadwayError
from headway.core.wire.channel import Channel, ChannelClosed
from headway.core.wire.loop import ServiceLoop
from headway.data.bytes.account import ThreadTime
from headway.data.fleet.splits import (
    Address,
    BatchMissing,
    Broken,
    Fetch,
    FleetPass,
    FromMaster,
    FromWorker,
    JoinPass,
    PackedBatch,
    Placed,
    ReadProgress,
    Split,
    SplitLost,
    SplitPlacement,
    dial,
)
from headway.data.service.messages import RequestFailed

AHEAD = 4
"""Batches that are fetched before the loop wants them."""
TELL_S = 0.25
"""How often the master hears from a reader that takes or waits."""
SEND_S = 2.0
"""Longest that a peer may leave a message unread before its channel is closed."""
DIAL_S = 0.05


class Delivered(NamedTuple):
    """A batch as it came."""

    body: Any = None
    """A buffer for `headway.data.bytes.packing.unpack`."""
    spent: ThreadTime = ThreadTime()
    """What making it took, in its worker."""


class PrepareError(HeadwayError):
    """Preparing a batch raised in a worker; the message ends with the worker's traceback."""


class Inbox:
    """What has come and what the loop took of it; the only thing that loop and thread share."""

    def __init__(self, taken: int, num_batches: int) -> None:
        self.taken, self.num_batches = taken, num_batches
        self.closed = False
        self._have: dict[int, Any] = {}
        self._failure: BaseException | None = None
        self._waited_s, self._waits_since_s = 0.0, 0.0
        self._changed = threading.Condition()

    @property
    def waited_s(self) -> float:
        """How long the loop has waited for batches, up to now."""
        since_s = self._waits_since_s
        return self._waited_s + (time.monotonic() - since_s if since_s else 0.0)

    def put(self, batch: int, value: Any) -> bool:
        """Keep a batch for the loop; False when it was taken or is here already."""
        with self._changed:
            if batch < self.taken or batch in self._have:
                return False
            self._have[batch] = value
            self._changed.notify_all()
            return True

    def fail(self, error: BaseException) -> None:
        """Let the loop raise `error` once it has taken what is here."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self) -> Any:
        """Wait for the next batch, and count it as taken. Raises what `fail` was given."""
        with self._changed:
            self._waits_since_s = time.monotonic()
            self._changed.wait_for(lambda: self.taken in self._have or self._failure is not None)
            self._waited_s, self._waits_since_s = self.waited_s, 0.0
            if self.taken not in self._have:
                assert self._failure is not None
                raise self._failure
            value = self._have.pop(self.taken)
            # One that could not be made was not taken: whoever reads on meets it again.
            self.taken += not isinstance(value, PrepareError)
            return value

    def needs(self, ahead: int) -> Iterator[int]:
        """Yield the batches to fetch now: the next `ahead` that are not here, none behind one that failed."""
        with self._changed:
            for batch in range(self.taken, min(self.taken + ahead, self.num_batches)):
                if batch not in self._have:
                    yield batch
                elif isinstance(self._have[batch], PrepareError):
                    return


class ReaderConnections:
    """The sockets of a reader, run by its thread: the master's, and one per worker that has something for it."""

    def __init__(
        self,
        address: Address,
        work: FleetPass,
        rank: int,
        *,
        data: str | None,
        token: str,
        patience_s: float,
        ahead: int,
        failure: Callable[[], str],
    ) -> None:
        self._address, self._token, self._patience_s, self._ahead = address, token, patience_s, ahead
        self._failure = failure
        client = f"{this_process()}/{time.monotonic_ns()}"
        self._join = JoinPass(client, work, rank, None, data)
        self._master: Channel | None = None
        self._alone_s = time.monotonic()
        self._workers: dict[str, Channel] = {}
        self._placements: list[SplitPlacement] = []
        self._asked: dict[tuple[Split, int, int], str] = {}
        """(Split, generation, batch) that was asked for -> at which address."""
        self._bad: set[tuple[Split, int]] = set()
        """Leases that the master knows to be lost."""
        self._told: tuple[int, float] = (-1, 0.0)
        self._loop = ServiceLoop(patience_s=math.inf, send_s=SEND_S)
        self._refused: HeadwayError | None = None
        self.inbox = Inbox(0, 0)

    def join(self, taken: int | None) -> Inbox:
        """Join the pass, in the caller's thread.

        Raises `InputError` when refused, `BackgroundError` when the fleet has ended or there is no master.
        """
        self._join.taken = taken
        answer = None
        while answer is None:
            if self._master is None:
                self._dial()
            try:
                answer = None if self._master is None else self._master.receive(timeout_s=self._patience_s)[0]
            except ChannelClosed:  # it died in between: there will be another
                assert self._master is not None
                self._loop.drop(self._master)
                self._lose(self._master)
            except TimeoutError as error:
                raise self._left_alone(error) from error
        if isinstance(answer, RequestFailed):
            raise answer.error()
        self.inbox = Inbox(answer.taken, self._join.work.num_batches(self._join.rank))
        return self.inbox

    def nudge(self) -> None:
        """Let the thread look at the inbox now."""
        self._loop.ring()

    def stop(self) -> None:
        """Let the thread end."""
        self.inbox.closed = True
        self.nudge()

    def run(self) -> None:
        """Fetch until the inbox is closed; a failure is the loop's to raise."""
        try:
            if self._master is not None:  # over TCP more may have come with the answer to `join`
                self._loop.hear(self._master)
            while not self.inbox.closed and self._refused is None:
                self._turn()
            if self._refused is not None:
                raise self._refused
            self._tell()
        except BaseException as error:  # nothing may be lost here: it surfaces at the loop's next batch
            self.inbox.fail(error)
        finally:
            self._loop.close(None)

    def _turn(self) -> None:
        if self._master is None:
            self._join.taken = self.inbox.taken
            self._dial()
        self._fetch()
        self._tell()
        self._loop.turn(TELL_S if self._master is not None else DIAL_S)

    def _dial(self) -> None:
        """Try to reach the master and join. Raises `BackgroundError` after `patience_s` without one, or a `failure`."""
        try:
            channel = dial(self._address, self._token, DIAL_S, FromMaster)
            channel.send(self._join, timeout_s=SEND_S)
        except (ChannelClosed, TimeoutError) as error:
            if why := self._failure():
                raise BackgroundError(why) from error
            if time.monotonic() - self._alone_s > self._patience_s:
                raise self._left_alone(error) from error
            return
        self._master, self._told = channel, (-1, 0.0)
        self._loop.add(channel, self._hear_master, self._lose)

    def _left_alone(self, error: Exception) -> BackgroundError:
        return BackgroundError(
            f"the fleet at {self._address} has had no master for {self._patience_s:g} s ({error}). Start it again and "
            "go on from the last state: nothing that was taken before it comes again."
        )

    def _lose(self, channel: Channel, _: str = "") -> None:
        if channel is self._master:
            self._master, self._alone_s = None, time.monotonic()
            return
        self._workers = {address: worker for address, worker in self._workers.items() if worker is not channel}
        # It may have died, or only the channel: ask once more, and be told then.
        self._asked = {key: address for key, address in self._asked.items() if address in self._workers}

    def _hear_master(self, _: Channel, message: msgspec.Struct) -> None:
        if isinstance(message, Placed):
            self._placements = message.placements
            here = {(place.split, place.generation) for place in message.placements}
            self._bad &= here
            self._asked = {key: at for key, at in self._asked.items() if key[:2] in here}
        elif isinstance(message, RequestFailed):
            self._refused = message.error()

    def _hear_worker(self, _: Channel, message: msgspec.Struct) -> None:
        if isinstance(message, PackedBatch):
            self.inbox.put(message.batch, Delivered(_memory(message, self._loop.fds), message.spent))
        elif isinstance(message, Broken):
            why = f"batch {message.batch} of rank {message.split.rank} could not be prepared:\n{message.error}"
            self.inbox.put(message.batch, PrepareError(why))
        elif isinstance(message, BatchMissing) and message.batch in set(self.inbox.needs(self._ahead)):
            self._lost(message.split, message.generation)

    def _fetch(self) -> None:
        """Ask workers for the batches that the loop needs soon, each once per lease."""
        for batch in self.inbox.needs(self._ahead):
            for place in self._placements:
                key = (place.split, place.generation, batch)
                if place.split.first <= batch < place.split.end and key not in self._asked:
                    self._ask(place, batch)

    def _ask(self, place: SplitPlacement, batch: int) -> None:
        if (place.split, place.generation) in self._bad:
            return
        sent = False
        with contextlib.suppress(ChannelClosed):
            if place.address not in self._workers:
                self._workers[place.address] = dial(place.address, self._token, DIAL_S, FromWorker)
                self._loop.add(self._workers[place.address], self._hear_worker, self._lose)
            sent = self._loop.send(self._workers[place.address], Fetch(place.split, place.generation, batch))
        if sent:
            self._asked[place.split, place.generation, batch] = place.address
        else:
            self._lost(place.split, place.generation)

    def _lost(self, split: Split, generation: int) -> None:
        """Tell the master that a lease is of no use."""
        if self._master is not None and (split, generation) not in self._bad:
            self._bad.add((split, generation))
            self._loop.send(self._master, SplitLost(split, generation))

    def _tell(self) -> None:
        """Tell the master how far the loop is."""
        now = (self.inbox.taken, self.inbox.waited_s)
        if self._master is not None and now != self._told and self._loop.send(self._master, ReadProgress(*now)):
            self._told = now


def this_process() -> str:
    """Return what the name of every reader of this process begins with."""
    return f"{os.uname().nodename}/{os.getpid()}"


class FleetReader:
    """An iterator over the packed batches of one rank (`Delivered`). Close it, or read it to the end."""

    def __init__(
        self,
        address: Address,
        work: FleetPass,
        rank: int = 0,
        *,
        taken: int | None = 0,
        data: str | None = None,
        token: str = "",
        patience_s: float = 30.0,
        ahead: int = AHEAD,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        """Join a pass after `taken` batches (None: where the master last saw this rank).

        `data` is the fingerprint of the data that is expected. `failure` tells
        why there will be no other master; empty: there may be one. Raises
        `InputError` when the master refuses, `BackgroundError` when the fleet
        has ended or there was no master for `patience_s`.
        """
        fetcher = ReaderConnections(
            address, work, rank, data=data, token=token, patience_s=patience_s, ahead=ahead, failure=failure
        )
        self._inbox, self._fetcher = fetcher.join(taken), fetcher
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=fetcher.run, name="headway-reader", daemon=True)
        self._thread.start()
        weakref.finalize(self, fetcher.stop)

    @property
    def taken(self) -> int:
        """Batches that the loop has got, from the start of the pass."""
        return self._inbox.taken

    def __iter__(self) -> FleetReader:
        """Return itself."""
        return self

    def __next__(self) -> Delivered:
        """Return the next batch. Raises `PrepareError` for one that cannot be made, `BackgroundError`, `InputError`."""
        if self._failure is not None:
            raise self._failure
        if self._inbox.closed or self._inbox.taken >= self._inbox.num_batches:
            self.close()
            raise StopIteration
        try:
            batch = self._inbox.take()
            if isinstance(batch, PrepareError):
                raise batch
        except Exception as error:
            self._failure = error  # and again at each further call: an epoch never just ends early
            self.close()
            raise
        self._fetcher.nudge()
        delivered: Delivered = batch
        return delivered

    def close(self) -> None:
        """Leave; the master is told how many batches were taken. Doing it again is fine."""
        self._fetcher.stop()
        self._thread.join(SEND_S)


def _memory(message: PackedBatch, fds: list[int]) -> Any:
    """Return the packed batch as a buffer of this process's own, without copying it where it came as a file."""
    if not fds:
        return bytearray(message.body)
    # Private: what the loop writes into its batch is its own affair.
    return mmap.mmap(fds[0], message.num_bytes, flags=mmap.MAP_PRIVATE)
