"""Completion times of Pollux' six published workloads under three policies, simulated, beside the published ones.

Claim: tiresias and optimus give each workload's published mean within 1 %; the mean of pollux over the six is at most
1.03 times the published one, 0.73 times tiresias', 0.50 times optimus'; half of its decisions take at most 10 ms.
Needs the published tables beside the checkout.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from headway.cluster import Cluster, simulate
from headway.cluster.adaptive.workload import MeasuredJobs, published_jct_s, read_applications, read_workload

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "cluster" / "pollux"
WORKLOADS, NAMES, HOSTS = (1, 2, 4, 5, 6, 8), ("tiresias", "optimus", "pollux"), 16


def main() -> None:
    """Print one JSON line; exit 3 when the claim does not hold."""
    if not FOLDER.exists():
        print(json.dumps({"bench": "pollux_jct", "skipped": "the published tables are not beside this checkout"}))
        return
    began, applications, rows = time.monotonic(), read_applications(FOLDER), []
    decisions_s: list[float] = []
    hosts = Cluster.of({f"host{index}": 4 for index in range(HOSTS)})
    for workload in WORKLOADS:
        for name in NAMES:
            jobs = MeasuredJobs(read_workload(FOLDER, workload, 1.0), applications, adaptive=name == "pollux")

            outcome = simulate(jobs.jobs(), hosts, name, rates=jobs.rates(HOSTS), round_s=60.0, adapting=jobs)
            if name == "pollux":
                decisions_s += outcome.decisions_s
            published = published_jct_s(FOLDER, name, workload, load=1.0, interval_s=60.0)
            own = float(outcome.jct_s.mean())
            rows.append({"workload": workload, "policy": name, "jct_s": own, "published_s": published})
    mean = {name: statistics.fmean(row["jct_s"] for row in rows if row["policy"] == name) for name in NAMES}
    published = statistics.fmean(row["published_s"] for row in rows if row["policy"] == "pollux")
    exact = all(abs(r["jct_s"] / r["published_s"] - 1) <= 0.01 for r in rows if r["policy"] != "pollux")
    ratios = [mean["pollux"] / each for each in (published, mean["tiresias"], mean["optimus"])]
    median_ms = 1000 * statistics.median(decisions_s)
    met = exact and ratios[0] <= 1.03 and ratios[1] <= 0.73 and ratios[2] <= 0.50 and median_ms <= 10
    result = {
        "bench": "pollux_jct", "baseline": "the published completion times", "simulated": True,
        "mean_jct_s": {name: round(value, 1) for name, value in mean.items()},
        "pollux_published_s": round(published, 1),
        "pollux_over_published_tiresias_optimus": [round(each, 3) for each in ratios], "rows": rows,
        "decision_ms_median_p99": [round(median_ms, 2), round(1000 * statistics.quantiles(decisions_s, n=100)[98], 2)],
        "wall_s": round(time.monotonic() - began), "met": met,
        "claim": "<= 1.03x published, .73x tiresias, .50x optimus",
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
