"""A planted fault is localised on random (tp, pp, dp) grids of up to 10,240 ranks, one fault and two at once.

Claim: in all of 200 grids the planted rank, and nobody else, is named, whether it is silent or still answers without
having entered what others wait in; both of two simultaneous faults are named; each verdict takes less than 1 s of CPU.
The hung jobs are simulated: every rank plays its 1F1B program (tensor-parallel all-reduces, pipeline messages, a
data-parallel reduce-scatter) until nothing moves, by code that knows nothing of wait-for graphs. The baseline is the
rule of thumb of a look at stacks: blame the ranks in the operation that the fewest ranks are in.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter

from headway.core.mesh import Mesh
from headway.ledger.hang import RankReport, localise
from tests.hung_jobs import HungJob, hung_reports, random_job

GRIDS, CLAIM_CPU_S = 200, 1.0
LARGEST = ({"tp": 8, "pp": 8, "dp": 160}, {"tp": 8, "pp": 16, "dp": 80}, {"tp": 4, "pp": 10, "dp": 256})
"""Grids of 10,240 ranks that are tried whatever the seeds give."""


def largest(index: int) -> HungJob:
    """Return a job on a grid of 10,240 ranks with one fault in its first step."""
    rng = random.Random(index)
    mesh = Mesh(LARGEST[index])
    rank = rng.randrange(mesh.world_size)
    return HungJob(mesh, mesh.size("pp"), {rank: rng.randint(0, 4 * mesh.size("pp"))})


def fewest(reports: list[RankReport], mesh: Mesh) -> set[int]:
    """Return the ranks in the operation that the fewest ranks are in; silent ones count as one operation."""
    doing = {report.rank: report.waits[0].op if report.waits else "computes" for report in reports}
    said = {rank: doing.get(rank, "silent") for rank in range(mesh.world_size)}
    rarest = min(Counter(said.values()).items(), key=lambda row: row[1])[0]
    return {rank for rank, operation in said.items() if operation == rarest}


def main() -> None:
    """Localise every planted fault and print one JSON line; exit 3 when the claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="200 grids of every kind")
    full = parser.parse_args().full
    kinds = {"one, silent": (GRIDS, 1, False), "one, answering": (GRIDS if full else 50, 1, True)}
    kinds |= {"two": (GRIDS if full else 50, 2, False), "two, some answering": (GRIDS if full else 50, 2, True)}
    rows, cpu_s, worlds = {}, [], []
    for kind, (number, num_faults, answering) in kinds.items():
        jobs = (random_job(seed, num_faults=num_faults, answering=answering) for seed in range(number))
        found = blamed = 0
        for job in (*(largest(index) for index in range(len(LARGEST)) if kind == "one, silent"), *jobs):
            if kind == "one, answering":
                job = HungJob(job.mesh, job.num_microbatches, job.stops, frozenset(job.stops))
            reports = hung_reports(job)
            began = time.process_time()
            verdict = localise(reports, job.mesh)
            cpu_s.append(time.process_time() - began)
            worlds.append(job.mesh.world_size)
            found += set(verdict.ranks) == set(job.stops)
            blamed += fewest(reports, job.mesh) == set(job.stops)
        tried = number + (len(LARGEST) if kind == "one, silent" else 0)
        rows[kind] = {"grids": tried, "found": found, "baseline_found": blamed}
    met = all(row["found"] == row["grids"] for row in rows.values()) and max(cpu_s) < CLAIM_CPU_S
    result = {
        "bench": "silent_rank", "baseline": "the ranks in the rarest operation", "simulated": "hung 3D jobs",
        "faults": rows, "largest_world": max(worlds), "median_world": statistics.median(worlds),
        "worst_cpu_s": max(cpu_s), "median_cpu_s": statistics.median(cpu_s),
        "claim": f"all found, < {CLAIM_CPU_S} s of CPU each", "met": met,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
