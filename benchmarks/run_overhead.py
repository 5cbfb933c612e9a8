"""CPU time of a whole training loop that is recorded, deep windows included, against the same loop bare.

Claim: at steps of 5 ms or more the process takes at most 2 % more CPU time, all of its threads counted. Two processes
side by side differ by several percent for no reason of headway's, so each part is measured within one. What is always
on: the recording is switched on and off in turns in one process, and what the calls that it acts on take more is set
against the whole step. What windows cost: a run with its usual windows, in which the steps around each window are the
peer of those in it and right after it. The claim holds if the sum and twice its standard error stay below the bar.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT
from _noise import middle_mean, standard_error

JOB = ROOT / "benchmarks" / "jobs" / "steady.py"
LIMIT = 0.02
WINDOW, AFTER, AROUND = 4, 12, 40
"""Steps of a window and the one before, steps after it in which a thread still writes, and steps around all of them."""


def job(folder: Path, steps: int, *more: object, launcher: tuple[str, ...] = ()) -> dict[str, list]:
    """Run the job and return its answer."""
    answer = folder / "answer.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(JOB), str(steps), str(answer), *map(str, more)]
    subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True, timeout=600)
    return json.loads(answer.read_text())


def always_on(folder: Path, steps: int) -> tuple[float, float]:
    """Return the CPU nanoseconds that recording adds to a step, and their standard error."""
    added = [ours - bare for bare, ours in job(folder, steps, "--turns", folder)["cpu_ns"][2:]]
    return middle_mean(added), standard_error(middle_mean, added)


def windows_cost(folder: Path, steps: int) -> tuple[float, float, int, float]:
    """Run once with windows; returns their share of the CPU time, its error, their number, and the CPU ns of a step."""
    run = folder / "run"
    answer = job(folder, steps, launcher=("-m", "headway.cli", "run", "--quiet", "--out", str(run), "--"))
    costs, first = answer["cpu_ns"], window_steps(run)
    inside = {start: range(max(start - 1, 0), min(start - 1 + WINDOW + AFTER, steps)) for start in first}
    taken = {step for found in inside.values() for step in found}
    extra = []
    for found in inside.values():
        near = range(max(found.start - AROUND, 8), min(found.stop + AROUND, steps))
        usual = statistics.mean(costs[step] for step in near if step not in taken)
        extra.append(sum(costs[step] - usual for step in found))
    whole = sum(costs) - sum(extra)
    error = standard_error(sum, extra) / whole if len(extra) > 1 else float("inf")
    return sum(extra) / whole, error, len(first), whole / steps


def window_steps(run: Path) -> list[int]:
    """Return the first step of each window."""
    from headway.trace.recording.runs import Run

    trace = Run.open(run).trace
    return sorted(trace.events["step"][trace.named("window")].tolist())


def main() -> int:
    """Measure both parts; print one JSON line."""
    alternated, steps = (17_600, 8000) if "--full" in sys.argv else (4400, 2000)
    with tempfile.TemporaryDirectory() as folder:
        added_ns, added_error_ns = always_on(Path(folder), alternated)
        windows, windows_error, num_windows, step_ns = windows_cost(Path(folder), steps)
    recording, recording_error = added_ns / step_ns, added_error_ns / step_ns
    overhead, error = recording + windows, (recording_error**2 + windows_error**2) ** 0.5
    ok = overhead + 2 * error <= LIMIT and step_ns >= 5e6
    print(json.dumps({
        "bench": "run_overhead", "step_cpu_ms": round(step_ns / 1e6, 2), "overhead": round(overhead, 4),
        "standard_error": round(error, 4), "added_us": [round(added_ns / 1e3, 1), round(added_error_ns / 1e3, 1)],
        "always_on": [round(recording, 4), round(recording_error, 4)],
        "windows": [round(windows, 4), round(windows_error, 4)], "num_windows": num_windows,
        "peer": "the same process while it is not recorded", "claim": "<= 2 %, twice the error included", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
