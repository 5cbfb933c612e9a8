"""`headway tune`: run an unmodified script, and tune its settings while it trains."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from headway.catalog import REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.safe_files import converted
from headway.core.units import plural
from headway.model.tuning.space import parsed
from headway.report.paper import ScreenOptions, draw, next_of, paragraph
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.trace.recording.run_facts import outcomes_of
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath

REMEDY = "model.tune"

LABELS = {"converging": "its loss fell clearly", "unstable": "the best of those tried; no loss fell clearly"}
"""What a label of a trial says to a user."""


def tune(
    *,
    setting: list[str] | None = None,
    trials: int = 16,
    seed: int = 0,
    module: Annotated[bool, Parameter(alias="-m")] = False,
    out: GivenPath | None = None,
    json: AsJson = False,
    script: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
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
    answer = {
        "schema": "headway.tune/1", "setting": found.setting, "metric": found.metric, "steps": found.steps,
        "trials": found.trials, "label": found.label, "path": str(folder / "run"),
        "reason_not_tuned": reason or _nothing(found),
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


def _nothing(found: Tuned) -> str | None:
    if found.setting:
        return None
    if found.trials:
        return "no trial made progress: with none of the settings did the loss fall. Try other ranges"
    return found.reason


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    if answer["reason_not_tuned"]:
        return draw(
            [paragraph(f"Not tuned: {answer['reason_not_tuned'].rstrip('.')}. Run: {answer['path']}")], **screen
        )
    chosen = ", ".join(f"{name} = {value:.4g}" for name, value in answer["setting"].items())
    state = LABELS.get(answer["label"], answer["label"]) or (
        "the search had not ended" if answer["trials"] else "nothing to choose from"
    )
    loss = "no loss was seen" if answer["metric"] is None else f"last loss {answer['metric']:.4g}"
    words = [
        f"{chosen} ({state}), after {plural(answer['trials'], 'trial')}; {plural(answer['steps'], 'step')} in all, "
        f"{loss}.",
        f"Run: {answer['path']}",
    ]
    command = shlex.join(["headway", "report", answer["path"], "-o", "report.html"])
    return draw([*(paragraph(word) for word in words), *next_of(command)], **screen)
