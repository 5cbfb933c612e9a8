"""CPU time of a whole training loop under `headway run`, deep windows included, against the same loop alone.

Claim: at steps of 5 ms or more the loop takes at most 2 % more CPU time, all threads of the process counted. Peer: the
script without headway, in interleaved rounds; each side is judged by its cheaper half of rounds, since noise only adds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

from _command import ROOT

JOB = ROOT / "benchmarks" / "jobs" / "steady.py"
ROUNDS = 12


def measured(command: list[str]) -> dict[str, float]:
    """Run the job and return what it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith('{"cpu_s"')]
    result: dict[str, float] = json.loads(lines[0])
    return result


def cheaper_half(rows: list[dict[str, float]]) -> float:
    """Return the mean CPU seconds of the cheaper half of the rounds."""
    return statistics.mean(sorted(row["cpu_s"] for row in rows)[: ROUNDS // 2])


def main() -> int:
    """Interleave both sides; print one JSON line."""
    plain, recorded = [], []
    for _round in range(ROUNDS):
        plain.append(measured([sys.executable, str(JOB)]))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", f"{folder}/run", "--", str(JOB)]
            recorded.append(measured(command))
    ratios = sorted(b["cpu_s"] / a["cpu_s"] for a, b in zip(plain, recorded, strict=True))
    ratio = cheaper_half(recorded) / cheaper_half(plain)
    step_s = statistics.median(row["wall_s"] / row["steps"] for row in plain)
    ok = ratio <= 1.02 and step_s >= 0.005
    print(json.dumps({
        "bench": "run_overhead", "step_s": round(step_s, 5), "ratio": round(ratio, 4),
        "median_ratio": round(statistics.median(ratios), 4), "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
        "peer": "the script without headway", "claim": "<= 1.02 at steps >= 5 ms", "ok": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
