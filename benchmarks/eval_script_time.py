"""Evaluation, script and closure time by name, against loops composed by a seed that time themselves.

Claim: in every mix `eval`, `host.script`, `input` and the three lines of a step (`useful.forward`, `useful.backward`,
`useful.optimizer`: a closure's passes are not the optimizer's) are within 2 points of device wall of what the loop's
own clock says, and the steps are the true ones. Peer: that clock, in the same run. Three mixes by default, 20 with
--full; seeds as arguments choose others.

Headway works inside calls that the loop's clock times: it opens and closes its deep windows behind the update, in its
wrapper of `optimizer.step()`, and looks at a loader as the loop asks for its iterator. The ledger's own line for that
time, `host.recording`, is taken out of what this clock says, from the block in which each record of it lies, and the
rest from the optimizer's: were it wrong, that line and another one would be off by as much. Time in which the thread
had no core is a line of the ledger, while the clock counts it wherever it was: the bar is wider by its share.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from _command import ROOT, headway

from headway.ledger.booking.rows import rows_by_rank
from headway.trace.recording.runs import Run

JOB = ROOT / "benchmarks" / "jobs" / "mixes.py"
BAR_POINTS = 2.0
RECORDER, NO_CORE = "host.recording", "host.cpu_wait"
CLAIM = "every line within 2 points, and the share of time without a core, in every mix"
ELSEWHERE = ("eval", "input", "host.script")
LINES = ("eval", "host.script", "input", "useful.forward", "useful.backward", "useful.optimizer")


def one(seed: int, folder: Path) -> dict:
    """Run one mix and compare its account with its own clock."""
    truth_file = folder / "truth.json"
    headway("run", "--out", folder / "run", "--", JOB, seed, "--truth", truth_file)
    why = headway("why", folder / "run")
    truth = json.loads(truth_file.read_text())
    assert sum(why["ledger_ns"].values()) == why["devices"] * why["wall_ns"], "the ledger does not add up"
    booked = {**why["sub"], **why["ledger"]}
    true_s = {line: truth["seconds"].get(line, 0.0) for line in LINES}
    own_s = recorded_inside(folder / "run", [block for block in truth["blocks"] if block[0] in ELSEWHERE])
    own_s["useful.optimizer"] = booked.get(RECORDER, 0.0) - sum(own_s.values())
    for line, seconds in own_s.items():
        true_s[line] -= seconds
    return {
        "seed": seed,
        "steps": [why["steps"], truth["steps"]],
        "wall_s": round(why["wall_s"], 2),
        "true_s": {line: round(seconds, 3) for line, seconds in true_s.items()},
        "points_off": {
            line: round(100 * (booked.get(line, 0.0) - seconds) / why["wall_s"], 2) for line, seconds in true_s.items()
        },
        "recorder_s": round(booked.get(RECORDER, 0.0), 3),
        "bar": round(BAR_POINTS + 100 * booked.get(NO_CORE, 0.0) / why["wall_s"], 2),
        "unknown": round(why["ledger"]["unknown"] / why["wall_s"], 4),
    }


def recorded_inside(run: Path, blocks: list) -> dict[str, float]:
    """Return the seconds of headway's own work that lie in blocks [(line, start_ns, end_ns)], by line."""
    rows = rows_by_rank(Run.open(run).trace)[0]
    spans = rows.of(RECORDER)
    own_s = dict.fromkeys(ELSEWHERE, 0.0)
    for line, start, end in blocks:
        inside = (rows.start_ns[spans] >= start) & (rows.end_ns[spans] <= end)
        own_s[line] += float((rows.end_ns[spans] - rows.start_ns[spans])[inside].sum()) / 1e9
    return own_s


def met(row: dict) -> bool:
    """Tell whether every line of a mix is within the bar and its steps are right."""
    steps, true_steps = row["steps"]
    return steps == true_steps and all(abs(points) <= row["bar"] for points in row["points_off"].values())


def main() -> int:
    """Run the mixes, print one JSON line, and fail when a line is off by more than the bar."""
    seeds = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    rows = []
    for seed in seeds or range(20 if "--full" in sys.argv else 3):
        with tempfile.TemporaryDirectory() as name:
            rows.append(one(seed, Path(name)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    worst = [max(abs(points) for points in row["points_off"].values()) for row in rows]
    narrow, within = sum(points <= BAR_POINTS for points in worst), sum(met(row) for row in rows)
    print(json.dumps({
        "bench": "eval_script_time", "mixes": len(rows), "within_2_points": narrow, "within_bar": within,
        "median_worst_points": round(statistics.median(worst), 2), "max_worst_points": round(max(worst), 2),
        "peer": "the loop's own clock", "rows": rows, "claim": CLAIM,
        "met": within == len(rows),
    }))  # fmt: skip
    return 0 if within == len(rows) else 3


if __name__ == "__main__":
    sys.exit(main())
