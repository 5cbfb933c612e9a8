"""The order that the jobs of a data server share, and the moment at which it may become another one.

A named strategy stays. "auto" takes the shared or the dependent order,
whichever loads less in a simulation of the jobs present; it decides when a job begins an epoch, from the jobs' sets,
speeds and numbers of items used, never from which items were drawn. So no job's law changes: what is
left of its epoch is a uniform permutation in the new order as it was in the old one.

>>> ordering = Ordering("auto", size=6, seed=1)
>>> ordering.begin("a", range(6), epoch=0)
>>> sorted(ordering.take("a") for _ in range(6)), ordering.take("a"), ordering.name
([0, 1, 2, 3, 4, 5], None, 'shared')

How to divide a data server's cache, from what its first examples cost.

The first examples are prepared from storage while the cache stays empty. The
sizes of `LEAST` of them, behind `WARM_UP` others, the speed of storage, and
the CPU time of the deterministic and the random part go into
`partition_cache` (the bottleneck model, whole examples). What is random is of
no use to one job a second time; where several jobs share, a small part of the
cache hands augmented examples from the first job that needs them to those that
come later.

>>> measured = MeasuredSplit(("encoded", "decoded"), num_items=100, cache_bytes=1000, num_threads=1)
>>> for k in range(WARM_UP + LEAST):
...     spent = PreparationTime(fetch_start_ns=k * 10, fetch_end_ns=k * 10 + 10, decode_ns=1000, read_bytes=10)
...     measured.add({"encoded": 10, "decoded": 50}, spent)
>>> measured.ready, measured.split(num_jobs=1, handover_items=0)
(True, (0.0, 1.0, 0.0))
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.data.cached.partition import FORMS, CacheSplit, partition_cache, repaced
from headway.data.cached.tiered import TieredCache
from headway.data.orders.choice import Reader, choose_order
from headway.data.orders.job_order import Buffered, JobOrder
from headway.data.orders.random_orders import Nearby, Opportunistic
from headway.data.orders.strategies import ORDERS, Shared
from headway.data.service.batches import PreparationTime

AUTO = "auto"
CANDIDATES = ("shared", "dependent")
QUEUE = 1 << 16
"""Indices that wait for a slow job at most; beyond that it is no longer coupled to the others."""
TRIALS, MOST_ITEMS = 4, 400
"""Size of the simulation: 0.1 s for four jobs."""
LEAST_GAIN = 0.01
"""Part of the loads that another order must save: with a change, what jobs have drawn together so far is lost."""


class Ordering:
    """Which job gets which item next."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        seed: int,
        cache: TieredCache | None = None,
        nearby: Nearby | None = None,
    ) -> None:
        """Use the strategy `name`, or "auto". Raises `InputError` on another name."""
        pick({AUTO: None, **ORDERS}, name, "order")
        self._auto = name == AUTO
        self.name = CANDIDATES[0] if self._auto else name
        """The strategy in use."""
        self.num_changes = 0
        self._size, self._seed = size, seed
        self._cache, self._nearby = cache, nearby
        self._items: dict[str, NDArray[np.int64]] = {}
        self._whole: dict[str, NDArray[np.int64]] = {}
        """Job -> what it needed when its epoch began in the present order, ascending."""
        self._buffered = Buffered(self._made(), limit=QUEUE)

    def begin(
        self,
        job: str,
        items: ArrayLike | range,
        *,
        epoch: int,
        remaining: ArrayLike | None = None,
        ahead: Mapping[str, int] | None = None,
        items_per_s: Mapping[str, float] | None = None,
        cache_items: int = 0,
        made_ahead: Mapping[str, int] | None = None,
    ) -> None:
        """Let `job` begin `epoch` of its `items`, of which `remaining` is left (default: everything).

        `ahead`: job -> items taken for it that it has not used yet. "auto" also
        goes by `items_per_s` (job -> speed), `cache_items`, and `made_ahead`: job -> items that
        are taken for it ahead of use at most, which others may share. Raises `InputError`.
        """
        if isinstance(self._buffered.order, Shared):
            self._buffered.order.ahead = dict(ahead or {})
        if job in self._items:
            self._buffered.begin(job, epoch, remaining)
        else:
            self._buffered.order.add(job, items, epoch=epoch, remaining=remaining)
            self._items[job] = np.asarray(items, np.int64)
        if self._auto:
            self._whole[job] = self._buffered.needed(job)
            self._decide(items_per_s or {}, cache_items, ahead or {}, made_ahead or {})

    def catch_up(self, job: str, ahead: Mapping[str, int]) -> bool:
        """Let a job that has fallen behind the others go on with them, where the order can; return whether it did."""
        order = self._buffered.order
        if not isinstance(order, Shared) or job not in self._items:
            return False
        order.ahead = dict(ahead)
        return order.catch_up(job)

    def take(self, job: str) -> int | None:
        """Return the next item of `job`, None when its epoch is over."""
        return self._buffered.take(job)

    def remove(self, job: str) -> None:
        """Let a job go, if it is here."""
        self._whole.pop(job, None)
        if self._items.pop(job, None) is not None:
            self._buffered.remove(job)

    def substitutions(self, job: str) -> dict[str, int]:
        """Return the items that a job was given, and how many came in place of its own next one; {} elsewhere."""
        order = self._buffered.order
        if not isinstance(order, Opportunistic):
            return {}
        return {"substituted": order.num_substituted.get(job, 0), "items": order.num_given.get(job, 0)}

    def _made(self) -> JobOrder:
        """Return an empty order; each later one draws from a seed of its own."""
        seed = derived_seed(self._seed, "ordering", self.num_changes)
        if self.name != "opportunistic":
            return ORDERS[self.name]({}, seed, size=self._size)
        if self._cache is None:
            raise InputError("the opportunistic order goes by a cache. Pass cache=.")
        return Opportunistic({}, seed, cache=self._cache, nearby=self._nearby, size=self._size)

    def _decide(
        self,
        items_per_s: Mapping[str, float],
        cache_items: int,
        ahead: Mapping[str, int],
        made_ahead: Mapping[str, int],
    ) -> None:
        """Change the order if another one loads less."""
        left = {job: num for job in self._items if (num := self._buffered.needed(job).size)}
        best = CANDIDATES[0]
        # Jobs of one set are side by side in the shared order, from wherever the later one begins: no other loads less.
        if len({self._whole[job].tobytes() for job in left}) > 1:
            speed = items_per_s if left.keys() <= items_per_s.keys() else dict.fromkeys(left, 1.0)
            readers = {
                job: Reader(
                    self._whole[job], items_per_s=speed[job], ahead_items=made_ahead.get(job, 0),
                    used_items=max(self._whole[job].size - num - ahead.get(job, 0), 0),
                )
                for job, num in left.items()
            }  # fmt: skip
            choice = choose_order(
                readers, cache_items=cache_items, seed=self._seed, candidates=CANDIDATES, num_trials=TRIALS,
                most_items=MOST_ITEMS, before=self.name,
            )  # fmt: skip
            gains = choice.loads[choice.order] < (1 - LEAST_GAIN) * choice.loads[self.name]
            best = choice.order if gains else self.name
        if best != self.name:
            self._change(best)

    def _change(self, name: str) -> None:
        """Let every job go on in another order with what it has not taken."""
        old = self._buffered
        self.name, self.num_changes = name, self.num_changes + 1
        self._buffered = Buffered(self._made(), limit=QUEUE)
        for job, items in self._items.items():
            self._buffered.order.add(job, items, epoch=old.order.epoch(job), remaining=old.needed(job))
            self._whole[job] = old.needed(job)


# How to divide a data server's cache, from what its first examples cost.

WARM_UP, LEAST = 8, 32
"""Examples that are not measured, for they pay for imports and cold caches; examples behind a split."""

CHUNK = 4
"""Examples whose times are added up before a typical one is picked: what else a machine does comes in bursts."""

MOST_HANDOVER = 0.25
"""Largest part of a cache that hands augmented examples over."""

COPY_BYTES_PER_S = 2e9
"""Speed at which an example is copied into a batch, of the order of one core's: the limit where nothing else costs."""


class MeasuredSplit:
    """Costs and sizes of the first examples, and the split that they suggest."""

    def __init__(self, forms: Sequence[str], *, num_items: int, cache_bytes: int, num_threads: int) -> None:
        """Measure examples that come in `forms`, least prepared first."""
        self._forms = tuple(forms)
        self._num_items, self._cache_bytes, self._num_threads = num_items, cache_bytes, num_threads
        self._sizes = dict.fromkeys(FORMS, 0)
        self._num_seen = 0
        self._spent: list[PreparationTime] = []
        self.planned: CacheSplit | None = None
        """The split that was chosen last, and the speed that is expected of it."""

    @property
    def ready(self) -> bool:
        """Whether enough examples were measured."""
        return self._num_seen >= min(WARM_UP + LEAST, self._num_items)

    def add(self, sizes: Mapping[str, int], spent: PreparationTime) -> None:
        """Note an example that was prepared from storage: bytes in each form, and what it took."""
        self._num_seen += 1
        if self._num_seen <= min(WARM_UP, self._num_items // 4):
            return
        self._spent.append(spent)
        for form, size in sizes.items():
            self._sizes[form] += size

    def mean_bytes(self, form: str) -> float:
        """Return the mean size of an example in one form."""
        return self._sizes[form] / max(len(self._spent), 1)

    def rates(self, typical: Callable[[Iterable[float]], float] = statistics.median) -> dict[str, float]:
        """Return the rates that were measured, as `partition_cache` names them; those that cost nothing left out.

        Storage: bytes by the time during which at least one read lasted, upper quartile of the chunks, for whatever
        else a machine does only adds to that time. CPU: what is `typical` of the chunks.
        """
        ordered = sorted(self._spent, key=lambda spent: spent.fetch_start_ns)
        chunks = [ordered[k : k + CHUNK] for k in range(0, len(ordered), CHUNK)]
        per_s = NS_PER_S * self._num_threads
        found = {"accelerator_per_s": COPY_BYTES_PER_S / max(self.mean_bytes("decoded"), 1.0)}
        storage = _read_speeds(chunks)
        if storage:
            found["storage_bytes_per_s"] = statistics.quantiles([*storage, *storage], n=4)[2]
        both_ns = typical(statistics.mean(spent.prep_ns for spent in chunk) for chunk in chunks)
        augment_ns = typical(statistics.mean(spent.augment_ns for spent in chunk) for chunk in chunks)
        if both_ns:
            found["decode_augment_per_s"] = per_s / both_ns
        if augment_ns:
            found["augment_per_s"] = per_s / augment_ns
        return found

    def split(self, *, num_jobs: int, handover_items: int) -> tuple[float, float, float]:
        """Return the shares of (encoded, decoded, augmented) for so many jobs.

        `handover_items`: augmented examples that lie between the first and the last job that need one. The quickest
        chunk decides, the median one predicts. Behind slow storage the first examples find cold caches and cost up to
        a quarter more than they will; and too much CPU time is the dear mistake. A decoded example too many
        sends the encoded ones that would fit in its place back to storage, and their reads take longer than one
        decoding saves wherever storage and CPU balance; a decoded example too few costs that one decoding.
        """
        hand_over = 0.0
        if self._forms[-1] == "augmented" and num_jobs > 1:
            most = MOST_HANDOVER if len(self._forms) > 1 else 1.0
            wanted = handover_items * self.mean_bytes("augmented") / max(self._cache_bytes, 1)
            hand_over = min(wanted, most) if len(self._forms) > 1 else 1.0
        rest = 1.0 - hand_over
        if "encoded" not in self._forms or "decoded" not in self._forms:
            kept = [form for form in self._forms if form != "augmented"] or ["augmented"]
            shares = dict.fromkeys(FORMS, 0.0) | {"augmented": hand_over}
            shares[kept[0]] += rest
            return shares["encoded"], shares["decoded"], shares["augmented"]
        size = {form: max(self.mean_bytes(form), 1.0) for form in ("encoded", "decoded")}
        stored = statistics.mean(spent.read_bytes for spent in self._spent)
        bytes = rest * self._cache_bytes
        if bytes < size["encoded"]:
            return rest, 0.0, hand_over
        sizes = size | ({"stored": stored} if stored else {})
        quick = partition_cache(
            rates=self.rates(min), sizes=sizes, n=self._num_items, bytes=bytes, num_jobs=1, whole=True
        )
        self.planned = repaced(quick, rates=self.rates(), sizes=sizes)
        encoded, decoded, _ = self.planned.fractions
        return rest * encoded, rest * decoded, hand_over


def _read_speeds(chunks: Sequence[Sequence[PreparationTime]]) -> list[float]:
    """Return bytes/s of storage in each chunk, which follow each other; time that an earlier one covers is its own."""
    speeds, reached = [], 0
    for chunk in chunks:
        covered = 0
        for spent in chunk:
            covered += max(spent.fetch_end_ns - max(spent.fetch_start_ns, reached), 0)
            reached = max(reached, spent.fetch_end_ns)
        read = sum(spent.read_bytes for spent in chunk)
        if covered and read:
            speeds.append(read * NS_PER_S / covered)
    return speeds
