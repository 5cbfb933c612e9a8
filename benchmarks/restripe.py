"""Parity from 4+2 to 8+2 on committed checkpoints, under a cap: no data file changes, IO stays within the cap.

Claim: for three checkpoints of ten ranks, reads plus writes of every full second (counted by the kernel, /proc/self/io)
are at most 1.2 times the cap and at least 0.8 times; inode and mtime of every data file stay; all verify afterwards.
Killed by SIGKILL at random points, one scheme is whole each time (any two rank directories may still go), and the next
call finishes. Baseline: what re-encoding moves (read the data, write data and parity), against what was moved.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _command import ROOT

sys.path.insert(0, str(ROOT))

from headway.storage.checks.repair import repair
from headway.storage.checks.verification import verify
from headway.storage.redundancy.parity import state
from headway.storage.redundancy.restripe import restripe
from tests.redundant import content, lose, protected, put_back

RANKS, STEPS, ROWS, CAP_BYTES_PER_S = 10, (1, 2, 3), 200_000, 12e6
KILLS = 6


def moved_bytes() -> int:
    """Return what this process has read and written by system calls so far."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]) + int(told["wchar"])


class Meter(threading.Thread):
    """Counts IO second by second, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rates: list[float] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Note bytes per second, about once a second."""
        before, bytes_before = time.monotonic(), moved_bytes()
        while not self._stopped.wait(1.0):
            now, count = time.monotonic(), moved_bytes()
            self.rates.append((count - bytes_before) / (now - before))
            before, bytes_before = now, count

    def stop(self) -> list[float]:
        """Return the rates of full seconds."""
        self._stopped.set()
        self.join()
        return self.rates


def identity(paths: list[Path]) -> dict[str, tuple[int, int]]:
    """Return inode and mtime of every file of the commits."""
    files = [file for path in paths for file in path.rglob("*") if file.is_file()]
    files = [file for file in files if "parity" not in file.name and "copies" not in file.parts]
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def survives_kills(root: Path, seed: int) -> int:
    """Kill transitions of a small checkpoint at random points; return how many were in the middle of one."""
    path = protected(root, "4+2", world_size=RANKS, rows=4000)
    start, rng, hit = content(path), random.Random(seed), 0
    call = "from headway.storage.redundancy.restripe import restripe\nprint(1, flush=True)\n"
    call += f"restripe({str(path)!r}, '8+2', cap_bytes_per_s=2e6)"
    for _ in range(KILLS):
        put_back(path, start)
        job = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, stdout=subprocess.PIPE)
        assert job.stdout is not None
        job.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.6))
        job.kill()
        hit += job.wait() != 0
        middle = content(path)
        for ranks in ((0, 5), (3, 4)):
            lose(path, *ranks)
            assert repair(path).status == "repaired", f"two directories are lost after a kill (seed {seed})"
            assert verify(path).status == "good"
            put_back(path, middle)
        restripe(path, "8+2")
        assert (state(path).scheme, state(path).status) == ("8+2", "redundant")
    shutil.rmtree(path)
    return hit


def main() -> int:
    """Restripe, measure, kill, print one JSON line."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        root = Path(folder)
        paths = [protected(root, "4+2", world_size=RANKS, rows=ROWS, step=step) for step in STEPS]
        before, meter, done = identity(paths), Meter(), []
        meter.start()
        for path in paths:
            done.append(restripe(path, "8+2", cap_bytes_per_s=CAP_BYTES_PER_S))
        rates = sorted(rate / CAP_BYTES_PER_S for rate in meter.stop())
        untouched = identity(paths) == before
        verified = all(verify(path).status == "good" and state(path).scheme == "8+2" for path in paths)
        killed = survives_kills(root / "killed", seed=7)
    moved = sum(one.read_bytes + one.written_bytes for one in done)
    data = sum(one.read_bytes for one in done)
    met = untouched and verified and rates[0] >= 0.8 and rates[-1] <= 1.2
    answer: dict[str, Any] = {
        "bench": "restripe", "checkpoints": len(paths), "ranks": RANKS, "schemes": "4+2 -> 8+2", "moved_bytes": moved,
        "cap_bytes_per_s": CAP_BYTES_PER_S, "rate_of_cap": [round(rates[0], 2), round(rates[-1], 2)],
        "seconds": len(rates), "data_untouched": untouched, "all_verify": verified,
        "kills": KILLS, "killed_inside": killed,
        "ratio": round((2 * data + data * 2 / 8) / moved, 2),
        "baseline": "re-encoding: read data, write data and parity",
        "claim": "0.8 to 1.2 of the cap in every second, data untouched", "met": met,
    }  # fmt: skip
    print(json.dumps(answer))
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
