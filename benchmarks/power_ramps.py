"""Step time under limited ramps, predicted from a run without them, against a job that is slowed by the same curve.

Claim: for ramps of 2, 5 and 10 s from idle to full power, the predicted step time is within 5 % of the measured one.
The accelerator is a sleep, so its power is that of the model; what is tested is the replay. Takes 2 minutes.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from _command import headway

from headway.cost.power import PowerModel
from headway.power.smoothing import of_run, slowed
from headway.trace.recording.runs import Run

JOB = Path(__file__).with_name("jobs") / "ramped.py"
RAMPS_S, IDLE, STEP_S = (2.0, 5.0, 10.0), 0.1, 0.01


def step_s(folder: Path, ramp_s: float) -> tuple[float, Path]:
    """Run the job with a ramp (0 = none); returns the mean step after the first, and the run folder."""
    run = folder / f"ramp{ramp_s:g}"
    headway("run", "--out", run, "--", JOB, run.with_suffix(".json"), ramp_s)
    ends = json.loads(run.with_suffix(".json").read_text())
    return float(np.diff(ends).mean()), run


def main() -> int:
    """Compare and print one JSON line; 3 when the claim does not hold."""
    with tempfile.TemporaryDirectory() as name:
        free_s, run = step_s(Path(name), 0.0)
        wave = of_run(Run.open(run).parts, PowerModel(IDLE, 1.0, tau_s=0.0), devices=1, step_s=STEP_S)
        rows = []
        for ramp_s in RAMPS_S:
            rate = (1 - IDLE) / ramp_s
            predicted_s = free_s * slowed(wave.power_w, STEP_S, up_w_per_s=rate, down_w_per_s=rate)
            measured_s, _ = step_s(Path(name), ramp_s)
            rows.append({
                "ramp_s": ramp_s, "predicted_s": round(predicted_s, 3), "measured_s": round(measured_s, 3),
                "error_fraction": round(predicted_s / measured_s - 1, 4),
            })  # fmt: skip
    ok = all(abs(row["error_fraction"]) <= 0.05 for row in rows)
    print(json.dumps({
        "bench": "power_ramps", "without_s": round(free_s, 3), "rows": rows, "baseline": "the job without ramps",
        "claim": "within 5 %", "ok": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
