"""What a rank does around its two large gaps: measure them, and lend them to a fill process.

    main job   |  fill-drain  |FFFF|  forward-backward  |BBBBBBBB|
    rank        begin      end      begin            end
    fill              runs                  runs

The first `PROFILES` gaps of a kind are measured only. After that a gap begins with an instruction to the fill process,
whose budget is the median of the last measured gaps less a margin. It answers before its budget is over; the rank waits
for the answer before it computes on, as it would for a kernel in flight on its device. A process that does not answer
within `PATIENCE` of the gap is ended, and training goes on without it. Source: PipeFill (MLSys 2025), instructions to
the fill process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.parallel.fill.packing import LARGE, FillJob, lent_ns
from headway.parallel.fill.worker import ANSWER, INSTRUCTION
from headway.runtime.host.idle_process import START_S, is_able, start_idle
from headway.trace.events.vocabulary import SPANS

SCRIPT = Path(__file__).with_name("worker.py")

PROFILES, WINDOW = 2, 8
"""Gaps of a kind that are measured before one is lent, and of how many the median is taken."""

PATIENCE = 5.0
"""Budgets after which a fill process that has not answered is ended; at least a second."""


CHUNKS, LATE = SPANS["fill.chunks"].code, SPANS["fill.late"].code


class FillProcess:
    """A fill process beside this rank."""

    def __init__(self, jobs: Sequence[FillJob], free_bytes: Mapping[str, int]) -> None:
        """Start it. Raises `InputError` where the system cannot, or it does not come up."""
        if not is_able():
            raise InputError("this system has no scheduling class idle: a fill job could take cores from training.")
        rows = [
            {
                "name": job.name, "samples": job.samples, "run": job.run,
                "configurations": [
                    {
                        "name": choice.name, "samples": choice.samples,
                        "chunks": [
                            (chunk.duration_ns, [chunk.memory_bytes <= free_bytes[name] for name in LARGE])
                            for chunk in choice.chunks
                        ],
                    }
                    for choice in job.configurations
                ],
            }
            for job in jobs
        ]  # fmt: skip
        requests, self._instructions = os.pipe()
        self._answers, replies = os.pipe()
        arguments = [str(requests), str(replies), str(os.getpid()), json.dumps(rows)]
        pid = start_idle([sys.executable, "-I", str(SCRIPT), *arguments], pass_fds=(requests, replies))
        os.close(requests)
        os.close(replies)
        if pid is None:
            raise InputError(f"the fill process did not start within {START_S:g} s.")
        self.pid, self._handle = pid, os.pidfd_open(pid)
        self.ended = ""
        """Why it runs no more; '' while it does."""
        self._number = 0

    def instruct(self, gap_kind: str, budget_ns: int) -> bool:
        """Lend it a gap; say whether it runs."""
        if self.ended:
            return False
        self._number += 1
        try:
            os.write(self._instructions, INSTRUCTION.pack(self._number, LARGE.index(gap_kind), budget_ns))
        except BrokenPipeError:
            self.ended = "the fill process is gone"
        return not self.ended

    def returned(self, budget_ns: int) -> tuple[int, int]:
        """Wait for its answer: chunks, and their time in ns. One that does not answer in time is ended."""
        patience_s = max(1.0, PATIENCE * budget_ns / NS_PER_S)
        if not select.select([self._answers], [], [], patience_s)[0]:
            self.stop(f"the fill process did not return within {patience_s:.1f} s of a gap; it was ended")
            return 0, 0
        message = os.read(self._answers, ANSWER.size)
        if len(message) < ANSWER.size:
            self.ended = "the fill process is gone"
            return 0, 0
        _, chunks, used_ns, job = ANSWER.unpack(message)
        if job < 0:
            self.stop("all fill jobs are done")
        return chunks, used_ns

    def stop(self, reason: str = "stopped") -> None:
        """End it; once."""
        if not self.ended:
            self.ended = reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            for descriptor in (self._handle, self._instructions):
                os.close(descriptor)


class GapWatch:
    """The large gaps of this rank; `pipelining` calls `begin` and `end` around them."""

    def __init__(self, process: FillProcess | None = None, emit: Callable[..., None] | None = None) -> None:
        """Lend gaps to `process`; `emit` writes what ran in them into a recording, as `Probes.emit` does."""
        self.process, self._emit = process, emit
        self.lends = True
        """Whether gaps are lent; measuring goes on without."""
        self.large_ns = self.used_ns = self.late_ns = self.chunks = 0
        """While gaps are lent: their time, that of chunks, what chunks ran over the gaps, and how many they were."""
        self.lengths_ns: dict[str, deque[int]] = {name: deque(maxlen=WINDOW) for name in LARGE}
        """Kind -> the last measured gaps."""
        self._kind, self._start_ns, self._budget_ns = "", 0, 0

    def budget_ns(self, gap_kind: str) -> int:
        """Return what may be lent of the next gap of a kind; 0 while it is not known."""
        lengths = self.lengths_ns[gap_kind]
        if len(lengths) < PROFILES:
            return 0
        return lent_ns(statistics.median(lengths))

    def begin(self, gap_kind: str) -> None:
        """The rank has nothing to compute from now on."""
        self._kind, self._start_ns, self._budget_ns = gap_kind, time.perf_counter_ns(), 0
        budget_ns = self.budget_ns(gap_kind)
        if self.process is not None and self.lends and budget_ns > 0 and self.process.instruct(gap_kind, budget_ns):
            self._budget_ns = budget_ns

    def end(self) -> None:
        """What the rank waited for is there: it computes on as soon as the fill process has returned."""
        if not self._kind:
            return
        gap_ns = time.perf_counter_ns() - self._start_ns
        self.lengths_ns[self._kind].append(gap_ns)
        self.large_ns += gap_ns if self.lends and self.process is not None else 0
        if self._budget_ns and self.process is not None:
            chunks, used_ns = self.process.returned(self._budget_ns)
            self.used_ns, self.chunks = self.used_ns + used_ns, self.chunks + chunks
            late_ns = max(0, time.perf_counter_ns() - self._start_ns - gap_ns)
            self.late_ns += late_ns
            if self._emit is not None and chunks:
                # Chunks run from the start of the gap on, one after the other.
                self._emit(CHUNKS, self._start_ns, min(used_ns, gap_ns), LARGE.index(self._kind), chunks)
                self._emit(LATE, self._start_ns + gap_ns, late_ns)
        self._kind = ""
