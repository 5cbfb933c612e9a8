"""`headway data serve` and `status`: what is named is served, how it is is told, mistakes are the caller's."""

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headway.core.errors import InputError
from headway.data import DataLoader, Pipeline, SyntheticJpeg
from headway.verbs.loading.data_serve import serve, status
from tests.paths import ROOT, python_path
from tests.served_made import end, has_ended, server_of

MODULE = """
import torch
from headway.data import Pipeline, SyntheticJpeg
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, k): return k
rows = Rows()
def images(): return Pipeline(SyntheticJpeg(6, 32, 24)).decode().resize(8, 8)
nothing = 7
"""


@pytest.fixture
def folder(monkeypatch):
    """A folder with the module, in which sockets have short paths."""
    made = Path(tempfile.mkdtemp())
    (made / "served_module.py").write_text(MODULE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    yield made
    sys.modules.pop("served_module", None)
    shutil.rmtree(made)


@pytest.mark.slow
def test_what_is_named_is_served_until_it_is_told_to_end(folder, capsys):
    command = [sys.executable, "-m", "headway.cli", "data", "serve", "served_module:images", "--cache", "1MiB"]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    path = process.stdout.readline().decode().strip()
    loader = Pipeline(SyntheticJpeg(6, 32, 24)).decode().resize(8, 8).batch(2).loader(server=path)

    assert [batch["ids"].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert status(json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)["servers"]
    assert (told["path"], told["pid"], told["answers"]) == (path, process.pid, True)
    assert told["prepared"]["storage"] >= 6
    assert status() == 0
    said = capsys.readouterr().out
    assert path in said
    assert "1 of 1" in said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert not Path(path).exists()


def test_no_server_is_said_in_both_ways(folder, capsys):
    assert status() == 0
    assert status(json=True) == 0
    text, told = capsys.readouterr().out.splitlines()

    assert text == "no data server runs"
    assert json.loads(told) == {"schema": "headway.data.status/1", "servers": []}
    with pytest.raises(InputError, match="headway data status"):
        status(folder / "none")


def test_a_server_that_died_is_listed_as_dead_with_what_removes_its_leavings(folder, capsys):
    list(DataLoader(importlib.import_module("served_module").rows, 4, server="auto"))
    (path,) = (folder / "headway").glob("*.sock")
    pid = server_of(path)
    end(path, signal.SIGKILL)

    assert status(json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)["servers"]
    assert (told["path"], told["pid"], told["answers"], told["dead"]) == (str(path), None, False, True)
    assert has_ended(pid)
    assert status() == 0
    said = capsys.readouterr().out
    assert "its server died" in said
    assert shlex.join(told["remove"]) in " ".join(said.split())
    for left in told["remove"]:
        Path(left).unlink()
    assert not list((folder / "headway").iterdir())
    assert status() == 0
    assert capsys.readouterr().out == "no data server runs\n"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("served_module", "Write MODULE:NAME"),
        ("served_module:other", "cannot import served_module:other"),
        ("no_such_module:x", "cannot import no_such_module:x"),
        ("served_module:nothing", "is a int without length"),
    ],
)
def test_what_cannot_be_served_is_the_callers_mistake(folder, target, said):
    with pytest.raises(InputError, match=said):
        serve(target)


def test_a_path_that_is_in_use_is_refused(folder, capsys):
    list(DataLoader(importlib.import_module("served_module").rows, 4, server="auto"))
    (path,) = (folder / "headway").glob("*.sock")
    with pytest.raises(InputError, match="a server listens at"):
        serve("served_module:rows", socket=path)
    status(json=True)
    os.kill(json.loads(capsys.readouterr().out)["servers"][0]["pid"], signal.SIGTERM)
