"""What a data server counts: where examples came from, what they cost, how long jobs waited and why.

>>> counts = ServerCounts()
>>> counts.waited(100, 200, 110, PreparationTime(fetch_start_ns=110, fetch_end_ns=160))
>>> counts.wait_ns
{'queue': 10, 'fetch': 50, 'prep': 40}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headway.data.audit import AuditSum
from headway.data.caches.partition import FORMS
from headway.data.serving.batches import PreparationTime


@dataclass(slots=True)
class ServerCounts:
    """Counts since the beginning. Each example of each batch is one of `hits`, `shared`, `prepared`; `loads` are the
    preparations that read storage."""

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMS, 0))
    """Finished examples that came straight from the cache, by the form they were kept in."""
    shared: int = 0
    """Examples that were on their way, or in a batch, for somebody else."""
    prepared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("storage", *FORMS), 0))
    """Preparations, by what they began with."""
    read_bytes: int = 0
    fetch_ns: int = 0
    prep_ns: int = 0
    caught_up: int = 0
    """Times that a job that had fallen behind went on with the others."""
    failed: int = 0
    """Preparations that raised."""
    dropped: int = 0
    """Preparations whose example was left out."""
    wait_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("queue", "fetch", "prep"), 0))
    """Time that ranks waited for a batch, by what its last example was doing."""

    @property
    def loads(self) -> int:
        """Examples that were read from storage."""
        return self.prepared["storage"]

    def booked(self, start: str | None, spent: PreparationTime) -> None:
        """Book a preparation that began with form `start` (None: storage)."""
        self.prepared[start or "storage"] += 1
        self.fetch_ns += spent.fetch_ns
        self.prep_ns += spent.prep_ns
        self.read_bytes += spent.read_bytes

    def waited(self, since_ns: int, until_ns: int, started_ns: int, last: PreparationTime) -> None:
        """Book a wait on what the last example to arrive, which was started then, was doing meanwhile."""
        queue = _overlap(since_ns, until_ns, 0, started_ns)
        fetch = _overlap(since_ns, until_ns, max(last.fetch_start_ns, started_ns), last.fetch_end_ns)
        for cause, spent in (("queue", queue), ("fetch", fetch), ("prep", until_ns - since_ns - queue - fetch)):
            self.wait_ns[cause] += spent

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        return {**asdict(self), "loads": self.loads}


@dataclass(slots=True)
class JobCounts:
    """What one job was given."""

    batches: int = 0
    examples: int = 0
    first_ns: int = 0
    """When its first and latest batch were taken."""
    last_ns: int = 0
    audit: dict[int, AuditSum] = field(default_factory=dict)
    """Epoch -> sum of what was handed out, over all ranks; the two latest epochs."""

    def took(self, epoch: int, given: AuditSum, now_ns: int) -> None:
        """Note a batch."""
        self.first_ns = self.first_ns or now_ns
        self.batches, self.examples, self.last_ns = self.batches + 1, self.examples + given.count, now_ns
        self.audit[epoch] = self.audit.get(epoch, AuditSum()) + given
        for old in sorted(self.audit)[:-2]:
            del self.audit[old]

    @property
    def examples_per_s(self) -> float:
        """Speed so far; 0 before two batches."""
        spent = self.last_ns - self.first_ns
        return self.examples * 1e9 / spent if self.batches > 1 and spent > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        audit = {str(epoch): {"count": found.count, "sum": found.text} for epoch, found in self.audit.items()}
        return {"batches": self.batches, "examples": self.examples, "examples_per_s": self.examples_per_s,
                "audit": audit}  # fmt: skip


def _overlap(start: int, end: int, other_start: int, other_end: int) -> int:
    """Return how long two intervals overlap."""
    return max(min(end, other_end) - max(start, other_start), 0)
