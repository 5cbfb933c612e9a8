"""What ranks print: passed through to the terminal, and kept in size-bounded logs.

One thread reads all pipes. Rank 0 comes through untouched, byte for byte;
other ranks come line by line behind torchrun's prefix `[default1]:`. When
the launcher's own stream is a terminal, rank 0 gets a pseudo-terminal, so
that its progress bars and colours stay. A stdout that is a file or a pipe
gets nothing but what the ranks write: the bytes of a rank that is alone, the
whole lines of several, without a prefix, as under torchrun. Sizes in bytes,
times in ns on CLOCK_MONOTONIC.

>>> import tempfile
>>> log = BoundedLog(Path(tempfile.mkdtemp()) / "r0.out", limit_bytes=12)
>>> for word in (b"one\\n", b"two\\n", b"three\\n"): log.write(word)
>>> log.close(); log.path.read_bytes(), log.rotated.read_bytes()
(b'three\\n', b'two\\n')
"""

from __future__ import annotations

import bisect
import contextlib
import io
import os
import selectors
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

from headway.core.files.private import PRIVATE, private_folder
from headway.core.machine.host import readable
from headway.core.wire.loop import Waker
from headway.runtime.run_folder.problems import Problems, disk_full

READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 17
"""How much of a rank's stderr is kept in memory, to find its traceback in."""

LINE_LIMIT_BYTES = 1 << 16
"""A line of a prefixed rank that grows beyond this is passed on in pieces."""


class BoundedLog:
    """A log file of at most `limit_bytes`: the newest half stands in `path`, the half before it in `path`.1."""

    def __init__(self, path: Path, limit_bytes: int, mode: int = PRIVATE) -> None:
        """`mode` is that of a folder that is made for it; who may not enter that may not read the file."""
        self.path, self._mode = path, mode & 0o666
        self.rotated = path.with_name(path.name + ".1")
        self._half = max(limit_bytes // 2, 1)
        self.lost_bytes = 0
        """Bytes that there was no room for."""
        self.cause: OSError | None = None
        """Why not."""
        self._file: io.FileIO | None = None
        self._size = 0
        try:
            private_folder(path.parent, mode)
            self._file = io.FileIO(path, "ab", opener=self._opened)
            self._size = self._file.tell()
        except OSError as cause:
            self.cause = cause

    def write(self, data: bytes) -> None:
        """Append `data`, rotating first when it would not fit; one write beyond the half keeps its end.

        What a full disk has no room for is missing from the log, and counted: the rank that printed it trains on.
        """
        kept = data[-self._half :]
        try:
            if self._size and self._size + len(data) > self._half:
                self._rotate()
            written = self._file.write(kept) or 0 if self._file is not None else 0
        except OSError as cause:
            written, self.cause = 0, cause
        self._size += written
        self.lost_bytes += len(kept) - written

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # renamed before, when there was no room for the next file
            os.replace(self.path, self.rotated)
        fresh = io.FileIO(self.path, "wb", opener=self._opened)
        self.close()
        self._file, self._size = fresh, 0

    def _opened(self, path: str, flags: int) -> int:
        return os.open(path, flags, self._mode)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a network disk says only now what it could not keep
                self._file.close()


class Tail:
    """The end of a byte stream, with the moment at which each part arrived."""

    def __init__(self, limit_bytes: int = TAIL_BYTES) -> None:
        self._limit = limit_bytes
        self._data = bytearray()
        self._dropped = 0
        self._offsets: list[int] = []
        self._arrived_ns: list[int] = []

    def add(self, data: bytes, now_ns: int) -> None:
        """Append `data`, forgetting what lies more than the limit back."""
        self._offsets.append(self._dropped + len(self._data))
        self._arrived_ns.append(now_ns)
        self._data += data
        excess = len(self._data) - self._limit
        if excess > self._limit:
            del self._data[:excess]
            self._dropped += excess
            first = max(bisect.bisect_right(self._offsets, self._dropped) - 1, 0)
            del self._offsets[:first], self._arrived_ns[:first]

    def text(self) -> str:
        """Return what is kept, as text; bytes that are no UTF-8 are replaced."""
        return bytes(self._data).decode("utf-8", "replace")

    def arrival_ns(self, needle: bytes) -> int | None:
        """Return when the last occurrence of `needle` arrived, or None."""
        at = self._data.rfind(needle)
        if at < 0:
            return None
        return self._arrived_ns[max(bisect.bisect_right(self._offsets, self._dropped + at) - 1, 0)]


@dataclass(slots=True)
class _Source:
    """One stream of one rank, being read."""

    rank: int
    read_fd: int
    log: BoundedLog
    out_fd: int
    prefix: bytes | None
    """Put before each line; b"": whole lines are passed on as they are; None: bytes, as soon as they come."""
    tail: Tail | None
    partial: bytearray = field(default_factory=bytearray)


class Streams:
    """Reads every rank's stdout and stderr until they end."""

    def __init__(
        self,
        logs: Path,
        problems: Problems,
        *,
        limit_bytes: int,
        stdout_to_stderr: bool = False,
        mode: int = PRIVATE,
    ) -> None:
        self.logs, self._mode = logs, mode
        self._limit = limit_bytes
        self._stdout_fd = 2 if stdout_to_stderr else 1
        self._selector = selectors.DefaultSelector()
        self._wake = Waker()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._tails: dict[int, Tail] = {}
        self._closing = self._is_reading = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._broken: dict[int, OSError] = {}
        self.output_lost = False
        """Whether stdout could not be written, for another reason than that its reader went away."""
        self.problems = problems
        """Takes what of the ranks' output was lost, and why, once the streams are closed."""
        self.at_line_start = True
        """Whether the terminal's cursor stands at the start of a line (a status line may be drawn)."""
        self.before_output: Callable[[], None] | None = None
        """Called just before rank output reaches the terminal: it wipes a status line."""

    def attach(self, rank: int, *, plain: bool, label: str, alone: bool = False) -> tuple[int, int]:
        """Make a rank's stdout and stderr; returns the descriptors its process writes to (close them after the start).

        `plain` passes bytes through untouched; otherwise each line gets the prefix `[label]:`. A stdout that is no
        terminal never gets a prefix: it takes the bytes of a rank that is `alone`, else whole lines.
        """
        tail = self._tails[rank] = Tail()
        ends = []
        for suffix, out_fd in (("out", self._stdout_fd), ("err", 2)):
            read_fd, write_fd = _terminal_pair(out_fd) if plain else os.pipe()
            log = BoundedLog(self.logs / f"r{rank}.{suffix}", self._limit, self._mode)
            prefix = None if plain else f"[{label}]:".encode()
            if suffix == "out" and out_fd == 1 and not os.isatty(out_fd):
                prefix = None if alone else b""
            source = _Source(rank, read_fd, log, out_fd, prefix, tail if suffix == "err" else None)
            with self._lock:
                self._selector.register(read_fd, selectors.EVENT_READ, source)
            ends.append(write_fd)
        self._wake.ring()
        return ends[0], ends[1]

    def start(self) -> None:
        """Start the reading thread; call it after the ranks were forked."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._pump, name="headway-streams", daemon=True)
            self._thread.start()

    def tail(self, rank: int) -> Tail:
        """Return the end of the rank's stderr."""
        return self._tails[rank]

    def finish(self, timeout_s: float = 2.0, *, rank: int | None = None) -> None:
        """Wait until all that ranks (or `rank`) wrote, who are gone, has been read.

        Not for the end of their streams: a process that a rank left behind may hold one open for ever.
        """
        deadline = time.monotonic() + timeout_s
        while self._thread is not None and time.monotonic() < deadline:
            # In this order: what is no longer in a pipe has been read by a thread that still works on it, or is done.
            if not self._unread(rank) and not self._is_reading:
                return
            time.sleep(0.002)

    def _unread(self, rank: int | None) -> bool:
        """Whether something is left in a pipe (of `rank`)."""
        with self._lock:
            keys = list(self._selector.get_map().values())
        sources = [key.data for key in keys if key.data is not None]
        return any(readable(source.read_fd, 0.0) for source in sources if rank in (None, source.rank))

    def close(self) -> None:
        """Read what is left, stop the thread, and say what was lost."""
        self.finish()
        self._closing = True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join(5.0)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        self._selector.close()
        self._wake.close()
        for out_fd, cause in self._broken.items():
            if not isinstance(cause, BrokenPipeError):
                self.output_lost |= out_fd == 1
                stream = "stderr" if out_fd == 2 else "stdout"
                self.problems.say(f"{stream} was cut short, as it could not be written ({cause.strerror})")

    def _pump(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._wake.clear()
                else:
                    self._read(key.data)

    def _read(self, source: _Source) -> None:
        self._is_reading = True
        with self.problems.kept(f"some output of rank {source.rank}"):  # a rank whose pipe nobody reads would wait
            self._take(source)
        self._is_reading = False

    def _take(self, source: _Source) -> None:
        try:
            data = os.read(source.read_fd, READ_BYTES)
        except OSError:  # EIO: the last writer of a pseudo-terminal is gone
            data = b""
        if not data:
            self._end(source)
            return
        source.log.write(data)
        if source.tail is not None:
            source.tail.add(data, time.perf_counter_ns())
        if source.prefix is None:
            self._show(source.out_fd, data)
            return
        source.partial += data
        end = max(source.partial.rfind(b"\n"), source.partial.rfind(b"\r") if source.prefix else -1) + 1
        if not end and len(source.partial) > LINE_LIMIT_BYTES:
            end = len(source.partial)
        self._show_lines(source, end)

    def _show_lines(self, source: _Source, end: int) -> None:
        """Pass on the first `end` bytes of a rank, line by line; behind a prefix a carriage return ends a line too."""
        if not end:
            return
        text = bytes(source.partial[:end])
        del source.partial[:end]
        if source.prefix:
            lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            text = b"".join(b"%b%b\n" % (source.prefix, line) for line in lines if line)
        self._show(source.out_fd, text)

    def _end(self, source: _Source) -> None:
        self._show_lines(source, len(source.partial))
        with self._lock:
            self._selector.unregister(source.read_fd)
        os.close(source.read_fd)
        source.log.close()
        if source.log.lost_bytes:
            cause = source.log.cause or disk_full()
            self.problems.add(f"{source.log.lost_bytes} bytes of {source.log.path}", cause)

    def _show(self, out_fd: int, data: bytes) -> None:
        """Write to the launcher's own stream; a reader that went away (`| head`) costs the output, not the run."""
        if out_fd in self._broken or not data:
            return
        if self.before_output is not None:
            self.before_output()
        try:
            write_all(out_fd, data)
        except OSError as cause:
            self._broken[out_fd] = cause
        self.at_line_start = data.endswith(b"\n")


def write_all(fd: int, data: bytes) -> None:
    """Write every byte of `data` to `fd`, waiting while a non-blocking reader is slow."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            time.sleep(0.001)


def _terminal_pair(out_fd: int) -> tuple[int, int]:
    """Return (read end, write end): a pseudo-terminal like `out_fd` when that is a terminal, else a pipe."""
    if not os.isatty(out_fd):
        return os.pipe()
    controller, terminal = os.openpty()
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST  # the real terminal adds the carriage returns
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        ioctl(terminal, termios.TIOCSWINSZ, ioctl(out_fd, termios.TIOCGWINSZ, b"\0" * 8))
    return controller, terminal
