"""Replay against the published event-driven replayer of dPRO, on one FIFO Dag.

Claim: `greedy` with FIFO queues runs at least 30x as many operations per CPU second as the replayer as published (a
clock and a ready queue per device, all devices looked at for each operation), with the same start of every operation.
The peer is its twin in plain Python (`tests/oracles_replayer.py` says which reading of "clock" is meant), here with a
heap as each queue. `ratio_heap` is against a third variant that also keeps the devices in a heap, which the published
one does not; `ratio_fixed` is `replay` of the same order, against the published way.
"""

import heapq
import json
import statistics

import numpy as np
from _one_f_one_b import cpu_seconds

from headway.sim import Dag, greedy, replay

OPS, DEVICES, ROUNDS = 20_000, 128, 5
CLAIM = 30


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (src, dst, lane, duration): each op waits for two of the 400 before it; durations are positive."""
    rng = np.random.default_rng(seed)
    dst = np.repeat(np.arange(1, OPS), 2)
    src = np.maximum(0, dst - rng.integers(1, 400, dst.size))
    return src, dst, rng.integers(0, DEVICES, OPS), rng.integers(1, 100_000, OPS)


def onward(src: list[int], dst: list[int]) -> tuple[list[list[int]], list[int]]:
    """Return (successors of each op, how many it waits for)."""
    after: list[list[int]] = [[] for _ in range(OPS)]
    waits = [0] * OPS
    for a, b in zip(src, dst, strict=True):
        after[a].append(b)
        waits[b] += 1
    return after, waits


def published(after: list[list[int]], waits: list[int], lane: list[int], duration: list[int]) -> list[int]:
    """Advance the device with the smallest clock, looking at all of them each time; return the starts."""
    waits, ready, start = list(waits), [0] * OPS, [0] * OPS
    free, queue = [0] * DEVICES, [[] for _ in range(DEVICES)]
    for op in range(OPS):
        if not waits[op]:
            heapq.heappush(queue[lane[op]], (0, op))
    for _ in range(OPS):
        now, device = min((max(free[d], queue[d][0][0]), d) for d in range(DEVICES) if queue[d])
        _, op = heapq.heappop(queue[device])
        start[op], end = now, now + duration[op]
        free[device] = end
        for then in after[op]:
            ready[then] = max(ready[then], end)
            waits[then] -= 1
            if not waits[then]:
                heapq.heappush(queue[lane[then]], (ready[then], then))
    return start


def with_heap(after: list[list[int]], waits: list[int], lane: list[int], duration: list[int]) -> list[int]:
    """Do the same with the devices in a heap, entries that have become stale put right when they come up."""
    waits, ready, start = list(waits), [0] * OPS, [0] * OPS
    free, queue = [0] * DEVICES, [[] for _ in range(DEVICES)]
    for op in range(OPS):
        if not waits[op]:
            heapq.heappush(queue[lane[op]], (0, op))
    clocks = [(0, d) for d in range(DEVICES) if queue[d]]
    while clocks:
        now, device = heapq.heappop(clocks)
        if not queue[device]:
            continue
        true = max(free[device], queue[device][0][0])
        if true != now:
            heapq.heappush(clocks, (true, device))
            continue
        _, op = heapq.heappop(queue[device])
        start[op], end = now, now + duration[op]
        free[device] = end
        if queue[device]:
            heapq.heappush(clocks, (max(end, queue[device][0][0]), device))
        for then in after[op]:
            ready[then] = max(ready[then], end)
            waits[then] -= 1
            if not waits[then]:
                heapq.heappush(queue[lane[then]], (ready[then], then))
                heapq.heappush(clocks, (max(free[lane[then]], ready[then]), lane[then]))
    return start


def one_round(seed: int) -> list[float]:
    """Return CPU seconds of (ours, as published, with a heap of devices, the fixed order, compiling) on one Dag."""
    src, dst, lane, duration = case(seed)
    dag = Dag.from_edges(OPS, src, dst, lane=lane, lane_order=False)
    plain = (*onward(src.tolist(), dst.tolist()), lane.tolist(), duration.tolist())
    greedy(dag, duration, order="ready,priority,index")  # compiles the kernels, or loads them from the cache
    ours = cpu_seconds(lambda: greedy(dag, duration, order="ready,priority,index").start_ns, repeats=20)
    theirs = cpu_seconds(lambda: published(*plain))
    heap = cpu_seconds(lambda: with_heap(*plain))
    assert ours[1].tolist() == theirs[1] == heap[1], "starts differ"
    turn = np.lexsort((np.arange(OPS), ours[1]))  # the order found, for the fixed replay
    place = np.empty(OPS, np.int64)
    place[turn] = np.arange(OPS)
    fixed = Dag.from_edges(OPS, place[src], place[dst], lane=lane[turn])
    replay(fixed, duration[turn])
    again = cpu_seconds(lambda: replay(fixed, duration[turn]).start_ns, repeats=50)
    assert again[1].tolist() == ours[1][turn].tolist(), "the fixed order gives other starts"
    build = cpu_seconds(lambda: Dag.from_edges(OPS, src, dst, lane=lane, lane_order=False), repeats=5)
    return [ours[0], theirs[0], heap[0], again[0], build[0]]


def main() -> None:
    """Run interleaved rounds over as many random Dags, and print one JSON line."""
    rounds = [one_round(seed) for seed in range(ROUNDS)]
    ours_s, theirs_s, heap_s, fixed_s, build_s = np.array(rounds).T
    ratios = np.sort(theirs_s / ours_s)
    result = {
        "bench": "replayer_twin", "ops": OPS, "devices": DEVICES, "baseline": "dPRO's replayer, plain Python twin",
        "ours_s": statistics.median(ours_s), "baseline_s": statistics.median(theirs_s),
        "ours_ops_per_s": round(OPS / statistics.median(ours_s)),
        "baseline_ops_per_s": round(OPS / statistics.median(theirs_s)),
        "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]],
        "ratio_with_build": statistics.median(theirs_s / (ours_s + build_s)),
        "ratio_heap": statistics.median(heap_s / ours_s), "ratio_fixed": statistics.median(theirs_s / fixed_s),
        "claim": f">={CLAIM}", "met": bool(statistics.median(ratios) >= CLAIM),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
