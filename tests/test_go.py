"""The set-up script: when it installs, when it does not, and what it says."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.paths import ROOT

ENVIRONMENT_PYTHON = """#!/bin/sh
{trouble}
echo '["{version}", "/opt/{version}"]'
"""

BASE_PYTHON = """#!/bin/sh
mkdir -p "$3/bin" && cp "$(dirname "$0")/environment-python" "$3/bin/python"
"""


def start_with(go, monkeypatch, version, *, trouble=""):
    """Let `go.py` be run by Python `version`: a program that makes environments whose Python has this `trouble`."""
    folder = go.ROOT.parent / version
    folder.mkdir(exist_ok=True)
    for name, text in (("python", BASE_PYTHON), ("environment-python", ENVIRONMENT_PYTHON)):
        file = folder / name
        file.write_text(text.format(version=version, trouble=trouble) if name != "python" else text)
        file.chmod(0o755)
    monkeypatch.setattr(go, "interpreter", lambda: [version, f"/opt/{version}"])
    monkeypatch.setattr(go.sys, "executable", str(folder / "python"))


@pytest.fixture
def go(tmp_path, monkeypatch):
    """`go.py` as a module run by Python 3.11.7, in a made-up checkout with a space in its path, where nothing is
    installed: calls are noted in `calls`.
    """
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
        (module.VENV / "installed").touch()

    monkeypatch.setattr(module, "install", install)
    start_with(module, monkeypatch, "3.11.7")
    return module


def test_more_extras_are_added_and_what_is_there_already_is_not_installed_again(go):
    for extras in ((), (), ("test",), ()):
        go.set_up(extras)

    assert go.calls == [(), ("test",)]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_the_stamp_changes_when_an_input_changes(go, name):
    go.set_up(())
    (go.ROOT / name).write_text("# something else\n")
    go.set_up(())

    assert len(go.calls) == 2


def test_an_interrupted_set_up_is_done_again(go, monkeypatch):
    def killed(python, extras):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(go, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            go.set_up(())
    go.set_up(())

    assert go.calls == [()]
    assert json.loads((go.VENV / "headway-stamp.json").read_text())["extras"] == []


def test_another_python_than_last_time_makes_a_new_environment_and_says_why(go, monkeypatch, capsys):
    go.set_up(("test",))
    (go.VENV / "of-3.11").touch()
    capsys.readouterr()
    start_with(go, monkeypatch, "3.12.1")
    go.set_up(())

    (line,) = capsys.readouterr().err.splitlines()
    assert "a new environment is made" in line
    assert "it is of Python 3.11.7 in /opt/3.11.7 and this is Python 3.12.1 in /opt/3.12.1" in line
    assert not (go.VENV / "of-3.11").exists()
    assert not (go.VENV / "headway-unfinished").exists()
    assert go.calls == [("test",), ("test",)]


def test_the_same_python_keeps_its_environment_when_the_pins_change(go):
    go.set_up(())
    (go.VENV / "of-3.11").touch()
    (go.ROOT / "constraints.txt").write_text("# something else\n")
    go.set_up(())

    assert (go.VENV / "of-3.11").exists()


def lost_interpreter(go):
    (go.VENV / "bin" / "python").unlink()
    (go.VENV / "bin" / "python").symlink_to("/opt/removed/python3.11")


def unfinished(go):
    (go.VENV / "headway-stamp.json").unlink()
    (go.VENV / "headway-unfinished").touch()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lost_interpreter, "its Python (/opt/removed/python3.11) is missing"),
        (unfinished, "its last set-up was interrupted"),
    ],
)
def test_a_harmed_environment_is_made_anew(go, capsys, harm, why):
    go.set_up(())
    harm(go)
    (go.VENV / "half-a-package").touch()
    capsys.readouterr()
    go.set_up(())

    assert why in capsys.readouterr().err
    assert not (go.VENV / "half-a-package").exists()
    assert go.calls == [(), ()]


def refusal(go, capsys):
    """Return the last line of a set-up that ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        go.set_up(())
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_an_environment_that_go_did_not_make_is_never_emptied(go, capsys):
    (go.VENV / "precious").mkdir(parents=True)

    assert "go.py did not make it. Delete it, or name another in HEADWAY_VENV." in refusal(go, capsys)
    assert (go.VENV / "precious").exists()


def test_a_python_without_ssl_is_one_clear_error_before_anything_is_installed(go, monkeypatch, capsys):
    missing = "echo \"ModuleNotFoundError: No module named '_ssl'\" >&2; exit 1"
    start_with(go, monkeypatch, "3.13.0", trouble=missing)

    assert "No module named '_ssl'). Start go.py with another Python" in refusal(go, capsys)
    assert go.calls == []


def test_an_unknown_task_lists_the_tasks():
    answer = subprocess.run([sys.executable, str(ROOT / "go.py"), "dmeo"], capture_output=True, text=True)

    assert answer.returncode == 2
    assert "Tasks: demo" in answer.stdout


def test_the_constraints_pin_torch_without_naming_a_build():
    pins = (ROOT / "constraints.txt").read_text().splitlines()

    assert "torch==2.13.0" in pins
    assert not [pin for pin in pins if pin.startswith("headway") or "+cpu" in pin or "://" in pin]
