"""`headway try`: what a few lines would win in this script, measured side by side on the same batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, Token
from rich.text import Text

from headway.catalog import TRIES
from headway.compute.advise import CANDIDATES, Interval, Tries, TryRow, best_of, chosen, rows_of
from headway.core.errors import InputError
from headway.core.files.planfile import ALLOWANCES, PlanFile, Remedy, granted, write_plan
from headway.core.files.safe_files import read_json
from headway.core.units import format_seconds, plural
from headway.report.paper import ScreenOptions, add_row, draw, grid, next_of, paragraph, uncut
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import check
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.verbs.shared.output import emit
from headway.verbs.shared.run_options import DEFAULTS, GivenOptions, GivenScript, RunPath, run_at
from headway.why.explanation import explain
from headway.why.fixes import run_command

REMEDY = "measure.try"
INTERRUPTED = 130
"""Exit code of a script that was stopped by Ctrl-C."""


def _plan_path(_: object, tokens: Sequence[Token]) -> Path:
    """Return where to write a plan. Raises `InputError`, which names the option given, where no folder is there."""
    path = Path(tokens[0].value)
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} lies in a folder that does not exist. Create {path.parent} first.")
    return path


def try_edits(
    *, options: GivenOptions = DEFAULTS, steps: int = 10, rounds: int = 5, warmup: int = 5,
    only: list[str] | None = None, recorded: RunPath | None = None, allow: str = "result-equivalent",
    plan: Annotated[Path, Parameter(name=("--plan", "-o"), converter=_plan_path)] = Path("try-plan.json"),
    script: GivenScript = None,
) -> int:  # fmt: skip
    """Try what a few lines would win: precision, memory format, fused updates, torch.compile.

    The script starts once. Behind its first steps its training state is copied; each candidate, and then the winners
    together, train the same batches from there, beside the script as it is. Then the script is ended: nothing that was
    trained is kept, and what the script itself has written by then stays. The plan holds the fastest set that is
    granted: `headway run --apply PLAN` takes it.

    Example: `headway try --allow lossy,result-equivalent -- train.py`

    Args:
      steps: Steps of a trial; a quarter of them, the first ones, do not count.
      rounds: Trials of each candidate, with the others between them.
      warmup: Steps of the script's own before the first trial.
      only: A candidate, such as compile or autocast; once for each. All by default.
      recorded:
        A recorded run of the script, with a window where it trains on a device: what its plan predicts of each
        candidate stands beside what is measured.
      allow: What the plan may hold: result-equivalent, lossy, or both with a comma. All candidates are measured.
      plan: Where to write the plan.
    """
    if not script:
        raise InputError("there is no script to try. Put it behind --: headway try -- train.py")
    check(replace(options, apply=None).launch_options(TRIES, None), script)
    if options.apply is not None:
        raise InputError("--apply would try the script under a plan. Drop it.")
    if steps < 4 or rounds < 1 or warmup < 1:
        raise InputError(f"--steps is {steps}, --rounds {rounds}, --warmup {warmup}; pass at least 4, 1 and 1.")
    grants, names = granted(allow), chosen(only or [])
    predicted = _predicted(recorded) if recorded else {}
    folder = claim_folder(options.out) if options.out else next_folder(RUNS, f"{Path(script[0]).stem}-try")
    path = folder / "trial.json"
    trial = Remedy(REMEDY, {"candidates": names, "steps": steps, "rounds": rounds, "warmup": warmup})
    write_plan(PlanFile((trial,)), path)
    print(
        f"headway: {script[0]} trains {plural(warmup, 'step')}, then {plural(len(names) + 1, 'trial')} of {steps} "
        f"steps, {rounds} times; then it is ended. What it writes itself stays: checkpoints that it saves meanwhile "
        "take the place of yours, so give it a folder of its own.", file=sys.stderr, flush=True,
    )  # fmt: skip
    launched = replace(options, out=folder / "run", apply=path, windows=0.0, quiet=True, json=True)
    report = launch(launched.launch_options(TRIES, None), script)
    if report.code == INTERRUPTED:
        return report.code  # the launcher has said so
    files = sorted((folder / "run" / "try").glob("r*.json"))
    if not files:
        # Behind the warm-up one step begins the trials, and each trial has one that does not count.
        raise InputError(
            f"the script ended (exit code {report.code}) before its step {warmup + steps + 2}, where the first trial "
            f"would be over; its run is in {folder / 'run'}. Make it work with `headway run` first, or pass a smaller "
            "--warmup or --steps."
        )
    tries = read_json(files[0], Tries)
    if not tries.branches:
        raise InputError(f"nothing was tried: {tries.ended}.")
    rows = rows_of(tries, predicted)
    best = best_of(rows, grants)
    write_plan(_plan(best, rows), plan)
    result = {
        "schema": "headway.try/1", "baseline_step_s": tries.step_s, "rows": msgspec.to_builtins(rows),
        "best": list(best.remedies) if best else [], "ended": tries.ended, "path": str(plan),
    }  # fmt: skip
    command = run_command(run_at(folder / "run").facts, "--apply", str(plan)) if best else ""
    return emit(result, lambda screen: _screen(tries, rows, best, command, screen), as_json=options.json)


def _predicted(recorded: Path) -> dict[str, Interval]:
    """Return what the plan of a recorded run says of the candidates: low end, likely, high end."""
    plan = explain([recorded], allow=tuple(ALLOWANCES)).plan
    rows = [row for row in (plan.proposals if plan is not None else ()) if row.name in CANDIDATES]
    return {row.name: (row.interval[0], row.predicted_speedup, row.interval[1]) for row in rows}


def _plan(best: TryRow | None, rows: list[TryRow]) -> PlanFile:
    """Return the plan of the best set; each remedy has what it won alone."""
    if best is None or best.measured is None:
        return PlanFile()
    remedies = []
    for name in best.remedies:
        low, mid, high = next((row.measured for row in rows if row.remedies == (name,)), None) or best.measured
        remedies.append(Remedy(name, predicted_speedup=mid, interval=(low, high), allow=CANDIDATES[name] or None))
    low, mid, high = best.measured
    return PlanFile(tuple(remedies), predicted_speedup=mid, interval=(low, high))


def _screen(tries: Tries, rows: list[TryRow], best: TryRow | None, command: str, screen: ScreenOptions) -> str:
    """Draw a row per set, and what comes next: `command`."""
    foretold = any(row.predicted for row in rows)
    table = grid("left", *["right"] * foretold, "right", "left", "left")
    add_row(table, "what", *["predicted"] * foretold, "gain", "between", "loss", style="dim")
    for row in rows:
        what = " + ".join(name.removeprefix("compute.") for name in row.remedies)
        expected = [f"{row.predicted[1]:.2f}x" if row.predicted else ""] * foretold
        if row.measured is None:
            add_row(table, what, *expected, "-", "", row.refused or "its steps were too few")
            continue
        low, mid, high = row.measured
        add_row(table, what, *expected, f"{mid:.2f}x", f"{low:.2f} to {high:.2f}", _loss(row))
    lines = []
    if best and best.measured:
        needs = ", ".join(dict.fromkeys(CANDIDATES[name] for name in best.remedies if CANDIDATES[name]))
        names = " + ".join(name.removeprefix("compute.") for name in best.remedies)
        lines.append(f"Fastest of what is granted ({needs}): {names}, {best.measured[1]:.2f}x.")
    elif any(row.measured for row in rows):
        lines.append("Nothing that is granted is faster than the script as it is: the plan holds nothing.")
    else:
        lines.append("No candidate was measured: the plan holds nothing.")
    faster = best_of(rows, ALLOWANCES)
    if faster and faster != best and faster.measured:
        names = " + ".join(name.removeprefix("compute.") for name in faster.remedies)
        lines.append(f"With --allow lossy,result-equivalent: {names}, {faster.measured[1]:.2f}x; it changes results.")
    if tries.ended:
        lines.append(f"Not all was tried: {tries.ended}.")
    head = Text(f"  {format_seconds(tries.step_s)} a step as it is")
    return draw([head, "", uncut(table), "", *map(paragraph, lines), *next_of(command)], **screen)


def _loss(row: TryRow) -> str:
    """Say how the loss came out beside that of the script as it is, and what two plain branches differ by."""
    if row.loss_difference is None:
        return "no loss to compare: the batches differ"
    noise = "" if row.noise is None else f", {row.noise:.2g} between two plain trials"
    return f"differs by {row.loss_difference:.2g}{noise}"
