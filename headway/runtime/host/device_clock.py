"""Where a device's clock stands on the host's, how late its events pass, and how far its host is ahead.

No event passes before it was recorded, nor after it was seen to have passed: that bounds the clock. A device that is
idle when an event is recorded passes it at once, which makes the bound sharp.

>>> clock = Clock()
>>> clock.bound([0, 900], [5_000, 5_300], seen_ns=6_400)
5000
>>> clock.slack_ns
500
"""

from __future__ import annotations

from collections import deque

DRAINED_NS = 200_000
"""An event that passed this soon after it was recorded found the device with nothing to do."""

MOST_LATE_NS = 4_000_000
"""Idle devices of some kinds pass events late, by what the run shows (`DeviceLateness`), and no more than this."""

KEPT = 64
"""Stretches by which that is judged, and by which marks are left out."""


DRIFT = 20e-6
"""Clocks may drift apart by this fraction of the time."""


class Clock:
    """The clock of one device on the host's, int64 ns."""

    def __init__(self) -> None:
        self.device_ns = 0
        """Moment of the newest event by the device, since the first one."""
        self.ahead_ns: int | None = None
        """The host's clock less the device's; None before the first event."""
        self.slack_ns = -1
        """How far apart the bounds of the newest stretch lay; -1 before the first."""

    def bound(self, passed_ns: list[int], recorded_ns: list[int], seen_ns: int) -> int:
        """Learn from events that passed at `passed_ns` by the device, [k], and were recorded at `recorded_ns`.

        The last one was seen to have passed at `seen_ns`. Returns the host's clock less the device's.
        """
        lowest = max(host - device for host, device in zip(recorded_ns, passed_ns, strict=True))
        highest = seen_ns - max(passed_ns)
        ahead = lowest
        if self.ahead_ns is not None:
            ahead = max(lowest, self.ahead_ns - round(DRIFT * (passed_ns[-1] - passed_ns[0])))
        self.ahead_ns = min(ahead, highest)
        self.slack_ns = highest - lowest
        return self.ahead_ns


class DeviceLateness:
    """How late events pass, and how far the host is ahead: by the newest `KEPT` stretches. All ns."""

    def __init__(self) -> None:
        self._at_ready, self._ahead = deque[int](maxlen=KEPT), deque[int](maxlen=KEPT // 8)
        self.fuzz_ns = 0
        """How late an idle device passes an event, where that is more than `DRAINED_NS`; else 0."""
        self.ahead_ns = 0
        """How far the host was ahead of its device at updates, at least."""

    def at_ready(self, late_ns: int) -> None:
        """Note how late the event at a batch passed, before which the device had got to the update."""
        self._at_ready.append(late_ns)
        if len(self._at_ready) >= KEPT // 4:
            usual = 5 * sorted(self._at_ready)[len(self._at_ready) * 9 // 10] // 4
            self.fuzz_ns = min(usual, MOST_LATE_NS) if usual > DRAINED_NS else 0

    def at_update(self, late_ns: int) -> None:
        """Note how late the event at an update passed."""
        self._ahead.append(late_ns)
        self.ahead_ns = min(self._ahead) if len(self._ahead) == self._ahead.maxlen else 0
