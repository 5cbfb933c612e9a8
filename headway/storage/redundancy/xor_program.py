"""A bit matrix as a straight-line program of XORs, with what its rows share computed once.

A program reads packets and makes others; values are numbered: inputs first,
then one per XOR. `shared` finds common pairs greedily (Paar 1997), which takes
a quarter to a half of a wide code's XORs away. `interpret` runs it on arrays of numpy or
torch; `xor_native` turns it into machine code for long buffers.

>>> program = shared(np.array([[1, 1, 1], [1, 1, 0]], bool))
>>> program
XorProgram(num_inputs=3, xors=((0, 1), (2, 3)), outputs=(4, 3))
>>> out = [np.zeros((1, 1), np.uint8) for _ in range(2)]
>>> interpret(program, [np.full((1, 1), value, np.uint8) for value in (1, 2, 4)], out, np)
>>> [int(row[0, 0]) for row in out]
[7, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
