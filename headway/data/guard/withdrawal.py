"""A remedy that makes steps slower than they were recorded is withdrawn while the job runs.

The plan says how long a step took. Over `STEPS` steps under the remedy the median step, plus the remedy's one-time
costs (trials, iterators) spread over those steps, is held against it:

    steps  ──10──┬──10──┬──10──┬──10──┬──10──   median of five means, without the time in iter(loader)
    iter(loader)   all of it / 50               added

Steps that look too slow are watched for as many again. If other processes take cores meanwhile, the host is slower
than it was, and nothing is decided, a few times over. Then the next steps run without the remedy, and if those take as
long, it comes back for good. Workers are left in the middle of a pass; other remedies end, and all come back, at the
next iterator: in a job of one pass none comes back.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headway.core.machine.host_load import LoadSampler
from headway.data.guard.outcome import OutcomeWriter
from headway.runtime.in_rank.remedy import Context
from headway.trace.rings.ring import warn

CHUNK, CHUNKS = 10, 5
STEPS = CHUNK * CHUNKS

SLOWER = 1.1
"""Times as long as recorded: more is slower."""

BUSY_CORES = 0.3
"""Cores that other processes take on a host that is slower than it was."""

PATIENCE = 4
"""Times that a busy host puts the decision off."""

AS_LONG = 0.98
"""Steps without the remedy that take this share of those with it, or more, are no reason to leave it out."""


class OtherCores:
    """Cores that processes outside of the job of this rank take between two calls."""

    def __init__(self) -> None:
        self._sampler: LoadSampler | None = None

    def __call__(self) -> float | None:
        """Look; None the first time."""
        before, self._sampler = self._sampler, LoadSampler(os.getppid() if os.getppid() > 1 else os.getpid())
        self._sampler.look(at_once=True)
        if before is None:
            return None
        before.look(at_once=True)
        return before.between().other_cores


@dataclass(slots=True)
class Withdrawal:
    """Watches the steps of a rank under one remedy."""

    recorded_s: float | None
    """Time of a step in the run that the plan was made from; None: nothing is withdrawn."""
    report: OutcomeWriter
    """Learns what is withdrawn."""
    clock: Callable[[], float] = perf_counter
    other_cores: Callable[[], float | None] = field(default_factory=lambda: OtherCores())
    """Says how many cores other processes took since the last call; None at the first one."""
    leave: Callable[[], bool] = lambda: False
    """Lets go of the loaders that have the remedy; says whether at once, and not at their next passes."""
    is_off: bool = False
    """Whether loaders are to be left alone at their next iterator."""
    has_remedy: bool = False
    """Whether the iterator that was made last is the remedy's."""
    _in_use: bool = False
    _settled: bool = False
    _put_off: int = 0
    _with_s: float = 0.0
    _mark: float = 0.0
    _making_s: float = 0.0
    _chunks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CHUNKS))
    """(seconds of a step without what making iterators took, seconds of that) of the last chunks."""

    def step(self, _: int) -> int:
        """Be called at an optimizer step; returns the number of steps until the next call."""
        now = self.clock()
        spent_s, making_s = now - self._mark, self._making_s
        counts = self._mark > 0 and self._in_use and (self.has_remedy or self.is_off)
        self._mark, self._making_s = now, 0.0
        if counts and not self._settled:
            self._chunks.append(((spent_s - making_s) / CHUNK, making_s / CHUNK))
            if len(self._chunks) == CHUNKS:
                self._judge()
        return CHUNK

    @contextmanager
    def making(self) -> Iterator[None]:
        """Count the time of the block, in which an iterator is made; one of the remedy's sets `has_remedy`."""
        start, self.has_remedy = self.clock(), False
        try:
            yield
        finally:
            self._making_s += self.clock() - start
            if not self._in_use:
                # After a change, chunks count from the first one on that begins after the first iterator.
                self._in_use, self._mark = True, 0.0
                self._chunks.clear()

    def _judge(self) -> None:
        assert self.recorded_s is not None
        steps, making = zip(*self._chunks, strict=True)
        step_s = statistics.median(steps) + statistics.fmean(making)
        if self.is_off:
            self._settled, took = True, f"{1e3 * step_s:.1f} ms"
            if step_s >= AS_LONG * self._with_s:
                self.is_off = False
                self.report.restored()
                warn(f"{self.report.name} is applied again: without it a step takes {took}")
        elif step_s > SLOWER * self.recorded_s:
            if self._put_off < PATIENCE:
                taken = self.other_cores()
                if taken is None or taken >= BUSY_CORES:
                    self._put_off += taken is not None
                    self._chunks.clear()
                    return
            self._with_s, self.is_off = step_s, True
            reason = (
                f"over {STEPS} steps one took {1e3 * step_s:.1f} ms, and {1e3 * self.recorded_s:.1f} ms when the plan "
                "was made"
            )
            self._in_use, self._mark = self.leave(), 0.0
            self._chunks.clear()
            self.report.withdrawn("all loaders", reason)
            warn(f"{self.report.name} is withdrawn: {reason}")


def withdrawal_of(context: Context, report: OutcomeWriter) -> Withdrawal:
    """Return what watches the steps of this rank; with `--verify`, which takes time, nothing is judged."""
    watch = Withdrawal(None if context.verify == "all" else context.step_s, report)
    if watch.recorded_s:
        listener: Any = watch.step
        context.listen(listener)
    return watch
