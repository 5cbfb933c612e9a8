"""Quick-start scripts of Hugging Face Trainer, Lightning, Accelerate and Ray Train, unedited, with and without headway.

Claim: the same losses bit for bit, every optimizer step seen, exit code 0. Peer: the same script without headway. The
frameworks live in environments of their own, beside headway's packages. Ray's own start takes a minute on a small host.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT
from peers.env import python_of

JOBS = {
    "hf_trainer": ("frameworks", 24, 1),
    "lightning_fit": ("frameworks", 16, 1),
    "accelerate_loop": ("frameworks", 12, 1),
    "ray_train": ("ray", 20, 2),
}
"""Script -> environment, optimizer steps it takes, devices it trains on."""


def losses(output: str) -> list[str]:
    """Return the lines that carry exact losses."""
    return [line for line in output.splitlines() if line.startswith("loss ")]


def main() -> int:
    """Run each script both ways; print one JSON line."""
    site = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    rows = {}
    for job, (peer, steps, devices) in JOBS.items():
        python = python_of(peer)
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
            "devices": ledger["devices"],
            "expected_devices": devices,
        }
        print(job, rows[job], file=sys.stderr)
    ok = all(
        row["equal"]
        and row["headway"] == row["plain"] == 0
        and (row["steps"], row["devices"]) == (row["expected_steps"], row["expected_devices"])
        for row in rows.values()
    )
    print(json.dumps({"bench": "frameworks", "rows": rows, "peer": "the same scripts without headway", "met": ok}))
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
