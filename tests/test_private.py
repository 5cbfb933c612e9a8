"""What headway makes is the user's alone by default, and a folder that somebody else made first is not used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway import Checkpointer
from headway.core.errors import InputError
from headway.core.files import private
from headway.core.files.private import runtime_directory
from headway.data import DataLoader
from tests.launching import refusal
from tests.paths import ROOT, python_path

JOB = "import sys; print('said'); print('more', file=sys.stderr)"


def run(folder: Path, *options: str) -> dict[str, int]:
    """Run a script under an open umask; returns file -> mode of the run folder, and of --log-dir beside it."""
    (folder / "job.py").write_text(JOB)
    subprocess.run(
        [sys.executable, "-m", "headway.cli", "run", "--quiet", *options, "--", "job.py"], cwd=folder, check=True,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)}, umask=0o022, capture_output=True, timeout=100,
    )  # fmt: skip
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777
        for path in folder.rglob("*")
        if path.name in ("run.json", "r0.out", "r0.err") or path.name in ("run", "job-1", "theirs", "kept", "logs")
    }


def test_a_run_and_its_logs_are_the_users_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    modes = run(tmp_path, "--log-dir", "kept")

    files = {"headway-runs/job-1/run.json": 0o600, "kept/r0.out": 0o600, "kept/r0.err": 0o600}
    folders = {"headway-runs/job-1": 0o700, "headway-runs/job-1/logs": 0o700, "kept": 0o755}
    assert modes == files | folders


def test_mode_opens_it_to_others(tmp_path):
    modes = run(tmp_path, "--out", "run", "--mode", "750")

    assert modes == {
        "run": 0o750, "run/logs": 0o750, "run/run.json": 0o640, "run/logs/r0.out": 0o640, "run/logs/r0.err": 0o640,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["0", "600", "rwx", "7777", "1700"])
def test_a_mode_that_locks_its_owner_out_is_refused(mode):
    assert "--mode is" in refusal("run", "--mode", mode, "--", "job.py")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Stand-ins for the folders in which the runtime folder may lie, none of them this user's session's."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    found = [tmp_path / name / "headway" for name in ("tmp", "shm", "home")]
    monkeypatch.setattr(private, "_places", lambda: iter(found))
    return found


SQUATTED = {
    "a dangling link": lambda folder: folder.symlink_to("/nonexistent"),
    "a link to a folder of theirs": lambda folder: folder.symlink_to("/etc"),
    "a file": lambda folder: folder.touch(),
    "a folder that others may enter": lambda folder: folder.mkdir(0o755),
    "somebody else's folder": lambda folder: (folder.mkdir(0o700), os.chown(folder, os.getuid() + 1, -1)),
}


@pytest.mark.parametrize("what", SQUATTED)
def test_what_somebody_laid_in_the_place_of_the_runtime_folder_is_passed_by(places, what):
    if what.startswith("somebody") and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    for place in places[:2]:
        place.parent.mkdir()
        SQUATTED[what](place)

    assert runtime_directory() == runtime_directory() == places[2]
    assert places[2].stat().st_mode & 0o777 == 0o700


MADE = {
    "a checkpointer": lambda folder: Checkpointer(folder, model=torch.nn.Linear(2, 2)),
    "a served loader": lambda folder: DataLoader(torch.arange(8.0), batch_size=2, server="auto"),
}


@pytest.mark.parametrize("what", MADE)
def test_where_no_runtime_folder_can_be_had_the_object_says_so_when_it_is_made(places, tmp_path, what):
    for place in places:
        place.parent.mkdir()
        place.symlink_to("/nonexistent")

    with pytest.raises(InputError, match=r"must be a folder of user .* set XDG_RUNTIME_DIR"):
        MADE[what](tmp_path / "checkpoints")
