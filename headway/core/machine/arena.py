"""Shared memory that a process and the children it forks fill once and read often.

`Arena` holds at most one payload per slot, up to a budget in bytes. It has
no name in the file system (memfd), so it cannot be left behind: it is gone
with its last holder. Payloads are only ever appended; a slot that is filled
stays as it is. Safe across processes: space is reserved under a record lock
that the kernel drops with its owner, and a slot becomes visible only after its
payload is written; threads of one process take turns. Other processes of the same user get at it by pickle, as long
as the sender lives: the same memory, not a copy. Who makes an arena may have `extra_bytes` of zeros in it for numbers
of its own: `with arena:` keeps other threads and processes out while they change.

>>> arena = Arena(num_slots=4, capacity_bytes=100)
>>> arena.put(2, b"payload"), arena.put(3, b"x" * 1000)
(True, False)
>>> bytes(arena.get(2)), arena.get(0), arena.used_bytes
(b'payload', None, 7)
>>> counts = Arena(num_slots=1, capacity_bytes=1, extra_bytes=8).extra.cast("q")
>>> counts[0] += 1
>>> counts.tolist()
[1]
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import weakref
from typing import Any

from headway.core.errors import InputError

_HEAD = struct.Struct("<qq")
"""Bytes used, payloads refused because the arena was full."""

_SLOT = struct.Struct("<qq")
"""Offset of the payload + 1 (0 = empty), its length."""


class Descriptor:
    """An open file by number, which is closed when nobody holds this object any more."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the number; -1 once closed."""
        return self._number

    def close(self) -> None:
        """Close it; doing it again is fine."""
        if self._number >= 0:
            number, self._number = self._number, -1
            os.close(number)

    __del__ = close


def shared_memory(name: str, num_bytes: int) -> tuple[Descriptor, mmap.mmap]:
    """Return the descriptor and the mapping of new memory of `num_bytes` zeros, shared with forked children."""
    file = Descriptor(os.memfd_create(name, os.MFD_CLOEXEC))
    os.ftruncate(file.fileno(), num_bytes)
    return file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED)


def held_at(file: Descriptor) -> str:
    """Return the path by which other processes of this user can open what `file` of this process holds."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def reopened(path: str) -> tuple[Descriptor, mmap.mmap]:
    """Return descriptor and mapping of the memory that another process has at `path`. Raises `InputError`."""
    try:
        file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise InputError(
            f"the shared memory {path} is gone: {error}. Keep the process that made it running."
        ) from error
    return file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED)


class Arena:
    """`num_slots` slots that share `capacity_bytes` of memory; pages are taken only when they are filled."""

    def __init__(self, num_slots: int, capacity_bytes: int, *, extra_bytes: int = 0) -> None:
        if num_slots < 1 or capacity_bytes < 1:
            raise InputError(
                f"an arena of {num_slots} slots and {capacity_bytes} bytes holds nothing. Give at least 1 of each."
            )
        self.num_slots = num_slots
        """Slots are numbered 0..num_slots - 1."""
        self.capacity_bytes = capacity_bytes
        """Most bytes that all payloads together may take."""
        self._extra_offset = _HEAD.size + num_slots * _SLOT.size
        self._data_offset = self._extra_offset + extra_bytes
        self._file, self._memory = shared_memory("headway-arena", self._data_offset + capacity_bytes)
        self._new_turn()

    def __getstate__(self) -> dict[str, Any]:
        """Name the memory by where this process holds it."""
        return {**self.__dict__, "_file": held_at(self._file), "_memory": None, "turn": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the sender's memory."""
        self.__dict__.update(state)
        self._file, self._memory = reopened(state["_file"])
        self._new_turn()

    def _new_turn(self) -> None:
        self.turn = threading.RLock()
        """Keeps out the other threads of this process."""
        _ARENAS.add(self)

    @property
    def extra(self) -> memoryview:
        """The memory that the arena's maker asked for."""
        return memoryview(self._memory)[self._extra_offset : self._data_offset]

    def __enter__(self) -> None:
        """Keep the other threads and processes out; the kernel lets go of the lock of one that dies."""
        self.turn.acquire()
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 1)
        except BaseException:  # what a signal's handler raises while another process has it
            self.turn.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Let them in."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1)
        self.turn.release()

    @property
    def used_bytes(self) -> int:
        """Bytes that payloads take now."""
        return int(_HEAD.unpack_from(self._memory, 0)[0])

    @property
    def num_filled(self) -> int:
        """Slots that hold a payload; O(num_slots)."""
        table = self._memory[_HEAD.size : self._extra_offset]
        return sum(offset != 0 for offset, _ in _SLOT.iter_unpack(table))

    def get(self, slot: int) -> memoryview | None:
        """Return the payload of `slot` without copying it, or None while it is empty."""
        offset, length = _SLOT.unpack_from(self._memory, self._place(slot))
        if not offset:
            return None
        return memoryview(self._memory)[offset - 1 : offset - 1 + length].toreadonly()

    def put(self, slot: int, payload: bytes) -> bool:
        """Fill `slot`; return False when it does not fit. A slot that is filled already keeps its payload."""
        place = self._place(slot)
        with self.turn:
            if _SLOT.unpack_from(self._memory, place)[0]:
                return True
            offset = self._reserve(len(payload))
            if offset < 0:
                return False
            self._memory[offset : offset + len(payload)] = payload
            # Published last: a reader sees either an empty slot or a whole payload.
            struct.pack_into("<q", self._memory, place + 8, len(payload))
            struct.pack_into("<q", self._memory, place, offset + 1)
            return True

    def _place(self, slot: int) -> int:
        """Return where the slot's entry lies, checking its number."""
        if not 0 <= slot < self.num_slots:
            raise InputError(f"slot {slot} is outside 0..{self.num_slots - 1}. Make the arena with more slots.")
        return _HEAD.size + slot * _SLOT.size

    def _reserve(self, length: int) -> int:
        """Take `length` bytes and return their offset, or -1 (and count it) when they do not fit."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1)
        try:
            used, refused = _HEAD.unpack_from(self._memory, 0)
            if used + length > self.capacity_bytes:
                _HEAD.pack_into(self._memory, 0, used, refused + 1)
                return -1
            _HEAD.pack_into(self._memory, 0, used + length, refused)
            return int(self._data_offset + used)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)


_ARENAS: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forked() -> None:
    for arena in list(_ARENAS):  # a thread that is not here may hold the parent's lock
        arena.turn = threading.RLock()


os.register_at_fork(after_in_child=_forked)
