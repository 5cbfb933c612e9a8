"""A service that shares devices: its decisions, what it survives, and what it refuses."""

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.model import Cluster, Jobs, Rates
from headway.cluster.policies.table import SERVED
from headway.cluster.queue.engine import RoundEngine
from headway.cluster.queue.rounds import Timing
from headway.cluster.service.server import ServiceServer, SharingOptions, SubmitJob, log_of
from headway.cluster.service.state import ServiceState
from headway.cluster.service.store import EventLog, RoundAdvanced
from tests.made.service_jobs import ComputedJobs, through_kills

JOBS = [  # arrival_s, scale, steps: dyadic numbers, so that sums of times are exact
    (64.0, 1, 500.0), (64.0, 2, 300.0), (80.0, 1, 700.0), (100.0, 3, 256.0), (101.5, 1, 64.0), (400.0, 2, 300.0),
    (410.0, 1, 900.0), (1500.0, 1, 128.0),
]  # fmt: skip
ROUND_S = 64.0
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each event is synced to the disk


def simulated(pools, policy, rates):
    """(time, job -> type) of each decision of the simulation."""
    ids = [f"job{number + 1}" for number in range(len(JOBS))]
    arrival_s, scale, steps = (np.array(column) for column in zip(*JOBS, strict=True))
    jobs, cluster = Jobs(ids, scale, steps, arrival_s), Cluster.of(pools)
    table = Rates.of(np.tile([rates[name] for name in pools], (len(ids), 1)), jobs, cluster)
    timing = Timing("headway", ROUND_S, ROUND_S * 16 / 3, fills=True)
    engine, now_s, found = RoundEngine(jobs, cluster, SERVED[policy], table, 0, (0, len(ids)), timing), 64.0, []
    while True:
        length_s = engine.advance(now_s)
        runs = engine.running
        rows = {} if runs is None else {ids[a]: cluster.names[k] for a, k in zip(runs.a, runs.kind, strict=True)}
        found.append((now_s, rows))
        if length_s is None:
            return found, engine.finish_s.tolist()
        now_s += length_s


def served(tmp_path, pools, policy, rates, speed=1000.0, **options):
    """The decisions of a service with the same jobs, on a wall clock that is `speed` times as fast."""
    began_s = time.monotonic()
    steps = {f"job{number + 1}": row[2] for number, row in enumerate(JOBS)}
    horizon_s = lambda: min(server.now_s(), server.state.due_s())  # noqa: E731 -- the server is made after it
    executor = ComputedJobs(dict(pools), steps, rates, lambda: server.state.now_s, horizon_s, **options)
    clock = lambda: (time.monotonic() - began_s) * speed  # noqa: E731 -- a clock is passed as a function
    settings = SharingOptions(pools, policy, ROUND_S)
    with ServiceServer(tmp_path / "service", settings, executor, clock=clock, boot="b", look_s=0.001) as server:
        for arrival_s, scale, _ in JOBS:
            server.submit(SubmitJob("", scale, ["train.py"], "/"), at_s=arrival_s)
        while any(job.state != "finished" for job in server.state.jobs.values()):
            server.turn(0.001)
            assert server.now_s() < 20_000
        finish_s = [job.finish_s for job in server.state.jobs.values()]
    with EventLog(log_of(tmp_path / "service"), write=False) as log:
        events = [event for event in log.read() if isinstance(event, RoundAdvanced)]
    return [(e.at_s, {job: slots[0].split(":")[0] for job, slots in e.runs.items()}) for e in events], finish_s


@pytest.mark.parametrize(
    ("policy", "pools"),
    [
        ("las", {"slot": 3}),
        ("las", {"fast": 3, "slow": 3}),
        ("fifo", {"fast": 3, "slow": 3}),
        ("hierarchical", {"slot": 3}),
    ],
)
def test_a_service_decides_as_the_simulation_does_event_for_event(tmp_path, policy, pools):
    rates = {"slot": 1.0, "fast": 2.0, "slow": 1.0}

    decisions, finish_s = served(tmp_path, pools, policy, rates)

    expected, expected_finish_s = simulated(pools, policy, rates)
    assert decisions == expected
    assert finish_s == expected_finish_s


@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.floats(10, 9_000), st.booleans()), min_size=1, max_size=7),
    seed=st.integers(0, 1000), policy=st.sampled_from(list(SERVED)), num_crashes=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=10)
def test_hosts_and_servers_that_die_every_hour_lose_no_job_and_start_none_twice(jobs, seed, policy, num_crashes):
    rng, pools = np.random.default_rng(seed), {"v100": 4, "k80": 4}
    steps = {f"job{index + 1}": job[1] for index, job in enumerate(jobs)}
    stubborn = frozenset(f"job{index + 1}" for index, job in enumerate(jobs) if not job[2])
    now_s = [0.0]
    executor = ComputedJobs(
        pools, steps, {"v100": 2.0, "k80": 1.0}, lambda: server.state.now_s, lambda: now_s[0], True, stubborn
    )
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        make = partial(
            ServiceServer, Path(folder), SharingOptions(dict(pools), policy), executor, clock=lambda: now_s[0],
            boot="b", look_s=0.0,
        )  # fmt: skip
        server = make()
        for scale, _, _ in jobs:
            server.submit(SubmitJob("", scale, ["train.py"], "/"))
        crashes, next_kill_s = sorted(rng.uniform(0, 20_000, num_crashes).tolist()), 3600.0
        while any(job.state != "finished" for job in server.state.jobs.values()):
            ends = [executor.end_s(job) for job in executor.begins]
            now_s[0] = max(now_s[0], min(server.state.due_s(), *ends, next_kill_s, *crashes))
            if now_s[0] >= next_kill_s:  # every other half hour some hosts die, or all are there again
                whole = sum(pools.values()) < 8 or now_s[0] > 100_000
                pools.update({"v100": 4, "k80": 4} if whole else {"v100": int(rng.integers(4)), "k80": 4})
                next_kill_s += 1800.0
            if crashes and now_s[0] >= crashes[0]:
                crashes.pop(0)
                before = [row | {"reason": ""} for row in server.state.rows()]  # it says when the last event was
                server.close()  # what it has written is all that is left of it, as after kill -9
                server = make()
                assert [row | {"reason": ""} for row in server.state.rows()] == before
            server.turn(0.0)
            assert now_s[0] < 1e7
        rows = server.state.rows()
        server.close()
        with EventLog(log_of(Path(folder)), write=False) as log:
            assert ServiceState.replay(log.read()).rows() == rows
    assert not executor.begins
    for job in (job for job in steps if job not in stubborn):
        assert executor.done.get(job, 0.0) <= steps[job]


@pytest.mark.slow
def test_scripts_share_a_slot_and_a_killed_server_loses_nothing_and_starts_nothing_twice(tmp_path):
    found = through_kills(tmp_path, num_jobs=2, slots=1, steps=40, step_s=0.1, kills_s=[4.1, 2.3], round_s=2.0)

    assert found.states == ["finished", "finished"]
    assert (found.twice, found.missing, found.repeated) == ([], 0, 0)
    assert found.restarts > 0
