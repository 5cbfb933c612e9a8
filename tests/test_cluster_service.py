"""A service that shares devices: its decisions, what it survives, and what it refuses."""

import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.model import Cluster, Jobs, Rates
from headway.cluster.policies import SERVED
from headway.cluster.queue.engine import RoundEngine
from headway.cluster.queue.rounds import Timing
from headway.cluster.service.server import (
    EXECUTORS,
    AskQueue,
    ServiceServer,
    SharingOptions,
    SubmitJob,
    called,
    log_of,
    socket_of,
)  # fmt: skip
from headway.cluster.service.state import ServiceState
from headway.cluster.service.store import EventLog, RoundAdvanced
from headway.core.errors import HeadwayError, InputError
from headway.core.wire.channel import ChannelClosed
from headway.verbs.jobs.cluster_service import ServicePage
from tests.launching import headway_here, json_of, refusal
from tests.made import fake_schedulers
from tests.made.service_jobs import ComputedJobs
from tests.paths import GOLDEN

JOBS = [  # arrival_s, scale, steps: dyadic numbers, so that sums of times are exact
    (64.0, 1, 500.0), (64.0, 2, 300.0), (80.0, 1, 700.0), (100.0, 3, 256.0), (101.5, 1, 64.0), (400.0, 2, 300.0),
    (410.0, 1, 900.0), (1500.0, 1, 128.0),
]  # fmt: skip
ROUND_S = 64.0
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each event is synced to the disk


def made_by_hand(folder, pools, executor, now_s, policy="las", **options):
    """A server on a clock that is set by hand, with rounds of 64 s."""
    settings = SharingOptions(dict(pools), policy, **{"round_s": ROUND_S, **options})
    return ServiceServer(folder, settings, executor, clock=lambda: now_s[0], boot="b", look_s=0.0)


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


def served(tmp_path, pools, policy, rates, speed=5000.0, **options):
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
            assert server.now_s() < 600_000
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


class Killed(BaseException):
    """The server is no more."""


@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.floats(10, 9_000), st.booleans()), min_size=1, max_size=7),
    seed=st.integers(0, 1000), policy=st.sampled_from(list(SERVED)), kill_fraction=st.sampled_from([0.0, 0.02, 0.1]),
)  # fmt: skip
@settings(max_examples=12)
def test_hosts_and_servers_that_die_all_the_time_lose_no_job_and_start_none_twice(jobs, seed, policy, kill_fraction):
    rng, pools, now_s = np.random.default_rng(seed), {"v100": 4, "k80": 4}, [0.0]
    steps = {f"job{index + 1}": job[1] for index, job in enumerate(jobs)}
    stubborn = frozenset(f"job{index + 1}" for index, job in enumerate(jobs) if not job[2])

    def crash():
        if rng.uniform() < kill_fraction:
            raise Killed

    executor = ComputedJobs(
        pools, steps, {"v100": 2.0, "k80": 1.0}, lambda: server.state.now_s, lambda: now_s[0], True, stubborn, crash
    )
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        options = SharingOptions(dict(pools), policy)
        make = partial(ServiceServer, Path(folder), options, executor, clock=lambda: now_s[0], boot="b", look_s=0.0)
        server, next_kill_s = make(), 3600.0
        for scale, _, _ in jobs:
            server.submit(SubmitJob("", scale, ["train.py"], "/"))
        while any(job.state != "finished" for job in server.state.jobs.values()):
            ends = [executor.end_s(job) for job in executor.begins]
            now_s[0] = max(now_s[0], min(server.state.due_s(), *ends, next_kill_s))
            if now_s[0] >= next_kill_s:  # every other half hour some hosts die, or all are there again
                whole = sum(pools.values()) < 8 or now_s[0] > 100_000
                pools.update({"v100": 4, "k80": 4} if whole else {"v100": int(rng.integers(4)), "k80": 4})
                next_kill_s += 1800.0
            try:
                server.turn(0.0)
                crash()
            except Killed:
                server.close()  # what it has written is all that is left of it
                server = make()
            assert now_s[0] < 1e7
        rows = server.state.rows()
        server.close()
        with EventLog(log_of(Path(folder)), write=False) as log:
            assert ServiceState.replay(log.read()).rows() == rows
    assert not executor.begins
    assert all(executor.done.get(job, 0.0) <= steps[job] for job in steps)


STORY = {"job1": 192.0, "job2": 150.0, "job3": 128.0}
"""Steps, at one per second, on two slots by rounds of 64 s: three jobs take turns until the second one ends."""


def story(folder, make, end, script="train.py"):
    """The decisions of a service about three jobs, each of which `end` ends once it has run so long."""
    now_s, had_s = [0.0], dict.fromkeys(STORY, 0.0)
    pools = {"a100": 2}
    executor = make(folder / "s", pools, now_s, lambda: server)
    with made_by_hand(folder / "s", pools, executor, now_s) as server:
        for name in STORY:
            server.submit(SubmitJob(name, 1, [script], "/"))
        while any(job.state != "finished" for job in server.state.jobs.values()):
            server.turn(0.0)
            left_s = {job.id: STORY[job.id] - had_s[job.id] for job in server.state.live()}
            step_s = min(server.state.due_s() - now_s[0], *left_s.values()) if left_s else 64.0
            now_s[0] += step_s
            for name in left_s:
                had_s[name] += step_s
                if had_s[name] >= STORY[name]:
                    end(server.state.jobs[name].as_attempt())
        rows = server.state.rows()
    with EventLog(log_of(folder / "s"), write=False) as log:
        return [(e.at_s, e.runs) for e in log.read() if isinstance(e, RoundAdvanced)], rows


def computed(folder, pools, now_s, server):
    return ComputedJobs(pools, STORY, {"a100": 1.0}, lambda: server().state.now_s, lambda: now_s[0])


@pytest.fixture
def schedulers(tmp_path, monkeypatch):
    """Fake commands of Slurm and Kubernetes, first on the path; returns the folder of their state."""
    programs, state = tmp_path / "bin", tmp_path / "state"
    programs.mkdir(), state.mkdir()
    for name in ("sbatch", "squeue", "scancel", "kubectl"):
        call = f'exec {sys.executable} -IS {Path(fake_schedulers.__file__)} {state} {name} "$@"'
        (programs / name).write_text(f"#!/bin/sh\n{call}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return state


@pytest.mark.parametrize("name", ["slurm", "kueue"])
def test_three_jobs_are_decided_on_alike_under_every_executor(tmp_path, schedulers, name):
    (tmp_path / "one").mkdir()

    def end(attempt):
        fake_schedulers.end(schedulers, f"headway-s-{attempt.job}-{attempt.number}", 0)

    decisions, rows = story(tmp_path, lambda folder, pools, *_: EXECUTORS[name](folder, pools), end)

    expected, expected_rows = story(tmp_path / "one", computed, lambda attempt: None)
    assert decisions == expected
    assert [row["restarts"] for row in rows] == [row["restarts"] for row in expected_rows]
    assert sum(row["restarts"] for row in rows) >= 2
    if name == "slurm":
        text = min(schedulers.glob("*.log")).read_text()
        golden("slurm_job.sh", text.replace(str(tmp_path), "FOLDER").replace(sys.executable, "PY"))
    else:
        applied = (schedulers / "applied").read_text().splitlines()[:2]
        text = json.dumps([json.loads(line) for line in applied], indent=1)
        golden("kueue.json", text.replace(str(tmp_path), "FOLDER") + "\n")


def test_the_log_says_what_the_policy_promised_what_came_true_and_what_others_would_have_made(tmp_path):
    story(tmp_path, computed, lambda attempt: None)
    answer = json_of("cluster", "compare", "--log", tmp_path / "s", "--json")

    assert answer["policy"] == "las"
    assert [row["id"] for row in answer["jobs"]] == list(STORY)
    assert [row["promised_s"] for row in answer["jobs"]] == [row["came_true_s"] for row in answer["jobs"]]
    assert answer["replay_error_fraction"] == 0
    assert [row["policy"] for row in answer["policies"]] == ["fifo", "backfill", "las", "las_aware"]
    assert answer["policies"][0]["moves"] == 0 < answer["observed"]["moves"]
    assert "promised, s" in headway_here("cluster", "compare", "--log", tmp_path / "s").stdout


def golden(name, text):
    path = GOLDEN / "cluster" / name
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.fixture
def quiet(tmp_path):
    """A server on a clock that is set by hand, with one job that never saves and one that waits for its slot."""
    now_s = [0.0]
    executor = ComputedJobs(
        {"slot": 1}, {"job1": 1e4, "job2": 10.0}, {"slot": 1.0}, lambda: server.state.now_s, lambda: now_s[0],
        stubborn=frozenset({"job1"}),
    )  # fmt: skip
    with made_by_hand(tmp_path / "s", {"slot": 1}, executor, now_s) as server:
        for name in ("first", "second"):
            server.submit(SubmitJob(name, 1, ["train.py"], "/"))
        server.turn(0.0)
        yield server, now_s


def test_who_has_never_saved_keeps_its_slot_with_the_reason_and_others_wait(quiet):
    server, now_s = quiet
    for _ in range(20):
        now_s[0] += 64.0
        server.turn(0.0)
    first, second = server.state.rows()

    assert (first["state"], first["placement"], first["restarts"]) == ("running", ["slot:0"], 0)
    assert second["state"] == "waiting"
    assert "keeps slot:0: it has never saved with a Checkpointer" in first["reason"]
    explained = server.state.explain(server.state.job("second"), price=True)
    assert explained["owed_s"] > 64
    assert (explained["binding"], explained["price"]) == ("devices of slot", pytest.approx(0.5))


@pytest.mark.parametrize("end", [1, 2])
def test_a_server_that_comes_back_with_fewer_slots_goes_on_though_jobs_cannot_leave_theirs(tmp_path, end):
    """And with as many as it had once more, where the shrunk one has done nothing."""
    now_s, pools = [0.0], {"slot": 2}
    jobs = {"job1": 600.0, "job2": 600.0, "job3": 32.0}
    executor = ComputedJobs(pools, jobs, {"slot": 1.0}, lambda: server.state.now_s, lambda: now_s[0],
                            stubborn=frozenset({"job1", "job2"}))  # fmt: skip

    server = made_by_hand(tmp_path / "s", pools, executor, now_s)
    for name in jobs:
        server.submit(SubmitJob(name, 1, ["train.py"], "/"))
    server.turn(0.0)
    server.close()
    for slots in (1, end):
        pools["slot"] = slots
        server = made_by_hand(tmp_path / "s", pools, executor, now_s)
        if slots == end:
            for _ in range(60):
                now_s[0] += 64.0
                server.turn(0.0)
        server.close()
    assert [job["state"] for job in server.state.rows()] == ["finished"] * 3


def test_a_clock_that_jumps_loses_nothing_and_time_never_goes_back(quiet):
    server, now_s = quiet
    for jump_s in (-5000.0, 3000.0, -1e6, 64.0, 9e5, 64.0, 64.0):
        before_s = server.now_s()
        now_s[0] += jump_s
        for _ in range(3):
            server.turn(0.0)
        assert server.now_s() >= before_s
    now_s[0] = 1e6
    for _ in range(5):
        now_s[0] += 64.0
        server.turn(0.0)

    assert [row["state"] for row in server.state.rows()] == ["finished", "finished"]


def test_what_cannot_be_is_refused_with_the_value_and_the_fix(tmp_path, quiet, monkeypatch):
    server, _ = quiet
    folder = ["--dir", str(tmp_path / "s")]
    script = tmp_path / "train.py"
    script.touch()

    assert "a server listens at" in refusal("cluster", "serve", "--slots", "1", *folder)
    for words, said in (
        ("--slots 1 --policy ftf", "Choose one of: fifo, fifo_aware, hierarchical"),
        ("--slots v100", "'v100' says no number of devices"),
        ("--executor slrum", "unknown executor 'slrum'. Did you mean 'slurm'?"),
        ("--slots 1 --round-s 0", "pass seconds above 0"),
        (f"--slots 1 --port 65536 --dir {tmp_path / 'p'}", "--port 65536 cannot be had"),
        (f"--slots 1 --dir {script}/s", f"cannot be made ({script}: File exists)"),
    ):
        assert said in refusal("cluster", "serve", *words.split())
    assert "does not exist" in refusal("cluster", "submit", *folder, "--", "nothing.py")
    assert "no script was given" in refusal("cluster", "submit", *folder)
    assert "Start the server first" in refusal("cluster", "submit", "--dir", str(tmp_path), "--", str(script))
    assert "holds no log of a service" in refusal("cluster", "queue", "--dir", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert "Name the folder of one with --dir" in refusal("cluster", "queue")
    for words in (["serve", "--slots", "1"], ["queue"], ["cancel", "job1"]):
        assert "is a file, a service has a folder" in refusal("cluster", *words, "--dir", str(script))
    assert "no job of this service has ended" in refusal("cluster", "compare", "--log", str(tmp_path / "s"))
    assert "Leave --jobs and --devices out" in refusal("cluster", "compare", "--log", ".", "--devices", "a=1")
    with pytest.raises(InputError, match=r"scale is 2; a job has 1 to 1 slots"):
        server.submit(SubmitJob("", 2, ["train.py"], "/"))
    with pytest.raises(InputError, match=r"unknown job 'secund'. Choose one of: job1, job2|unknown job 'secund'"):
        server.state.job("secund")
    server.submit(SubmitJob("second", 1, ["train.py"], "/"))
    with pytest.raises(InputError, match="2 jobs are called 'second': job2, job3"):
        server.state.job("second")
    server.cancel(server.state.job("job2"))
    with pytest.raises(InputError, match="job2 is cancelled already"):
        server.cancel(server.state.job("job2"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "is a socket of user" in refusal("cluster", "explain", "job1", *folder)


def test_the_devices_of_a_folder_keep_their_types_and_another_policy_may_go_on(tmp_path, quiet):
    server, now_s = quiet
    server.close()
    make = partial(ServiceServer, tmp_path / "s", clock=lambda: now_s[0], boot="b")
    executor = ComputedJobs({"v100": 1}, {}, {}, lambda: 0.0, lambda: 0.0)
    with pytest.raises(InputError, match="the folder's devices are slot, not v100"):
        make(SharingOptions({"v100": 1}), executor)
    executor.pools = {"slot": 2}
    with make(SharingOptions({"slot": 2}, "fifo"), executor) as other:
        assert (other.state.policy, len(other.state.rows())) == ("fifo", 2)


def answered(server, *words):
    """What a verb prints as JSON that asks this server."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(json_of, "cluster", *words, "--json")
        while not asked.done():
            server.turn(0.05)
    return asked.result()


def test_the_queue_says_the_steps_of_a_job_within_a_round_and_who_cancels_it_is_not_told_that_it_runs(tmp_path, quiet):
    server, now_s = quiet
    folder = ["--dir", str(tmp_path / "s")]
    now_s[0] = 30.0
    server.turn(0.0)

    assert [job["steps_done"] for job in answered(server, "queue", *folder)["jobs"]] == [30, 0]
    answer = answered(server, "cancel", "first", *folder)
    assert (answer["id"], answer["state"], answer["placement"]) == ("job1", "cancelled", [])


def test_a_scheduler_that_fails_costs_no_job_but_one_that_never_starts_it_ends_it_with_the_reason(tmp_path):
    now_s, answers = [0.0], [True]

    class Failing(ComputedJobs):
        def start(self, attempt):
            if attempt.job == "job2":
                raise HeadwayError("sbatch failed with code 1: no such partition.")
            return super().start(attempt)

        def alive(self, attempts):
            if not answers[0]:
                raise HeadwayError("squeue failed with code 1: cannot contact the controller.")
            return super().alive(attempts)

    executor = Failing({"slot": 2}, {"job1": 500.0}, {"slot": 1.0}, lambda: server.state.now_s, lambda: now_s[0])
    with made_by_hand(tmp_path / "s", {"slot": 2}, executor, now_s) as server:
        for name in ("good", "bad"):
            server.submit(SubmitJob(name, 1, ["train.py"], "/"))
        for number in range(30):
            answers[0] = number % 3 > 0
            server.turn(0.0)
            now_s[0] += 20.0
        good, bad = server.state.rows()

    assert (good["state"], good["restarts"]) == ("finished", 0)
    assert (bad["state"], bad["restarts"]) == ("failed", 4)
    assert "it cannot be started: sbatch failed with code 1: no such partition." in bad["reason"]


def test_another_host_that_sees_the_folder_asks_over_tcp_with_its_token(tmp_path):
    executor = ComputedJobs({"slot": 1}, {}, {"slot": 1.0}, lambda: 0.0, lambda: 0.0)
    with ServiceServer(tmp_path, SharingOptions({"slot": 1}, port=0), executor, look_s=0.05) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            address, token = tmp_path / "address", tmp_path / "token"
            address.write_text(f"127.0.0.1:{address.read_text().rsplit(':')[-1]}")
            socket_of(tmp_path).rename(tmp_path / "elsewhere")  # another host cannot use it
            with closing(called(tmp_path)) as channel:
                channel.send(AskQueue())
                assert channel.receive(5.0)[0].jobs == []
            assert token.stat().st_mode & 0o777 == 0o600
            token.chmod(0o600)
            token.write_text("guessed")
            with pytest.raises(ChannelClosed, match="token"):
                called(tmp_path)
        finally:
            server.stop()
            thread.join()


def test_the_live_page_shows_the_jobs_that_a_server_or_its_log_tells_of(tmp_path):
    now_s = [0.0]
    executor = computed(tmp_path, {"a100": 2}, now_s, lambda: server)
    source = ServicePage(tmp_path / "s")
    with made_by_hand(tmp_path / "s", {"a100": 2}, executor, now_s) as server:
        server.submit(SubmitJob("<b>one", 1, ["train.py"], "/"))
        asking = threading.Thread(target=source.poll)
        asking.start()
        while asking.is_alive():
            server.turn(0.05)
        asked = source.page()
    source.poll()

    assert "<h1>In round " in asked
    assert "<td>&lt;b&gt;one</td>" in asked
    assert "No server runs; it was left in round 1: 1 job of 1 run, 0 wait." in source.parts()["head"]
    assert "<td>running</td>" in source.parts()["jobs"]
    assert source.key() == "service"
    assert source.charts() == {}


def test_a_job_that_can_run_on_fewer_slots_does_while_devices_are_away_and_one_that_cannot_waits(tmp_path):
    now_s, pools = [0.0], {"a100": 2}
    executor = ComputedJobs(pools, {"job1": 600.0, "job2": 64.0}, {"a100": 1.0}, lambda: server.state.now_s,
                            lambda: now_s[0])  # fmt: skip
    make = partial(made_by_hand, tmp_path / "s", {"a100": 2}, executor, now_s)
    server, sizes = make(), []
    server.submit(SubmitJob("", 2, ["train.py"], "/", 1))
    while any(job.state != "finished" for job in server.state.jobs.values()):
        server.turn(0.0)
        (job, *_) = server.state.rows()
        if job["placement"] and (not sizes or sizes[-1] != len(job["placement"])):
            sizes.append(len(job["placement"]))
        if now_s[0] == 128.0:
            pools["a100"] = 1
            server.close()  # killed at that moment: the log says how large each job is
            server = make()
        if now_s[0] == 320.0:
            pools["a100"] = 2
        if now_s[0] == 160.0:
            with pytest.raises(InputError, match="1 to 1 slots"):
                server.submit(SubmitJob("", 2, ["train.py"], "/"))
            server.submit(SubmitJob("", 1, ["train.py"], "/"))
        now_s[0] += 32.0
        assert now_s[0] < 5000
    server.close()
    with EventLog(log_of(tmp_path / "s"), write=False) as log:
        assert ServiceState.replay(log.read()).rows() == server.state.rows()
    assert (sizes[:2], 2 in sizes[2:]) == ([2, 1], True)
    assert [job["state"] for job in server.state.rows()] == ["finished", "finished"]
