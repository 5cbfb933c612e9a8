"""What a run folder says of its run while that goes on: for whoever watches from another process.

`LiveFeed.poll` reads what is new, about once a second, and never writes: the
run does not notice. A run that has not begun, one in a later attempt, and one
whose launcher is gone are told apart. Times in ns on CLOCK_MONOTONIC.

>>> feed = LiveFeed(Path("/nonexistent/run"))
>>> feed.poll(); feed.state
'waiting'
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.files.safe_files import read_json
from headway.ledger.live_ledger import LiveFigures, LiveLedger
from headway.trace.events import parquet
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPAN_OF_CODE, SPANS
from headway.trace.recording.run_facts import RunFacts
from headway.trace.rings.follow import Records, RunFollower
from headway.trace.rings.records import RECORD_DTYPE, RingHeader

LEFT_ALONE_NS = 10_000_000_000
"""A run whose processes are all gone, and whose launcher has said nothing for so long, has lost its launcher."""

_EVENTS = re.compile(r"a(\d+)-r(\d+)\.parquet")
_NUMBERS = ("a", "b", "c", "d")


class LiveFeed:
    """One run folder, followed. Poll it from one thread; `figures` and `ledger.series` may be read from others."""

    def __init__(self, path: Path) -> None:
        """Follow the run in `path`, which may not exist yet."""
        self.path = path
        self.meta: dict[str, Any] = {}
        """What run.json says, as a page shows it; empty before it is there."""
        self.facts = RunFacts()
        """The same, typed."""
        self.state = "waiting"
        """'waiting' (no run yet), 'running', 'ended' (run.json says how), 'lost' (the launcher is gone)."""
        self.ledger: LiveLedger | None = None
        """The account; None before the first record or run.json."""
        self._follower = RunFollower.of_run(path)
        self._meta_ns = -1
        self._attempts = 0
        self._alive_ns = time.perf_counter_ns()

    def poll(self) -> None:
        """Read what is new."""
        if self.state in ("ended", "lost"):
            return
        self._read_meta()
        found = self._follower.poll()
        if self.ledger is None and (self.meta or found):
            self.ledger = self._open(found)
        for header, records in sorted(found, key=lambda pair: pair[0].attempt):
            self._catch_up(header.attempt)
            self._account.add(header, records)
        headers = self._follower.headers()
        if self.ledger is not None:
            self.ledger.look(headers)
        self.state = self._state(bool(found), [header.pid for header in headers])

    def figures(self) -> LiveFigures | None:
        """Return how things stand; None while there is no run."""
        return None if self.ledger is None else self.ledger.figures(time.perf_counter_ns())

    def doing(self) -> dict[int, tuple[str, int]]:
        """Return rank -> (recorded name, begin in ns) of the operation that it is in; ranks in none are left out."""
        pages = self._follower.pages().items()
        return {rank: (SPAN_OF_CODE[page.op], page.since_ns) for rank, page in pages if page.op in SPAN_OF_CODE}

    def close(self) -> None:
        """Let go of every file."""
        self._follower.close()

    @property
    def _account(self) -> LiveLedger:
        assert self.ledger is not None, "opened with the first records"
        return self.ledger

    def _open(self, found: Sequence[tuple[Any, Records]]) -> LiveLedger:
        """Return the account of a run that has just been seen."""
        starts = [header.process_start_ns or header.clock_ns for header, _ in found]
        start_ns = self.facts.start_ns or min(starts)
        return LiveLedger(start_ns=start_ns, world_size=self.facts.nproc or len(found))

    def _read_meta(self) -> None:
        """Read run.json when it changed; it is replaced as a whole, so what is read is never half of one."""
        file = self.path / "run.json"
        try:
            changed_ns = file.stat().st_mtime_ns
            if changed_ns != self._meta_ns:
                found = read_json(file)
                self.meta, self._meta_ns = found if isinstance(found, dict) else {}, changed_ns
                self.facts = RunFacts.of(self.meta)
        except (OSError, ValueError):
            return

    def _catch_up(self, attempt: int) -> None:
        """Account for the attempts before `attempt` that were over before anybody looked."""
        while self._attempts < attempt:
            for header, records in finalised(self.path, self._attempts):
                self._account.add(header, records)
            self._attempts += 1
        self._attempts = max(self._attempts, attempt + 1)

    def _state(self, fresh: bool, pids: list[int]) -> str:
        if self.facts.end_ns:
            return "ended"
        if not self.meta and not pids:
            return "ended" if _left_behind(self.path) else "waiting"
        now_ns = time.perf_counter_ns()
        here = self.facts.host in (None, socket.gethostname())
        if fresh or not here or not pids or any(os.path.exists(f"/proc/{pid}") for pid in pids):
            self._alive_ns = now_ns
        return "lost" if now_ns - self._alive_ns > LEFT_ALONE_NS else "running"


def _left_behind(path: Path) -> bool:
    """Return whether a folder without run.json holds events: those of a run that nobody launched, or half a copy."""
    return any((path / "events").glob("a*-r*.parquet")) if path.is_dir() else False


def finalised(path: Path, attempt: int) -> Iterator[tuple[RingHeader, Records]]:
    """Return, for each rank, what `finalise` wrote of an attempt, as the records that it was made of."""
    for file in sorted((path / "events").glob(f"a{attempt}-r*.parquet")):
        match = _EVENTS.fullmatch(file.name)
        if match:
            trace = parquet.read(file)
            rank = int(match[2])
            pid = int(trace.ranks.get(rank, {}).get("pid") or 0)
            yield RingHeader(pid, rank, attempt=attempt), records_of(trace)


def records_of(trace: Trace) -> Records:
    """Return the rows of the training thread as records, in the order in which they ended.

    Rows made when the run was finalised (bounds of steps, gaps) are left out: they were never recorded.
    """
    events = trace.events
    main = trace.lanes.index("main") if "main" in trace.lanes else -1
    code = np.array([SPANS[name].code if name in SPANS else 0 for name in trace.names] + [0])[events["name"]]
    made = [SPANS[name].code for name in ("process", "launcher", "step", "dropped")]
    rows = np.flatnonzero((events["lane"] == main) & (code > 0) & ~np.isin(code, made))
    rows = rows[np.argsort(events["start_ns"][rows] + events["duration_ns"][rows], kind="stable")]
    records = np.zeros(len(rows), RECORD_DTYPE)
    records["code"], records["number"] = code[rows], np.arange(1, len(rows) + 1)
    for column in ("start_ns", "duration_ns"):
        records[column] = events[column][rows]
    for span in SPANS.values():
        mine = records["code"] == span.code
        for number, column in zip(_NUMBERS, span.columns, strict=False):
            if column and mine.any():
                records[number][mine] = events[column][rows[mine]]
    return records
