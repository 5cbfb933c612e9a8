"""What saving behind the steps wins, and how well that was predicted: record, predict, apply, measure.

Claim: over jobs with small and large states, one and two ranks, dcp.save and torch.save, the predicted step time is
within 10 % of the measured one in the median, and the sign of the gain is right in all of them. Peer: the same
unmodified script without the remedy, interleaved. Scripts that call torch.save are changed by hand to
headway.Checkpointer, as they are told to; all others are run with --apply. The accelerator is a sleep, but in the jobs
that compute on the host's cores. What both sides wrote last must load bit-equal.
"""

import json
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _command import ROOT, headway

JOB = ROOT / "benchmarks" / "jobs" / "saving.py"
CASES = {
    "dcp.save, 80 MB": (1, "--save dcp --state-mb 80 --every 30 --steps 121 --accelerator-ms 20"),
    "dcp.save, 16 MB, often": (1, "--save dcp --state-mb 16 --every 20 --steps 241 --accelerator-ms 10"),
    "dcp.save, two ranks": (2, "--save dcp --state-mb 60 --every 25 --steps 126 --accelerator-ms 20"),
    "torch.save, 80 MB": (1, "--save torch --state-mb 80 --every 10 --steps 151 --accelerator-ms 20"),
}
"""Job -> its ranks and options."""

MORE = {
    "dcp.save, 1 MB, rarely": (1, "--save dcp --state-mb 1 --every 200 --steps 201 --accelerator-ms 10"),
    "dcp.save, computing on a core": (1, "--save dcp --state-mb 80 --every 30 --steps 121 --compute-ms 20"),
    "dcp.save, two ranks computing": (2, "--save dcp --state-mb 60 --every 30 --steps 91 --compute-ms 20"),
    "dcp.save, 400 MB": (1, "--save dcp --state-mb 400 --every 80 --steps 161 --accelerator-ms 20"),
    "torch.save, 8 MB, often": (1, "--save torch --state-mb 8 --every 5 --steps 201 --accelerator-ms 5"),
}
"""The same for --full."""

ROUNDS, FULL_ROUNDS = 1, 3
MOST_ERROR = 0.10


def run(folder: Path, name: str, ranks: int, options: str, *more: object) -> float:
    """Run the job once; return its steps per second."""
    (folder / f"{name}-saved").mkdir()
    os.sync()  # what the run before has left to be written is not this one's to wait for
    launched = ("run", "--windows", 0, "--nproc-per-node", ranks, "--out", folder / name, *more)
    answer = headway(*launched, "--", JOB, folder / f"{name}-saved", *options.split())
    return float(answer["steps_per_s"])


def saved(place: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last save in a folder, whoever wrote it, by torch's own means."""
    last = max(place.glob("step-*"), key=lambda path: int(path.stem.partition("-")[2]))
    if last.is_file():
        content = torch.load(last)
        return {f"model.{name}": tensor for name, tensor in content["model"].items()}
    facts = dcp.FileSystemReader(last).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(row.size, dtype=row.properties.dtype)
        for name, row in facts.items() if hasattr(row, "size") and name.startswith("model.")
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=last)
    return found


def measure(ranks: int, options: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Record, predict, apply and measure one job; return predicted and measured gains."""
    plain = [run(folder, "plain-0", ranks, options)]
    planned = headway("plan", folder / "plain-0", "--allow", "result-equivalent", "-o", folder / "plan.json")
    rows = [row for row in planned["proposals"] if row["name"] == "checkpoint.async"]
    row = rows[0] if rows else None
    if row is None or row["predicted_speedup"] < 1.02 or (row["applies"] and not planned["chosen"]):
        return {"predicted": 1.0, "measured": 1.0, "applied": "nothing"}
    more: tuple[object, ...] = ("--apply", folder / "plan.json")
    changed = options
    if not row["applies"]:
        more = ()
        changed += f" --save checkpointer --every {row['parameters']['every_steps']}"
    ours = []
    for number in range(rounds):
        if number:
            plain.append(run(folder, f"plain-{number}", ranks, options))
        ours.append(run(folder, f"ours-{number}", ranks, changed, *more))
    theirs, mine = saved(folder / "plain-0-saved"), saved(folder / "ours-0-saved")
    assert set(theirs) == set(mine), f"one has other tensors: {set(theirs) ^ set(mine)}"
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs), "saved states differ"
    return {
        "predicted": row["predicted_speedup"],
        "interval": row["interval"],
        "measured": statistics.median(mine / base for base, mine in zip(plain, ours, strict=True)),
        "applied": "--apply" if more else f"by hand, every {row['parameters']['every_steps']} steps",
    }


def main() -> int:
    """Measure every job; print one JSON line."""
    full = "--full" in sys.argv
    rows = {}
    for name, (ranks, options) in (CASES | MORE if full else CASES).items():
        with tempfile.TemporaryDirectory(prefix="headway-gain-") as folder:
            rows[name] = measure(ranks, options, FULL_ROUNDS if full else ROUNDS, Path(folder))
        print(name, rows[name], file=sys.stderr)
    tried = {name: row for name, row in rows.items() if row["applied"] != "nothing"}
    # Step time after = step time before / speed-up, so the ratio of step times is that of the speed-ups.
    errors = {name: abs(row["measured"] / row["predicted"] - 1) for name, row in tried.items()} or {"none": 1.0}
    gains = sorted(row["measured"] for row in tried.values()) or [1.0]
    wrong = [name for name, row in tried.items() if (row["measured"] > 1) != (row["predicted"] > 1)]
    # A gain that is not clear of its own uncertainty is not applied: such a job proves nothing.
    met = len(tried) > len(rows) / 2 and statistics.median(errors.values()) <= MOST_ERROR and not wrong
    print(json.dumps({
        "bench": "checkpoint_gain", "ratio": round(statistics.median(gains), 3),
        "ratio_range": [round(gains[0], 3), round(gains[-1], 3)],
        "median_error": round(statistics.median(errors.values()), 4), "max_error": round(max(errors.values()), 4),
        "wrong_sign": wrong, "jobs": len(tried), "left_alone": len(rows) - len(tried),
        "rows": {name: {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
                 for name, row in rows.items()},
        "baseline": "the same script without the remedy, interleaved",
        "claim": "step time predicted within 10 % in the median, every sign right", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
