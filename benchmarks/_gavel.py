"""Gavel's published tables, where they are beside the checkout: rates, and what its figures show."""

import csv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "cluster" / "gavel"
DEVICES = "v100=36,p100=36,k80=36"
"""The cluster of the published figures."""


def published_h() -> dict[tuple[str, float, str], float]:
    """Return (trace, jobs per hour or number of jobs, policy) -> hours: mean JCT, or makespan of static traces."""
    with (FOLDER / "published.csv").open(newline="") as file:
        return {
            (row["trace"], float(row["jobs_per_h_or_num_jobs"]), row["policy"]): float(row["value"])
            for row in csv.DictReader(file)
            if row["metric"] in ("mean_jct_h", "makespan_h")
        }
