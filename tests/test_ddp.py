"""What-ifs of data-parallel training from deep windows: against jobs whose truth is known, and torch's own rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import BarMissedError, InputError
from headway.sim.ddp.ddp_edits import gradients_of
from headway.sim.ddp.ddp_link import Carried, CollectiveLink, assign, fit, limits, step_of
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_thread import CALL, COPY, GRAD, WAIT, thread_of
from headway.sim.ddp.ddp_window import StepWindow, collectives, flight_path, joined
from headway.sim.graph.dag import Dag
from headway.sim.whatif import ResolvedEdits, scenario_of
from headway.trace.events.trace import Trace, concat
from headway.trace.rings.rank_tables import DdpModel
from tests.ddp_made import COPY as COPIES
from tests.ddp_made import MS, Job, changed, play, play_on_devices, unoverlapped_s
from tests.refusals import refused

TOLERANCE = 0.03
"""Pieces of 256 KiB against a continuous share, and the latency of a collective that begins beside another."""

jobs = st.builds(
    lambda layers, lag, rate: Job(
        forward_ns=tuple(forward for forward, _ in layers), size=tuple(size for _, size in layers), lag=(1.0, lag),
        bytes_per_s=rate,
    ),
    st.lists(st.tuples(st.integers(1 * MS, 8 * MS), st.integers(200_000, 5_000_000)), min_size=3, max_size=7),
    st.floats(1.0, 1.3),
    st.floats(5e7, 4e8),
)  # fmt: skip


def replay_of(job: Job, *windows: StepWindow) -> DdpReplay:
    return DdpReplay.from_windows(windows or [play(job).window], models=[DdpModel(**job.model())], cores=8)


def predicted_s(job: Job, *edits: str) -> float:
    made = replay_of(job)
    return made.step_s * made.ratio(scenario_of(edits))[0]


# Laws


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 100), st.integers(1, 100))
def test_every_gradient_is_in_one_bucket_and_only_the_last_is_below_its_limit(sizes, first, cap):
    buckets = assign(sizes, ["f"] * len(sizes), (first, cap))

    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(buckets[:-1]):
        total, bound = sum(sizes[index] for index in bucket), cap if number else first
        assert total >= bound > total - sizes[bucket[-1]]


@settings(max_examples=15)
@given(jobs)
def test_the_replay_of_a_window_takes_as_long_as_the_window(job: Job) -> None:
    made = replay_of(job)

    assert made.fidelity == pytest.approx(1.0, abs=TOLERANCE)
    assert made.step_s == pytest.approx(play(job).step_s, rel=TOLERANCE)
    assert unoverlapped_s(made) >= made.step_s * (1 - TOLERANCE)


@pytest.mark.parametrize(
    ("edits", "edit", "change"),
    [
        (["1", "2", "5", "25", "default"], "bucket_mb={}",
         lambda job, size: {"limit": limits(size if size == "default" else float(size))}),
        ([0.25, 0.5, 2.0], "bandwidth={}x", lambda job, factor: {"bytes_per_s": job.bytes_per_s * factor}),
        # The annotation covers forward only: the arrows of the profiler lead to its backward.
        ([(layer, factor) for layer in range(3) for factor in (0.5, 2.0, 3.0)], "op:layer.{0[0]}={0[1]}x",
         lambda job, slow: {"slow": dict([slow])}),
    ],
    ids=["another bucket size", "another link", "a slower layer"],
)  # fmt: skip
@settings(max_examples=15)
@given(job=jobs, data=st.data())
def test_an_edit_takes_as_long_as_the_job_played_with_it(
    edits: Any, edit: str, change: Any, job: Job, data: Any
) -> None:
    value = data.draw(st.sampled_from(edits))
    truth = play(changed(job, **change(job, value))).step_s

    assert predicted_s(job, edit.format(value)) == pytest.approx(truth, rel=0.05)


@given(st.permutations(range(3)))
def test_the_order_of_ranks_does_not_matter(order: list[int]) -> None:
    job = Job(ranks=3, lag=(1.0, 1.2, 1.1))
    window = play(job).window
    parts = [window.trace.where(window.trace.events["rank"] == rank) for rank in order]

    assert replay_of(job, StepWindow(concat(parts), 3)).step_s == pytest.approx(replay_of(job, window).step_s, rel=1e-9)


def test_the_recorded_size_is_no_change_and_neither_is_no_edit() -> None:
    made = replay_of(Job())

    assert made.ratio(ResolvedEdits()) == (1.0, (1.0, 1.0))
    assert made.ratio(scenario_of(["bucket_mb=default"]))[0] == pytest.approx(1.0, abs=0.01)
    assert made.ratio(scenario_of(["bandwidth=1x", "op:layer.1=1x"]))[0] == pytest.approx(1.0, abs=1e-6)


def test_all_edits_at_once_are_replayed_together() -> None:
    job = Job()
    edits = ("bucket_mb=25", "bandwidth=0.25x", "op:layer.2=2x")
    truth = play(changed(job, limit=limits(25.0), bytes_per_s=job.bytes_per_s / 4, slow={2: 2.0})).step_s

    assert predicted_s(job, *edits) == pytest.approx(truth, rel=0.05)


def test_gradients_that_are_views_are_waited_for_without_copies() -> None:
    job = Job(views=True)
    thread = thread_of(play(job).window.trace, 0)

    assert not (thread.what == COPY).any()
    assert replay_of(job).fidelity == pytest.approx(1.0, abs=TOLERANCE)
    truth = play(changed(job, limit=limits(25.0))).step_s
    assert predicted_s(job, "bucket_mb=25") == pytest.approx(truth, rel=0.05)


# Devices whose hosts run ahead

EDITS = {
    "bucket_mb=0.5": {"limit": limits(0.5)},
    "bucket_mb=25": {"limit": limits(25.0)},
    "bandwidth=2x": {"bytes_per_s": 2e8},
    "op:layer.2=2x": {"slow": {2: 2.0}},
    f"op:{COPIES}=none": {"views": True},
    "comm=instant": {"bytes_per_s": 1e15, "latency_ns": 0},
}
"""Edit -> the job that it makes."""


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("lag", [1.0, 1.3])
@pytest.mark.parametrize("size", [(4_000_000, 2_000_000, 3_000_000, 900_000), (400_000,) * 4])
def test_a_job_on_devices_takes_as_long_as_it_played_with_the_edit(edit, lag, size):
    """The windows show kernels and who launched them: the computing stream stands for the training thread."""
    job = Job(size=size, lag=(1.0, lag))
    made = replay_of(job, play_on_devices(job).window)
    truth = play_on_devices(changed(job, **EDITS[edit])).step_s

    assert made.fidelity == pytest.approx(1.0, abs=TOLERANCE)
    assert made.step_s * made.ratio(scenario_of([edit]))[0] == pytest.approx(truth, rel=0.01)


# Oracles


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(["float32", "float64"])), min_size=1, max_size=30),
    st.integers(1, 5000),
    st.integers(1, 9000),
)
def test_buckets_are_those_of_torch(parameters: list[tuple[int, str]], first: int, cap: int) -> None:
    torch = pytest.importorskip("torch")
    distributed: Any = pytest.importorskip("torch.distributed")
    tensors = [torch.empty(count, dtype=getattr(torch, kind), device="meta") for count, kind in parameters]
    # Indices given = no reordering of the finished buckets: as the reducer calls it when it rebuilds.
    theirs, _ = distributed._compute_bucket_assignment_by_size(
        tensors, [first, cap], [False] * len(tensors), list(range(len(tensors)))
    )
    ours = assign([t.nbytes for t in tensors], [kind for _, kind in parameters], (first, cap))

    assert sorted(map(sorted, ours)) == sorted(map(sorted, theirs))


def test_the_rate_of_a_link_is_found_whatever_shares_it() -> None:
    """Two at once take as long as both bytes need; two-size regression would call that latency."""
    link = fit([Carried(0, 50_350_000, 1_000_000), Carried(10_000_000, 90_350_000, 8_000_000)])

    assert link.bytes_per_s == pytest.approx(1e8, rel=1e-6)


@settings(max_examples=10)
@given(jobs)
def test_the_fitted_rate_is_the_one_that_was_played(job: Job) -> None:
    made = replay_of(job)

    assert made.links[0].bytes_per_s == pytest.approx(job.bytes_per_s, rel=0.1)
    assert not made.busy


# What a thread did


def test_a_thread_is_cut_into_gradients_calls_waits_and_copies() -> None:
    job = Job()
    thread = thread_of(play(job).window.trace, 1)
    count = {kind: int((thread.what == kind).sum()) for kind in (GRAD, CALL, WAIT, COPY)}

    assert count == {GRAD: 12, CALL: 3 * len(job.buckets()), WAIT: 3 * len(job.buckets()), COPY: 12}
    assert np.unique(thread.backward[thread.what == GRAD]).size == 3


def test_collectives_take_group_number_and_size_from_the_flight_recorder() -> None:
    job = Job()
    trace = play(job).window.trace
    own = trace.where(trace.events["rank"] == 1)
    _, ran = collectives(own)
    sizes = [sum(job.size[layer] for layer in bucket) for bucket in job.buckets()]

    assert own.events["bytes"][ran].tolist() == sizes * 3
    assert own.events["seq"][ran].tolist() == list(range(3 * len(sizes)))


def test_a_window_without_flight_recorder_keeps_its_rows() -> None:
    trace = play(Job()).window.trace
    bare = trace.where(trace.events["rank"] == 0)

    assert joined(bare, None, 5).events["rank"].tolist() == [5] * len(bare)
    assert flight_path(flight_path.__globals__["Path"]("w/r1-w12.json")).name == "r1-w12.flight.json"


def test_a_dag_of_the_window_says_how_well_it_explains_it() -> None:
    dag = Dag.from_trace(play(Job()).window.trace, "ddp")

    assert dag.fidelity == pytest.approx(1.0, abs=TOLERANCE)
    assert dag.coverage is not None
    assert 0.95 < dag.coverage <= 1


# Refusals


def test_on_busy_cores_collectives_keep_the_time_they_took_and_a_bucket_size_is_to_be_tried_live() -> None:
    """No rate explains them, so the replay without edits is the window all the same."""
    job = Job(rate_of=(1.0, 0.3, 2.5), steps=6)
    made = DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=2)

    assert made.fidelity == pytest.approx(1.0, abs=0.005)
    assert made.ratio(scenario_of(["bandwidth=0.5x"]))[0] > 1.1
    assert "2 ranks keep 2 cores busy" in made.busy
    with pytest.raises(InputError, match=r"bucket_mb=25 is not predictable here: .*Try it live"):
        made.ratio(scenario_of(["bucket_mb=25"]))


def test_a_replay_that_misses_the_windows_refuses() -> None:
    made = replay_of(Job())
    slow = replace(made, profiled=tuple(replace(step, observed_ns=step.observed_ns * 2) for step in made.profiled))

    with pytest.raises(BarMissedError, match=r"misses them by (100|9\d).*at most 5 %"):
        slow.ratio(scenario_of(["bandwidth=2x"]))


def test_buckets_that_do_not_follow_the_rule_are_not_laid_out_anew() -> None:
    job = Job()
    model = {**job.model(), "first_bucket_bytes": 5_000_000}
    made = DdpReplay.from_windows([play(job).window], models=[DdpModel(**model)])

    with pytest.raises(InputError, match=r"DDP's rule gives .*Try it live"):
        made.ratio(scenario_of(["bucket_mb=5"]))


test_gradients_that_are_not_known_are_said_to_be = refused(
    ([], "the run noted 0 DistributedDataParallel models"),
    ([DdpModel(**Job().model())] * 2, "the run noted 2 Distributed"),
    ([DdpModel(**{**Job().model(), "order": []})], "rebuilt its buckets for 0 of 4"),
    by=gradients_of,
)


def test_windows_and_collectives_that_tell_nothing_are_refused() -> None:
    hosts, devices = play(Job()).window.trace, play_on_devices(Job()).window.trace
    light = devices.where(devices.events["corr"] >= 0)  # launches and kernels

    with pytest.raises(InputError, match="queued no collective"):
        replay_of(Job(), StepWindow(light, 3))
    with pytest.raises(InputError, match="carried more than 65536 bytes"):
        fit([Carried(0, 10, 100)])
    with pytest.raises(InputError, match="rank 0 queued no collective"):
        thread_of(hosts.where(~hosts.named("c10d::allreduce_")), 0)
    with pytest.raises(InputError):
        DdpReplay.from_windows([StepWindow(Trace.from_columns({"rank": [0], "start_ns": [0]}), 0)])


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (Job(steps=2), Job(steps=3), r"different numbers of collectives: \{0: 4, 1: 6\}"),
        (Job(), Job(size=(4_000_000, 2_000_000, 3_000_000, 800_000)), r"collective 0 has group .*not the same one"),
    ],
)
def test_ranks_that_do_not_match_are_refused(one: Job, other: Job, message: str) -> None:
    traces = play(one).window.trace, play(other).window.trace
    mixed = concat([trace.where(trace.events["rank"] == rank) for rank, trace in enumerate(traces)])

    with pytest.raises(InputError, match=message):
        step_of(mixed, [thread_of(mixed, 0), thread_of(mixed, 1)])


def test_pieces_keep_the_bytes_of_a_collective() -> None:
    assert CollectiveLink(0.0, 1e9, 0.0).duration_ns(12_345_678) == 12_345_678


def test_bucket_sizes_are_written_in_mebibytes_or_default() -> None:
    assert limits(25.0) == (26_214_400, 26_214_400)
    assert scenario_of(["bucket_mb=default"]).bucket_mb == "default"
    with pytest.raises(InputError, match=r"lengths?|sizes and"):
        assign([1], [], (1, 1))
