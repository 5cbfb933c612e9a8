"""`headway demo`: the whole loop on a small real job: run, why, plan, run again with the plan, report.

`headway doctor`: look at this host before a run.

`headway bench`: run a benchmark of the checkout, keep its result, write docs/results.md and its own page.
"""

from __future__ import annotations

import ast
import json as jsonlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import headway
from headway.core.errors import HeadwayError, InputError
from headway.core.tables import pick
from headway.report.screens import render_doctor
from headway.runtime.host.doctor import check
from headway.runtime.in_rank import device_checks
from headway.trace.recording.runs import is_run
from headway.verbs.shared.output import emit

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


def doctor(*, device: bool = False, json: bool = False) -> int:
    """Check shared memory, file descriptors, RAM, threads, disk and versions: value, limit, fix of each.

    Exits with 3 when something would break or slow a run down.

    Example: `headway doctor --json`

    Args:
      device:
        Try this host's device too, in processes of their own (25 s): torch sees it, a recorded process starts in
        silence, events, threads, the profiler, MPS and MIG; its rates are measured and kept. What cannot be asked here
        says why.
      json: Print one JSON object instead of a table.
    """
    findings = [*check(), *(device_checks.check() if device else [])]
    is_ok = all(row.ok is not False for row in findings)
    answer = {"schema": "headway.doctor/1", "findings": [asdict(row) for row in findings], "ok": is_ok}
    emit(answer, lambda screen: render_doctor(findings, **screen), as_json=json)
    return 0 if is_ok else 3


FOLDER = Path(headway.__file__).resolve().parent.parent / "benchmarks"
"""Benchmarks belong to the checkout, not to the installed package."""

ROOMS = (
    "checkpoint", "comm", "compute", "parallel", "model", "fault", "cluster", "power", "data", "host", "plan",
    "storage", "ledger", "sim", "trace", "cost", "runtime",
)  # fmt: skip
"""Rooms in the order in which a benchmark that imports from several of them is listed under one."""

STUDIED = {"lab": "storage"}
"""Room of studies -> the room whose subject they are about."""


def bench(name: str | None = None, /, *, full: bool = False, keep: bool = False, json: bool = False) -> int:
    """Run the benchmark NAME; without a name, list them by room with the bar each one holds headway to.

    Example: `headway bench replay_vs_simpy --keep`

    Args:
      name: A file of benchmarks/, without its suffix.
      full: The large sweep, with every seed; takes minutes.
      keep:
        Write the result to benchmarks/results/, also that of a missed bar, and bring docs/results.md up to date (and
        the benchmark's own page, where its folder has a page.py).
      json: Print the list as one JSON object; a benchmark's result is one in any case.
    """
    table = benchmarks()
    if name is None:
        claims, rooms = {known: claim(path) for known, path in table.items()}, by_room(table)
        answer = {"schema": "headway.bench/1", "benchmarks": claims, "rooms": rooms}
        return emit(answer, lambda _: listing(claims, rooms), as_json=json)
    command = [sys.executable, str(pick(table, name, "benchmark")), *(["--full"] if full else [])]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if keep and done.returncode in (0, 3):
        result = jsonlib.loads(done.stdout.strip().splitlines()[-1])
        result["command"] = f"headway bench {name}{' --full' if full else ''}"
        result["date"] = datetime.now(tz=UTC).date().isoformat()
        (FOLDER / "results" / f"{name}.json").write_text(jsonlib.dumps(result, indent=1) + "\n")
        subprocess.run([sys.executable, str(FOLDER / "_pages.py")], check=True)
        page = FOLDER / name / "page.py"
        if page.exists():
            subprocess.run([sys.executable, str(page)], check=True)
    return done.returncode


def benchmarks() -> dict[str, Path]:
    """Return benchmark name -> file. Raises `InputError` outside a checkout."""
    if not FOLDER.is_dir():
        raise InputError(f"there is no {FOLDER}: benchmarks come with a checkout. Run this in one.")
    return {path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def by_room(table: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return room -> names of its benchmarks: the first of `ROOMS` that one imports from, "command" for the others."""
    found: dict[str, list[str]] = {room: [] for room in (*ROOMS, "command")}
    for name, path in table.items():
        imported = set(re.findall(r"^\s*(?:from|import) headway\.(\w+)", path.read_text(), re.MULTILINE))
        imported |= {STUDIED[room] for room in imported & STUDIED.keys()}
        found[next((room for room in ROOMS if room in imported), "command")].append(name)
    return {room: names for room, names in found.items() if names}


def listing(claims: Mapping[str, str], rooms: Mapping[str, list[str]]) -> str:
    """Return the list of benchmarks as text, a paragraph for each room."""
    blocks = [[room, *(f"  {known:26} {claims[known]}" for known in names)] for room, names in rooms.items()]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def claim(path: Path) -> str:
    """Return the first sentence of a benchmark's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n")[0]
