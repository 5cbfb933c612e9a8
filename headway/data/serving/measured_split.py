"""How to divide a data server's cache, from what its first examples cost.

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

from headway.core.units import NS_PER_S
from headway.data.caches.partition import FORMS, CacheSplit, partition_cache, repaced
from headway.data.serving.batches import PreparationTime

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
