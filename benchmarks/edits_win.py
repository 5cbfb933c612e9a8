"""The line that `why` prints to copy, written into the script by hand: does it win what was said?

Claim: in at least 80 % of the jobs the measured ratio of steps per second is within the predicted interval (where the
prediction is an upper bound: no more than 5 % above it, and more than 1). Each job is recorded, its printed edit is
read off the first cause, the job runs again with it, without headway's remedies. Peer: the script as it was.
Usage: `python benchmarks/edits_win.py [KIND ...]`.
"""

import ast
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import headway
from verdict_steady import JOB

ROUNDS = 3
KINDS = ("fetch", "augmented", "prep", "restarts", "logging", "garbage")
"""Jobs whose first cause prints a line for the script."""


def edit_of(line: str) -> dict[str, Any]:
    """Return the printed line as what the job takes on its command line; raises `ValueError` on one it cannot do."""
    code = line.partition("  # ")[0]
    if code.startswith("DataLoader("):
        call = ast.parse(code.replace("...", "data", 1), mode="eval").body
        assert isinstance(call, ast.Call)
        return {"loader": {str(row.arg): ast.literal_eval(row.value) for row in call.keywords}}
    every = re.search(r"step % (\d+) == 0", code) or re.search(r"every (\d+) steps", line)
    if "QueueHandler" in code:
        return {"queue": True}
    if every and "logger" in code:
        return {"log_every": int(every[1])}
    if every and "gc." in code:
        return {"collect_every": int(every[1])}
    raise ValueError(f"no job takes {line!r}")


def measured(kind: str, folder: Path) -> dict[str, Any]:
    """Record one job without and with its edit, in turn; return what was said and what came of it."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    cause, edit = {}, {}
    for number in range(ROUNDS):
        for edited in (False, True):
            out = folder / f"{kind}-{number}-{edited}"
            given = [json.dumps(edit)] if edited else []
            headway("run", "--quiet", "--windows", "0", "--out", out, "--", folder / "train.py", kind, folder, *given)
            why = headway("why", out)
            rates[edited].append(headway("compare", out, out)["steps_per_s"][0])
            if not cause:
                cause = next(row for row in why["causes"] if row["script"])
                edit = edit_of(cause["script"])
    gain = statistics.median(rates[True]) / statistics.median(rates[False])
    low, high = cause["interval"] or (1.0, 1.0)
    within = 1.0 < gain <= 1.05 * high if cause["at_most"] else low <= gain <= high
    return {
        "cause": cause["cause"], "edit": cause["script"], "predicted": round(cause["predicted_speedup"] or 0.0, 2),
        "low": round(low, 2), "high": round(high, 2), "at_most": cause["at_most"], "measured": round(gain, 2),
        "within": within,
    }  # fmt: skip


def main() -> int:
    """Run the jobs in turn and print one JSON line."""
    chosen = [kind for kind in sys.argv[1:] if kind != "--full"] or list(KINDS)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headway-edits-") as temporary:
        (Path(temporary) / "train.py").write_text(JOB)
        for kind in chosen:
            rows[kind] = measured(kind, Path(temporary))
            print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
    within = sum(row["within"] for row in rows.values())
    print(json.dumps({
        "bench": "edits_win", "jobs": len(rows), "within": within, "rows": rows, "peer": "the script as it was",
        "claim": ">= 80 % within what was said", "met": within >= 0.8 * len(rows),
    }))  # fmt: skip
    return 0 if within >= 0.8 * len(rows) else 3


if __name__ == "__main__":
    sys.exit(main())
