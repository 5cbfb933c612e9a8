"""What the demo wins, and how well that was predicted: the whole plan, and each of its remedies alone.

Claim: the applied plan runs at 1.5x or more of the steps per second (median of 5 interleaved pairs), and the predicted
step time is within 15 % of the measured one, for the plan and for each remedy alone. Peer: the same script without
headway's plan, interleaved. The accelerator is a sleep. Losses of both sides must be equal.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from _command import ROOT, headway

SCRIPT = ROOT / "headway" / "demo" / "train.py"
ROUNDS = 5


def run(folder: Path, name: str, plan: Path | None = None, *, verify: bool = False) -> tuple[float, list[str]]:
    """Run the demo's script once; return steps per second and the losses it printed."""
    more = ["--apply", plan, *(["--verify"] if verify else [])] if plan else []
    answer = headway(
        "run", "--nproc-per-node", 2, "--out", folder / name, *more, "--", SCRIPT, "--out", folder / "work"
    )
    losses = [line for line in (folder / name / "logs" / "r0.out").read_text().splitlines() if "loss" in line]
    return answer["steps_per_s"], losses


def main() -> int:
    """Interleave plain runs with runs under the plan and under each remedy; print one JSON line."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(folder, "first")
        answer = headway("plan", folder / "first", "-o", folder / "plan.json")
        content = json.loads((folder / "plan.json").read_text())
        plans = {"plan": folder / "plan.json"}
        predicted = {"plan": content["predicted_speedup"]}
        for remedy in content["remedies"]:
            plans[remedy["name"]] = folder / f"{remedy['name']}.json"
            predicted[remedy["name"]] = remedy["predicted_speedup"]
            alone = {**content, "remedies": [remedy], "predicted_speedup": remedy["predicted_speedup"]}
            plans[remedy["name"]].write_text(json.dumps(alone))
        run(folder, "verified", plans["plan"], verify=True)  # apart: comparing takes time of the steps
        measured: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(ROUNDS):
            plain, losses = run(folder, f"plain-{number}")
            for name, path in plans.items():
                if name != "plan" and number >= 3:
                    continue  # the remedies alone: three pairs
                rate, same = run(folder, f"{name}-{number}", path)
                assert same == losses, f"{name} changed the losses: {losses} {same}"
                measured[name].append(rate / plain)
        unknown = headway("why", folder / "first")["ledger"]["unknown"]
    gains = {name: statistics.median(ratios) for name, ratios in measured.items()}
    errors = {name: predicted[name] and abs(gains[name] / predicted[name] - 1) for name in gains}
    ok = gains["plan"] >= 1.5 and max(errors.values()) <= 0.15
    print(json.dumps({
        "bench": "demo_gain", "chosen": answer["chosen"], "measured": {k: round(v, 3) for k, v in gains.items()},
        "measured_range": {k: [round(min(v), 3), round(max(v), 3)] for k, v in measured.items()},
        "predicted": {k: round(v, 3) for k, v in predicted.items()},
        "step_time_error": {k: round(v, 4) for k, v in errors.items()}, "unknown_device_s": unknown,
        "peer": "the same script without the plan, interleaved", "claim": ">= 1.5x, errors <= 15 %", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
