"""Deep windows: within their budget, on the same steps on all ranks, out of the way of the script and its profiler."""

import ctypes
import io
import json
import os
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.host import device
from headway.runtime.in_rank.window_profiler import (
    MOST_RANKS,
    SWITCHES,
    WindowSchedule,
    has_kernels,
    low_level_stop,
    may_detach,
    opening_step,
    quiet_stderr,
    spacing,
    takes_part,
    tell_kineto,
)
from headway.runtime.in_rank.windows import (
    BUDGET,
    HOLD_NS,
    HOST_ROWS,
    MOST_MORE_STEPS,
    STEPS,
    Shape,
    budget_from,
    shape_after,
)
from tests.accelerator import Accelerator, now
from tests.recorded import recording, rows, run_script
from tests.spawn import in_fork

TRAIN = """
    import os, time, torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(OPTIMIZERS)]
    names = set(os.environ)
    for step in range(STEPS):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item().hex())
    print("new in the environment:", set(os.environ) - names)
"""


def printed(source):
    """Return what a script prints in this process, where nothing is recorded."""
    with redirect_stdout(io.StringIO()) as out:
        exec(textwrap.dedent(source), {})
    return out.getvalue()


@contextmanager
def opened(folder, **env):
    """Record this process, and open a window of it at once."""
    with recording(folder, **env) as session:
        session.windows._cycle, session.windows._first_ns = 1, 1
        session.windows._begin()
        yield session.windows


def windows_of(folder, rank=0):
    """Return the (row, Kineto JSON, facts) of each window of a rank."""
    tables = json.loads((folder / "tables" / f"r{rank}.json").read_text())
    found = rows(folder, rank=rank).get("window", [])
    return [
        (
            row,
            json.loads((folder / "windows" / f"r{rank}-w{row['a']}.json").read_text()),
            tables["windows"][str(row["a"])],
        )
        for row in found
    ]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 50), st.integers(4, 20))
def test_a_window_opens_ahead_at_a_multiple_of_its_spacing(now, cycle, ahead, power):
    step = opening_step(now=now, cycle=cycle, ahead=ahead, spacing=1 << power)

    assert step % (cycle << power) == 0
    assert now + ahead * cycle <= step < now + (ahead + (1 << power)) * cycle


@given(
    st.lists(st.integers(10**6, 10**8), min_size=8, max_size=8), st.integers(10**6, 10**8), st.floats(0.01, 0.1),
    st.integers(1, 4), st.randoms(use_true_random=False),
)  # fmt: skip
def test_eight_hosts_share_one_schedule_and_one_budget_without_a_word(costs, step_ns, budget, cycle, random):
    """All windows of a host are some of those of a host on which they cost less; what the job pays is one budget."""
    ahead, busy = 40, 20
    steps = [spacing(cost_ns=cost, step_ns=step_ns, budget=budget, least=ahead + busy) for cost in costs]
    far = 8 * max(steps) * cycle
    opened = []
    for one in steps:  # after a window a host looks for the next at a step of its own
        own, at = set(), random.randrange(busy) * cycle
        while at < far:
            at = opening_step(now=at, cycle=cycle, ahead=ahead, spacing=one)
            own.add(at)
            at += random.randrange(busy) * cycle
        opened.append({step for step in own if step <= far})
    hosts = list(zip(costs, steps, opened, strict=True))
    paid = {step: max(cost for cost, _, own in hosts if step in own) for step in set.union(*opened)}

    for _, mine, few in hosts:
        assert all(few <= many for _, other, many in hosts if other <= mine)
    # A step that several hosts profile is waited for once: hosts alike pay one budget together.
    assert sum(paid.values()) <= budget * step_ns * (far // cycle) * (1 + 1 / 8) * len(set(steps))


def test_ranks_of_a_large_job_take_turns():
    taken = [[rank for rank in range(1000) if takes_part(rank, 1000, number)] for number in range(64, 6400, 64)]

    assert all(0 < len(ranks) <= MOST_RANKS for ranks in taken)
    assert len({rank for ranks in taken for rank in ranks}) > 500
    assert all(takes_part(rank, MOST_RANKS, 64) for rank in range(MOST_RANKS))


@given(st.integers(1, STEPS), st.booleans(), st.integers(1, 10**10), st.booleans())
def test_a_window_is_made_to_hold_the_training_thread_no_longer_than_it_may(steps, host, held_ns, may_add_host):
    after = shape_after(Shape(steps, host), held_ns=held_ns, may_add_host=may_add_host)

    if after is None:  # one step of launches alone is too much already
        assert (steps, host) == (1, False)
        assert held_ns > HOLD_NS
    elif after.host == host:
        assert after.steps == 1 or held_ns * after.steps <= HOLD_NS * steps
        assert after.steps < steps or held_ns <= HOLD_NS
    elif host:
        assert steps == 1
        assert held_ns > HOLD_NS
    else:
        assert may_add_host
        assert HOST_ROWS * held_ns <= HOLD_NS * steps


@pytest.mark.parametrize(
    ("host_rows", "light_ns", "shapes"),
    [
        (2, 5_000_000, [(1, False), (1, True), (3, True), (3, True), (3, True)]),
        (12, 10_000_000, [(1, False), (1, True), (1, False), (3, False), (3, False)]),
        (4, 30_000_000, [(1, False), (1, False), (1, False), (1, False), (1, False)]),
    ],
)
def test_windows_of_a_device_begin_light_and_take_the_host_in_where_it_fits(
    host_rows, light_ns, shapes, tmp_path, monkeypatch
):
    """A window with the host's operations that held the thread for too long is not tried again."""
    monkeypatch.setattr(device, "activities", lambda: ("CUDA",))
    monkeypatch.setattr("headway.runtime.in_rank.windows.low_level_start", lambda **_: None)
    with recording(tmp_path / "run", HEADWAY_WINDOWS="1") as session:
        windows, found = session.windows, []
        windows._cycle, windows._first_ns = 1, 1
        for _ in shapes:
            windows._begin()
            windows._open, windows._last_cost_ns = None, 1
            windows._held_ns = windows.shape.steps * light_ns * (host_rows if windows.shape.host else 1)
            found.append((windows.shape.steps, windows.shape.host))
        assert found == shapes


@pytest.mark.slow
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_window_holds_three_steps_and_joins_the_clock_of_the_recording(optimizers, tmp_path):
    source = TRAIN.replace("OPTIMIZERS", str(optimizers)).replace("STEPS", "400")
    (recorded,) = run_script(source, tmp_path, HEADWAY_WINDOWS="1")
    windows = windows_of(tmp_path / "run")
    steps = rows(tmp_path / "run")["optimizer.step"]

    assert recorded == printed(source)
    assert windows
    assert "USDT" not in (tmp_path / "stderr").read_text()
    row, kineto, facts = windows[0]
    inside = [
        step
        for step in steps
        if row["start_ns"] <= step["start_ns"] and step["start_ns"] < row["start_ns"] + row["duration_ns"]
    ]
    assert [step["a"] for step in inside] == list(range(optimizers)) * STEPS
    for moment in (row["start_ns"], row["start_ns"] + row["duration_ns"]):  # opening and closing have a name
        spans = [(own["start_ns"], own["duration_ns"]) for own in rows(tmp_path / "run")["host.recording"]]
        assert any(0 <= moment - start <= duration for start, duration in spans)
    spans = [event for event in kineto["traceEvents"] if event.get("name", "").startswith("Optimizer.step#")]
    assert len(spans) == STEPS * optimizers
    offset_ns = facts["clock_ns"] - facts["realtime_ns"]
    base_ns = int(kineto.get("baseTimeNanoseconds", 0))
    for span, step in zip(spans, inside, strict=True):
        start_ns = round(span["ts"] * 1000) + base_ns + offset_ns
        assert abs(start_ns - step["start_ns"]) < 2_000_000


@pytest.mark.slow
def test_a_budget_of_nothing_opens_no_window(tmp_path):
    run_script(TRAIN.replace("OPTIMIZERS", "1").replace("STEPS", "300"), tmp_path, HEADWAY_WINDOWS="0")

    assert "window" not in rows(tmp_path / "run")


@pytest.mark.slow
def test_a_window_opens_at_the_step_that_was_asked_for_whatever_the_budget(tmp_path):
    source = TRAIN.replace("OPTIMIZERS", "2").replace("STEPS", "60")
    run_script(source, tmp_path, HEADWAY_WINDOWS="0.0000001", HEADWAY_WINDOW_AT="20")
    ((row, _, _),) = windows_of(tmp_path / "run")
    before = [step for step in rows(tmp_path / "run")["optimizer.step"] if step["start_ns"] < row["start_ns"]]

    assert len(before) == 20 * 2


@pytest.mark.slow
def test_a_step_that_is_never_reached_is_said(tmp_path):
    source = TRAIN.replace("OPTIMIZERS", "1").replace("STEPS", "30")
    run_script(source, tmp_path, HEADWAY_WINDOW_AT="1000")

    assert "step 1000 was not reached" in (tmp_path / "stderr").read_text()


def test_the_profilers_file_has_kernels_or_not(tmp_path):
    path = tmp_path / "r0-w1.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}' + " " * (1 << 20))
    assert not has_kernels(str(path))
    path.write_text(" " * ((1 << 20) - 3) + '"cat": "kernel"')
    assert has_kernels(str(path))


SLEEPING = (
    TRAIN.replace("OPTIMIZERS", "1")
    .replace("STEPS", "1500")
    .replace("optimizer.step()", "time.sleep(0.002); optimizer.step()")
)


@pytest.mark.slow
def test_one_process_on_a_host_has_the_windows_that_are_asked_for(tmp_path):
    for name, variables in (("default", {}), ("asked", {"HEADWAY_WINDOWS": "0.01"})):
        (tmp_path / name).mkdir()
        run_script(SLEEPING, tmp_path / name, **variables)

    assert ["window" in rows(tmp_path / name / "run") for name in ("default", "asked")] == [False, True]


@pytest.mark.slow
def test_windows_stay_within_their_budget(tmp_path):
    run_script(SLEEPING, tmp_path, HEADWAY_WINDOWS="0.05")
    windows = windows_of(tmp_path / "run")
    steps = rows(tmp_path / "run")["optimizer.step"]
    trained_ns = steps[-1]["start_ns"] - steps[0]["start_ns"]

    assert windows
    assert sum(facts["cost_ns"] for _, _, facts in windows) <= 0.1 * trained_ns


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_open_their_windows_at_the_same_steps_and_dump_the_flight_recorder(hosts, tmp_path):
    """On two hosts each has a leader, and a schedule, of its own."""
    source = """
        import os, socket, torch, torch.distributed as dist
        if os.environ.get("HEADWAY_TEST_HOSTS") == "2":
            name = "host" + os.environ["RANK"]
            socket.gethostname = lambda: name
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo", init_method=os.environ["STORE"])
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(600):
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
    """
    leaders = {"HEADWAY_TEST_HOSTS": "2", "HEADWAY_LOCAL_RANK": "0"} if hosts == 2 else {}
    run_script(source, tmp_path, ranks=2, HEADWAY_WINDOWS="0.2", **leaders)
    places = []
    for rank in (0, 1):
        steps = [row["start_ns"] for row in rows(tmp_path / "run", rank=rank)["optimizer.step"]]
        starts = [row["start_ns"] for row, _, _ in windows_of(tmp_path / "run", rank)]
        places.append([sum(step < start for step in steps) for start in starts])
    numbers = [[row["a"] for row, _, _ in windows_of(tmp_path / "run", rank)] for rank in (0, 1)]
    flight = json.loads((tmp_path / "run" / "windows" / f"r0-w{places[0][0]}.flight.json").read_text())

    assert places[0]
    assert places == numbers
    assert len(list((tmp_path / "run" / "windows").glob("schedule-*"))) == hosts
    assert set(places[1]) & set(places[0])
    assert flight["entries"][0]["profiling_name"].startswith("gloo:")
    assert "USDT" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_a_script_with_its_own_profiler_gets_its_profile_and_no_window_afterwards(tmp_path):
    source = """
        import torch
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train(steps):
            for step in range(steps):
                model(torch.ones(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        train(45)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(100)
        train(200)
        print(sum(event.count for event in profile.key_averages() if event.key.startswith("Optimizer.step#")))
    """
    (out,) = run_script(source, tmp_path, HEADWAY_WINDOWS="1")
    tables = json.loads((tmp_path / "run" / "tables" / "r0.json").read_text())

    assert out.split() == ["100"]
    assert tables["windows_stopped"] == "the script runs a profiler"
    assert all(row["a"] <= 45 for row in rows(tmp_path / "run").get("window", []))


ANNOTATE = (
    TRAIN
    + """
    with torch.autograd.profiler.emit_itt():
        for optimizer in optimizers:
            optimizer.step()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "variable", "stopped"),
    [
        (ANNOTATE, "NOTHING", "the script runs a profiler"),
        (TRAIN, "CUDA_INJECTION64_PATH", "a profiler from outside: CUDA_INJECTION64_PATH is set"),
        (TRAIN, "KINETO_USE_DAEMON", "a profiler from outside: KINETO_USE_DAEMON is set"),
    ],
)
def test_profilers_from_outside_and_annotations_of_the_script_end_the_windows(source, variable, stopped, tmp_path):
    source = source.replace("OPTIMIZERS", "1").replace("STEPS", "60")
    run_script(source, tmp_path, HEADWAY_WINDOWS="1", **{variable: "1"})
    tables = json.loads((tmp_path / "run" / "tables" / "r0.json").read_text())

    assert tables["windows_stopped"] == stopped
    assert variable == "NOTHING" or "windows" not in tables


def test_a_fork_inside_a_window_drops_it(tmp_path):
    """The loader's workers are forked in the middle of a window: they must not inherit a running profiler."""
    with opened(tmp_path / "run", HEADWAY_WINDOWS="1") as windows:
        code = in_fork(lambda: os._exit(int(torch._C._autograd._profiler_enabled())))
        still_open = windows._open

    assert (code, still_open) == (0, None)
    assert not torch._C._autograd._profiler_enabled()


def test_a_fork_in_another_thread_leaves_the_profiler_to_the_thread_that_stops_it(tmp_path):
    with opened(tmp_path / "run") as windows:
        thread = threading.Thread(target=windows.drop)
        thread.start()
        thread.join()
        windows.stopped = "the script runs a profiler"
        assert torch._C._autograd._profiler_enabled()
        windows.listen(0)

        assert not torch._C._autograd._profiler_enabled()


def test_a_full_disk_does_not_keep_the_profiler_from_stopping(tmp_path, monkeypatch):
    with opened(tmp_path / "run") as windows:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda: 1 // 0)
        windows.listen(0)

        assert not torch._C._autograd._profiler_enabled()


def test_each_listener_is_called_at_its_own_steps_only(tmp_path):
    with recording(tmp_path / "run") as session:
        probes, calls = session.probes, {3: [], 5: []}
        for pause, seen in calls.items():
            probes.listeners.append(lambda _, pause=pause, seen=seen: seen.append(probes.steps[0]) or pause)
        probes.due[0] = 0
        for step in range(1, 16):
            probes.steps[0] = step
            if step >= probes.due[0]:
                probes.wake(0)

    assert calls == {3: [1, 4, 7, 10, 13], 5: [1, 6, 11]}


def test_stderr_of_others_passes_the_filter(capfd):
    with quiet_stderr():
        os.write(2, b"USDT: noise\nkept\n")
        sys.stderr.write("mine\n")
        sys.stderr.flush()

    assert sorted(capfd.readouterr().err.split()) == ["kept", "mine"]


@pytest.mark.parametrize(("text", "budget"), [("", BUDGET), ("0.5", 0.5), ("many", BUDGET), ("7", BUDGET), ("0", 0.0)])
def test_a_budget_that_is_no_fraction_is_the_default(text, budget):
    assert budget_from({"HEADWAY_WINDOWS": text}) == budget


def test_followers_read_what_the_leader_announced(tmp_path):
    with recording(tmp_path / "run") as session:
        leader, follower = WindowSchedule(session.probes), WindowSchedule(session.probes)
        assert follower.read() == -1
        leader.write(1234)

    assert follower.read() == 1234
    assert leader.leads
    assert torch.__version__


def test_a_leader_that_takes_no_part_in_the_first_windows_does_not_take_them_for_cheap(tmp_path, monkeypatch):
    """What a window costs it cannot know, so that it goes on to assume what the first one is assumed to cost."""
    monkeypatch.setattr("headway.runtime.in_rank.windows.takes_part", lambda *_: False)
    with recording(tmp_path / "run", HEADWAY_WINDOWS="1") as session:
        windows = session.windows
        windows._cycle, windows._first_ns = 1, 1
        assumed_ns = windows._expected_cost_ns(1_000_000)
        windows._begin()

        assert windows._expected_cost_ns(1_000_000) == assumed_ns
        assert windows.cost_ns >= assumed_ns


def test_a_window_stays_open_until_the_device_has_got_to_its_end(tmp_path, monkeypatch):
    """The host is ahead: what it launched in the window runs when it has launched two more steps."""
    accelerator, stopped = Accelerator(), []
    monkeypatch.setattr("headway.runtime.in_rank.windows.low_level_start", lambda **_: None)
    monkeypatch.setattr(
        "headway.runtime.in_rank.windows.low_level_stop", lambda **_: stopped.append(now()) or SimpleNamespace()
    )
    undo = device.emulate(lambda _: accelerator.device, {("cuda", 0): accelerator.device})
    try:
        with opened(tmp_path / "run", HEADWAY_WINDOWS="1") as windows:
            accelerator.launch(30_000_000)
            looks = 0
            while not stopped:
                windows.listen(0)
                looks += 1
                time.sleep(0.005)
            assert stopped[0] >= accelerator.busy_until_ns
            assert 2 <= looks <= MOST_MORE_STEPS + 1
            assert accelerator.live_events == 0
    finally:
        undo()


C_ENVIRONMENT = ctypes.CDLL(None).getenv
C_ENVIRONMENT.restype = ctypes.c_char_p


@pytest.mark.parametrize(
    ("cuda", "variable", "detaches"),
    [("13.0", "", True), ("12.6", "", True), ("12.4", "", False), (None, "", False), ("13.0", SWITCHES[0], False)],
)
def test_the_profilers_library_leaves_where_it_may_and_the_script_sees_nothing_of_it(
    cuda, variable, detaches, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if variable:
        monkeypatch.setenv(variable, "0")
    before = dict(os.environ), [C_ENVIRONMENT(name.encode()) for name in SWITCHES]
    tell_kineto(may_detach())
    said = [C_ENVIRONMENT(name.encode()) for name in SWITCHES]
    tell_kineto(None)

    assert said == ([b"1", None] if detaches else [b"0", b"1"])
    assert (dict(os.environ), [C_ENVIRONMENT(name.encode()) for name in SWITCHES]) == before


def test_a_profiler_that_is_not_on_has_nothing_to_save():
    """A signal's handler may raise between the calls of a start; saving what torch returns then is a crash."""
    assert low_level_stop() is None
