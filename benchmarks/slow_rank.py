"""Jobs of two ranks with and without a slow one: is the slow one named, and nobody else?

Claim: in both jobs with a slow rank `why` names that rank; in ten jobs of two ranks alike (they wait for storage, log,
evaluate, save, ...), none. Two ranks on two busy cores take turns at being late. Peer in the same runs: the rank with
the larger own time per step by 5 %, as a table of step times by rank is read.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import headway
from verdict_steady import JOB

SLOW = {"straggler0": 0, "straggler1": 1}
ALIKE = ("fetch", "augmented", "prep", "restarts", "script", "logging", "garbage", "saves", "eval", "none")


def named(why: dict[str, Any]) -> list[int]:
    """Return the ranks that causes name as slow."""
    causes = [row for row in why["causes"] if row["cause"] == "straggler.rank" and row["where"].startswith("rank ")]
    return sorted(int(row["where"].split()[1]) for row in causes)


def peer(why: dict[str, Any]) -> list[int]:
    """Return the ranks whose forward and backward take 5 % longer than the other's."""
    slowdown = (why["machines"] or {}).get("slowdown", {})
    return sorted(int(name.split()[1]) for name, factor in slowdown.items() if factor > 1.05)


def main() -> int:
    """Record every job once and print one JSON line."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headway-slow-") as temporary:
        folder = Path(temporary)
        script = folder / "train.py"
        script.write_text(JOB)
        for kind in (*SLOW, *ALIKE):
            headway("run", "--quiet", "--out", folder / kind, "--nproc-per-node", 2, "--", script, kind, folder)
            why = headway("why", folder / kind)
            expected = [SLOW[kind]] if kind in SLOW else []
            rows[kind] = {"named": named(why), "expected": expected, "peer": peer(why)}
            print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
    right = sum(row["named"] == row["expected"] for row in rows.values())
    print(json.dumps({
        "bench": "slow_rank", "jobs": len(rows), "right": right,
        "peer_right": sum(row["peer"] == row["expected"] for row in rows.values()), "rows": rows,
        "peer": "own time per step, 5 %", "claim": "2 of 2 found, 0 of 10 named", "met": right == len(rows),
    }))  # fmt: skip
    return 0 if right == len(rows) else 3


if __name__ == "__main__":
    sys.exit(main())
