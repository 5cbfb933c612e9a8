"""How often it is looked whether a script has changed what its batches are read from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from headway.data.guard import process_state
from headway.data.guard.process_state import FULL, NEAR_SHARE, SHARE, Attributes, Looks
from headway.data.loader.read_ahead import CHANGED
from headway.sim.recorded.program import Program
from headway.sim.recorded.segment_times import Costs
from tests.runs_made import MS, RunMaker


@pytest.fixture(autouse=True)
def paced(monkeypatch):
    """Let time pass as tests say."""
    monkeypatch.setattr(process_state, "perf_counter", lambda: CLOCK[0])


CLOCK = [0.0]
"""Seconds, which pass as a test says."""


def looked(looks: Looks, dataset: object, batches: int, *, took_s: float = 0.001, step_s: float = 0.01) -> list[int]:
    """Ask before each of `batches`; return those before which it was looked."""
    found = []
    for batch in range(batches):

        def look(batch: int = batch) -> bool:
            found.append(batch)
            CLOCK[0] += took_s
            return True

        assert looks.are_alike((dataset,), look)
        CLOCK[0] += step_s
    return found


def settled(dataset: object, *, each_batch: bool = False) -> Looks:
    """Return those of a loader in the second batch of its second pass."""
    looks = Looks(each_batch=each_batch)
    looks.begin()
    assert looked(looks, dataset, FULL) == list(range(FULL))
    looks.begin()
    assert looked(looks, dataset, 1) == [0]
    return looks


def test_each_batch_of_the_first_pass_is_looked_at_however_long() -> None:
    looks = Looks()
    looks.begin()

    assert looked(looks, SimpleNamespace(), 3 * FULL) == list(range(3 * FULL))


def test_64_batches_are_looked_at_however_short_the_passes() -> None:
    looks = Looks()

    for begin in range(0, FULL, 4):
        looks.begin()
        assert looked(looks, SimpleNamespace(), 4) == list(range(4)), begin


def test_later_looks_take_their_share_of_the_time() -> None:
    looks, begin = settled(SimpleNamespace()), CLOCK[0]

    found = looked(looks, SimpleNamespace(), 3000, took_s=0.002, step_s=0.001)

    assert found
    assert 0.002 * len(found) <= SHARE * (CLOCK[0] - begin)


def test_attributes_of_very_short_steps_are_not_looked_at_before_each(monkeypatch) -> None:
    asked, are_those_of = [], Attributes.are_those_of

    def near(attributes: Attributes, read: list[object]) -> bool:
        asked.append(read)
        CLOCK[0] += 20e-6
        return are_those_of(attributes, read)

    monkeypatch.setattr(Attributes, "are_those_of", near)
    looks, begin = settled(SimpleNamespace()), CLOCK[0]
    for step_s, each in ((0.0005, False), (0.05, True)):
        before = len(asked)
        looked(looks, SimpleNamespace(), 1000, step_s=step_s)
        assert (len(asked) - before > 990) is each
        assert len(asked) * 20e-6 <= NEAR_SHARE * (CLOCK[0] - begin) + 100e-6


def test_an_attribute_that_was_set_is_seen_at_once() -> None:
    dataset = SimpleNamespace(ratio=0.5, transform=SimpleNamespace(p=0.1), rows=[1, 2], stages=[SimpleNamespace(p=0.5)])
    looks = settled(dataset)

    for change in (
        lambda: setattr(dataset, "ratio", 0.6), lambda: setattr(dataset.transform, "p", 0.2),
        lambda: dataset.rows.append(3), lambda: setattr(dataset.stages[0], "p", 0.3),
    ):  # fmt: skip
        assert looked(looks, dataset, 3) == []
        change()
        assert looked(looks, dataset, 3, took_s=0.01)[:1] == [0]


def test_a_change_that_was_seen_late_says_since_when() -> None:
    dataset = SimpleNamespace()
    looks = settled(dataset)
    assert looked(looks, dataset, 60) == []

    assert not looks.are_alike_now((dataset,), lambda: False)
    assert "a look 61 batches before" in looks.reason(CHANGED)
    assert type(looks.reason(CHANGED)) is type(CHANGED)


def test_an_attribute_that_was_looked_at_before_each_batch_is_not_seen_late() -> None:
    dataset = SimpleNamespace(stages=[SimpleNamespace(p=0.5)])
    looks = settled(dataset)
    assert looked(looks, dataset, 60) == []

    dataset.stages[0].p = 0.6

    assert not looks.are_alike((dataset,), lambda: False)
    assert looks.reason(CHANGED) == CHANGED


def test_verifying_all_batches_looks_at_all_of_its_loader_and_makes_no_other_pay() -> None:
    dataset = SimpleNamespace()
    looks, other = settled(dataset, each_batch=True), settled(dataset)

    assert looked(looks, dataset, 20, took_s=0.001) == list(range(20))
    assert looked(other, dataset, 20, took_s=0.001) == []


def test_a_replay_pays_for_the_looks_of_the_first_pass_and_of_64_batches_alone() -> None:
    made = RunMaker(ranks=1, steps=400, epoch_steps=20, fetch_ns=10 * MS, compute_ns=5 * MS).make()

    took = {
        look_ns: Program.from_trace(made.trace, made.meta, costs=replace(Costs(), look_ns=look_ns))
        .predict(["cache_fraction=1"])
        .step_s
        for look_ns in (0, MS)
    }

    first = Program.from_trace(made.trace, made.meta).warm
    assert Costs().full_looks == FULL
    assert took[MS] - took[0] == pytest.approx(0.001 * (64 - first) / (400 - first), rel=0.05)
