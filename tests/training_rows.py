"""Rows of a training thread, written event by event: what the derivations of steps and evaluation are held to."""

import numpy as np

from headway.trace.events.vocabulary import KIND, SPANS
from headway.trace.recording.rows import CODE, RecordedRows

TICK = 10


class Thread:
    """Writes one event behind the other, each 10 ns long unless said otherwise."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events: list[tuple[str, int, int, dict[str, int]]] = []

    def add(self, name: str, duration_ns: int = TICK, **columns: int) -> int:
        """Write one event; returns its begin."""
        start = self.now_ns
        self.events.append((name, start, duration_ns, columns))
        self.now_ns += duration_ns
        return start

    def forward(self, *, model: int = 0, grad: bool = True, training: bool = True, duration_ns: int = TICK) -> int:
        return self.add("forward", duration_ns, corr=model, seq=grad + 2 * training)

    def backward(self, *, fresh: bool = False) -> int:
        return self.add("segment.backward", corr=0, peer=int(fresh))

    def update(self, optimizer: int = 0) -> int:
        return self.add("optimizer.step", corr=optimizer, seq=0)

    def mode(self, *, training: bool, model: int = 0) -> int:
        return self.add("mode", 0, corr=model, seq=int(training))

    def batch(self, iterator: int, *, seq: int = 0) -> int:
        return self.add("input.next", corr=iterator, seq=seq, group=0)

    def train(self, steps: int = 1, *, iterator: int = -2, **how: bool) -> None:
        """Write whole steps: a batch where there is an iterator, forward, backward, update."""
        for step in range(steps):
            if iterator >= 0:
                self.batch(iterator, seq=step)
            self.forward(**how)
            self.backward(fresh=True)
            self.update()

    def rows(self) -> RecordedRows:
        """Return the events as rows."""
        parts = [
            RecordedRows.of(CODE[name], np.array([start]), np.array([duration]), kind=KIND[SPANS[name].kind],
                    **{key: np.array([value]) for key, value in columns.items()})
            for name, start, duration, columns in self.events
        ]  # fmt: skip
        return RecordedRows.concat(parts) if parts else RecordedRows.blank(0)
