"""The filler beside a job that alternates between computing and waiting for storage: the swing of their CPU time.

Claim: over 10 interleaved rounds, the 95th less the 5th percentile of the job's and its filler's CPU time per 100 ms
falls by at least 50 %, steps slow by at most 5 %, and the predicted swing is within 20 % of the measured one; a filler
that is killed changes nothing for the job. Peer: the same job without a filler. CPU time stands in for power: there is
no meter. Takes 5 minutes: each round is two recorded runs.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _command import headway

from headway.cost.power import PowerModel
from headway.power.smoothing import fill, of_run
from headway.trace.recording.runs import Run

JOB = Path(__file__).with_name("jobs") / "alternating.py"
PARAMETERS = {"on_after_s": 0.01, "off_within_s": 0.005, "level": 0.75}
ROUNDS, SAMPLE_S, REPEATS = 10, 0.1, 150


class Sampler(threading.Thread):
    """Notes every 100 ms how much CPU time the job and its filler have had so far."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.over = run, threading.Event()
        self.rows: list[tuple[float, float]] = []

    def run(self) -> None:
        """Sample until told to stop."""
        due = time.perf_counter()
        while not self.over.is_set():
            pids = [row["facts"]["pid"] for row in read(self.run_folder / "applied/r0.json").get("remedies", [])]
            pids += [read(self.run_folder / "job.json").get("pid", 0)]
            self.rows.append((time.perf_counter(), sum(cpu_s(pid) for pid in pids)))
            due += SAMPLE_S
            self.over.wait(max(due - time.perf_counter(), 0.0))


def read(path: Path) -> dict:
    """Return a JSON object, empty where there is none yet."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process so far; 0 where it is gone."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def swing(samples: np.ndarray) -> float:
    """Return the 95th less the 5th percentile."""
    return float(np.subtract(*np.percentile(samples, [95, 5])))


def one_run(folder: Path, *, filled: bool, kill: bool = False) -> tuple[float, float, Path]:
    """Run the job; returns the swing of CPU seconds per 100 ms, the mean step and the run folder."""
    run = folder / f"run{len(list(folder.iterdir()))}"
    plan = folder / "plan.json"
    remedies = [{"name": "power.filler", "parameters": PARAMETERS}]
    plan.write_text(json.dumps({"schema": "headway.plan-file/1", "remedies": remedies}))
    sampler = Sampler(run)
    sampler.start()
    if kill:
        threading.Thread(target=kill_filler, args=(run,), daemon=True).start()
    apply = ["--apply", plan] if filled else []
    headway("run", "--out", run, *apply, "--", JOB, run / "job.json", REPEATS)
    sampler.over.set()
    sampler.join()
    steps = np.array(read(run / "job.json")["times"])
    at, used = np.array(sampler.rows).T
    inside = (at[:-1] >= steps[1, 0]) & (at[1:] <= steps[-1, 2])
    per_sample = (np.diff(used) / np.diff(at) * SAMPLE_S)[inside]
    return swing(per_sample), float(np.diff(steps[1:, 0]).mean()), run


def kill_filler(run: Path) -> None:
    """Kill the filler half-way through."""
    while not (pids := [row["facts"]["pid"] for row in read(run / "applied/r0.json").get("remedies", [])]):
        time.sleep(0.05)
    time.sleep(4.0)
    os.kill(pids[0], signal.SIGKILL)


def predicted(run: Path) -> float:
    """Return the swing that the model expects with a filler, from a run without one: one core instead of a device."""
    recorded = Run.open(run)
    wave = of_run(recorded.parts, PowerModel(0.0, 1.0, tau_s=0.0), devices=1, step_s=0.001)
    filled, _ = fill(wave.power_w, 0.001, level_w=PARAMETERS["level"], on_after_s=PARAMETERS["on_after_s"])
    size = round(SAMPLE_S / 0.001)
    steps = filled[len(filled) // len(read(run / "job.json")["times"]) :]
    return swing(steps[: len(steps) // size * size].reshape(-1, size).mean(axis=1)) * SAMPLE_S


def main() -> int:
    """Compare and print one JSON line; 3 when the claim does not hold."""
    before, after, slow, model = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(ROUNDS):
            order = (False, True) if number % 2 else (True, False)
            found = {filled: one_run(folder, filled=filled) for filled in order}
            before.append(found[False][0])
            after.append(found[True][0])
            slow.append(found[True][1] / found[False][1])
            model.append(predicted(found[False][2]))
        _, _, run = one_run(folder, filled=True, kill=True)
        finished = read(run / "run.json")["exit"]
    fall = 1 - statistics.median(after) / statistics.median(before)
    error = statistics.median(model) / statistics.median(after) - 1
    ok = fall >= 0.5 and statistics.median(slow) <= 1.05 and abs(error) <= 0.2 and finished["code"] == 0
    print(json.dumps({
        "bench": "power_filler", "rounds": ROUNDS, "swing_before_ms": round(1e3 * statistics.median(before), 1),
        "swing_after_ms": round(1e3 * statistics.median(after), 1), "fall_fraction": round(fall, 3),
        "swing_after_range_ms": [round(1e3 * min(after), 1), round(1e3 * max(after), 1)],
        "predicted_ms": round(1e3 * statistics.median(model), 1), "prediction_error_fraction": round(error, 3),
        "step_time_factor": round(statistics.median(slow), 4),
        "factor_range": [round(min(slow), 3), round(max(slow), 3)],
        "killed_filler_exit": finished["code"], "baseline": "the same job without a filler",
        "claim": ">=.5 less swing, <=1.05 steps, prediction within 20 %", "ok": bool(ok),
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
