"""What it costs to keep non-volatile memory intact, simulated: traffic, time and energy of a trace under a design.

`simulate_nvm` plays a trace of accesses through the caches of `MemorySystem`, line
by line, and counts what each design reads and writes in NVM for the data
itself and for checksums and parity. It is a simulation: no figure of it was
measured on hardware, and only ratios between designs mean anything.

    read miss    the controller fetches the line's checksum, or the whole page and its checksum, and compares
    write-back   old data from the diff way, else read; then checksums and parity are updated with the difference,
                 as CRC and XOR are linear
    software     at the end of a transaction, through the core's own caches; it verifies nothing when it reads

Time is that of the slowest core: its computation, its cache look-ups, the
lines it waited for. Modules answer in their latency plus the mean wait of a
queue at their load (M/D/1), so the total is where time and load agree.
Coherence traffic between cores is not modelled. At the end all dirty lines
are written back.

>>> from headway.lab.nvm_traces import get_only
>>> trace = get_only(600)
>>> [simulate_nvm(trace, name).worst_read_amplification for name in ("page-checksums", "line-checksums", "tvarak")]
[65, 2, 2]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.tables import pick
from headway.lab.nvm_design import DESIGNS, LINE_BYTES, LINES_PER_PAGE, PAGE_BYTES, LineLayout, NvmDesign
from headway.lab.nvm_traces import END, WRITE, SetAssociativeCache, checked


@dataclass(frozen=True, slots=True)
class NvmStats:
    """What a trace cost under a design; accesses of NVM count lines of 64 bytes. Simulated."""

    num_accesses: int
    """Reads and writes of the trace."""

    data_reads: int
    """Lines of data that missed all caches when the program used them."""

    data_writes: int
    """Lines of data written back."""

    redundancy_reads: int
    """Lines read for the sake of checksums and parity, old or verified data included."""

    redundancy_writes: int
    """Lines of checksums and parity written."""

    worst_read_amplification: int
    """Most lines of NVM that were read for one line that missed."""

    time_s: float
    """Simulated time of the slowest core."""

    energy_j: float
    """Energy of all caches and of NVM: a proxy."""

    @property
    def nvm_accesses(self) -> int:
        """All lines read and written in NVM."""
        return self.data_reads + self.data_writes + self.redundancy_reads + self.redundancy_writes

    @property
    def amplification(self) -> float:
        """All NVM accesses per access for data; 1 where there were none."""
        data = self.data_reads + self.data_writes
        return self.nvm_accesses / data if data else 1.0

    def slowdown(self, baseline: NvmStats) -> float:
        """Return how much longer it took than `baseline`, a fraction of that."""
        return self.time_s / baseline.time_s - 1 if baseline.time_s else 0.0


def simulate_nvm(trace: ArrayLike, design: NvmDesign | str = "tvarak") -> NvmStats:
    """Return what a trace costs under a design, or the one of that name in `DESIGNS`.

    The trace is integers `[n, 2]`: op and address; see `traces`. Where no row ends a request, every write is a
    transaction of its own, and all is done by one core.

    Raises `InputError` for a design that is not in the table, and for a trace as `traces.checked` does.
    """
    chosen = pick(DESIGNS, design, "design") if isinstance(design, str) else design
    rows = checked(trace, chosen.memory.mapped_bytes)
    run = _TraceRun(chosen)
    run.play(rows)
    return run.stats(int((rows[:, 0] != END).sum()))


class _TraceRun:
    """One trace on its way through the memory system."""

    def __init__(self, design: NvmDesign) -> None:
        memory = self._memory = design.memory
        self._design, self._layout = design, LineLayout(memory)
        self._controlled = design.protection == "controller"
        self._l1 = [SetAssociativeCache(memory.l1_bytes, ways=memory.private_ways) for _ in range(memory.num_cores)]
        self._l2 = [SetAssociativeCache(memory.l2_bytes, ways=memory.private_ways) for _ in range(memory.num_cores)]
        way_bytes = memory.llc_bytes // memory.llc_ways
        ways = memory.data_ways if self._controlled else memory.llc_ways
        self._llc = SetAssociativeCache(way_bytes * ways, ways=ways)
        self._diffs = SetAssociativeCache(way_bytes * memory.diff_ways, ways=memory.diff_ways)
        self._kept = SetAssociativeCache(way_bytes * memory.redundancy_ways, ways=memory.redundancy_ways)
        lines = memory.controller_bytes // LINE_BYTES
        self._controllers = [SetAssociativeCache(memory.controller_bytes, ways=lines) for _ in range(memory.num_cores)]
        self._cycles = [0.0] * memory.num_cores
        self._waited_s = [0.0] * memory.num_cores  # for NVM, without queues
        self._fetches = [0.0] * memory.num_cores  # waits that queue, each of which counts by what is not overlapped
        self._looks = [0, 0, 0]  # L1 and controllers' caches, L2, LLC
        self._reads, self._writes = [0] * memory.num_dimms, [0] * memory.num_dimms
        self._data_reads = self._data_writes = self._worst = 0
        self._protects = False  # software is at its checksums: what it reads then is for their sake

    def play(self, rows: NDArray[np.int64]) -> None:
        """Run all rows, then write back what is dirty."""
        ops, operands = rows[:, 0].tolist(), rows[:, 1].tolist()
        requested = bool((rows[:, 0] == END).any())
        in_software = self._design.protection in ("object", "page")
        clock_hz, num_cores = self._memory.clock_hz, self._memory.num_cores
        core, written = 0, dict[int, None]()
        for op, operand in zip(ops, operands, strict=True):
            if op != END:
                self._access(core, operand // LINE_BYTES, op == WRITE)
                if op == WRITE and in_software:
                    written[operand // LINE_BYTES] = None
            if written and (op == END or (not requested and op == WRITE)):
                self._end_transaction(core, list(written))
                written.clear()
            if op == END:
                self._cycles[core] += operand * 1e-9 * clock_hz
                core = (core + 1) % num_cores
        if written:
            self._end_transaction(core, list(written))
        self._flush()

    def stats(self, num_accesses: int) -> NvmStats:
        """Return the counts, and the time at which they add up."""
        memory, reads, writes = self._memory, sum(self._reads), sum(self._writes)
        counts = (*self._looks, reads, writes)
        return NvmStats(
            num_accesses, self._data_reads, self._data_writes, reads - self._data_reads, writes - self._data_writes,
            self._worst, self._time_s(), sum(count * each for count, each in zip(counts, memory.energy_j, strict=True)),
        )  # fmt: skip

    # The caches of the cores.

    def _access(self, core: int, line: int, write: bool) -> None:
        """Let a core use a line: L1, L2, LLC, NVM; what was dirty and makes room moves one down."""
        memory, l1, l2 = self._memory, self._l1[core], self._l2[core]
        self._looks[0] += 1
        cycles = memory.l1_cycles
        if not l1.hit(line, write):
            self._looks[1] += 1
            cycles += memory.l2_cycles
            if not l2.hit(line, False):
                cycles += memory.llc_cycles
                self._fetch(core, line, line - 1 in l1)
                self._to_llc(l2.insert(line, False))
            victim = l1.insert(line, write)
            if victim >= 0 and not l2.hit(victim, True):
                self._to_llc(l2.insert(victim, True))
        self._cycles[core] += cycles

    def _fetch(self, core: int, line: int, in_order: bool) -> None:
        """Get a line from the LLC, or from NVM, verified where there is somebody to do that."""
        self._looks[2] += 1
        if self._llc.hit(line, False):
            return
        before = sum(self._reads)
        self._read(line)
        wait_s = self._memory.read_s
        if line < self._layout.parity_start:
            self._data_reads += not self._protects
            if self._controlled:
                wait_s = max(wait_s, self._verify(line))
        self._worst = max(self._worst, sum(self._reads) - before)
        share = 1 / self._memory.parallel_reads if in_order else 1.0
        self._waited_s[core] += wait_s * share
        self._fetches[core] += share
        self._write_back(self._llc.insert(line, False))

    def _to_llc(self, line: int) -> None:
        """Take a dirty line from an L2; what it held before is at hand if the LLC has it still clean."""
        if line < 0:
            return
        self._looks[2] += 1
        keeps = self._controlled and self._design.keeps_diffs and line in self._llc
        if keeps and not self._llc.is_dirty(line):
            self._diffs.insert(line, False)
        if not self._llc.hit(line, True):
            self._write_back(self._llc.insert(line, True))

    def _write_back(self, line: int) -> None:
        """Write a dirty line to NVM, and what protects it."""
        if line < 0:
            return
        self._write(line)
        if line >= self._layout.parity_start:
            return
        self._data_writes += 1
        if self._controlled:
            if not self._diffs.drop(line):
                self._read(line)
            self._update(self._layout.page_checksum(line))
            self._update(self._layout.parity_line(line))
            if self._design.line_checksums:
                self._update(self._layout.line_checksum(line))

    # The controller.

    def _verify(self, line: int) -> float:
        """Fetch what a line is compared with; return how long that took, beside the line itself."""
        if self._design.line_checksums:
            return self._redundant(self._layout.line_checksum(line), False)
        first = line // LINES_PER_PAGE * LINES_PER_PAGE
        for other in range(first, first + LINES_PER_PAGE):
            if other != line:
                self._read(other)
        rest_s = self._memory.read_s + (LINES_PER_PAGE - 1) * self._memory.read_busy_s  # a page lies on one module
        return max(rest_s, self._redundant(self._layout.page_checksum(line), False))

    def _update(self, line: int) -> None:
        """Change part of a line of checksums or parity."""
        self._redundant(line, True)
        if not self._design.caches_redundancy:
            self._write(line)

    def _redundant(self, line: int, write: bool) -> float:
        """Get a line of checksums or parity, to change it if `write`; return how long that takes."""
        memory = self._memory
        if not self._design.caches_redundancy:
            self._read(line)
            return memory.read_s
        self._looks[0] += 1
        controller, wait_s = self._controllers[line % memory.num_cores], 0.0
        if controller.hit(line, write):
            return wait_s
        self._looks[2] += 1
        wait_s = memory.llc_cycles / memory.clock_hz
        if not self._kept.hit(line, False):
            self._read(line)
            wait_s += memory.read_s
            self._write_evicted(self._kept.insert(line, False))
        self._keep(controller.insert(line, write))
        return wait_s

    def _keep(self, line: int) -> None:
        """Take a dirty line of checksums or parity from a controller into the reserved ways."""
        if line >= 0 and not self._kept.hit(line, True):
            self._write_evicted(self._kept.insert(line, True))

    def _write_evicted(self, line: int) -> None:
        """Write a dirty line of checksums or parity that made room; -1 is none."""
        if line >= 0:
            self._write(line)

    # Software.

    def _end_transaction(self, core: int, lines: list[int]) -> None:
        """Let a core update checksums and parity of the lines that its transaction wrote."""
        memory, layout = self._memory, self._layout
        self._protects = True
        if self._design.protection == "object":
            starts = [line for line in lines if line - 1 not in lines]
            hashed_bytes = len(lines) * LINE_BYTES
            sums = {layout.line_checksum(line) for line in starts}  # an object is a run of written lines
        else:
            pages = sorted({line // LINES_PER_PAGE for line in lines})
            hashed_bytes = len(pages) * PAGE_BYTES
            sums = {layout.page_checksum(page * LINES_PER_PAGE) for page in pages}
            for page in pages:
                for line in range(page * LINES_PER_PAGE, (page + 1) * LINES_PER_PAGE):
                    self._access(core, line, False)
        for line in (*sorted(sums), *(layout.parity_line(line) for line in lines)):
            self._access(core, line, True)
        self._cycles[core] += hashed_bytes / memory.hash_bytes_per_cycle + len(lines) * memory.parity_cycles
        self._protects = False

    # NVM.

    def _read(self, line: int) -> None:
        self._reads[self._layout.dimm(line)] += 1

    def _write(self, line: int) -> None:
        self._writes[self._layout.dimm(line)] += 1

    def _flush(self) -> None:
        """Write back all that is dirty, from the cores down."""
        for l1, l2 in zip(self._l1, self._l2, strict=True):
            for line in l1.dirty():
                if not l2.hit(line, True):
                    self._to_llc(l2.insert(line, True))
            for line in l2.dirty():
                self._to_llc(line)
        for line in self._llc.dirty():
            self._write_back(line)
        for controller in self._controllers:
            for line in controller.dirty():
                self._keep(line)
        for line in self._kept.dirty():
            self._write(line)

    def _time_s(self) -> float:
        """Return the time at which the slowest core's waits are those of modules at the load of that time."""
        memory = self._memory
        own_s = [cycles / memory.clock_hz + wait_s for cycles, wait_s in zip(self._cycles, self._waited_s, strict=True)]
        busy_s = max(
            reads * memory.read_busy_s + writes * memory.write_busy_s
            for reads, writes in zip(self._reads, self._writes, strict=True)
        )
        count = sum(self._reads) + sum(self._writes)
        service_s = (sum(self._reads) * memory.read_busy_s + sum(self._writes) * memory.write_busy_s) / max(count, 1)

        def needed_s(total_s: float) -> float:
            load = busy_s / total_s
            queued_s = service_s * load / (2 * (1 - load))
            return max(own + fetches * queued_s for own, fetches in zip(own_s, self._fetches, strict=True))

        low_s = max(busy_s, max(own_s))
        if busy_s == 0:
            return low_s
        high_s = 2 * low_s
        while needed_s(high_s) > high_s:
            high_s *= 2
        for _ in range(60):  # halving: far below a float's last digit
            middle_s = (low_s + high_s) / 2
            if middle_s > busy_s and needed_s(middle_s) <= middle_s:
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s
