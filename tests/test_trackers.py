"""`headway run --wandb`, `--mlflow`: the account reaches the script's run, and no library reaches the script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.errors import InputError
from headway.trace.recording.runs import Run
from headway.verbs.runs.run import check_importable, hand_over

GOLDEN = Path(__file__).parent / "golden" / "runs" / "before"
WANDB = """
import json
from pathlib import Path
calls = []
Settings = dict
class Artifact:
    def __init__(self, name, type): self.name, self.files = name, []
    def add_file(self, path): self.files.append(Path(path).name)
class Run:
    def __init__(self, how): self.how, self.summary = how, {}
    def log_artifact(self, artifact): self.artifact = artifact
    def finish(self, exit_code):
        print("wandb: a library may print")
        told = [self.how, self.summary, self.artifact.name, self.artifact.files, exit_code]
        Path("told.json").write_text(json.dumps(told))
def init(**how): return Run(how)
"""
MLFLOW = """
import json
from pathlib import Path
from types import SimpleNamespace as Space
class MlflowClient:
    def __init__(self): self.told = []
    def search_experiments(self): return [Space(experiment_id="0")]
    def search_runs(self, experiments, query):
        rows = json.loads(Path("runs.json").read_text())
        return [Space(info=Space(run_id=name), data=Space(tags=tags)) for name, tags in rows.items()]
    def _tell(self, *what, step=None):
        self.told.append([*what, step])
        Path("told.json").write_text(json.dumps(self.told))
    log_metric = set_tag = log_artifact = _tell
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with made-up libraries and a recorded run."""
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    shutil.copytree(GOLDEN, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parent.parent}")
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_wandb_run_that_the_script_left_gets_summary_and_artefact(folder, capfd):
    logs = folder / "wandb" / "offline-run-20261128_091454-abc123" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug.log").write_text("INFO finishing run team/project-x/abc123\n")
    hand_over(folder / "run", ["wandb"])
    how, summary, name, files, code = json.loads((folder / "told.json").read_text())

    assert capfd.readouterr() == ("", "headway: --wandb: verdict, ledger and page are with run abc123\n")
    assert (how["id"], how["entity"], how["project"], how["mode"]) == ("abc123", "team", "project-x", "offline")
    assert (name, files, code) == ("headway-abc123", ["report.html", "why.json"], 0)
    why = json.loads((folder / "run" / "why.json").read_text())
    assert summary["headway/goodput"] == why["goodput"]
    assert summary["headway/verdict"] == why["verdict"]["sentence"]
    lost = sum(value for name, value in summary.items() if name.startswith("headway/lost/"))
    assert lost == pytest.approx(1 - why["ledger"]["useful"] / sum(why["ledger"].values()))


def test_an_mlflow_run_is_that_of_this_script_and_user_and_never_another(folder, capfd, monkeypatch):
    monkeypatch.setenv("LOGNAME", "me")
    script = Run.open(folder / "run").facts.script[0]
    tags, others = {"mlflow.user": "me", "mlflow.source.name": f"/a/{script}"}, {"mlflow.user": "you"}
    runs = folder / "runs.json"
    runs.write_text(json.dumps({"r1": tags, "r2": tags | others, "r3": tags | {"mlflow.source.name": "x.py"}}))
    hand_over(folder / "run", ["mlflow"])
    told = json.loads((folder / "told.json").read_text())

    assert "with run r1" in capfd.readouterr().err
    assert {row[0] for row in told} == {"r1"}
    assert ["r1", "headway/goodput"] in [row[:2] for row in told]
    assert [row[2] for row in told[-2:]] == ["headway", "headway"]
    runs.write_text(json.dumps({"r1": tags, "r4": tags}))
    hand_over(folder / "run", ["mlflow"])
    assert "the script left 2 runs of its own here. Name one with MLFLOW_RUN_ID." in capfd.readouterr().err


def test_a_library_that_fails_is_one_line_and_one_that_is_missing_an_error_before_the_script(folder, capfd):
    (folder / "wandb.py").write_text("raise RuntimeError('no server')")
    (folder / "script.py").write_text("raise SystemExit(7)")
    command = [sys.executable, "-m", "headway.cli", "run", "--wandb", "--out", "x", "--", "script.py"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=110)

    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith("headway: --wandb: ")
    hand_over(folder / "run", ["wandb"])
    assert capfd.readouterr().err == "headway: --wandb: RuntimeError: no server\n"
    with pytest.raises(InputError, match="--absent_library needs the library absent_library, which is missing"):
        check_importable(["absent_library"])
