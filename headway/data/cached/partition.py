"""How to divide a cache over the forms of an example, and its items over hosts.

`partition_cache` finds the split of highest predicted throughput, by a linear
program over the number of items held in each form. Two models:
"bottleneck": every resource (storage, cache, network, PCIe, CPU,
accelerator) works on all examples, and the busiest one sets the pace;
"seneca": the published one (Seneca, FAST 2026), the mean over examples of the
rate of their form. Rates are examples/s or bytes/s, sizes bytes.

`PartitionMap` says which host holds which item (CoorDL's partitioned cache):
every host computes it alone from the seed and the bounds.

>>> rates = {"storage_bytes_per_s": 1e6, "augment_per_s": 300, "decode_augment_per_s": 100, "accelerator_per_s": 900}
>>> split = partition_cache(rates=rates, sizes={"encoded": 1e4, "decoded": 6e4}, n=1000, bytes=10_000_000)
>>> [round(count) for count in split.counts], round(split.examples_per_s, 3), split.bottleneck
([0, 167, 0, 833], 112.5, 'cpu')
>>> owners = PartitionMap(10, ["a", "b"], seed=1)
>>> sorted(owners.items("a").tolist() + owners.items("b").tolist()) == list(range(10))
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.data.bytes.order import item_seeds, permute

FORMS = ("encoded", "decoded", "augmented")
"""Forms of an example, least prepared first; also the order of a split."""

RATES: dict[str, str] = {
    "storage_bytes_per_s": "Bsto", "storage_network_bytes_per_s": "Bsto_net", "cache_bytes_per_s": "Bcache",
    "network_bytes_per_s": "NIC", "pcie_bytes_per_s": "PCIe", "augment_per_s": "T_A",
    "decode_augment_per_s": "T_DA", "accelerator_per_s": "T_GPU",
}  # fmt: skip
"""Rate -> the name that the publication gives it; both are understood. A rate that is left out never limits."""

SOLVES = 4
"""Most solutions of the bottleneck program, each in the units of the one before; two do nearly always."""

NEARLY = 1e-9
"""What rounding may have taken from a whole number of examples."""

SIZES: dict[str, str] = {"stored": "S", "encoded": "enc", "decoded": "dec", "augmented": "aug"}
"""Size of an example in storage and in each form of the cache -> its short name; both are understood."""


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """A divided cache."""

    fractions: tuple[float, float, float]
    """Share of the bytes for (encoded, decoded, augmented). The sum is below 1 where more examples in the cache would
    lower the rate, because reading the cache sets the pace; bytes left when all examples are held go to `encoded`."""
    counts: tuple[float, float, float, float]
    """Items held as (encoded, decoded, augmented), and those left in storage; sums to n."""
    examples_per_s: float
    """Predicted throughput."""
    bottleneck: str
    """The resource (or, in the published model, the form read most slowly) that sets the pace."""
    model: str


def partition_cache(
    *,
    rates: Mapping[str, float | Sequence[float]],
    sizes: Mapping[str, float],
    n: int,
    bytes: float,
    model: str = "bottleneck",
    num_jobs: int | None = None,
    whole: bool = False,
) -> CacheSplit:
    """Return the best split of `bytes` of cache for `n` examples.

    `rates` as in RATES (a list is several links side by side), `sizes` as in
    SIZES: "encoded" and "decoded" must be there, "stored" is the encoded size
    and "augmented" twice the decoded one unless given. With `num_jobs` the
    bottleneck model charges an augmented example, which serves each job once,
    a share of 1 / num_jobs of making it; without, it is free for ever, as the
    published model assumes. `whole` (bottleneck model) counts whole examples:
    room for 20.9 decoded ones holds 20, and what is left several encoded ones.
    Raises `InputError` naming the field.
    """
    solve = pick(CACHE_MODELS, model, "cache model")
    if num_jobs is not None and (num_jobs < 1 or model != "bottleneck"):
        raise InputError(f"num_jobs is {num_jobs} with model {model!r}; pass 1 or more, with 'bottleneck' only.")
    if whole and model != "bottleneck":
        raise InputError(f"whole is True with model {model!r}; pass it with 'bottleneck' only.")
    if not n >= 1:
        raise InputError(f"n is {n}; give at least 1 example.")
    if not (math.isfinite(bytes) and bytes >= 0):
        raise InputError(f"bytes is {bytes}; give a finite number of 0 or more.")
    rate, size = _all_rates(rates), _all_sizes(sizes)
    if 0 < bytes < size["encoded"]:
        raise InputError(f"bytes is {bytes}; an encoded example takes {size['encoded']}. Raise it, or pass 0.")
    refill = 1 / num_jobs if num_jobs else 0.0
    split = solve(rate, size, n, bytes, refill)
    return _whole(split, resource_costs(rate, size, refill), size, n, bytes) if whole else split


def repaced(
    split: CacheSplit, *, rates: Mapping[str, float | Sequence[float]], sizes: Mapping[str, float]
) -> CacheSplit:
    """Return `split` as the bottleneck model judges it at other `rates`, for one job. Raises `InputError`."""
    costs = resource_costs(_all_rates(rates), _all_sizes(sizes), 1.0)
    speed, limit = _pace(np.array(split.counts) / sum(split.counts), costs)
    return replace(split, examples_per_s=speed, bottleneck=limit)


def form_rates(rate: Mapping[str, float], size: Mapping[str, float]) -> NDArray[np.float64]:
    """Return examples/s of (encoded, decoded, augmented, stored) examples, alone: the terms of Seneca's model."""
    cache, network, pcie = (rate[f"{link}_bytes_per_s"] for link in ("cache", "network", "pcie"))
    both, augment, accelerator = rate["decode_augment_per_s"], rate["augment_per_s"], rate["accelerator_per_s"]
    encoded, decoded, stored = size["encoded"], size["decoded"], size["stored"]
    device = min(pcie / decoded, accelerator)
    fetched = min(rate["storage_bytes_per_s"], rate["storage_network_bytes_per_s"]) / stored
    return np.array(
        [
            min(cache / encoded, network / encoded, both, device),
            min(cache / decoded, network / decoded, augment, device),
            # As published: an augmented example crosses no PCIe bus, and is read as one decoded size.
            min(cache / decoded, network / decoded, accelerator),
            min(fetched, network / encoded, both, device),
        ]
    )


def _seneca(rate: dict[str, float], size: dict[str, float], n: int, bytes: float, refill: float) -> CacheSplit:
    """Maximise the mean rate over examples; linear in the counts, so that two forms at most are in use."""
    del refill
    speeds = form_rates(rate, size)
    if not np.isfinite(speeds).all():
        raise InputError("a form has no rate that limits it; give 'accelerator_per_s' at least.")
    most, rows = _room(size, n, bytes)
    gains = most * (speeds[:3] - speeds[3])
    used = np.zeros(3)
    if gains.max() > 0:
        used = minimise(-gains / gains.max(), rows=rows, row_high=[1, 1], high=[1.0] * 3).x
    held = _filled(_clean(most * used, size, n, bytes), {"mean": -speeds}, size, n, bytes)
    slowest = int(min(np.flatnonzero(held), key=lambda form: float(speeds[form])))
    return _split(held, size, n, bytes, float(held @ speeds), (*FORMS, "stored")[slowest], "seneca")


def resource_costs(
    rate: Mapping[str, float], size: Mapping[str, float], refill: float = 0.0
) -> dict[str, NDArray[np.float64]]:
    """Return resource -> seconds of it that an (encoded, decoded, augmented, stored) example takes.

    `refill` is the part of an augmented example that must be made anew each time one is used. Raises `InputError` when
    nothing limits some form.
    """
    encoded, decoded, stored = size["encoded"], size["decoded"], size["stored"]
    both, augment = 1 / rate["decode_augment_per_s"], 1 / rate["augment_per_s"]
    fetched = np.array([0.0, 0.0, refill, 1.0])
    # An augmented example is read at its decoded size: the second one is for the copy being made meanwhile.
    read = np.array([encoded, decoded, decoded, 0.0])
    costs = {
        "storage": fetched * stored / rate["storage_bytes_per_s"],
        "storage network": fetched * stored / rate["storage_network_bytes_per_s"],
        "cache": read / rate["cache_bytes_per_s"],
        "network": (read + fetched * encoded) / rate["network_bytes_per_s"],
        "pcie": np.full(4, decoded / rate["pcie_bytes_per_s"]),
        "cpu": np.array([both, augment, refill * both, both]),
        "accelerator": np.full(4, 1 / rate["accelerator_per_s"]),
    }
    if not np.max([*costs.values()], axis=0).all():
        raise InputError("a form has no rate that limits it; give 'accelerator_per_s' at least.")
    return costs


def _bottleneck(rate: dict[str, float], size: dict[str, float], n: int, bytes: float, refill: float) -> CacheSplit:
    """Minimise the seconds that the busiest resource spends per example."""
    costs = resource_costs(rate, size, refill)
    seconds = np.stack(list(costs.values()))
    most, room = _room(size, n, bytes)
    rows = np.vstack([np.pad(room, ((0, 0), (0, 1))), np.zeros((len(costs), 4))])
    held = _clean(np.zeros(3), size, n, bytes)
    for _ in range(SOLVES):
        # In units of the pace found so far: the solver's tolerance is absolute.
        pace = float((seconds @ held).max())
        rows[2:] = np.column_stack([most * (seconds[:, :3] - seconds[:, 3:]) / pace, np.full(len(costs), -1.0)])
        high = [1, 1, *(-seconds[:, 3] / pace)]
        used = minimise([0, 0, 0, 1], rows=rows, row_high=high, high=[1, 1, 1, math.inf]).x[:3]
        found = _clean(most * used, size, n, bytes)
        if float((seconds @ found).max()) >= pace:
            break
        held = found
    held = _filled(held, costs, size, n, bytes)
    return _split(held, size, n, bytes, *_pace(held, costs), "bottleneck")


def _filled(
    held: NDArray[np.float64],
    costs: Mapping[str, NDArray[np.float64]],
    size: Mapping[str, float],
    n: int,
    bytes: float,
) -> NDArray[np.float64]:
    """Return `held` [4] with as many more encoded examples as fit and leave the largest cost as it is."""
    used = n * sum(float(held[i]) * size[form] for i, form in enumerate(FORMS))
    more = min(float(held[3]), max(bytes - used, 0.0) / (n * size["encoded"]))
    worst = max(float(seconds @ held) for seconds in costs.values())
    for seconds in costs.values():
        rise = float(seconds[0] - seconds[3])
        if rise > 0:
            more = min(more, max(worst - float(seconds @ held), 0.0) / rise)
    return np.asarray(held + np.array([more, 0.0, 0.0, -more]))


def _whole(
    split: CacheSplit, costs: Mapping[str, NDArray[np.float64]], size: Mapping[str, float], n: int, bytes: float
) -> CacheSplit:
    """Return the best of the splits next to `split` that hold whole examples; encoded ones take what is left.

    No other number of decoded examples is better in a full cache: the time of the busiest resource is convex in it.
    """
    augmented, found = math.floor(split.counts[2] + NEARLY), []
    for decoded in (math.floor(split.counts[1] + NEARLY), math.ceil(split.counts[1] - NEARLY)):
        left = bytes - decoded * size["decoded"] - augmented * size["augmented"]
        if left >= -NEARLY * bytes:
            most = min(math.floor(max(left, 0.0) / size["encoded"] + NEARLY), n - decoded - augmented)
            # All that fit, or about as many as the optimum holds where reading the cache sets the pace.
            fewer = [min(math.floor(split.counts[0]), most), min(math.ceil(split.counts[0]), most)]
            for encoded in (most, *fewer):
                held = np.array([encoded, decoded, augmented, n - encoded - decoded - augmented]) / n
                full = left - encoded * size["encoded"] < size["encoded"]
                found.append(_split(held, size, n, bytes, *_pace(held, costs), "bottleneck", full=full))
    return max(found, key=lambda split: split.examples_per_s)


def _pace(held: NDArray[np.float64], costs: Mapping[str, NDArray[np.float64]]) -> tuple[float, str]:
    """Return examples/s, and the busiest resource, where the fraction `held` [4] of the items is in each form."""
    busy = {name: float(seconds @ held) for name, seconds in costs.items()}
    worst = max(busy, key=busy.__getitem__)
    return 1 / busy[worst], worst


CACHE_MODELS: dict[str, Callable[[dict[str, float], dict[str, float], int, float, float], CacheSplit]] = {
    "bottleneck": _bottleneck,
    "seneca": _seneca,
}
"""Models of throughput by which a cache is divided."""


class PartitionMap:
    """Which of several hosts holds which item, by rendezvous hashing: a host that leaves moves its own items only."""

    def __init__(self, num_items: int, hosts: Iterable[str], *, seed: int = 0) -> None:
        """Divide items 0 to num_items - 1 over `hosts`.

        A function of the arguments: every host computes the same map without
        a message, in whatever order it lists the hosts. Raises `InputError`.
        """
        self.hosts = sorted(hosts)
        self._seed = seed
        if num_items < 0 or not self.hosts or len(set(self.hosts)) != len(self.hosts):
            raise InputError(f"{num_items} items over {self.hosts}: give 0 or more items, at least 1 host, each once.")
        items = np.arange(num_items, dtype=np.int64)
        best = np.zeros(num_items, np.uint64)
        self._owner = np.zeros(num_items, np.int32)
        for index, host in enumerate(self.hosts):
            score = self._score(host, items)
            better = score > best
            self._owner[better], best[better] = index, score[better]

    def owner(self, item: int) -> str:
        """Return the host that holds `item`. Raises `InputError` outside the dataset."""
        if not 0 <= item < self._owner.size:
            raise InputError(f"item {item} lies outside a dataset of {self._owner.size}; use a smaller number from 0.")
        return self.hosts[int(self._owner[item])]

    def ranked(self, item: int) -> list[str]:
        """Return all hosts in the order in which they should hold `item`: its owner, then who is next without it."""
        one = np.array([item], np.int64)
        score = [int(self._score(host, one)[0]) for host in self.hosts]
        return [self.hosts[index] for index in sorted(range(len(score)), key=lambda index: (-score[index], index))]

    def items(self, host: str) -> NDArray[np.int64]:
        """Return the items of `host`, ascending. Raises `InputError` on a host that is not in the map."""
        return np.flatnonzero(self._owner == self._index(host))

    def copies(self, host: str, count: int) -> NDArray[np.int64]:
        """Return `count` items of other hosts, ascending, to fill room that `host` has left: a sample of its own."""
        theirs = np.flatnonzero(self._owner != self._index(host))
        order = permute(theirs.size, derived_seed(self._seed, "copies", host), 0)
        return np.sort(theirs[order(np.arange(min(max(count, 0), theirs.size)))])

    def _score(self, host: str, items: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return what `host` bids for each item; the highest bid of all hosts wins."""
        return item_seeds(derived_seed(self._seed, "partition", host), 0, items, np.zeros_like(items))

    def _index(self, host: str) -> int:
        """Return the place of `host` in the list of hosts."""
        return pick({name: index for index, name in enumerate(self.hosts)}, host, "host")


def _all_rates(rates: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    """Return every rate by its full name; one that is not given never limits."""
    return dict.fromkeys(RATES, math.inf) | _named(rates, RATES, "rate")


def _all_sizes(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return every size by its full name."""
    size = _named(sizes, SIZES, "size")
    for form in ("encoded", "decoded"):
        if form not in size:
            raise InputError(f"sizes has no {form!r}; give the bytes of an {form} example.")
    return {"stored": size["encoded"], "augmented": 2 * size["decoded"], **size}


def _named(values: Mapping[str, Any], names: Mapping[str, str], what: str) -> dict[str, float]:
    """Return positive numbers by their full names."""
    short = {alias: name for name, alias in names.items()}
    found: dict[str, float] = {}
    for given, value in values.items():
        name = short.get(given, given)
        pick(names, name, what)
        number = float(np.sum(np.asarray(value, float)))
        if not (np.asarray(value, float) > 0).all() or not math.isfinite(number):
            raise InputError(f"{given} is {value}; give a finite {what} above 0, or leave it out.")
        found[name] = number
    return found


def _room(size: Mapping[str, float], n: int, bytes: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest fraction of the items that each form can hold [3], and the rows of items and bytes [2, 3].

    A variable of the programs is a part of that largest fraction, so that all of them are of order 1.
    """
    fit = bytes / (n * np.array([size[form] for form in FORMS]))
    most = np.minimum(fit, 1.0)
    return most, np.stack([most, np.divide(most, fit, out=np.zeros(3), where=fit > 0)])


def _clean(cached: NDArray[np.float64], size: Mapping[str, float], n: int, bytes: float) -> NDArray[np.float64]:
    """Return the fraction of items per form [4] without the solver's rounding: none negative, bytes kept, sum 1."""
    held = np.append(np.clip(cached, 0.0, 1.0), 0.0)
    needed = n * sum(held[i] * size[form] for i, form in enumerate(FORMS))
    if needed > bytes:
        held[:3] *= bytes / needed
    if held[:3].sum() > 1:
        held[:3] /= held[:3].sum()
    held[3] = 1 - held[:3].sum()
    if held[3] < 1e-12:
        held[int(held[:3].argmax())] += held[3]
        held[3] = 0.0
    return held


def _split(
    held: NDArray[np.float64],
    size: Mapping[str, float],
    n: int,
    bytes: float,
    rate: float,
    limit: str,
    model: str,
    *,
    full: bool = False,
) -> CacheSplit:
    """Return the answer in bytes and items; `full`: what is left holds no further example, so `encoded` may have it."""
    shares = [n * float(held[i]) * size[form] / bytes if bytes else 0.0 for i, form in enumerate(FORMS)]
    if full or held[3] < NEARLY or not bytes:
        shares[0] = max(1.0 - shares[1] - shares[2], 0.0)
    encoded, decoded, augmented, stored = (float(x) * n for x in held)
    return CacheSplit((shares[0], shares[1], shares[2]), (encoded, decoded, augmented, stored), rate, limit, model)
