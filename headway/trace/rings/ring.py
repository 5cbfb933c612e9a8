"""A ring of fixed-size binary records in a file: what a recorded process writes while it trains.

Use it in ranks and loader workers: no lock, no thread, no JSON, no heavy
import; only the standard library. A record is 64 bytes and takes a few
hundred nanoseconds to write. The file is shared memory with a name, so the
launcher drains it while the process runs and after the process was killed.
`headway.trace.rings.records` is the reader.

Layout: a header of `HEADER_BYTES` (numbers of `HEADER`, the progress page, then
the names of the recorded threads, 64 bytes each), then `capacity` records of `RECORD`. The
sequence number stands last in a record and is stored last, so a record whose
number is right is complete. Times are `time.perf_counter_ns`.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> recorder = Recorder(folder, rank=3)
>>> recorder.emit(10, 1_000, 50, 0, 0)
>>> recorder.path.rsplit("/", 1)[1].startswith("a0-r3-p")
True

The progress page: 64 bytes in the header of a ring that say what a process does now.

A record is written when something has ended; the page says what has begun
and how far training has come, so a launcher can tell a rank that waits in a
collective from one that never came to it. It is eight numbers, each stored
by one plain store: no system call, no thread, no lock, no function call
where it would cost (`cells`). Only the thread that trains writes it.
Standard library only, as `ring.py`; `headway.trace.rings.records.read_page` is the
reader. Times are `time.perf_counter_ns`.

>>> buffer = bytearray(1024)
>>> page = PageWriter(); page.bind(buffer)
>>> page.opened(41, 2_000, 0, 12)
>>> PAGE.unpack_from(buffer, PAGE_OFFSET)[2:7]
(41, 0, -1, 12, 2000)
>>> page.closed(); page.cells[0][OP]
0
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from contextlib import suppress
from itertools import count
from mmap import mmap
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The progress page: 64 bytes in the header of a ring that say what a process does now.

PAGE_OFFSET = 256
"""Where the page lies in a ring's header: behind its numbers, before the names of the threads."""

PAGE = Struct("@3qii2qdq")
"""step, progress_ns, op, group, peer, seq, since_ns, loss, stack_signal: the meanings stand in `records.Page`."""

STEP, PROGRESS_NS, OP, GROUP, SEQ, SINCE_NS, LOSS, STACK_SIGNAL = range(8)
"""Index of each number in `PageWriter.cells[0]`; GROUP holds the group (low half) and the peer (high half)."""

_BITS = Struct("@d"), Struct("@q")


def group_cell(group: int, peer: int = -1) -> int:
    """Return the number that stores a group and a peer, each below 2**31, -1 for none."""
    return (peer << 32) | (group & 0xFFFFFFFF)


class PageWriter:
    """The writer's side; `bind` it to a ring's buffer, None in a forked child: then it writes to nothing."""

    __slots__ = ("_trainer", "cells")

    def __init__(self) -> None:
        self.cells: list[memoryview] = []
        """[1] The page as int64 numbers. What runs at every step stores into `cells[0]` itself."""
        self._trainer = 0
        self.bind(None)

    def bind(self, buffer: Any) -> None:
        """Write to a ring's buffer from now on, an empty page first; None: to scratch memory."""
        area = memoryview(bytearray(PAGE.size) if buffer is None else buffer)
        offset = 0 if buffer is None else PAGE_OFFSET
        self.cells[:] = [area[offset : offset + PAGE.size].cast("B").cast("q")]
        self.cells[0][:] = memoryview(bytes(PAGE.size)).cast("q")
        self.seen_loss(float("nan"))
        self.train_here()

    def train_here(self) -> None:
        """Say that the calling thread is the one that trains; until then it is the one that opened the ring."""
        self._trainer = _thread.get_ident()

    def opened(self, op: int, since_ns: int, group: int = -1, seq: int = -1, peer: int = -1) -> None:
        """Say that an operation began at `since_ns`; those of other threads than the training one are not shown.

        `group` and `peer` are below 2**31, -1 for none.
        """
        if _thread.get_ident() == self._trainer:
            cells = self.cells[0]
            cells[GROUP], cells[SEQ], cells[SINCE_NS] = group_cell(group, peer), seq, since_ns
            cells[OP] = op

    def closed(self) -> None:
        """Say that it is over."""
        if _thread.get_ident() == self._trainer:
            self.cells[0][OP] = 0

    def stacks_by(self, number: int) -> None:
        """Say which signal makes this process write its stacks."""
        self.cells[0][STACK_SIGNAL] = number

    def seen_loss(self, value: float) -> None:
        """Keep a loss."""
        self.cells[0][LOSS] = _BITS[1].unpack(_BITS[0].pack(value))[0]


MAGIC = b"HWRING1\0"
HEADER = Struct("@8sIIQIiiiiiQqqqqI")
"""magic, version, header bytes, capacity, pid, rank, worker, attempt, local rank, role, generation (of the header),
process start, (monotonic, realtime) pair in ns, end ns (0 while the process runs), number of thread names."""

FIELDS = (
    "magic", "version", "header_bytes", "capacity", "pid", "rank", "worker", "attempt", "local_rank", "role",
    "generation", "process_start_ns", "clock_ns", "realtime_ns", "end_ns", "num_threads",
)  # fmt: skip
"""Names of the numbers of `HEADER`, in order."""

VERSION = 1
HEADER_BYTES = 8192
THREADS_OFFSET = 512
THREAD_BYTES = 64
MAX_THREADS = (HEADER_BYTES - THREADS_OFFSET) // THREAD_BYTES

RECORD = Struct("@HHiqqqqqqQ")
"""code, lane, step (-1: assigned when the run is finalised), start_ns, duration_ns, a, b, c, d, number + 1."""

RECORD_BYTES = RECORD.size
CAPACITY = 16384
WORKER_CAPACITY = 4096

ROLES = ("main", "loader", "child", "spawned")
"""Role of a process by index: the rank itself; a loader worker; another child; a rank that the script spawned itself
(its rank is known from `init_process_group`, and it stands for that rank in place of the main process)."""

MAIN, LOADER, CHILD, SPAWNED = range(4)

UNRECORDED = "nothing is recorded"
"""How the warning of a process begins that cannot record: `headway why` looks for it in the logs."""


UNRECORDED_SUFFIX = ".unrecorded"
"""Suffix of a link that leads to no file: its target is that warning."""


class Recorder:
    """Writes the records of this process; a forked child gets a ring of its own at its first record.

    `emit(code, start_ns, duration_ns, a, b, c, d)` is a plain function: bind it once, call it anywhere.
    """

    def __init__(
        self,
        folder: str,
        *,
        rank: int = 0,
        local_rank: int = 0,
        attempt: int = 0,
        role: int = MAIN,
        capacity: int = CAPACITY,
    ) -> None:
        """Nothing is written before the first record. `capacity` (records) must be a power of two."""
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity is {capacity}; it must be a power of two. Pass {CAPACITY}.")
        self.folder, self.rank, self.local_rank, self.attempt = folder, rank, local_rank, attempt
        self.role, self.worker, self.capacity = role, -1, capacity
        self.path = ""
        self.broken = ""
        """Why nothing is recorded any more; '' while all is well."""
        self.end_ns = 0
        self._buffer: mmap | None = None
        self._lock = _thread.allocate_lock()
        self._entering: set[int] = set()
        self._threads: list[str] = []
        self.emit, self._bind = _emitter(self._enter)
        self.page = PageWriter()
        """What this process does now, for those who watch it."""
        os.register_at_fork(after_in_child=self._after_fork)

    def set_rank(self, rank: int, *, role: int | None = None) -> None:
        """Say which rank this process is, once that is known."""
        self.rank = rank
        self.role = self.role if role is None else role
        self._write_header()

    def set_worker(self, worker: int) -> None:
        """Say that this process is loader worker `worker`."""
        self.worker, self.role = worker, LOADER
        self._write_header()

    def close(self) -> None:
        """Note the end of the process; records may still follow."""
        self.end_ns = time.perf_counter_ns()
        self._write_header()

    def open(self) -> bool:
        """Create the ring now rather than at the first record. False when that is impossible (`broken` says why)."""
        with self._lock:
            if self._buffer is None and not self.broken:
                try:
                    self._create()
                except (OSError, ValueError) as cause:
                    self.broken = f"{self.folder}: {cause}"
                    self._leave_word(cause)
                    warn(f"{UNRECORDED} in process {os.getpid()}: {self.broken}")
        return self._buffer is not None

    def _leave_word(self, cause: OSError | ValueError) -> None:
        """Keep the cause where a disk without room has room for it: the target of a link stands in the link itself."""
        said = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        with suppress(OSError):
            link = f"{self.folder}/a{self.attempt}-r{self.rank}-p{os.getpid()}{UNRECORDED_SUFFIX}"
            os.symlink(f"{UNRECORDED} in process {os.getpid()}: {said}", link)

    def _create(self) -> None:
        capacity = self.capacity if self.role in (MAIN, SPAWNED) else min(self.capacity, WORKER_CAPACITY)
        size = HEADER_BYTES + capacity * RECORD_BYTES
        os.makedirs(self.folder, exist_ok=True)
        descriptor = self._claim(f"{self.folder}/a{self.attempt}-r{self.rank}-p{os.getpid()}")
        try:
            # Blocks are reserved here: on a full disk a sparse mapping would kill the job with SIGBUS later.
            os.posix_fallocate(descriptor, 0, size)
            buffer = mmap(descriptor, size)
        except (OSError, ValueError):
            os.unlink(self.path)  # what it did get of a nearly full disk is the script's
            self.path = ""
            raise
        finally:
            os.close(descriptor)
        buffer[HEADER_BYTES:] = bytes(size - HEADER_BYTES)  # page faults now, not on the step path
        self._clock = (time.perf_counter_ns(), time.time_ns())
        self._process_start_ns = process_start_ns()
        self._capacity_used = capacity
        self._buffer = buffer
        self.page.bind(buffer)
        self._write_header()
        self._bind(buffer, capacity)

    def _claim(self, stem: str) -> int:
        """Create the file and return its descriptor; a recycled pid never overwrites the ring of a dead process."""
        for turn in count():
            self.path = f"{stem}-{turn}.ring" if turn else f"{stem}.ring"
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def _write_header(self) -> None:
        buffer = self._buffer
        if buffer is None:
            return
        numbers = (
            VERSION, HEADER_BYTES, self._capacity_used, os.getpid(), self.rank, self.worker, self.attempt,
            self.local_rank, self.role, 0, self._process_start_ns, *self._clock, self.end_ns, len(self._threads),
        )  # fmt: skip
        HEADER.pack_into(buffer, 0, MAGIC, *numbers)

    def _enter(self) -> int:
        """Return the lane of the calling thread after making sure that there is a ring; -1 when there is none.

        A garbage collection or a signal in the middle of this may want to record something as well. That record is
        left out: this very thread holds the lock.
        """
        thread = _thread.get_ident()
        if thread in self._entering:
            return -1
        self._entering.add(thread)
        try:
            return self._lane_of_thread()
        finally:
            self._entering.discard(thread)

    def _lane_of_thread(self) -> int:
        if not self.open():
            return -1
        with self._lock:
            name = _thread_name()
            lane = 0 if name == "" else len(self._threads) + 1
            if lane and lane <= MAX_THREADS and self._buffer is not None:
                self._threads.append(name)
                offset = THREADS_OFFSET + (lane - 1) * THREAD_BYTES
                self._buffer[offset : offset + THREAD_BYTES] = name.encode(errors="replace")[: THREAD_BYTES - 1].ljust(
                    THREAD_BYTES, b"\0"
                )
                self._write_header()
        return min(lane, MAX_THREADS)

    def _after_fork(self) -> None:
        """Forget the parent's ring: this process opens its own at its first record."""
        self._lock = _thread.allocate_lock()
        self._buffer, self._threads, self.path, self.end_ns = None, [], "", 0
        self._entering = set()
        self.role = CHILD
        self.page.bind(None)
        self._bind(None, 2)


def _emitter(enter: Callable[[], int]) -> tuple[Callable[..., None], Callable[[mmap | None, int], None]]:
    """Return `emit` and `bind(buffer, capacity)`; `enter()` is asked once per process and thread for its lane.

    Everything is bound in the closure: an attribute look-up per number would double the cost of a record.
    """
    buffer: Any = None
    take: Callable[[], int] | None = None
    mask = main = 0
    pack, ident = RECORD.pack_into, _thread.get_ident
    local = _thread._local()

    def emit(code: int, start_ns: int, duration_ns: int, a: int = -1, b: int = -1, c: int = -1, d: int = 0) -> None:
        """Write one record; the meaning of a, b, c, d stands in `headway.trace.events.vocabulary.SPANS`."""
        nonlocal main
        try:
            # What is local to a thread costs 4 us where training has driven it out of the caches, an identifier 2.
            lane = 0 if ident() == main else local.lane
            n = take()  # type: ignore[misc]  # None until the first record: handled below
            pack(buffer, HEADER_BYTES + ((n & mask) << 6), code, lane, -1, start_ns, duration_ns, a, b, c, d, n + 1)
        except (AttributeError, TypeError):
            lane = local.lane = enter()
            if lane == 0 and not main:
                main = ident()  # of the main thread, which ends with the process: nobody inherits it
            if lane >= 0:
                emit_first(code, lane, start_ns, duration_ns, a, b, c, d)

    def emit_first(code: int, lane: int, *numbers: int) -> None:
        n = take()  # type: ignore[misc]  # bound by enter()
        pack(buffer, HEADER_BYTES + ((n & mask) << 6), code, lane, -1, *numbers, n + 1)

    def bind(new: mmap | None, capacity: int) -> None:
        nonlocal buffer, take, mask, local, main
        buffer, mask, main = new, capacity - 1, 0
        local = _thread._local()
        take = None if new is None else count().__next__

    return emit, bind


def warn(text: str) -> None:
    """Write one line to stderr where there is one: closed, or a pipe without a reader, it must not stop the job."""
    try:
        sys.stderr.write(f"headway: {text}\n")
    except (OSError, ValueError, AttributeError):
        return


def _thread_name() -> str:
    """Return the name of the calling thread, '' for the main one."""
    threading = sys.modules.get("threading")  # never imported here: it would cost every start a millisecond
    if threading is None or threading.get_ident() == threading.main_thread().ident:
        return ""
    hidden = sys.modules.get("headway.core.machine.hidden_thread")
    if hidden is not None and threading.get_ident() in hidden.running:
        return str(hidden.running[threading.get_ident()])
    thread = threading._active.get(threading.get_ident())  # current_thread() would register a dummy thread
    return str(thread.name) if thread is not None else "foreign"


def process_start_ns(pid: str = "self") -> int:
    """Return when a process started, on the clock of `time.perf_counter_ns`; to 10 ms (kernel ticks), 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.perf_counter_ns()
        return since_boot_ns - asleep_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
