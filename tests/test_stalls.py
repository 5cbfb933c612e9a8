"""DS-Analyzer: stalls from one run, the closed form, and bad measurements."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from headway.core.errors import InputError
from headway.data.stalls.model import StallReport, attribute, from_phases, what_if
from headway.sim.recorded.program import Program
from tests.refusals import refused
from tests.runs_made import MS, RunMaker


def program_of(**changes: Any) -> Program:
    usual: dict[str, Any] = {
        "ranks": 1, "steps": 120, "epoch_steps": 40, "cores": 8, "fetch_ns": 12 * MS, "prep_ns": 6 * MS,
        "compute_ns": 5 * MS, "optimizer_ns": 0,
    }  # fmt: skip
    made = RunMaker(**{**usual, **changes}).make()
    return Program.from_trace(made.trace, {**made.meta, "compute_cpu_fraction": 0.0})


# Laws


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("compute", [2, 8, 20])
def test_stalls_sum_to_the_measured_loss(workers: int, compute: int) -> None:
    """Compute and stalls are the step; compute is what the job takes with no input at all."""
    program = program_of(num_workers=workers, compute_ns=compute * MS)
    report = attribute(program)

    bare = program_of(num_workers=workers, compute_ns=compute * MS, fetch_ns=0, prep_ns=0, transfer_ns=0).measured_s
    assert report.step_s == pytest.approx(program.measured_s, rel=0.02)
    assert report.compute_s == pytest.approx(bare, rel=0.03)
    assert sum(report.fractions.values()) == pytest.approx(1.0)
    assert min(report.fetch_s, report.prep_s, report.transfer_s) >= 0
    assert report.flags == ()


@pytest.mark.parametrize("knob", ["workers", "cores", "cache_fraction", "storage", "accelerator"])
def test_more_of_anything_is_never_much_slower(knob: str) -> None:
    program = program_of(num_workers=1)
    settings: list[Any] = [0.0, 0.3, 0.6, 1.0] if knob == "cache_fraction" else [1, 2, 4]
    step_s = [what_if(program, **{knob: value}).step_s for value in settings]

    assert all(after <= 1.02 * before for before, after in itertools.pairwise(step_s))


# The bottleneck and the closed form


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({"num_workers": 1}, "fetch"),
        ({"num_workers": 1, "fetch_ns": 2 * MS, "prep_ns": 12 * MS}, "prep"),
        ({"num_workers": 1, "fetch_ns": MS, "prep_ns": MS}, "compute"),
        ({"num_workers": 0, "fetch_ns": 0, "prep_ns": 0, "transfer_ns": 5 * MS}, "transfer"),
        ({"num_workers": 4, "epoch_steps": 120}, "compute"),
    ],
)
def test_the_bottleneck_is_named(changes: dict[str, Any], bottleneck: str) -> None:
    if bottleneck == "transfer":
        changes = {**changes, "prep_ns": 1000}

    assert attribute(program_of(**changes)).bottleneck == bottleneck


def test_the_report_lists_what_wins_most_first() -> None:
    report = attribute(program_of(num_workers=0))

    gains = [gain for _, gain in report.fix]
    assert gains == sorted(gains, reverse=True)
    assert any(edit.startswith("workers=") for edit, _ in report.fix)
    assert report.per_epoch()["fetch"] == pytest.approx(40 * report.fetch_s)
    assert report.to_json()["schema"] == "headway.stalls/1"


def test_the_published_closed_form_comes_near_the_step_where_queues_are_deep() -> None:
    program = program_of(num_workers=4, fetch_ns=40 * MS, prep_ns=MS, epoch_steps=120)
    fetch_s, prep_s, compute_s = 0.04 / 4, 0.001 / 4, 0.005  # of a batch, by four workers and the device

    assert program.measured_s == pytest.approx(max(fetch_s, prep_s, compute_s), rel=0.1)
    assert attribute(program).bottleneck == "fetch"


def test_three_measured_phases_give_the_stalls() -> None:
    report = from_phases([9.0] * 5 + [1.0] * 20, [9.0] * 5 + [1.5] * 20, [9.0] * 5 + [2.5] * 20)

    assert (report.compute_s, report.prep_s, report.fetch_s) == (1.0, 0.5, 1.0)
    assert report.bottleneck == "fetch"


def test_phases_in_the_wrong_order_are_flagged_and_give_no_negative_stall() -> None:
    report = from_phases([0.0] * 5 + [2.0] * 20, [0.0] * 5 + [1.5] * 20, [0.0] * 5 + [2.5] * 20)

    assert report.prep_s == 0
    assert report.fetch_s == 1.0
    assert "took longer than" in report.flags[0]


def test_storage_that_is_told_to_be_shared_can_also_be_faster() -> None:
    program = program_of(num_workers=1)

    once = what_if(program, workers=4, shared_storage=True).step_s
    twice = what_if(program, workers=4, shared_storage=True, storage=2).step_s
    assert once == pytest.approx(0.012, rel=0.05)
    assert twice == pytest.approx(0.006, rel=0.1)


# Bad input


test_a_bad_phase_is_refused = refused(
    (([1.0] * 5, [1.0] * 20, [1.0] * 20), r"the ingest phase has 5 steps, of which 5 are warm-up"),
    (([1.0] * 20, [0.0] * 20, [1.0] * 20), r"the cached phase took no time"),
    (([1.0] * 20, [1.0] * 20, [math.nan] * 20), r"the cold phase took no time, or its times are not finite"),
    by=lambda phases: from_phases(*phases),
)


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    program = program_of()
    small = {"0": structs.replace(program.facts.loaders["0"], dataset_size=3)}

    with pytest.raises(InputError, match=r"has 3 examples, fewer than one batch of 64"):
        attribute(replace(program, facts=structs.replace(program.facts, loaders=small)))


@pytest.mark.parametrize("storage", [0.0, -1.0, math.nan])
def test_storage_of_no_speed_is_refused(storage: float) -> None:
    with pytest.raises(InputError, match=r"storage is .*above 0"):
        what_if(program_of(), storage=storage, shared_storage=True)


def test_a_run_without_loads_is_refused() -> None:
    made = RunMaker(ranks=1, steps=20).make()
    bare = made.trace.where(~made.trace.named("input.next", "input.iter", "input.load"))

    with pytest.raises(InputError, match=r"no recorded load"):
        attribute(Program.from_trace(bare, made.meta))


def test_the_parts_of_a_report_are_its_step() -> None:
    report = StallReport(1.0, 0.5, 0.25, 0.25, 0.0, "fetch")

    assert report.step_s == 2.0
    assert report.fractions["fetch"] == 0.25
    assert report.per_epoch() == {}
