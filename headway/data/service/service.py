"""The data server's brain: jobs over one dataset, one preparation of an example for all of them, batches for each rank.

No sockets, threads or torch in it. A server (or a test) calls it: clients'
requests go in (`join`, `attach`, `begin`, `take`, `leave`), threads fetch
`next_work` and report with `done`. Every method may be called from any
thread; none blocks but `next_work`. Times are int ns of `clock`.

What a job gets: each of its items once an epoch, in an order of its own law
(`headway.data.orders.strategies`), in global batches of which rank r takes items
r::world_size (`headway.data.service.jobs`). What jobs share: an item that several of
them need at about the same time is prepared once, who comes later finds it in
the cache (`headway.data.service.stock`). Per rank at most `window` batches are made
ahead: memory is bounded by those and the cache, and a slow job delays nobody.
An augmented example (one with random draws) goes to each job at most once,
ever: every preparation draws from another seed.

>>> service = PreparationScheduler(4, fingerprint="numbers", forms=("decoded",))
>>> service.join("job", fingerprint="numbers", terms=JobTerms(batch_size=4))
>>> service.attach("job", 0)
>>> service.begin("job", 0, epoch=0)
>>> while (work := service.next_work()) is not None:
...     service.done(work, {"decoded": b"%d" % work.item})
>>> batch = service.take("job", 0)
>>> sorted(batch.items.tolist()), sorted(bytes(payload) for payload in batch.payloads)
([0, 1, 2, 3], [b'0', b'1', b'2', b'3'])
>>> service.take("job", 0)
Ended(job='job', rank=0, epoch=0)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.cached.partition import CacheSplit
from headway.data.loader.audit import AuditSum
from headway.data.orders.job_order import DataShareError, item_flags
from headway.data.service.batches import Batch, BatchPlace, Ended, Ints, Payload, PreparationTime
from headway.data.service.flights import PreparationTask
from headway.data.service.jobs import NO_MORE, JobPass, JobTerms, Known, Rank, ServedJob
from headway.data.service.ordering import Ordering
from headway.data.service.stock import DataServer, ItemStore

NOTHING = PreparationTime()

MOST_GIVEN_UP = 1000
"""Names of jobs that are remembered when they were given up."""

KEEP_UP_BATCHES, KEEP_UP_PART = 4, 64
"""A job that has read so many batches, and the 64th part of what it needs, from storage by itself may catch up."""


class PreparationScheduler:
    """Jobs, their order, the cache and the preparations of one dataset on one machine."""

    def __init__(
        self,
        size: int,
        *,
        fingerprint: str,
        forms: Sequence[str] = ("decoded",),
        seed: int = 0,
        options: DataServer | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        on_ready: Callable[[], object] | None = None,
    ) -> None:
        """Serve the items 0 to `size` - 1 of the dataset and pipeline called `fingerprint`.

        `forms`: what a preparation passes through, of
        `headway.data.cached.partition.FORMS`, least prepared first. The last one is
        what batches hold: "augmented" when anything is drawn at random, else
        "decoded". A dataset that is no pipeline has one form. `on_ready` is
        called, under the lock, when `ready` may have more to say: let it wake
        the caller's loop, and return. A server that takes another's place
        needs another `seed`. Raises `InputError`.
        """
        if size < 1:
            raise InputError(f"size is {size}; a dataset needs 1 item or more. Give it one.")
        self.size, self.fingerprint, self.forms = size, fingerprint, tuple(forms)
        self.options = options or DataServer()
        self._clock, self._on_ready = clock, on_ready
        self._stock = ItemStore(size, self.forms, self.options, seed=seed)
        self._ordering = Ordering(
            self.options.order, size=size, seed=seed, cache=self._stock.cache, nearby=self._stock.flights
        )
        self._jobs: dict[str, ServedJob] = {}
        self._given_up: dict[str, list[int]] = {}
        """Job that was given up -> ranks that had not come."""
        self._rounds = 0.0
        """How often every job has taken a batch, on average: by this clock batches fall due."""
        self._closed = False
        self._lock = threading.RLock()
        self._more_work = threading.Condition(self._lock)

    # Jobs.

    def join(
        self,
        job: str,
        *,
        fingerprint: str,
        terms: JobTerms,
        items: ArrayLike | range | None = None,
    ) -> None:
        """Let `job` in, with `items` of its own (default: all); it is served from its ranks' `begin` on.

        Raises `DataShareError` when it means another dataset or pipeline,
        `InputError` on a name that is taken, an empty or repeated subset, an item outside the dataset.
        """
        with self._lock:
            if job in self._jobs:
                raise InputError(f"job {job!r} is here already. Choose another name, or let the first one leave.")
            if fingerprint != self.fingerprint:
                raise DataShareError(
                    f"job {job!r} reads {fingerprint!r}, this server serves {self.fingerprint!r}. "
                    "Start a server of its own for it, or give both the same dataset and pipeline."
                )
            mine = np.arange(self.size) if items is None else np.asarray(items)
            subset = item_flags(job, mine, self.size)
            self._jobs[job] = ServedJob(job, terms, mine.astype(np.int64), subset)
            self._count(subset, 1)

    def attach(self, job: str, rank: int) -> None:
        """Note that a rank of a job is here.

        Raises `InputError` on an unknown job, a rank outside its world, one
        that is here already, or one that left: what it had is not known.
        """
        with self._lock:
            found = self._job(job).rank(rank)
            if found.attached or found.left:
                what = "has left" if found.left else "is here already"
                raise InputError(f"rank {rank} of job {job!r} {what}. Start the job again under another name.")
            found.attached, self._job(job).alone_since_ns = True, None

    def detach(self, job: str, rank: int) -> None:
        """Let a rank go, with its batches in the making; the last of its world takes the job along.

        A rank that has not come yet is waited for (`overdue`): it gets its part of what the others had.
        """
        with self._lock:
            found = self._job(job)
            self._cancel(found.rank(rank))
            found.ranks[rank].attached, found.ranks[rank].left = False, True
            found.alone_since_ns = None if found.attached else self._clock()
            if all(other.left for other in found.ranks):
                self.leave(job)
                return
            self._start(found)
            self._make_all(found)

    def leave(self, job: str) -> None:
        """Let a job go, wherever it stands; the others go on."""
        with self._lock:
            found = self._job(job)
            for rank in found.ranks:
                self._cancel(rank)
                rank.attached, rank.left = False, True
            for walk in found.passes.values():
                self._stock.cache.expect(np.flatnonzero(walk.needs), -1)
            del self._jobs[job]
            self._ordering.remove(job)
            # A cached tensor need not wait for this job's use of it.
            if self._ordering.name != "opportunistic":
                self._stock.cache.release(found.items, job)
            self._count(found.subset, -1)
            self._told()

    def is_outlived(self, job: str, rank: int, terms: JobTerms) -> bool:
        """Whether nobody of `job` is here and `rank` belongs to a new one: it was here before, or means other terms."""
        with self._lock:
            found = self._jobs.get(job)
            if found is None or found.attached:
                return False
            return found.terms != terms or found.rank(rank).left

    def overdue(self, after_s: float | None = None) -> dict[str, list[int]]:
        """Return job -> ranks that have not come for `after_s` (`grace_s`), where others wait for them, or are gone."""
        with self._lock:
            now_ns, grace_ns = self._clock(), int((self.options.grace_s if after_s is None else after_s) * 1e9)
            late = {name: job.overdue(now_ns, grace_ns) for name, job in self._jobs.items()}
            return {name: ranks for name, ranks in late.items() if ranks}

    def give_up(self, job: str, missing: list[int]) -> None:
        """Let a job go whose ranks `missing` did not come; `check_on_time` says so to those that come after all."""
        with self._lock:
            self._given_up[job] = missing
            for oldest in list(self._given_up)[:-MOST_GIVEN_UP]:
                del self._given_up[oldest]
            if job in self._jobs:
                self.leave(job)

    def check_on_time(self, job: str, rank: int) -> None:
        """Raise `InputError`, once, when a job was given up because this rank did not come: others have had batches.

        Any other rank is the first of the next job of that name.
        """
        with self._lock:
            if job not in self._jobs and rank in self._given_up.pop(job, []):
                raise InputError(
                    f"rank {rank} of job {job!r} came more than {self.options.grace_s:g} s (grace_s) after the others: "
                    "the job was given up. Start all its ranks again, together."
                )

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs that are here."""
        with self._lock:
            return list(self._jobs)

    # Batches.

    def begin(
        self,
        job: str,
        rank: int,
        *,
        epoch: int,
        remaining: ArrayLike | None = None,
        history: Sequence[Ints] | None = None,
        index: int | None = None,
        known: Known = NO_MORE,
    ) -> None:
        """Let a rank begin a pass: `epoch`, of which `remaining` is left (default: everything).

        All ranks of a job begin the same passes in the same order, each when
        it likes; what is left of a rank's present pass is dropped. After a
        server was lost, each rank passes what its pass began with and, as
        `history`, the global batches (`Batch.everybody`) that it took since:
        the pass then waits for all ranks, and goes on behind the foremost, the others first get
        their parts of what it had (`headway.data.service.batches` keeps both). What
        the lost server had told (`known`) makes it wait for fewer; `index` is
        the pass, where the rank comes with another than the first.
        Raises `InputError` when ranks disagree.
        """
        with self._lock:
            found = self._job(job)
            mine = found.rank(rank)
            if not mine.attached:
                raise InputError(f"rank {rank} of job {job!r} begins a pass, but is not here. Call attach first.")
            left = found.subset if remaining is None else found.part(remaining)
            found.enter(rank, epoch, left, history, index=index, known=known, now_ns=self._clock())
            self._cancel(mine)
            self._start(found)
            self._make_all(found)

    def known(self, job: str, rank: int) -> list[tuple[int, int, Known]]:
        """Return what a rank needs to go on exactly if this server is lost, where others left or have had their last.

        For each pass, from its own on: how many passes ahead that is, the next
        batch of the rank there, and what is decided from that one on.
        """
        with self._lock:
            found = self._jobs.get(job)
            if found is None:
                return []
            mine = found.rank(rank)
            if not mine.num_begun or not any(r.left or r.told for r in found.ranks if r is not mine):
                return []
            return [(index - mine.num_begun + 1, *told) for index, told in found.known(rank).items()]

    def ready(self) -> list[tuple[str, int]]:
        """Return the (job, rank) for which `take` has a batch, or an end that was not told yet."""
        with self._lock:
            return [
                (job.name, number)
                for job in self._jobs.values()
                for number, rank in enumerate(job.ranks)
                if rank.attached and (rank.ahead[0].left == 0 if rank.ahead else rank.over and not rank.told)
            ]

    def take(self, job: str, rank: int) -> Batch | Ended | None:
        """Return the next batch of a rank; None while it is not ready; `Ended` when its pass is over.

        The batch is the caller's then. Raises `InputError` on a rank that has not begun a pass.
        """
        with self._lock:
            found = self._job(job)
            mine = found.rank(rank)
            if not mine.num_begun or not mine.attached:
                raise InputError(
                    f"rank {rank} of job {job!r} takes a batch outside a pass. Call attach and begin first."
                )
            if mine.ahead and mine.ahead[0].left == 0:
                return self._given(found, rank, mine)
            if mine.ahead and mine.ahead[0].waits_since_ns is None:
                mine.ahead[0].waits_since_ns = self._clock()
            if mine.ahead or not mine.over:
                return None
            mine.told = True
            return Ended(job, rank, found.openings[mine.num_begun - 1].epoch)

    # Work.

    def next_work(self, timeout_s: float = 0.0) -> PreparationTask | None:
        """Return the preparation that is due first; None when there is none within `timeout_s`, or after `close`."""
        with self._lock:
            work = self._stock.next(self._clock())
            if work is None and timeout_s > 0 and not self._closed:
                self._more_work.wait(timeout_s)
                work = self._stock.next(self._clock())
            return None if self._closed else work

    def done(self, work: PreparationTask, forms: Mapping[str, Payload], spent: PreparationTime = NOTHING) -> None:
        """Take what a preparation made: the last form, and those of `work.keep`. Payloads must not change later.

        Raises `InputError` when the last form is missing.
        """
        if self.forms[-1] not in forms:
            raise InputError(f"item {work.item} came as {sorted(forms)}; pass its last form, {self.forms[-1]!r}, too.")
        with self._lock:
            self._finish(self._stock.done(work, forms, spent), spent)

    def failed(self, work: PreparationTask, error: str | None, spent: PreparationTime = NOTHING) -> None:
        """Say why an item cannot be prepared: batches that need it now carry the text; it is tried again next time.

        None: the example is left out (a filter, a declared skip), and its place in each batch stays None.
        """
        with self._lock:
            self._finish(self._stock.none(work, error, spent), spent)

    def close(self) -> None:
        """Wake whoever waits in `next_work`; there is no more work."""
        with self._lock:
            self._closed = True
            self._more_work.notify_all()

    # Facts.

    @property
    def planned(self) -> CacheSplit | None:
        """What the split of the cache was planned with, and for what speed; None where nothing was measured (yet)."""
        return self._stock.measured.planned

    def status(self) -> dict[str, Any]:
        """Return counts, cache and jobs as plain numbers and texts."""
        with self._lock:
            return {
                "fingerprint": self.fingerprint,
                "size": self.size,
                "forms": list(self.forms),
                "order": self._ordering.name,
                **self._stock.status(),
                "jobs": {name: self._facts(job) for name, job in self._jobs.items()},
            }

    def substitutions(self, job: str) -> dict[str, int]:
        """Return how the order of a job leans towards what is cached (`Ordering.substitutions`)."""
        with self._lock:
            return self._ordering.substitutions(job)

    # Below, the lock is held.

    def _job(self, name: str) -> ServedJob:
        return pick(self._jobs, name, "job")

    def _count(self, subset: NDArray[np.bool_], sign: int) -> None:
        """Count a job in or out where items are kept."""
        ahead = sum(job.terms.global_batch for job in self._jobs.values()) * self.options.window
        self._stock.serve(subset, sign, num_jobs=len(self._jobs), num_ahead=ahead)

    def _start(self, job: ServedJob) -> None:
        """Start the passes that wait for nobody any more."""
        while (number := job.may_start()) is not None:
            opening, previous = job.openings[number], job.passes.get(number - 1)
            history = opening.longest(job.name)
            if previous is not None and any(not rank.left and rank.num_begun <= number for rank in job.ranks):
                previous.decide_all()
            left = opening.left.copy()
            for items in history:
                left[items] = False
            job.passes[number] = walk = JobPass(
                opening.epoch, job.terms, self._draws(job, opening.epoch, left), history, left
            )
            opening.started = True
            if opening.complete:
                walk.decide_all()
            self._stock.cache.expect(np.flatnonzero(walk.needs))

    def _draws(self, job: ServedJob, epoch: int, left: NDArray[np.bool_]) -> Callable[[], int | None]:
        """Return what gives the items of a pass, one by one."""
        if not job.terms.shuffle:
            return partial(next, iter(job.items[left[job.items]].tolist()), None)
        self._ordering.begin(
            job.name,
            job.items,
            epoch=epoch,
            remaining=np.flatnonzero(left),
            ahead=self._ahead(),
            items_per_s={other.name: speed for other in self._jobs.values() if (speed := other.counts.examples_per_s)},
            cache_items=self._stock.room_for_items,
            made_ahead={other.name: self.options.window * other.terms.global_batch for other in self._jobs.values()},
        )
        return partial(self._ordering.take, job.name)

    def _make_all(self, job: ServedJob) -> None:
        """Begin batches for every rank of a job, and forget what is behind all of them."""
        for number, rank in enumerate(job.ranks):
            self._make(job, number, rank)
        for walk in job.tidy():
            # The cache need not wait for what nobody asked for.
            self._stock.cache.expect(np.flatnonzero(walk.needs), -1)
        self._told()

    def _make(self, job: ServedJob, number: int, rank: Rank) -> None:
        """Begin batches for a rank until its window is full."""
        walk = job.walk(rank)
        while walk is not None and rank.attached and not rank.over and len(rank.ahead) < self.options.window:
            items, everybody = walk.batch(rank.number, number), walk.everybody(rank.number)
            if items is None or everybody is None or not items.size:
                rank.over = True
                return
            pending = Batch(
                job.name, number, epoch=walk.epoch, number=rank.number, items=items, everybody=everybody,
                occurrence=walk.occurrence(rank.number, number),
            )  # fmt: skip
            rank.ahead.append(pending)
            rank.number += 1
            due = self._rounds + len(rank.ahead)
            for index, item in enumerate(items.tolist()):
                expected, walk.needs[item] = bool(walk.needs[item]), False
                job.num_alone += self._stock.supply(BatchPlace(pending, index), item, expected=expected, due=due)
            self._keep_up(job, walk)

    def _ahead(self) -> dict[str, int]:
        """Return job -> items that are being made, or made, for it."""
        return {
            job.name: sum(pending.items.size for rank in job.ranks for pending in rank.ahead)
            for job in self._jobs.values()
        }

    def _keep_up(self, job: ServedJob, walk: JobPass) -> None:
        """Let a job that reads storage alone go on with the others, if it is behind them.

        Rarely, for a change costs the sorting of what the job needs.
        """
        if len(self._jobs) == 1 or job.num_alone < KEEP_UP_BATCHES * job.terms.global_batch:
            return
        if job.num_alone >= np.count_nonzero(walk.needs) // KEEP_UP_PART:
            job.num_alone = 0
            self._stock.counts.caught_up += self._ordering.catch_up(job.name, self._ahead())

    def _given(self, job: ServedJob, number: int, rank: Rank) -> Batch:
        """Hand the first batch of a rank out, and begin another one."""
        batch = rank.ahead.popleft()
        self._stock.give_back(batch)
        self._rounds += 1 / len(self._jobs)
        job.counts.took(batch.epoch, AuditSum.of(batch.items, batch.occurrence), self._clock())
        self._make_all(job)
        return batch

    def _cancel(self, rank: Rank) -> None:
        """Drop what is being made for a rank."""
        for pending in rank.ahead:
            pending.wanted = False
            self._stock.give_back(pending)
        rank.ahead.clear()
        self._stock.flights.tidy()

    def _finish(self, flight: PreparationTask | None, spent: PreparationTime) -> None:
        """Book the waits that a landed flight has ended, and tell whoever listens."""
        if flight is None:
            return
        now = self._clock()
        for place in flight.places:
            batch = place.batch
            if batch.left == 0 and batch.waits_since_ns is not None:
                self._stock.counts.waited(batch.waits_since_ns, now, flight.started_ns or 0, spent)
                batch.waits_since_ns = None
        self._told()

    def _told(self) -> None:
        """Wake the threads that wait for work, and the caller's loop."""
        self._more_work.notify_all()
        if self._on_ready is not None:
            self._on_ready()

    def _facts(self, job: ServedJob) -> dict[str, Any]:
        """Return what is known of a job."""
        told = self._ordering.substitutions(job.name)
        return {
            **job.counts.as_dict(),
            "items": job.items.size,
            "world_size": job.terms.world_size,
            "ranks": [number for number, rank in enumerate(job.ranks) if rank.attached],
            "epoch": max((walk.epoch for walk in job.passes.values()), default=0),
            "ahead": [len(rank.ahead) for rank in job.ranks],
            "substituted_fraction": told.get("substituted", 0) / max(told.get("items", 0), 1),
        }
