"""Follows, beside the drain of the rings, what other processes take of the cores while the ranks train.

The launcher calls it from the drain's thread: nothing of it runs inside a
rank. Records of updates say from when to when the job trained; the load over
that part goes into run.json as `host_load`. Times in ns on CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.machine.host_load import HostLoad, LoadSampler
from headway.core.units import NS_PER_S
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.host_series import HostSeries
from headway.trace.rings.records import RecordRingReader, RingHeader

_LEARNING = [SPANS[name].code for name in ("optimizer.step", "segment.backward")]
"""Records that only training writes."""


class LoadWatch:
    """A listener and looker of `Drainer`; `pid` is the root of the job's process tree."""

    def __init__(self, pid: int) -> None:
        self._sampler = LoadSampler(pid, detailed=True)
        self._first_ns: int | None = None
        self._last_ns = 0

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Note when training began and how far it came."""
        del header
        learning = records[np.isin(records["code"], _LEARNING)]
        if len(learning):
            ends_ns = learning["start_ns"] + learning["duration_ns"]
            self._first_ns = int(ends_ns.min()) if self._first_ns is None else self._first_ns
            self._last_ns = max(self._last_ns, int(ends_ns.max()))

    def look(self, readers: Sequence[RecordRingReader]) -> None:
        """Take a reading when one is due."""
        del readers
        self._sampler.look()

    def load(self) -> HostLoad:
        """Return the load over the training part; over the whole run where no step was seen."""
        if self._first_ns is None:
            return self._sampler.between()
        return self._sampler.between(self._first_ns / NS_PER_S, self._last_ns / NS_PER_S)

    def to_builtins(self) -> dict[str, Any]:
        """Return the entry `host_load` of run.json."""
        entry: dict[str, Any] = msgspec.to_builtins(self.load())
        return entry

    def series(self) -> dict[str, Any]:
        """Return the entry `host_series` of run.json."""
        entry: dict[str, Any] = msgspec.to_builtins(HostSeries.of(self._sampler.readings))
        return entry
