"""Caches keep no random draw: of examples that draw in some epochs, by share, class or length, none is frozen.

A dataset of 101 examples, some of which draw: 1 %, 10 % or 99 % of them; those
of a class; the long ones; all or some, but only from the third epoch on. They
draw from torch's, numpy's or Python's generator, from headway's, from ones
that the dataset holds, a closure or a global has, or from the system. Each is
read for 4 epochs through every cache: the remedy `data.cache` (0 and 2
workers), `cache_bytes` (0 workers, 2 processes, 2 threads), a data server. An
example of those that draw is frozen if it was not drawn in its own epoch.

What the system draws no generator shows: there the figure is how often it was
found, and after how many examples found in the cache.
"""

import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from headway import data
from headway.core.errors import InputError
from headway.data.bytes.scrutiny import chance
from headway.data.cached.apply import CachedDataset, ExampleCaches
from headway.data.cached.cached_examples import CachedExamples, ExampleStore
from headway.data.service.stock import DataServer

SIZE, EPOCHS, BUDGET = 101, 4, 1 << 22
IN_MODULE = np.random.default_rng(11)


class Holder:
    """A transform with generators of its own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = {"deep": [np.random.default_rng(2)]}
        self.python = random.Random(3)
        self.legacy = np.random.RandomState(4)


def of_closure() -> Callable[[Any], float]:
    """Return a draw from a generator that only a closure has."""
    generator = torch.Generator().manual_seed(5)
    return lambda _: float(torch.rand((), generator=generator, dtype=torch.float64))


DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": lambda _: float(torch.rand((), dtype=torch.float64)),
    "numpy": lambda _: float(np.random.randn()),  # every second one moves no word of the state
    "random": lambda _: random.random(),
    "headway": lambda _: float(data.generator().random()),
    "headway torch": lambda _: float(torch.rand((), generator=data.torch_generator(), dtype=torch.float64)),
    "held torch": lambda held: float(torch.rand((), generator=held.torch, dtype=torch.float64)),
    "held numpy": lambda held: float(held.numpy["deep"][0].integers(0, 1 << 31, dtype=np.int32)),
    "held random": lambda held: held.python.gauss(0, 1),
    "held RandomState": lambda held: float(held.legacy.randn()),
    "global": lambda _: float(IN_MODULE.random()),
    "closure": of_closure(),
}
KINDS = ["1 %", "10 %", "99 %", "class", "length", "epoch", "epoch 10 %"]
PATHS = ["remedy", "remedy, 2 workers", "cache", "cache, 2 processes", "cache, 2 threads", "server"]


class Examples(torch.utils.data.Dataset[Any]):
    """[SIZE] Examples {"x", "id", "words", "when"}: x is a draw, made then, or the index, made at no time (0)."""

    def __init__(self, kind: str, draw: Callable[[Any], float]) -> None:
        self.kind, self.draw, self.held, self.epoch = kind, draw, Holder(), 0

    def __len__(self) -> int:
        """Return the number of examples."""
        return SIZE

    def draws(self, k: int) -> bool:
        """Tell whether example `k` draws now; the first and the last never do."""
        if k in (0, SIZE - 1):
            return False
        if self.kind.startswith("epoch"):
            return self.epoch >= 2 and (self.kind == "epoch" or k % 10 == 3)
        chosen = {"1 %": k == 50, "10 %": k % 10 == 3, "99 %": True, "class": k % 7 == 3, "length": k % 17 > 12}
        return chosen[self.kind]

    def __getitem__(self, k: int) -> dict[str, Any]:
        """Return an example."""
        x, when = (self.draw(self.held), time.monotonic_ns()) if self.draws(k) else (float(k), 0)
        return {"x": torch.tensor(x, dtype=torch.float64), "id": k, "words": "w" * (k % 17 * 20), "when": when}


def collate(examples: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return of each its index, and when it was drawn."""
    return [(example["id"], example["when"]) for example in examples]


def epochs(loader: Any) -> int:
    """Read all epochs; return how many examples were not drawn in their epoch, although they draw."""
    num_frozen, before = 0, {0}
    for epoch in range(EPOCHS):
        if loader.dataset.kind.startswith("epoch"):
            loader.dataset.epoch = epoch
        drawn = [when for batch in loader for k, when in batch if loader.dataset.draws(k)]
        num_frozen += sum(when in before for when in drawn)
        before.update(drawn)
    return num_frozen


def through(path: str, dataset: Examples) -> tuple[int, int]:
    """Read all epochs of a dataset through one of the caches; return how many examples were frozen, and found."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "collate_fn": collate}
    if path.startswith("remedy"):
        with remedy() as caches:
            num_frozen = epochs(torch.utils.data.DataLoader(dataset, num_workers=2 * ("workers" in path), **options))
        return num_frozen, sum(stored.scrutiny.found for stored in caches.stored.values() if stored is not None)
    if path == "server":
        server = DataServer(cache_bytes=BUDGET, threads=2, idle_s=0.5)
        served = data.DataLoader(dataset, server=server, **options)
        num_frozen = epochs(served)
        return num_frozen, vars(served)["_links"][0]._counted["server"]["hits_decoded"]
    options |= {"num_workers": 2, "workers": path.rpartition(" ")[2]} if "2" in path else {}
    cached = data.DataLoader(dataset, cache_bytes=BUDGET, **options)
    num_frozen = epochs(cached)
    if cached.cache is not None and cached.cache.finding:
        print(f"{path}, {dataset}: {cached.cache.finding}", file=sys.stderr)
    return num_frozen, cached.cache.hits if cached.cache is not None else 0


@contextlib.contextmanager
def remedy() -> Iterator[ExampleCaches]:
    """Have torch's loaders read through the cache of the remedy `data.cache`."""
    caches = ExampleCaches(BUDGET, lambda _: None)
    loader, fetcher = torch.utils.data.DataLoader, torch.utils.data._utils.fetch._BaseDatasetFetcher
    before = loader.__iter__, fetcher.__init__
    loader.__iter__, fetcher.__init__ = caches.around_iter(before[0]), caches.around_fetcher(before[1])  # type: ignore[method-assign]  # what the remedy does
    try:
        yield caches
    finally:
        loader.__iter__, fetcher.__init__ = before  # type: ignore[method-assign]  # as it was


def sweep(paths: list[str], kinds: list[str], draws: list[str]) -> list[dict[str, Any]]:
    """Return a row per path: cases, frozen examples, and cases that the cache refused with a reason."""
    rows = []
    for path in paths:
        row: dict[str, Any] = {"path": path, "cases": 0, "frozen examples": 0, "found in the cache": 0, "refused": 0}
        for kind in kinds:
            for name in draws:
                if "threads" in path and not name.startswith("headway"):
                    continue  # threads are refused, or share it without any order
                row["cases"] += 1
                try:
                    num_frozen, num_found = through(path, Examples(kind, DRAWS[name]))
                    row["frozen examples"] += num_frozen
                    row["found in the cache"] += num_found
                except InputError:
                    row["refused"] += 1
        rows.append(row)
    return rows


def found_after(share: float, seed: int) -> int:
    """Return how many examples were found in the cache before hidden changes of a share of them were."""
    choice = np.random.default_rng(seed)
    hidden = choice.random(1000) < share

    class Hidden:
        def __getitem__(self, k: int) -> float:
            return float(int.from_bytes(os.urandom(4), "little")) if hidden[k] else float(k)

    dataset = Hidden()
    stored = CachedDataset.empty(dataset, ExampleStore(1000, 1 << 20))
    view = CachedExamples(dataset, stored.store, stored.scrutiny)
    for k in range(1000):
        view[k]
    for count in range(1, 10**6):
        view[int(choice.integers(1000))]
        if stored.scrutiny.over:
            return count
    return 10**6


def unseen(finds: int, share: float) -> float:
    """Return how likely a `share` of changing examples at most is to stay unseen over so many finds."""
    return math.exp(-share * sum(map(chance, range(1, finds + 1))))


def costs() -> dict[str, float]:
    """Return CPU us per example read and found, with and without looks at the generators, of 4 kB each."""
    rows = [torch.full((512,), k) for k in range(2000)]
    stored = CachedDataset.empty(rows, ExampleStore(len(rows), 1 << 26))
    view = CachedExamples(rows, stored.store, stored.scrutiny)

    def per_example(read: Callable[[int], Any]) -> float:
        began = time.process_time()
        for k in range(len(rows)):
            read(k)
        return (time.process_time() - began) / len(rows) * 1e6

    missed = per_example(view.__getitem__)
    found = min(per_example(view.__getitem__) for _ in range(3))
    looks = min(per_example(lambda k: view._watch.around(lambda: k)) for _ in range(3))
    return {"missed_us": missed, "found_us": found, "looks_us": looks}


def main() -> None:
    full = "--full" in sys.argv
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = str(Path(folder))
        kinds = KINDS if full else ["1 %", "99 %", "length", "epoch 10 %"]
        rows = sweep(PATHS, kinds, list(DRAWS) if full else ["numpy", "headway", "held torch"])
    hidden = {}
    for share, finds in ((0.99, 22), (0.5, 139), (0.1, 6930), *(((0.01, 86600),) if full else ())):
        counts = [found_after(share, seed) for seed in range(20)]
        hidden[f"{share:.0%}"] = {
            "finds until seen, median": float(np.median(counts)), "most": max(counts), "bound (1 in 1000)": finds,
            "chance at the bound": unseen(finds, share),
        }  # fmt: skip
    total = sum(row["frozen examples"] for row in rows)
    result = {"bench": "frozen_draws", "examples": SIZE, "epochs": EPOCHS, "frozen": total, **costs()}
    print(json.dumps({**result, "caches": rows, "hidden": hidden}))
    raise SystemExit(total != 0)


if __name__ == "__main__":
    main()
