"""Where a loader stands: one walk per pass over the dataset, and the state that another one goes on from.

A walk hands out the keys of batches ahead of time, and counts the batches that
the training loop took: only those are in its state. `OrderWalk` owns the
order; `SamplerWalk` follows the user's sampler; `StreamWalk` leaves an
iterable dataset's position to that dataset. In a recorded run the examples of
each batch taken are noted for `headway data audit`.

What a recorded loop takes of one pass, noted batch by batch: the evidence that `headway data audit` judges.

A walk hands out the keys of batches ahead of time (`handed`) and learns later
how many of them the loop took (`took`). What was handed out and never taken is
not noted. A note is one record in the ring, so a killed process keeps it.
Costs about 20 us per batch, and nothing without a recorder.

>>> Deliveries.begun(lambda: {"kind": "order"}, epoch=0, start=0) is None
True
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.units import NS_PER_S
from headway.data.bytes import account
from headway.data.bytes.account import ThreadTime
from headway.data.bytes.order import Permutation, Sequence, occurrences
from headway.data.bytes.torch_keyed import WORD, DrawsApart, Keys
from headway.data.loader.audit import AuditSum
from headway.data.loader.sampler_state import put_back, taken, warn_of_hidden, warn_of_unsaved, warn_once
from headway.runtime.script.draws import innermost

_number = count()


class Deliveries:
    """The audit of one pass: its sum so far, and the sums of the batches that are under way."""

    def __init__(self, number: int) -> None:
        """Make one that writes as pass `number` of this process; `begun` is the usual way."""
        self._number = number
        self._sum = AuditSum()
        self._taken = 0
        self._ahead: deque[AuditSum] = deque()

    @classmethod
    def begun(cls, facts: Callable[[], dict[str, Any]], *, epoch: int, start: int) -> Deliveries | None:
        """Note the beginning of a pass, inside `iter(loader)`; None when nothing is recorded.

        `facts()` is what all passes of the loader share (JSON): at least
        "kind", one of `headway.data.loader.audit.KINDS`. `start` is the position at
        which the epoch goes on, 0 for kinds whose sums are of the whole epoch.
        """
        if not account.on():
            return None
        found = cls(next(_number))
        account.began(found._number, account.told("deliveries", facts()), epoch, start)
        return found

    def start_over(self) -> None:
        """Forget what was handed out and not taken: the pass is read again from its beginning."""
        self._ahead.clear()
        self._sum = AuditSum() if not self._taken else self._sum

    def add(self, batch: AuditSum) -> None:
        """Count what came before the pass, of kinds whose sums are of the whole epoch."""
        self._sum += batch

    def handed(self, batch: AuditSum) -> None:
        """Note the next batch that was handed out, before it is loaded."""
        self._ahead.append(batch)

    def took(self, batches: int) -> None:
        """Note that the loop has taken `batches` of this pass; more than were handed out is no news."""
        while self._taken < batches and self._ahead:
            self._taken += 1
            self._sum += self._ahead.popleft()
            account.delivered(self._number, self._sum.count, self._sum.low, self._sum.high)


# How long two threads that make examples wait for the interpreter's lock.

LONGEST = 8
"""Times as long as wanted that two threads are watched for, where other load takes the cores."""


def lock_wait_fraction(work: Any, keys: Keys, seconds: float = 0.15) -> float:
    """Return the fraction of their time that two threads wait for each other, beyond what one waits for storage.

    Waiting is wall time without CPU time and without run delay, and run delay
    is no time of theirs: so other load on the host does not count. 0 where the kernel reports no run delay.
    Takes `seconds` twice; pure Python comes out near 0.5.
    """
    alone = _waited(work, keys, seconds, threading.Barrier(1))
    found: list[float] = []
    failed: list[Exception] = []
    together = threading.Barrier(2)

    def measure() -> None:
        try:
            found.append(_waited(work, keys, seconds, together))
        except Exception as error:  # raised below, in the caller's thread
            failed.append(error)

    threads = [threading.Thread(target=measure, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(sum(found) / len(found) - alone, 0.0)


def _waited(work: Any, keys: Keys, seconds: float, together: threading.Barrier) -> float:
    """Return the fraction of this thread's time in which it neither ran nor could; it makes examples for `seconds`."""
    ones = [keys.only(place) for place in range(len(keys))]
    work.fill(work.begin(ones[0]), ones[0], 0)  # what is loaded on first use is no cost of an example
    together.wait()
    began, spent, wanted_ns = account.clocks(), ThreadTime(), int(seconds * NS_PER_S)
    first = last = began.wall_ns
    endless = itertools.cycle(ones)
    # Time without a core shows nothing: a busy host is watched for longer, up to LONGEST times.
    while (seen := spent.fetch_ns + spent.prep_ns) < wanted_ns and last - first < LONGEST * wanted_ns:
        last += wanted_ns - seen
        while time.perf_counter_ns() < last:
            one = next(endless)
            work.fill(work.begin(one), one, 0)
        ended = account.clocks()
        spent, last = began.until(ended), ended.wall_ns
    return spent.fetch_ns / max(spent.fetch_ns + spent.prep_ns, 1) if began.delay_ns >= 0 else 0.0


State = dict[str, Any]

TOGETHER = 16
"""Batches whose keys are computed at once."""

STEADY = (DistributedSampler, RandomSampler, SequentialSampler)
"""Samplers whose order follows from generators and epochs alone."""

FIRST = 64
"""Batches of a pass that have to come again when its sampler is put back."""


@dataclass(slots=True, kw_only=True)
class Taken:
    """What walks over numbered items share: how many batches the loop has taken, noted where that is recorded."""

    epoch: int
    batches_taken: int = 0
    finished: bool = False
    deliveries: Deliveries | None = None

    @property
    def taken(self) -> int:
        """Batches that the training loop has got."""
        return self.batches_taken

    @taken.setter
    def taken(self, batches: int) -> None:
        """Note that the loop has got so many."""
        self.batches_taken = batches
        if self.deliveries is not None:
            self.deliveries.took(batches)

    def _begin(self, facts: Callable[[], State], start: int) -> None:
        """Begin to note what is handed out; torch asks for the keys of a pass twice, and uses the second answer."""
        if self.deliveries is None:
            self.deliveries = Deliveries.begun(facts, epoch=self.epoch, start=start)
        else:
            self.deliveries.start_over()


@dataclass(slots=True)
class OrderWalk(Taken):
    """A pass in an order of our own: the state is one number, good for any rank of any world."""

    epoch: int
    seed: int
    sequence: Sequence
    order: Permutation
    rank: int

    def keys(self) -> Iterator[Keys]:
        """Begin the pass: return an iterator over the keys of this rank's batches."""
        self._begin(self._facts, self.sequence.start)
        return self._keys()

    def _keys(self) -> Iterator[Keys]:
        done, num_items = self.sequence.start // self.sequence.global_batch, self.sequence.num_items
        num_batches = self.sequence.num_batches(self.rank)
        # Some batches at a time: a call of numpy costs as much for sixteen as for one.
        for first in range(0, num_batches, TOGETHER):
            batches = range(first, min(first + TOGETHER, num_batches))
            parts = [self.sequence.positions(batch, self.rank) for batch in batches]
            cuts, positions = np.cumsum([0, *map(len, parts)]), np.concatenate(parts)
            items = self.order(positions % num_items)
            # In a padded tail an item comes again: its random numbers must differ from those of its first time.
            again = positions // num_items
            sums = AuditSum.of_each(items, again, cuts[:-1]) if self.deliveries is not None else []
            numbers, occurrence = items.tolist(), again.tolist()
            for place, batch in enumerate(batches):
                low, high = int(cuts[place]), int(cuts[place + 1])
                if self.deliveries is not None:
                    self.deliveries.handed(sums[place])
                yield Keys(
                    numbers[low:high], occurrence[low:high], seed=self.seed, epoch=self.epoch, batch=done + batch
                )

    def _facts(self) -> State:
        """Return what the order follows from: `headway.data.loader.audit` computes it again."""
        sequence = self.sequence
        first = np.arange(min(64, sequence.num_items))
        return {
            "kind": "order", "num_items": sequence.num_items, "seed": self.seed, "rank": self.rank,
            # 64 items in their places: a shuffled order looks like that once in 10^89 epochs.
            "shuffle": bool((self.order(first) != first).any()),
            "batch_size": sequence.batch_size, "world_size": sequence.world_size, "tail": sequence.tail,
        }  # fmt: skip

    def state(self) -> State:
        """Return epoch and position; the end of an epoch is the start of the next."""
        position = self.sequence.position_after(self.taken)
        if self.finished or position >= self.sequence.num_items:
            return {"epoch": self.epoch + 1, "position": 0}
        return {"epoch": self.epoch, "position": position}


@dataclass(slots=True)
class SamplerWalk(Taken):
    """A pass in the order of the user's sampler, which is read again up to the state's batch, without loading."""

    epoch: int
    sampler: Any
    """What yields indices, or lists of them."""
    batched: bool
    seed: int
    skip: int = 0
    before: State = field(default_factory=dict)
    """What the order rested on at the start of the pass, see `sampler_state`."""
    digest: int | None = None
    """Checksum of the batches before `skip`, as they were when the state was taken; None where it has none."""
    read: dict[int, int] = field(default_factory=dict)
    """Number of batches -> checksum of so many, of those that the loop has not yet passed."""

    def __post_init__(self) -> None:
        """Note, or put back, what decides the order."""
        if self.before:
            put_back(self.sampler, self.before)
        else:
            self.before.update(taken(self.sampler))

    def keys(self) -> Iterator[Keys]:
        """Begin the pass: return an iterator over the keys of the batches after the skipped ones.

        It raises `InputError` when the sampler yields fewer than those.
        """
        name = name_of(self.sampler)
        self._begin(lambda: {"kind": "sampler", "sampler": name}, 0)
        return self._keys()

    def _keys(self) -> Iterator[Keys]:
        seen: dict[Any, int] = {}
        first: list[list[Any]] = []
        batch = 0
        digest: int | None = 0
        for batch, items in enumerate(self._batches(), start=1):
            if batch <= FIRST:
                first.append(list(items))
            if digest is not None and " at 0x" not in (text := repr(items)):  # an address tells nothing
                digest = self.read[batch] = zlib.crc32(text.encode(), digest)
            else:
                digest = None
            for passed in [number for number in islice(self.read, 2) if number < self.skip + self.taken]:
                del self.read[passed]
            if batch == self.skip and digest is not None and self.digest not in (None, digest):
                warn_once(
                    self.sampler,
                    f"{name_of(self.sampler)} yields other batches than before the interruption: this pass repeats "
                    "some examples and leaves others out. Its order rests on something that it does not hold itself",
                )
            again = occurrences(items, seen)
            keys = Keys(items, again, seed=self.seed, epoch=self.epoch, batch=batch - 1)
            if self.deliveries is not None:
                # What was skipped was delivered before the interruption: the sum is that of the whole epoch.
                note = self.deliveries.handed if batch > self.skip else self.deliveries.add
                note(audit_sum(keys))
            if batch > self.skip:
                yield keys
        if batch < self.skip:
            raise InputError(
                f"the state was taken after batch {self.skip} of the sampler, which now yields {batch}. "
                "Give the loader the sampler that it had."
            )
        # A fork costs milliseconds: the first passes tell nearly always, later ones are looked at ever more rarely.
        if type(innermost(self.sampler)) not in STEADY and (self.epoch < 8 or self.epoch.bit_count() == 1):
            warn_of_hidden(self.sampler, self.before, first, self._batches)

    def _batches(self) -> Iterator[list[Any]]:
        """Yield the indices of each batch of the pass, read with random numbers of its own."""
        seed = derived_seed(self.seed, "sampler", self.epoch) & WORD
        for indices in DrawsApart(lambda: iter(self.sampler), seed):
            yield list(indices) if self.batched else [indices]

    def state(self) -> State:
        """Return epoch, batches, and what the sampler's order depends on: of the next pass where this one is over."""
        if self.finished:
            return between_passes(self.sampler, self.epoch + 1)
        warn_of_unsaved(self.sampler, self.before)
        done = self.skip + self.taken
        known = self.read.get(done)
        digest = {} if known is None else {"digest": known}
        return {"epoch": self.epoch, "batches": done, "sampler": self.before, **digest}


def name_of(sampler: Any) -> str:
    """Return the class of the sampler that decides the order."""
    return type(innermost(sampler)).__name__


def between_passes(sampler: Any, epoch: int) -> State:
    """Return the state before pass `epoch` over a sampler."""
    between = taken(sampler)
    warn_of_unsaved(sampler, between)
    return {"epoch": epoch, "batches": 0, "between": between}


@dataclass(slots=True)
class StreamWalk:
    """A pass over an iterable dataset that can say where it is (`state_dict`)."""

    epoch: int
    num_workers: int
    before: State = field(default_factory=dict)
    """Where the pass began: {"batches", "workers", "over", "next_worker"}."""
    taken: int = 0
    finished: bool = False
    states: dict[int, Any] = field(default_factory=dict)
    """Worker (0 without workers) -> the dataset's state after the last batch taken from it, or at its end."""
    over: set[int] = field(default_factory=set)
    """Workers that have given all their batches of this pass."""
    next_worker: int = 0
    """Whose turn it is."""

    def __post_init__(self) -> None:
        """Take over the states that the pass goes on from."""
        self.states.update(self.before.get("workers", {}))
        self.over.update(self.before.get("over", ()))
        self.next_worker = self.before.get("next_worker", 0)

    def state(self, *, persistent: bool = False) -> State:
        """Return epoch, batches and the dataset's state in every worker that has delivered.

        Between two passes those states count for workers that are kept (`persistent`): others begin anew.
        """
        if self.finished:
            kept = {"workers": dict(self.states)} if persistent else {}
            return {"epoch": self.epoch + 1, "batches": 0, **kept}
        return {
            "epoch": self.epoch,
            "batches": self.before.get("batches", 0) + self.taken,
            "workers": dict(self.states),
            "over": sorted(self.over),
            "next_worker": self.next_worker,
        }

    def got(self, worker: int, state: Any, *, num_batches: int, is_over: bool) -> None:
        """Note what `worker` sent: a batch or none, where the dataset stood then, whether it has no more."""
        self.taken += num_batches
        self.states[worker] = state
        self.next_worker = (worker + 1) % max(self.num_workers, 1)
        if is_over:
            self.over.add(worker)


def audit_sum(keys: Keys) -> AuditSum:
    """Return the audit sum of the items of a batch, whatever they are (an index that is no number counts by its text).

    >>> audit_sum(Keys([4, 9], [0, 0], seed=7, epoch=3, batch=0)) == AuditSum.of(np.array([9, 4]))
    True
    """
    if all(type(item) is int for item in keys):
        return AuditSum.of(np.array(keys, np.int64), np.array(keys.occurrence, np.int64))
    same = Keys(keys, keys.occurrence, seed=0, epoch=0, batch=0)
    return AuditSum.of_hashes(np.array(same.item_seeds(), np.uint64))
