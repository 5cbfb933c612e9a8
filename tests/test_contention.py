"""Cores that others take: laws of the share that is left; replays held to closed forms and to a time-sliced host."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.machine.host_load import HostLoad
from headway.sim.recorded.core_use import Contention
from headway.sim.recorded.lane import COMPUTE
from headway.sim.recorded.pool_waits import PoolWaits
from headway.sim.recorded.program import Program
from headway.sim.recorded.recording import Recording
from headway.sim.recorded.segment_times import USUALLY_BESIDE
from headway.trace.events.trace import concat
from headway.trace.recording.run_facts import RunFacts
from headway.trace.recording.runs import Run
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, Rehearsed
from tests.oracles import time_sliced
from tests.runs_made import MS, Made, Rows, RunMaker
from tests.test_program import QUIET as FREE_WORKERS

QUIET = dataclasses.replace(FREE_WORKERS, receive_ns=0, reset_ns=0)


def load(**figures: Any) -> HostLoad:
    return HostLoad(**{"cores": 2, "cores_available": 2.0, "readings": 9, **figures})


def program_of(made: Made, beside: HostLoad, busy: float = 0.0) -> Program:
    facts = {**made.meta, "compute_cpu_fraction": busy, "host_load": msgspec.to_builtins(beside)}
    return Program.from_trace(made.trace, facts, costs=QUIET)


loads = st.builds(
    load, other_cores=st.floats(0, 4), cores_available=st.floats(0.1, 2), other_sessions=st.floats(0, 6),
    sharing=st.sampled_from(["cgroups", "sessions"]),
)  # fmt: skip


@given(loads, st.integers(1, 4))
def test_a_job_keeps_its_share_among_equals_and_never_more_than_its_quota(beside: HostLoad, ranks: int) -> None:
    left = Contention.of(beside, 2, groups=ranks).limit
    own = ranks if beside.sharing == "sessions" else 1
    rivals = max(1.0, beside.other_sessions) if beside.sharing == "sessions" else 1.0

    assert left <= beside.cores_available + 1e-9
    assert left >= min(beside.cores_available, 2 * own / (own + rivals)) - 1e-9


@pytest.mark.parametrize("quota", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("workers", [2, 4])
def test_loads_that_compute_are_bounded_by_the_quota(quota: float, workers: int) -> None:
    """30 ms of CPU per batch and a sleeping accelerator: a step takes 30 ms / quota."""
    made = RunMaker(
        ranks=1, steps=80, cores=2, prep_ns=30 * MS, compute_ns=2 * MS, optimizer_ns=0, transfer_ns=0, iter_ns=0
    ).make()
    program = program_of(made, load())

    predicted = program.predict([f"workers={workers}", f"cores={quota}"])

    assert predicted.step_s == pytest.approx(0.030 / quota, rel=0.1)


@pytest.mark.parametrize("other", [0.5, 1.0])
def test_loads_get_the_cores_that_other_sessions_leave(other: float) -> None:
    made = RunMaker(
        ranks=1, steps=80, cores=2, prep_ns=30 * MS, compute_ns=2 * MS, optimizer_ns=0, transfer_ns=0, iter_ns=0
    ).make()
    program = program_of(made, load(other_cores=other, sharing="sessions", other_sessions=1.0))

    assert program.fidelity == pytest.approx(1.0, abs=0.01)  # one thread on two cores: the other load is not in its way
    assert program.predict(["workers=4"]).step_s == pytest.approx(0.030 / (2 - other), rel=0.1)
    assert program.predict(["workers=4", "other=0"]).step_s == pytest.approx(0.015, rel=0.1)


@pytest.mark.parametrize(("workers", "rivals"), [(2, 1), (3, 1), (4, 1)])
def test_threads_of_others_share_as_on_a_time_sliced_host(workers: int, rivals: int) -> None:
    batches, prep, compute = 60, 30 * MS, 8 * MS
    done: set[int] = set()
    taken = [0]

    def trainer():
        for batch in range(batches):
            yield "until", lambda batch=batch: batch in done
            taken[0] += 1
            yield "sleep", compute

    def worker(index: int):
        for batch in range(index, batches, workers):
            yield "until", lambda batch=batch: batch < taken[0] + 2 * workers
            yield "cpu", prep
            done.add(batch)

    def spinner():
        while True:
            yield "cpu", 5 * MS

    threads = [trainer(), *(worker(index) for index in range(workers)), *(spinner() for _ in range(rivals))]
    sliced_s = time_sliced(threads, cores=2) / batches / 1e9
    made = RunMaker(
        ranks=1, steps=batches, cores=2, prep_ns=prep, compute_ns=compute, optimizer_ns=0, transfer_ns=0, iter_ns=0
    ).make()
    program = program_of(made, load(other_cores=1.0, other_runnable=float(rivals), sharing="threads"))

    assert program.predict([f"workers={workers}"]).step_s == pytest.approx(sliced_s, rel=0.12)


@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
def test_new_workers_cost_recorded_compute_as_much_as_it_keeps_its_core_busy(busy: float) -> None:
    """Steps of 20 ms and loads of 20 ms, on cores enough: each takes a share of `USUALLY_BESIDE` longer."""
    made = RunMaker(
        ranks=1, steps=80, cores=4, prep_ns=20 * MS, compute_ns=20 * MS, optimizer_ns=0, transfer_ns=0, iter_ns=0
    ).make()
    bare = program_of(made, load(), busy)
    recorded = dataclasses.replace(bare, run=cast(Run, object()), replays={})

    ideal, usual = (program.predict(["workers=1"]) for program in (bare, recorded))

    assert usual.step_s / ideal.step_s == pytest.approx(1 + (USUALLY_BESIDE - 1) * busy, rel=0.01)
    assert usual.interval == ideal.interval  # whether they cost anything is not known
    assert usual.interval[0] <= usual.speedup <= usual.interval[1]


@pytest.mark.parametrize(("waiting", "beside"), [(0.0, 0.0), (0.3, 0.0), (0.2, 1.0)])
def test_marks_tell_how_compute_uses_cores(waiting: float, beside: float) -> None:
    made = RunMaker(ranks=1, steps=120, prep_ns=MS, cpu_wait_ns=MS).make()
    lane = Recording.from_trace(made.trace, max_steps=120).lanes[0]
    rows = Rows(0)
    for step in range(5, 120, 10):
        done = COMPUTE[lane.label] & (lane.step < step)
        wall = int(lane.duration_ns[done].sum())
        cpu, delay = int(0.5 * wall) + step * MS, int(waiting * wall) + step * MS
        rows.add(
            "host.cpu", int(lane.step_end_ns[step]), 0, corr=cpu, seq=delay, bytes=cpu + int(beside * wall), step=step
        )
    found = Recording.from_trace(concat([made.trace, rows.trace()]), max_steps=120)

    assert found.busy[0] == pytest.approx(0.5, abs=0.02)
    assert found.waiting[0] == pytest.approx(waiting, abs=0.02)
    assert found.beside[0] == pytest.approx(beside, abs=0.02)


def with_threads(program: Program, cores: float) -> Program:
    """Return the program of the same job whose kernels occupy so many cores beside the training thread."""
    recording = dataclasses.replace(program.recording, beside=np.array([cores]))
    pool = PoolWaits.of(recording, program.cores, load())
    return dataclasses.replace(program, recording=recording, pool=pool, replays={})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("fetch", "prep", "beside", "step"), [(0, 6, 1.0, 16), (0, 20, 1.0, 30), (9, 0, 1.0, 10), (0, 6, 0.0, 10)]
)
def test_workers_win_no_core_from_operators_that_all_threads_share(workers, fetch, prep, beside, step):
    """Steps of 10 ms whose operators take both cores: loads that compute come on top, those that sleep do not."""
    made = RunMaker(
        ranks=1, steps=60, cores=2, fetch_ns=fetch * MS, prep_ns=prep * MS, compute_ns=10 * MS, optimizer_ns=0,
        transfer_ns=0,
    ).make()  # fmt: skip
    program = with_threads(program_of(made, load(), busy=1.0), beside)

    assert program.fidelity == pytest.approx(1.0, abs=0.001)
    assert program.predict([f"workers={workers}"]).step_s == pytest.approx(step / 1e3, rel=0.1)


def test_threads_of_kernels_share_the_cores_with_loads() -> None:
    """Beside loads of 10 ms, compute of 10 ms on one core wins them; on both it stands still while they have one."""
    made = RunMaker(ranks=1, steps=80, cores=2, prep_ns=10 * MS, compute_ns=10 * MS, optimizer_ns=0, iter_ns=0).make()
    program = program_of(made, load(), busy=1.0)
    wide = with_threads(program, 1.0)

    assert program.predict(["workers=1"]).step_s == pytest.approx(0.010, rel=0.05)
    assert wide.predict(["workers=1"]).step_s == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("accelerated", [False, True])
def test_kernels_of_loads_in_the_training_thread_are_not_those_of_its_compute(accelerated: bool) -> None:
    """Loads whose kernels run on four cores: 30 cores beside a short compute, on a host that has four."""
    made = RunMaker(ranks=1, steps=120, cores=4, prep_ns=20 * MS, compute_ns=2 * MS, optimizer_ns=0, iter_ns=0).make()
    lane = Recording.from_trace(made.trace, max_steps=120).lanes[0]
    rows = Rows(0)
    for step in range(5, 120, 10):
        cpu = 21 * MS * step
        rows.add("host.cpu", int(lane.step_end_ns[step]), 0, corr=cpu, seq=0, bytes=cpu + 60 * MS * step, step=step)
    if accelerated:
        for step in range(120):
            rows.add("device.work", int(lane.step_end_ns[step + 1]) - MS, MS, seq=0, step=step)
    program = Program.from_trace(concat([made.trace, rows.trace()]), made.meta)

    assert program.recording.beside[0] == pytest.approx(1.0 if accelerated else 30.0, rel=0.05)
    assert program.fidelity == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("between", [0, 2 * MS])
def test_what_a_worker_does_between_two_loads_is_replayed(between: int) -> None:
    """A loader of one worker that bounds the steps: each takes the load and what lies between two of them."""
    made = RunMaker(ranks=1, steps=80, cores=64, num_workers=1, prep_ns=8 * MS + between, compute_ns=2 * MS).make()
    events = made.trace.events
    shorter = np.where(
        made.trace.named("input.load", "input.prep"), events["duration_ns"] - between, events["duration_ns"]
    )
    later = np.where(made.trace.named("input.load", "input.prep"), events["start_ns"] + between, events["start_ns"])
    trace = dataclasses.replace(made.trace, events={**events, "duration_ns": shorter, "start_ns": later})
    process = Rows(0)
    process.add("input.worker", int(events["start_ns"].min()), 0, group=0, corr=0, peer=0, seq=7)
    program = Program.from_trace(concat([trace, process.trace()]), made.meta)

    assert program.fidelity == pytest.approx(1.0, abs=0.005)
    assert program.models[0].between_ns[5:].mean() == pytest.approx(between, abs=0.01 * MS)


ONE = ["compute_threads=1"]


@pytest.mark.parametrize(
    ("edits", "beside", "step"),
    [
        (["workers=8"], load(), 4.2),
        (["workers=8"], None, 5.2),
        (["workers=1"], load(), 33),
        (ONE, load(), 35),
        (["compute_threads=2"], load(), 38),
    ],
)
def test_steps_that_stalled_behind_long_waits_for_input_do_not_behind_short_ones(edits, beside, step):
    """Loads sleep for 33 ms, operators take 1 ms on two threads, and in every third step 13."""
    made = RunMaker(
        ranks=1, steps=90, cores=2, fetch_ns=33 * MS, compute_ns=lambda _, step: (1 if step % 3 else 13) * MS,
        optimizer_ns=0, transfer_ns=0, iter_ns=0, batch_bytes=0,
    ).make()  # fmt: skip
    program = program_of(made, load(), busy=1.0)
    recording = dataclasses.replace(program.recording, beside=np.array([1.0]), waiting=np.array([0.5]))
    pool = PoolWaits.of(recording, 2, beside)
    program = dataclasses.replace(program, recording=recording, pool=pool, replays={})

    prediction = program.predict([*edits, "watched=false"])

    assert program.fidelity == pytest.approx(1.0, abs=0.001)
    assert prediction.step_s * 1e3 == pytest.approx(step, rel=0.1)
    assert prediction.interval[0] <= prediction.speedup <= prediction.interval[1]


def test_a_worker_of_torch_sends_a_batch_beside_its_next_load() -> None:
    """Loads sleep for 4 ms: two workers have a batch every 2.1 ms; those of a remedy pack before they go on."""
    made = RunMaker(ranks=1, steps=99, cores=4, fetch_ns=4 * MS, compute_ns=MS // 5, optimizer_ns=0, iter_ns=0).make()
    program = Program.from_trace(made.trace, {**made.meta, "compute_cpu_fraction": 1.0})

    plain, watched = (program.predict(["workers=2", *more]).step_s * 1e3 for more in (["watched=false"], []))

    assert plain == pytest.approx(2.1, rel=0.05)
    assert watched > 1.15 * plain


@pytest.mark.parametrize(("one_thread_ms", "step"), [(None, 12.6), (10, 10), (15, 15), (40, 20)])
def test_one_thread_has_the_core_that_another_process_leaves_and_the_work_that_a_child_timed(one_thread_ms, step):
    """Operators of 10 ms on two threads, of which one waits for a core for nine times as long beside a busy process."""
    made = RunMaker(ranks=1, steps=60, cores=2, compute_ns=100 * MS, optimizer_ns=0, transfer_ns=0, iter_ns=0).make()
    program = program_of(made, load(other_cores=1.0, other_runnable=1.0), busy=0.1)
    recording = dataclasses.replace(program.recording, beside=np.array([1.0]), waiting=np.array([0.9]))
    timed = CallFlops(rehearsed=Rehearsed(step_s=one_thread_ms and one_thread_ms / 1e3))
    facts = msgspec.structs.replace(RunFacts.of(made.meta), compute=ComputeFacts(calls=(timed,)))
    pool = PoolWaits.of(recording, 2, load(other_cores=1.0, other_runnable=1.0), facts)
    program = dataclasses.replace(program, recording=recording, pool=pool, replays={})

    prediction = program.predict(ONE)

    assert prediction.step_s * 1e3 == pytest.approx(step, rel=0.05)
    assert prediction.interval[0] < prediction.speedup < prediction.interval[1]
    full = dataclasses.replace(program, pool=PoolWaits.of(recording, 2, load(other_cores=2.0, other_runnable=2.0)))
    with pytest.raises(InputError, match="as many would again"):
        full.predict(ONE)
