"""Checks of on_device.py whose jobs are models: what a deep window says of them, and what recording adds to a step.

`window truth JOB`: the share of the steps in which the device was at work, by the ledger with and without a window, is
within 3 points of the kernels' time, as CUPTI tells it in a run of its own, over the wall of the steps that nobody
profiled; or the rest is named unknown. `overhead`: FSDP2, DDP on one rank and a plain loop, with recording on and off
by turns in one process group.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._command import ROOT
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.runtime.in_rank.device_checks import NotAskedError
from headway.trace.events.intervals import merged
from headway.trace.recording.runs import Run
from tests.recorded_device import options_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.on_device import Host

MODELS = {"transformer": 64, "lstm": 240, "unet": 240, "graph": 160}
"""Job of jobs/device_models.py -> its steps."""

EMULATED: dict[str, dict[str, float]] = {
    "transformer": {"forward_ms": 6, "backward_ms": 12, "update_ms": 2},
    "lstm": {"forward_ms": 0.6, "backward_ms": 1.2, "update_ms": 0.2, "launches": 100},
    "unet": {"forward_ms": 2, "backward_ms": 4, "update_ms": 0.5},
    "graph": {"forward_ms": 2, "backward_ms": 4, "update_ms": 1, "depth": 24},
}
"""The same -> what its device does on the emulated accelerator, by options of tests/accelerator.py."""

WARM = 16
"""First steps, of which nothing is asked: libraries are loaded and the launch queue fills."""

KINDS = ("plain", "ddp", "fsdp2")
LIMIT_US, LIMIT_SHARE = 60.0, 0.01
TURN_S = 8.0
"""Time for the turns of one kind, five pairs at least."""


def window_truth(name: str) -> Callable[[Host], dict[str, Any]]:
    """Return the check of one job."""

    def look(host: Host) -> dict[str, Any]:
        """Record the job without a window and with one, and profile it in a third run that headway has no part in."""
        steps = MODELS[name]
        script = ["benchmarks.jobs.device_models", name, "--steps", str(steps), "--turn", f"{host.folder}/turn"]
        work = host.folder / "kernels"

        def recorded(*words: str) -> Path:
            if not host.pretend:
                return host.run(script, *words)[0]
            # A profiled step takes 1.5 times as long; each run is held against the work of its own device.
            truth = host.folder / ("work-window" if words else "work-events")
            under = ["tests.accelerator", "--truth", str(truth), "--profiler", "0.5", *options_of(EMULATED[name])]
            path = str(ROOT / "benchmarks/jobs/device_models.py")
            return host.run([*under, "--", path, *script[1:], "--small"], *words, stand_in=False)[0]

        def profiled() -> Path:
            command = [sys.executable, "-m", *script, "--kernels", str(work)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{command} exited with {done.returncode}: {done.stderr[-1500:]}")
            return work

        jobs = [recorded, lambda: recorded("--window-at", f"{steps // 2}")]
        events, window = host.jobs(*jobs, *([] if host.pretend else [profiled]))[:2]
        rows, met = {}, True
        for key, run in (("events", events), ("window", window)):
            kernels_ns = kernel_ns(host.folder / f"work-{key}-0.json" if host.pretend else work, steps)
            rows[key] = shares(Ledger.of(Run.open(run)), kernels_ns)
            points = 100 * (rows[key]["useful"] - rows[key]["truth"])
            met = met and -3 - 100 * rows[key]["unknown"] <= points <= 3
        taken = len(sorted((window / "windows").glob("r0-w*")))
        return {**rows, "windows": taken, "met": met}

    return look


def kernel_ns(path: Path, steps: int) -> float:
    """Return how long kernels ran in a step, by what a profiled run, or an emulated device, wrote."""
    found = json.loads(path.read_text())
    if not found["work"]:
        raise NotAskedError("the profiler shows no kernel of the device")
    start, end = merged(*np.array(found["work"], np.int64).T)
    return float((end - start).sum()) / found.get("steps", steps)


def shares(ledger: Ledger, kernels_ns: float) -> dict[str, Any]:
    """Return the shares of buckets in the steps behind the warm ones that no window disturbed, and the true one."""
    taken = np.arange(len(ledger.step_wall_ns)) >= WARM
    taken[-1] = False  # it waits for all that the device has left
    if ledger.undisturbed is not None:
        taken &= ledger.undisturbed
    # Means, on both sides: where the host gets ahead some steps are short, and those that wait for the queue are long.
    # While it gets ahead its steps are shorter than the device's, which then is at work all the time.
    wall_ns = float(ledger.step_wall_ns[taken].mean())
    found = dict(zip(BUCKETS, (ledger.step_ns[:, taken].mean(axis=1) / wall_ns).tolist(), strict=True))
    return {
        **{bucket: round(found[bucket], 3) for bucket in ("useful", "unknown", "host", "input")},
        "truth": round(min(kernels_ns / wall_ns, 1.0), 3), "steps": int(taken.sum()),
        "wall_us": round(wall_ns / 1e3, 1), "kernels_us": round(kernels_ns / 1e3, 1),
        "basis": ledger.basis.get("useful", ""),
    }  # fmt: skip


def overhead(host: Host) -> dict[str, Any]:
    """Recording adds at most 1 % of a step, or 60 us, to its wall; on the emulated device to the thread's CPU time."""
    job = [sys.executable, str(ROOT / "benchmarks" / "jobs" / "cost_kinds.py")]
    env = {**os.environ, "JOB_OUT": str(host.folder)}
    place = ["cpu"] if host.pretend else ["cuda"]
    done = subprocess.run(
        [*job, ",".join(KINDS), "5", *place, f"{TURN_S}"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{job} ended with {done.returncode}: {done.stderr[-1500:]}")
    rows, met = {}, True
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        each = [row[2 if host.pretend else 3] - row[0 if host.pretend else 1] for row in answer["rows"]]
        bare = statistics.median(row[0 if host.pretend else 1] for row in answer["rows"])
        cpu = statistics.median(row[2] - row[0] for row in answer["rows"])
        added, quartiles = statistics.median(each), statistics.quantiles(each, n=4)
        held = added <= max(LIMIT_US, LIMIT_SHARE * bare) and answer["losses"] == 1
        rows[answer["kind"]] = {
            "step_us": round(bare, 1), "added_us": round(added, 1), "added": round(added / bare, 4),
            "quartiles_us": [round(quartiles[0], 1), round(quartiles[2], 1)], "cpu_us": round(cpu, 1),
            "pairs": len(each), "losses": answer["losses"], "met": held,
        }  # fmt: skip
        met = met and held
    return {**rows, "met": met and len(rows) == len(KINDS)}
