"""Ways to keep non-volatile memory intact, as data: a controller in its three steps, and what software does instead.

Memory that is mapped and written by stores has no moment at which software
could check or protect it for free. The controller (Tvarak, ISCA 2020) sits at
the last-level cache: it verifies each line that is read and updates checksums
and parity with each line that is written back. `NvmDesign` says which of its
parts are there; `MemorySystem` is the memory system that they sit in; `LineLayout` says
where everything lies. Addresses count bytes, lines are 64 of them, a page is
64 lines. Used by `simulate_nvm`; nothing here measures hardware.

>>> layout = LineLayout(MemorySystem(mapped_bytes=12 * PAGE_BYTES, num_dimms=4))
>>> layout.parity_line(0) == layout.parity_line(2 * LINES_PER_PAGE)      # pages 0, 1, 2 are one stripe
True
>>> [layout.dimm(page * LINES_PER_PAGE) for page in range(3)], layout.dimm(layout.parity_line(0))
([1, 2, 3], 0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headway.core.errors import InputError
from headway.core.units import KIB, MIB

LINE_BYTES = 64
"""Bytes that caches and memory exchange."""

PAGE_BYTES = 4096
"""Bytes under one system checksum."""

LINES_PER_PAGE = PAGE_BYTES // LINE_BYTES

CHECKSUM_BYTES = 4
"""A CRC-32, of a line or of a page: 16 of them fill a line."""

CHECKSUMS_PER_LINE = LINE_BYTES // CHECKSUM_BYTES

Protection = Literal["none", "controller", "object", "page"]
"""Who keeps checksums and parity: nobody; the controller; software at the end of each transaction, by written object
(as Pangolin) or by whole page (as Mojim with checksums)."""


@dataclass(frozen=True, slots=True)
class MemorySystem:
    """A memory system: the paper's (§4: 12 cores of 2.27 GHz, 24 MB last-level cache, 4 NVM modules)."""

    mapped_bytes: int = 256 * MIB
    """Bytes of data that are mapped, from address 0 on; whole pages."""

    num_cores: int = 12
    """Cores; each has an L1 and an L2 of its own."""

    clock_hz: float = 2.27e9
    """Cycles per second."""

    l1_bytes: int = 32 * KIB
    l2_bytes: int = 256 * KIB
    private_ways: int = 8
    """Places of a line in an L1 or L2."""

    llc_bytes: int = 24 * MIB
    llc_ways: int = 16
    """The shared cache, over all its banks."""

    redundancy_ways: int = 2
    diff_ways: int = 1
    """Ways of the shared cache that every controller design reserves, whether it uses them or not: the steps of the
    controller then differ in nothing else."""

    controller_bytes: int = 4 * KIB
    """Redundancy cache of one controller; there is one at each bank, as many banks as cores."""

    l1_cycles: float = 4.0
    l2_cycles: float = 7.0
    llc_cycles: float = 27.0
    """Cycles to look into each cache; they add up on the way down."""

    num_dimms: int = 4
    """NVM modules: a stripe has a page on each, one of them parity, rotating."""

    read_s: float = 60e-9
    write_s: float = 150e-9
    """Latency of one line. Writes keep no core waiting."""

    read_busy_s: float = LINE_BYTES / 6.6e9
    write_busy_s: float = LINE_BYTES / 2.3e9
    """How long a module is taken by one line: 6.6 and 2.3 GB/s, as measured of the first such modules (Izraelevitz et
    al., 2019)."""

    parallel_reads: float = 4.0
    """Lines that a core fetches ahead where it reads one after the other."""

    hash_bytes_per_cycle: float = 8 / 3
    """What one core checksums in software: the CRC instruction takes 8 bytes and 3 cycles."""

    parity_cycles: float = 144.0
    """Cycles of a core to add one line to parity in software: 8 atomic XORs of 18 cycles."""

    energy_j: tuple[float, float, float, float, float] = (15e-12, 46e-12, 240e-12, 1.6e-9, 9e-9)
    """Per access: L1 or a controller's cache, L2, shared cache, NVM read, NVM write. A proxy, for comparisons."""

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that no such system has."""
        if self.mapped_bytes < PAGE_BYTES or self.mapped_bytes % PAGE_BYTES:
            raise InputError(
                f"mapped_bytes is {self.mapped_bytes}; a mapping has whole pages of {PAGE_BYTES} bytes, at least one. "
                "Round it up."
            )
        if self.num_dimms < 2:
            raise InputError(f"num_dimms is {self.num_dimms}; parity needs a module of its own. Use 2 or more.")
        if self.num_cores < 1 or self.data_ways < 1:
            raise InputError(
                f"{self.num_cores} cores and {self.data_ways} ways for data; each must be at least 1. "
                "Reserve fewer ways."
            )

    @property
    def data_ways(self) -> int:
        """Ways that are left to data where a controller reserves some."""
        return self.llc_ways - self.redundancy_ways - self.diff_ways

    @property
    def num_lines(self) -> int:
        """Lines of data."""
        return self.mapped_bytes // LINE_BYTES


@dataclass(frozen=True, slots=True)
class NvmDesign:
    """Who protects the memory, and with what. The default is the whole controller; `DESIGNS` names the usual ones."""

    protection: Protection = "controller"
    """Who keeps checksums and parity."""

    line_checksums: bool = True
    """The controller also keeps a checksum per line, so that verifying a line does not take its whole page."""

    caches_redundancy: bool = True
    """Checksums and parity stay in the controllers' caches and the reserved ways, instead of going to memory."""

    keeps_diffs: bool = True
    """What a line held before its first store is kept in a reserved way, so that its write-back need not read it."""

    memory: MemorySystem = field(default_factory=MemorySystem)
    """The memory system."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a protection that does not exist."""
        if self.protection not in Protection.__args__:  # type: ignore[attr-defined]  # the names inside of a Literal
            raise InputError(f"unknown protection {self.protection!r}. Choose one of: none, controller, object, page.")


DESIGNS: dict[str, NvmDesign] = {
    "none": NvmDesign("none"),
    "page-checksums": NvmDesign(line_checksums=False, caches_redundancy=False, keeps_diffs=False),
    "line-checksums": NvmDesign(caches_redundancy=False, keeps_diffs=False),
    "cached-redundancy": NvmDesign(keeps_diffs=False),
    "tvarak": NvmDesign(),
    "txb-object": NvmDesign("object"),
    "txb-page": NvmDesign("page"),
}
"""No redundancy; the controller, part by part (the ablation, in its order); software at the end of transactions."""

ABLATION = ("page-checksums", "line-checksums", "cached-redundancy", "tvarak")
"""Designs of which each has one part more than the one before."""


class LineLayout:
    """Where lines lie: data, then parity, then line checksums, then page checksums; all as numbers of lines.

    Page `p` is in stripe `p // (num_dimms - 1)`; the stripe's parity page
    is on module `stripe % num_dimms`, its data pages on the next ones.
    """

    def __init__(self, memory: MemorySystem) -> None:
        self._dimms = memory.num_dimms
        self._data_pages = memory.num_dimms - 1
        pages = memory.num_lines // LINES_PER_PAGE
        self.parity_start = memory.num_lines
        """First line of parity."""
        self.line_checksum_start = self.parity_start + -(-pages // self._data_pages) * LINES_PER_PAGE
        """First line of line checksums."""
        self.page_checksum_start = self.line_checksum_start + -(-memory.num_lines // CHECKSUMS_PER_LINE)
        """First line of page checksums."""
        self.end = self.page_checksum_start + -(-pages // CHECKSUMS_PER_LINE)
        """One past the last line."""

    def parity_line(self, line: int) -> int:
        """Return the line that holds the parity of a line of data."""
        page, inside = divmod(line, LINES_PER_PAGE)
        return self.parity_start + page // self._data_pages * LINES_PER_PAGE + inside

    def line_checksum(self, line: int) -> int:
        """Return the line that holds the checksum of a line of data."""
        return self.line_checksum_start + line // CHECKSUMS_PER_LINE

    def page_checksum(self, line: int) -> int:
        """Return the line that holds the checksum of the page of a line of data."""
        return self.page_checksum_start + line // LINES_PER_PAGE // CHECKSUMS_PER_LINE

    def mates(self, line: int) -> list[int]:
        """Return the other lines of data under the same parity."""
        page, inside = divmod(line, LINES_PER_PAGE)
        first = page // self._data_pages * self._data_pages
        lines = [other * LINES_PER_PAGE + inside for other in range(first, first + self._data_pages) if other != page]
        return [other for other in lines if other < self.parity_start]

    def dimm(self, line: int) -> int:
        """Return the module that holds a line of any kind."""
        if line < self.parity_start:
            stripe, place = divmod(line // LINES_PER_PAGE, self._data_pages)
            return (stripe + 1 + place) % self._dimms
        if line < self.line_checksum_start:
            return (line - self.parity_start) // LINES_PER_PAGE % self._dimms
        return line % self._dimms
