"""Stacks of the gap: the line of the loop and what it called, whether a forward eats it, and who samples."""

from __future__ import annotations

import argparse
import dis
import inspect
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headway.runtime.recorder import probes
from headway.runtime.script import gap_stacks
from headway.runtime.script.gap_stacks import GapStacks, calling_line, feeds, loop_depth, loops_of
from tests.recorded import recording


def update(gap):
    """Stand for an optimizer."""
    gap.note_loop()
    gap.open[0] = True


def forward(gap, _):
    """Stand for a model."""
    gap.open[0] = False
    gap.note_forward()


def sampled(gap):
    """Have another thread take the stack of this one, as the sampler does."""
    gap._trainer[0] = threading.get_ident()
    sampler = threading.Thread(target=gap._sample, args=(1_000,))
    sampler.start()
    sampler.join()


def test_what_a_later_cell_of_a_notebook_does_is_named_by_its_own_line():
    gap, shell = GapStacks(), {"__name__": "IPython.core.interactiveshell"}
    exec("def run(cell, **names):\n    exec(cell, names)\n\n\nrun_cell = run", shell)
    trains = compile("update(gap)", "cell-1.py", "exec")
    waits = compile("\n\nsampled(gap)", "cell-2.py", "exec")

    for cell in (trains, waits):
        shell["run_cell"](cell, gap=gap, update=update, sampled=sampled)

    assert [(entry["line"], entry["function"]) for entry in gap.report()] == [("cell-2.py:3", "sampled")]


def test_the_loop_is_the_deepest_frame_shared_with_an_update():
    gap = GapStacks()

    def get_batch():
        sampled(gap)
        return 1

    def log():
        sampled(gap)

    for _ in range(3):
        batch = get_batch()
        forward(gap, batch)
        update(gap)
        log()
    found = {entry["function"]: entry for entry in gap.report()}

    assert set(found) == {"get_batch", "log"}
    assert (found["get_batch"]["count"], found["get_batch"]["ns"]) == (2, 2_000)  # the first came before any update
    assert found["get_batch"]["feeds_forward"]
    assert not found["log"]["feeds_forward"]
    assert found["log"]["line"].startswith("test_gap_stacks.py:")


def test_a_loop_inside_of_the_step_is_named_by_its_line():
    gap = GapStacks()

    def each_by_itself():
        for _ in range(2):
            sampled(gap)

    def all_at_once():
        sampled(gap)

    for _ in range(2):
        update(gap)
        each_by_itself()
        all_at_once()
        for _ in range(2):
            sampled(gap)
    loops = {entry["function"]: entry["loop"] for entry in gap.report()}
    begin = each_by_itself.__code__.co_firstlineno

    assert loops == {
        "each_by_itself": f"test_gap_stacks.py:{begin + 2}", "all_at_once": "",
        "sampled": f"test_gap_stacks.py:{begin + 12}",
    }  # fmt: skip


def test_no_sample_is_taken_in_headways_own_work(tmp_path):
    seen = []

    def listener(_):
        gap = session.probes.gap
        sampler = threading.Thread(target=gap._sample, args=(1_000,))
        sampler.start()
        sampler.join()
        seen.append((gap.open[0], {entry["function"] for entry in gap.report()}))
        return 1

    with recording(tmp_path) as session:
        session.probes.listeners.append(listener)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            session.probes.gap.asks[0] = True
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    assert [is_open for is_open, _ in seen] == [True] * 3
    assert not {"step", "listener"} & set().union(*(functions for _, functions in seen))


@pytest.mark.parametrize(("every", "period_s"), [(1, gap_stacks.PERIOD_S), (64, gap_stacks.RELAXED_S)])
def test_looks_become_rare_where_few_samples_are_the_scripts_own(every, period_s, monkeypatch):
    gap, periods = GapStacks(open=[True]), []
    monkeypatch.setattr(GapStacks, "_sample", lambda self, ns: len(periods) % every == 0)

    class Looks:
        def wait(self, period):
            periods.append(period)
            return len(periods) > 3 * gap_stacks.LOOKS

    gap._run(Looks())

    assert 0.7 * gap_stacks.PERIOD_S < periods[0] < 1.3 * gap_stacks.PERIOD_S
    assert 0.7 * period_s < periods[-1] < 1.3 * period_s


def test_the_time_of_headways_own_work_does_not_count_for_the_line_that_is_seen_next(monkeypatch):
    gap, moments, ends = GapStacks(), iter([0, 0, 15_000_000, 15_000_000]), iter([False, True])
    gap._trainer[0] = threading.get_ident()
    update(gap)
    gap.resumed[0] = 12_000_000
    monkeypatch.setattr(gap_stacks, "time", SimpleNamespace(perf_counter_ns=lambda: next(moments)))
    looks = threading.Thread(target=gap._run, args=(SimpleNamespace(wait=lambda _: next(ends)),))
    looks.start()
    looks.join()

    assert [entry["ns"] for entry in gap.report()] == [3_000_000]


@pytest.mark.parametrize(
    ("source", "line", "user", "expected"),
    [
        ("x = load()\nmodel(x)", 1, 2, True),
        ("x, y = load()\nx = x.float()\nloss = f(model(x), y)", 1, 3, True),
        ("x = load()\nz = stack(x)\nmodel(z)", 1, 3, True),
        ("save(1)\nmodel(x)", 1, 2, False),
        ("n = save(1)\nmodel(x)", 1, 2, False),
        ("loss = model(load())", 1, 1, False),  # cannot be told
        ("while True:\n model(x)\n x = load()", 3, 2, True),  # around the end of the loop
        ("def f(load, model):\n for x in load():\n  model(x)", 2, 3, True),
    ],
)
def test_what_a_line_makes_is_followed_to_the_line_that_uses_it(source, line, user, expected):
    code = compile(source, "train.py", "exec")
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_code")]

    assert feeds(inner[0] if inner else code, line, user) is expected


def test_loops_are_counted_over_the_whole_stack():
    here = loop_depth(sys._getframe())

    def called():
        depth = 0
        for _ in range(2):
            depth = loop_depth(sys._getframe())
        return depth

    found = []
    for _ in range(1):
        for _ in range(1):
            found.append(loop_depth(sys._getframe()))
            found.append(called())

    assert [depth - here for depth in found] == [2, 3]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="jumps lead back from behind an entry of a cache there")
@pytest.mark.parametrize("module", [argparse, dis, inspect], ids=lambda module: module.__name__)
def test_loops_are_those_of_the_disassembled_code(module):
    pending = [compile(Path(module.__file__).read_text(), module.__file__, "exec")]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
        steps = [step for step in dis.get_instructions(code) if step.opcode in jumps and step.argval <= step.offset]

        assert loops_of(code) == sorted({step.argval: step.offset for step in steps}.items())


def test_the_calling_line_is_the_scripts_own():
    assert calling_line(sys._getframe()).startswith("test_gap_stacks.py:")
    assert calling_line(None) == ""


def test_a_recording_names_the_line_that_makes_the_batches(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def get_batch():
        time.sleep(0.03)
        return torch.ones(1, 2)

    with recording(tmp_path) as session:
        for _ in range(400):
            x = get_batch()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            if session.probes.gap._samples >= 3:
                break
        session.probes.write_tables()
        script = session.probes.tables["script"]

    assert (script[0]["function"], script[0]["feeds_forward"]) == ("get_batch", True)


def test_a_step_does_not_wait_for_the_disk_that_its_tables_go_to(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    disk, write = threading.Event(), probes.write_whole
    with recording(tmp_path) as session:
        monkeypatch.setattr(probes, "write_whole", lambda path, text: disk.wait(30) and write(path, text))
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        steps, early = session.probes.steps[0], (tmp_path / "tables" / "r0.json").exists()
        disk.set()

    assert (steps, early) == (3, False)
    assert json.loads((tmp_path / "tables" / "r0.json").read_text())["optimizers"] == {"0": "SGD"}
