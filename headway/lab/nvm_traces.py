"""Traces of accesses to mapped memory: four made ones, a text format, and the check that every row makes sense.

A trace is int64 `[n, 2]`, rows (op, operand): `READ` and `WRITE` take the
address of a line in bytes; `END` ends a request of a core and with it its
transaction, its operand the nanoseconds that the core computed for it.
Request k runs on core k modulo the number of cores. A third column, if there
is one, is the size of the access and must be 64. The made ones keep each
core's data apart, as one instance of a store per core does.

>>> trace = set_only(3, seed=1)
>>> int((trace[:, 0] == END).sum()), trace[:2].tolist() == set_only(3, seed=1)[:2].tolist()
(3, True)

A set-associative cache that forgets the least recently used line first: which lines it holds, which are dirty.

Lines are numbers; a line's set is its number modulo the number of sets. Each
set is a dict from line to "is dirty" in the order of last use, which makes a
look-up one operation of the interpreter: a million accesses take about a
second. Holds no bytes.

>>> cache = SetAssociativeCache(4 * 64, ways=2)          # two sets of two
>>> [cache.insert(line, line == 0) for line in (0, 2)], cache.hit(2, True)
([-1, -1], True)
>>> cache.insert(4, False), cache.dirty()  # line 0 was dirty and makes room; -1: nothing to write back
(0, [2])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_regular
from headway.core.units import MIB
from headway.lab.nvm_design import LINE_BYTES

READ, WRITE, END = 0, 1, 2
"""What a row does."""

OPS = {"R": READ, "W": WRITE, "E": END}
"""Letters of the text format."""

REGION_BYTES = 20 * MIB
"""Memory of each core in the made traces; 12 cores use 240 MiB."""

NUM_CORES = 12

SET_NS, GET_NS, INSERT_NS = 1500, 1500, 600
"""What a core computes per request, beside waiting for memory and without the network. A key-value store in memory
serves about a million pipelined commands a second on a core of 3.5 GHz: 3,500 cycles, 1.5 us at the 2.27 GHz of
`MemorySystem`. An insert into a tree is a search and little more. The shorter, the more any redundancy shows."""

LOG = (1 << 17, (1 << 17) + 1, (1 << 17) + 2)
"""Lines of each core that every transaction writes anew: its header and its undo log, which starts over each time."""

ALLOCATOR = ((1 << 17) + 3, (1 << 17) + 4)
"""Lines of each core that every allocation writes: a bitmap of what is free, and counters."""


def checked(
    trace: ArrayLike, mapped_bytes: int, *, name: str = "the trace", lines: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the trace as int64 `[n, 2]`; `lines` are the numbers of its rows in errors, 1 to n by default.

    Raises `InputError` with the line of an unknown op, of an address that is outside the mapping or
    not of a line, of a size other than 64, of a negative time.
    """
    rows = np.asarray(trace)
    if rows.dtype.names:
        rows = np.stack([rows[field] for field in rows.dtype.names], axis=1)
    if rows.size == 0:
        rows = rows.reshape(0, 2)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3) or rows.dtype.kind not in "iu":
        raise InputError(
            f"{name} is {rows.dtype} {list(rows.shape)}; it must be integers [n, 2]: op, address. Add a column or cast."
        )
    rows = rows.astype(np.int64)
    ops, operands = rows[:, 0], rows[:, 1]
    accesses = ops != END
    faults = [
        ((ops < READ) | (ops > END), ops, "is no op; ops are 0 (read), 1 (write), 2 (end)"),
        (accesses & ((operands < 0) | (operands >= mapped_bytes)), operands,
         f"lies outside the mapping of {mapped_bytes} bytes"),
        (accesses & (operands % LINE_BYTES != 0), operands, "is not the address of a 64-byte line"),
        (accesses & (rows[:, -1] != LINE_BYTES) & (rows.shape[1] == 3), rows[:, -1],
         "is the size of an access; it must be 64 bytes"),
        (~accesses & (operands < 0), operands, "is a time in ns; it must not be negative"),
    ]  # fmt: skip
    for wrong, values, what in faults:
        if wrong.any():
            at = int(np.argmax(wrong))
            number = at + 1 if lines is None else int(lines[at])
            raise InputError(f"line {number} of {name}: {int(values[at])} {what}. Correct that line.")
    return np.ascontiguousarray(rows[:, :2])


def read_trace(path: str | Path, mapped_bytes: int) -> NDArray[np.int64]:
    """Return a trace from a text file: `R ADDRESS [SIZE]`, `W ADDRESS [SIZE]`, `E NANOSECONDS`; `#` begins a comment.

    Raises `FormatError` with the line for text that is none of these, `InputError` as `checked` does, and when the
    file cannot be read.
    """
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a trace.") from cause
    except UnicodeDecodeError as cause:
        raise FormatError(f"{path} is not text in UTF-8. Give a trace: lines such as 'R 0x40'.") from cause
    numbers, rows = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            numbers.append(number)
            rows.append(_row(words, f"{path}, line {number}"))
    return checked(np.array(rows, np.int64).reshape(-1, 3), mapped_bytes, name=str(path), lines=np.array(numbers))


def _row(words: list[str], where: str) -> tuple[int, int, int]:
    """Return op, operand and size of one line of text."""
    try:
        op = OPS[words[0].upper()]
        operand = int(words[1], 0)
        size = int(words[2], 0) if len(words) > 2 else LINE_BYTES
        if max(abs(operand), abs(size)) >= 1 << 63:
            raise ValueError("no number of 64 bits")
    except (KeyError, IndexError, ValueError):
        raise FormatError(
            f"{where}: {' '.join(words)!r} is no access. Write 'R ADDRESS', 'W ADDRESS' or 'E NANOSECONDS', all "
            "below 2**63."
        ) from None
    return op, operand, size


Make = Callable[[int, int], NDArray[np.int64]]
"""How a trace is made: number of requests, seed."""


def set_only(num_requests: int, seed: int = 0) -> NDArray[np.int64]:
    """Return requests that set random keys of a hash table: bucket and entry are read, value and entry written.

    16,384 keys of a core, values of two lines; around them what each transaction of a persistent heap writes.
    """
    rng = np.random.default_rng(seed)
    base, _ = _bases(num_requests)
    key = rng.integers(0, 1 << 14, num_requests)
    bucket, entry, value = key * 8 // LINE_BYTES, (1 << 11) + key, (1 << 15) + 2 * key
    return _rows(
        base, SET_NS, (READ, bucket), (READ, entry), *_written(LOG), *_written(ALLOCATOR), (WRITE, value),
        (WRITE, value + 1), (WRITE, entry),
    )  # fmt: skip


def get_only(num_requests: int, seed: int = 0) -> NDArray[np.int64]:
    """Return requests that get random keys of the same hash table: bucket, entry and value read."""
    rng = np.random.default_rng(seed)
    base, _ = _bases(num_requests)
    key = rng.integers(0, 1 << 14, num_requests)
    bucket, entry, value = key * 8 // LINE_BYTES, (1 << 11) + key, (1 << 15) + 2 * key
    return _rows(base, GET_NS, (READ, bucket), (READ, entry), (READ, value), (READ, value + 1))


def stream(num_requests: int, seed: int = 0) -> NDArray[np.int64]:
    """Return a triad a = b + s c over long arrays, 16 lines a request; nothing is random, `seed` is not used."""
    base, turn = _bases(num_requests)
    lines = REGION_BYTES // LINE_BYTES // 4
    columns = []
    for number in range(16):
        at = (turn * 16 + number) % lines
        columns += [(READ, lines + at), (READ, 2 * lines + at), (WRITE, at)]
    return _rows(base, 0, *columns)


def tree_insert(num_requests: int, seed: int = 0) -> NDArray[np.int64]:
    """Return inserts into a binary tree of 65,536 leaves a core: a path is read, a new leaf and its parent written."""
    rng = np.random.default_rng(seed)
    base, _ = _bases(num_requests)
    leaf, depth = rng.integers(0, 1 << 16, num_requests), 16
    path = [(READ, (1 << level) + (leaf >> (depth - level))) for level in range(depth)]
    parent, fresh = path[-1][1], (1 << 18) - 1 + leaf
    return _rows(
        base, INSERT_NS, *path, *_written(LOG), *_written(ALLOCATOR), (WRITE, fresh), (WRITE, fresh + 1),
        (WRITE, parent),
    )  # fmt: skip


def _written(lines: Sequence[int]) -> list[tuple[int, NDArray[np.int64]]]:
    """Return columns that write the same lines in every request."""
    return [(WRITE, np.array(line)) for line in lines]


def _bases(num_requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first line of each request's core, and the how manieth of its core each request is."""
    if num_requests < 1:
        raise InputError(f"num_requests is {num_requests}; it must be at least 1. Ask for a request.")
    request = np.arange(num_requests, dtype=np.int64)
    return request % NUM_CORES * (REGION_BYTES // LINE_BYTES), request // NUM_CORES


def _rows(base: NDArray[np.int64], work_ns: int, *columns: tuple[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the rows of all requests, each with the same columns: an op and the line of each request."""
    trace = np.empty((base.size, len(columns) + 1, 2), np.int64)
    for place, (op, line) in enumerate(columns):
        trace[:, place, 0] = op
        trace[:, place, 1] = (base + line) * LINE_BYTES
    trace[:, -1] = END, work_ns
    return trace.reshape(-1, 2)


TRACES: dict[str, Make] = {"set": set_only, "get": get_only, "stream": stream, "tree": tree_insert}
"""Every made trace."""


# A set-associative cache that forgets the least recently used line first: which lines it holds, which are dirty.


class SetAssociativeCache:
    """Lines in sets. `hit` and `insert` are apart so that a caller says what a miss does."""

    __slots__ = ("_sets", "_ways", "num_sets")

    def __init__(self, num_bytes: int, *, ways: int, line_bytes: int = 64) -> None:
        self.num_sets = max(num_bytes // (line_bytes * ways), 1)
        """Number of sets."""
        self._sets: list[dict[int, bool]] = [{} for _ in range(self.num_sets)]
        self._ways = ways

    def __contains__(self, line: int) -> bool:
        """Say whether a line is held; that is no use of it."""
        return line in self._sets[line % self.num_sets]

    def hit(self, line: int, dirty: bool) -> bool:
        """Use a line if it is held, and say whether it is; it stays dirty once it was."""
        lines = self._sets[line % self.num_sets]
        was = lines.pop(line, None)
        if was is None:
            return False
        lines[line] = was or dirty
        return True

    def insert(self, line: int, dirty: bool) -> int:
        """Take in a line that is not held; return the dirty line that made room for it, or -1."""
        lines = self._sets[line % self.num_sets]
        victim = -1
        if len(lines) >= self._ways:
            oldest = next(iter(lines))
            if lines.pop(oldest):
                victim = oldest
        lines[line] = dirty
        return victim

    def is_dirty(self, line: int) -> bool:
        """Say whether a line is held and differs from what lies below; that is no use of it."""
        return self._sets[line % self.num_sets].get(line, False)

    def drop(self, line: int) -> bool:
        """Forget a line; say whether it was held."""
        return self._sets[line % self.num_sets].pop(line, None) is not None

    def dirty(self) -> list[int]:
        """Return the dirty lines, ascending."""
        return sorted(line for lines in self._sets for line, dirty in lines.items() if dirty)
