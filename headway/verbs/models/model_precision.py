"""`headway model precision`: which operators of which rank compute in fewer bits, measured in short phases."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.text import Text

from headway.catalog import PRECISION_PHASES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.safe_files import read_json
from headway.core.units import format_seconds
from headway.model.precision.proposal import PhaseOfRank, Phases, PrecisionChoice, planned
from headway.model.remedies import PRECISIONS
from headway.report.paper import ScreenOptions, add_row, draw, grid, next_of, paragraph, uncut
from headway.runtime.launching.launch import launch
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.verbs.shared.output import emit
from headway.verbs.shared.run_options import RunOptions
from headway.verbs.shared.source import run_at
from headway.why.fixes import run_command

REMEDY, PHASE = "model.precision", "measure.precision"
DEFAULT = RunOptions()

WARMUP, STEPS = 3, 10
"""Steps of a phase that do not count, and those of each kind that do."""


def precision(
    *, options: Annotated[RunOptions, Parameter(name="*")] = DEFAULT,
    plan: Annotated[Path, Parameter(name=("--plan", "-o"))] = Path("precision-plan.json"),
    script: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:  # fmt: skip
    """Choose operators of each rank that compute in bf16 or int8, so that unlike ranks keep one pace (QSync).

    The script runs once per precision, a few steps each, and what it writes it writes each time. Each mixture is
    predicted by replay; the plan loses least among those as fast as the fastest. It changes what is computed:
    `headway run --apply PLAN` does so, and `headway compare` says what it won.

    Example: `headway model precision --nproc-per-node 2 -o plan.json -- train.py`

    Args:
      plan: Where to write the plan.
    """
    if not script:
        raise InputError("there is no script to measure. Put it behind --: headway model precision -- train.py")
    if options.apply is not None:
        raise InputError("--apply would measure the script under a plan. Drop it.")
    folder = claim_folder(options.out) if options.out else next_folder(RUNS, f"{Path(script[0]).stem}-precision")
    phases = {name: _phase(name, folder, options, script) for name in reversed(PRECISIONS)}
    choice = planned(phases)
    per_rank: dict[str, dict[str, str]] = {}
    for row in choice.operators:
        per_rank.setdefault(str(row["rank"]), {})[str(row["name"])] = str(row["precision"])
    speedup = choice.base_step_s / choice.step_s
    gains = (choice.base_step_s / choice.interval[1], choice.base_step_s / choice.interval[0])
    remedy = Remedy(REMEDY, {"operators": per_rank}, predicted_speedup=speedup, interval=gains, allow="lossy")
    lowered = any(row["precision"] != "float32" for row in choice.operators)
    write_plan(PlanFile((remedy,) if lowered else (), baseline=str(folder / "float32")), plan)
    result = {"schema": "headway.model-precision/1", **msgspec.to_builtins(choice), "path": str(plan)}
    command = run_command(run_at(folder / "float32").facts, "--apply", str(plan)) if lowered else ""
    return emit(result, lambda screen: _screen(choice, phases, command, screen), as_json=options.json)


def _phase(name: str, folder: Path, options: RunOptions, script: list[str]) -> dict[int, PhaseOfRank]:
    """Run one phase; raises `InputError` where the script fails or trains no operator."""
    in_sync = STEPS if name == "float32" else 0
    steps = WARMUP + STEPS + in_sync
    print(f"headway: all operators in {name}, {steps} steps", file=sys.stderr, flush=True)
    path = folder / f"{name}.json"
    settings = {"precision": name, "warmup": WARMUP, "steps": STEPS, "in_sync": in_sync}
    write_plan(PlanFile((Remedy(PHASE, settings),)), path)
    launched = replace(options, out=folder / name, apply=path, windows=0.0, quiet=True, json=True)
    report = launch(launched.launch_options(PRECISION_PHASES, None), script)
    ranks = [read_json(file, PhaseOfRank) for file in sorted((folder / name / "phase").glob("r*-*.json"))]
    if report.code or not ranks:
        raise InputError(
            f"the script ended before {steps} steps of the {name} phase (exit code {report.code}); its run is "
            f"in {folder / name}. Make it work with `headway run` first, for more steps."
        )
    if not ranks[0].names:
        raise InputError(
            "the script trains no nn.Linear and no nn.Conv2d, and nothing can be lowered. Run another one."
        )
    return {rank.rank: rank for rank in ranks}


def _screen(choice: PrecisionChoice, phases: Phases, command: str, screen: ScreenOptions) -> str:
    """Draw a row per rank, and what the phases measured; `command` comes next."""
    rows = grid("right", "right", "right", "right", "left")
    add_row(rows, "rank", *(f"all {name}" for name in reversed(PRECISIONS)), "the plan", style="dim")
    for rank in sorted(phases["float32"]):
        bits = [str(row["precision"]) for row in choice.operators if row["rank"] == rank]
        counts = ", ".join(f"{bits.count(name)} {name}" for name in reversed(PRECISIONS) if name in bits)
        steps = (format_seconds(sum(phases[name][rank].step_s)) for name in reversed(PRECISIONS))
        add_row(rows, str(rank), *steps, counts)
    lowered = sum(row["precision"] != "float32" for row in choice.operators)
    text = f"{lowered} of {len(choice.operators)} operators are lowered; indicator {choice.omega:.4g}."
    if not lowered:
        text = "No mixture is faster here than float32 for all: the plan holds nothing."
    head = Text(f"  {format_seconds(choice.base_step_s)} a step, {format_seconds(choice.step_s)} predicted")
    return draw([head, "", uncut(rows), "", paragraph(text), *next_of(command)], **screen)
