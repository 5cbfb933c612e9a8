"""`headway.run` as a block, and as `start()` and `stop()` over the cells of a notebook."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import headway
from headway.runtime.in_rank import bootstrap
from headway.trace.recording.runs import Run
from tests.paths import ROOT, python_path
from tests.recorded import recording
from tests.training import small, train


def steps_of(path):
    """Return the number of steps in a run folder, and its exit class."""
    run = Run.open(path)
    return int(run.trace.named("optimizer.step").sum()), run.meta["exit"]["class"]


def test_a_recording_spans_what_lies_between_start_and_stop(tmp_path):
    run = headway.run(tmp_path / "run")
    before = repr(run)
    run.start()
    train(*small(), 3)
    during = repr(run)
    train(*small(), 4)
    run.stop()
    run.stop()

    assert before == "<headway.run: not recording>"
    assert during == f"<headway.run: recording into {tmp_path}/run, 3 optimizer steps so far>"
    assert repr(run) == f"<headway.run: recorded into {tmp_path}/run>"
    assert steps_of(run.path) == (7, "ok")
    assert bootstrap.active() is None


def test_a_cell_that_is_run_twice_makes_two_recordings(tmp_path, capsys):
    first = headway.run(tmp_path / "run").start()
    train(*small(), 2)
    second = headway.run(tmp_path / "run").start()
    train(*small(), 3)
    second.stop()

    assert (first.path, second.path) == (str(tmp_path / "run"), str(tmp_path / "run-2"))
    assert (steps_of(first.path), steps_of(second.path)) == ((2, "ok"), (3, "ok"))
    said = capsys.readouterr()
    assert f"the recording in {tmp_path}/run was still open" in said.err
    assert said.out == ""


def test_a_block_inside_a_recording_joins_it(tmp_path):
    outer = headway.run(tmp_path / "run").start()
    with headway.run() as inner:
        train(*small(), 2)
    train(*small(), 1)
    outer.stop()

    assert repr(inner) == f"<headway.run: was part of the recording into {tmp_path}/run>"
    assert steps_of(outer.path) == (3, "ok")


def test_a_start_never_ends_the_recording_of_a_launcher(tmp_path):
    with recording(tmp_path) as session:
        run = headway.run().start()
        run.stop()
        assert bootstrap.active() is session


@pytest.mark.parametrize(("error", "kind"), [(KeyboardInterrupt, "preempted"), (ValueError, "user")])
def test_how_a_block_ended_is_said_and_the_exception_passes(tmp_path, error, kind):
    def fails():
        train(*small(), 2)
        raise error("mine")

    with pytest.raises(error), headway.run(tmp_path / "run"):
        fails()

    assert steps_of(tmp_path / "run") == (2, kind)


def test_a_folder_that_cannot_be_made_costs_the_recording_and_not_the_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    with headway.run(tmp_path / "file" / "run") as run:
        train(*small(), 2)

    assert run.path in ("", str(tmp_path / "file" / "run"))
    assert "headway:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise SystemExit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_kernel_that_goes_away_leaves_a_run_that_can_be_opened(tmp_path, end):
    code = """
        import os, signal, torch, headway
        headway.run("own").start()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        """
    script = textwrap.dedent(code) + end
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, timeout=100)

    assert int(Run.open(tmp_path / "own").trace.named("optimizer.step").sum()) == 5


def test_marks_of_evaluation_and_epochs_are_recorded(tmp_path):
    with headway.run(tmp_path / "run") as run:
        train(*small(), 1)
        with run.evaluation():
            train(*small(), 1)
        mark = headway.evaluation()
        mark.end()
        mark.begin()
        mark.begin()
        mark.end()
        headway.epoch(3)
        run.epoch(4)
    trace = Run.open(tmp_path / "run").trace
    epochs = trace.events["corr"][trace.named("epoch")].tolist()

    assert trace.named("eval.mark").sum() == 2
    assert trace.events["duration_ns"][trace.named("eval.mark")].min() > 0
    assert epochs == [3, 4]


def test_marks_without_a_recording_do_nothing():
    with headway.evaluation():
        headway.epoch(0)


def test_run_json_of_a_failed_block_hides_what_looks_like_a_secret(tmp_path):
    with pytest.raises(ValueError, match="token"), headway.run(tmp_path / "run"):
        raise ValueError("token=hf_abcdefghijklmnopqrstuvwxyz0123456789")

    assert "hf_abcdefghijklmnopqrstuvwxyz0123456789" not in (tmp_path / "run" / "run.json").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit"]["code"] == 1
