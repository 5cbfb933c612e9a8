"""Twelve small scripts with real compute: is none slower with its plan, and does the predicted gain come true?

Claim: of scripts whose examples sleep, compute, or both, in plain, tiny and few batches and beside a busy process, none
takes longer with the plan of its recorded run than plainly, by more than 2 % of its training part (median of three
interleaved runs); where a gain of the whole job is promised it lies in its interval in four of five; and at least 1.1x
is promised wherever workers by hand win 1.2x, by the plan or, where trying a remedy costs more than a short job wins,
for the line that `why` prints to copy. Losses are equal to the digit. Peer: the script without headway, and with that
line's workers and threads by hand, else two workers. Usage: `python benchmarks/small_scripts.py [NAME ...]`.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import ROOT, headway
from _other_load import spinning

JOB = ROOT / "benchmarks" / "jobs" / "small_scripts.py"
ROUNDS = 3
KINDS = {"sleeps": (2.0, 0.0), "computes": (0.0, 1.0), "both": (1.0, 0.5)}
"""Kind -> ms that an example sleeps, and computes."""

SHAPES = {
    "plain": {"batch": 16, "examples": 640},
    "tiny": {"batch": 2, "examples": 480, "width": 256},
    "few": {"batch": 16, "examples": 320, "epochs": 1},
    "busy": {"batch": 16, "examples": 480},
}
"""How the batches are; 'busy': beside a process that takes a core."""

SCRIPTS = {f"{kind}, {shape}": (kind, shape) for kind in KINDS for shape in SHAPES}


def arguments(kind: str, shape: str) -> list[str]:
    """Return the script's arguments."""
    sleep_ms, work_ms = KINDS[kind]
    given = {"sleep-ms": sleep_ms, "work-ms": work_ms, **SHAPES[shape]}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def plain(*more: str) -> dict[str, float]:
    """Run the script without headway; return what it prints."""
    done = subprocess.run([sys.executable, JOB, *more], capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def under_headway(*more: object) -> dict[str, float]:
    """Run it under `headway run` on as many threads as torch takes by itself; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "headway.cli", "run", "--quiet", *map(str, more)],
        cwd=ROOT, env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(kind: str, shape: str, folder: Path) -> dict[str, Any]:
    """Record, plan, and run plainly, by hand and with the plan in turn; return the figures of one script."""
    given = arguments(kind, shape)
    with spinning(1.0 if shape == "busy" else 0.0):
        seen = under_headway("--out", folder / "seen", "--", JOB, *given)
        plan, line = headway("plan", folder / "seen"), by_hand(headway("why", folder / "seen"))
        match = re.search(r"num_workers=(\d+)", line["script"]) if line else None
        workers = int(match[1]) if match else 0 if line else 2
        fewer = re.search(r"set_num_threads\((\d+)\)", line["script"]) if line else None
        by_line = ("--workers", str(workers), *(("--threads", fewer[1]) if fewer else ()))
        rows: dict[str, list[float]] = {"plain": [], "hand": [], "applied": []}
        losses = {seen["loss"]}
        for number in range(ROUNDS):
            answers = {"plain": plain(*given), "hand": plain(*given, *by_line)}
            if plan["chosen"]:
                apply = ("--out", folder / f"applied-{number}", "--apply", folder / "seen")
                answers["applied"] = under_headway(*apply, "--", JOB, *given)
            for name, answer in answers.items():
                rows[name].append(answer["training_s"])
            losses |= {answer["loss"] for name, answer in answers.items() if name != "hand"}  # kept workers draw less
    medians = {name: statistics.median(times) for name, times in rows.items() if times}
    won = medians["plain"] / medians["hand"]
    gain = medians["plain"] / medians["applied"] if plan["chosen"] else None
    low, high = plan["job"]["interval"] if plan["chosen"] else (None, None)
    return {
        "planned": plan["chosen"], "equal": len(losses) == 1,
        "by_hand": round(won, 2), "workers": workers, "threads": int(fewer[1]) if fewer else None,
        "steps_per_s": round(plan["predicted_speedup"], 2) if plan["chosen"] else None,
        "predicted": round(plan["job"]["predicted_speedup"], 2) if plan["chosen"] else None,
        "interval": [round(low, 2), round(high, 2)] if plan["chosen"] else None,
        "measured": round(gain, 2) if gain else None,
        "inside": bool(gain and low <= gain <= high) if plan["chosen"] else None,
        "said_by_hand": round(line["predicted_speedup"], 2) if line else None,
        "interval_by_hand": [round(end, 2) for end in line["interval"]] if line else None,
        "inside_by_hand": bool(line["interval"][0] <= won <= line["interval"][1]) if line else None,
        "plain_s": round(medians["plain"], 2), "range_s": [round(min(rows["plain"]), 2), round(max(rows["plain"]), 2)],
    }  # fmt: skip


def by_hand(why: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first cause whose line of workers, or threads, pays by hand as `why` promises; None without one."""
    lines = re.compile(r"num_workers=|set_num_threads\(")
    rows = (row for row in why["causes"] if row["remedy"] == "" and lines.search(row["script"] or ""))
    return next((row for row in rows if not row["at_most"] and (row["interval"] or [0])[0] > 1), None)


def main() -> int:
    """Run the scripts; print one JSON line."""
    chosen = [name for name in sys.argv[1:] if name != "--full"] or list(SCRIPTS)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headway-small-") as temporary:
        for name in chosen:
            rows[name] = measured(*SCRIPTS[name], Path(temporary) / name.replace(", ", "-"))
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    applied = [row for row in rows.values() if row["planned"]]
    slower = [name for name, row in rows.items() if row["planned"] and row["measured"] < 0.98]
    inside = sum(row["inside"] for row in applied)
    said = {name: max(row["predicted"] or 1, row["said_by_hand"] or 1) for name, row in rows.items()}
    missed = [name for name, row in rows.items() if row["by_hand"] >= 1.2 and said[name] < 1.1]
    lines = [row["inside_by_hand"] for row in rows.values() if row["inside_by_hand"] is not None]
    unequal = [name for name, row in rows.items() if not row["equal"]]
    met = not slower and not missed and not unequal and inside >= 0.8 * len(applied) and sum(lines) >= 0.8 * len(lines)
    print(json.dumps({
        "bench": "small_scripts", "scripts": len(rows), "applied": len(applied), "inside_interval": inside,
        "lines": len(lines), "lines_inside": sum(lines),
        "slower": slower, "missed": missed, "unequal": unequal, "rows": rows, "peer": "without headway, and by hand",
        "claim": "none slower than .98x, >= 80 % inside, >= 1.1x promised where it waits", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
