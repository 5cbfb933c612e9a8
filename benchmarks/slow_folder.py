"""A run folder on a file system whose every write takes 200 ms: does a record wait for it?

Claim: 99.9 % of the records that a process under `headway run --out` makes, with the run folder on such a file system,
take at most 50 us. The peer is the same record written into a file that is mapped from that folder, as a recorder would
have it that puts its ring into the run folder: there a store waits while its page is written back. The file system is
a FUSE mount that passes everything on and sleeps in each write; both processes run beside each other, and the mount is
synchronised twice a second, as the client of a network file system does on its own.

Needs /dev/fuse, the right to mount and libfuse 2.
"""

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._passing_mount import mounted
from benchmarks.peers.env import python_of

ROOT = Path(__file__).resolve().parent.parent
BOUND_US = 50.0
RECORD = bytes(64)
JOB = """
import sys
import numpy as np
import headway
from benchmarks.slow_folder import timed
print(timed(lambda n: headway.epoch(n), float(sys.argv[1])), flush=True)
"""


def timed(write, seconds):
    """Return [p50, p99.9, max] microseconds of `write(n)`, called once a millisecond for so long."""
    taken, end, number = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        write(number)
        taken.append(time.perf_counter_ns() - start)
        number += 1
        time.sleep(0.001)
    return [round(float(value) / 1e3, 1) for value in (*np.percentile(taken, [50, 99.9]), max(taken))]


def in_mapped_file(folder, seconds):
    """Return the same for records that are written into a file mapped from `folder`."""
    with open(folder / "ring", "wb+") as file:
        file.truncate(1 << 20)
        memory = mmap.mmap(file.fileno(), 1 << 20)
        slots = (1 << 20) // len(RECORD)

        def write(number):
            at = number % slots * len(RECORD)
            memory[at : at + len(RECORD)] = RECORD

        return timed(write, seconds)


def main():
    """Mount, run both beside each other, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--delay-ms", type=float, default=200.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-slow-") as name:
        root, mount = Path(name) / "root", Path(name) / "mount"
        with mounted(python_of("fusepy"), root, mount, options.delay_ms / 1e3) as there:
            if not there:
                print(json.dumps({"bench": "slow_folder", "met": False, "reason": "no FUSE mount can be made here"}))
                return 1
            ours, peer = beside(mount, Path(name), options.seconds)
    print(json.dumps({
        "bench": "slow_folder", "write_ms": options.delay_ms, "records": int(options.seconds * 1000),
        "headway_us_p50_p999_max": ours, "mapped_there_us_p50_p999_max": peer,
        "peer": "the same record in a file mapped from the run folder", "met": ours[1] <= BOUND_US,
    }))  # fmt: skip
    return 0 if ours[1] <= BOUND_US else 3


def beside(mount, folder, seconds):
    """Return ([p50, p99.9, max], the same of the peer) in microseconds."""
    ended = threading.Event()

    def synchronise():
        descriptor = os.open(mount, os.O_RDONLY)
        while not ended.wait(0.5):
            ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)

    found = []
    threads = [threading.Thread(target=synchronise), threading.Thread(target=lambda: found.append(mapped()))]

    def mapped():
        code = (
            "from pathlib import Path; from benchmarks.slow_folder import in_mapped_file as f; "
            f"print(f(Path({str(mount)!r}), {seconds}))"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    job = folder / "job.py"
    job.write_text(JOB)
    for thread in threads:
        thread.start()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(mount / "run"), "--", str(job),
         str(seconds)],
        capture_output=True, text=True, env=environ, check=False,
    )  # fmt: skip
    threads[1].join()
    ended.set()
    threads[0].join()
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1]), json.loads(found[0])


if __name__ == "__main__":
    sys.exit(main())
