"""What the loaders that people use deliver after an interruption: a table of cases, each of them measured.

Claim: headway's DataLoader goes on exactly, batches and random numbers, in every case (same job, other world size,
other worker count, a state taken with an epoch's last batch), from a state of at most 1 KB. A cell says what came of
the interrupted epoch and the one behind it: exact, how many examples came twice or never, or what the loader refused
with; "no state" where neither the loader nor its iterator has a method for it. Peers run in environments of their own,
as their documentation has it; one that cannot be installed or run says so in its column.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _command import ROOT
from peers.env import python_of, versions

from headway.core.errors import InputError

LOADERS = {
    "headway": ("", "headway"),
    "torchdata": ("loaders", "torchdata"),
    "grain": ("loaders", "grain"),
    "streaming": ("streaming", "mosaicml-streaming"),
    "torch": ("", "torch"),
    "webdataset": ("loaders", "webdataset"),
    "spdl": ("loaders", "spdl_core"),
    "ray": ("ray", "ray"),
}
"""Name in jobs/resume_loaders.py -> (environment, "" for this one; package whose version counts)."""

LARGE = 1_000_000
"""Examples of the dataset half way through which the time to go on is measured."""


def asked(name: str) -> dict:
    """Return {"cells": ...} or {"offers": [...]} of one loader. Raises `InputError` when it cannot run."""
    environment, _ = LOADERS[name]
    python = str(python_of(environment)) if environment else sys.executable
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="hw") as folder:  # a short path: Ray makes sockets in it
        command = [python, str(ROOT / "benchmarks" / "jobs" / "resume_loaders.py"), name, folder, str(LARGE)]
        with (Path(folder) / "stderr").open("w+") as errors:
            done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
            errors.seek(0)
            words = errors.read().strip().splitlines()
    if done.returncode:
        raise InputError(
            f"{words[-1] if words else done.returncode}. Run jobs/resume_loaders.py by itself to see more."
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def column(name: str) -> dict[str, object]:
    """Return a loader's column of the table, {case: cell}, or {"": why there is none}."""
    try:
        answer = asked(name)
    except InputError as error:
        return {"": str(error)}
    if "cells" not in answer:
        return {"": f"offers {', '.join(answer['offers'])}, not asked" if answer["offers"] else "no state"}
    return answer["cells"]


def main() -> int:
    """Ask every loader; print one JSON line."""
    with ThreadPoolExecutor(2) as pool:
        columns = dict(zip(LOADERS, pool.map(column, LOADERS), strict=True))
    ours = columns["headway"]
    if "" in ours:
        raise SystemExit(f"headway: {ours['']}")
    table = {case: {name: cells.get(case, cells.get("", "")) for name, cells in columns.items()} for case in ours}
    inexact = [case for case, cell in ours.items() if isinstance(cell, str) and not cell.startswith("exact")]
    ok = not inexact and ours["state, bytes"] <= 1024
    print(json.dumps({
        "bench": "resume_peers", "cases": table, "large": LARGE,
        "versions": {name: versions(environment)[package] for name, (environment, package) in LOADERS.items()},
        "claim": "headway exact in every case, <= 1 KB", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
