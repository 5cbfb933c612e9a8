"""Scripts with a planted fault that costs compute time on a CPU: is it named first, and is what is said won?

Claim: `headway why` names the planted fault first among the causes inside useful time in nine of ten scripts, and
none in sound ones; in at least 80 % of the scripts the edit, written into the script, wins what the interval says.
Peer: the script as it is, turn and turn about in one process; CPU time of one thread per example, the median of the
ratios of rounds. Causes that come from what else runs on the host do not count. Usage:
`python benchmarks/compute_hints.py [NAME ...]`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import ROOT, headway

sys.path.insert(0, str(ROOT / "benchmarks"))
from jobs.compute_faults import FAULTS, SOUND, PlantedFault

from headway.compute.remedies import REMEDIES

ROUNDS = 5
ROOM = "compute."


def gains(name: str) -> list[float]:
    """Return how many times as fast the edit makes an example, for each round."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = ROOT / "benchmarks" / "jobs" / "compute_faults.py"
    done = subprocess.run(
        [sys.executable, job, name, str(ROUNDS)], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    ratios: list[float] = json.loads(done.stdout)
    return ratios


def hints(fault: PlantedFault, folder: Path) -> list[dict[str, Any]]:
    """Record a script; return the causes inside useful time that `why` names, most time first."""
    (folder / "train.py").write_text(fault.script)
    headway("run", "--quiet", "--windows", "0", "--out", folder / "run", "--", folder / "train.py")
    # The scripts compute on one thread, so that its CPU time tells: free cores are no planted fault.
    return [
        cause
        for cause in headway("why", folder / "run")["causes"]
        if cause["cause"].startswith(ROOM) and cause["cause"] != "compute.threads"
    ]


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Return what is said of a script with a fault, and what its edit wins."""
    fault = FAULTS[name]
    named = hints(fault, folder)
    first = next((cause for cause in named if cause["cause"] == fault.cause), None)
    ratios = gains(name)
    gain = statistics.median(ratios)
    row = {
        "planted": fault.cause, "first": named[0]["cause"] if named else "",
        "named_first": bool(named) and named[0]["cause"] == fault.cause and fault.line in named[0]["script"],
    }  # fmt: skip
    interval = first["interval"] if first else None
    return {
        **row, "predicted": round(first["predicted_speedup"], 2) if interval else None,
        "interval": [round(value, 2) for value in interval] if interval else None,
        "measured": round(gain, 2), "rounds": [round(min(ratios), 2), round(max(ratios), 2)],
        "within": bool(interval) and interval[0] <= gain <= interval[1],
    }  # fmt: skip


def main() -> int:
    """Run the scripts; print one JSON line."""
    chosen = [name for name in sys.argv[1:] if name != "--full"] or [*FAULTS, *SOUND]
    rows: dict[str, Any] = {}
    named: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="headway-hints-") as temporary:
        for number, name in enumerate(chosen):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            if name in FAULTS:
                rows[name] = measured(name, folder)
            else:
                named[name] = [cause["cause"] for cause in hints(SOUND[name], folder)]
            print(name, json.dumps(rows.get(name, named.get(name))), file=sys.stderr, flush=True)
    first, within = (sum(row[key] for row in rows.values()) for key in ("named_first", "within"))
    false = [name for name, causes in named.items() if causes]
    met = first >= 0.9 * len(rows) and within >= 0.8 * len(rows) and not false
    print(json.dumps({
        "bench": "compute_hints", "scripts": len(rows), "named_first": first, "within": within, "sound": len(named),
        "false": false, "rows": rows, "remedies": len(REMEDIES), "peer": "the script as it is",
        "claim": ">= 90 % named first, >= 80 % within what was said, no sound one", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
