"""Schemes chosen from Backblaze's public failure counts, judged on the months that followed.

Claim: with the windows 2021-10 to 2022-09 to learn from, no model of disk is put under a scheme whose tolerated AFR
its failures of 2022-09 to 2022-11 exceeded, and at least 15 % of the space is saved against 6-of-9. Peer: the same
data with the plain estimate of the last window and no margin (the scheme that saves most of those that tolerate it).
Also lives through the drives of 2013 day by day, as they were deployed: caps held, no scheme exceeded beyond doubt.
Real failures; schemes and transitions are simulated.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.storage.disks.logs import Window, read_lifetimes, read_totals, windows
from headway.storage.disks.placement import Placement, place, replay, saved
from headway.storage.disks.plan import POLICIES

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "disks"
DATES = ("2021-10", "2021-11", "2022-09", "2022-11")


def exceeded(placed: list[Placement], later: dict[str, Window]) -> list[str]:
    """Return the models, moved off the default scheme, whose later AFR is more than their scheme tolerates."""
    moved = [found for found in placed if found.saving > 0 and found.model in later]
    afr = {found.model: 365 * later[found.model].failures / later[found.model].disk_days for found in moved}
    return [found.model for found in moved if afr[found.model] > found.tolerated]


def plainly(placed: list[Placement]) -> list[Placement]:
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
    beyond, plain = exceeded(placed, later), plainly(placed)
    print(
        json.dumps(
            {
                "bench": "fleet_backblaze",
                "models": len(placed),
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
                "claim": "no tolerated AFR exceeded, savings >= 15 %",
                "met": not beyond and not over and saved(placed) >= 0.15,
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
