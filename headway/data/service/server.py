"""The data server: a loop over sockets around its `service`, threads that prepare, a ring of slots per client.

Use it through `DataLoader(server="auto")` or `headway data serve`. Clients
speak `headway.data.service.messages`; each finished batch is gathered straight into a
slot of its client's ring, and the slot is free again when the client's loop
has let go of the batch. A client that dies frees its slots and leaves its job;
one that does not read, or sends nonsense, is dropped; the others go on.

>>> DataServer(order="sharde")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: unknown order 'sharde'. Did you mean 'shared'? Choose one of: auto, ...
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from headway import __version__
from headway.core.errors import HeadwayError, InputError
from headway.core.machine.ring import Ring
from headway.core.wire.channel import Channel, Listener
from headway.core.wire.loop import ServiceLoop
from headway.data.bytes.packing import Parcel, pack, unpack
from headway.data.cached.partition import FORMS
from headway.data.service.batches import Batch, Ended, Ints, Payload, PreparationTime
from headway.data.service.flights import PreparationTask
from headway.data.service.jobs import JobTerms, not_come
from headway.data.service.messages import (
    PROTOCOL,
    Begin,
    Decided,
    Filled,
    Freed,
    Join,
    Over,
    RequestFailed,
    Rings,
    StatusReply,
    StatusRequest,
    Waiting,
    Welcome,
)
from headway.data.service.service import PreparationScheduler
from headway.data.service.stock import DataServer

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

SEND_S = 10.0
"""A client that does not read for so long is dropped."""

WAITS_S = 10.0
"""How long ranks wait for one that has gone before they are told so."""

WORK_S = 0.5
"""How long a thread waits for work before it looks whether the server ends."""

SPARE = 1.125
"""Slots are so much larger than the first batch: examples vary in size."""


class Preparer(Protocol):
    """What a server serves. Write a class of this shape; there is nothing to subclass."""

    size: int
    """Items of the dataset."""
    fingerprint: str
    """What tells dataset and pipeline from others."""
    forms: tuple[str, ...]
    """What a preparation passes through: see `headway.data.service.service.PreparationScheduler`."""
    notes: list[str]
    """What users should know of how it is read."""

    def prepare(self, work: PreparationTask) -> tuple[Mapping[str, Payload] | None, PreparationTime]:
        """Return the forms of an item, packed, or None when it is left out; called by several threads."""
        ...

    def assemble(self, items: Ints, examples: list[Any]) -> Any | None:
        """Return the batch of [k] examples as a tree to pack, or None where they must be sent as they are."""
        ...


@dataclass(slots=True, eq=False)
class Client:
    """A connected process: one rank of a job, once it has joined."""

    channel: Channel
    join: Join | None = None
    begun: int = -1
    """Number of its pass."""
    warned: bool = False
    """Whether it has been told which other ranks its job waits for."""
    rings: dict[int, Ring] = field(default_factory=dict)
    """Number -> ring; batches go into the newest, earlier ones wait for their slots to be freed."""

    @property
    def ring(self) -> Ring | None:
        """The ring that is filled now."""
        return self.rings[max(self.rings)] if self.rings else None

    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return self.ring is None or self.ring.num_free > 0

    def tidy(self) -> None:
        """Let go of earlier rings that nobody reads any more."""
        for number in [
            n for n, ring in self.rings.items() if ring is not self.ring and ring.num_free == ring.num_slots
        ]:
            self.rings.pop(number).close()


class Daemon:
    """The loop. `run` returns when the server was idle for long enough, or told to `stop`."""

    def __init__(self, listener: Listener, preparer: Preparer, options: DataServer, *, seed: int) -> None:
        """Serve what `preparer` prepares to who connects to `listener`; `seed` must be new for each server."""
        self._listener, self._preparer, self._options = listener, preparer, options
        self._loop = ServiceLoop(patience_s=math.inf, send_s=SEND_S)
        if options.split == "auto" and len(preparer.forms) == 1:  # nothing to measure: there is one form to keep
            one, two, three = (float(form in preparer.forms) for form in FORMS)
            options = replace(options, split=(one, two, three))
        self._service = PreparationScheduler(
            preparer.size, fingerprint=preparer.fingerprint, forms=preparer.forms, seed=seed, options=options,
            on_ready=self._loop.ring,
        )  # fmt: skip
        self._clients: dict[Channel, Client] = {}
        self._ranks: dict[tuple[str, int], Client] = {}
        self._stopped = threading.Event()
        self._began_s = self._idle_since_s = time.monotonic()
        self._threads = [
            threading.Thread(target=self._prepare, name=f"headway-prepare-{k}", daemon=True)
            for k in range(options.num_threads)
        ]

    def stop(self) -> None:
        """End the loop soon; any thread and signal handler may call it."""
        self._stopped.set()
        self._loop.ring()

    def abandon(self) -> None:
        """In a forked child of ours (a dataset may fork): let go of what would pass for this server after its end."""
        self._listener.abandon()
        for channel in list(self._clients):
            channel.abandon()

    def run(self) -> None:
        """Serve until idle or stopped, and close everything."""
        self._loop.admit(self._listener, self._admit)
        for thread in self._threads:
            thread.start()
        LOG.info(
            "serving %s at %s with %d threads", self._preparer.fingerprint, self._listener.path, len(self._threads)
        )
        try:
            while not self._stopped.is_set() and time.monotonic() - self._idle_since_s <= self._options.idle_s:
                self._loop.turn(1.0)
                if self._clients:
                    self._idle_since_s = time.monotonic()
                self._give_up()
                self._deliver()
        finally:
            self._close()

    def _close(self) -> None:
        """Tell everybody, stop the threads."""
        self._stopped.set()
        self._listener.close()
        self._service.close()
        for client in list(self._clients.values()):
            self._drop(client, "the server ends")
        for thread in self._threads:
            thread.join(5.0)
        self._loop.close()
        LOG.info("ended")

    # Clients.

    def _admit(self, channel: Channel) -> None:
        client = self._clients[channel] = Client(channel)
        self._loop.add(
            channel, lambda _, message: self._hear(client, message), lambda _, why: self._drop(client, log=why),
            with_process=True,
        )  # fmt: skip

    def _hear(self, client: Client, message: msgspec.Struct) -> msgspec.Struct | None:
        try:
            return self._answer(client, message)
        except InputError as error:
            self._refuse(client, error)
            return None

    def _answer(self, client: Client, message: msgspec.Struct) -> msgspec.Struct | None:
        """Do what a message asks; returns the reply. Raises `InputError` where it cannot be done."""
        if isinstance(message, Join):
            return self._join(client, message)
        if isinstance(message, StatusRequest):
            return StatusReply(self._facts())
        if client.join is None:
            raise InputError("a client begins before it has joined. Send Join first.")
        if isinstance(message, Begin):
            client.begun = message.number
            self._service.begin(
                client.join.job, client.join.rank, epoch=message.epoch, remaining=message.remaining,
                history=message.history, index=message.index, known=message.known(),
            )  # fmt: skip
            self._tell(client)
        elif isinstance(message, Freed):
            client.tidy()
        return None

    def _join(self, client: Client, join: Join) -> Welcome:
        if join.protocol != PROTOCOL or client.join is not None:
            raise InputError(
                f"this server speaks protocol {PROTOCOL} (headway {__version__}), the client {join.protocol}. "
                "Use one release of headway, and join once."
            )
        terms = JobTerms(join.batch_size, join.world_size, join.shuffle, join.tail)
        if self._service.is_outlived(join.job, join.rank, terms):
            self._service.leave(join.job)  # its other ranks never came: this is the next run of that name
        self._service.check_on_time(join.job, join.rank)
        is_first = join.job not in self._service.jobs
        if is_first:
            self._service.join(join.job, fingerprint=join.fingerprint, terms=terms, items=join.items)
        else:
            self._check_same(join)
        try:
            self._service.attach(join.job, join.rank)
        except InputError:
            if is_first:
                self._service.leave(join.job)
            raise
        client.join = join
        self._ranks[join.job, join.rank] = client
        LOG.info("rank %d of job %s came (process %s)", join.rank, join.job, client.channel.peer.pid)
        return Welcome(options=self._options.shared(), notes=self._preparer.notes)

    def _check_same(self, join: Join) -> None:
        """Raise `InputError` when a rank means its job to be another one than its fellow ranks do."""
        other = next((c.join for c in self._ranks.values() if c.join and c.join.job == join.job), None)
        if other is None:
            return
        fields = ("fingerprint", "world_size", "batch_size", "shuffle", "tail", "items")
        wrong = [name for name in fields if not np.array_equal(getattr(other, name), getattr(join, name))]
        if wrong:
            raise InputError(
                f"rank {join.rank} of job {join.job!r} differs from rank {other.rank} in {', '.join(wrong)}. "
                "Give all ranks of a job the same loader, or another job another name."
            )

    def _drop(self, client: Client, reason: str | None = None, *, log: str = "") -> None:
        """Let a client go: its slots are freed with its ring, its rank leaves the job."""
        if self._clients.pop(client.channel, None) is None:
            return
        self._loop.drop(client.channel, reason)
        for ring in client.rings.values():
            ring.close()
        if client.join is not None:
            del self._ranks[client.join.job, client.join.rank]
            if client.join.job in self._service.jobs:  # it may have been given up
                self._service.detach(client.join.job, client.join.rank)
            LOG.info("rank %d of job %s left: %s", client.join.rank, client.join.job, reason or log)
            self._tell_others(client.join)

    def _refuse(self, client: Client, error: HeadwayError) -> None:
        """Tell a client why, and let it go."""
        self._loop.send(client.channel, RequestFailed.of(error))
        self._drop(client, log=str(error))

    def _give_up(self) -> None:
        """Tell ranks, once, which others they wait for; let the jobs go whose missing ranks do not come."""
        for job, missing in self._service.overdue(WAITS_S).items():
            for (name, rank), client in list(self._ranks.items()):
                if name == job and rank not in missing and not client.warned:
                    client.warned = True
                    self._loop.send(client.channel, Waiting(missing, WAITS_S, self._options.grace_s))
        for job, missing in self._service.overdue().items():
            self._service.give_up(job, missing)
            for client in [client for (name, _), client in self._ranks.items() if name == job]:
                self._refuse(client, not_come(job, missing, self._options.grace_s))
            LOG.warning("job %s was given up: rank %s did not come", job, missing)

    def _tell_others(self, join: Join) -> None:
        """Tell the ranks of a job what they need to go on without one that has left, or has had its last batch."""
        for client in [client for (job, rank), client in self._ranks.items() if job == join.job and rank != join.rank]:
            self._tell(client)

    def _tell(self, client: Client) -> None:
        """Tell a rank what it needs should this server be lost; before who has had its last batch hears of that."""
        assert client.join is not None
        for ahead, number, known in self._service.known(client.join.job, client.join.rank):
            self._loop.send(client.channel, Decided(begun=client.begun + ahead, number=number, known=known))

    # Batches.

    def _prepare(self) -> None:
        """Prepare items until the server ends: what a thread does."""
        while not self._stopped.is_set():
            work = self._service.next_work(WORK_S)
            if work is None:
                continue
            try:
                forms, spent = self._preparer.prepare(work)
            except BaseException as error:  # sys.exit() too: it would end this thread, and the batch would never come
                self._service.failed(work, f"{type(error).__name__}\n{traceback.format_exc()}")
                continue
            if forms is None:
                self._service.failed(work, None, spent)
            else:
                self._service.done(work, forms, spent)

    def _deliver(self) -> None:
        """Send what is ready to who has room."""
        for job, rank in self._service.ready():
            client = self._ranks.get((job, rank))
            if client is not None:
                try:
                    self._serve(client, job, rank)
                except InputError as error:
                    self._refuse(client, error)

    def _serve(self, client: Client, job: str, rank: int) -> None:
        while client.channel in self._clients and client.has_room():
            found = self._service.take(job, rank)
            if found is None:
                return
            if isinstance(found, Ended):
                assert client.join is not None
                self._tell_others(client.join)
                counts, finding = self._counts()
                self._loop.send(client.channel, Over(client.begun, counts, self._service.substitutions(job), finding))
                return
            self._send(client, found)

    def _send(self, client: Client, batch: Batch) -> None:
        """Gather a batch into a slot and tell the client."""
        assert client.join is not None
        error, parcel, collated = batch.error, None, False
        if error is None:
            try:
                parcel, collated = self._parcel(batch, collated=client.join.collated)
            except Exception as failure:  # what the examples are like is the user's business, and the user's to hear
                error = f"{type(failure).__name__}\n{traceback.format_exc()}"
        ring, slot, generation = (-1, -1, 0) if parcel is None else self._fill(client, parcel)
        filled = Filled(
            ring=ring, slot=slot, generation=generation, begun=client.begun, collated=collated,
            num_missing=batch.payloads.count(None), fetch_ns=batch.fetch_ns,
            prep_ns=batch.prep_ns, read_bytes=batch.read_bytes, error=error,
            everybody=None if error is None else batch.everybody,
        )  # fmt: skip
        self._loop.send(client.channel, filled)

    def _parcel(self, batch: Batch, *, collated: bool) -> tuple[Parcel, bool]:
        """Return the batch, measured, and whether it is collated."""
        here = [place for place, payload in enumerate(batch.payloads) if payload is not None]
        examples = [unpack(payload) for payload in batch.payloads if payload is not None]
        tree = self._preparer.assemble(batch.items[here], examples) if collated else None
        return pack((batch.everybody, examples if tree is None else tree)), tree is not None

    def _fill(self, client: Client, parcel: Parcel) -> tuple[int, int, int]:
        """Write a parcel into a free slot; return ring, slot, generation."""
        ring = client.ring
        if ring is None or parcel.num_bytes > ring.slot_bytes:
            assert client.join is not None
            number = max(client.rings, default=-1) + 1
            slots = self._options.window + client.join.num_held
            ring = client.rings[number] = Ring(slots, int(parcel.num_bytes * SPARE) + 4096)
            self._loop.send(client.channel, Rings(number), [ring.fd])
            client.tidy()
        slot = ring.take()
        assert slot is not None, "a batch was taken without a slot for it"
        parcel.write(ring.buffer(slot))
        return max(client.rings), slot, ring.publish(slot, parcel.num_bytes)

    def _facts(self) -> dict[str, Any]:
        """Return how the server is: what `headway data status` shows."""
        return {
            "path": str(self._listener.path),
            "pid": os.getpid(),
            "version": __version__,
            "up_s": time.monotonic() - self._began_s,
            "threads": len(self._threads),
            "options": self._options.shared(),
            "notes": self._preparer.notes,
            "clients": len(self._ranks),
            "ring_bytes": sum(r.num_bytes for client in self._clients.values() for r in client.rings.values()),
            **self._service.status(),
        }

    def _counts(self) -> tuple[dict[str, int], str]:
        """Return what was counted, flat, and why nothing is kept any more: what a client notes of a pass."""
        told = self._service.status()
        counts = {f"hits_{form}": count for form, count in told["hits"].items()}
        counts |= {f"prepared_from_{form}": count for form, count in told["prepared"].items()}
        return counts | {name: told[name] for name in ("shared", "read_bytes", "failed", "dropped")}, told["finding"]
