"""`headway drill`: play real faults on a job, and say which of them were noticed, and what each cost."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.catalog import DRILL, REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.units import format_fraction, format_seconds
from headway.fault.torch_drill import FAULTS, FOLDER, NAME, marks, schedule, score
from headway.report.paper import ScreenOptions, draw
from headway.runtime.host.rank_env import num_processes
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions, check
from headway.trace.recording.incident import read_incidents
from headway.trace.recording.runs import Run
from headway.verbs.jobs.fault import ettr_of
from headway.verbs.shared.output import emit
from headway.verbs.shared.run_options import DEFAULTS, GivenOptions, GivenScript, RunOptions

SPARE_RESTARTS = 3
"""Restarts beyond one per fault."""

HANG_TIMEOUT_S = 2.0
"""Where none was asked for."""

GRACE_S = 5.0
"""Most seconds between SIGTERM and SIGKILL."""


def drill(
    *, faults: str | None = None, seed: int = 0, options: GivenOptions = DEFAULTS, script: GivenScript = None
) -> int:
    """Play real faults on a training script, one per attempt, and score what was noticed; exit 3 if one was missed.

    A fault that was not played, since the run ended before it or has nothing that it could strike, is left out of the
    score. The exit code is 2 where it was named with --faults, or where none was played at all.

    The script runs on 2 ranks with --hang-timeout 2 unless the options say otherwise, and goes on from its
    checkpoints after each fault. It must not be a job whose results matter: its parameters are poisoned once, and
    its checkpoints are overwritten as ever. The drill ends it 20 steps after the last fault.

    Example: `headway drill --faults kill,stop -- train.py`

    Args:
      faults: Which, separated by commas; by default all that the job can be struck by.
      seed: Seed of the ranks and steps that they strike.
    """
    names = [*FAULTS] if faults is None else [name.strip() for name in faults.split(",") if name.strip()]
    schedule(names, world=1, seed=seed)  # a wrong name is said before anything else
    given = _launch_options(options, names)
    check(given, script or [])
    due = schedule(names, world=num_processes(given.nproc_per_node), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"  # the run folder holds a copy
        # Without a guard nobody looks at losses.
        guard = [Remedy("fault.guard", {"action": "rollback"}, allow="lossy")] if "nan" in names else []
        write_plan(PlanFile((Remedy(NAME, {"due": [list(one) for one in due]}), *guard)), plan)
        report = launch(replace(given, apply=plan), script or [])
    if report.run is None:
        return report.code
    run, played = Run.open(report.run), read_incidents(report.run)
    steps = int(run.trace.select(ranks=[0]).named("optimizer.step").sum())
    rows, false_alarms = score(names, marks(report.run / FOLDER), played, steps=steps)
    answer: dict[str, Any] = {
        "schema": "headway.drill/1", "run": str(report.run), "seed": seed, "faults": rows,
        "false_alarms": false_alarms, **ettr_of(run, played),
    }  # fmt: skip
    emit(answer, lambda screen: _screen(answer, screen), as_json=options.json)
    return exit_code(answer["faults"], answer["false_alarms"], named=faults is not None)


def exit_code(rows: Sequence[Mapping[str, Any]], false_alarms: int, *, named: bool) -> int:
    """Return 3 where a fault was missed or invented, 2 where what was asked for could not be played, else 0.

    >>> exit_code([{"ok": True}, {"ok": None}], 0, named=False), exit_code([{"ok": True}, {"ok": None}], 0, named=True)
    (0, 2)
    """
    if false_alarms or any(row["ok"] is False for row in rows):
        return 3
    unplayed = [row["ok"] is None for row in rows]
    return 2 if all(unplayed) or (named and any(unplayed)) else 0


def _launch_options(options: RunOptions, names: list[str]) -> LaunchOptions:
    """Return how the job is launched. Raises `InputError` for options that have no meaning here."""
    given = options.launch_options({**DRILL, **REMEDIES}, None)
    if given.apply is not None or given.no_launch or str(given.nnodes) != "1" or given.standby:
        raise InputError("a drill runs on one host, without a plan. Drop --apply, --no-launch, --nnodes and --standby.")
    return replace(
        given, nproc_per_node=given.nproc_per_node or 2, max_restarts=len(names) + SPARE_RESTARTS,
        hang_timeout_s=given.hang_timeout_s or HANG_TIMEOUT_S, grace_s=min(given.grace_s, GRACE_S),
    )  # fmt: skip


def _screen(answer: dict[str, Any], screen: ScreenOptions) -> str:
    rows = answer["faults"]
    played = [row for row in rows if row["ok"] is not None]
    seen = sum(row["ok"] for row in played)
    share = f" · ETTR {format_fraction(answer['ettr'])}" if answer["ettr"] is not None else ""
    mistaken = sum(not row["ok"] and row["detected_ns"] is not None for row in played)
    otherwise = f", {mistaken} more seen as another class or rank" if mistaken else ""
    noticed = f"{seen} of {len(played)} faults noticed{otherwise}, {answer['false_alarms']} false alarms{share}\n"
    return draw(map(Text, [f"headway drill   {answer['run']}", noticed, *map(_line, rows)]), **screen)


def _line(row: dict[str, Any]) -> str:
    """Return one fault in words."""
    name = f"{row['name']:20}"
    if row["not_played"]:
        return f"{name}not played: {row['not_played']}"
    where = f"{name}{'all ranks' if row['rank'] is None else 'rank ' + str(row['rank'])}: "
    if row["detected_ns"] is None:
        return f"{where}MISSED"
    after = format_seconds((row["detected_ns"] - row["injected_ns"]) / 1e9)
    blamed = ", ".join(map(str, row["ranks"])) or "nobody"
    back = "" if row["recover_s"] is None else f", back after {format_seconds(row['recover_s'])}"
    of_rank = "" if row["rank"] is None else f", rank {row['rank']}"
    verdict = "" if row["ok"] else f"   WRONG: it is of class {FAULTS[row['name']].cls}{of_rank}"
    return f"{where}seen as {row['class']} after {after}, blames {blamed}, {row['action']}{back}{verdict}"
