"""Which run or trace a verb is about: a path, several, or the newest run of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.core.errors import InputError
from headway.core.files.safe_files import read_json
from headway.runtime.run_folder.recording import RUNS
from headway.trace.recording.runs import Run, is_run, run_near
from headway.verbs.shared.run_options import given_path

RunPath = Annotated[Path, Parameter(converter=given_path)]
"""A run or a trace that a verb reads."""

NewestRun = Annotated[Path | None, Parameter(help="A run folder; the newest one by default.", converter=given_path)]
"""The argument RUN of a verb, as `run_at` takes it."""


def newest_run() -> Path:
    """Return the newest run folder of this directory. Raises `InputError` when there is none."""
    runs = recorded_runs()
    if not runs:
        raise InputError(
            f"there is no run in {RUNS.resolve()}. Record one with: headway run -- train.py, or name a run."
        )
    return runs[0]


def recorded_runs() -> list[Path]:
    """Return the run folders of this directory, the newest first."""
    runs = [path for path in RUNS.iterdir() if is_run(path)] if RUNS.is_dir() else []
    return sorted(runs, key=started_ns, reverse=True)


def recorded() -> str:
    """Say which runs this directory has, the newest first: 'There are headway-runs/train-2, headway-runs/train-1.'"""
    names = list(map(str, recorded_runs()))
    if not names:
        return f"There is none in {RUNS}: record one with headway run -- train.py."
    more = f" and {len(names) - MOST_NAMED} older ones" if len(names) > MOST_NAMED else ""
    return f"There {'are' if len(names) > 1 else 'is'} {', '.join(names[:MOST_NAMED])}{more}."


MOST_NAMED = 5
"""Runs that an error names."""


def started_ns(path: Path) -> int:
    """Return when the run at `path` began, in ns of the realtime clock.

    As recorded: a copy or an older run finalised late keeps its place. Where no fact was kept, when the folder changed.
    """
    for file in [path / "run.json", *sorted(path.glob("run-host*.json"))]:
        try:
            return int(read_json(file)["realtime_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return path.stat().st_mtime_ns


def run_at(path: Path | None) -> Run:
    """Open the run folder at `path` (None = the newest). Raises `InputError` when it is not one."""
    path = path or newest_run()
    if not path.exists():
        raise InputError(f"{path} does not exist. Name a run folder. {recorded()}")
    if not is_run(path):
        raise InputError(f"{path} is not a run folder. {run_near(path) or 'Name one that headway run made.'}")
    return Run.open(path)
