"""Proof that every example was delivered once per epoch: sums of hashes, whatever the order, the ranks, the restarts.

Each example of a pass has a 64-bit hash; what was delivered is the sum of the
hashes (and of a product of them) modulo 2^64 with their number. Sums do not
depend on the order, those of ranks and of pieces add up, and two different
multisets have equal ones by chance only (about 2^-120). A loader that is
recorded notes its sums as the loop takes its batches (`Deliveries` in
`walks.py`); `judge` puts the pieces of interrupted and resumed runs
together and compares each epoch with what it should have been.

>>> a, b = AuditSum.of(np.arange(6)), AuditSum.of(np.array([3, 5, 1]))
>>> b + AuditSum.of(np.array([4, 0, 2])) == a, (a - b).count
(True, 3)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.bytes.order import Ints, Permutation, in_order, item_seeds, permute
from headway.data.bytes.order import Sequence as Order
from headway.trace.events.trace import Trace

WORD = 1 << 64
BLOCK = 1 << 18
"""Items that are hashed at once."""


@dataclass(frozen=True, slots=True)
class AuditSum:
    """The sum of the hashes of some deliveries; add those of ranks and pieces, in any order."""

    count: int = 0
    """Deliveries."""

    low: int = 0
    """Sum of their 64-bit hashes, modulo 2^64."""

    high: int = 0
    """Sum of hash x (upper half of the hash), modulo 2^64: what has the same `low` by chance differs here."""

    @classmethod
    def of(cls, items: Ints, occurrence: Ints | None = None) -> AuditSum:
        """Return the sum of [n] items, each with the number of times that it came before in its epoch (0 if None)."""
        items = np.asarray(items, np.int64)
        return cls.of_hashes(item_seeds(0, 0, items, np.zeros(1, np.int64) if occurrence is None else occurrence))

    @classmethod
    def of_each(cls, items: Ints, occurrence: Ints, starts: Ints) -> list[AuditSum]:
        """Return the sum of each of k batches that lie one behind the other in [n] items, from `starts` [k] on.

        None of them is empty.
        """
        hashes = item_seeds(0, 0, items, occurrence)
        counts = np.diff(starts, append=len(items)).tolist()
        low, high = (np.add.reduceat(part, starts).tolist() for part in (hashes, hashes * (hashes >> _HALF)))
        return [cls(*each) for each in zip(counts, low, high, strict=True)]

    @classmethod
    def of_hashes(cls, hashes: NDArray[np.uint64]) -> AuditSum:
        """Return the sum of [n] hashes, made by `headway.data.bytes.order.item_seeds(0, 0, items, occurrence)`."""
        low, high = np.add.reduce(hashes), np.add.reduce(hashes * (hashes >> _HALF))
        return cls(len(hashes), int(low), int(high))

    @classmethod
    def of_range(cls, start: int, end: int) -> AuditSum:
        """Return the sum of the items from `start` up to `end`, each once."""
        blocks = (np.arange(at, min(at + BLOCK, end)) for at in range(start, end, BLOCK))
        return sum((cls.of(block) for block in blocks), cls())

    def __add__(self, other: AuditSum) -> AuditSum:
        """Return the sum of both."""
        return AuditSum(self.count + other.count, (self.low + other.low) % WORD, (self.high + other.high) % WORD)

    def __sub__(self, other: AuditSum) -> AuditSum:
        """Return what is left of this sum without the other."""
        return AuditSum(self.count - other.count, (self.low - other.low) % WORD, (self.high - other.high) % WORD)

    @property
    def text(self) -> str:
        """The two words as 32 hexadecimal digits."""
        return f"{self.low:016x}{self.high:016x}"


_HALF = np.uint64(32)

KINDS: dict[str, str] = {
    "order": "the loader's own order: a function of seed and epoch, so that any piece of it can be computed again",
    "sampler": "the user's sampler: the sums are of the whole epoch, and whether it is a permutation is the sampler's",
    "served": "a data server's order: the sums are of the whole epoch, `expected` is the job's own set of items",
}
"""How the items of a pass are known; the key "kind" of its facts."""

VERDICTS: dict[str, str] = {
    "exact": "every example once (and the tail as the loader was told)",
    "open": "all that was delivered is right; the epoch did not end, or not all of its record was given",
    "repeats": "some example came twice, or in the place of another",
    "loses": "some example never came",
    "as sampled": "a user's sampler, or a server's padded tail, yields some example again; nothing to judge",
}
"""What an epoch can be."""


@dataclass(frozen=True, slots=True)
class DeliveredPass:
    """What one rank delivered in one pass over a loader."""

    epoch: int
    """Which epoch of the loader."""

    start: int
    """Position in the epoch's global sequence at which the pass began; 0 for kinds other than "order"."""

    facts: Mapping[str, Any]
    """What all its passes share: "kind", "loader" and what its order follows from."""

    marks: tuple[AuditSum, ...] = ()
    """Sums after some of the batches taken, in order; the last one is of all of them."""

    begun_ns: int = 0
    """When it began."""

    @property
    def total(self) -> AuditSum:
        """All that the loop took."""
        return self.marks[-1] if self.marks else AuditSum()


@dataclass(frozen=True, slots=True)
class Leg:
    """One pass of all ranks of a run: a piece of an epoch, or all of it."""

    run: str
    attempt: int
    epoch: int
    start: int
    facts: Mapping[str, Any]
    """As `DeliveredPass.facts`, without the rank."""
    passes: Mapping[int, DeliveredPass]
    """Rank (in its loader's world) -> its pass."""
    replica: int = 0
    """Which of those that take the same places."""

    @property
    def begun_ns(self) -> int:
        """When the first rank began."""
        return min(one.begun_ns for one in self.passes.values())

    @property
    def count(self) -> int:
        """Deliveries to all ranks."""
        return sum(one.total.count for one in self.passes.values())

    @property
    def order(self) -> Order:
        """How the positions from `start` on fall to the ranks."""
        facts = self.facts
        return Order(facts["num_items"], facts["batch_size"], facts["world_size"], tail=facts["tail"], start=self.start)

    @property
    def permutation(self) -> Permutation:
        """The order of the epoch."""
        size = self.facts["num_items"]
        return permute(size, self.facts["seed"], self.epoch) if self.facts["shuffle"] else in_order(size)

    def batches(self, found: AuditSum) -> int:
        """Return how many batches a rank's sum is of."""
        return -(-found.count // int(self.facts["batch_size"]))

    def said(self, rank: int, first: int, end: int) -> AuditSum:
        """Return what the order says of batches `first` up to `end` of `rank`."""
        sequence, size = self.order, max(int(self.facts["num_items"]), 1)
        permutation, found = self.permutation, AuditSum()
        step = max(1, BLOCK // sequence.batch_size)
        for at in range(first, end, step):
            batches = np.arange(at, min(at + step, end), dtype=np.int64)[:, None] * sequence.global_batch
            of_rank = np.arange(rank, sequence.global_batch, sequence.world_size, dtype=np.int64)
            positions = (sequence.start + batches + of_rank).ravel()
            if sequence.tail != "pad":
                positions = positions[positions < sequence.num_items]
            found += AuditSum.of(permutation(positions % size), positions // size)
        return found

    def until(self, rank: int, batches: int) -> AuditSum:
        """Return what `rank` delivered in its first `batches`: from its last mark before, and from the order beyond.

        Of a rank that delivered less, all of it.
        """
        own = self.passes[rank]
        if self.batches(own.total) <= batches:
            return own.total
        before = [mark for mark in own.marks if self.batches(mark) <= batches]
        found = before[-1] if before else AuditSum()
        return found + self.said(rank, self.batches(found), batches)


@dataclass(frozen=True, slots=True)
class Epoch:
    """What became of one epoch of one loader."""

    loader: int
    """Which loader, as the recorder numbered them."""
    replica: int
    """Which of those ranks that read the same."""
    epoch: int
    kind: str
    """One of `KINDS`."""
    verdict: str
    """One of `VERDICTS`."""
    expected: AuditSum
    """All that the whole epoch should deliver."""
    delivered: AuditSum
    """What counts: without what an interruption made the job do again."""
    again: int
    """Deliveries after the state that a later run went on from: their training was lost, and done again.

    Told for the loader's own order only: sums of whole epochs do not tell what was done twice.
    """
    legs: tuple[Leg, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """Return the entry of `headway data audit --json`."""
        return {
            "loader": self.loader, "replica": self.replica, "epoch": self.epoch,
            "kind": self.kind, "verdict": self.verdict,
            "expected": self.expected.count, "delivered": self.delivered.count, "again": self.again,
            "expected_sum": self.expected.text, "delivered_sum": self.delivered.text,
            "legs": [
                {
                    "run": leg.run, "attempt": leg.attempt, "start": leg.start, "ranks": sorted(leg.passes),
                    "delivered": leg.count,
                }
                for leg in self.legs
            ],
        }  # fmt: skip


def legs_of(run: str, attempt: int, passes: Mapping[int, Sequence[DeliveredPass]]) -> list[Leg]:
    """Put the passes of each rank together: the n-th pass over a loader of every rank is one leg.

    Ranks count in the loader's own world. Those that take the same place in it are replicas: a leg each.
    """
    found: dict[tuple[Any, ...], dict[int, DeliveredPass]] = {}
    for rank, own in sorted(passes.items()):
        times: dict[int, int] = {}
        for one in own:
            loader = int(one.facts.get("loader", -1))
            times[loader] = times.get(loader, -1) + 1
            shared = tuple(sorted((key, str(value)) for key, value in one.facts.items() if key != "rank"))
            key: tuple[Any, ...] = (times[loader], loader, one.epoch, one.start, shared, 0)
            place = int(one.facts.get("rank", rank))
            while place in found.get(key, {}):
                key = (*key[:-1], key[-1] + 1)
            found.setdefault(key, {})[place] = one
    return [
        Leg(run, attempt, epoch, start, {k: v for k, v in next(iter(own.values())).facts.items() if k != "rank"},
            own, replica)
        for (_, _, epoch, start, _, replica), own in found.items()
    ]  # fmt: skip


def judge(legs: Iterable[Leg], sizes: Mapping[int, int] | None = None) -> list[Epoch]:
    """Return the verdict on every epoch of every loader, from the legs of a job.

    They are taken in the order of time. A leg that begins at (epoch, start) replaces whatever came at or after that
    point before it: an interrupted job lost it. `sizes`: loader -> examples of
    its dataset, for users' samplers.
    """
    history: dict[tuple[int, int], list[Leg]] = {}
    again: dict[tuple[int, int, int], int] = {}
    for leg in sorted(legs, key=lambda leg: leg.begun_ns):
        key = (int(leg.facts.get("loader", -1)), leg.replica)
        before = history.setdefault(key, [])
        for old in [old for old in before if (old.epoch, old.start) >= (leg.epoch, leg.start)]:
            before.remove(old)
            again[(*key, old.epoch)] = again.get((*key, old.epoch), 0) + old.count
        before.append(leg)
    return [
        _judged(own, again.get((*key, epoch), 0), (sizes or {}).get(key[0]))
        for key, legs_of_loader in sorted(history.items())
        for epoch, own in _by_epoch(legs_of_loader)
    ]


def _by_epoch(legs: Sequence[Leg]) -> Iterator[tuple[int, list[Leg]]]:
    for epoch in sorted({leg.epoch for leg in legs}):
        yield epoch, [leg for leg in legs if leg.epoch == epoch]


def _judged(legs: list[Leg], again: int, size: int | None) -> Epoch:
    """Judge one epoch from its legs, in the order of their starts; `again` was lost before them."""
    last = legs[-1]
    if last.facts["kind"] != "order":
        return _by_sum(legs, size)
    delivered = due = AuditSum()
    complete = legs[0].start == 0
    for leg, following in zip(legs, [*legs[1:], None], strict=True):
        for rank in range(leg.order.world_size):
            most = leg.order.num_batches(rank)
            own = leg.passes.get(rank)
            complete &= own is not None
            if own is None:
                continue
            if following is None:
                found, batches = own.total, min(leg.batches(own.total), most)
                complete &= batches == most
            else:
                batches = min(-(-(following.start - leg.start) // leg.order.global_batch), most)
                found = leg.until(rank, batches)
                again += own.total.count - found.count
            delivered += found
            due += leg.said(rank, 0, batches)
    expected = _whole(last)
    # Without the beginning, or without one of the ranks, nothing speaks of the whole.
    verdict = _compared(delivered, expected if complete else due)
    return _epoch(legs, "open" if verdict == "exact" and not complete else verdict, expected, delivered, again)


def _by_sum(legs: list[Leg], size: int | None) -> Epoch:
    """Judge an epoch whose last leg holds the sums of all of it."""
    last = legs[-1]
    delivered = sum((one.total for one in last.passes.values()), AuditSum())
    told = last.facts.get("expected")
    expected = AuditSum(*told) if told else AuditSum.of_range(0, size or 0)
    verdict = "open" if delivered.count < expected.count else _compared(delivered, expected)
    # Which items fill a padded tail is the server's to choose; that they fill no more than the tail is seen.
    filled = last.facts.get("tail") == "pad" and 0 < delivered.count - expected.count < last.facts["global_batch"]
    if verdict == "repeats" and (filled or last.facts["kind"] == "sampler"):
        verdict = "as sampled"
    return _epoch(legs, verdict, expected, delivered, 0)


def _compared(delivered: AuditSum, expected: AuditSum) -> str:
    if delivered == expected:
        return "exact"
    return "loses" if delivered.count < expected.count else "repeats"


def _whole(leg: Leg) -> AuditSum:
    """Return what the epoch that ends with `leg` delivers to all ranks together, its tail as the loader was told."""
    sequence = leg.order
    found = AuditSum.of_range(0, sequence.num_items)
    end = sequence.start + sequence.num_global_batches * sequence.global_batch
    if sequence.tail == "drop" and end < sequence.num_items:
        return found - AuditSum.of(leg.permutation(np.arange(end, sequence.num_items)))
    if sequence.tail == "pad" and end > sequence.num_items:
        positions = np.arange(sequence.num_items, end)
        return found + AuditSum.of(leg.permutation(positions % sequence.num_items), positions // sequence.num_items)
    return found


def _epoch(legs: list[Leg], verdict: str, expected: AuditSum, delivered: AuditSum, again: int) -> Epoch:
    last = legs[-1]
    facts = last.facts
    loader = int(facts.get("loader", -1))
    return Epoch(loader, last.replica, last.epoch, str(facts["kind"]), verdict, expected, delivered, again, tuple(legs))


def passes_of(part: Trace, rank: int, *, shift_ns: int = 0) -> list[DeliveredPass]:
    """Return what the events of one rank say of its passes, in the order in which they began.

    `shift_ns` puts its times on a clock that all runs share.
    """
    told = part.ranks.get(rank, {}).get("deliveries") or []
    rows = part.where(part.named("input.audit"))
    events = rows.events
    order = np.lexsort((np.arange(len(rows)), events["start_ns"]))
    found: dict[tuple[int, int], DeliveredPass] = {}
    for row in order.tolist():
        key = int(events["lane"][row]), int(events["peer"][row])
        seq, low, high = (int(events[name][row]) for name in ("seq", "corr", "bytes"))
        if seq < 0 and -1 - seq < len(told):
            found[key] = DeliveredPass(low, high, told[-1 - seq], begun_ns=int(events["start_ns"][row]) + shift_ns)
        elif seq >= 0 and key in found:
            mark = AuditSum(seq, low % WORD, high % WORD)
            found[key] = replace(found[key], marks=(*found[key].marks, mark))
    return list(found.values())
