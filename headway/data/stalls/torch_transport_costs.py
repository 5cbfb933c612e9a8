"""What it costs in CPU time to hand a batch to another process: our ring of shared slots, torch's queue, a pipe.

Each way starts from a batch in the producer's memory. The ring copies it into
a slot; the pipe sends its bytes; the queue gets a fresh tensor of it, as it
moves a tensor's memory and the producer needs a new one each time. The
consumer, in a process of its own, reads one byte per page of every batch. CPU
seconds of both processes together, per batch; rounds are interleaved. The
first batch of every round is compared whole, outside the measurement.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray

from headway.core.errors import DamageError
from headway.core.machine.ring import Ring, RingReader
from headway.core.wire.channel import Channel, pair

SHAPE = (32, 224, 224, 3)
"""Of a batch of uint8: 4.8 MB."""
BATCH_BYTES = 32 * 224 * 224 * 3
BATCHES = 40
"""Batches per way and round."""
SLOTS, PAGE = 4, 4096

Bytes = NDArray[np.uint8]
Check = Callable[[Any], int]


class SlotFilled(msgspec.Struct, tag=True, array_like=True):
    """A slot of the ring holds a batch."""

    slot: int
    generation: int


class Released(msgspec.Struct, tag=True, array_like=True):
    """The consumer released a slot."""


class Transport(Protocol):
    """A way from one process to another; made before the consumer forks."""

    def send(self, batch: Bytes) -> None:
        """Hand over a batch, in the producer."""
        ...

    def receive(self, check: Check) -> int:
        """Return what `check` makes of the bytes of the next batch, in the consumer."""
        ...


class ByRing:
    """A ring, and a channel beside it."""

    def __init__(self) -> None:
        self._ring = Ring(SLOTS, BATCH_BYTES)
        self._reader: RingReader | None = None
        self._num_ahead = 0
        self._ends: tuple[Channel, Channel] = pair(types=SlotFilled | Released)

    def send(self, batch: Bytes) -> None:
        """Wait for a free slot, fill it, say so."""
        if self._num_ahead == SLOTS:
            self._ends[0].receive()  # every release is taken note of, or they would fill the socket
            self._num_ahead -= 1
        slot = self._ring.take()
        if slot is None:
            raise DamageError("a slot was said to be released and is not. Check this host's memory.")
        self._num_ahead += 1
        np.copyto(np.frombuffer(self._ring.buffer(slot), np.uint8), batch.reshape(-1))
        self._ends[0].send(SlotFilled(slot, self._ring.publish(slot, batch.nbytes)))

    def receive(self, check: Check) -> int:
        """Look at a slot in place, release it."""
        if self._reader is None:
            self._reader = RingReader(self._ring.fd)
        filled, _ = self._ends[1].receive()
        found = check(np.frombuffer(self._reader.view(filled.slot, filled.generation), np.uint8))
        self._reader.release(filled.slot, filled.generation)
        self._ends[1].send(Released())
        return found


class ByPipe:
    """multiprocessing.Pipe with raw bytes: the best of the standard ways."""

    def __init__(self) -> None:
        self._receives, self._sends = multiprocessing.get_context("fork").Pipe(duplex=False)

    def send(self, batch: Bytes) -> None:
        """Write the bytes."""
        self._sends.send_bytes(batch.reshape(-1).data)

    def receive(self, check: Check) -> int:
        """Read the bytes."""
        return check(np.frombuffer(self._receives.recv_bytes(), np.uint8))


class ByQueue:
    """torch.multiprocessing.Queue of tensors, as torch's DataLoader uses it."""

    def __init__(self) -> None:
        self._queue = torch.multiprocessing.get_context("fork").Queue(SLOTS)
        self._queue.cancel_join_thread()  # whoever leaves early leaves nothing behind that matters

    def send(self, batch: Bytes) -> None:
        """Put a new tensor."""
        self._queue.put(torch.from_numpy(batch).clone())

    def receive(self, check: Check) -> int:
        """Get the tensor."""
        return check(self._queue.get().numpy().reshape(-1))


WAYS: dict[str, Callable[[], Transport]] = {"ring": ByRing, "queue": ByQueue, "pipe": ByPipe}
"""Name -> a way from one process to another."""


def costs(rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per batch of every way and round. Raises `DamageError` when a batch came as another.

    Forks: call it before threads are started.
    """
    made, context = batches(), multiprocessing.get_context("fork")
    ways = {name: make() for name, make in WAYS.items()}
    (orders_in, orders), (answers, answers_in) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=consume, args=(ways, orders_in, answers_in), daemon=True)
    process.start()
    figures: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                orders.send(name)
                figures[name].append(_sent(way, name, made, answers))
        orders.send("")
        process.join(20)
    finally:
        process.kill()
        process.join()
    return figures


def batches() -> list[Bytes]:
    """Return a few different batches, the same in both processes."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, SHAPE, np.uint8) for _ in range(3)]


def touched(raw: Bytes) -> int:
    """Read one byte per page."""
    return int(raw[::PAGE].sum(dtype=np.int64))


def consume(ways: Mapping[str, Transport], orders: Any, answers: Any) -> None:
    """Receive what `orders` announce, until an empty name; answer with checksums and CPU seconds."""
    torch.set_num_threads(1)
    while name := orders.recv():
        way = ways[name]
        whole = way.receive(zlib.crc32)
        before = time.process_time()
        pages = [way.receive(touched) for _ in range(BATCHES)]
        answers.send((whole, pages, time.process_time() - before))


def _sent(way: Transport, name: str, made: Sequence[Bytes], answers: Any) -> float:
    """Send a round's batches; return the CPU seconds per batch of both processes."""
    way.send(made[0])
    sequence = [made[k % len(made)] for k in range(BATCHES)]
    before = time.process_time()
    for batch in sequence:
        way.send(batch)
    whole, pages, theirs = answers.recv()
    spent = time.process_time() - before + theirs
    if whole != zlib.crc32(made[0].data) or pages != [touched(batch.reshape(-1)) for batch in sequence]:
        raise DamageError(f"the batches that came by {name} are not those that were sent. Check this host's memory.")
    return float(spent / BATCHES)
