"""What is named of a load: the line of the script, or the function of a library, that the training thread is in."""

import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway.runtime.script import stack_looks
from headway.runtime.script.gap_stacks import GapStacks, StackRow, stack_of
from headway.runtime.script.stack_looks import LoadStacks, LoopStacks, line_in_load
from tests.recorded import recording

LIBRARY = f"{sys.prefix}/lib/python3/site-packages/pictures/"


def stack_in(name, source, caller="fetch", file=stack_looks.PROBE):
    """Return the place of a look that is taken by `look()` in `source`, a file `name` with a function `load`."""
    seen = []
    names = {"look": lambda: seen.append(line_in_load(stack_of(threading.get_ident())[2:]))}
    exec(compile(source, name, "exec"), names)
    exec(compile(f"def {caller}():\n    load()", file, "exec"), names)
    names[caller]()
    return seen[0] and (seen[0][1], seen[0][2])


TRANSFORMS = """
class Resize:
    def __call__(self):
        look()
class Compose:
    def __call__(self):
        Resize()()
def load():
    Compose()()
"""


@pytest.mark.parametrize(
    ("file", "place"),
    [("train.py", (4, "look")), (f"{LIBRARY}folder.py", (9, "Resize.__call__"))],
    ids=["a line of the script", "what a library's dataset calls"],
)
def test_the_innermost_line_of_the_script_or_the_first_function_that_computes_owns_a_sample(file, place):
    assert stack_in(file, TRANSFORMS) == place


def test_nothing_is_named_outside_of_loads():
    assert stack_in("train.py", TRANSFORMS, caller="step") is None
    assert stack_in("train.py", TRANSFORMS, file="loop.py") is None


class Slow(Dataset):
    def __len__(self):
        return 8

    def decode(self):
        time.sleep(0.006)

    def __getitem__(self, index):
        self.decode()
        time.sleep(0.002)
        return torch.ones(2)


def test_the_lines_of_a_recorded_loader_have_the_shares_of_their_time(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.runtime.script.gap_stacks.RELAXED_S", 0.01)
    monkeypatch.setattr("headway.runtime.script.gap_stacks.EARLY", 0)
    monkeypatch.setattr(stack_looks, "chosen_by_the_lock", lambda late_s: False)  # busy cores make all looks late
    with recording(tmp_path) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            for batch in DataLoader(Slow(), batch_size=4):
                model(batch).sum().backward()
                optimizer.step()
        rows = session.probes.looks.loads.report()

    decoding = f"test_stack_looks.py:{Slow.decode.__code__.co_firstlineno + 1}"
    shares = {row["line"]: row["ns"] / sum(row["ns"] for row in rows) for row in rows}
    assert 0.5 < shares[decoding] < 0.99
    assert len({row["loader"] for row in rows}) == 1


def loop_seen(body, name="train.py"):
    """Return the rows of a look that `look()` takes in `body`, inside of a loop of the function `forward`."""
    gap, loops = GapStacks(), LoopStacks()

    def look():
        stack = stack_of(threading.get_ident())[1:]
        loops.count(stack[1:], 1, gap)

    text = f"def layer(): look()\ndef forward():\n{body}\ndef train():\n    note()\n    forward()\ntrain()"
    exec(compile(text, name, "exec"), {"look": look, "note": gap.note_loop})
    return [(row["line"], row["calls_layer"]) for row in loops.report()]


def test_a_loop_of_the_forward_is_told_and_what_is_in_none_has_no_line():
    assert loop_seen("    for _ in range(2):\n        look()") == [("train.py:4", False)]
    assert loop_seen("    look()") == [("", False)]


def test_a_loop_in_which_a_layer_is_called_calls_layers_in_all_its_lines(monkeypatch):
    monkeypatch.setattr(stack_looks, "LAYER", "train.py")  # what `layer` is defined in stands for torch's modules
    rows = loop_seen("    for _ in range(2):\n        look()\n        layer()")

    assert {calls_layer for _, calls_layer in rows} == {True}


@pytest.mark.parametrize("wrapper", [stack_looks.FORWARD, stack_looks.BACKWARD], ids=["forward", "hook of a backward"])
def test_a_line_that_calls_a_library_without_torch_is_told_in_forwards_and_in_hooks(wrapper):
    gap, loops, names = GapStacks(), LoopStacks(), {}
    names |= {"look": lambda: loops.count(stack_of(threading.get_ident())[1:][1:], 1, gap), "note": gap.note_loop}
    metric = LIBRARY.replace("pictures", "sklearn") + "metric.py"
    for file, text in ((metric, "def score(): look()"), ("train.py", "def hook():\n    score()"),
                       (wrapper, "def wrapped(): hook()"),
                       ("train.py", "def train():\n    note()\n    wrapped()\ntrain()")):  # fmt: skip
        exec(compile(text, file, "exec"), names)

    [row] = loops.report()
    assert (row["line"], row["function"], row["library"]) == ("train.py:2", "score", "sklearn")


def test_the_depths_of_optimizers_loops_are_kept_beside_the_loops_that_were_seen(tmp_path):
    with recording(tmp_path) as session:
        model = torch.nn.Linear(2, 1)
        critic, maker = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        for _ in range(3):
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                critic.step()
            model(torch.ones(1, 2)).sum().backward()
            maker.step()
        session.probes.looks.loops.count([], 1, session.probes.gap)
        session.probes.looks.loops._seen[None, 0, False, ""] = [1, 1]
        session.probes.write_tables()
        depths = session.probes.tables["loops"]

    assert depths["0"] == depths["1"] + 1


def test_places_are_bounded(monkeypatch):
    monkeypatch.setattr("headway.runtime.script.gap_stacks.MOST_PLACES", 1)
    loads = LoadStacks()
    for name in ("one", "two"):
        names = {"look": lambda: loads.count(stack_of(threading.get_ident())[2:], 1, 0, 0.0)}
        exec(compile(f"def load():\n    {name}()\ndef {name}():\n    look()", "train.py", "exec"), names)
        exec(compile("def fetch():\n    load()", stack_looks.PROBE, "exec"), names)
        names["fetch"]()

    assert len(loads.report()) == 1


def test_a_line_that_looks_came_to_late_has_no_name():
    code = compile("def load():\n    fetch()", "train.py", "exec").co_consts[0]
    probe = compile("def fetch(): ...", stack_looks.PROBE, "exec").co_consts[0]
    loads = LoadStacks()
    for line, lates in ((3, [0.0, 0.0, 0.002]), (4, [0.002] * 4)):
        for late_s in lates:
            loads.count([StackRow(code, 0, line, 1), StackRow(probe, 0, 1, 2)], 10, 0, late_s)

    assert [(row["line"], row["ns"], row["count"]) for row in loads.report()] == [("", 40, 4), ("train.py:3", 30, 3)]
