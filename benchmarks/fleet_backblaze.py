"""Schemes chosen from Backblaze's public failure counts, judged on the months that followed.

Claim: over all windows that have one before them, at most 1 in 5 models that were moved off 6-of-9 fails in the next
window at more than its scheme tolerates, none of them beyond doubt (at 95 %), and at least 15 % of the space is saved.
A scheme is chosen by the upper end of an 80 % interval, so some models may exceed. Peer: the last window of the same
data with the plain estimate and no margin (the scheme that saves most of those that tolerate it). Also lives through
the drives of 2013 day by day, as they were deployed: caps held, no scheme exceeded beyond doubt. Real failures;
schemes and transitions are simulated.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.lab.afr import poisson_interval
from headway.lab.failure_logs import ObservationWindow, read_lifetimes, read_totals, windows
from headway.lab.fleet_plan import POLICIES
from headway.lab.placement import DiskPlacement, place, replay, saved

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "disks"
DATES = ("2021-10", "2021-11", "2022-09", "2022-11")


def exceeded(placed: list[DiskPlacement], later: dict[str, ObservationWindow]) -> list[str]:
    """Return the models, moved off the default scheme, whose later AFR is more than their scheme tolerates."""
    moved = [found for found in placed if found.saving > 0 and found.model in later]
    afr = {found.model: 365 * later[found.model].failures / later[found.model].disk_days for found in moved}
    return [found.model for found in moved if afr[found.model] > found.tolerated]


def beyond_doubt(names: list[str], placed: list[DiskPlacement], later: dict[str, ObservationWindow]) -> list[str]:
    """Return those of `names` whose later failures are surely more than their scheme tolerates."""
    tolerated = {found.model: found.tolerated for found in placed}
    ends = {name: poisson_interval(later[name].failures, later[name].disk_days)[0] for name in names}
    return [name for name in names if ends[name] > tolerated[name]]


def over_all_windows(spans: list[list[ObservationWindow]]) -> dict[str, int]:
    """Return, over all windows but the first, how many models were moved, exceeded what they may, and beyond doubt."""
    counts = {"windows": 0, "moved": 0, "exceeded": 0, "beyond_doubt": 0}
    for number in range(1, len(spans)):
        later = {window.model: window for window in spans[number]}
        placed = place(spans[:number], ahead_days=spans[number][0].days)
        names = exceeded(placed, later)
        counts["windows"] += 1
        counts["moved"] += sum(found.saving > 0 and found.model in later for found in placed)
        counts["exceeded"] += len(names)
        counts["beyond_doubt"] += len(beyond_doubt(names, placed, later))
    return counts


def plainly(placed: list[DiskPlacement]) -> list[DiskPlacement]:
    """Return the schemes that the plain estimates of the same models would give."""
    policy = POLICIES["pacemaker"]
    found = []
    for one in placed:
        enough = np.flatnonzero(policy.tolerated() >= one.afr[1]) if one.reason == "known" else np.zeros(1, np.int64)
        index = int(enough[-1]) if len(enough) else 0
        limit, saving = float(policy.tolerated()[index]), float(policy.savings()[index])
        found.append(replace(one, scheme=policy.schemes[index].name, tolerated=limit, saving=saving))
    return found


def main() -> None:
    if not FOLDER.is_dir():
        print(json.dumps({"bench": "fleet_backblaze", "skipped": f"the public data is not at {FOLDER}"}))
        return
    totals = [read_totals(FOLDER / f"backblaze_{date}.csv") for date in DATES]
    spans = [windows(older, newer) for older, newer in itertools.pairwise(totals)]
    later = {window.model: window for window in spans[-1]}
    placed = place(spans[:-1], ahead_days=spans[-1][0].days)
    lived = replay(read_lifetimes(FOLDER / "backblaze_2013_drives.csv"))
    over = [one.model for one in lived.lived if one.exceeded and one.scheme != "6-of-9"]
    beyond, plain, everywhere = exceeded(placed, later), plainly(placed), over_all_windows(spans)
    print(
        json.dumps(
            {
                "bench": "fleet_backblaze",
                "models": len(placed),
                **{f"all_windows_{key}": value for key, value in everywhere.items()},
                "models_moved": sum(found.saving > 0 for found in placed),
                "exceeded": len(beyond),
                "savings": round(saved(placed), 4),
                "baseline": "plain estimates without margin",
                "baseline_exceeded": len(exceeded(plain, later)),
                "baseline_savings": round(saved(plain), 4),
                "drives_2013_savings": round(lived.savings, 4),
                "drives_2013_exceeded": len(over),
                "drives_2013_mean_io": round(float(lived.io_frac.mean()), 5),
                "drives_2013_peak_io": round(float(lived.io_frac.max()), 5),
                "claim": "<= 1 in 5 exceeded over all windows, none beyond doubt, savings >= 15 %",
                "met": (
                    5 * everywhere["exceeded"] <= everywhere["moved"]
                    and not everywhere["beyond_doubt"]
                    and not over
                    and saved(placed) >= 0.15
                ),
                "placements": [
                    {
                        "model": found.model,
                        "disks": round(found.num_disks),
                        "afr": round(found.afr[1], 4),
                        "scheme": found.scheme,
                        "tolerated": round(found.tolerated, 4),
                        "afr_later": round(365 * later[found.model].failures / later[found.model].disk_days, 4),
                    }
                    for found in placed
                    if found.saving > 0 and found.model in later
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
