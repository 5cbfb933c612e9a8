"""A ring of equal slots in shared memory: one process fills them, another reads them in place, without a copy.

Use it to hand large payloads (batches) from process to process. The memory
has no name (memfd): pass `Ring.fd` over a `headway.core.wire.channel`, and it is
gone with its last holder. The writer takes a free slot, fills it in place and
publishes it; `slot` and `generation` then travel in a message. A slot is free
again when the reader has released that generation. A full ring is backpressure:
`take` returns None, nothing is overwritten.

Each word in the header has one process that writes it, so no lock or atomic
operation is needed: the writer owns generation and length, the reader the
generation that it released last.

>>> ring = Ring(num_slots=1, slot_bytes=100)
>>> slot = ring.take()
>>> ring.buffer(slot)[:5] = b"hello"
>>> generation = ring.publish(slot, 5)
>>> reader = RingReader(ring.fd)
>>> bytes(reader.view(slot, generation)), ring.take()
(b'hello', None)
>>> reader.release(slot, generation)
>>> ring.take()
0
"""

from __future__ import annotations

import mmap
import os

from headway.core.errors import DamageError, InputError

_MAGIC = 0x474E4952_59415748
_HEAD_WORDS = 8
_SLOT_WORDS = 8
"""Words (8 bytes) that the writer owns, per slot: generation, length; the rest is spare."""
_READER_WORDS = 8
"""Words that the reader owns: a cache line of its own, so that the two do not slow each other."""
_ROW_WORDS = _SLOT_WORDS + _READER_WORDS


class _Mapped:
    """The memory of a ring, as both sides see it: a head, a table of slots, the payloads."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        table = (_HEAD_WORDS + num_slots * _ROW_WORDS) * 8
        self._payloads = -(-table // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_bytes = self._payloads + num_slots * self._stride
        """Shared memory that the ring takes."""

    def map(self, fd: int) -> None:
        """Map the whole ring."""
        self._memory = memoryview(mmap.mmap(fd, self.num_bytes, mmap.MAP_SHARED))
        self._words = self._memory[: self._payloads].cast("Q")

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise InputError(f"slot {slot} is outside 0..{self.num_slots - 1}. Use a slot that the ring gave.")
        return _HEAD_WORDS + slot * _ROW_WORDS

    def _payload(self, slot: int, length: int) -> memoryview:
        begin = self._payloads + slot * self._stride
        return self._memory[begin : begin + length]


class Ring(_Mapped):
    """The writer's side: makes the memory, takes slots, publishes them. Threads must take turns."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Raise `InputError` on sizes below 1, and when the machine has not that much memory."""
        if num_slots < 1 or slot_bytes < 1:
            raise InputError(f"a ring of {num_slots} slots of {slot_bytes} bytes cannot be. Pass at least 1 of each.")
        super().__init__(num_slots, slot_bytes)
        self.fd = os.memfd_create("headway-ring", os.MFD_CLOEXEC)
        """What a reader maps."""
        try:
            # All pages now: one that is missing later would be a bus error in the middle of a copy.
            os.posix_fallocate(self.fd, 0, self.num_bytes)
        except OSError as error:
            os.close(self.fd)
            raise InputError(
                f"{self.num_bytes} bytes of shared memory for {num_slots} slots are not to be had ({error.strerror}). "
                "Make batches smaller, keep fewer ahead, or free memory."
            ) from error
        self.map(self.fd)
        for place, value in enumerate((_MAGIC, num_slots, slot_bytes, 1)):  # as earlier releases have it: 1 reader
            self._words[place] = value
        self._filling: set[int] = set()
        self._next = 0

    def take(self) -> int | None:
        """Return a free slot, which is the caller's to fill, or None while every slot is in use."""
        for step in range(self.num_slots):
            slot = (self._next + step) % self.num_slots
            if self.is_free(slot):
                self._next = slot + 1
                self._filling.add(slot)
                self._words[self._at(slot)] += 1
                return slot
        return None

    def buffer(self, slot: int) -> memoryview:
        """Return the memory of a taken slot, to write into. Raises `InputError` on any other slot."""
        self._check_taken(slot)
        return self._payload(slot, self.slot_bytes)

    def publish(self, slot: int, length: int) -> int:
        """Give the first `length` bytes of a taken slot to the reader; return the generation that names them."""
        self._check_taken(slot)
        if not 0 <= length <= self.slot_bytes:
            raise InputError(f"{length} bytes do not fit into a slot of {self.slot_bytes}. Make the ring with larger.")
        at = self._at(slot)
        self._words[at + 1] = length
        self._filling.discard(slot)
        return self._words[at]

    def is_free(self, slot: int) -> bool:
        """Return whether nobody fills or reads the slot."""
        at = self._at(slot)
        return slot not in self._filling and self._words[at] == self._words[at + _SLOT_WORDS]

    @property
    def num_free(self) -> int:
        """Slots that `take` could give."""
        return sum(map(self.is_free, range(self.num_slots)))

    def close(self) -> None:
        """Let the memory go; the reader keeps its own until it lets go too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _check_taken(self, slot: int) -> None:
        if slot not in self._filling:
            raise InputError(f"slot {slot} is not taken. Call take() and use the slot that it returns.")


class RingReader(_Mapped):
    """A reader's side, over the descriptor of the writer's ring; the memory stays as long as a view of it does."""

    def __init__(self, fd: int) -> None:
        """Map the ring at `fd`, which may be closed afterwards. Raises `DamageError` when it is none."""
        try:
            with mmap.mmap(fd, _HEAD_WORDS * 8, mmap.MAP_SHARED, mmap.PROT_READ) as head:
                magic, num_slots, slot_bytes = memoryview(head[:24]).cast("Q")
        except (OSError, ValueError) as error:
            raise DamageError(f"descriptor {fd} holds no ring ({error}). Pass Ring.fd.") from error
        if magic != _MAGIC:
            raise DamageError(f"descriptor {fd} holds no ring: its head is {magic:#x}. Pass Ring.fd.")
        super().__init__(num_slots, slot_bytes)
        if os.fstat(fd).st_size < self.num_bytes:
            raise DamageError(f"the ring at descriptor {fd} is damaged. Pass Ring.fd whole.")
        self.map(fd)

    def view(self, slot: int, generation: int, *, writable: bool = False) -> memoryview:
        """Return the payload in place; `writable` only where nobody else reads the slot.

        Raises `DamageError` when the slot holds another generation by now: it was released too early.
        """
        at = self._at(slot)
        found, length = self._words[at], self._words[at + 1]
        if found != generation or length > self.slot_bytes:
            raise DamageError(
                f"slot {slot} holds generation {found}, not {generation}. Read a slot before you release it."
            )
        payload = self._payload(slot, length)
        return payload if writable else payload.toreadonly()

    def release(self, slot: int, generation: int) -> None:
        """Say that the reader is done with what `generation` of the slot held; an older one changes nothing."""
        at = self._at(slot) + _SLOT_WORDS
        self._words[at] = max(self._words[at], generation)
