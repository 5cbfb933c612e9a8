"""The set-up script: when it installs, when it does not, and what it says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.fixture
def go(tmp_path, monkeypatch):
    """`go.py` as a module, in a made-up checkout with a space in its path, with an installer that only notes calls."""
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).write_text((ROOT / name).read_text())
    spec = importlib.util.spec_from_file_location("go_under_test", ROOT / "go.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", checkout)
    monkeypatch.setattr(module, "VENV", checkout / ".venv")
    module.calls = []

    def install(python, extras):
        module.calls.append(tuple(extras))
        module.VENV.mkdir(exist_ok=True)

    monkeypatch.setattr(module, "install", install)
    return module


def test_the_second_set_up_installs_nothing(go):
    go.set_up(())
    go.set_up(())

    assert go.calls == [()]


def test_more_extras_are_added_and_fewer_are_there_already(go):
    go.set_up(())
    go.set_up(("test",))
    go.set_up(())

    assert go.calls == [(), ("test",)]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_the_stamp_changes_when_an_input_changes(go, name):
    go.set_up(())
    (go.ROOT / name).write_text("# something else\n")
    go.set_up(())

    assert len(go.calls) == 2


def test_an_interrupted_set_up_is_done_again(go, monkeypatch):
    def killed(python, extras):
        go.VENV.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(go, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            go.set_up(())
    go.set_up(())

    assert go.calls == [()]
    assert json.loads((go.VENV / "headway-stamp.json").read_text())["extras"] == []


def test_an_unknown_task_lists_the_tasks():
    answer = subprocess.run([sys.executable, str(ROOT / "go.py"), "dmeo"], capture_output=True, text=True)

    assert answer.returncode == 2
    assert "Tasks: demo" in answer.stdout


def test_the_constraints_pin_torch_without_naming_a_build():
    pins = (ROOT / "constraints.txt").read_text().splitlines()

    assert "torch==2.13.0" in pins
    assert not [pin for pin in pins if pin.startswith("headway") or "+cpu" in pin or "://" in pin]
