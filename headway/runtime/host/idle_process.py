"""Start a process that works beside a rank in scheduling class idle, as nobody's child.

A script that waits for its children does not meet it, and it gets a core only while nobody else wants one. The program
forks, prints the id of the process that goes on, and ends; what goes on leaves the session, takes class idle, and
watches the rank, so that it ends with it (see `headway.power.burn`, `headway.parallel.fill.worker`).

>>> import sys
>>> start_idle([sys.executable, "-c", "print(4711)"])
4711
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

START_S = 10.0
"""Seconds after which a process that has not come up is given up."""


def is_able() -> bool:
    """Whether this system has what such a process needs: class idle, and handles of processes."""
    return hasattr(os, "SCHED_IDLE") and hasattr(os, "pidfd_open")


def start_idle(command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> int | None:
    """Run a program that forks and prints the id of its child; return that id, None where it says none in time."""
    environ = {"PATH": os.environ.get("PATH", os.defpath)}
    try:
        done = subprocess.run(
            [*command], env=environ, capture_output=True, text=True, timeout=START_S, check=False, pass_fds=pass_fds
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None
