"""What steps are counted by: updates that a gradient led to, else fresh backwards, other gradients, forwards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.recording.basis import basis_of
from headway.trace.recording.rows import counted
from tests.training_rows import Thread


@given(st.lists(st.tuples(st.sampled_from("gu"), st.integers(0, 2)), max_size=40))
def test_an_update_counts_when_a_gradient_began_since_its_optimizers_last_one(events):
    gradients, optimizers, ends, expected, last = [], [], [], [], {}
    for moment, (kind, optimizer) in enumerate(events):
        if kind == "g":
            gradients.append(moment)
        else:
            optimizers.append(optimizer)
            ends.append(moment)
            expected.append(len(gradients) > last.get(optimizer, 0))
            last[optimizer] = len(gradients)
    found = counted(np.array(optimizers, np.int64), np.array(ends, np.int64), np.array(gradients, np.int64))

    assert found.tolist() == (expected if gradients else [True] * len(ends))


def test_the_update_that_a_restore_makes_is_no_step():
    thread = Thread()
    thread.update()
    thread.add("host.gc", 1000)
    thread.train(5)
    found = basis_of(thread.rows())

    assert (found.name, len(found.ends_ns)) == ("optimizer", 5)
    assert found.first_ns > 1000


def test_every_parameters_own_optimizer_inside_a_backward_makes_one_step():
    thread = Thread()
    for _ in range(6):
        start = thread.forward() + 10
        for optimizer in range(4):
            thread.update(optimizer)
        thread.events.append(("segment.backward", start, 40, {"corr": 0, "peer": 1}))
    found = basis_of(thread.rows())

    assert (found.name, len(found.ends_ns)) == ("optimizer", 6)


def test_without_an_optimizer_accumulated_backwards_are_one_step():
    thread, ends = Thread(), []
    for _ in range(5):
        for micro in range(3):
            thread.forward()
            thread.backward(fresh=micro == 0)
        ends.append(thread.now_ns)
        thread.add("host.gc")
    found = basis_of(thread.rows())

    assert (found.name, found.ends_ns.tolist()) == ("backward", ends)


@pytest.mark.parametrize(
    ("warm_up", "name", "basis"),
    [(0, "segment.grad", "grad"), (0, "graph.replay", "replay"), (0, "forward", "inference"),
     (3, "graph.replay", "replay")],
)  # fmt: skip
def test_where_no_backward_runs_other_work_is_counted_and_the_warm_up_of_a_captured_step(warm_up, name, basis):
    thread = Thread()
    thread.train(warm_up)
    for _ in range(20):
        thread.add(name, corr=0, seq=0)
    found = basis_of(thread.rows())

    assert (found.name, len(found.ends_ns)) == (basis, warm_up + 20)


def test_replays_inside_of_forwards_count_nothing():
    thread = Thread()
    for _ in range(4):
        start = thread.now_ns
        thread.train()
        thread.events.append(("graph.replay", start + 2, 3, {"corr": 0}))
    for _ in range(30):  # an evaluation of the same compiled model
        start = thread.forward(grad=False)
        thread.events.append(("graph.replay", start + 2, 3, {"corr": 0}))
    found = basis_of(thread.rows())

    assert (found.name, len(found.ends_ns)) == ("optimizer", 4)


def test_what_an_inner_loop_repeats_is_one_step_with_what_follows_it():
    thread = Thread()
    for _ in range(20):
        for optimizer in (0, 0, 0, 1):
            thread.backward()
            thread.update(optimizer)
    for _ in range(20):
        thread.backward()
        thread.update(1)
    rows = thread.rows()

    assert len(basis_of(rows, {0: 2, 1: 1}).ends_ns) == 40
    assert len(basis_of(rows, {0: 1, 1: 1}).ends_ns) == 80  # one update after the other, now and then a second one


def test_nothing_recorded_has_no_basis():
    found = basis_of(Thread().rows())

    assert (found.name, len(found.ends_ns)) == ("", 0)
