"""Mean completion times of Gavel's published grid (36 v100, 36 p100, 36 k80), simulated, beside the published ones.

Claim (--full, all cells): under the published rules, jobs of one device, las and las_aware are within 3 % of each
published cell up to 4.4 jobs/h, and las_aware at 5.6 within 1 % of the 29.42 h that the released code gives. Under our
own rules, gangs: las_aware takes at most 1.03 times the published time up to 2.0 jobs/h, at most 34.3 h at 2.6, las at
most 70.3 h there; no gang size's mean slowdown is above twice the mean of all jobs. Other cells are printed without a
bar. Without --full: two cells. Needs the published tables beside the checkout.
"""

import argparse
import json
import sys
import time

from _gavel import DEVICES, FOLDER, published_h

from headway.cluster import Cluster, simulate
from headway.cluster.queue.logs import RateTable, generate

WINDOW, JOBS_BEHIND = (4000, 5000), 3000
SINGLE_MOST, RELEASED_H = 4.4, 29.42
GANGS_MOST, GANGS_FACTOR, GANGS_H = 2.0, 1.03, {"las_aware": 34.3, "las": 70.3}
OTHERS = ("fifo", "ftf", "ftf_aware", "allox", "gandiva", "las_packed", "fifo_aware")


def cells(published: dict[tuple[str, float, str], float], *, full: bool) -> list[tuple[str, float, str]]:
    """Return (trace, jobs per hour, policy): the cheap ones first."""
    if not full:
        return [("single", 2.8, "las_aware"), ("multi", 2.0, "las_aware")]
    single = [key for key in published if key[0] == "single" and key[2] in ("las", "las_aware")]
    single += [("single", 4.0, policy) for policy in OTHERS]
    multi = [key for key in published if key[0] == "multi" and key[2] == "las_aware" and key[1] <= 2.6]
    return sorted(single, key=lambda key: key[1]) + sorted(multi, key=lambda key: key[1]) + [("multi", 2.6, "las")]


def bar_h(trace: str, rate: float, policy: str, published_h: float) -> tuple[float, float] | None:
    """Return the least and the most hours that the claim allows, or None where there is no bar."""
    if trace == "multi":
        most = GANGS_FACTOR * published_h if rate <= GANGS_MOST else GANGS_H[policy] if rate == 2.6 else None
        return None if most is None else (0.0, most)
    if policy not in GANGS_H:
        return None
    if rate <= SINGLE_MOST:
        return 0.97 * published_h, 1.03 * published_h
    return (0.99 * RELEASED_H, 1.01 * RELEASED_H) if (rate, policy) == (5.6, "las_aware") else None


def main() -> None:
    """Print one JSON line; exit 3 when the claim does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="every cell: half an hour of CPU time")
    full = parser.parse_args().full
    if not FOLDER.exists():
        print(json.dumps({"bench": "cluster_cells", "skipped": "the published tables are not beside this checkout"}))
        return
    published = published_h()
    table, cluster = RateTable.read(FOLDER / "throughputs.parquet"), Cluster.parse(DEVICES)
    rows, own_h = [], {}
    for trace, rate, policy in cells(published, full=full):
        began, gangs = time.process_time(), trace == "multi"
        jobs = generate(WINDOW[1] + JOBS_BEHIND, 0, table.alone["v100"], jobs_per_hour=rate, multi=gangs)

        found = simulate(
            jobs, cluster, policy, rates=table.of(jobs, cluster), window=WINDOW, rules="headway" if gangs else "gavel"
        )
        cpu_s, figures = time.process_time() - began, found.figures()
        own = own_h[trace, rate, policy] = figures["mean_jct_s"] / 3600
        theirs = published[trace, rate, policy]
        bar = bar_h(trace, rate, policy, theirs)
        row = {
            "trace": trace, "jobs_per_h": rate, "policy": policy, "own_h": round(own, 2), "published_h": theirs,
            "own_over_published": round(own / theirs, 3), "p99_h": round(figures["p99_jct_s"] / 3600, 1),
            "cpu_s": round(cpu_s), "met": "no bar" if bar is None else bar[0] <= own <= bar[1],
        }  # fmt: skip
        if gangs:
            worst = max(size["mean_slowdown"] for size in figures["by_scale"].values())
            row["gang_slowdown_over_mean"] = round(worst / figures["mean_slowdown"], 2)
            row["met"] = row["met"] and worst <= 2 * figures["mean_slowdown"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    met = all(row["met"] for row in rows)
    result = {
        "bench": "cluster_cells", "baseline": "Gavel's published mean completion times", "simulated": True,
        "cells": len(rows), "cells_with_a_bar": sum(row["met"] != "no bar" for row in rows), "rows": rows,
    }  # fmt: skip
    if full:
        ends = [("single", 5.6, "las"), ("single", 5.6, "las_aware")]
        result["las_over_las_aware_at_5.6"] = round(own_h[ends[0]] / own_h[ends[1]], 2)
        result["las_over_las_aware_at_5.6_published"] = round(published[ends[0]] / published[ends[1]], 2)
    result |= {"cpu_s": sum(row["cpu_s"] for row in rows), "met": met, "claim": "within 3 %; gangs <= 1.03x, 34.3 h"}
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
