"""How long queues that are all there at time 0 take by objective, simulated, beside Gavel's published makespans.

Claim: 500 and 700 jobs on 36 v100, 36 p100, 36 k80, mean of seeds 0 to 2, published rules: makespan ends within 1.02
times the published hours, and at least 2.3 times as early as fifo. 480 jobs on 20 of each, seeds 0 to 2: Hadar's prices
end all jobs at least 1.20 times as early as las_aware, each seed; makespan is printed beside: what the objective wins.
Without a bar: fifo whose jobs may change their type at each decision (fifo_redrawn), and the published fifo.
Needs the published tables beside the checkout.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
from _gavel import DEVICES, FOLDER, published_h

from headway.cluster import POLICIES, Cluster, simulate
from headway.cluster.queue.logs import RateTable, generate

SEEDS, SIZES = (0, 1, 2), (500, 700)
SMALL = "v100=20,p100=20,k80=20"


def fifo_redrawn(state, cluster, now_s):
    """Return what fifo decides when no job is bound to the random type where it began: a stronger baseline."""
    return POLICIES["fifo"](replace(state, previous=np.zeros_like(state.previous)), cluster, now_s)


def main() -> None:
    """Print one JSON line; exit 3 when the claim does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="also las, blind to rates, for the published queues")
    full = parser.parse_args().full
    if not FOLDER.exists():
        print(json.dumps({"bench": "cluster_makespan", "skipped": "the published tables are not beside this checkout"}))
        return
    began, table = time.process_time(), RateTable.read(FOLDER / "throughputs.parquet")
    published = published_h()

    def hours(size: int, devices: str, policy, seed: int, rules: str) -> float:
        """Return the makespan of one queue in hours."""
        cluster = Cluster.parse(devices)
        jobs = generate(size, seed, table.alone["v100"], jobs_per_hour=0.0, multi=True)
        found = simulate(jobs, cluster, policy, rates=table.of(jobs, cluster), rules=rules, seed=seed)
        return found.makespan_s / 3600

    rows, met = [], True
    for size in SIZES:
        mean_h = {
            getattr(policy, "__name__", policy): statistics.fmean(
                hours(size, DEVICES, policy, seed, "gavel") for seed in SEEDS
            )
            for policy in ("makespan", "fifo", fifo_redrawn, "fifo_aware", *(("las",) if full else ()))
        }
        theirs, theirs_fifo = published["static", size, "makespan_aware"], published["static", size, "fifo"]
        ratio, earlier = mean_h["makespan"] / theirs, mean_h["fifo"] / mean_h["makespan"]
        met = met and ratio <= 1.02 and earlier >= 2.3
        rows.append({
            "num_jobs": size, **{f"{name}_h": round(value, 1) for name, value in mean_h.items()},
            "makespan_published_h": round(theirs, 1), "fifo_published_h": round(theirs_fifo, 1),
            "over_published": round(ratio, 3), "fifo_over_makespan": round(earlier, 2),
            "fifo_redrawn_over_makespan": round(mean_h["fifo_redrawn"] / mean_h["makespan"], 2),
            "published_fifo_over_makespan": round(theirs_fifo / mean_h["makespan"], 2),
        })  # fmt: skip
    prices = []
    for seed in SEEDS:
        # As the commands do it: our own rules of rounds, for all three.
        found = {name: hours(480, SMALL, name, seed, "headway") for name in ("hadar", "las_aware", "makespan")}
        ratio = found["las_aware"] / found["hadar"]
        met = met and ratio >= 1.20
        hours_of = {f"{name}_h": round(value, 1) for name, value in found.items()}
        prices.append({"seed": seed, **hours_of, "las_aware_over_hadar": round(ratio, 3)})
    result = {
        "bench": "cluster_makespan", "baseline": "published makespans; las_aware", "simulated": True,
        "published_queues": rows, "hadar": prices, "cpu_s": round(time.process_time() - began), "met": met,
        "claim": "<= 1.02x published, >= 2.3x before fifo; hadar >= 1.20x before las_aware",
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
