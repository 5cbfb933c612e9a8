"""A training loop that is recorded on emulated accelerators, and what is true of it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.runtime.host import device

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Truth:
    """What one rank's device and its host did, intervals (start, end) in ns of the host's clock."""

    work: list[tuple[int, int]]
    """The device at work, copies apart."""
    copies: list[tuple[int, int]]
    """The loop copying to the device."""
    loads: list[tuple[int, int]]
    """The loop asking its loader for a batch."""


def recorded_loop(
    folder: Path,
    accelerator: Mapping[str, float],
    loop: Mapping[str, float],
    *,
    ranks: int = 1,
    plan: Path | None = None,
    words: Sequence[str] = (),
) -> list[Truth]:
    """Record benchmarks/jobs/device_loop.py into `folder`/run, each rank on an emulated accelerator of its own.

    The mappings are the options of tests/accelerator.py and of the loop; `plan` is applied, `words` are options
    of `headway run`. Returns what is true of each rank. Raises `RuntimeError` where the job fails.
    """
    job = ROOT / "benchmarks" / "jobs" / "device_loop.py"
    command = [
        sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(folder / "run"),
        *(["--nproc-per-node", str(ranks)] if ranks > 1 else []), *(["--apply", str(plan)] if plan else []),
        *words,
        "--module", "--", "tests.accelerator",
        "--truth", str(folder / "truth"), *options_of({"launches": 4, **accelerator}),
        "--", str(job), "--timeline", str(folder / "loads"), *options_of(loop),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", device.PRETEND: "device"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{loop} on {accelerator}: {done.stderr[-2000:]}")

    def intervals(name: str, rank: int) -> dict[str, list[tuple[int, int]]]:
        text = Path(f"{folder / name}-{rank}.json").read_text()
        return {kind: [(start, end) for start, end in found] for kind, found in json.loads(text).items()}

    return [Truth(**intervals("truth", rank), **intervals("loads", rank)) for rank in range(ranks)]


def options_of(values: Mapping[str, float]) -> list[str]:
    """Return a command line's options."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]
