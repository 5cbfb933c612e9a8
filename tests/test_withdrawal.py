"""Withdrawal: a remedy that makes steps slower goes, one on a slower host comes back; noise decides nothing."""

import os
import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.units import NS_PER_S
from headway.data.guard.outcome import CHUNK, PATIENCE, OtherCores, OutcomeWriter, Withdrawal
from headway.data.remedies import ThreadsParameters
from headway.plan.setup import step_seconds
from tests.remedy_context import TestContext
from tests.runs_made import RunMaker

MS = NS_PER_S // 1000


class Job:
    """A loop on a clock of its own: `step_s(n)` with the remedy, `plain_s(n)` without; an iterator every `per_pass`."""

    def __init__(self, step_s, plain_s, *, making_s=0.0, per_pass=20, others=0.0):
        self.now, self.step_s, self.plain_s, self.making_s, self.per_pass = 1.0, step_s, plain_s, making_s, per_pass
        self.context = TestContext()
        report = OutcomeWriter("data.threads", ThreadsParameters(), self.context)
        looks = chain([None], repeat(others))
        self.watch = Withdrawal(0.010, report, clock=lambda: self.now, other_cores=lambda: next(looks))
        self.watch.leave = lambda: self.left.append(self.steps)
        self.left: list[int] = []
        self.steps = 0
        report({"dataset": "D", "num_workers": 2})

    def run(self, steps) -> Iterator[bool]:
        """Yield for every step whether the remedy is off."""
        for step in range(steps):
            if step % self.per_pass == 0:
                with self.watch.making():
                    off = self.watch.is_off
                    self.watch.has_remedy = not off
                    self.now += 0.0 if off else self.making_s
            self.now += self.plain_s(step) if off else self.step_s(step)
            self.steps += 1
            if self.steps % CHUNK == 1:
                assert self.watch.step(0) == CHUNK
            yield self.watch.is_off

    def withdrawn(self):
        return self.context.outcomes[-1].json()["facts"].get("withdrawn", [])


def test_steps_longer_than_recorded_end_the_remedy_for_good(capfd):
    job = Job(lambda step: 0.015, lambda step: 0.010)

    assert list(job.run(400))[-1]
    assert len(job.left) == 1
    assert job.withdrawn() == [  # not a word on the dataset: other remedies may suit it
        {"dataset": "all loaders", "reason": "over 50 steps one took 15.0 ms, and 10.0 ms when the plan was made"}
    ]
    assert capfd.readouterr().err.count("data.threads is withdrawn: over 50 steps") == 1


def test_a_remedy_that_ends_within_a_pass_is_judged_in_it_and_comes_back_at_the_next():
    job = Job(lambda step: 0.015, lambda step: 0.015, per_pass=200)
    job.watch.leave = lambda: True

    off = list(job.run(201))

    assert off.index(True) < 120
    assert not off[-1]


def test_on_a_busy_host_the_decision_is_put_off_and_then_made():
    quiet, busy = (list(Job(lambda step: 0.015, lambda step: 0.010, others=cores).run(600)) for cores in (0.0, 1.0))
    first = [off.index(True) for off in (quiet, busy)]

    assert first[0] <= 120
    assert first[1] - first[0] == PATIENCE * 50


def test_what_other_processes_take_is_told_from_the_second_look_on():
    look = OtherCores()
    assert look() is None
    time.sleep(0.2)
    assert 0 <= look() <= os.cpu_count()


def test_the_cost_of_iterators_counts():
    cheap, dear = (Job(lambda step: 0.004, lambda step: 0.010, making_s=s, per_pass=50) for s in (0.05, 0.5))

    assert not any(cheap.run(400))
    assert list(dear.run(400))[-1]


def test_on_a_slower_host_the_remedy_comes_back_and_stays(capfd):
    job = Job(lambda step: 0.015, lambda step: 0.020)
    off = list(job.run(600))

    assert any(off)
    assert not off[-1]
    assert job.withdrawn() == []
    assert "data.threads is applied again" in capfd.readouterr().err


@given(late=st.sets(st.integers(0, 19), max_size=2), late_s=st.floats(0.0, 2.0))
def test_rare_long_steps_decide_nothing(late, late_s):
    """Two of twenty stretches of ten steps hold a stall: no five in a row have a majority of such."""
    job = Job(lambda step: 0.008 + (late_s if step // 10 in late and step % 10 == 0 else 0.0), lambda step: 0.010)

    assert not any(job.run(200))


@pytest.mark.parametrize(("every", "expected_ms"), [(1000, 10), (20, 11)])
def test_the_pace_of_a_recorded_run_is_told_by_the_same_formula(every, expected_ms):
    """Steps of 10 ms, and 20 ms to make an iterator: none in the middle of the run, or one every 20 steps."""
    made = RunMaker(
        ranks=1, steps=201, compute_ns=8 * MS, optimizer_ns=2 * MS, transfer_ns=0, comm_ns=0,
        iter_ns=20 * MS, epoch_steps=every,
    ).make()  # fmt: skip

    assert step_seconds([made.trace]) == pytest.approx(expected_ms / 1000, rel=0.02)
