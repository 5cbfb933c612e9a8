"""Public scripts with a waiting loader get `data.workers` (random ones with the grant), and lose no digit by it.

Claim: each of the scripts below runs unmodified on made-up data; where a DataLoader without workers waits (10 % of wall
or more) a remedy is planned, applied and in force to the end; what it prints is equal to the digit to a plain run, but
where the dataset draws random numbers and `--allow same-distribution` was given; over three plain runs and
three with the plan, in turn, none is slower than .98x from the first update to the last, and the medians of their steps
are in the predicted interval for four of five. Peer: the same script without headway.

Usage: `python benchmarks/public_scripts.py --scripts DIR [NAME ...]`. DIR (or $HEADWAY_WORLD_SCRIPTS) has checkouts as
DIR/owner/name. torch is seeded from outside where a script takes no seed; so is numpy.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from world import data
from world.measure import Pass, Sandbox, asked, failed, left, plainly, under_headway, verdict
from world.rows import Row

from headway.core.tables import pick

WAITING = 0.1
"""Share of wall that a training loader without workers keeps waiting, from which on a remedy is asked for."""

GRANT = "same-distribution"

ROUNDS = 5
"""Pairs of a plain run and one with the plan."""

SLOWER = 0.98
"""Times as fast as plainly: a job with the plan is slower below."""


def digits(folder: Path, place: str) -> None:
    """Write MNIST below `folder`."""
    data.digits(folder / place)


def bsd300(folder: Path) -> None:
    """Write photographs where the script has unpacked BSDS300."""
    for part, count in (("train", 200), ("test", 40)):
        data.photographs(folder / "dataset" / "BSDS300" / "images" / part, count, (481, 321))


def classes(folder: Path) -> None:
    """Write an ImageNet of four classes: as many photographs for each, in the usual size of ImageNet."""
    for part, count in (("train", 100), ("val", 20)):
        for name in ("n01", "n02", "n03", "n04"):
            data.photographs(folder / "imagenet" / part / name, count, (500, 375))


def etth1(folder: Path) -> None:
    """Write a series in the form of ETTh1."""
    data.series(folder / "dataset" / "ETTh1.csv")


script = partial(Row, "world/public_scripts", steps=0)
LTSF = ("--is_training", "1", "--root_path", "./dataset/", "--data_path", "ETTh1.csv", "--model_id", "ETTh1_336_96",
        "--model", "DLinear", "--data", "ETTh1", "--features", "M", "--seq_len", "336", "--pred_len", "96", "--des",
        "Exp", "--itr", "1", "--batch_size", "32", "--learning_rate", "0.005", "--train_epochs", "4")  # fmt: skip
IMAGENET = ("imagenet", "--no-accel", "--epochs", "2", "--seed", "1", "-b", "16", "-p", "1", "--lr", "0.01")

SCRIPTS = {
    "PyTorch-GAN gan.py": script(
        "eriklindernoren/PyTorch-GAN", "gan.py", arguments=("--n_epochs", "2"), cwd="implementations/gan",
        env={"WORLD_SEED": "1"}, prepare=partial(digits, place="../../data/mnist"),
    ),
    "ignite mnist.py": script(
        "pytorch/ignite", "mnist.py", arguments=("--epochs", "2"), cwd="examples/mnist", env={"WORLD_SEED": "1"},
        prepare=partial(digits, place="."),
    ),
    "examples/mnist_rnn": script(
        "pytorch/examples", "main.py", arguments=("--epochs", "2"), cwd="mnist_rnn",
        prepare=partial(digits, place="../data"),
    ),
    "examples/super_resolution": script(
        "pytorch/examples", "main.py", cwd="super_resolution", prepare=bsd300,
        arguments=("--upscale_factor", "8", "--batchSize", "4", "--nEpochs", "8", "--threads", "0"),
    ),
    "examples/super_resolution, 4 workers": script(
        "pytorch/examples", "main.py", cwd="super_resolution", prepare=bsd300,
        arguments=("--upscale_factor", "8", "--batchSize", "4", "--nEpochs", "8"),
    ),
    "examples/imagenet": script(
        "pytorch/examples", "main.py", cwd="imagenet", prepare=classes,
        arguments=(*IMAGENET, "-a", "shufflenet_v2_x0_5", "--workers", "0"),
    ),
    "examples/imagenet, 4 workers": script(
        "pytorch/examples", "main.py", cwd="imagenet", prepare=classes,
        arguments=(*IMAGENET, "-a", "shufflenet_v2_x0_5", "--workers", "4"),
    ),
    "LTSF-Linear DLinear": script(
        "cure-lab/LTSF-Linear", "run_longExp.py", prepare=etth1, env={"WORLD_NUMPY_1": "1"},
        arguments=(*LTSF, "--num_workers", "0"),
    ),
    "LTSF-Linear DLinear, 10 workers": script(
        "cure-lab/LTSF-Linear", "run_longExp.py", prepare=etth1, env={"WORLD_NUMPY_1": "1"}, arguments=LTSF,
    ),
}  # fmt: skip


def measure(row: Row, scripts: Path, folder: Path, *, own_workers: bool) -> dict[str, object]:
    """Run a script plainly, recorded and with the plan, all in `folder`; return its figures."""
    sandbox = Sandbox.of(row, folder / "runs" / "of", scripts)  # two deep: a script writes to ../../data
    plain, seen = plainly(sandbox, "plain"), under_headway(sandbox, "seen")
    why = json.loads(asked(sandbox, "why", "--json", seen.run))
    waiting = why["ledger"]["input"] / (why["devices"] * why["wall_s"])
    plan, grant = json.loads(asked(sandbox, "plan", "--json", seen.run)), None
    if not plan["chosen"]:
        granted = json.loads(asked(sandbox, "plan", "--json", "--allow", GRANT, seen.run))
        plan, grant = (granted, GRANT) if granted["chosen"] else (plan, None)
    found = {
        "waiting": round(waiting, 3), "recorded_equal": seen.lines == plain.lines, "planned": plan["chosen"],
        "grant": grant or "none",
    }  # fmt: skip
    if not plan["chosen"]:
        said = verdict(asked(sandbox, "why", seen.run)).partition("Fix: ")[2]
        return found | {"said": said, "met": found["recorded_equal"] and (own_workers or waiting < WAITING)}
    plains, applied = [], []
    for number in range(ROUNDS):
        plains.append(plainly(sandbox, f"plain-{number}"))
        applied.append(under_headway(sandbox, f"applied-{number}", "--apply", seen.run))
    gain, training = pair_medians(plains, applied)
    low, high = plan["interval"]
    lost = [text for after in applied for text in left(after.answer["applied"])]
    equal = all(after.lines == plain.lines for after in applied)
    return found | {
        "equal": equal, "lost": lost, "mean_loss": mean_loss(plain.lines), "with_plan": mean_loss(applied[0].lines),
        "predicted": round(plan["predicted_speedup"], 2), "interval": [round(low, 2), round(high, 2)],
        "measured": round(gain, 2), "training": round(training, 2), "inside": low <= gain <= high,
        "step_ms": [[round(1e3 * row.pace_s[0], 1) for row in rows] for rows in (plains, applied)],
        "met": found["recorded_equal"] and (equal or grant is not None) and training >= SLOWER,
    }  # fmt: skip


def pair_medians(plains: Sequence[Pass], applied: Sequence[Pass]) -> list[float]:
    """Return how many times as fast the median pair is, by a step and from the first update to the last."""
    pairs = [(plain.pace_s, after.pace_s) for plain, after in zip(plains, applied, strict=True)]
    return [statistics.median(before[which] / after[which] for before, after in pairs) for which in (0, 1)]


def mean_loss(lines: Sequence[str]) -> float:
    """Return the mean of all losses in the lines: the number behind each "loss"."""
    losses = [float(text) for line in lines for text in re.findall(r"loss:? +(\d[\d.e+-]*)", line, re.IGNORECASE)]
    return round(statistics.fmean(losses), 4)


def main() -> int:
    """Run the scripts; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts to run; all by default")
    parser.add_argument("--scripts", type=Path, default=os.environ.get("HEADWAY_WORLD_SCRIPTS"))
    parser.add_argument("--full", action="store_true", help="accepted; every script is always run")
    options = parser.parse_args()
    if not options.scripts:
        parser.error("--scripts DIR is missing: a folder with checkouts as DIR/owner/name")
    chosen = {name: pick(SCRIPTS, name, "script") for name in options.names} or SCRIPTS
    rows = {}
    for name, row in chosen.items():
        with tempfile.TemporaryDirectory(prefix="headway-scripts-") as folder:
            try:
                rows[name] = measure(row, Path(options.scripts), Path(folder), own_workers="workers" in name)
            except Exception as error:
                rows[name] = failed(error)
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    equal = [row for row in rows.values() if row.get("recorded_equal")]
    applied = [row for row in rows.values() if "inside" in row]
    inside = [row for row in applied if row["inside"]]
    met = all(row["met"] for row in rows.values()) and len(inside) >= 0.8 * len(applied)
    print(json.dumps({
        "bench": "public_scripts", "scripts": len(rows), "recorded_equal": len(equal),
        "applied": len(applied), "inside_interval": len(inside), "rows": rows,
        "baseline": "the script without headway", "claim": "a remedy where a loader waits, losses as promised",
        "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
