"""The sweep behind the ledger against its obvious Python twin, and the whole ledger of 8 ranks x 20,000 steps.

Claim: giving every nanosecond of one rank's 20,000 steps to its owner is at least 2.5x faster than a walk over sorted
borders with a heap of active intervals (the twin; equal owners asserted), and the whole ledger of 8 such ranks, about
1.1 million rows with every wait split, takes at most 2 s of CPU.
"""

import heapq
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
from _command import ROOT

from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.rows import NAMES, rows_by_rank
from headway.ledger.buckets import BUCKET_OF
from headway.trace.events.intervals import sweep
from headway.trace.events.trace import Trace, concat

sys.path.insert(0, str(ROOT))
from tests.runs_made import MS, Made, RunMaker

RANKS, STEPS, MADE_STEPS, ROUNDS = 8, 20_000, 500, 3


def made_run() -> Made:
    """Make a short run and put it end to end until it has `STEPS` steps."""
    maker = RunMaker(
        ranks=RANKS, steps=MADE_STEPS, num_workers=2, fetch_ns=8 * MS, prep_ns=2 * MS,
        logging_ns=lambda rank, step: MS * (step % 10 == 0), gc_ns=lambda rank, step: MS * (step % 50 == 0),
    )  # fmt: skip
    short = maker.make()
    trained = short.trace.where(short.trace.events["step"] >= 0)
    low, high = trained.span_ns
    parts = [short.trace]
    for copy in range(1, STEPS // MADE_STEPS):
        events = dict(trained.events)
        events["start_ns"] = events["start_ns"] + copy * (high - low)
        for column, period in (("corr", 1), ("seq", MADE_STEPS)):
            later = trained.named("input.iter", "input.next") if column == "corr" else trained.named("comm.wait")
            events[column] = events[column] + np.where(later, copy * period, 0)
        parts.append(Trace(events, trained.names, trained.lanes))
    added = (len(parts) - 1) * (high - low)
    meta = {**short.meta, "end_ns": short.meta["end_ns"] + added, "ranks": []}
    return replace(short, trace=concat(parts), meta=meta)


def twin(start: list[int], end: list[int], level: list[int], window: tuple[int, int]) -> Counter[int]:
    """Walk the borders in order; a heap holds the active intervals, the owner on top."""
    borders = sorted({*window, *start, *end})
    order = sorted(range(len(start)), key=lambda row: start[row])
    owned: Counter[int] = Counter()
    active: list[tuple[int, int, int, int]] = []
    coming = 0
    for here, there in itertools.pairwise(borders):
        while coming < len(order) and start[order[coming]] <= here:
            row = order[coming]
            heapq.heappush(active, (-level[row], -start[row], end[row], -row))
            coming += 1
        while active and active[0][2] <= here:
            heapq.heappop(active)
        owned[-active[0][3] if active else -1] += there - here
    return owned


def main() -> int:
    """Measure both sides in interleaved rounds and print one JSON line."""
    run = made_run()
    rows = rows_by_rank(run.trace)[0]
    picked = rows.of(*BUCKET_OF)
    start, end = rows.start_ns[picked], rows.end_ns[picked]
    level = np.array([BUCKET_OF[NAMES[code]].precedence for code in rows.name[picked].tolist()], np.int64)
    window = (int(start.min()), int(end.max()))
    plain = (start.tolist(), end.tolist(), level.tolist(), window)
    ratios, seconds = [], []
    for _round in range(ROUNDS):
        begin = time.process_time()
        pieces = sweep(start, end, level, window=window)
        middle = time.process_time()
        answer = twin(*plain)
        after = time.process_time()
        ratios.append((after - middle) / (middle - begin))
        ours: Counter[int] = Counter()
        for row, length in zip(pieces.row.tolist(), pieces.duration_ns.tolist(), strict=True):
            ours[row] += length
        assert ours == answer, "the owners differ"
        begin = time.process_time()
        ledger = Ledger.of(run)
        seconds.append(time.process_time() - begin)
        assert sum(ledger.ledger_ns.values()) == RANKS * ledger.wall_ns, "the ledger does not add up"
    ok = statistics.median(ratios) >= 2.5 and statistics.median(seconds) <= 2
    print(json.dumps({
        "bench": "ledger_speed", "rows": len(run.trace), "ranks": RANKS, "steps": STEPS, "baseline": "Python heap walk",
        "ratio": round(statistics.median(ratios), 1), "ratio_range": [round(min(ratios), 1), round(max(ratios), 1)],
        "ledger_cpu_s": round(statistics.median(seconds), 2), "claim": ">=2.5x, <=2 s of CPU", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
