"""A program of XORs as machine code of this host: one pass over the data, everything else in registers.

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
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headway.core.machine.native import native
from headway.storage.redundancy.xor_program import XorProgram

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
