"""Batches of a data server: in the making, place by place, and finished.

>>> batch = Pending("job", 0, epoch=0, number=3, items=np.array([7, 9]), everybody=np.array([7, 9]))
>>> BatchPlace(batch, 1).fill(HeldPayload(9, b"nine", set()))
>>> batch.left, batch.fill(0, b"seven"), batch.left, batch.finished().payloads
(1, None, 0, (b'seven', b'nine'))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
class FinishedBatch:
    """A finished batch of one rank."""

    job: str
    rank: int
    epoch: int
    number: int
    """Global batch of this pass, from 0; goes on where `history` ended."""
    items: Ints
    """[k] Items of this rank, in order."""
    occurrence: Ints
    """[k] How often each came before in this epoch: 0, but in a padded tail."""
    everybody: Ints
    """[<= batch_size * world_size] Items of all ranks: what a client that has taken this batch need not get again."""
    payloads: tuple[Payload | None, ...]
    """[k] The finished form of each; None where an example was dropped, or the batch failed."""
    error: str | None
    """Why there is no such batch: text of the first failure."""
    fetch_ns: int
    """Reading that was done for this batch; what it shares was booked on the batch that asked first."""
    prep_ns: int
    read_bytes: int


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


class Pending:
    """A batch in the making."""

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
        self.job, self.rank, self.epoch, self.number = job, rank, epoch, number
        self.items, self.everybody = items, everybody
        self.occurrence = np.zeros_like(items) if occurrence is None else occurrence
        self.left = items.size
        """Places that are not filled."""
        self.error: str | None = None
        self.spent: list[PreparationTime] = []
        """What was prepared for it."""
        self.held: list[HeldPayload] = []
        """What it shares with other batches."""
        self.wanted = True
        """Whether its rank still waits for it."""
        self.waits_since_ns: int | None = None
        """Since when its rank asks for it."""
        self._payloads: list[Payload | None] = [None] * items.size

    def fill(self, place: int, payload: Payload | None, error: str | None = None) -> None:
        """Fill one place."""
        self._payloads[place] = payload
        self.error = self.error or error
        self.left -= 1

    def finished(self) -> FinishedBatch:
        """Return the batch."""
        return FinishedBatch(
            self.job, self.rank, self.epoch, self.number, self.items, self.occurrence, self.everybody,
            tuple(self._payloads), self.error, sum(spent.fetch_ns for spent in self.spent),
            sum(spent.prep_ns for spent in self.spent), sum(spent.read_bytes for spent in self.spent),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class BatchPlace:
    """One place of a batch in the making."""

    batch: Pending
    index: int

    def fill(self, held: HeldPayload) -> None:
        """Take what was prepared; the flights are told when the batch is given away (`Flights.release`)."""
        self.batch.held.append(held)
        self.batch.fill(self.index, held.payload)

    def skip(self, error: str | None) -> None:
        """Stay empty: the example was left out, or failed."""
        self.batch.fill(self.index, None, error)
