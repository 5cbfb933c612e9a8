"""Gains that `headway try` measures in one start of a script, beside separate full runs of the script edited by hand.

Claim: in 80 % of the pairs of job and edit the gain of the full runs lies in the interval that `try` gives, or within
5 % of its middle; losses are equal within float tolerance. Peer: the same script with the edit written into it and
without, whole runs in processes of their own, turn and turn about, medians. One thread each; a host with other work
makes both wide.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _command import ROOT, headway

from headway.compute.torch_forward import no_compiler

JOB = ROOT / "benchmarks" / "jobs" / "few_lines.py"
EDITS = {
    "conv": ("channels_last", "fused_optimizer", "compile"), "transformer": ("fused_optimizer", "compile"),
    "narrow": ("fused_optimizer", "compile"),
}  # fmt: skip
ROUNDS, STEPS, TOLERANCE, BAR = 5, 200, 0.05, 0.8


def whole_run(model: str, edit: str) -> dict[str, float]:
    """Return what one run of the script says."""
    env = {**os.environ, "MODEL": model, "EDIT": edit, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1", "HEADWAY": "off"}
    answer = subprocess.run(
        [sys.executable, str(JOB)], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    result: dict[str, float] = json.loads(answer.stdout)
    return result


def main() -> int:
    """Run all and print one JSON line."""
    rows = []
    for model, edits in EDITS.items():
        edits = tuple(edit for edit in edits if edit != "compile" or not no_compiler("cpu"))
        os.environ |= {"MODEL": model, "EDIT": "", "STEPS": "100000"}
        with tempfile.TemporaryDirectory() as folder:
            only = [word for edit in edits for word in ("--only", edit)]
            out = ("--out", f"{folder}/try", "--plan", f"{folder}/plan.json")
            tried = headway("try", *out, *only, "--", JOB)
        by_edit = {row["remedies"][0]: row for row in tried["rows"] if len(row["remedies"]) == 1}
        runs = [{edit: whole_run(model, edit) for edit in ("", *edits)} for _ in range(ROUNDS)]
        for edit in edits:
            gains = [run[""]["step_s"] / run[edit]["step_s"] for run in runs]
            row = by_edit[f"compute.{edit}"]
            assert abs(runs[0][edit]["loss"] - runs[0][""]["loss"]) < 1e-2, (model, edit)
            assert row["loss_difference"] < 1e-2, row
            low, mid, high = row["measured"]
            whole = statistics.median(gains)
            agrees = low <= whole <= high or abs(mid / whole - 1) <= TOLERANCE
            rows.append({
                "job": model, "edit": edit, "tried": [round(value, 3) for value in (low, mid, high)],
                "whole_runs": [round(value, 3) for value in sorted(gains)], "agrees": agrees,
            })  # fmt: skip
    share = sum(row["agrees"] for row in rows) / len(rows)
    print(json.dumps({"bench": "try_agrees", "rows": rows, "agree": share, "met": share >= BAR}))
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
