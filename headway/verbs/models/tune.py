"""`headway tune`: run an unmodified script, and tune its settings while it trains.

`headway model precision`: which operators of which rank compute in fewer bits, measured in short phases.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.text import Text

from headway.catalog import PRECISION_PHASES, REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.safe_files import converted, read_json
from headway.core.units import format_seconds, plural
from headway.model.precision.proposal import PhaseOfRank, Phases, PrecisionChoice, planned
from headway.model.remedies import PRECISIONS
from headway.model.tuning.space import parsed
from headway.report.paper import ScreenOptions, add_row, draw, grid, next_of, paragraph, uncut
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.trace.recording.run_facts import outcomes_of
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import (
    DEFAULTS,
    AsModule,
    GivenOptions,
    GivenPath,
    GivenScript,
    RunOptions,
    run_at,
)
from headway.why.fixes import run_command

REMEDY = "model.tune"

LABELS = {"converging": "its loss fell clearly", "unstable": "the best of those tried; no loss fell clearly"}
"""What a label of a trial says to a user."""

NO_PROGRESS = "no trial made progress: with none of the settings did the loss fall. Try other ranges"


def tune(
    *, setting: list[str] | None = None, trials: int = 16, seed: int = 0, module: AsModule = False,
    out: GivenPath | None = None, json: AsJson = False, script: GivenScript = None,
) -> int:  # fmt: skip
    """Tune settings of a script's optimizer while it trains; this changes what it learns.

    Settings are tried on branches of the training state in memory, on the same batches; the run goes on from the
    best one, and tries again when the loss no longer falls. The script is not edited: it needs one optimizer, one
    DataLoader that trains, and a loss on which `backward` is called. Where that is not found the script trains as it
    would have, and the exit code is 3. What it prints and counts in its loop includes the steps of trials.

    Example: `headway tune --setting lr=1e-5:1:log --setting momentum=0:0.99 -- train.py`

    Args:
      setting: NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=VALUE,VALUE; once for each tunable. lr=1e-5:1:log by default.
      trials: Most trials of the first search.
      seed: Of the settings that are drawn.
      module: The script is a module, as in python -m.
      out: Folder for the plan and, in its folder run, the run; headway-runs/SCRIPT-tune-N by default.
    """
    if script is None:
        raise InputError("there is no script to tune. Put it behind --: headway tune -- train.py")
    if trials < 1 or seed < 0:
        raise InputError(f"--trials is {trials} and --seed {seed}; pass at least 1 and at least 0.")
    names = [parsed(text)[0] for text in setting or ()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"--setting names {', '.join(twice)} more than once. Give each setting one range.")
    check(LaunchOptions(module=module), script)
    folder = claim_folder(out) if out else next_folder(RUNS, f"{Path(script[0]).stem}-tune")
    plan = folder / "plan.json"
    parameters: dict[str, Any] = {"trials": trials, "seed": seed, **({"settings": setting} if setting else {})}
    write_plan(PlanFile((Remedy(REMEDY, parameters, allow="lossy"),)), plan)
    options = LaunchOptions(
        module=module, out=folder / "run", apply=plan, remedies={REMEDY: REMEDIES[REMEDY]}, windows=0.0, quiet=True,
        json=json,
    )  # fmt: skip
    report = launch(options, script)
    rows = [row for row in outcomes_of(folder / "run", rank=0) if row.name == REMEDY]
    found, _ = converted((rows[0].facts or {}) if rows else {}, Tuned)
    reason = rows[0].reason_not_applied if rows else "the script ended before torch was imported"
    nothing = None if found.setting else NO_PROGRESS if found.trials else found.reason
    answer = {
        "schema": "headway.tune/1", "setting": found.setting, "metric": found.metric, "steps": found.steps,
        "trials": found.trials, "label": found.label, "path": str(folder / "run"),
        "reason_not_tuned": reason or nothing,
    }  # fmt: skip
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return report.code or (3 if answer["reason_not_tuned"] else 0)


class Tuned(msgspec.Struct, frozen=True):
    """What the tuner says of its trials."""

    setting: Any = None
    metric: Any = None
    steps: int = 0
    trials: int = 0
    label: str = ""
    reason: str = "no DataLoader was read"


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    if answer["reason_not_tuned"]:
        reason = answer["reason_not_tuned"].rstrip(".")
        return draw([paragraph(f"Not tuned: {reason}. Run: {answer['path']}")], **screen)
    chosen = ", ".join(f"{name} = {value:.4g}" for name, value in answer["setting"].items())
    state = LABELS.get(answer["label"], answer["label"]) or (
        "the search had not ended" if answer["trials"] else "nothing to choose from"
    )
    loss = "no loss was seen" if answer["metric"] is None else f"last loss {answer['metric']:.4g}"
    done = f"after {plural(answer['trials'], 'trial')}; {plural(answer['steps'], 'step')} in all, {loss}."
    parts = [paragraph(f"{chosen} ({state}), {done}"), paragraph(f"Run: {answer['path']}")]
    return draw([*parts, *next_of(shlex.join(["headway", "report", answer["path"], "-o", "report.html"]))], **screen)


PRECISION, PRECISION_PHASE = "model.precision", "measure.precision"
WARMUP, STEPS = 3, 10
"""Steps of a phase that do not count, and those of each kind that do."""


def precision(
    *, options: GivenOptions = DEFAULTS,
    plan: Annotated[Path, Parameter(name=("--plan", "-o"))] = Path("precision-plan.json"), script: GivenScript = None,
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
    remedy = Remedy(PRECISION, {"operators": per_rank}, predicted_speedup=speedup, interval=gains, allow="lossy")
    lowered = any(row["precision"] != "float32" for row in choice.operators)
    write_plan(PlanFile((remedy,) if lowered else (), baseline=str(folder / "float32")), plan)
    result = {"schema": "headway.model-precision/1", **msgspec.to_builtins(choice), "path": str(plan)}
    command = run_command(run_at(folder / "float32").facts, "--apply", str(plan)) if lowered else ""
    return emit(result, lambda screen: _precision_screen(choice, phases, command, screen), as_json=options.json)


def _phase(name: str, folder: Path, options: RunOptions, script: list[str]) -> dict[int, PhaseOfRank]:
    """Run one phase; raises `InputError` where the script fails or trains no operator."""
    in_sync = STEPS if name == "float32" else 0
    steps = WARMUP + STEPS + in_sync
    print(f"headway: all operators in {name}, {steps} steps", file=sys.stderr, flush=True)
    path = folder / f"{name}.json"
    settings = {"precision": name, "warmup": WARMUP, "steps": STEPS, "in_sync": in_sync}
    write_plan(PlanFile((Remedy(PRECISION_PHASE, settings),)), path)
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


def _precision_screen(choice: PrecisionChoice, phases: Phases, command: str, screen: ScreenOptions) -> str:
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
