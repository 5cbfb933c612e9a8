"""Fill jobs in the gaps of a pipeline that runs: what the main job loses, what is used, and one slow chunk.

Claim: 4 ranks, gpipe, 4 microbatches, stages that sleep (60 and 80 ms) with a fill process beside each, blocks of steps
with filling and without in turn: the main job is less than 2 % slower (medians of steps), and chunks of 9, 12 and 15 ms
run in at least 60 % of the large gaps. A chunk that takes three times the time in its file makes one step late; steps
behind it are as long as without filling, because it runs only in gaps that are long enough. Published (PipeFill, MLSys
2025): less than 2 % slower. Baseline: the same run's steps without filling. `--full`: more blocks.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from headway.parallel.fill.queue import FillFile
from headway.parallel.fill.torch_rehearsal import BLOCK, FillReport, measure

RANKS, MS = 4, 1_000_000
MAIN = {"stages": RANKS, "microbatches": 4, "forward_ns": 60 * MS, "backward_ns": 80 * MS, "schedule": "gpipe"}
SHORT_MS, LONG_MS = (9, 12, 15), 120
"""Chunks of the job that fits, and the chunk whose code sleeps three times as long."""


def run(folder: Path, chunks_ms: tuple[int, ...], blocks: int, code: str = "") -> FillReport:
    """Run the pipeline with one fill job on every rank."""
    if code:
        (folder / "slow.py").write_text(code)
    chunks = [{"duration_ns": ms * MS} for ms in chunks_ms]
    job = {"name": "fill", "configurations": [{"chunks": chunks}], **({"run": "slow.py:chunk"} if code else {})}
    (folder / "jobs.json").write_text(json.dumps({"main": MAIN, "jobs": [job]}))
    return measure(FillFile.read(folder / "jobs.json"), [["fill"]] * RANKS, blocks)


def medians(report: FillReport) -> dict[str, list[float]]:
    """Return [least, median, most] seconds of the pipeline's steps with filling and without."""
    steps = report.ranks[0].steps_s
    sides = {
        name: sorted(s for filled, s in steps if filled == fills)
        for name, fills in (("filled", True), ("plain", False))
    }
    return {name: [round(x, 4) for x in (rows[0], statistics.median(rows), rows[-1])] for name, rows in sides.items()}


def main() -> int:
    """Run both jobs, print one JSON line."""
    blocks = 6 if "--full" in sys.argv else 3
    with tempfile.TemporaryDirectory() as folder:
        fits = run(Path(folder), SHORT_MS, blocks)
        slow_code = f"import time\n\ndef chunk(name, index):\n    time.sleep({3 * LONG_MS / 1e3})\n"
        slow = run(Path(folder), (LONG_MS,), blocks, slow_code)
    plain_s = statistics.median(seconds for filled, seconds in slow.ranks[0].steps_s if not filled)
    filled = [seconds for fills, seconds in slow.ranks[0].steps_s if fills]
    late = [seconds for seconds in filled if seconds > plain_s + LONG_MS / 2e3]
    after = statistics.median(filled[BLOCK:]) / plain_s - 1
    met = fits.main_slowdown < 0.02 and fits.used_fraction >= 0.6 and len(late) == 1 and after < 0.02
    print(json.dumps({
        "bench": "fill_gaps", "ranks": RANKS, "used_fraction": round(fits.used_fraction, 3),
        "used_by_rank": [round(row.used_ns / row.large_ns, 3) for row in fits.ranks],
        "main_slowdown": round(fits.main_slowdown, 4), "steps_s": medians(fits), "steps_per_side": blocks * BLOCK,
        "slow_chunk": {
            "late_steps": len(late), "slowdown_after": round(after, 4), "used_fraction": round(slow.used_fraction, 3),
            "late_ms_by_rank": [round(row.late_ns / MS) for row in slow.ranks], "steps_s": medians(slow),
            "chunks_by_rank": [row.chunks for row in slow.ranks],
        },
        "baseline": "the same run's steps without filling", "claim": "< 2 % slower, >= 60 % used, one late step",
        "met": bool(met),
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
