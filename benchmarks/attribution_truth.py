"""Where the time went, against a job that knows: mixes of input sleep and work, saves, logs, garbage, a slow rank.

Claim: in every mix, each bucket of the ledger that holds an injected cost (input, checkpoint, straggler; logging and
garbage collection apart) is within 2 points of device wall of the seconds that the job itself measured, and at most
2 % is unknown. What a rank waits for a slower one is measured by the job too: the clock at each rank's backward. Peer:
TraceML 0.5.0 on the same mix, annotated as it asks for; it names one verdict and books no seconds, so that only its
verdict stands beside ours. Two mixes by default, 20 with --full; --no-peer leaves TraceML out.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT, headway
from peers.env import python_of

JOBS = ROOT / "benchmarks" / "jobs"
BAR = 0.02
RANKS = 2
CHECKED = ("input", "checkpoint", "straggler", "host.logging", "host.gc")
CAUSE_OF = {
    "input_sleep_s": "input.fetch", "input_work_s": "input.prep", "save_s": "checkpoint.stall",
    "log_s": "host.logging", "gc_s": "host.gc", "slow_s": "straggler.rank",
}  # fmt: skip


def mix(seed: int) -> list[str]:
    """Return the job's options of one mix: each cost is there with probability 0.6."""
    rng = random.Random(seed)
    options = ["--epochs", "1", "--examples", "640", "--accelerator-ms", f"{rng.uniform(5, 15):.1f}"]
    costs = {
        "--sleep-ms": (0.3, 2.5), "--work-ms": (0.1, 0.8), "--save-ms": (20, 90), "--log-ms": (1, 8),
        "--garbage": (50_000, 400_000), "--slow-ms": (3, 15),
    }  # fmt: skip
    for name, (low, high) in costs.items():
        if rng.random() < 0.6:
            value = rng.uniform(low, high)
            options += [name, str(round(value)) if name == "--garbage" else f"{value:.2f}"]
    return [*options, "--save-every", str(rng.randint(8, 20)), "--gc-every", str(rng.randint(5, 12)),
            "--slow-rank", str(rng.randrange(RANKS))]  # fmt: skip


def truth_of(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the job's own device-seconds by bucket, and by injected cost."""
    ranks = [json.loads((folder / f"truth-{rank}.json").read_text()) for rank in range(RANKS)]
    spent = {cost: sum(rank[cost] for rank in ranks) for cost in CAUSE_OF}
    arrived = zip(*(rank["arrived_s"] for rank in ranks), strict=True)
    waited = sum(max(times) - moment for times in arrived for moment in times)
    truth = {
        "input": spent["input_sleep_s"] + spent["input_work_s"], "checkpoint": spent["save_s"], "straggler": waited,
        "host.logging": spent["log_s"], "host.gc": spent["gc_s"],
    }  # fmt: skip
    return truth, spent


def one(seed: int, folder: Path) -> dict:
    """Run one mix and compare."""
    options = mix(seed)
    folder.mkdir()
    headway("run", "--nproc-per-node", RANKS, "--out", folder / "run", "--", JOBS / "injected.py", *options, "--truth",
            folder)  # fmt: skip
    why = headway("why", folder / "run")
    truth, spent = truth_of(folder)
    booked = {**why["ledger"], **{line: why["sub"].get(line, 0.0) for line in ("host.logging", "host.gc")}}
    assert sum(why["ledger_ns"].values()) == why["devices"] * why["wall_ns"], "the ledger does not add up"
    wall_s = why["devices"] * why["wall_s"]
    largest = CAUSE_OF[max(spent, key=lambda cost: spent[cost])] if any(spent.values()) else None
    causes = [cause["cause"] for cause in why["causes"] if cause["cause"] in CAUSE_OF.values()]
    return {
        "seed": seed,
        "options": " ".join(options),
        "wall_s": round(wall_s, 3),
        "points_off": {name: round(100 * (booked[name] - truth[name]) / wall_s, 3) for name in CHECKED},
        "unknown": round(why["ledger"]["unknown"] / wall_s, 4),
        "largest_injected": largest,
        "ours": causes[0] if causes else None,
    }


def traceml(options: list[str], folder: Path) -> str:
    """Return TraceML's verdict on the same mix."""
    program = python_of("traceml").with_name("traceml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ["--mode", "summary", "--logs-dir", folder, "--run-name", "peer"]
    torchs = ["--nproc-per-node", RANKS, "--master-port", port]
    job = [JOBS / "injected_for_traceml.py", "--args", *options, "--truth", folder]
    command = [program, "run", *ours, *torchs, *job]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], env=env, capture_output=True, check=True, timeout=300, cwd=folder)
    return str(json.loads((folder / "peer" / "final_summary.json").read_text())["primary_diagnosis"]["status"])


def main() -> int:
    """Run the mixes, print one JSON line, and fail when a bucket is off by more than the bar."""
    count = 20 if "--full" in sys.argv else 2
    rows = []
    for seed in range(count):
        with tempfile.TemporaryDirectory() as name:
            row = one(seed, Path(name) / "ours")
            if "--no-peer" not in sys.argv:
                row["traceml"] = traceml(mix(seed), Path(name))
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    worst = [max(abs(points) for points in row["points_off"].values()) for row in rows]
    ok = max(worst) <= 100 * BAR and all(row["unknown"] <= BAR for row in rows)
    print(json.dumps({
        "bench": "attribution_truth", "mixes": count, "within_2_points": sum(points <= 100 * BAR for points in worst),
        "median_worst_points": round(statistics.median(worst), 3), "max_worst_points": round(max(worst), 3),
        "largest_named_first": sum(row["ours"] == row["largest_injected"] for row in rows),
        "peer": "traceml-ai 0.5.0 (verdict only)", "rows": rows, "claim": "every bucket within 2 points in every mix",
        "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
