"""Time of a decision over a long queue, and of three policies over a virtual cluster of the Philly trace, simulated.

Claim: one decision over 2,000 queued jobs on 36 v100, 36 p100, 36 k80 takes at most 1 s, by every policy of Gavel's
table; over 2,048 jobs with jobs that share devices (las_packed) at most 0.5 s. The 16,091 jobs of Philly's 11cb48 on 16
devices take at most 120 s of CPU time under fifo, las and las_aware together. Needs the published tables beside the
checkout.
"""

import json
import sys
import time

import numpy as np
from _gavel import DEVICES, FOLDER

from headway.cluster import POLICIES, Cluster, Rates, simulate
from headway.cluster.model import Allocation
from headway.cluster.queue.compare import compare_policies
from headway.cluster.queue.logs import RateTable, generate, read_queue

NAMES = ("fifo", "fifo_aware", "las", "las_aware", "las_packed", "ftf", "ftf_aware", "makespan", "max_sum", "min_cost",
         "hierarchical", "gandiva", "hadar", "fill")  # fmt: skip
PHILLY, TRIES = ("fifo", "las", "las_aware"), 3


def decision_s(policy: str, rates: Rates, jobs, cluster) -> float:
    """Return the least CPU time of a policy's first decision over all jobs, on the state that the engine gives it."""
    seen = []

    def look(state, pools, now_s):
        seen.append((state, pools, now_s))
        return Allocation(np.ones(state.rates.shape))

    simulate(jobs, cluster, look, rates=rates, window=(0, 1))
    spent = []
    for _ in range(TRIES):
        began = time.process_time()
        POLICIES[policy](*seen[0])
        spent.append(time.process_time() - began)
    return min(spent)


def main() -> None:
    """Print one JSON line; exit 3 when the claim does not hold."""
    if not FOLDER.exists():
        print(
            json.dumps({"bench": "cluster_decisions", "skipped": "the published tables are not beside this checkout"})
        )
        return
    table, cluster = RateTable.read(FOLDER / "throughputs.parquet"), Cluster.parse(DEVICES)
    found = {}
    for name in NAMES:
        jobs = generate(2048 if name == "las_packed" else 2000, 0, table.alone["v100"], jobs_per_hour=0.0, multi=True)
        found[name] = decision_s(name, table.of(jobs, cluster), jobs, cluster)
    singles = generate(2000, 0, table.alone["v100"], jobs_per_hour=0.0, multi=False)
    found["allox"] = decision_s("allox", table.of(singles, cluster), singles, cluster)
    queue, began = read_queue(FOLDER.parent / "philly" / "jobs.parquet", "11cb48"), time.process_time()

    compared = compare_policies(queue, Cluster.parse("v100=16"), np.ones((len(queue.jobs), 1)), PHILLY)
    philly_s = time.process_time() - began
    met = max(found.values()) <= 1.0 and found["las_packed"] <= 0.5 and philly_s <= 120
    result = {
        "bench": "cluster_decisions", "baseline": "1 s a decision", "simulated": True,
        "decision_s": {name: round(value, 3) for name, value in found.items()},
        "philly_jobs": len(queue.jobs), "philly_cpu_s": round(philly_s, 1), "philly_best": compared.best,
        "met": met, "claim": "<= 1 s over 2,000 jobs; las_packed <= 0.5 s; Philly <= 120 s",
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
