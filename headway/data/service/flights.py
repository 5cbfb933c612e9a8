"""Examples on their way: each is prepared once for everybody who waits for it, and held while a batch still needs it.

A flight is one preparation of one item. Whoever needs the item while it is in
the air joins it; whoever needs it while its payload waits in somebody's
batch shares that (CoorDL's staging). What is drawn at random goes to one job
once: a job that had this very tensor gets a flight of its own. Flights start
in the order in which batches are due. Not for several threads at once: the
service that owns them locks.

>>> flights = Flights(random=False)
>>> first = flights.launch(7, draw=1, start=None, payload=None, due=5)
>>> flights.launch(8, draw=2, start=None, payload=None, due=3).item, flights.next().item, flights.next().item
(8, 8, 7)
>>> flights.find(7, "any job") is first, flights.find(9, "any job")
(True, None)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headway.data.service.batches import BatchPlace, HeldPayload, Payload


@dataclass(slots=True, eq=False)
class PreparationTask:
    """One preparation on its way; what is above `due` does not change once a thread has it."""

    number: int
    """Names it in `done`, `failed` and `dropped`."""
    item: int
    start: str | None
    """Form from which to go on; None: read the item from storage."""
    payload: Payload | None
    """The item in that form."""
    draw: int
    """64-bit seed of this preparation's random numbers: another one each time an item is prepared."""
    keep: tuple[str, ...] = ()
    """Forms, besides the last one, that the cache would keep: return them, leave out the others."""
    compare: tuple[str, Payload] | None = None
    """A form and what the cache has of it: say whether what is made now is another (`PreparationTime.changed`)."""
    due: float = 0.0
    """When it must start, as a number that only grows; the smallest goes first."""
    shared: bool = True
    """Whether others may join."""
    places: list[BatchPlace] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    """Jobs that are to have its result, or left while it was on its way."""
    started_ns: int | None = None


class Flights:
    """All preparations under way, and the finished payloads that wait in batches."""

    def __init__(self, *, random: bool) -> None:
        """Keep tensors apart by job where they are `random`."""
        self._random = random
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, PreparationTask]] = []
        self._flying: dict[int, PreparationTask] = {}
        self._open: dict[int, PreparationTask] = {}
        self._held: dict[int, HeldPayload] = {}
        self._watchers: list[tuple[Callable[[int], object], Callable[[int], object]]] = []

    def __len__(self) -> int:
        """Return the number of flights, waiting or started."""
        return len(self._flying)

    def __iter__(self) -> Iterator[int]:
        """Yield the items that are on their way or held."""
        yield from self._open.keys() | self._held.keys()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait in batches, each payload once; O(payloads)."""
        return sum(memoryview(held.payload).nbytes for held in self._held.values())

    def watch(self, came: Callable[[int], object], went: Callable[[int], object]) -> None:
        """Call `came(item)` when an item may be had without a new preparation, `went(item)` when no more."""
        self._watchers.append((came, went))

    def usable(self, item: int, job: str) -> bool:
        """Return whether `job` could have `item` without another preparation."""
        return self.find(item, job) is not None or self.held(item, job) is not None

    def find(self, item: int, job: str) -> PreparationTask | None:
        """Return the flight of `item` that `job` may join."""
        flight = self._open.get(item)
        return None if flight is None or (self._random and job in flight.jobs) else flight

    def held(self, item: int, job: str) -> HeldPayload | None:
        """Return the finished payload of `item` that `job` may share."""
        held = self._held.get(item)
        return None if held is None or ((self._random or held.once) and job in held.jobs) else held

    def again(self, item: int, payload: Payload, place: BatchPlace, had: Iterable[str]) -> None:
        """Put a finished payload that was cached into a place, for others to share; `had`: jobs that had it before."""
        held = self._held.get(item)
        # The cache hands out views of what was held when it was made.
        if held is None or _memory(held.payload) is not _memory(payload):
            held = HeldPayload(item, payload, set(had))
            self._held[item] = held
        self.share(held, place)

    def launch(
        self, item: int, *, draw: int, start: str | None, payload: Payload | None, due: float
    ) -> PreparationTask:
        """Begin a flight; others may join it unless one of the same item is on its way already."""
        flight = PreparationTask(
            next(self._numbers), item, start, payload, draw, due=due, shared=item not in self._open
        )
        self._flying[flight.number] = flight
        heapq.heappush(self._queue, (due, flight.number, flight))
        if flight.shared:
            self._open[item] = flight
            self._tell(0, item)
        return flight

    def board(self, flight: PreparationTask, place: BatchPlace, due: float) -> None:
        """Let `place` wait for a flight, which starts no later than the place needs it."""
        flight.places.append(place)
        flight.jobs.add(place.batch.job)
        if due < flight.due and flight.started_ns is None:
            flight.due = due
            heapq.heappush(self._queue, (due, flight.number, flight))

    def next(self, now_ns: int = 0) -> PreparationTask | None:
        """Start the flight that is due first; None when all have started."""
        while self._queue:
            _, _, flight = heapq.heappop(self._queue)
            if flight.started_ns is None and flight.number in self._flying:
                flight.started_ns = now_ns
                return flight
        return None

    def land(self, number: int) -> PreparationTask | None:
        """Take a flight out, because it is done or failed; None when it is unknown."""
        flight = self._flying.pop(number, None)
        if flight is not None and flight.shared:
            del self._open[flight.item]
        return flight

    def hold(self, flight: PreparationTask, payload: Payload, *, once: bool = False) -> None:
        """Hand the payload to all that wait for a landed flight, and hold it for others while a batch has it.

        `once`: not to a job that has had it.
        """
        held = HeldPayload(flight.item, payload, flight.jobs, once)
        if flight.places:
            self._held[flight.item] = held
        for place in flight.places:
            self.share(held, place)

    def share(self, held: HeldPayload, place: BatchPlace) -> None:
        """Put a held payload into one more place."""
        held.num_places += 1
        held.jobs.add(place.batch.job)
        place.batch.held.append(held)  # `release` is called when the batch is given away
        place.batch.fill(place.index, held.payload)

    def release(self, held: HeldPayload) -> None:
        """Say that a place which had this payload has given it away."""
        held.num_places -= 1
        if not held.num_places and self._held.get(held.item) is held:
            del self._held[held.item]
            self.gone(held.item)

    def gone(self, item: int) -> None:
        """Tell the watchers that an item may be out of reach now."""
        self._tell(1, item)

    def tidy(self) -> None:
        """Drop the places that nobody wants any more, and flights that wait for nobody and have not started."""
        for flight in list(self._flying.values()):
            flight.places = [place for place in flight.places if place.batch.wanted]
            if not flight.places and flight.started_ns is None:
                self.land(flight.number)
                self.gone(flight.item)

    def _tell(self, which: int, item: int) -> None:
        for watcher in self._watchers:
            watcher[which](item)


def _memory(payload: Payload) -> object:
    """Return the object whose memory this is."""
    return payload.obj if isinstance(payload, memoryview) else payload
