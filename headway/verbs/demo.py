"""`headway demo`: the whole loop on a small real job: run, why, plan, run again with the plan, report."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.core.errors import HeadwayError, InputError
from headway.trace.recording.runs import is_run

SCRIPT = Path(__file__).with_name("train.py")
"""Plain PyTorch; it has never heard of headway."""

INTRODUCTION = """
A plain PyTorch script trains a small language model on real text, on 2 ranks (gloo). It reads through an emulated
remote store, logs to an emulated collector and rounds its compute up to an emulated accelerator's: two CPU cores
stand in for devices. headway runs it unmodified, says where the time went, predicts what would help, runs it
again with that applied, still unmodified, and compares.
"""


def demo(
    script_arguments: Annotated[str, Parameter(name="--arguments", allow_leading_hyphen=True)] = "",
    *,
    out: Path = Path("demo-run"),
    nproc_per_node: int = 2,
) -> int:
    """Show the whole loop on a small real job, in about a minute: run, why, plan, run --apply, report.

    Example: `headway demo --out demo-run`

    Args:
      script_arguments: Passed to the script, such as "--epochs 2".
      out: Folder for both runs and the report; an earlier demo there is replaced.
      nproc_per_node: Ranks.
    """
    clear(out)
    before, after, page = out / "before", out / "after", out / "report.html"
    launch = ["run", "--nproc-per-node", str(nproc_per_node)]
    script = ["--", str(SCRIPT), "--out", str(out / "work"), *script_arguments.split()]
    start = time.monotonic()
    print(INTRODUCTION.strip())
    for number, (title, arguments) in enumerate(
        [
            ("Run it as it is", [*launch, "--out", str(before), *script]),
            ("Where did the time go?", ["why", str(before)]),
            ("What would help?", ["plan", str(before)]),
            ("Run it again with the plan applied", [*launch, "--out", str(after), "--apply", str(before), *script]),
            ("All of it on one page", ["report", str(after), "-o", str(page)]),
        ],
        start=1,
    ):
        print(f"\n[{number}/5] {title}\n$ headway {' '.join(arguments)}\n", flush=True)
        code = subprocess.run([sys.executable, "-m", "headway.cli", *arguments]).returncode
        if code:
            raise HeadwayError(
                f"step {number} of the demo exited with {code}. Run it alone to see why: headway {arguments[0]}"
            )
    print(f"\nThat took {time.monotonic() - start:.0f} s. Open {page} in a browser. Your turn: headway run -- train.py")
    return 0


def clear(out: Path) -> None:
    """Make `out` an empty folder; what is there must be an earlier demo. Raises `InputError`."""
    if out.exists():
        if any(out.iterdir()) and not is_run(out / "before"):
            raise InputError(f"{out} is there already and no earlier demo. Choose another folder with --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True)
