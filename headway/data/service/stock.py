"""What there is of each item of a data server: in the cache, in batches, on its way; and how more of it is made.

A place of a batch is filled from the cache, from another batch that still
holds the item, or by a flight: one preparation for all who wait. What a
preparation makes is offered to the cache: the most prepared of the
deterministic forms that finds room, and what is random for the jobs that did
not have it yet. A form that is meant to be the same each time, and came of
random draws after all, goes to each job once and is not kept; what was found
is made anew and compared at times (`headway.data.bytes.scrutiny`). Not for several threads at once: the service locks.

>>> stock = ItemStore(3, ("decoded",), DataServer(cache_bytes=100))
>>> batch = Batch("job", 0, epoch=0, number=0, items=np.array([2]), everybody=np.array([2]))
>>> stock.supply(BatchPlace(batch, 0), 2, expected=False, due=0)
True
>>> work = stock.next(now_ns=0)
>>> flight = stock.done(work, {"decoded": b"two"}, PreparationTime())
>>> work.item, batch.payloads, stock.counts.loads
(2, [b'two'], 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.machine.host import host_cores
from headway.core.tables import pick
from headway.data.bytes.order import item_seeds
from headway.data.bytes.scrutiny import CHANGED, DREW, Scrutiny
from headway.data.cached.partition import FORMS
from headway.data.cached.tiered import TieredCache
from headway.data.orders.strategies import ORDERS
from headway.data.service.batches import Batch, BatchPlace, Payload, PreparationTime, ServerCounts
from headway.data.service.flights import Flights, PreparationTask
from headway.data.service.ordering import MeasuredSplit

POLICIES = {"encoded": "needed", "decoded": "needed", "augmented": "uses"}
"""Cache policy of each form."""


@dataclass(frozen=True, slots=True)
class DataServer:
    """How a data server is started by its first client: pass it as `DataLoader(server=...)`.

    Jobs with an equal dataset share one server; the options of the first count.
    """

    order: str = "auto"
    """"independent", "shared", "dependent" (Joader), "opportunistic" (Seneca), or "auto" (`Ordering`)."""
    cache_bytes: int = 0
    """Memory for examples, over and above the batches under way."""
    split: tuple[float, float, float] | str = "auto"
    """Shares of it for (encoded, decoded, augmented) examples; "auto": from what the first examples cost
    (`MeasuredSplit`)."""
    threads: int = 0
    """Threads that prepare; 0: as many as there are cores for us."""
    window: int = 4
    """Batches made ahead per rank."""
    idle_s: float = 60.0
    """The server ends after so long without clients."""
    grace_s: float = 600.0
    """How long a rank is waited for that others need after a server was lost, or whose job has nobody else left; by
    default as long as torch's collectives wait, for a rank may have other work."""
    job: str | None = None
    """Name of the job, for ranks that are started without torchrun: the same on all of them."""
    path: str | None = None
    """Its socket; by default one in the runtime directory, named after the dataset."""

    def __post_init__(self) -> None:
        """Raise `InputError` on values that cannot be."""
        pick({"auto": 0, **dict.fromkeys(ORDERS, 0)}, self.order, "order")
        if self.threads < 0 or self.idle_s <= 0:
            raise InputError(f"threads is {self.threads}, idle_s {self.idle_s}; pass 0 or more threads, and a time.")
        if self.window < 1 or self.cache_bytes < 0:
            raise InputError(
                f"window is {self.window}, num_threads {self.num_threads}, cache_bytes {self.cache_bytes}; "
                "pass 1 or more of the first two, 0 or more bytes."
            )
        if not self.grace_s > 0:
            raise InputError(f"grace_s is {self.grace_s}; pass the seconds that a rank which does not come gets.")
        if isinstance(self.split, str) and self.split != "auto":
            raise InputError(f"split is {self.split!r}; give 3 fractions, or 'auto'.")

    @property
    def num_threads(self) -> int:
        """Threads that prepare."""
        return self.threads or host_cores()

    def shared(self) -> dict[str, object]:
        """Return what is the server's rather than one client's."""
        return {key: value for key, value in asdict(self).items() if key not in ("job", "path")}


class ItemStore:
    """The items of one dataset: cached, held, under way."""

    def __init__(self, size: int, forms: tuple[str, ...], options: DataServer, *, seed: int = 0) -> None:
        """Begin with nothing of items 0 to `size` - 1 in `forms` (`PreparationScheduler`). Raises `InputError`."""
        for form in forms:
            pick(dict.fromkeys(FORMS), form, "form")
        if not forms or sorted(set(forms), key=FORMS.index) != list(forms) or forms[-1] == "encoded":
            raise InputError(f"forms are {list(forms)}; give some of {list(FORMS)}, in that order, not 'encoded' last.")
        self.forms, self.options = forms, options
        self.random = forms[-1] == "augmented"
        """Whether a finished example may go to one job once only."""
        self.cache = TieredCache(
            options.cache_bytes,
            (0.0, 0.0, 0.0) if isinstance(options.split, str) else options.split,
            policies=POLICIES,
        )
        self.flights = Flights(random=self.random)
        self.counts = ServerCounts()
        self.measured = MeasuredSplit(
            forms, num_items=size, cache_bytes=options.cache_bytes, num_threads=options.num_threads
        )
        self._measuring = options.split == "auto" and options.cache_bytes > 0
        self._seed = seed
        self._scrutiny = Scrutiny(size)
        self._holders = np.zeros(size, np.int32)
        """[size] Jobs whose subset holds the item."""
        self._made = np.zeros(size, np.uint32)
        """[size] Preparations so far, of which each draws from a seed of its own."""
        self._form_bytes = dict.fromkeys(FORMS, 1)
        """Size of the latest example in each form."""
        self._num_jobs = self._num_ahead = 0

    def serve(self, subset: NDArray[np.bool_], sign: int, *, num_jobs: int, num_ahead: int) -> None:
        """Count a job with the bitmap `subset` [size] in (`sign` 1) or out (-1): `num_jobs` are here then.

        `num_ahead`: items that are prepared ahead for all of them.
        """
        self._holders += sign * subset
        self.cache.num_jobs = max(num_jobs, 1)
        self._num_jobs, self._num_ahead = num_jobs, num_ahead
        self._divide()

    @property
    def room_for_items(self) -> int:
        """About how many examples the cache holds when it is full; 0 while it is empty."""
        used = sum(self.cache.used_bytes.values())
        return round(len(self.cache) * self.options.cache_bytes / used) if used else 0

    def supply(self, place: BatchPlace, item: int, *, expected: bool, due: float) -> bool:
        """Fill one place with `item`, now or when a flight lands, which is `due` then; return whether storage is read.

        `expected`: whether the cache was told that this job needs the item (`TieredCache.expect`).
        """
        job, flights = place.batch.job, self.flights
        had = self.cache.served(item) if self.random else ()
        found = self.cache.get(item, job, expected=expected)
        held, flight = flights.held(item, job), flights.find(item, job)
        compare = None
        if found is not None and held is None and flight is None and self._is_due(found):
            found, compare = None, found
        if found is not None and found[0] == self.forms[-1]:
            self.counts.hits[found[0]] += 1
            flights.again(item, found[1], place, had)
            return False
        self.counts.shared += held is not None or flight is not None
        if held is not None:
            flights.share(held, place)
            return False
        form, payload = found or (None, None)
        alone = flight is None
        if flight is None:
            self._made[item] += 1  # another preparation draws from another seed
            draw = int(item_seeds(self._seed, int(self._made[item]), np.array([item]), np.zeros(1, np.int64))[0])
            flight = flights.launch(item, draw=draw, start=form, payload=payload, due=due)
            flight.compare = compare
        flights.board(flight, place, due)
        return alone and form is None

    def next(self, now_ns: int) -> PreparationTask | None:
        """Return the preparation that is due first, or None."""
        flight = self.flights.next(now_ns)
        if flight is not None:
            flight.keep = self._worth_keeping(flight)
        return flight

    def done(
        self, work: PreparationTask, forms: Mapping[str, Payload], spent: PreparationTime
    ) -> PreparationTask | None:
        """Hand out and keep what a preparation made. Returns its flight, None when nobody asked for it."""
        flight = self._landed(work, spent)
        if flight is None:
            return None
        if self._measuring and flight.start is None:
            self.measured.add({form: memoryview(payload).nbytes for form, payload in forms.items()}, spent)
            if self.measured.ready:
                self._measuring = False
                self._divide()
        steady = self._look(flight, spent)
        self._keep(flight, forms, steady=steady)
        again = [] if steady or self.random else self._beyond_one(flight)
        self.flights.hold(flight, forms[self.forms[-1]], once=not steady)
        self.flights.gone(flight.item)
        for place in again:
            self.supply(place, flight.item, expected=False, due=flight.due)
        return flight

    def none(self, work: PreparationTask, error: str | None, spent: PreparationTime) -> PreparationTask | None:
        """Leave the places of a flight empty: it failed, or (None) its example is left out."""
        flight = self._landed(work, spent)
        if flight is None:
            return None
        self.counts.failed += error is not None
        self.counts.dropped += error is None
        for place in flight.places:
            place.batch.fill(place.index, None, error)
        self.flights.gone(flight.item)
        return flight

    def give_back(self, batch: Batch) -> None:
        """Say that a batch was given away, or is not wanted any more: what it held can be shared no longer."""
        for held in batch.held:
            self.flights.release(held)

    def status(self) -> dict[str, object]:
        """Return counts, cache and flights as plain numbers."""
        cache = self.cache
        return {
            **self.counts.as_dict(),
            "flights": len(self.flights),
            "held_bytes": self.flights.held_bytes,
            "compared": self._scrutiny.compared,
            "finding": self._scrutiny.finding,
            "cache": {
                "capacity_bytes": cache.capacity_bytes,
                "used_bytes": cache.used_bytes,
                "evictions": cache.evictions,
                "refused": cache.refused,
            },
        }

    def _landed(self, work: PreparationTask, spent: PreparationTime) -> PreparationTask | None:
        """Take a flight out and book what it cost: on the batch that asked first."""
        flight = self.flights.land(work.number)
        if flight is not None:
            self.counts.booked(flight.start, spent)
            for place in flight.places[:1]:
                place.batch.book(spent)
        return flight

    def _is_due(self, found: tuple[str, Payload]) -> bool:
        """Tell whether something found is to be made anew and compared; what is random is another each time."""
        return found[0] != "augmented" and self._scrutiny.is_due(memoryview(found[1]).nbytes, first=False)

    def _look(self, flight: PreparationTask, spent: PreparationTime) -> bool:
        """Tell whether what was made may be kept; what is kept is dropped when some of it turns out to be random."""
        scrutiny, was_over = self._scrutiny, self._scrutiny.over
        steady = scrutiny.may_keep(flight.item, drew=spent.drew)
        if spent.changed:
            scrutiny.end(CHANGED, flight.item)
        elif flight.compare is not None and spent.drew:
            scrutiny.end(DREW, flight.item)
        if scrutiny.over and not was_over:
            for item in self.cache.items():
                for form in ("encoded", "decoded"):
                    self.cache.discard(item, form)
        return steady and not scrutiny.over

    @staticmethod
    def _beyond_one(flight: PreparationTask) -> list[BatchPlace]:
        """Take all places but the first of each job out of a flight: its result is for one use."""
        first: dict[str, BatchPlace] = {}
        for place in flight.places:
            first.setdefault(place.batch.job, place)
        beyond = [place for place in flight.places if first[place.batch.job] is not place]
        flight.places = list(first.values())
        return beyond

    def _keep(self, flight: PreparationTask, forms: Mapping[str, Payload], *, steady: bool) -> None:
        """Offer the cache what was made; `steady`: its deterministic forms are."""
        cache, item = self.cache, flight.item
        for form, payload in forms.items():
            self._form_bytes[form] = memoryview(payload).nbytes
        wanted = ("decoded", "encoded") if steady else ()
        for form in [form for form in wanted if form in forms and cache.capacity_bytes[form]]:
            if cache.put(item, form, forms[form]):
                for less in FORMS[: FORMS.index(form)]:
                    cache.discard(item, less)
                break
        if self.random and cache.capacity_bytes["augmented"]:
            cache.put(item, "augmented", forms["augmented"], uses=int(self._holders[item]), served=flight.jobs)

    def _worth_keeping(self, flight: PreparationTask) -> tuple[str, ...]:
        """Return the forms on the way to the last one that the cache would take."""
        if self._scrutiny.over:
            return ()
        begins = -1 if flight.start is None else FORMS.index(flight.start)
        passed = [form for form in self.forms[:-1] if FORMS.index(form) > begins]
        if self._measuring:
            return tuple(passed)
        return tuple(form for form in passed if self.cache.may_keep(flight.item, form, self._form_bytes[form]))

    def _divide(self) -> None:
        """Divide the cache for the jobs that are here, once it is known what examples cost."""
        if self.options.split == "auto" and self.options.cache_bytes and not self._measuring:
            split = self.measured.split(num_jobs=max(self._num_jobs, 1), handover_items=2 * self._num_ahead)
            self.cache.divide(split)
