"""A script in copies on three devices of speeds 4, 2 and 1, beside the same script on each device alone.

Claim: copies do at least 0.85 of the steps/s that the three devices do together, each measured alone, and at equal
steps the loss is within 5 % of that of the script by itself. A device is a step that sleeps: 40, 20 and 10 steps/s.
Each round runs the script alone on each device, one after the other, and then in copies; `--full` runs three.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "made" / "shared_epochs.py"
SPEEDS, EPOCHS = (40.0, 20.0, 10.0), 8
STEPS_PER_S, LOSS = 0.85, 0.05


def alone(folder: Path, speed: float, epochs: int) -> dict[str, float]:
    """Return steps, seconds and loss of the script by itself, recorded as copies are."""
    folder.mkdir()
    command = ["-m", "headway", "run", "--quiet", "--out", str(folder / "run"), "--", str(SCRIPT)]
    subprocess.run([sys.executable, *command, str(epochs), str(folder), str(speed)], check=True, stdout=sys.stderr)
    return dict(json.loads((folder / "facts-0.json").read_text()))


def copies(folder: Path) -> tuple[dict[str, object], float]:
    """Return the answer of `headway cluster fork`, and the loss."""
    folder.mkdir()
    speeds = ",".join(map(str, SPEEDS))
    command = ["cluster", "fork", "--speeds", speeds, "--dir", str(folder / "fork"), "--json", "--", str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, "-m", "headway", *command, str(EPOCHS), str(folder), speeds], check=True, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    facts = [json.loads((folder / f"facts-{device}.json").read_text()) for device in range(3)]
    assert len({fact["loss"] for fact in facts}) == 1, "copies end with unlike states"
    return json.loads(done.stdout), facts[0]["loss"]


def main() -> int:
    """Print one JSON line; 3 where the claim is missed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rates, losses, seconds = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(3 if "--full" in sys.argv else 1):
            folder = Path(name) / str(number)
            folder.mkdir()
            # The fastest trains to the end, for its loss; the others an eighth and an eighth, for their speed.
            runs = [alone(folder / f"{speed}", speed, EPOCHS if speed == SPEEDS[0] else 1) for speed in SPEEDS]
            answer, loss = copies(folder / "copies")
            together = sum(run["steps"] / run["seconds"] for run in runs)
            (row,) = answer["rows"]
            assert row["steps"] == runs[0]["steps"], "the same batches, once each"
            rates.append(row["steps"] / answer["total_s"] / together)
            losses.append(loss / runs[0]["loss"])
            seconds.append((runs[0]["seconds"], answer["total_s"], row["slots"], row["cost_s"]))
    held = statistics.median(rates) >= STEPS_PER_S and abs(statistics.median(losses) - 1) <= LOSS
    result = {
        "bench": "cluster_fork_run", "rounds": len(rates), "of_summed_steps_per_s": round(statistics.median(rates), 3),
        "range": [round(min(rates), 3), round(max(rates), 3)], "loss_of_alone": round(statistics.median(losses), 4),
        "loss_range": [round(min(losses), 4), round(max(losses), 4)],
        "fastest_alone_s, copies_s, slots, paid_s": [[round(value, 2) for value in row] for row in seconds],
        "claim": ">= 0.85 of the steps/s of all devices alone, loss within 5 % at equal steps",
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if held else 3


if __name__ == "__main__":
    sys.exit(main())
