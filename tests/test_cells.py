"""Time between the cells of a notebook. IPython is not needed: a stand-in tells of cells in IPython's order."""

import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway.ledger.answers.ledger import Ledger
from headway.plan.setup import step_seconds
from headway.sim.recorded.program import Program
from headway.trace.events.intervals import merged, without
from headway.trace.events.trace import concat
from headway.trace.recording.gaps import elapsed, without_pauses
from headway.trace.recording.runs import Run
from tests import training
from tests.rings_made import Process, built, rows
from tests.runs_made import MS, RunMaker
from tests.runs_made import Rows as MadeRows

PAUSE_S = 0.05


class Notebook:
    """Calls what is registered at the beginning and the end of cells, as the event manager of IPython does."""

    def __init__(self):
        self.events, self.callbacks = self, {"pre_run_cell": [], "post_run_cell": []}

    def register(self, event, function):
        self.callbacks[event].append(function)

    def unregister(self, event, function):
        self.callbacks[event].remove(function)

    def trigger(self, event):
        for function in self.callbacks[event][:]:
            function(SimpleNamespace(raw_cell=""))

    def cell(self, *acts, empty=False):
        """Run a cell; an empty one only ends."""
        if not empty:
            self.trigger("pre_run_cell")
        for act in acts:
            act()
        self.trigger("post_run_cell")


@pytest.fixture
def train():
    """Return what trains a small model for a number of steps."""
    return partial(training.train, *training.small())


@pytest.fixture
def notebook(monkeypatch):
    shell = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_time_between_cells_is_no_time_of_a_step(notebook, train, tmp_path):
    run = headway.run(tmp_path / "run")
    notebook.cell(run.start, lambda: train(3))
    time.sleep(PAUSE_S)
    notebook.cell(empty=True)
    time.sleep(PAUSE_S)
    notebook.cell(lambda: train(2), lambda: notebook.cell(lambda: train(1)), lambda: train(2))
    notebook.cell(run.stop)
    trace, ledger = Run.open(run.path).trace, Ledger.of(Run.open(run.path))
    pauses = [duration for _, duration in rows(trace, "pause")]
    steps = [duration for _, duration in rows(trace, "step")]

    assert notebook.callbacks == {"pre_run_cell": [], "post_run_cell": []}
    assert len(pauses) == 2
    assert pauses[0] >= 2 * PAUSE_S * 1e9
    assert ledger.sub_ns["idle.cells"] == sum(pauses)
    assert (len(steps), sum(steps) - ledger.step_wall_ns.sum()) == (8, pauses[0])
    assert ledger.step_ns.sum() == ledger.step_wall_ns.sum()


def test_a_kernel_that_ends_between_cells_was_idle_until_then(notebook, train, tmp_path):
    run = headway.run(tmp_path / "run")
    notebook.cell(run.start, lambda: train(3))
    run.stop()

    assert len(rows(Run.open(run.path).trace, "pause")) == 1


def test_a_shell_without_events_costs_a_warning_and_no_recording(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: object()))
    run = headway.run(tmp_path / "run").start()
    train(2)
    run.stop()

    assert "between cells" in capsys.readouterr().err
    assert len(rows(Run.open(run.path).trace, "optimizer.step")) == 2


def test_what_is_recorded_in_a_pause_is_cut_out_of_it(tmp_path):
    """A widget's callback that trains, or a collection, between two cells is what it is."""
    process = Process(tmp_path)
    process.train(5)
    start = process.write("pause", 10 * MS)
    process.write("host.gc", MS, start_ns=start + 2 * MS)
    process.write("region", 9 * MS, start_ns=start)
    process.train(5)
    process.recorder.close()

    assert rows(built(tmp_path), "pause") == [(start, 2 * MS), (start + 3 * MS, 7 * MS)]


def test_pauses_before_between_and_after_the_steps_are_idle():
    made = MadeRows(0)
    for name, start_ns, duration_ns in (
        ("process", 0, 200), ("pause", 20, 30), ("step", 60, 40), ("step", 100, 60), ("pause", 110, 25),
        ("host.script", 100, 10), ("optimizer.step", 150, 10), ("pause", 170, 20),
    ):  # fmt: skip
        made.add(name, start_ns, duration_ns)
    ledger = Ledger.of(made.trace(meta={"source": "headway"}))

    assert ledger.sub_ns["idle.cells"] == 30 + 25 + 20
    assert (ledger.sub_ns["startup.script"], ledger.sub_ns["idle.teardown"]) == (60 - 30, 40 - 20)
    assert ledger.step_wall_ns.tolist() == [40, 60 - 25]
    assert ledger.step_ns.sum(axis=0).tolist() == [40, 60 - 25]


moments = st.lists(st.integers(0, 200), max_size=8).map(lambda found: np.array(found, np.int64))


@given(moments=moments, start=moments, length=st.integers(0, 30))
def test_the_clock_that_stands_still_counts_what_lies_outside_of_pauses(moments, start, length):
    pauses = merged(start, start + length)

    for moment, past in zip(moments.tolist(), elapsed(moments, pauses).tolist(), strict=True):
        begin, end = without((np.array([0]), np.array([moment])), pauses)
        assert past == (np.maximum(end - begin, 0)).sum()


def test_a_replay_and_the_pace_of_a_run_know_nothing_of_its_pauses():
    made = RunMaker(ranks=1, steps=60, epoch_steps=20, fetch_ns=4 * MS, num_workers=0).make()
    events = made.trace.events
    at = int(np.median(events["start_ns"][made.trace.named("step")]))
    later = {**events, "start_ns": events["start_ns"] + np.where(events["start_ns"] >= at, 900 * MS, 0)}
    over = (events["start_ns"] < at) & (events["start_ns"] + events["duration_ns"] > at)
    later["duration_ns"] = events["duration_ns"] + np.where(over, 900 * MS, 0)
    pause = MadeRows(0)
    pause.add("pause", at, 900 * MS)
    paused = concat([replace(made.trace, events=later), pause.trace()])

    plain, found = (Program.from_trace(trace, made.meta) for trace in (made.trace, paused))

    assert without_pauses(made.trace) is made.trace
    assert found.measured_s == plain.measured_s
    assert found.predict(["workers=2"]).speedup == plain.predict(["workers=2"]).speedup
    assert step_seconds([paused]) == step_seconds([made.trace])
