"""Garbage collections of one process, timed without a line of Python inside the collector.

Python runs a signal's handler before the next line of Python code, and ignores every exception that leaves an entry of
`gc.callbacks`. An entry written in Python would therefore swallow the KeyboardInterrupt or the time-out of a signal
that arrived during a collection. The entry made here is a chain of built-in callables, which runs no handler:

    max(phase, info, key=next(kept))     calls its key twice, at the start and at the end of a collection
    kept:  append (time, thread) to `stamps`, yield whether that returned None (two equal values, for `max`)

    stamps   start start | end end | start start | end end |  ...       four for each collection

Probes that run in the script's own calls (`optimizer.step`, `next(loader)`, `gc.collect`, ...) turn the stamps into
records with `note`. The generation of a collection is told by `gc.get_stats`, which counts them: of several since the
last look the longest is taken for the oldest generation.
"""

from __future__ import annotations

import _thread
import functools
import gc
import itertools
import operator
import os
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns

from headway.trace.events.vocabulary import GC_CALLED, SPANS

GC = SPANS["host.gc"].code

STAMPS = 4
"""Stamps of one collection."""

MOST = 4096
"""Collections kept between two looks; where there were more, none of them is recorded."""


class Garbage:
    """The collections of this process; `emit` writes a record, `failed` is told where that is impossible."""

    def __init__(self, emit: Callable[..., None], failed: Callable[[str, BaseException], None]) -> None:
        self.stamps: deque[tuple[int, int]] = deque(maxlen=STAMPS * MOST)
        """(time in ns, thread) of the starts and ends that were not looked at yet."""
        self.called = 0
        """Calls of `gc.collect` by the script that are under way."""
        self._emit, self._failed, self._total_ns = emit, failed, 0
        self._lock = _thread.allocate_lock()
        self._counts = _counts()
        self._of_threads: dict[int, deque[tuple[int, ...]]] = {}
        os.register_at_fork(after_in_child=self.stamps.clear)

    def callback(self) -> Callable[..., object]:
        """Return an entry for `gc.callbacks`."""
        stamps = zip(iter(perf_counter_ns, None), iter(_thread.get_ident, None), strict=True)
        kept = map(operator.is_, map(self.stamps.append, stamps), itertools.repeat(None))
        return functools.partial(max, key=functools.partial(next, kept))

    def so_far_ns(self) -> int:
        """Return the nanoseconds of all collections so far."""
        if self.stamps:
            self.note()
        return self._total_ns

    def note(self) -> None:
        """Record the calling thread's collections since the last look; those of other threads wait until they look.

        Where a second thread looks, or a signal's handler in the middle of a look, the next look has them.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            for thread, row in self._new():
                self._of_threads.setdefault(thread, deque(maxlen=MOST)).append(row)
            mine = self._of_threads.pop(_thread.get_ident(), ())
        finally:
            self._lock.release()
        try:
            for row in mine:
                self._emit(GC, *row)
        except Exception as cause:
            self._failed("gc", cause)

    def _new(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (thread, (start, duration, generation, objects collected)) of the whole collections in `stamps`."""
        stamps = self.stamps
        if len(stamps) + STAMPS > STAMPS * MOST:
            stamps.clear()
        taken = [[stamps.popleft() for _ in range(STAMPS)] for _ in range(len(stamps) // STAMPS)]
        rows = [(start, end - start) for _, (start, _), (end, _), _ in taken]
        before, self._counts = self._counts, _counts()
        generations = [
            (generation, (after[1] - then[1]) // (after[0] - then[0]))
            for generation, (then, after) in enumerate(zip(before, self._counts, strict=True))
            for _ in range(after[0] - then[0])
        ]
        longest_last = sorted(range(len(rows)), key=lambda at: rows[at][1])
        kinds = dict(zip(reversed(longest_last), reversed(generations), strict=False))
        for at, row in enumerate(rows):
            self._total_ns += row[1]
            generation, collected = kinds.get(at, (0, 0))
            yield taken[at][0][1], (*row, generation + (GC_CALLED if self.called else 0), collected)


def _counts() -> list[tuple[int, int]]:
    """Return (collections, objects collected) so far of each generation."""
    return [(counts["collections"], counts["collected"]) for counts in gc.get_stats()]
