"""Three jobs on a quiet host and beside busy processes: does `why` say the same of the job, and who took the cores?

Claim: of a job whose examples sleep, one whose examples compute and one that computes itself, five runs beside one busy
process and five beside three say the same first cause and remedy as the quiet runs, or `host.cpu_wait` first and that
cause next; the median of `useful` is within 10 % of the quiet one's, or of what the script computes in its training
thread without headway beside as many busy processes (`jobs/sampled.py`): cold caches make the same steps dearer. Peers:
the quiet runs and that script, in turns with the others. `--full` takes five rounds, else one.
Usage: `python benchmarks/busy_host.py [--full]`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _command import ROOT, headway
from _other_load import spinning

JOB = ROOT / "benchmarks" / "jobs" / "small_scripts.py"
SAMPLED = ROOT / "benchmarks" / "jobs" / "sampled.py"
JOBS = {
    "examples sleep": ("--sleep-ms", "2", "--batch", "16", "--examples", "640"),
    "examples compute": ("--work-ms", "1", "--batch", "16", "--examples", "640"),
    "computes itself": ("--width", "2048", "--batch", "64", "--examples", "6400", "--epochs", "1"),
}
BESIDE = (0, 1, 3)
"""Busy processes beside the job."""

CLOSE = 0.10
WAITS = "host.cpu_wait"


def told(arguments: tuple[str, ...], busy: int, folder: Path) -> dict[str, Any]:
    """Record one run beside `busy` processes; return what `why` says."""
    run_beside(busy, "-m", "headway.cli", "run", "--quiet", "--out", str(folder), "--", str(JOB), *arguments)
    why = headway("why", folder)
    causes = [f"{row['cause']}: {remedy_in(row)}" for row in why["causes"]]
    waits_first = any(cause.startswith(WAITS) for cause in causes[:1])
    plain = run_beside(busy, str(SAMPLED), str(JOB), *arguments)
    computed_s = json.loads(plain.splitlines()[-1])["computed_s"]
    return {
        "causes": causes, "waits_first": waits_first, "useful_s": why["ledger"]["useful"], "computed_s": computed_s,
    }  # fmt: skip


def run_beside(busy: int, *command: str) -> str:
    """Run Python beside `busy` processes; return what it prints."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with spinning(float(busy)):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300
        )
    return done.stdout


def remedy_in(row: dict[str, Any]) -> str:
    """Return the remedy of a cause; what says `num_workers` by hand is `data.workers` to whom the job is too short."""
    named = (row["fix"] or "").split(":")[0]
    return "data.workers" if not row["remedy"] and "num_workers=" in row["fix"] else named


def is_same(row: dict[str, Any], usual: str) -> bool:
    """Say whether a busy run names what the quiet ones name, behind the waiting for cores where that is first."""
    return first_of(row) == usual


def first_of(row: dict[str, Any]) -> str:
    """Return the first cause besides waiting for cores; 'none' without one."""
    return next((cause for cause in row["causes"] if not cause.startswith(WAITS)), "none")


def measured(arguments: tuple[str, ...], rounds: int, folder: Path) -> dict[str, Any]:
    """Run one job in turns on a quiet host and beside others; return what differs."""
    rows: dict[int, list[dict[str, Any]]] = {busy: [] for busy in BESIDE}
    for number in range(rounds):
        for busy in BESIDE:
            rows[busy].append(told(arguments, busy, folder / f"{number}-{busy}"))
    usual = Counter(first_of(row) for row in rows[0]).most_common(1)[0][0]
    useful, computed = (
        {busy: statistics.median(row[name] for row in rows[busy]) for busy in BESIDE}
        for name in ("useful_s", "computed_s")
    )
    return {
        "cause": usual,
        "same": {busy: sum(is_same(row, usual) for row in rows[busy]) for busy in BESIDE},
        "useful_s": {busy: round(value, 3) for busy, value in useful.items()},
        "useful_ratio": {busy: round(value / useful[0], 3) for busy, value in useful.items()},
        "computed_s": {busy: round(value, 3) for busy, value in computed.items()},
        "of_computed": {busy: round(value / computed[busy], 3) for busy, value in useful.items()},
        "others": sorted({first_of(row) for busy in BESIDE for row in rows[busy]} - {usual}),
        "waits_first": {busy: sum(row["waits_first"] for row in rows[busy]) for busy in BESIDE},
    }


def main() -> int:
    """Run the jobs; print one JSON line."""
    rounds = 5 if "--full" in sys.argv else 1
    rows = {}
    with tempfile.TemporaryDirectory(prefix="headway-busy-") as temporary:
        for name, arguments in JOBS.items():
            rows[name] = measured(arguments, rounds, Path(temporary) / name.replace(" ", "-"))
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    met = all(
        row["same"][busy] == rounds
        and min(abs(row[name][busy] - 1) for name in ("useful_ratio", "of_computed")) <= CLOSE
        for row in rows.values()
        for busy in BESIDE
    )
    print(json.dumps({
        "bench": "busy_host", "rounds": rounds, "rows": rows, "peer": "the quiet runs; the script without headway",
        "claim": "the same first cause, or waiting for cores first; useful within 10 % of a peer", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
