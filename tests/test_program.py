"""Replaying a recorded run: exact without edits, and right with them, against independent models of the same job."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.recorded.lane import LABEL
from headway.sim.recorded.loader_model import own_service, storage_is_shared
from headway.sim.recorded.program import Program
from headway.sim.recorded.recording import LOAD_PARTS, Recording
from headway.sim.recorded.segment_times import Costs, straggler_pace
from headway.trace.events.trace import concat
from tests.oracles import sliced_loader
from tests.runs_made import MS, Made, Rows, RunMaker

QUIET = Costs(
    handoff_ns=0, receive_ns=100_000, per_byte_ns=0.0, fork_ns=0, first_ns=0, stop_ns=0, reset_ns=2 * MS, look_ns=0,
    pack_ns=0, turn_ns=0, send_ns=0, elsewhere=1.0,
)  # fmt: skip
"""Costs of the made job: its hand-off takes 0.1 ms, its workers cost nothing."""

FREE_CACHE = replace(QUIET, hit_ns=0, hit_per_byte_ns=0.0, cold_ns=0, keep_ns=0, cache_trial_ns=0)
"""The same with a cache that costs nothing."""


def program_of(made: Made, **facts: Any) -> Program:
    return Program.from_trace(made.trace, {**made.meta, **facts}, costs=QUIET)


def jitter(mean_ns: int, seed: int) -> Any:
    """Return a cost: lognormal around the mean, a function of rank and step."""
    return lambda rank, step: int(mean_ns * random.Random(seed + 977 * step + rank).lognormvariate(0, 0.3))


def job(**changes: Any) -> RunMaker:
    """Return a job of two ranks with uneven batches, saves, collections and a slower second rank."""
    usual: dict[str, Any] = {
        "ranks": 2, "steps": 120, "epoch_steps": 40, "cores": 64, "fetch_ns": jitter(6 * MS, 1),
        "prep_ns": jitter(MS, 2), "save_ns": lambda rank, step: 20 * MS if step % 20 == 19 and rank == 0 else 0,
        "compute_ns": lambda rank, step: (5 + rank) * MS, "gc_ns": lambda rank, step: MS if step % 7 == 0 else 0,
        "logging_ns": MS // 4,
    }  # fmt: skip
    return RunMaker(**{**usual, **changes})


# Laws


@pytest.mark.slow
@given(
    workers=st.integers(0, 4), prefetch=st.integers(1, 3), ranks=st.integers(1, 3), epoch=st.integers(3, 30),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_without_edits_a_run_replays_to_the_nanosecond(workers, prefetch, ranks, epoch, seed):
    """Every cost is known and no core is short: the replay has nothing left to be wrong about."""
    made = job(
        ranks=ranks, steps=30, epoch_steps=epoch, num_workers=workers, prefetch_factor=prefetch,
        compute_ns=jitter(5 * MS, seed),
    ).make()  # fmt: skip

    assert program_of(made).fidelity == pytest.approx(1.0, abs=1e-3 if workers else 1e-9)


@pytest.mark.parametrize("target", ["input", "input.fetch", "input.prep", "comm", "checkpoint", "host", "straggler"])
def test_taking_a_cause_away_never_makes_a_step_longer(target: str) -> None:
    program = program_of(job(num_workers=1).make())

    times = [program.predict([f"{target}={factor}"]).step_s for factor in ("2x", "1x", "0.5x", "none")]

    assert times == sorted(times, reverse=True)


def test_no_edit_predicts_what_was_measured() -> None:
    prediction = program_of(job().make()).predict()

    assert prediction.speedup == 1.0
    assert prediction.interval == (1.0, 1.0)
    assert prediction.to_json()["schema"] == "headway.whatif/1"


def test_the_interval_holds_the_prediction() -> None:
    program = program_of(job().make())

    for edit in ("workers=2", "checkpoint=none", "cache_fraction=0.5", "straggler=none"):
        prediction = program.predict([edit])

        assert prediction.interval[0] * (1 - 1e-9) <= prediction.speedup <= prediction.interval[1] * (1 + 1e-9)


# Oracles: the same job made anew with the change, and a scheduler with time slices


@pytest.mark.parametrize("slow_steps", [30, 59, 61])
def test_steps_beside_headways_own_children_say_nothing_of_the_job(slow_steps: int) -> None:
    """Steps that shared the cores with a rehearsal are left out, unless they are more than half of them."""
    quiet: dict[str, Any] = {"ranks": 1, "fetch_ns": 6 * MS, "compute_ns": 5 * MS}
    slow = {**quiet, "compute_ns": lambda rank, step: (9 if step < slow_steps else 5) * MS}
    ends_ns = program_of(made := job(**slow).make()).recording.lanes[0].step_end_ns

    told = program_of(made, loaders={"0": {"rehearsal": {"ended_ns": int(ends_ns[slow_steps])}}})

    alone = program_of(job(**quiet).make())
    assert (told.measured_s == pytest.approx(alone.measured_s, rel=0.03)) == (slow_steps < 60)
    assert told.fidelity == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_that_take_longer_behind_a_window_are_left_out_on_a_device_alone(on_device: bool) -> None:
    """A profiler's library that stays attached slows a device's launches; a host is slower for a reason of its own."""
    made = job(ranks=1, compute_ns=lambda rank, step: (5 if step < 40 else 9) * MS).make()
    ends_ns = program_of(made).recording.lanes[0].step_end_ns
    rows = Rows(0)
    rows.add("window", int(ends_ns[40]) + 1, MS, step=40)
    if on_device:
        rows.add("device.work", int(ends_ns[5]), MS, lane="device", step=5)

    recording = Recording.from_trace(concat([made.trace, rows.trace()]), max_steps=1000)

    assert recording.recorded_steps == (40 if on_device else 120)
    assert recording.job_steps == 120


def test_workers_may_win_less_where_cores_are_not_cores_of_their_own() -> None:
    """Loads that compute slow what runs beside them, at the low end; loads that sleep slow nothing."""
    lows = []
    for fetch_ns, prep_ns in ((0, 6 * MS), (6 * MS, 0)):
        predicted = program_of(job(ranks=1, fetch_ns=fetch_ns, prep_ns=prep_ns, compute_ns=6 * MS).make())
        predicted = predicted.predict(["workers=2"])
        lows.append(predicted.interval[0] / predicted.speedup)

    assert lows[0] < 0.85 < lows[1]


@pytest.mark.parametrize("edit", ["script=none", "op:host.recording=none"])
def test_headways_own_work_is_no_time_of_the_scripts(edit: str) -> None:
    costs: dict[str, Any] = {"script_ns": 4 * MS, "recording_ns": lambda rank, step: 30 * MS * (step % 10 == 9)}
    predicted = program_of(job(**costs).make()).predict([edit])

    costs["script_ns" if edit == "script=none" else "recording_ns"] = 0
    assert predicted.step_s == pytest.approx(program_of(job(**costs).make()).measured_s, rel=0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_kept_workers_open_what_new_ones_open_in_each_pass_once(workers: int) -> None:
    """The first load of each worker takes 300 ms longer: 10 passes, or the first one alone."""

    def opening(rank: int, step: int) -> int:
        return 304 * MS if step % 20 < workers else 4 * MS

    def opening_once(rank: int, step: int) -> int:
        return 304 * MS if step < workers else 4 * MS

    costs: dict[str, Any] = {"ranks": 1, "steps": 200, "epoch_steps": 20, "num_workers": workers, "iter_ns": 3 * MS}
    made = RunMaker(**costs, fetch_ns=opening).make()
    program, free = program_of(made), Program.from_trace(made.trace, made.meta, costs=FREE_CACHE)
    kept = program_of(RunMaker(**costs, fetch_ns=opening_once).make())

    predicted = program.predict(["persistent=true"])
    assert predicted.step_s == pytest.approx(kept.measured_s, rel=0.05)
    assert predicted.speedup > 2
    assert program.predict([f"workers={workers}"]).step_s == pytest.approx(program.measured_s, rel=0.01)
    assert free.predict(["cache_fraction=1"]).speedup < 1.5, "new workers read their first example anew"
    assert free.predict(["cache_fraction=1", "watched=false"]).speedup > 2


@pytest.mark.parametrize("recorded", [0, 1, 3])
@pytest.mark.parametrize(
    ("edits", "changes"),
    [
        (["workers=1"], {"num_workers": 1}),
        (["workers=2"], {"num_workers": 2}),
        (["workers=4"], {"num_workers": 4}),
        (["workers=2", "prefetch=4"], {"num_workers": 2, "prefetch_factor": 4}),
        (["checkpoint=none"], {"save_ns": 0}),
        (["comm=instant"], {"comm_ns": 0}),
        (["bandwidth=2x"], {"comm_ns": MS // 2}),
        (["host.gc=none"], {"gc_ns": 0}),
        (["host.logging=none"], {"logging_ns": 0}),
        (["straggler=none"], {"compute_ns": 5 * MS}),
        (["input=instant"], {"fetch_ns": 0, "prep_ns": 0, "transfer_ns": 0, "iter_ns": 2 * MS}),
        (["input.fetch=none"], {"fetch_ns": 0}),
        (["op:optimizer.*=2x"], {"optimizer_ns": MS}),
        (["workers=2", "checkpoint=none", "host=none"], {"num_workers": 2, "save_ns": 0, "gc_ns": 0, "logging_ns": 0}),
    ],
)
def test_a_prediction_is_what_the_changed_job_takes(recorded: int, edits: list[str], changes: dict[str, Any]) -> None:
    predicted = program_of(job(num_workers=recorded).make()).predict(edits)

    actual = program_of(job(**{"num_workers": recorded, **changes}).make()).measured_s
    assert predicted.step_s == pytest.approx(actual, rel=0.02)


@pytest.mark.parametrize("compute_ms", [6, 40])
def test_a_worker_that_hands_over_late_costs_the_training_thread_nothing_more(compute_ms: int) -> None:
    """A dataset that holds the interpreter's lock: a batch arrives when the load after it ends, which others hide."""
    costs: dict[str, Any] = {
        "ranks": 1, "fetch_ns": 0, "prep_ns": jitter(17 * MS, 3), "compute_ns": compute_ms * MS, "holds_lock": True,
    }  # fmt: skip
    program = program_of(job(num_workers=1, **costs).make())

    for workers in (2, 3):
        actual = program_of(job(num_workers=workers, **costs).make()).measured_s
        assert program.predict([f"workers={workers}"]).step_s == pytest.approx(actual, rel=0.05)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("fetch", "prep", "compute", "busy"),
    [(0, 12, 8, True), (0, 30, 8, True), (16, 4, 8, True), (16, 4, 8, False), (0, 30, 8, False), (4, 8, 20, True)],
)
def test_workers_on_short_cores_take_what_a_time_sliced_host_takes(workers, fetch, prep, compute, busy):
    """Predicted from a run without workers; the oracle shares two cores in slices of half a millisecond."""
    costs = {"fetch": fetch * MS, "prep": prep * MS, "compute": compute * MS, "busy": busy}
    made = RunMaker(
        ranks=1, steps=60, cores=2, fetch_ns=costs["fetch"], prep_ns=costs["prep"], compute_ns=costs["compute"],
        optimizer_ns=0, transfer_ns=0,
    ).make()  # fmt: skip
    quiet = replace(QUIET, receive_ns=0)
    facts = {**made.meta, "compute_cpu_fraction": float(busy)}

    predicted = Program.from_trace(made.trace, facts, costs=quiet).predict([f"workers={workers}"])

    assert predicted.step_s == pytest.approx(sliced_loader(60, workers=workers, **costs), rel=0.1)


# What the model knows of storage, caches, stragglers, epochs


def throttled(workers: int, compute_ns: int = 2 * MS) -> Made:
    """Return a job whose loads queue for one pipe: a batch needs it for 8 ms, then 4 ms of CPU."""
    free, fetches = [0], {}
    clock = [0] * workers

    def fetch(rank: int, step: int) -> int:
        if step not in fetches:
            begin = max(clock[step % workers], free[0])
            free[0] = begin + 8 * MS
            fetches[step] = free[0] - clock[step % workers]
            clock[step % workers] = free[0] + 4 * MS
        return fetches[step]

    return RunMaker(ranks=1, steps=200, cores=64, num_workers=workers, fetch_ns=fetch, prep_ns=4 * MS,
                    compute_ns=compute_ns).make()  # fmt: skip


def test_shared_storage_bounds_what_workers_win() -> None:
    program = program_of(throttled(2))

    shared = program.predict(["workers=8", "storage=shared"]).step_s
    parallel = program.predict(["workers=8", "storage=parallel"]).step_s

    assert shared == pytest.approx(0.008, rel=0.03)
    assert parallel < 0.7 * shared


def test_threads_that_make_a_batch_together_keep_the_pipe_busy_side_by_side() -> None:
    made = RunMaker(ranks=1, steps=200, num_workers=2, fetch_ns=26 * MS, prep_ns=6 * MS, compute_ns=40 * MS).make()
    [batches] = Recording.from_trace(made.trace, max_steps=200).batches
    blocked = batches.part_ns[:, 0].sum()

    together, apart = (
        own_service((replace(batches, together=np.array([threads])),)) * blocked for threads in (True, False)
    )

    assert together == pytest.approx(200 * 16 * MS, rel=0.03)  # both halves of 32 ms at once
    assert apart == pytest.approx(200 * 26 * MS, rel=0.03)


def test_a_run_whose_overlap_never_varies_does_not_show_how_storage_serves() -> None:
    assert storage_is_shared(Recording.from_trace(job(num_workers=1, ranks=1).make().trace, max_steps=99)) is None


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_a_cache_serves_its_share_without_fetch_and_prep(fraction: float) -> None:
    made = RunMaker(ranks=1, steps=200, fetch_ns=8 * MS, prep_ns=2 * MS, compute_ns=5 * MS).make()
    program = Program.from_trace(made.trace, made.meta, costs=FREE_CACHE)

    predicted = program.predict([f"cache_fraction={fraction}"]).step_s

    assert predicted == pytest.approx(program.measured_s - fraction * 0.010, rel=0.02)


@pytest.mark.parametrize(
    ("steps", "epoch_steps", "edits", "won_s", "within"),
    [(101, 50, [], 0.010 * 51 / 100, 0.02), (300, 100, ["cache_shards=2"], 0.010 * (0.5 + 0.75) / 3, 0.05)],
    ids=["the first epoch fills it", "dealt examples come back with odds of one in the number of ranks"],
)
def test_a_cold_cache_wins_from_its_second_epoch_on(steps, epoch_steps, edits, won_s, within) -> None:
    made = RunMaker(ranks=1, steps=steps, epoch_steps=epoch_steps, fetch_ns=10 * MS, compute_ns=5 * MS).make()
    program = Program.from_trace(made.trace, made.meta, costs=FREE_CACHE)

    cold = program.predict(["cache_fraction=1", "cache_cold=1", *edits]).step_s

    assert program.measured_s - cold == pytest.approx(won_s, rel=within)


def test_a_rank_whose_loads_are_slow_is_a_straggler() -> None:
    slow = job(compute_ns=5 * MS, fetch_ns=lambda rank, step: (4 + 6 * rank) * MS, prep_ns=MS, save_ns=0).make()
    even = job(compute_ns=5 * MS, fetch_ns=4 * MS, prep_ns=MS, save_ns=0).make()

    assert program_of(slow).predict(["straggler=none"]).step_s == pytest.approx(program_of(even).measured_s, rel=0.01)
    half = program_of(slow).predict(["straggler=0.5x"]).step_s
    assert half == pytest.approx((program_of(slow).measured_s + program_of(even).measured_s) / 2, rel=0.01)


def test_a_sudden_slow_step_of_one_rank_is_a_straggler_too() -> None:
    made = job(compute_ns=lambda rank, step: 25 * MS if rank == 1 and step % 10 == 5 else 5 * MS).make()
    pace = straggler_pace(Recording.from_trace(made.trace, max_steps=120), 0.0)

    assert pace[0].min() == 1.0
    assert np.flatnonzero(pace[1] < 1).tolist() == list(range(5, 120, 10))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_marks_of_cpu_time_tell_whether_compute_occupies_a_core(share: float) -> None:
    """Loads in the main process and collections are CPU time too, and are not compute."""
    made = job(ranks=1, fetch_ns=3 * MS, prep_ns=MS).make()
    lane = Recording.from_trace(made.trace, max_steps=120).lanes[0]
    steps = np.arange(5, 120, 10)
    compute = np.isin(lane.label, [LABEL["compute"], LABEL["optimizer.step"]])
    spent = np.array([lane.duration_ns[compute & (lane.step < step)].sum() * share for step in steps])
    gc_ns = np.array([lane.duration_ns[(lane.label == LABEL["host.gc"]) & (lane.step < step)].sum() for step in steps])
    rows = Rows(0)
    for step, cpu_ns in zip(steps.tolist(), (spent + gc_ns + steps * MS).tolist(), strict=True):
        rows.add("host.cpu", int(lane.step_end_ns[step]), 0, corr=int(cpu_ns), step=step)
    program = Program.from_trace(concat([made.trace, rows.trace()]), made.meta)

    assert program.busy_known
    assert program.busy[0] == pytest.approx(share, abs=0.01)


def test_loads_of_other_loaders_and_other_passes_on_the_same_lane_are_not_taken_for_ours() -> None:
    """A second loader's worker 0 has the same lane name; a worker of the pass before may load on into the next one."""
    trace = job(ranks=1, num_workers=2, epoch_steps=10).make().trace
    events, loading = trace.events, trace.named("input.load", *LOAD_PARTS)
    made = np.flatnonzero(trace.named("input.iter"))
    newest = made[np.searchsorted(events["start_ns"][made], events["start_ns"], side="right") - 1]
    ours = replace(trace, events={**events, "corr": np.where(loading, events["corr"][newest], events["corr"])})
    loads = ours.where(loading).events
    late = {**loads, "start_ns": loads["start_ns"] + 1}
    others = [
        replace(
            trace, events={**late, "group": np.full_like(late["group"], 1), "corr": np.full_like(late["corr"], 77)}
        ),
        replace(trace, events={**late, "corr": late["corr"] - 1}).where(late["corr"] > 0),
    ]

    alone = Recording.from_trace(ours, max_steps=120).batches[0]
    mixed = Recording.from_trace(concat([ours, *others]), max_steps=120).batches[0]
    assert mixed.load_start_ns.tolist() == alone.load_start_ns.tolist()
    assert mixed.part_ns.tolist() == alone.part_ns.tolist()
    assert alone.part_ns.sum(axis=1).tolist() == alone.load_ns.tolist()


def test_a_loader_that_must_be_left_alone_is_replayed_as_it_was() -> None:
    made = job(num_workers=1, fetch_ns=lambda rank, step: (60 if step % 10 == 5 else 2) * MS, iter_ns=8 * MS).make()
    facts = {"0": {**made.meta["loaders"]["0"], "reason_untunable": "a batch sampler of the script's own"}}
    program = program_of(made, loaders=facts)

    for edit in ("workers=4", "prefetch=8", "persistent=true", "cache_fraction=1"):
        assert program.predict([edit]).speedup == 1.0
        assert program_of(made).predict([edit]).speedup > 1.005


def test_workers_for_one_loader_leave_the_others_as_they_were() -> None:
    program = program_of(job(num_workers=0, fetch_ns=9 * MS).make())

    assert program.predict(["workers=4@0"]).speedup == program.predict(["workers=4"]).speedup > 1.1
    assert program.predict(["workers=4@1+2", "threads=true", "persistent=true"]).speedup == 1.0


def test_workers_win_nothing_of_what_a_sampler_draws() -> None:
    program = program_of(job(ranks=1, num_workers=0, fetch_ns=MS, transfer_ns=20 * MS).make())

    assert program.predict(["workers=2"]).speedup <= 1.1
    assert program.predict(["input.transfer=none"]).speedup > 1.5


@pytest.mark.parametrize(("trial_s", "edit"), [(0.1, "workers=4"), (0.6, "workers=4@0")])
def test_a_loader_that_trials_leave_no_time_for_is_replayed_as_it_was(trial_s: float, edit: str) -> None:
    """Of two loaders the second is not tried where the trial of the first takes .6 s: so `apply` has it, too."""
    made = job(ranks=1, num_workers=0, fetch_ns=9 * MS).make()
    events = made.trace.events
    first = np.flatnonzero(made.trace.named("input.iter"))
    second = (events["group"] == 0) & (events["start_ns"] >= events["start_ns"][first[1]])
    trace = replace(made.trace, events={**events, "group": np.where(second, 1, events["group"])})
    facts = made.meta["loaders"]["0"]
    loaders = {"0": {**facts, "rehearsal": {"processes_s": trial_s}}, "1": {**facts, "dataset": "Other"}}
    program = program_of(replace(made, trace=trace), loaders=loaders)

    assert program.predict(["workers=4"]).step_s == pytest.approx(program.predict([edit]).step_s, rel=0.001)
    assert program.predict(["workers=4@1"]).speedup > 1.1, "nothing of the first one is tried then"
    by_hand = program.predict(["workers=4", "watched=false"]).speedup
    assert by_hand > 1.1 * program.predict(["workers=4@0", "watched=false"]).speedup


def test_steps_that_took_no_time_cannot_be_replayed() -> None:
    made = RunMaker(ranks=1, steps=9, compute_ns=0, optimizer_ns=0, iter_ns=0, transfer_ns=0).make()

    with pytest.raises(InputError, match=r"steps of rank 0 took no time.*Record a run"):
        program_of(made)


def test_ranks_of_different_hosts_do_not_share_cores() -> None:
    made = job(prep_ns=6 * MS, fetch_ns=0, num_workers=0).make()
    apart = replace(made.trace, ranks={rank: {"host": f"host-{rank}"} for rank in (0, 1)})
    facts = {**made.meta, "cores": 1, "compute_cpu_fraction": 1.0}

    one = Program.from_trace(made.trace, {**facts, "cores": 2}, costs=QUIET)
    two = Program.from_trace(apart, facts, costs=QUIET)
    assert two.unrolled().capacity.tolist() == [1] * 8
    assert two.fidelity == pytest.approx(one.fidelity)
    assert two.fidelity == pytest.approx(1.0, abs=1e-6)


def test_assumed_costs_grow_with_the_pressure_on_the_host() -> None:
    """Loads that wait for a core although the job leaves one free show that others use it."""
    made = job(ranks=1, prep_ns=MS, cpu_wait_ns=2 * MS).make()
    program = Program.from_trace(made.trace, made.meta)

    assert program.pressure == pytest.approx(3.0)
    assert program.costs.receive_ns == 3 * Costs().receive_ns
    assert "3.0 times as long" in program.predict(["workers=2"]).note
    assert Program.from_trace(made.trace, {**made.meta, "cores": 1}).pressure == 3.0
    assert Program.from_trace(made.trace, made.meta, costs=QUIET).costs == QUIET


def test_garbage_is_collected_together_at_the_asked_steps() -> None:
    program = program_of(job(ranks=1).make())
    frozen = program.predict(["gc=frozen:10"]).step_s

    assert program.predict(["host.gc=none"]).step_s == pytest.approx(
        frozen - program.costs.collect_ns / 1e9 / 10, rel=0.01
    )


def test_a_long_run_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.sim.recorded.program.MAX_RANK_STEPS", 80)
    made = job(ranks=1, save_ns=lambda rank, step: 40 * MS if step >= 30 else (10 * MS if step == 20 else 0)).make()
    program = program_of(made)

    assert program.recording.num_steps == 80
    prediction = program.predict(["checkpoint=none"])
    assert "the first 80 of 120 steps" in prediction.note
    assert prediction.base_step_s - prediction.step_s == pytest.approx((0.010 + 90 * 0.040) / 119, rel=0.05)


def test_overlapping_spans_go_to_the_strongest_cause() -> None:
    """A collection inside a step splits the compute around it; nothing is counted twice."""
    made = job(ranks=1, steps=20).make()
    lane = Recording.from_trace(made.trace, max_steps=20).lanes[0]

    assert lane.duration_ns.sum() == lane.step_end_ns[-1] - lane.step_end_ns[0]
    assert lane.duration_ns[lane.label == LABEL["host.gc"]].sum() == 3 * MS


def test_the_time_outside_is_not_made_up_by_a_seed() -> None:
    program = program_of(job(num_workers=2).make())

    assert program.predict(["workers=3"], seed=1).step_s == program.predict(["workers=3"], seed=2).step_s
