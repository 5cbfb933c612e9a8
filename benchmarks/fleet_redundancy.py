"""Redundancy that follows failure rates (PACEMAKER) on four made-up fleets of disks, beside three other policies.

Claim: on fleets of 110 000 to 450 000 disks over three years, transitions take at most 5 % of the disks' bandwidth on
any day and 0.4 % on average, save at least 14 % of the space, leave no disk under-protected, and save at least 97 %
of what the same policy saves with infinite IO. Peers in the same run, on the same failures: infinite IO; a reactive
policy (HeART-like: moves when the estimate says so, by re-encoding), whose peak is at least 25 %; never moving.
Simulated: disks, their failure rates and their failures are drawn from a seed (`--full`: twenty seeds), and the planner
sees only the failures.
"""

import json
import sys
import time

from headway.lab.fleet import DiskFleet
from headway.lab.fleet_sim import MIXES, SimResult, made

DAYS, POLICIES = 1095, ("pacemaker", "instant", "reactive")


def lived(name: str, seed: int) -> dict[str, SimResult]:
    """Return what a fleet went through under each policy, on the same failures."""
    clusters = made(name, seed=seed)
    results = {policy: DiskFleet(policy).simulate(clusters, DAYS, seed=seed) for policy in POLICIES}
    assert len({result.disk_days for result in results.values()}) == 1, "the policies met different failures"
    return results


def row(name: str, seed: int) -> dict[str, object]:
    """Return one fleet's figures."""
    begin = time.process_time()
    results = lived(name, seed)
    cpu_s = time.process_time() - begin
    ours = results["pacemaker"]
    return {
        "fleet": name,
        "seed": seed,
        "disks": MIXES[name].num_disks,
        "savings": round(ours.savings, 4),
        "oracle_savings": round(ours.oracle_savings, 4),
        "of_instant": round(ours.savings / results["instant"].savings, 4),
        "mean_io": round(ours.mean_io, 5),
        "peak_io": round(ours.peak_io, 5),
        "under_protected_disk_days": ours.under_protected_disk_days,
        "valve_days": ours.valve_days,
        "reactive_mean_io": round(results["reactive"].mean_io, 4),
        "reactive_peak_io": round(results["reactive"].peak_io, 4),
        "reactive_under_protected_disk_days": results["reactive"].under_protected_disk_days,
        "cpu_s": round(cpu_s, 1),
    }


def met(found: dict[str, object]) -> bool:
    """Tell whether a fleet keeps every bar."""
    figures = {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}
    return (
        figures["peak_io"] <= 0.05 + 1e-9
        and figures["mean_io"] <= 0.004
        and figures["savings"] >= 0.14
        and figures["under_protected_disk_days"] == 0
        and figures["of_instant"] >= 0.97
        and figures["reactive_peak_io"] >= 0.25
    )


def main() -> None:
    seeds = range(20) if "--full" in sys.argv else range(1)
    rows = [row(name, seed) for seed in seeds for name in MIXES]
    ratios = sorted(float(str(found["of_instant"])) for found in rows)
    print(
        json.dumps(
            {
                "bench": "fleet_redundancy",
                "simulated": True,
                "days": DAYS,
                "seeds": len(seeds),
                "baseline": "the same policy with infinite IO; reactive re-encoding (HeART-like); static 6-of-9",
                "least_savings": min(found["savings"] for found in rows),
                "most_mean_io": max(found["mean_io"] for found in rows),
                "most_peak_io": max(found["peak_io"] for found in rows),
                "under_protected_disk_days": sum(found["under_protected_disk_days"] for found in rows),
                "fleets_that_keep_all_bars": sum(met(found) for found in rows),
                "ratio": ratios[len(ratios) // 2],
                "ratio_range": [ratios[0], ratios[-1]],
                "claim": "peak <= 5 %, mean <= 0.4 %, savings >= 14 %, 0 under-protected, ratio >= 0.97, "
                "reactive peak >= 25 %",
                "met": all(met(found) for found in rows),
                "fleets": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
