"""`headway data verify-resume`: prove on a script's own data that its loader goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from headway.catalog import CHECKS
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.trace.recording.run_facts import outcomes_of
from headway.verbs.shared.output import AsJson, emit


def verify_resume(
    *,
    batches: int = 12,
    nproc_per_node: str | None = None,
    module: Annotated[bool, Parameter(alias="-m")] = False,
    out: Path | None = None,
    json: AsJson = False,
    script: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Interrupt the loaders of a script, go on, and compare every example bit by bit.

    The script is started unmodified and stopped at its first optimizer step.
    Before that, each loader it reads is read by headway's own loader, without
    interruption and with one, going on with other numbers of workers and
    ranks. Exit code 3 if anything differed. What a script draws at random
    outside its dataset and collate function is its own to save.

    Example: `headway data verify-resume -- train.py --lr 1e-3`

    Args:
      batches: Global batches to compare, over the ends of epochs.
      nproc_per_node: Ranks on this host, a number, auto, cpu or gpu. 1 by default.
      module: The script is a module, as in python -m.
      out: Folder for the run; headway-runs/SCRIPT-resume-N by default.
    """
    if script is None:
        raise InputError("there is no script to verify. Put it behind --: headway data verify-resume -- train.py")
    if batches < 2:
        raise InputError(f"--batches is {batches}; an interruption needs a batch before and after it. Pass 2 or more.")
    check(LaunchOptions(nproc_per_node=nproc_per_node, module=module), script)
    folder = claim_folder(out) if out else next_folder(RUNS, f"{Path(script[0]).stem}-resume")
    plan = folder / "check.json"
    write_plan(PlanFile((Remedy("check.resume", {"batches": batches}),)), plan)
    options = LaunchOptions(
        nproc_per_node=nproc_per_node, module=module, out=folder / "run", apply=plan, remedies=CHECKS, windows=0.0,
        quiet=True, json=True,
    )  # fmt: skip
    report = launch(options, script)
    if report.code:
        raise InputError(
            f"the script failed (exit code {report.code}, {report.cls}); its run is in {folder / 'run'}. Make it work "
            "with `headway run` first."
        )
    loaders = _loaders(folder / "run")
    equal = [case["examples"] and case["batches"] is not False for row in loaders for case in row.get("cases", [])]
    answer = {
        "schema": "headway.data-verify-resume/1",
        "script": script[0],
        "run": str(folder / "run"),
        "loaders": loaders,
        "exact": bool(equal) and all(equal),
        "compared": len(equal),
    }
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0 if answer["exact"] else 3


def _loaders(run: Path) -> list[dict[str, Any]]:
    """Return the facts of every loader, of the first rank: all ranks read the same. Raises `InputError` on none."""
    found: list[dict[str, Any]] = []
    for row in outcomes_of(run, rank=0):
        found += (loaders := (row.facts or {}).get("loaders", []))
        if row.reason_not_applied and not loaders:
            found.append({"dataset": "", "reason_not_applied": row.reason_not_applied})
    if not found:
        raise InputError("the script read nothing through a torch DataLoader before its first optimizer step.")
    return found


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    words = {True: "equal", False: "DIFFERENT", None: "-"}
    parts: list[Any] = []
    for row in answer["loaders"]:
        workers = f", {row['num_workers']} worker{'s' * (row['num_workers'] != 1)}" if "num_workers" in row else ""
        parts.append(Text(f"  {row['dataset']}{workers}" if row.get("dataset") else "  Loaders", style="bold"))
        if "reason_not_applied" in row:
            parts.append(paragraph(f"Not verified: {row['reason_not_applied']}"))
            continue
        table = headed("goes on with", "examples", "batches", align="left left left")
        for case in row["cases"]:
            add_row(table, case["case"], words[case["examples"]], words[case["batches"]])
        parts.append(table)
        if row["hint"]:
            parts.append(paragraph(row["hint"]))
        if row["loader"] == "torch":
            parts.append(
                paragraph(
                    "The script uses torch's own loader, which has no state: this is what "
                    "`from headway.data import DataLoader` would give it.",
                    style="dim",
                )
            )
    verdict = "Resume is exact." if answer["exact"] else "Resume is NOT proven exact."
    parts.append("")
    parts.append(Text(f"  {verdict} {answer['compared']} interruptions compared.", style="bold"))
    return draw(parts, **screen)
