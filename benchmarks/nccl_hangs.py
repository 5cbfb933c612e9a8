"""Hangs of jobs on devices whose hosts run ahead: the rank at fault is named from the Flight Recorders' dumps.

Claim: over 200 simulated hangs (a host that never launches again, a kernel that never ends, a stopped process, a
collective left out, a network that does not deliver; tensor and data parallel, up to 32 ranks, queues of 2 to 1,000
entries) the culprit, and nobody else, is named in at least 95 % of those that can be told, and no innocent rank in any.
In a job of two ranks of which one left a collective out nothing tells which: there nobody may be named, and it is
counted apart. Baseline: the rank whose host has launched least, by which a watch of hosts goes.
"""

import argparse
import json
import sys
from collections import Counter

from headway.ledger.hang import HangVerdict, localise
from headway.ledger.hang_reports import of_dumps
from headway.trace.events.trace import concat
from headway.trace.readers import flight
from tests.hung_nccl import HungDevices, hung_devices

HANGS, CLAIM = 200, 0.95


def verdict_of(job: HungDevices) -> HangVerdict:
    """Return what the dumps of a job tell."""
    found = of_dumps(concat([flight.parse(dump, f"rank_{rank}") for rank, dump in job.dumps.items()]))
    return localise(found.reports, found.mesh, groups=found.groups)


def named_by(verdict: HangVerdict) -> set[int]:
    """Return the ranks that others wait for."""
    return {rank for one in verdict.origins if one.reason != "stuck" and one.num_waiting for rank in one.ranks}


def outcome(named: set[int], job: HungDevices) -> str:
    """Return what a verdict is worth: "right", "nobody" named, or an "innocent" rank."""
    truth = {job.culprit} - {-1}
    return "right" if named == truth else "nobody" if not named else "innocent"


def main() -> None:
    """Localise every hang and print one JSON line; exit 3 when the claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="2,000 hangs")
    number = 10 * HANGS if parser.parse_args().full else HANGS
    rows: dict[str, Counter[str]] = {}
    baseline: Counter[str] = Counter()
    untold = 0
    for seed in range(number):
        job = hung_devices(seed)
        found = outcome(named_by(verdict_of(job)), job)
        if job.fault == "skips" and job.mesh.world_size == 2 and found != "innocent":
            untold += 1
            continue
        rows.setdefault(job.fault, Counter())[found] += 1
        least = min(job.launched.values())
        baseline[outcome({rank for rank, at in job.launched.items() if at == least}, job)] += 1
    total = sum(rows.values(), Counter())
    right = total["right"] / total.total()
    met = right >= CLAIM and not total["innocent"]
    result = {
        "bench": "nccl_hangs", "simulated": "hosts that run ahead of queues, NCCL's Flight Recorder",
        "faults": {fault: dict(counts) for fault, counts in sorted(rows.items())},
        "told": total.total(), "right": round(right, 4), "innocent_named": total["innocent"],
        "two_ranks_untold": untold, "baseline": "the rank whose host launched least",
        "baseline_right": round(baseline["right"] / baseline.total(), 4),
        "baseline_innocent": baseline["innocent"],
        "claim": f">= {CLAIM:.0%} right, no innocent rank named", "met": met,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
