"""The controller's bookkeeping on real bytes: what it stores, what it notices, what it repairs.

`simulate_nvm` counts accesses; this carries them out, on pages in memory, so
that tests can compare incremental checksums and parity with recomputed ones
and let the device lie. A device that loses a write, or reads or writes at a
wrong place, reports success and its own error correction is content: only the
checksums above it notice. Addresses count bytes.

>>> memory = NvmBytes(num_pages=6)
>>> memory.write(4096, b"x" * 64)
>>> memory.device.fault = MemoryFault("lost_write")
>>> memory.write(4096, b"y" * 64)
>>> memory.read(4096)
Traceback (most recent call last):
    ...
headway.core.errors.DamageError: the line at address 4096 is not what was written there. Run repair(4096).
>>> memory.repair(4096), bytes(memory.read(4096)[:2])
(None, b'yy')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, InputError
from headway.lab.nvm.design import LINE_BYTES, LINES_PER_PAGE, PAGE_BYTES, LineLayout, MemorySystem
from headway.storage.stored.digests import crc32, crc32_shift

if TYPE_CHECKING:
    from typing_extensions import Buffer

ZERO_LINE_CRC = crc32(bytes(LINE_BYTES))
"""Checksum of a line of zeros: a CRC is linear but for this constant."""


@dataclass(frozen=True, slots=True)
class MemoryFault:
    """What the device does wrong with its next access of that kind to a line of data."""

    kind: Literal["lost_write", "misdirected_write", "misdirected_read"]
    """The write is not done; it is done at another place; another place is read."""

    line: int = 0
    """The other place."""


class FaultyDevice:
    """Lines of bytes that may lie: it always reports success."""

    def __init__(self, num_lines: int) -> None:
        self.lines = np.zeros((num_lines, LINE_BYTES), np.uint8)
        """[num_lines, 64] What is really there."""
        self.fault: MemoryFault | None = None
        """What goes wrong next; None again once it has."""

    def read(self, line: int) -> NDArray[np.uint8]:
        """Return what is said to be in a line."""
        fault = self._happens("misdirected_read")
        return np.array(self.lines[fault.line if fault else line])

    def write(self, line: int, data: NDArray[np.uint8]) -> None:
        """Write a line, or say so."""
        if self._happens("lost_write"):
            return
        fault = self._happens("misdirected_write")
        self.lines[fault.line if fault else line] = data

    def _happens(self, kind: str) -> MemoryFault | None:
        """Return the fault if it is of this kind; it happens once."""
        fault = self.fault
        if fault is None or fault.kind != kind:
            return None
        self.fault = None
        return fault


class NvmBytes:
    """Pages of data with a checksum per line and per page, and parity across modules; all zeros at first."""

    def __init__(self, num_pages: int, *, num_dimms: int = 4) -> None:
        """Raises `InputError` as `MemorySystem` does."""
        self._memory = MemorySystem(mapped_bytes=num_pages * PAGE_BYTES, num_dimms=num_dimms)
        self.layout = LineLayout(self._memory)
        """Where data and parity lie on the device."""
        self.device = FaultyDevice(self.layout.line_checksum_start)
        """Data and parity. Checksums are kept apart from it."""
        self.line_crcs = np.full(self._memory.num_lines, ZERO_LINE_CRC, np.uint32)
        """[num_lines] CRC-32 of each line of data."""
        self.page_crcs = np.full(num_pages, crc32(bytes(PAGE_BYTES)), np.uint32)
        """[num_pages] CRC-32 of each page of data."""

    def read(self, address: int) -> NDArray[np.uint8]:
        """Return the 64 bytes of a line, verified.

        Raises `DamageError` when they are not what was written, `InputError` for an address of no line.
        """
        line = self._line(address)
        data = self.device.read(line)
        if crc32(data.data) != self.line_crcs[line]:
            raise DamageError(f"the line at address {address} is not what was written there. Run repair({address}).")
        return data

    def write(self, address: int, data: Buffer, *, old: NDArray[np.uint8] | None = None) -> None:
        """Write back a line, and update its checksum, its page's and its parity by what changed.

        `old` is what the line held, where a cache has kept it; else it is read, and verified as `read` does.
        """
        line = self._line(address)
        new = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        if new.size != LINE_BYTES:
            raise InputError(f"{new.size} bytes were given for the line at {address}; a line has 64. Pass all of it.")
        diff = (self.read(address) if old is None else old) ^ new
        page, inside = divmod(line, LINES_PER_PAGE)
        after_bytes = (LINES_PER_PAGE - 1 - inside) * LINE_BYTES
        self.line_crcs[line] = crc32(new.data)
        self.page_crcs[page] ^= np.uint32(crc32_shift(crc32(diff.data) ^ ZERO_LINE_CRC, after_bytes))
        self.device.lines[self.layout.parity_line(line)] ^= diff
        self.device.write(line, new)

    def repair(self, address: int) -> None:
        """Rebuild a line from its stripe.

        Raises `DamageError` when the stripe has a second damaged line, `InputError` for an address of no line.
        """
        line = self._line(address)
        data = self.device.lines[self.layout.parity_line(line)].copy()
        for mate in self.layout.mates(line):
            data ^= self.device.lines[mate]
        if crc32(data.data) != self.line_crcs[line]:
            raise DamageError(
                f"the line at address {address} cannot be rebuilt: another line of its stripe is damaged too. "
                "Restore the page from elsewhere."
            )
        self.device.lines[line] = data

    def damaged_pages(self) -> list[int]:
        """Return the pages whose bytes are not those of their checksum: what a scrub finds."""
        pages = self.device.lines[: self._memory.num_lines].reshape(-1, PAGE_BYTES)
        return [page for page, data in enumerate(pages) if crc32(data.data) != self.page_crcs[page]]

    def _line(self, address: int) -> int:
        if address % LINE_BYTES or not 0 <= address < self._memory.mapped_bytes:
            raise InputError(
                f"{address} is not the address of a 64-byte line below {self._memory.mapped_bytes}. Align it."
            )
        return address // LINE_BYTES
