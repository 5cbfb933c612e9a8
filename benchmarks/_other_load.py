"""Other load beside a benchmark's jobs: processes that spin for a share of the time, and CPU quotas.

A quota is that of a cgroup of its own where one can be made (as root, outside most containers); elsewhere the job is
kept to fewer cores and a spinning process takes what is too much. Every answer says which it was.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.core.machine.host import group_folders

SPIN = """
import sys, time
share, period = float(sys.argv[1]), 0.02
while True:
    end = time.perf_counter() + share * period
    while time.perf_counter() < end:
        pass
    if share < 1:
        time.sleep(period * (1 - share))
"""


@contextmanager
def spinning(cores: float) -> Iterator[None]:
    """Keep `cores` of the host busy, each by a process in a session of its own."""
    shares = [min(1.0, cores - taken) for taken in range(int(cores + 0.99))]
    started = [
        subprocess.Popen([sys.executable, "-c", SPIN, str(share)], start_new_session=True) for share in shares if share
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def quota(cores: float) -> Iterator[tuple[Callable[[], None], str]]:
    """Yield what a child calls before it starts, and how its quota of `cores` comes about."""
    with ExitStack() as stack:
        folder = _group(cores)
        if folder is not None:
            stack.callback(_remove, folder)
            yield lambda: _enter(folder), "cgroup"
            return
        kept = sorted(os.sched_getaffinity(0))[: -(-int(cores * 100) // 100)]
        whole = len(kept) - cores
        if whole > 0:
            stack.enter_context(spinning(whole))
        yield lambda: os.sched_setaffinity(0, kept), "affinity and a spinning process"


def _group(cores: float) -> Path | None:
    """Return the folder of a new cgroup with a quota, None where none can be made."""
    for parent in group_folders("cpu", ancestors=False):
        folder = parent / f"headway-bench-{os.getpid()}"
        try:
            folder.mkdir()
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
                return folder
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
                return folder
            folder.rmdir()
        except OSError:
            _remove(folder)
    return None


def _enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _remove(folder: Path) -> None:
    """Remove a cgroup once its processes are gone."""
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
