"""Arithmetic of erasure codes: small finite fields, Cauchy matrices, and what they are in bits.

An element of GF(2^w) is `w` bits, and multiplying by a constant is a `w` x `w`
matrix of bits. So a code over the field becomes XORs of packets: nothing but
XOR touches the data (Bloemer et al. 1995; Plank and Xu 2006 for the choice of
points). Matrices of field elements are uint8.

>>> field(4).multiply[7, 9]
np.uint8(10)
>>> cauchy(4, 2, 4).tolist()
[[1, 1, 1, 1], [2, 1, 9, 4]]
>>> in_bits(np.array([[2]], np.uint8), 2).astype(int).tolist()
[[0, 1], [1, 1]]

A bit matrix as a straight-line program of XORs, with what its rows share computed once.

A program reads packets and makes others; values are numbered: inputs first,
then one per XOR. `shared` finds common pairs greedily (Paar 1997), which takes
a quarter to a half of a wide code's XORs away. `interpret` runs it on arrays of numpy or
torch; for long buffers it becomes machine code, see below.

>>> program = shared(np.array([[1, 1, 1], [1, 1, 0]], bool))
>>> program
XorProgram(num_inputs=3, xors=((0, 1), (2, 3)), outputs=(4, 3))
>>> out = [np.zeros((1, 1), np.uint8) for _ in range(2)]
>>> interpret(program, [np.full((1, 1), value, np.uint8) for value in (1, 2, 4)], out, np)
>>> [int(row[0, 0]) for row in out]
[7, 3]

A program of XORs as machine code of this host: one pass over the data, everything else in registers.

Each turn of the inner loop loads 64 bytes of every input packet, runs the
whole program on vector registers and stores 64 bytes of every output packet:
the speed is that of memory. Compiling takes some 30 ms and happens once per
program, so short buffers are better interpreted.

>>> from headway.storage.redundancy.xor_program import XorProgram
>>> kernel = compiled(XorProgram(2, ((0, 1),), (2,)))
>>> one, two, out = (np.full(64, value, np.uint8) for value in (1, 2, 0))
>>> places = np.array([row.ctypes.data for row in (one, two, out)], np.uintp)
>>> kernel.run(places, 2, cells=1, cell_bytes=64, packet_bytes=64)
>>> out.tolist() == [3] * 64
True
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.machine.native import native

Elements = NDArray[np.uint8]
"""Elements of GF(2^w), one per entry."""

POLYNOMIALS = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10001001, 8: 0b100011101}
"""w -> primitive polynomial of GF(2^w), by Lidl and Niederreiter's tables: x generates the field."""


@dataclass(frozen=True, slots=True)
class Field:
    """GF(2^w) as tables."""

    w: int
    """Bits per element."""

    multiply: Elements
    """[2^w, 2^w] Products."""

    inverse: Elements
    """[2^w] Multiplicative inverses; entry 0 is 0 and means nothing."""

    ones: NDArray[np.int64]
    """[2^w] Ones in the bit matrix of each element: what multiplying by it costs."""


@lru_cache
def field(w: int) -> Field:
    """Return the tables of GF(2^w), 1 <= w <= 8."""
    size = 1 << w
    powers = [1]
    while len(powers) < size - 1:
        shifted = powers[-1] << 1
        powers.append(shifted ^ POLYNOMIALS[w] if shifted & size else shifted)
    log = np.zeros(size, np.int64)
    log[powers] = np.arange(size - 1)
    multiply = np.array(powers, np.uint8)[(log[:, None] + log[None, :]) % (size - 1)]
    multiply[0, :] = multiply[:, 0] = 0
    inverse = np.argmax(multiply == 1, axis=1).astype(np.uint8)
    basis = multiply[:, [1 << bit for bit in range(w)]]
    ones = np.unpackbits(basis, axis=1).sum(axis=1, dtype=np.int64)
    return Field(w, multiply, inverse, ones)


def product(left: Elements, right: Elements, w: int) -> Elements:
    """Return the matrix product over GF(2^w) of [a, b] and [b, c]."""
    terms = field(w).multiply[left[:, :, None], right[None, :, :]]
    summed: Elements = np.bitwise_xor.reduce(terms, axis=1)
    return summed


@lru_cache
def cauchy(k: int, m: int, w: int) -> Elements:
    """Return the [m, k] coefficients of parity over data: every square part of it is invertible.

    Entry (i, j) is 1 / (x_i + y_j), columns and rows scaled so that row 0 is
    all ones (parity 0 is plain XOR) and the others cost few XORs. The caller
    sees to k + m <= 2^w; with one parity or one datum ones alone will do.
    """
    if m == 1 or k == 1:
        return np.ones((m, k), np.uint8)
    table = field(w)
    spare = np.arange(m, 1 << w)
    matrix = table.inverse[np.arange(m)[:, None] ^ spare[None, :]]
    matrix = table.multiply[matrix, table.inverse[matrix[0]]]
    # Choose rows' scales for all spare points, keep the k cheapest points, and scale for these again.
    cheapest = np.argsort(_costs(_scaled(matrix, table), table).sum(axis=0), kind="stable")[:k]
    return _scaled(matrix[:, np.sort(cheapest)], table)


def _costs(matrix: Elements, table: Field) -> NDArray[np.int64]:
    return table.ones[matrix]


def _scaled(matrix: Elements, table: Field) -> Elements:
    """Multiply each row but the first by the element that leaves the fewest ones in it."""
    scaled = matrix.copy()
    for row in scaled[1:]:
        choices = table.multiply[1:, row]
        row[:] = choices[np.argmin(_costs(choices, table).sum(axis=1))]
    return scaled


def in_terms_of(parity: Elements, present: Sequence[int], w: int) -> Elements:
    """Return the [k, k] matrix that gives the data from the k members `present` (0..k-1 data, k.. parity).

    Only the lost data need solving: their columns in the parities at hand form a square part of `parity`.
    """
    k = parity.shape[1]
    kept = [member for member in present if member < k]
    lost = [member for member in range(k) if member not in kept]
    used = [member - k for member in present if member >= k]
    # parity = K kept + L lost, so lost = L^-1 (parity + K kept); in characteristic 2, + is -.
    solved = inverted(parity[np.ix_(used, lost)], w)
    answer = np.zeros((k, k), np.uint8)
    place = {member: column for column, member in enumerate(present)}
    for member in kept:
        answer[member, place[member]] = 1
    if lost:
        columns = [place[member] for member in kept]
        answer[np.ix_(lost, columns)] = product(solved, parity[np.ix_(used, kept)], w)
        answer[np.ix_(lost, [place[k + row] for row in used])] = solved
    return answer


def inverted(matrix: Elements, w: int) -> Elements:
    """Return the inverse of a square matrix over GF(2^w) (Gauss and Jordan). An uninvertible one is our bug."""
    table, size = field(w), len(matrix)
    work = np.hstack([matrix, np.eye(size, dtype=np.uint8)])
    for column in range(size):
        rows = np.flatnonzero(work[column:, column])
        assert len(rows), "a square part of the code's matrix is singular"
        pivot = column + int(rows[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = table.multiply[table.inverse[work[column, column]], work[column]]
        others = work[:, column].copy()
        others[column] = 0
        work ^= table.multiply[others[:, None], work[column][None, :]]
    return work[:, size:]


def in_bits(matrix: Elements, w: int) -> NDArray[np.bool_]:
    """Return the [rows * w, columns * w] bits of a matrix: packet b of a product is the XOR of the packets marked."""
    table = field(w)
    rows, columns = matrix.shape
    powers = np.array([1 << bit for bit in range(w)], np.uint8)
    images = table.multiply[matrix[:, :, None], powers]  # [rows, columns, bit in]
    bits = (images[:, :, :, None] >> np.arange(w, dtype=np.uint8)) & 1  # [rows, columns, bit in, bit out]
    return bits.transpose(0, 3, 1, 2).reshape(rows * w, columns * w).astype(np.bool_)


# A bit matrix as a straight-line program of XORs, with what its rows share computed once.

SLAB_BYTES = 1 << 15
"""Bytes of one value that `interpret` works on at a time, on a CPU: the values of a program stay in its cache."""

DEVICE_SLAB_BYTES = 1 << 24
"""The same on an accelerator, where an operation costs microseconds to launch."""


@dataclass(frozen=True, slots=True)
class XorProgram:
    """XORs in order; value `num_inputs + i` is made by `xors[i]`."""

    num_inputs: int
    """Values 0 .. num_inputs - 1 are given."""

    xors: tuple[tuple[int, int], ...]
    """The two values that each XOR reads."""

    outputs: tuple[int, ...]
    """Which value each output is; an input when it is a plain copy."""


def plain(bits: NDArray[np.bool_]) -> XorProgram:
    """Return the program of a [rows, inputs] bit matrix with every row on its own; made at once. No row is empty."""
    return _chained([np.flatnonzero(row).tolist() for row in bits], bits.shape[1], [])


def shared(bits: NDArray[np.bool_]) -> XorProgram:
    """Return a program of few XORs: while two values meet in two rows or more, the most frequent pair becomes one."""
    rows = bits.T.astype(np.int32)  # [values, rows]: which rows still need which value
    meets = np.triu(rows @ rows.T, 1)
    pairs: list[tuple[int, int]] = []
    while meets.size and meets.max() >= 2:
        left, right = (int(index) for index in np.unravel_index(np.argmax(meets), meets.shape))
        both = rows[left] & rows[right]
        rows[left] ^= both
        rows[right] ^= both
        rows = np.vstack([rows, both])
        pairs.append((left, right))
        meets = np.pad(meets, ((0, 1), (0, 1)))
        for value in (left, right, len(rows) - 1):
            together = rows @ rows[value]
            meets[:value, value] = together[:value]
            meets[value, value + 1 :] = together[value + 1 :]
    return _chained([np.flatnonzero(row).tolist() for row in rows.T], bits.shape[1], pairs)


def _chained(sums: Sequence[Sequence[int]], num_inputs: int, pairs: Sequence[tuple[int, int]]) -> XorProgram:
    """Number the values output by output, each pair when it is first needed: few values live at a time."""
    xors: list[tuple[int, int]] = []
    number: dict[int, int] = {value: value for value in range(num_inputs)}

    def numbered(value: int) -> int:
        """Return the number of a value in the program, making what it needs first."""
        waiting = [value]
        while waiting:
            newest = waiting[-1]
            missing = [] if newest in number else [part for part in pairs[newest - num_inputs] if part not in number]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if newest not in number:
                left, right = pairs[newest - num_inputs]
                number[newest] = added(number[left], number[right])
        return number[value]

    def added(left: int, right: int) -> int:
        """Append one XOR and return the number of its value."""
        xors.append((left, right))
        return num_inputs + len(xors) - 1

    outputs = []
    for sources in sums:
        total = numbered(sources[0])
        for source in sources[1:]:
            total = added(total, numbered(source))
        outputs.append(total)
    return XorProgram(num_inputs, tuple(xors), tuple(outputs))


def interpret(program: XorProgram, inputs: Sequence[Any], outputs: Sequence[Any], xp: Any) -> None:
    """Run a program on uint8 [cells, packet] arrays of the module `xp` (numpy, torch), in slabs of cells.

    `xp` needs `bitwise_xor(a, b, out=)` and `empty_like(a)`, which both modules have; the arrays' device is theirs.
    """
    if not inputs or not inputs[0].shape[0]:
        return
    cells, packet = inputs[0].shape
    on_host = str(getattr(inputs[0], "device", "cpu")) == "cpu"
    slab = max(1, (SLAB_BYTES if on_host else DEVICE_SLAB_BYTES) // packet)
    place, num_scratch = _places(program)
    scratch = [xp.empty_like(inputs[0][:slab]) for _ in range(num_scratch)]
    copies = [(row, value) for row, value in enumerate(program.outputs) if place[value] != ("output", row)]
    for first in range(0, cells, slab):
        cut = slice(first, min(first + slab, cells))
        rows = {
            "input": [array[cut] for array in inputs],
            "output": [array[cut] for array in outputs],
            "scratch": [array[: cut.stop - first] for array in scratch],
        }
        values = [rows[kind][index] for kind, index in place]
        for made, (left, right) in enumerate(program.xors, program.num_inputs):
            xp.bitwise_xor(values[left], values[right], out=values[made])
        for row, value in copies:
            rows["output"][row][...] = values[value]


def _places(program: XorProgram) -> tuple[list[tuple[str, int]], int]:
    """Say where each value lies (an input, an output, a scratch row), and how many scratch rows that takes.

    A value that is an output is made there; other scratch rows are used again once nobody reads them any more.
    """
    place: list[tuple[str, int]] = [("input", index) for index in range(program.num_inputs)]
    home: dict[int, int] = {}
    for row, value in enumerate(program.outputs):
        home.setdefault(value, row)
    last = {value: index for index, pair in enumerate(program.xors) for value in pair}
    free: list[int] = []
    num_scratch = 0
    for index, pair in enumerate(program.xors):
        made = program.num_inputs + index
        for value in {*pair}:
            if last[value] == index and place[value][0] == "scratch":
                free.append(place[value][1])
        if made in home:
            place.append(("output", home[made]))
            continue
        if not free:
            free.append(num_scratch)
            num_scratch += 1
        place.append(("scratch", free.pop()))
    return place, num_scratch


# A program of XORs as machine code of this host: one pass over the data, everything else in registers.

VECTOR_BYTES = 64
"""Bytes that a turn of the loop takes of each packet; LLVM splits them where the host's registers are shorter."""

ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Kernel:
    """Machine code of one program. Calls hold no lock: other threads run meanwhile."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def run(
        self, places: NDArray[np.uintp], num_sources: int, *, cells: int, cell_bytes: int, packet_bytes: int
    ) -> None:
        """Run over `cells` cells that lie `cell_bytes` apart.

        `places` are the addresses of the first packets, of the inputs and then of the outputs; a packet is at least
        `VECTOR_BYTES` long, and no output overlaps an input.
        """
        assert packet_bytes >= VECTOR_BYTES
        odd = packet_bytes % VECTOR_BYTES
        self._loop(places, num_sources, cells, cell_bytes, packet_bytes - odd)
        if odd:
            # The last vector of each packet overlaps the one before, and makes the same bytes again.
            self._loop(places + np.uintp(packet_bytes - VECTOR_BYTES), num_sources, cells, cell_bytes, VECTOR_BYTES)

    def _loop(self, places: NDArray[np.uintp], num_sources: int, cells: int, cell_bytes: int, size: int) -> None:
        first = places.ctypes.data
        if cells:
            self._call(first, first + num_sources * places.itemsize, cells, cell_bytes, size)


@lru_cache(maxsize=256)
def compiled(program: XorProgram) -> Kernel:
    """Return the machine code of a program; made once per process."""
    return Kernel(native(assembly(program), "run", *ARGUMENTS))


def assembly(program: XorProgram) -> str:
    """Return the program in LLVM's language: `run(sources, targets, cells, cell_bytes, packet_bytes)`."""
    vector = f"<{VECTOR_BYTES // 8} x i64>"
    inputs, outputs = range(program.num_inputs), range(len(program.outputs))
    # The scopes say that outputs do not overlap inputs: loads need not wait for stores.
    reads, writes = ", !alias.scope !3, !noalias !4", ", !alias.scope !4, !noalias !3"
    lines = ["define void @run(ptr %sources, ptr %targets, i64 %cells, i64 %cell, i64 %packet) {", "entry:"]
    for side, name, numbers in (("sources", "s", inputs), ("targets", "t", outputs)):
        for number in numbers:
            lines.append(f"  %{name}a{number} = getelementptr ptr, ptr %{side}, i64 {number}")
            lines.append(f"  %{name}{number} = load ptr, ptr %{name}a{number}")
    lines += [
        "  br label %cells.top", "cells.top:", "  %c = phi i64 [0, %entry], [%c.next, %cells.end]",
        "  %first = mul i64 %c, %cell", "  %stop = add i64 %first, %packet", "  br label %body",
        "body:", "  %i = phi i64 [%first, %cells.top], [%i.next, %body]",
    ]  # fmt: skip
    for number in inputs:
        lines.append(f"  %sp{number} = getelementptr i8, ptr %s{number}, i64 %i")
        lines.append(f"  %v{number} = load {vector}, ptr %sp{number}, align 1{reads}")
    for made, (left, right) in enumerate(program.xors, program.num_inputs):
        lines.append(f"  %v{made} = xor {vector} %v{left}, %v{right}")
    for number, value in enumerate(program.outputs):
        lines.append(f"  %tp{number} = getelementptr i8, ptr %t{number}, i64 %i")
        lines.append(f"  store {vector} %v{value}, ptr %tp{number}, align 1{writes}")
    lines += [
        f"  %i.next = add i64 %i, {VECTOR_BYTES}", "  %more = icmp ult i64 %i.next, %stop",
        "  br i1 %more, label %body, label %cells.end",
        "cells.end:", "  %c.next = add i64 %c, 1", "  %again = icmp ult i64 %c.next, %cells",
        "  br i1 %again, label %cells.top, label %done", "done:", "  ret void", "}",
        '!0 = !{!"packets"}', '!1 = !{!"inputs", !0}', '!2 = !{!"outputs", !0}', "!3 = !{!1}", "!4 = !{!2}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
