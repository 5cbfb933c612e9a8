"""Hit rates of the cache policies against their closed forms, and Seneca's law for jobs that share.

Claim: a static cache has exactly floor(c N) hits in every later epoch, LRU is within .005 of c + (1 - c) ln(1 - c)
(20,000 items); J jobs with opportunistic sampling read each item from storage once together (<= 1.03 N reads an epoch,
a miss rate of 1 / J) at 5, 20 and 40 % cache, each item exactly once per job and epoch; one job has static hits. Peer:
the closed forms, and J jobs with a static cache each to themselves. Simulated: no byte is read from storage.
"""

import json
import math
import sys
import time

import numpy as np

from headway.data.bytes.order import permute
from headway.data.cached.tiered import TieredCache
from headway.data.orders.random_orders import Opportunistic

ITEMS, EPOCHS, SHARED_ITEMS = 20_000, 3, 4000


def hits(policy: str, cached: float) -> list[int]:
    """Return the hits of each epoch after the first, every epoch a fresh permutation."""
    cache, found = TieredCache(int(cached * ITEMS), policies=policy), []
    for epoch in range(EPOCHS):
        before = cache.hits
        for item in permute(ITEMS, 1, epoch)(np.arange(ITEMS)).tolist():
            if cache.get(item) is None:
                cache.put(item, "encoded", b"x")
        found.append(cache.hits - before)
    return found[1:]


def reads(num_jobs: int, cached: float) -> tuple[list[int], float]:
    """Return the storage reads of each epoch of jobs in step, and the part of the items that came as substitutes."""
    form, split = ("augmented", (0, 0, 1)) if num_jobs > 1 else ("decoded", (0, 1, 0))
    cache, found = TieredCache(int(cached * SHARED_ITEMS), split), []
    order = Opportunistic({f"j{i}": range(SHARED_ITEMS) for i in range(num_jobs)}, 2, cache=cache)
    for _ in range(EPOCHS):
        seen, count = {job: np.zeros(SHARED_ITEMS, int) for job in order.jobs}, 0
        while given := order.step():
            missing = []
            for item, jobs in given.items():
                lost = [job for job in sorted(jobs) if cache.get(item, job) is None]
                for job in jobs:
                    seen[job][item] += 1
                if lost:
                    missing.append((item, lost))
            count += len(missing)
            for item, lost in missing:
                order.store(item, form, b"x", served=lost)
            assert sum(cache.used_bytes.values()) <= int(cached * SHARED_ITEMS), "over the budget"
        assert all((times == 1).all() for times in seen.values()), "not exactly once"
        found.append(count)
        for job in order.jobs:
            order.restart(job)
    return found, max(order.substituted_fraction(job) for job in order.jobs)


def main() -> int:
    """Simulate; print one JSON line."""
    begin, table, met = time.process_time(), {}, True
    for cached in (0.2, 0.35, 0.5, 0.65, 0.8):
        static, lru = hits("static", cached), [count / ITEMS for count in hits("lru", cached)]
        law = cached + (1 - cached) * math.log1p(-cached)
        met &= all(count == int(cached * ITEMS) for count in static) and abs(np.mean(lru) - law) <= 0.005
        table[str(cached)] = {"static_hits": static[-1], "lru": round(float(np.mean(lru)), 4), "lru_law": round(law, 4)}
    shared = {}
    for num_jobs in (1, 2, 4):
        for cached in (0.05, 0.2, 0.4):
            counts, bias = reads(num_jobs, cached)
            alone = int(cached * SHARED_ITEMS)
            if num_jobs == 1:
                met &= counts[1:] == [SHARED_ITEMS - alone] * (EPOCHS - 1)
            else:
                met &= max(counts) <= 1.03 * SHARED_ITEMS
            shared[f"{num_jobs} jobs, {cached:.0%}"] = {
                "reads_per_n": round(max(counts[1:]) / SHARED_ITEMS, 4),
                "miss_rate": round(max(counts[1:]) / SHARED_ITEMS / num_jobs, 4),
                "static_reads_per_n": round(num_jobs * (1 - cached), 2), "substituted": round(bias, 3),
            }  # fmt: skip
    print(json.dumps({
        "bench": "cache_laws", "items": ITEMS, "hits": table, "opportunistic": shared,
        "baseline": "closed forms; J static caches", "cpu_s": round(time.process_time() - begin, 1),
        "claim": "static = floor(cN), LRU within .005, reads <= 1.03 N", "met": bool(met),
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
