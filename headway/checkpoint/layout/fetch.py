"""Reads a plan's bytes with several threads, verified block by block before any of them is used.

Use it between `plan_reads` and whoever wants the elements. A read goes into a
buffer of its thread; with digests, it is widened to whole blocks and every
block is compared first, so a damaged byte never reaches a tensor. What was
read is handed to `place` as arrays of the transfers' boxes; elements that
have a place in memory as they lie in the file go there window by window,
small enough to stay in cache. Sizes and offsets are bytes.

>>> from headway.checkpoint.layout.reads import Shard, plan_reads
>>> from headway.storage.boxes import Box
>>> from headway.storage.manifest import Piece
>>> piece = Piece("w", "int32", (4,), (0,), (4,), "a", 0, 16, 0, 16, 0)
>>> plan = plan_reads([Shard("w", (4,), "int32", Box((1,), (2,)))], {"w": [piece]})
>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> _ = (folder / "a").write_bytes(np.arange(4, dtype=np.int32).tobytes())
>>> fetch(plan.reads, RangeFetcher(LocalFiles(folder)), lambda transfer, elements: print(elements)).read_bytes
[1 2]
12
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headway.checkpoint.layout.reads import Read, ShardTransfer
from headway.core.errors import DamageError
from headway.core.machine.host import host_cores
from headway.core.units import MIB
from headway.storage.digests import Digested, damaged_blocks
from headway.storage.stores import LocalStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

Source = Literal["memory", "local", "parity", "remote"]
"""Where bytes came from."""

ELEMENT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes per element -> a type of that size: elements are moved, never understood."""

WINDOW_BYTES = 2 * MIB
"""What is read, verified and moved on before more is read: it stays in cache meanwhile (measured: 2 MiB is best)."""

ALIGN = 16
"""Reads begin at multiples of this, so that elements are aligned in the buffer."""


Room = Callable[[int], "NDArray[np.uint8]"]
"""Give memory of so many bytes, valid until the same thread asks again."""


@runtime_checkable
class Files(Protocol):
    """The files of one checkpoint, wherever they are. Safe for several threads."""

    @property
    def source(self) -> Source:
        """What kind of place it is."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file, all of it by default, fewer where it ends. Raises `FileNotFoundError`."""
        ...

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes `start` to `stop`: where they lie, or read into `room(stop - start)`.

        Raises `DamageError` when the file is missing, shorter, or cannot be read.
        """
        ...


class LocalFiles:
    """Files in a folder; each is opened once."""

    source: Source = "local"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        """The checkpoint's own folder."""
        self.store = LocalStore(folder)
        """The same folder as a store."""
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file: a view of the page cache."""
        return self.store.read(name, start, stop)

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file, in `room`: unlike a mapping, a read that fails is an error and no signal."""
        memory, done = room(stop - start).data, 0
        while done < stop - start:
            try:
                count = os.preadv(self._file(name), [memory[done:]], start + done)
            except OSError as cause:
                raise DamageError(
                    f"{self.folder / name} cannot be read at byte {start + done}: {cause}. Run: headway ckpt repair"
                ) from cause
            if not count:
                raise too_short(f"{self.folder / name}", start + done, stop)
            done += count
        return memory

    def close(self) -> None:
        """Close what was opened."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _file(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = os.open(self.store.path(name), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError as cause:
                    raise DamageError(f"{self.folder / name} is missing. Run: headway ckpt repair") from cause
            return self._open[name]


def too_short(name: str, stop: int, wanted: int) -> DamageError:
    """Return the error of a file that ends before what is wanted of it."""
    return DamageError(f"{name} ends at byte {stop}; bytes up to {wanted} were written. Run: headway ckpt repair")


Place = Callable[[ShardTransfer, NDArray[Any]], None]
"""Takes the elements of a transfer, [*box.lengths], valid during the call only; of `ELEMENT`'s type, maybe strided."""

Flat = Callable[[ShardTransfer], "NDArray[np.uint8] | None"]
"""Give the memory, [bytes], that takes a transfer's elements as they lie in the file; None where it is not one run."""

Digests = Callable[[str], Digested | None]
"""Name of a file -> the digests of its blocks; None where there are none, and it is read unverified."""

Mend = Callable[[str, int, int], bytes | None]
"""Rebuild a damaged block from parity: file, first byte, one past the last -> its bytes, or None if that fails."""


@dataclass(slots=True)
class FetchStats:
    """What fetching took."""

    read_bytes: int = 0
    """Bytes read, blocks' other parts included."""

    hashed_bytes: int = 0
    """Bytes whose digests were compared."""

    mended: list[tuple[str, int, str]] = field(default_factory=list)
    """(file, first byte, tensor) of each block that came from parity."""


class RangeFetcher:
    """Hands on ranges of files, verified.

    `flat` gives memory for elements that need no rearranging; `room` makes the buffers, one per thread.
    """

    def __init__(
        self,
        files: Files,
        digests: Digests | None = None,
        *,
        flat: Flat | None = None,
        mend: Mend | None = None,
        room: Room | None = None,
    ) -> None:
        self.files, self.digests, self.mend = files, digests, mend
        self.flat = flat
        """Where elements go that need no rearranging."""
        self.room = room or aligned_buffer
        """Makes a thread's buffer."""
        self.total = FetchStats()
        """What was read so far."""
        self._local = threading.local()
        self._lock = threading.Lock()

    def run(self, read: Read, place: Place) -> None:
        """Do one read and hand on what it holds. Raises `DamageError` with the file, the byte and the tensor."""
        first, *others = read.transfers
        memory = self.flat(first) if self.flat and not others and first.is_contiguous else None
        if memory is not None:
            self._stream(read, memory)
            return
        low, view = self.span(read.file, read.start, read.stop, named=lambda at: _tensor_at(read, at))
        for transfer in read.transfers:
            kind = ELEMENT[transfer.itemsize]
            place(transfer, np.ndarray(transfer.box.lengths, kind, view, transfer.start - low, transfer.strides))

    def span(
        self, file: str, start: int, stop: int, *, named: Callable[[int], str | None] = lambda at: None
    ) -> tuple[int, memoryview]:
        """Return bytes of a file and where they begin: at least `start` to `stop`, until this thread's next call.

        `named` says for a place in the file which tensor lies there.
        """
        written = self.digests(file) if self.digests else None
        low, high = written.covering(start, stop) if written else (start // ALIGN * ALIGN, stop)
        return low, self._verified(file, low, high, written, named)

    def _stream(self, read: Read, memory: NDArray[np.uint8]) -> None:
        """Read one run of elements into its memory, window by window."""
        written = self.digests(read.file) if self.digests else None
        low, high = written.covering(read.start, read.stop) if written else (read.start, read.stop)
        for begin in range(low, high, WINDOW_BYTES):
            end = min(begin + WINDOW_BYTES, high)
            view = self._verified(read.file, begin, end, written, lambda at: _tensor_at(read, at))
            start, stop = max(begin, read.start), min(end, read.stop)
            elements = np.frombuffer(view, np.uint8, stop - start, start - begin)
            np.copyto(memory[start - read.start : stop - read.start], elements)

    def _verified(
        self, file: str, low: int, high: int, written: Digested | None, named: Callable[[int], str | None]
    ) -> memoryview:
        """Return bytes of a file; with digests, whole blocks that are as written, some maybe rebuilt."""
        held = getattr(self.files, "held", {})
        was_held = file in held
        try:
            view = self.files.span(file, low, high, self._buffer)
        except DamageError:  # missing or short: all that is wanted of it has to come from parity
            if written is None or self.mend is None:
                raise
            view = memoryview(bytes(high - low))
        if written:
            damaged = damaged_blocks(view, written, start=low)
            if damaged and was_held:  # memory is not what was saved; what is stored may be
                held.pop(file, None)
                return self._verified(file, low, high, written, named)
            view = memoryview(bytearray(view)) if damaged else view
            for block in damaged:
                self._mend(file, block * written.block_bytes, low, view, written, named)
        with self._lock:
            self.total.read_bytes += high - low
            self.total.hashed_bytes += high - low if written else 0
        return view

    def _mend(
        self,
        file: str,
        at: int,
        low: int,
        view: memoryview,
        written: Digested,
        named: Callable[[int], str | None],
    ) -> None:
        """Put a rebuilt block in place of a damaged one, or raise."""
        stop = min(at + written.block_bytes, written.num_bytes)
        tensor = named(at) or named(stop - 1) or "no tensor"
        rebuilt = self.mend(file, at, stop) if self.mend else None
        if rebuilt is None or damaged_blocks(rebuilt, written, start=at):
            raise DamageError(
                f"{file} is damaged at bytes {at}..{stop}, in {tensor}: the block's digest differs. "
                "Run: headway ckpt repair, or restore an older step."
            )
        view[at - low : stop - low] = rebuilt
        with self._lock:
            self.total.mended.append((file, at, tensor))

    def _buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return `num_bytes` of this thread's buffer, aligned to a page."""
        held: NDArray[np.uint8] | None = getattr(self._local, "buffer", None)
        if held is None or held.nbytes < num_bytes:
            held = self._local.buffer = self.room(num_bytes)
        return held[:num_bytes]


def aligned_buffer(num_bytes: int, *, align: int = 4096) -> NDArray[np.uint8]:
    """Return uninitialised memory that begins at a multiple of `align`."""
    memory = np.empty(num_bytes + align, np.uint8)
    skip = -memory.ctypes.data % align
    return memory[skip : skip + num_bytes]


def fetch(reads: Sequence[Read], fetcher: RangeFetcher, place: Place, *, num_threads: int | None = None) -> FetchStats:
    """Do all reads and hand on what they hold; returns what the fetcher has read so far.

    `num_threads` is by default the cores of this process, at most four. The first failure is raised, after the reads
    under way have ended.
    """
    num_threads = min(num_threads or min(host_cores(), 4), len(reads))
    if num_threads <= 1:
        for read in reads:
            fetcher.run(read, place)
        return fetcher.total
    with ThreadPoolExecutor(num_threads, thread_name_prefix="headway-fetch") as pool:
        running = [pool.submit(fetcher.run, read, place) for read in reads]
        try:
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()
    return fetcher.total


def _tensor_at(read: Read, at: int) -> str | None:
    """Return the name of the tensor whose piece holds byte `at` of the file."""
    for transfer in read.transfers:
        piece = transfer.piece
        if piece.record_offset <= at < piece.record_offset + piece.record_bytes:
            return piece.fqn
    return None
