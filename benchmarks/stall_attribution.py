"""Stalls attributed from one ordinary run, against DS-Analyzer's three measured phases, through headway's DataLoader.

Claim: for jobs bound by storage, by preparation and by compute, loaded by threads and by processes, fetch and prep
stall as `stalls.attribute` finds them by replay of one recorded run are, as shares of the epoch, within 3 % of what
three runs measure: examples that are there at once (T1), preparation only (T3), everything (T2), all through the
loader. Peer: the stalls that the parts of the loads would be without the overlap with compute. Measure on an idle host.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from ds_analyzer import BATCH_SIZE, EXAMPLE_BYTES, Examples, Storage, loader_of, train

from headway.data.stalls.model import attribute, from_phases
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions
from headway.sim.graph.intervals import MAX_DISCREPANCY
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run

JOBS = {
    "storage": (0.004, 0.002, 0.0003, 2), "preparation": (0.004, 0.0003, 0.003, 1), "compute": (0.03, 0.002, 0.0003, 2),
}  # fmt: skip
"""Bottleneck -> compute per step, time in the pipe and CPU time per example (s), workers."""
KINDS = ("threads", "processes")
ROUNDS = 3 if "--full" in sys.argv else 2
"""Times that each phase is measured; the fastest counts: other work on the host only adds."""


def main() -> None:
    """Attribute, measure, and print one JSON line."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows = [compared(kind, job, Path(folder)) for kind in KINDS for job in JOBS]
    errors = [missed(row, "") for row in rows]
    peer = [missed(row, "load_") for row in rows]
    result = {
        "bench": "stall_attribution", "points": len(rows),
        "median_error": statistics.median(errors), "max_error": max(errors),
        "baseline": "fetch and prep time of the loads per worker, overlap ignored",
        "baseline_max_error": max(peer), "claim": "<= 3 % of the epoch time", "met": max(errors) <= 0.03,
    }  # fmt: skip
    if "--rows" in sys.argv:
        result["rows"] = rows
    print(json.dumps(result))


def missed(row, how):
    """Return by how much a stall's share of the epoch, told one way, misses the measured one: the worse of the two."""
    own_s = row["attributed_step_s"] if not how else row["step_s"]
    return max(
        abs(row[f"{how}{part}_s"] / own_s - row[f"measured_{part}_s"] / row["step_s"]) for part in ("fetch", "prep")
    )


def compared(kind, job, folder):
    """Return the attributed stalls of one job beside the measured ones, per step."""
    compute_s, fetch_s, prep_s, workers = JOBS[job]
    report, program = attributed(kind, job, folder)

    def phase(**how):
        return [min(train(loader_of(kind, data(fetch_s, **how), workers), compute_s) for _ in range(ROUNDS))]

    nothing, prepared = phase(prep_s=0.0, reads=False), phase(prep_s=prep_s, reads=False)
    measured = from_phases(nothing, prepared, phase(prep_s=prep_s), warmup=0)
    return {
        "kind": kind, "job": job, "named": report.bottleneck,
        "step_s": measured.step_s, "attributed_step_s": report.step_s,
        "fetch_s": report.fetch_s, "prep_s": report.prep_s,
        "measured_fetch_s": measured.fetch_s, "measured_prep_s": measured.prep_s,
        "load_fetch_s": BATCH_SIZE * fetch_s / workers, "load_prep_s": BATCH_SIZE * prep_s / workers,
        "fidelity": program.fidelity,
    }  # fmt: skip


def attributed(kind, job, folder):
    """Record one run of a job and attribute its stalls; again, twice at most, when it was disturbed."""
    for again in range(3):
        run = folder / f"{kind}-{job}-{again}"
        report = launch(LaunchOptions(out=run, quiet=True, windows=0.0), [__file__, "train", kind, job])
        assert report.code == 0, report.traceback
        program = Program.from_run(Run.open(run))
        if abs(program.fidelity - 1) <= MAX_DISCREPANCY:
            break
    return attribute(program, ["storage=shared"], fixes=False), program


def data(fetch_s, **how):
    """Return the examples of one run behind a storage of their own."""
    return Examples(Storage(EXAMPLE_BYTES / fetch_s), 0.0, **how)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        step_s, read_s, cpu_s, num_workers = JOBS[sys.argv[3]]
        train(loader_of(sys.argv[2], data(read_s, prep_s=cpu_s), num_workers), step_s)
    else:
        main()
