"""`headway data audit`: prove from what runs recorded that every example was delivered once per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.data.loader.audit import VERDICTS, Epoch, Leg, judge, legs_of, passes_of
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.recording.runs import Run, merge
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import newest_run, run_at

WRONG = ("repeats", "loses")
"""Verdicts that make the exit code 3."""


def audit(*runs: Path, json: bool = False) -> int:
    """Prove that every example was delivered exactly once per epoch, over interruptions and other world sizes.

    Reads what headway's own DataLoader noted in recorded runs: a sum of
    hashes per rank and pass. Name all the runs that one job consists of,
    the interrupted ones and those that went on; their order does not
    matter. What an interruption made the job do again is counted apart. An
    epoch that did not end is "open". Exit code 3 when an example was
    repeated or lost.

    Example: `headway data audit headway-runs/train-1 headway-runs/train-2`

    Parameters
    ----------
    runs
        Run folders; the newest one by default. Folders of several hosts of one run count as one.
    json
        Print one JSON object instead of text.
    """
    opened = _opened(runs or (newest_run(),))
    loaders = {int(group): facts for run in opened for group, facts in run.facts.loaders.items()}
    sizes = {group: facts.dataset_size for group, facts in loaders.items() if facts.dataset_size}
    epochs = judge(legs(opened), sizes)
    if not epochs:
        raise InputError(
            f"{', '.join(str(run.path) for run in opened)} holds no delivery of headway's DataLoader. Import it from "
            "headway.data in place of torch's and record again; torch's own leaves no such record."
        )
    answer = {
        "schema": "headway.data.audit/1",
        "runs": [str(run.path) for run in opened],
        "epochs": [_row(epoch, loaders.get(epoch.loader, LoaderFacts())) for epoch in epochs],
        "exact": all(epoch.verdict == "exact" for epoch in epochs),
        "wrong": sum(epoch.verdict in WRONG for epoch in epochs),
    }
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 3 if answer["wrong"] else 0


def _opened(paths: Iterable[Path]) -> list[Run]:
    """Open the runs; the parts of one run are joined."""
    found: dict[str, list[Run]] = {}
    for path in dict.fromkeys(Path(path).resolve() for path in paths):
        run = run_at(path)
        told = any(path.glob("run*.json"))  # a folder cut short has no name of its run
        found.setdefault(str(run.facts.run_id if told else path), []).append(run)
    return [merge(parts) for parts in found.values()]


def legs(runs: Iterable[Run]) -> list[Leg]:
    """Return the legs of all attempts of some runs, on the realtime clock."""
    found = []
    for run in runs:
        shift_ns = run.facts.realtime_shift_ns
        for number, attempt in enumerate(run.attempts()):
            ranks = zip(attempt.numbers, attempt, strict=True)
            passes = {rank: passes_of(part, rank, shift_ns=shift_ns) for rank, part in ranks}
            found += legs_of(run.path.name, number, passes)
    return found


def _row(epoch: Epoch, facts: LoaderFacts) -> dict[str, Any]:
    return {"dataset": facts.dataset or None, **epoch.to_json()}


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Return a row per epoch, and the verdict."""
    table = grid("left", "right", "right", "right", "right", "left")
    add_row(table, "loader", "epoch", "expected", "delivered", "again", "verdict", style="dim")
    for row in answer["epochs"]:
        name = str(row["loader"]) if row["dataset"] is None else f"{row['loader']} ({row['dataset']})"
        name += f", replica {row['replica']}" if row["replica"] else ""
        add_row(
            table, name, f"{row['epoch']}", f"{row['expected']}", f"{row['delivered']}", f"{row['again']}",
            row["verdict"], style="bold red" if row["verdict"] in WRONG else "",
        )  # fmt: skip
    met = {row["verdict"] for row in answer["epochs"]}
    words = [paragraph(f"{verdict}: {meaning}", style="dim") for verdict, meaning in VERDICTS.items() if verdict in met]
    if answer["wrong"]:
        verdict = f"{answer['wrong']} epochs are NOT exact."
    elif "exact" in met:
        verdict = "Every epoch that ended was delivered exactly once."
    else:
        verdict = "No epoch ended; nothing that was delivered is wrong."
    return draw([table, "", *words, Text(f"  {verdict}", style="bold")], **screen)
