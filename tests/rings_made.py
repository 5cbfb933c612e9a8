"""Rings as recorded processes leave them, written through the real recorder."""

from pathlib import Path

import numpy as np

from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.assemble import build, by_rank
from headway.trace.rings.records import RECORD_DTYPE, RecordRingReader, RingHeader, stems
from headway.trace.rings.ring import MAIN, Recorder


def record_made(name: str, start_ns: int, duration_ns: int, **more: int) -> np.ndarray:
    """Return an array of one record."""
    made = np.zeros(1, RECORD_DTYPE)
    made["code"], made["start_ns"], made["duration_ns"] = SPANS[name].code, start_ns, duration_ns
    for key, value in more.items():
        made[key] = value
    return made


class Process:
    """One recorded process with a clock of its own: `start` defaults to the end of what it wrote last."""

    def __init__(self, run: Path, *, rank: int = 0, attempt: int = 0, role: int = MAIN, capacity: int = 16384) -> None:
        self.recorder = Recorder(str(run / "rings"), rank=rank, attempt=attempt, role=role, capacity=capacity)
        assert self.recorder.open()
        self.now_ns = self.recorder._clock[0]

    def write(self, name: str, duration_ns: int, *numbers: int, start_ns: int | None = None) -> int:
        """Write one record and return its start."""
        start = self.now_ns if start_ns is None else start_ns
        self.recorder.emit(SPANS[name].code, start, duration_ns, *numbers)
        self.now_ns = max(self.now_ns, start + duration_ns)
        return start

    def train(self, steps: int, *, step_ns: int = 1_000_000, wait_ns: int = 200_000) -> None:
        """Write an iterator and `steps` steps of wait, compute and update."""
        self.write("input.iter", 50_000, 0, 0, 0)
        for step in range(steps):
            self.write("input.next", wait_ns, 0, step, -1, 0)
            self.now_ns += step_ns - wait_ns - 100_000
            self.write("optimizer.step", 100_000, 0, 0)


def built(run: Path, rank: int = 0) -> Trace:
    """Return the trace of one rank without writing it."""
    return build(by_rank(stems(run / "rings"))[rank], rank=rank, attempt=0, run=run)


def rows(trace: Trace, name: str) -> list[tuple[int, int]]:
    """Return (start, duration) of the rows of one name."""
    mask = trace.named(name)
    return list(zip(trace.events["start_ns"][mask].tolist(), trace.events["duration_ns"][mask].tolist(), strict=True))


def read_ring(path: str | Path) -> tuple[RingHeader, np.ndarray, int]:
    """Return header, records (oldest first) and how many were lost, of a ring whose writer is gone."""
    reader = RecordRingReader(path)
    records = reader.drain(final=True)
    header, lost = reader.header, reader.lost
    reader.close()
    return header, records, lost
