"""Batches of a data server, filled place by place.

>>> batch = Batch("job", 0, epoch=0, number=3, items=np.array([7, 9]), everybody=np.array([7, 9]))
>>> batch.fill(1, b"nine"), batch.left, batch.fill(0, b"seven"), batch.left, batch.payloads
(None, 1, None, 0, [b'seven', b'nine'])

What a data server counts: where examples came from, what they cost, how long jobs waited and why.

>>> counts = ServerCounts()
>>> counts.waited(100, 200, 110, PreparationTime(fetch_start_ns=110, fetch_end_ns=160))
>>> counts.wait_ns
{'queue': 10, 'fetch': 50, 'prep': 40}

What a job has taken of its epoch from a data server, kept by the client: its state, and what it needs after a crash.

A batch that was handed out but not taken is not gone: only the client knows
what its loop took. It notes the items of all ranks in each batch that it
takes, so that the state of any rank is good for every rank of any world:
an epoch, and one bit per item.

>>> progress = JobProgress(range(6), global_batch=2)
>>> progress.took(np.array([4, 1]))
>>> again = JobProgress(range(6), global_batch=2)
>>> again.load_state_dict(progress.state_dict())
>>> again.epoch, again.remaining().tolist()
(0, [0, 2, 3, 5])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.data.cached.partition import FORMS
from headway.data.loader.audit import AuditSum
from headway.data.orders.job_order import item_flags, packed_flags, unpacked_flags

Ints = NDArray[np.int64]
Payload = bytes | memoryview


@dataclass(frozen=True, slots=True)
class PreparationTime:
    """What one preparation took; zeros where nobody measured."""

    fetch_start_ns: int = 0
    """When reading began and ended, on the service's clock."""
    fetch_end_ns: int = 0
    decode_ns: int = 0
    """CPU time of what is deterministic."""
    augment_ns: int = 0
    """CPU time of what is random."""
    read_bytes: int = 0
    """Bytes that came from storage."""
    drew: bool | None = False
    """Whether a form that is meant to be the same each time came of random draws; None: nobody knows."""
    changed: bool = False
    """Whether it is another one than the cache has (`PreparationTask.compare`)."""

    @property
    def fetch_ns(self) -> int:
        """Time spent reading."""
        return self.fetch_end_ns - self.fetch_start_ns

    @property
    def prep_ns(self) -> int:
        """CPU time."""
        return self.decode_ns + self.augment_ns


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has had every batch of its pass."""

    job: str
    rank: int
    epoch: int


@dataclass(slots=True, eq=False)
class HeldPayload:
    """A finished payload that batches still hold."""

    item: int
    payload: Payload
    jobs: set[str]
    """Jobs that had it."""
    once: bool = False
    """Whether each job may have it once only: it came of random draws."""
    num_places: int = 0
    """Places of batches that hold it."""


class Batch:
    """A batch of one rank: in the making until nothing of it is `left`, then finished."""

    def __init__(
        self,
        job: str,
        rank: int,
        *,
        epoch: int,
        number: int,
        items: Ints,
        everybody: Ints,
        occurrence: Ints | None = None,
    ) -> None:
        self.job, self.rank, self.epoch = job, rank, epoch
        self.number = number
        """Global batch of this pass, from 0; goes on where `history` ended."""
        self.items = items
        """[k] Items of this rank, in order."""
        self.everybody = everybody
        """[<= batch_size * world_size] Items of all ranks: what a client that has taken this batch need not get
        again."""
        self.occurrence = np.zeros_like(items) if occurrence is None else occurrence
        """[k] How often each came before in this epoch: 0, but in a padded tail."""
        self.payloads: list[Payload | None] = [None] * items.size
        """[k] The finished form of each; None where an example was dropped, or the batch failed."""
        self.left = items.size
        """Places that are not filled."""
        self.error: str | None = None
        """Why there is no such batch: text of the first failure."""
        self.fetch_ns = self.prep_ns = self.read_bytes = 0
        """What was spent on it; what it shares was booked on the batch that asked first."""
        self.held: list[HeldPayload] = []
        """What it shares with other batches."""
        self.wanted = True
        """Whether its rank still waits for it."""
        self.waits_since_ns: int | None = None
        """Since when its rank asks for it."""

    def book(self, spent: PreparationTime) -> None:
        """Add what a preparation took."""
        self.fetch_ns += spent.fetch_ns
        self.prep_ns += spent.prep_ns
        self.read_bytes += spent.read_bytes

    def fill(self, place: int, payload: Payload | None, error: str | None = None) -> None:
        """Fill one place; with None where its example was left out, or failed."""
        self.payloads[place] = payload
        self.error = self.error or error
        self.left -= 1


@dataclass(slots=True, eq=False)
class BatchPlace:
    """One place of a batch in the making."""

    batch: Batch
    index: int


# What a data server counts: where examples came from, what they cost, how long jobs waited and why.


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

    def as_dict(self) -> dict[str, object]:
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

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain numbers."""
        audit = {str(epoch): {"count": found.count, "sum": found.text} for epoch, found in self.audit.items()}
        return {"batches": self.batches, "examples": self.examples, "examples_per_s": self.examples_per_s,
                "audit": audit}  # fmt: skip


def _overlap(start: int, end: int, other_start: int, other_end: int) -> int:
    """Return how long two intervals overlap."""
    return max(min(end, other_end) - max(start, other_start), 0)


# What a job has taken of its epoch from a data server, kept by the client: its state, and what it needs after a crash.


class JobProgress:
    """One job's place in its data: the epoch, what it still needs, and the global batches it took in this pass."""

    def __init__(self, items: ArrayLike | range, *, global_batch: int = 1, tail: str = "short") -> None:
        """Begin epoch 0 of `items` (as given to `PreparationScheduler.join`, or none).

        `global_batch` is batch size x world size.
        """
        self._subset = item_flags("client", items, None) if np.size(items) else np.zeros(0, bool)
        self.global_batch, self.tail = global_batch, tail
        self.epoch = 0
        self._base = self._subset.copy()
        self.history: list[Ints] = []
        """Global batches taken since the pass began, in order: for `PreparationScheduler.begin` after a crash."""

    def base(self) -> Ints | None:
        """Return what this pass set out to give, ascending; None when that is every item."""
        return None if bool((self._base == self._subset).all()) else np.flatnonzero(self._base)

    def took(self, everybody: ArrayLike) -> None:
        """Note that the loop took a batch, whose items for all ranks are `Batch.everybody`."""
        self.history.append(np.asarray(everybody, np.int64))

    def remaining(self) -> Ints:
        """Return the items that are still to come in this epoch, ascending."""
        return np.flatnonzero(self._left())

    def state_dict(self) -> dict[str, Any]:
        """Return {"epoch", "remaining"}: a compressed bitmap of at most items / 8 bytes; the end of an epoch is the
        start of the next."""
        left = self._left()
        count = int(left.sum())
        if not count or (self.tail == "drop" and count < self.global_batch):
            return {"version": 1, "epoch": self.epoch + 1, "remaining": packed_flags(self._subset)}
        return {"version": 1, "epoch": self.epoch, "remaining": packed_flags(left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on whatever rank of whatever world. Raises `InputError` on another's."""
        if state.get("version") != 1:
            raise InputError(f"the state has version {state.get('version')!r}; pass one of version 1, from here.")
        left = unpacked_flags(state["remaining"])
        if left.size != self._subset.size or bool((left & ~self._subset).any()):
            raise InputError(
                f"the state is of {left.size} items, this job reads {self._subset.size}, or others of them. "
                "Load it where the dataset and its subset are the same."
            )
        self.epoch, self._base, self.history = int(state["epoch"]), left, []

    def _left(self) -> NDArray[np.bool_]:
        left = self._base.copy()
        for items in self.history:
            left[items] = False
        return left
