"""A worker: prepares the splits that it is leased, and keeps the batches until their readers fetch them.

Stateless: what it holds can be prepared again by any other. `SplitPreparer` is the
part without sockets (a thread that makes batches, a shelf that holds them),
the same under processes and Ray; `serve` is the process around it.

>>> import numpy as np
>>> from headway.data.bytes.packing import unpack
>>> from headway.data.fleet.splits import FleetPass
>>> done = []
>>> preparer = SplitPreparer(lambda keys: np.array(keys.items), on_change=lambda: done.append(1))
>>> split = Split(FleetPass(4, batch_size=2, shuffle=False), rank=0, first=0, end=2)
>>> preparer.begin(split, generation=1, first=0)
>>> unpack(preparer.take(split, 1, 1, timeout_s=10.0).body())
array([2, 3])
>>> preparer.close()
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.errors import BackgroundError
from headway.core.wire.channel import Channel, ChannelClosed
from headway.core.wire.loop import ServiceLoop
from headway.data.bytes.account import ThreadTime, clocks
from headway.data.bytes.packing import pack
from headway.data.fleet.splits import (
    SCHEME,
    Address,
    BatchKeys,
    BatchMissing,
    Beat,
    Broken,
    Fetch,
    FromMaster,
    PackedBatch,
    PrepareSplit,
    Ready,
    Register,
    Revoke,
    Split,
    SplitRequest,
    Stop,
    WorkerReport,
    dial,
    listen,
)
from headway.data.service.messages import RequestFailed

THRESHOLD = 8
"""Batches, ready or still to be made, below which a worker has room for another split."""
SEND_S = 2.0
"""Longest that a reader may leave a batch unread before its channel is closed."""

Make = Callable[[BatchKeys], Any]
"""Prepares one batch: a nested value that `headway.data.bytes.packing` can pack."""


@dataclass(slots=True)
class MemfdBatch:
    """A batch in a memory file of its own (`fd`), or what went wrong with it (`error`)."""

    fd: int = -1
    num_bytes: int = 0
    error: str = ""
    spent: ThreadTime = field(default_factory=ThreadTime)

    @classmethod
    def of(cls, value: Any) -> MemfdBatch:
        """Pack a value. Raises `InputError` on what cannot be packed."""
        parcel = pack(value)
        fd = os.memfd_create("headway-batch", os.MFD_CLOEXEC)
        os.ftruncate(fd, parcel.num_bytes)
        with mmap.mmap(fd, parcel.num_bytes) as memory, memoryview(memory) as view:
            parcel.write(view)
        return cls(fd, parcel.num_bytes)

    def body(self) -> bytes:
        """Return the packed bytes, and let go of the file."""
        body = os.pread(self.fd, self.num_bytes, 0)
        self.close()
        return body

    def close(self) -> None:
        """Let go of the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SplitPreparer:
    """One thread that makes the batches of leased splits, first leased first made. Safe for threads."""

    def __init__(self, make: Make, *, on_change: Callable[[], object], told_s: float = 0.0) -> None:
        """`on_change` is called, from the thread, after each batch.

        Before another split it waits up to `told_s` until `told` said what is finished.
        """
        self._make, self._on_change, self._told_s = make, on_change, told_s
        self._changed = threading.Condition()
        self._todo: deque[tuple[Split, int, int]] = deque()
        self._shelf: dict[tuple[Split, int], dict[int, MemfdBatch]] = {}
        self._next: dict[tuple[Split, int], int] = {}
        """Lease -> first batch that is not made."""
        self._prepared, self._busy_s, self._closed = 0, 0.0, False
        self._begun_s: float | None = None
        self.finished: deque[tuple[Split, int]] = deque()
        """Leases whose last batch is made, for whoever tells the master (`told`)."""
        self._thread = threading.Thread(target=self._run, name="headway-preparer", daemon=True)
        self._thread.start()

    def begin(self, split: Split, generation: int, first: int) -> None:
        """Prepare a split from batch `first` on."""
        with self._changed:
            urgent = not self.has_room()
            self._shelf[split, generation], self._next[split, generation] = {}, first
            # Without room it comes because a reader waits for it.
            (self._todo.appendleft if urgent else self._todo.append)((split, generation, first))
            self._changed.notify_all()

    def revoke(self, split: Split, generation: int) -> None:
        """Drop what is left of a lease."""
        with self._changed:
            self._next.pop((split, generation), None)
            for packed in self._shelf.pop((split, generation), {}).values():
                packed.close()
            self._changed.notify_all()

    def take(self, split: Split, generation: int, batch: int, *, timeout_s: float = 0.0) -> MemfdBatch | None:
        """Return a batch, which then is the caller's; None while it is not ready. Raises `KeyError` if it never is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coming(split, generation, batch), timeout_s)
            if self._coming(split, generation, batch):
                return None
            packed = self._shelf[split, generation].pop(batch)
            if not self._shelf[split, generation] and (split, generation) not in self._next:
                del self._shelf[split, generation]
            return packed

    def _coming(self, split: Split, generation: int, batch: int) -> bool:
        """Return whether a batch is still to be made."""
        made_to = self._next.get((split, generation), split.end)
        return made_to <= batch < split.end

    def told(self) -> None:
        """Note that the master knows of the lease that was finished first."""
        with self._changed:
            self.finished.popleft()
            self._changed.notify_all()

    def held(self) -> list[tuple[Split, int]]:
        """Return the leases of which something is left."""
        with self._changed:
            return list(self._shelf)

    def keep(self, leases: list[tuple[Split, int]]) -> None:
        """Drop every lease but these."""
        for split, generation in set(self.held()) - set(leases):
            self.revoke(split, generation)

    def has_room(self) -> bool:
        """Return whether fewer than `THRESHOLD` batches are ready or to be made."""
        with self._changed:
            ready = sum(map(len, self._shelf.values()))
            return ready + sum(split.end - first for (split, _), first in self._next.items()) < THRESHOLD

    def report(self) -> WorkerReport:
        """Return what a worker says of itself."""
        with self._changed:
            # Time on a batch that is not done counts too: else long ones would count too little.
            now_s = 0.0 if self._begun_s is None else time.monotonic() - self._begun_s
            return WorkerReport(sum(map(len, self._shelf.values())), self._prepared, self._busy_s + now_s)

    def close(self) -> None:
        """Stop after the batch that is being made, and drop everything."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for split, generation in self.held():
            self.revoke(split, generation)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
                # Else a master would blame what ends this process in the next split on the ones before it.
                self._changed.wait_for(lambda: not self.finished or self._closed, self._told_s)
                if self._closed:
                    return
                split, generation, first = self._todo.popleft()
            for batch in range(first, split.end):
                if not self._made(split, generation, batch):
                    break

    def _made(self, split: Split, generation: int, batch: int) -> bool:
        """Make one batch; False when the lease has ended or making it raised, so that nothing follows."""
        if self._closed or (split, generation) not in self._next:
            return False
        before, self._begun_s = clocks(), time.monotonic()
        try:
            packed = MemfdBatch.of(self._make(split.work.keys(batch, split.rank)))
        except Exception:  # it is the reader's to raise, when its loop reaches this batch
            packed = MemfdBatch(error=traceback.format_exc())
        packed.spent = before.until(clocks())
        with self._changed:
            self._busy_s, self._begun_s = self._busy_s + time.monotonic() - self._begun_s, None
            if (split, generation) not in self._next:
                packed.close()
                return False
            self._shelf[split, generation][batch] = packed
            self._prepared += 1
            self._next[split, generation] = batch + 1
            last = bool(packed.error) or batch + 1 == split.end
            if last:
                del self._next[split, generation]
                self.finished.append((split, generation))
            self._changed.notify_all()
        self._on_change()
        return not last


class WorkerProcess:
    """The process of a worker: a preparer, the master's channel, and those of readers, in one loop."""

    def __init__(
        self, name: str, master: Address, address: str, make: Make, *, token: str, lease_s: float, guest: bool
    ) -> None:
        """Listen at `address`; the master is at `master`."""
        self._guest = guest
        self._name, self._master_address, self._token = name, master, token
        self._loop = ServiceLoop(patience_s=math.inf, send_s=SEND_S)
        self._listener, self._address = listen(address, token, Fetch)
        self._loop.listen(self._listener, self._hear, self._lose)
        self._passes_fds = not self._address.startswith(SCHEME)
        self._preparer = SplitPreparer(make, on_change=self._loop.ring, told_s=SEND_S)
        self._master: Channel | None = None
        self._stopped = False
        self._alone_s = time.monotonic()
        self._beat_s = min(lease_s / 4, 0.5)
        self._beaten_s = 0.0
        self._asked: bool | None = None
        """Whether the last word to the master was of room; None = it has answered."""
        self._waiting: list[tuple[Channel, Fetch]] = []

    def run(self, patience_s: float) -> None:
        """Serve until the master says stop.

        Raises `BackgroundError` when the fleet has ended, or there was no master for `patience_s`.
        """
        while True:
            if self._master is None:
                self._dial(patience_s)
            self._loop.turn(min(self._beat_s, 0.05 if self._master is None else 1.0))
            if self._stopped:
                return
            self._serve()
            self._say()

    def close(self) -> None:
        """Let everybody go."""
        self._listener.close()
        self._loop.close(None)

    def _dial(self, patience_s: float) -> None:
        """Try once to reach the master, and tell it what is left from before."""
        try:
            channel = dial(self._master_address, self._token, 0.0, FromMaster)
            channel.send(
                Register(self._name, self._address, os.getpid(), self._preparer.held(), self._guest), timeout_s=SEND_S
            )
        except (ChannelClosed, TimeoutError) as error:
            if time.monotonic() - self._alone_s > patience_s:
                raise BackgroundError(f"worker {self._name} finds no master: {error}") from error
            return
        self._master, self._asked, self._beaten_s = channel, None, 0.0
        self._loop.add(channel, self._obey, self._lose)

    def _lose(self, channel: Channel, _: str = "") -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] is not channel]
        if channel is self._master:
            self._master, self._alone_s = None, time.monotonic()

    def _obey(self, _: Channel, message: msgspec.Struct) -> None:
        """Do what the master says."""
        if isinstance(message, PrepareSplit):
            self._asked = None
            self._preparer.begin(message.split, message.generation, message.first)
        elif isinstance(message, Revoke):
            if message.kept is not None:
                self._preparer.keep(message.kept)
            for split, generation in message.leases:
                self._preparer.revoke(split, generation)
        elif isinstance(message, RequestFailed):
            raise BackgroundError(message.text)
        elif isinstance(message, Stop):
            self._stopped = True

    def _hear(self, channel: Channel, fetch: Any) -> None:
        """Note what a reader wants."""
        self._waiting.append((channel, fetch))

    def _serve(self) -> None:
        """Answer every fetch that can be answered now."""
        waiting, self._waiting = self._waiting, []
        for channel, fetch in waiting:
            try:
                packed = self._preparer.take(fetch.split, fetch.generation, fetch.batch)
            except KeyError:
                self._loop.send(channel, BatchMissing(fetch.split, fetch.generation, fetch.batch))
                continue
            if packed is None:
                self._waiting.append((channel, fetch))
            else:  # where it cannot be sent the batch is gone: the next reader finds it missing
                self._answer(channel, fetch, packed)

    def _answer(self, channel: Channel, fetch: Fetch, packed: MemfdBatch) -> None:
        try:
            if packed.error:
                self._loop.send(channel, Broken(fetch.split, fetch.batch, packed.error))
            else:
                body, fds = (b"", (packed.fd,)) if self._passes_fds else (packed.body(), ())
                message = PackedBatch(fetch.split, fetch.batch, packed.num_bytes, packed.spent, body)
                self._loop.send(channel, message, fds)
        finally:
            packed.close()

    def _say(self) -> None:
        """Tell the master what is new."""
        while self._preparer.finished and self._told(Ready(*self._preparer.finished[0])):
            self._preparer.told()
        room, now_s = self._preparer.has_room(), time.monotonic()
        if self._asked != room and self._told(SplitRequest(room)):
            self._asked = room
        if now_s - self._beaten_s >= self._beat_s and self._told(Beat(self._preparer.report())):
            self._beaten_s = now_s

    def _told(self, message: msgspec.Struct) -> bool:
        """Tell the master, if there is one."""
        return self._master is not None and self._loop.send(self._master, message)


def serve(
    name: str,
    master: Address,
    address: str,
    make: Make,
    *,
    token: str = "",
    lease_s: float = 10.0,
    patience_s: float = 30.0,
    guest: bool = False,
) -> None:
    """Be a worker until the master says stop: what a process of a fleet runs, on any machine that has the data.

    `address` is where readers are to come (`tcp://host:0`: any port), `token`
    the fleet's secret over TCP. A `guest` is one that the fleet did not start.
    Raises `BackgroundError` with the reason when the fleet has ended, or there
    was no master for `patience_s`.
    """
    serving = WorkerProcess(name, master, address, make, token=token, lease_s=lease_s, guest=guest)
    try:
        serving.run(patience_s)
    finally:
        serving.close()
