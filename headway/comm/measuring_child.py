"""A measurement in processes of its own: what it prints, or one sentence on why it did not succeed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from headway.core.errors import InputError


def run_measurement(module: str, arguments: Sequence[str], *, what: str, longest_s: float, too_late: str) -> str:
    """Run `python -m module arguments` and return what it has printed.

    Raises `InputError`: `too_late` where it takes longer than `longest_s`, and its last words where it fails; `what` is
    measured.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest_s, check=False)
    except subprocess.TimeoutExpired as cause:
        raise InputError(too_late) from cause
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{what} could not be measured: {last}")
    return done.stdout
