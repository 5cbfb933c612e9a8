"""The world's scripts: frameworks and public scripts under an independent clock, under headway, and with its plan.

Claim: in every row headway's steps and devices are the true ones, losses are equal to the digit with and without
headway and with its plan applied (where the script itself gives the same losses twice), and evaluation, the script's
own time between steps and input are within 3 points of wall of an independent clock. Peer: that clock, injected by
sitecustomize; it counts updates, backwards, root forwards and `next` in a run without headway, and times functions
that each row names in a run with it, so that both sides' seconds are those of one run.

Usage: `python benchmarks/world.py [ROW ...] [--scripts DIR] [--cache DIR] [--resume] [--finished]`.
--scripts (or $HEADWAY_WORLD_SCRIPTS) names checkouts as DIR/owner/name; without it those rows are left out. --cache
(or $HEADWAY_WORLD) keeps the frameworks' environments and finished rows; --resume (or $HEADWAY_WORLD_RESUME) takes
rows from there, so that a long sweep can be done in parts: rows by name first, then `headway bench world --keep`.
--finished (or $HEADWAY_WORLD_FINISHED) runs only rows given by name; the rest is the cache's, or else the kept
result's, each with the day on which it was run, so that a machine whose cache is new loses no row.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

KEPT = Path(__file__).resolve().parent / "results" / "world.json"


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows to run; all by default")
    parser.add_argument("--scripts", type=Path, default=os.environ.get("HEADWAY_WORLD_SCRIPTS"))
    cache = os.environ.get("HEADWAY_WORLD", Path.home() / ".cache" / "headway" / "world")
    parser.add_argument("--cache", type=Path, default=Path(cache))
    resume = bool(os.environ.get("HEADWAY_WORLD_RESUME"))
    parser.add_argument("--resume", action="store_true", default=resume, help="take finished rows from the cache")
    finished = bool(os.environ.get("HEADWAY_WORLD_FINISHED"))
    parser.add_argument("--finished", action="store_true", default=finished, help="also kept ones; run the named alone")
    parser.add_argument("--full", action="store_true", help="accepted; every row is always run")
    return parser.parse_args()


def earlier(options: argparse.Namespace) -> dict[str, dict]:
    """Return row -> its figures from an earlier run, where the options allow them instead of a new one."""
    from world.rows import ROWS

    if not (options.resume or options.finished):
        return {}
    kept = json.loads(KEPT.read_text()) if options.finished and KEPT.exists() else {"rows": {}}
    rows = {name: {"date": kept["date"], **row} for name, row in kept["rows"].items() if name in ROWS}
    cached = {name: finished_row(options.cache, name) for name in ROWS}
    rows |= {name: json.loads(path.read_text()) for name, path in cached.items() if path.exists()}
    return {name: row for name, row in rows.items() if name not in options.rows}


def finished_row(cache: Path, name: str) -> Path:
    """Return the file of a finished row; its folder exists."""
    folder = cache / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace('/', '-')}.json"


def main() -> int:
    """Run the rows; a row that fails is recorded and never stops the rest. Print one JSON line."""
    options = arguments()
    os.environ["HEADWAY_PEERS"] = str(options.cache.resolve() / "peers")
    from world.measure import failed, measure
    from world.rows import ROWS

    from headway.core.tables import pick

    chosen = {name: pick(ROWS, name, "row") for name in options.rows} or ({} if options.finished else ROWS)
    done, rows = earlier(options), {}
    for name, row in ROWS.items():
        if name in done:
            rows[name] = done[name]
        elif name in chosen and row.public and not options.scripts:
            print(f"{name}: left out, no --scripts", file=sys.stderr)
        elif name in chosen:
            try:
                rows[name] = measure(row, Path(options.scripts) if options.scripts else None)
            except Exception as error:
                rows[name] = failed(error)
            rows[name]["date"] = datetime.now(tz=UTC).date().isoformat()
            finished_row(options.cache, name).write_text(json.dumps(rows[name], indent=1) + "\n")
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    good = {name for name, row in rows.items() if row["met"]}
    met = good.issuperset(options.rows or ROWS)  # a row left out is not one that was seen to be right
    print(json.dumps({
        "bench": "world", "rows": rows, "rows_run": len(rows), "rows_met": len(good),
        "left_out": [name for name in ROWS if name not in rows],
        "peer": "a clock of its own in a run without headway", "claim": "steps, losses, seconds by name: all rows",
        "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
