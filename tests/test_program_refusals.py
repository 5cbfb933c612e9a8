"""What a replay refuses to predict, and what it says when it does not."""

from dataclasses import replace

import pytest

from headway.core.errors import BarMissedError, InputError
from headway.sim.recorded.program import Program
from headway.sim.whatif import ResolvedEdits, scenario_of
from tests.test_program import job, program_of


def test_a_run_without_steps_is_refused() -> None:
    made = job(steps=1).make()

    with pytest.raises(InputError, match=r"no complete step.*Record a run"):
        Program.from_trace(made.trace.where(~made.trace.named("step")), made.meta)


def test_a_run_of_few_steps_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs at least 4 steady ones. Record more steps"):
        program_of(job(steps=3).make())


def test_a_replay_that_misses_the_run_refuses_to_predict() -> None:
    """Loads that claim twice their time cannot explain the step that was measured."""
    made = job(ranks=1).make()
    duration = made.trace.events["duration_ns"].copy()
    duration[made.trace.named("input.fetch")] *= 3
    trace = replace(made.trace, events={**made.trace.events, "duration_ns": duration})

    with pytest.raises(BarMissedError, match=r"misses the measured step time by .*needs at most 10 %"):
        Program.from_trace(trace, made.meta).predict(["workers=2"])


def test_an_operation_that_was_not_recorded_is_named() -> None:
    with pytest.raises(InputError, match=r"no recorded operation matches 'aten::\*'. Choose among: .*checkpoint.save"):
        program_of(job().make()).predict(["op:aten::*=0.5x"])


def test_the_bucket_size_is_not_guessed() -> None:
    with pytest.raises(InputError, match=r"bucket_mb=25 is not predictable.*Try it live"):
        program_of(job().make()).predict(["bucket_mb=25"])


def test_predictions_say_what_they_assume() -> None:
    program = program_of(job().make())

    note = program.predict(["workers=2", "cache_fraction=1", "bandwidth=2x"]).note
    assert "typical costs are assumed" in note
    assert "storage=shared if it does not" in note
    assert "occupy 100 % of a core" in note
    assert "latency share" in note


def test_equal_scenarios_are_replayed_once() -> None:
    program = program_of(job().make())
    program.predict(["workers=2"])
    count = len(program.replays)
    program.predict(["workers=2"])

    assert len(program.replays) == count
    assert {scenario for scenario, _ in program.replays} == {ResolvedEdits(), scenario_of(["workers=2"])}


def test_a_short_run_may_be_missed_by_twice_as_much_as_a_long_one() -> None:
    short, long = (program_of(job(ranks=1, steps=steps).make()) for steps in (100, 400))

    assert (short.bar, long.bar) == (0.10, 0.05)
