"""The command: fast to start, clear when misused, and transparent to the script behind `--`."""

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import cli
from headway.cli import VERBS, split_script
from tests.launching import headway, headway_here
from tests.paths import ROOT


@given(ours=st.lists(st.text().filter(lambda a: a != "--")), script=st.lists(st.text()))
def test_everything_behind_the_first_dashes_is_the_scripts(ours, script):
    assert split_script([*ours, "--", *script]) == (ours, script)
    assert split_script(ours) == (ours, None)


def test_help_loads_neither_torch_nor_any_room():
    code = """
import sys
from headway.cli import build
build().help_print([])
heavy = {"torch", "numpy", "numba", "pyarrow"}
print(sorted(m for m in sys.modules if m.split(".")[0] in heavy or m.startswith("headway.verbs.")), file=sys.stderr)
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert answer.stderr.strip() == "[]"
    assert "whatif" in answer.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_of_help_with_an_example(verb, capsys):
    assert cli.dispatch([*verb.split(), "--help"], None) == 0

    page = capsys.readouterr().out
    assert f"headway {verb}" in page.replace("\n", " ")
    assert "Example" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["whyy"], "unknown verb 'whyy'. Did you mean 'why'?"),
        (["why", "--jsn", "x"], "--json"),
        (["run", "--nproc-per-nod", "2", "--", "x.py"], "--nproc-per-node"),
        (["run"], "headway run -- train.py"),
        (["run", "--epochs", "3", "--", "x.py"], "Put the script's own options behind it"),
        (["run", "--windows", "five", "--", "x.py"], "Pass 5% or 0.05"),
        (["compare", "a", "b", "--gate", "5"], "headway: --gate is 5, which is 500 %. Pass 5% or 0.05."),
        (["compare", "a"], "argument AFTER is missing"),
        (
            ["why", "--", "x.py"],
            "only `headway run`, `try`, `tune`, `cluster fork`, `cluster submit`, `data stalls`, `data verify-resume`",
        ),
        (["why", "no-such-folder"], "no-such-folder"),
    ],
)
def test_a_mistake_exits_with_2_and_says_what_would_be_right(arguments, message):
    answer = headway_here(*arguments)

    assert answer.returncode == 2
    assert message in " ".join(answer.stderr.replace("│", " ").split())


def test_json_is_exactly_one_object():
    answer = headway("doctor", "--json")

    assert json.loads(answer.stdout)["schema"] == "headway.doctor/1"


@pytest.mark.parametrize(
    ("number", "place", "said"),
    [
        (errno.ENOSPC, None, "headway: No space left on device. Free some of it, or name another place.\n"),
        (errno.EROFS, "runs", "headway: Read-only file system: runs. Check its permissions, or name another place: "),
        (errno.ENAMETOOLONG, "a" * 256, f"headway: File name too long: {'a' * 38}...{'a' * 40}. Write a shorter "),
    ],
)
def test_a_place_that_takes_nothing_is_one_line_with_what_to_do(number, place, said, monkeypatch, capsys):
    def full(ours, script):
        raise OSError(number, os.strerror(number), place)

    monkeypatch.setattr(cli, "dispatch", full)
    with pytest.raises(SystemExit) as left:
        cli.main(["report"])

    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--quiet"], ["--json"]], ids=str)
@pytest.mark.parametrize(("code", "stream"), [(3, "stderr"), (3, "stdout"), (0, "stderr")])
def test_how_a_job_ended_stands_where_nothing_can_be_said(options, code, stream, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(f"import sys; print('lost', file=sys.{stream}); sys.exit({code})")
    command = [sys.executable, "-m", "headway.cli", "run", *options, "--out", tmp_path / "run", "--", script]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, cwd=ROOT, **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: full}
        )

    assert ended.returncode == code


def test_any_other_fault_of_ours_shows_where_it_is(monkeypatch):
    def broken(ours, script):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(cli, "dispatch", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        cli.main(["report"])
