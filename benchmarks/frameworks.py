"""Quick-start scripts of Hugging Face Trainer, Lightning and Accelerate, unedited, with and without headway.

Claim: the same losses bit for bit, every optimizer step seen, exit code 0. Peer: the same script without headway. The
frameworks live in an environment of their own, beside headway's packages.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT
from peers.env import python_of

JOBS = {"hf_trainer": 24, "lightning_fit": 16, "accelerate_loop": 12}
"""Script -> optimizer steps it takes."""


def losses(output: str) -> list[str]:
    """Return the lines that carry exact losses."""
    return [line for line in output.splitlines() if line.startswith("loss ")]


def main() -> int:
    """Run each script both ways; print one JSON line."""
    python = python_of("frameworks")
    site = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    rows = {}
    for job, steps in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            paths = os.pathsep.join([str(ROOT), str(site)])
            names = {
                **os.environ,
                "PYTHONPATH": paths,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "JOB_OUT": folder,
            }
            script = ROOT / "benchmarks" / "jobs" / f"{job}.py"
            plain = subprocess.run([python, script], env=names, capture_output=True, text=True, timeout=300)
            command = [python, "-m", "headway.cli", "run", "--json", "--out", f"{folder}/run", "--", script]
            seen = subprocess.run(command, env=names, capture_output=True, text=True, timeout=300)
            why = [python, "-m", "headway.cli", "why", "--json", f"{folder}/run"]
            ledger = json.loads(subprocess.run(why, env=names, capture_output=True, text=True, timeout=300).stdout)
        rows[job] = {
            "plain": plain.returncode,
            "headway": seen.returncode,
            "losses": len(losses(plain.stdout)),
            "equal": losses(plain.stdout) == losses(seen.stderr) != [],
            "steps": ledger["steps"],
            "expected_steps": steps,
        }
        print(job, rows[job], file=sys.stderr)
    ok = all(
        row["equal"] and row["headway"] == row["plain"] == 0 and row["steps"] == row["expected_steps"]
        for row in rows.values()
    )
    print(json.dumps({"bench": "frameworks", "rows": rows, "peer": "the same scripts without headway", "met": ok}))
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
