"""Small scripts with a known truth: steps, seconds by name, and the same output with every remedy.

Claim: in every case the steps and devices are the true ones, each line of the ledger that the case names is within 3
points of wall of the truth, and what the script prints stays the same to the digit under headway, with headway's own
plan and with loader remedies forced upon it. Peer: the truth that each script is built with (sleeps of known length).
Usage: `python benchmarks/cases.py [NUMBER ...] [--scripts DIR]`; DIR or $HEADWAY_CASES holds the scripts.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from _command import ROOT

SCRIPTS = ROOT.parent / "shared" / "cases" / "scripts"


def asked(description: str | None) -> argparse.Namespace:
    """Return which `cases` were asked for on the command line, and the folder of their `scripts`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="numbers of cases; all by default")
    parser.add_argument("--scripts", type=Path, default=Path(os.environ.get("HEADWAY_CASES", SCRIPTS)))
    parser.add_argument("--full", action="store_true", help="accepted; every case is always run")
    return parser.parse_args()


def main() -> int:
    """Run the cases; one that fails is recorded and never stops the rest. Print one JSON line."""
    options = asked(__doc__)
    from world.cases import measure, table

    from headway.core.tables import pick

    entries = table()
    rows, absent = {}, []
    for number in options.cases or entries:
        case = pick(entries, number, "case")
        if not (options.scripts / case.file).exists():
            absent.append(case.file)
            continue
        try:
            rows[case.file] = measure(case, options.scripts)
        except Exception as error:
            rows[case.file] = {"wrong": [str(error)[-800:]], "met": False}
        print(case.file, json.dumps(rows[case.file]), file=sys.stderr, flush=True)
    good = sum(row["met"] for row in rows.values())
    print(json.dumps({
        "bench": "cases", "cases": len(rows), "cases_met": good, "absent": absent, "rows": rows,
        "peer": "the truth that each script is built with", "claim": "every case within 3 points of wall",
        "met": good == len(rows) > 0,
    }))  # fmt: skip
    return 0 if good == len(rows) > 0 else 3


if __name__ == "__main__":
    sys.exit(main())
