"""How soon, and how well, a failing rank is reported: `headway run`'s launcher against torchrun.

Claim: with 4 gloo ranks of which one raises, the launcher has ended all
ranks, finalised the run and printed the failing rank's own traceback last
within 2 s of the failure; torchrun (with its store fix), which finalises
nothing, stands beside it. Most of either is the failing rank's own teardown.
torchrun's last line is not the error.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 3
ERROR = "RuntimeError: rank 1 gives up"
JOB = f"""
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(4)
for step in range(5):
    dist.all_reduce(value)
    if step == 3 and dist.get_rank() == 1:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.perf_counter_ns()))
        raise RuntimeError({ERROR.partition(": ")[2]!r})
"""
OURS = (
    "import sys; from pathlib import Path; from headway.runtime.launching.launch import LaunchOptions, launch;"
    "sys.exit(launch(LaunchOptions(out=Path(sys.argv[1]), nproc_per_node=4, quiet=True), sys.argv[2:]).code)"
)


def timed(command: list[str], moment: Path) -> tuple[float, bool]:
    """Return seconds from the failure to the launcher's exit, and whether the error is its last line."""
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(moment)], capture_output=True, text=True, timeout=120, env=env)
    seconds = (time.perf_counter_ns() - int(moment.read_text())) / 1e9
    assert done.returncode in (1, 134), done.stderr  # 134: gloo may abort a rank's teardown
    return seconds, done.stderr.rstrip().endswith(ERROR)


def main() -> None:
    """Run interleaved rounds and print one JSON line."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.py"
        job.write_text(JOB)
        for number in range(ROUNDS):
            run, moment = str(Path(folder) / f"run{number}"), Path(folder) / f"moment{number}"
            ours.append(timed([sys.executable, "-c", OURS, run, str(job)], moment))
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(job)]
            theirs.append(timed(torchrun, moment))
    assert all(last for _, last in ours), "our last line is not the error"
    mine, peer = (statistics.median(seconds for seconds, _ in side) for side in (ours, theirs))
    print(
        json.dumps(
            {
                "bench": "failure_report",
                "ranks": 4,
                "baseline": "torchrun",
                "ours_s": round(mine, 3),
                "baseline_s": round(peer, 3),
                "ratio": round(peer / mine, 2),
                "ratio_range": sorted(round(t / o, 2) for (o, _), (t, _) in zip(ours, theirs, strict=True))[
                    :: ROUNDS - 1
                ],
                "error_is_last_line": [all(last for _, last in ours), all(last for _, last in theirs)],
                "claim": "ours_s <= 2, error last",
            }
        )
    )


if __name__ == "__main__":
    main()
