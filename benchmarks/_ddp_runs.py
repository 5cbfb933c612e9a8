"""Recorded and timed runs of benchmarks/jobs/ddp_steps.py, two ranks, behind a token bucket or on plain loopback."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import _link
import numpy as np

from headway.trace.recording.runs import Run

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "jobs" / "ddp_steps.py"
MODELS = ("mlp", "conv", "transformer")
RATE_MBIT = 1500.0
"""Link of the namespace: 10 to 13 MB of gradients take longer than the small networks compute."""


def record(model: str, out: Path, *, rate_mbit: float | None, steps: int) -> Run:
    """Record one run of `steps` steps with many deep windows; `rate_mbit` None = plain loopback."""
    command = [
        sys.executable, "-m", "headway.cli", "run", "--quiet", "--nproc-per-node", 2, "--windows", 0.4, "--out", out,
        "--", JOB, "--model", model, "--steps", steps,
    ]  # fmt: skip
    _run(command, rate_mbit)
    return Run.open(out)


def time_settings(
    model: str, settings: list[dict[str, Any]], folder: Path, *, rounds: int, steps: int, rate_mbit: float | None
) -> list[list[float]]:
    """Return, per setting and round, the median seconds of a step; settings take turns in one process."""
    given, answer = folder / "settings.json", folder / "answer.json"
    given.write_text(json.dumps(settings))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, JOB, "--model", model,
        "--steps", steps, "--rounds", rounds, "--settings", given, "--answer", answer,
    ]  # fmt: skip
    _run(command, rate_mbit)
    return [[statistics.median(block) for block in blocks] for blocks in json.loads(answer.read_text())]


def around_windows_s(run: Run, count: int) -> list[float]:
    """Return, for each of the newest `count` windows, the median seconds of the unprofiled steps next to it.

    Ten on either side: other work on the host comes and goes, and both meet the same.
    """
    rows = run.trace.select(ranks=[0])
    windows = rows.where(rows.named("window")).events["start_ns"][-count:]
    steps = unprofiled_s(run)
    moments = np.array([moment for _, moment in steps])
    found = []
    for window in windows.tolist():
        at = int(np.searchsorted(moments, window))
        found.append(statistics.median(seconds for seconds, _ in steps[max(0, at - 10) : at + 10]))
    return found


def unprofiled_s(run: Run, *, warm: int = 8) -> list[tuple[float, int]]:
    """Return (seconds, moment in ns) of the steps of rank 0 that no window touches, nor its opening or writing."""
    rows = run.trace.select(ranks=[0])
    steps, windows = rows.where(rows.named("step")).events, rows.where(rows.named("window")).events
    start, duration = steps["start_ns"], steps["duration_ns"]
    first = np.searchsorted(start, windows["start_ns"] - 1_000_000)
    last = np.searchsorted(start, windows["start_ns"] + windows["duration_ns"] - 1_000_000)
    touched = {step for a, b in zip(first, last, strict=True) for step in range(a - 1, b + 3)}
    return [(float(duration[i]) / 1e9, int(start[i])) for i in range(warm, len(start)) if i not in touched]


def _run(command: list[Any], rate_mbit: float | None) -> None:
    """Run the command, behind a link of that rate if one is given; raises with its output when it fails."""
    texts = [str(part) for part in command]
    line = texts if rate_mbit is None else _link.throttled(texts, rate_mbit)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} exited with {done.returncode}:\n{done.stderr[-3000:]}")
