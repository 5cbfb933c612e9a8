"""`headway run --wandb`, `--mlflow`: hands the account of a finished run to the tracker's run that the script opened.

`python -m headway.integrations.trackers wandb RUN` is a process of its own,
started once the script has ended, so that neither the library nor its failure
reaches script or launcher. The run is the one that
WANDB_RUN_ID or MLFLOW_RUN_ID names, else the only one that the script left:
with W&B a folder in `wandb/`, with MLflow a run of this script and user at the
tracking URI. Seconds and fractions, by the names of `headway.log_to`.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.core.errors import HeadwayError, InputError
from headway.core.units import NS_PER_S
from headway.runtime.run_folder.recording import write_json


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is given."""

    script: str
    start_s: float
    """Since the epoch, when the launcher started."""
    code: int
    """Exit code of the job."""
    num_steps: int
    verdict: str
    values: Mapping[str, float]
    """Name -> figure: `headway/goodput`, `headway/lost/input`, ..."""
    files: Sequence[Path]
    """The page and the answer of `headway why --json`."""


def account_of(run: Path) -> TrackedRun:
    """Explain a run, write its page and answer into its folder, and return what a tracker is given."""
    from headway.report.page.html import write_report
    from headway.verbs.runs.report import report_data
    from headway.why.explanation import explain

    explanation = explain([run])
    data = report_data(explanation)
    files = (run / "report.html", run / "why.json")
    write_report(data, files[0])
    write_json(files[1], data.why)
    figures = {"steps_per_s": (data.run or {}).get("steps_per_s")}
    figures |= {name: data.why[name] for name in ("goodput", "step_goodput")}
    total_s = sum(data.why["ledger"].values())
    figures |= {f"lost/{name}": s / total_s for name, s in data.why["ledger"].items() if s and name != "useful"}
    facts = explanation.ledger.facts
    return TrackedRun(
        script=facts.script[0] if facts.script else "",
        start_s=((facts.start_ns or 0) + facts.realtime_shift_ns) / NS_PER_S,
        code=facts.exit.code or 0 if facts.exit else 0,
        num_steps=int(explanation.ledger.steps),
        verdict=data.why["verdict"]["sentence"],
        values={f"headway/{name}": float(value) for name, value in figures.items() if value is not None},
        files=files,
    )


def to_wandb(account: TrackedRun) -> str:
    """Add the figures to the summary of the script's W&B run, and the files as an artefact; returns the run's name."""
    import wandb

    folder = Path(os.environ.get("WANDB_DIR", ".")) / "wandb"
    folders = [path for path in folder.glob("*run-*-*") if path.is_dir() and path.stat().st_ctime >= account.start_s]
    run_id = os.environ.get("WANDB_RUN_ID") or only([path.name.rpartition("-")[2] for path in folders], "WANDB_RUN_ID")
    log = next((path / "logs" / "debug.log" for path in folders if path.name.endswith(run_id)), Path(os.devnull))
    owner = re.search(rf"run (?:(\S+)/)?(\S+)/{re.escape(run_id)}\b", log.read_text() if log.exists() else "")
    offline = any(path.name.startswith("offline-") for path in folders)
    run = wandb.init(
        id=run_id,
        entity=owner[1] if owner else None,
        project=owner[2] if owner else None,
        mode="offline" if offline else None,
        resume="allow" if offline else "must",
        settings=wandb.Settings(silent=True),
    )
    run.summary.update({**account.values, "headway/verdict": account.verdict})
    artifact = wandb.Artifact(f"headway-{run_id}", type="headway")
    for path in account.files:
        artifact.add_file(str(path))
    run.log_artifact(artifact)
    run.finish(exit_code=account.code)
    return run_id


def to_mlflow(account: TrackedRun) -> str:
    """Log the figures, the verdict as a tag and the files to the script's MLflow run; its status stays as it is."""
    import mlflow

    client = mlflow.MlflowClient()
    run_id = os.environ.get("MLFLOW_RUN_ID", "")
    if not run_id:
        experiments = [row.experiment_id for row in client.search_experiments()]
        newer = client.search_runs(experiments, f"attributes.start_time >= {int(1000 * account.start_s)}")
        tags_here = {"mlflow.user": getpass.getuser(), "mlflow.source.name": Path(account.script).name}
        named = [(row.info.run_id, row.data.tags) for row in newer]
        run_id = only(
            [run for run, tags in named if all(Path(tags.get(name, "")).name == tags_here[name] for name in tags_here)],
            "MLFLOW_RUN_ID",
        )
    for name, value in account.values.items():
        client.log_metric(run_id, name, value, step=account.num_steps)
    client.set_tag(run_id, "headway.verdict", account.verdict)
    for path in account.files:
        client.log_artifact(run_id, str(path), "headway")
    return run_id


TRACKERS: Final[dict[str, Callable[[TrackedRun], str]]] = {"wandb": to_wandb, "mlflow": to_mlflow}
"""Library, and option of `headway run`, -> what hands an account to it."""


def only(run_ids: Sequence[str], variable: str) -> str:
    """Return the only run that the script left; raises `InputError` with none, or several."""
    if len(set(run_ids)) != 1:
        raise InputError(f"the script left {len(set(run_ids)) or 'no'} runs of its own here. Name one with {variable}.")
    return run_ids[0]


if __name__ == "__main__":
    try:
        name = TRACKERS[sys.argv[1]](account_of(Path(sys.argv[2])))
    except (HeadwayError, OSError) as cause:
        sys.exit(f"nothing was handed over: {cause}")
    sys.stdout.write(f"verdict, ledger and page are with run {name}\n")
