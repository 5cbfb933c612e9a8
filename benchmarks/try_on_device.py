"""What a few lines win on a device: predicted from one recorded run, tried in one start, and measured by whole runs.

Claim: for GPT-2 (124M) and ResNet-50 four fifths of the gains of whole runs lie in the interval that `headway plan`
predicts from a run with one window, or within 10 % of its middle; the same of what `headway try` measures; the classes
of kernels add up to `useful` within 1 %. Peer: the same script with the edits written into it (jobs/two_models.py).

Needs a CUDA device and torchvision. Prints one JSON line; MODELS (gpt2,resnet50) and SECONDS bound what is run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _command import ROOT, headway

JOB = ROOT / "benchmarks" / "jobs" / "two_models.py"
SINGLES = {
    "gpt2": ("tf32", "autocast", "compile"),
    "resnet50": ("autocast", "channels_last", "cudnn_benchmark", "compile"),
}
STEPS = {"gpt2": "60", "resnet50": "120"}
TOLERANCE, BAR = 0.10, 0.8


def whole_run(model: str, edits: str) -> float:
    """Return the seconds of a step of one whole run, behind its first half."""
    env = {**os.environ, "MODEL": model, "EDITS": edits, "STEPS": STEPS[model], "HEADWAY": "off"}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, str(JOB)], env=env, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


def agrees(gain: float, interval: list[float] | None) -> bool | None:
    """Say whether a measured gain lies in an interval (low, middle, high), or close to its middle."""
    if interval is None:
        return None
    low, middle, high = interval
    return low <= gain <= high or abs(middle / gain - 1) <= TOLERANCE


def main() -> int:
    """Run all and print one JSON line."""
    rows, sums, begin = [], {}, time.monotonic()
    limit_s = float(os.environ.get("SECONDS", "3000"))
    for model in os.environ.get("MODELS", "gpt2,resnet50").split(","):
        os.environ |= {"MODEL": model, "EDITS": "", "STEPS": "80"}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            headway("run", "--window-at", "50", "--out", run, "--", JOB)
            why = headway("why", run)
            sums[model] = {
                "classes_s": round(sum(row["device_s"] for row in why["compute"]["classes"]), 4),
                "useful_s": round(why["ledger"]["useful"], 4), "mfu": why["compute"].get("mfu"),
                "shares": {row["name"]: round(row["share"], 3) for row in why["compute"]["classes"]},
            }  # fmt: skip
            os.environ["STEPS"] = "1000000"
            options = ["--allow", "lossy,result-equivalent", "--rounds", "3", "--recorded", run]
            options += ["--out", Path(folder) / "try", "--plan", Path(folder) / "p.json"]
            tried = headway("try", *options, "--", JOB)
        plain_s = whole_run(model, "")
        by_set = {tuple(sorted(row["remedies"])): row for row in tried["rows"]}
        sets = [(f"compute.{name}",) for name in SINGLES[model]]
        sets += [one for one in by_set if len(one) > 1 and by_set[one]["measured"] is not None]
        sets.sort(key=lambda one: (one != tuple(sorted(tried["best"])), len(one)))
        for one in sets:
            if time.monotonic() - begin > limit_s:
                break
            gain = plain_s / whole_run(model, ",".join(name.removeprefix("compute.") for name in one))
            row = by_set.get(one) or {"predicted": None, "measured": None}
            rows.append({
                "model": model, "edits": [name.removeprefix("compute.") for name in one], "whole": round(gain, 3),
                "predicted": row["predicted"] and [round(value, 3) for value in row["predicted"]],
                "tried": row["measured"] and [round(value, 3) for value in row["measured"]],
                "in_predicted": agrees(gain, row["predicted"]), "in_tried": agrees(gain, row["measured"]),
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        sums[model] |= {"step_s": plain_s, "best": tried["best"]}
    shares = {}
    for key in ("in_predicted", "in_tried"):
        known = [row[key] for row in rows if row[key] is not None]
        shares[key] = round(sum(known) / len(known), 3) if known else None
    add_up = all(abs(one["classes_s"] / one["useful_s"] - 1) <= 0.01 for one in sums.values())
    met = add_up and all(share is not None and share >= BAR for share in shares.values())
    print(json.dumps({"bench": "try_on_device", **shares, "models": sums, "rows": rows, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
