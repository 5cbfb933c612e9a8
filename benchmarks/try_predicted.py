"""What a plan predicts of edits on a CPU, beside what `headway try` measures of them in the same script.

Claim: at least 70 % of what `headway try` measures lies in the interval that the plan of a recorded run gives, over the
scripts of jobs/compute_faults.py; losses of edits that keep results are within 1e-3 of
those of the script as it is. Peer: the script as it is, in branches of the same start. One thread; where a host has
other work both are wide. Usage: `python benchmarks/try_predicted.py [NAME ...]`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import ROOT, headway

sys.path.insert(0, str(ROOT / "benchmarks"))
from jobs.compute_faults import FAULTS

from headway.compute.advise import CANDIDATES

JOBS = (
    "adamw, narrow layers", "adam, small transformer", "sgd with momentum, narrow layers", "adagrad, narrow layers",
    "adamw, large layers", "no bfloat16, perceptron", "no bfloat16, convolutions", "no bfloat16, transformer",
    "attention, no mask", "checkpoint, not reentrant", "a batch of two",
)  # fmt: skip
EDITS = ("fused_optimizer", "autocast", "channels_last")
"""Candidates that are predicted on a CPU; what a compiler wins there is not."""

SHARE, CLOSE = 0.7, 1e-3


def main() -> int:
    """Record, plan and try; print one JSON line."""
    rows: list[dict[str, Any]] = []
    only = [word for edit in EDITS for word in ("--only", edit)]
    for name in [name for name in sys.argv[1:] if name != "--full"] or JOBS:
        with tempfile.TemporaryDirectory(prefix="headway-predicted-") as temporary:
            folder = Path(temporary)
            (folder / "train.py").write_text(FAULTS[name].script)
            os.environ["SECONDS"] = "4"
            headway("run", "--quiet", "--windows", "0", "--out", folder / "run", "--", folder / "train.py")
            out = ("--recorded", folder / "run", "--out", folder / "try", "--plan", folder / "plan.json")
            os.environ["SECONDS"] = "600"  # it is ended when all is tried
            tried = headway("try", *out, "--rounds", "3", *only, "--", folder / "train.py")
        for row in tried["rows"]:
            if len(row["remedies"]) != 1 or not row["predicted"] or not row["measured"]:
                continue
            [edit] = row["remedies"]
            rows.append({
                "job": name, "edit": edit, "predicted": [round(value, 2) for value in row["predicted"]],
                "measured": [round(value, 2) for value in row["measured"]],
                "inside": row["predicted"][0] <= row["measured"][1] <= row["predicted"][2],
                "close": CANDIDATES[edit] == "lossy" or (row["loss_difference"] or 0) <= (row["noise"] or 0) + CLOSE,
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    share = sum(row["inside"] for row in rows) / max(len(rows), 1)
    met = share >= SHARE and all(row["close"] for row in rows)
    print(json.dumps({
        "bench": "try_predicted", "pairs": len(rows), "inside": share, "rows": rows,
        "peer": "branches of the script as it is", "claim": ">= 70 % inside, losses close", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
