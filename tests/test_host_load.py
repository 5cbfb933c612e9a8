"""Other load: what is busy on our cores less what the job's own tree took, from counters that only grow."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.machine.apart import DETACHED
from headway.core.machine.host_load import LEAST_GOT, HostCounters, HostLoad, LoadSampler, host_load, load_beside
from headway.runtime.host import device_watch
from headway.runtime.run_folder.problems import Problems
from headway.trace.recording.host_series import DeviceGauges, DeviceSeries, HostSeries

CPU = min(os.sched_getaffinity(0))
TICKS = os.sysconf("SC_CLK_TCK")


@given(
    other=st.floats(0, 4), own=st.floats(0, 4), runnable=st.floats(0, 8),
    steps=st.lists(st.floats(0.2, 2.0), min_size=1, max_size=30),
)  # fmt: skip
def test_of_steady_load_every_figure_is_the_rate(other, own, runnable, steps):
    at, readings = 5.0, []
    for step in (0.0, *steps):
        at += step
        readings.append(HostCounters(at, (other + own) * at, own * at, runnable * at, 2 * at, 0.25 * at, None))
    load = host_load(readings)

    assert load.other_cores == pytest.approx(other, abs=1e-6)
    assert load.other_quantiles == pytest.approx((other, other, other), abs=1e-6)
    assert load.own_cores == pytest.approx(own, abs=1e-6)
    idle = max(0.0, load.cores - own - other)  # beside an idle core nobody waits for long
    wanted = max(other, runnable - idle) if other >= LEAST_GOT else other  # who wants a core gets some of it
    assert load.demand == pytest.approx(wanted, abs=1e-6)
    assert (load.pressure_fraction, load.throttled_s) == (pytest.approx(0.25), None)


def test_load_goes_through_run_json_and_runs_without_it_load():
    load = HostLoad(cores=2, cores_available=1.5, quota_cores=1.5, other_cores=0.5)

    assert HostLoad.from_facts({"host_load": msgspec.to_builtins(load)}) == load
    assert HostLoad.from_facts({}) is None
    assert HostLoad.from_facts({"host_load": {"cores": "many"}}) is None


@given(steps=st.lists(st.floats(0.2, 2.0), min_size=1, max_size=400), own=st.floats(0, 4))
def test_the_series_covers_the_run_in_order_and_keeps_its_mean(steps, own):
    at, readings = 5.0, [HostCounters(5.0, 5.0 * (1 + own), 5.0 * own, 0, 0, None, None, 7)]
    for number, step in enumerate(steps):
        at += step
        readings.append(HostCounters(at, (1 + own) * at, own * at, 0, 0, None, None, number))
    series = HostSeries.of(readings, most=50)

    assert len(series.end_s) <= 50
    assert list(series.end_s) == sorted(series.end_s)
    assert series.own_cores == pytest.approx([own] * len(series.end_s), abs=1e-3)
    assert series.other_cores == pytest.approx([1.0] * len(series.end_s), abs=1e-3)
    assert HostSeries.from_facts({"host_series": msgspec.to_builtins(series)}) == series
    for end_s in ([1.0], [2.0, 1.0], [1.0, float("nan")], [-1.0, 1.0]):
        damaged = {"end_s": end_s, "own_cores": [0.0, 0.0], "other_cores": [0.0, 0.0], "memory_bytes": [1, 1]}
        assert HostSeries.from_facts({"host_series": damaged}) is None


def proc(root: Path, busy: int, processes: dict[int, tuple[int, str, int, int]], running: int) -> None:
    """Write a made-up /proc: pid -> (parent, state, own ticks, ticks of reaped children)."""
    (root / "proc").mkdir(exist_ok=True)
    for gone in (root / "proc").glob("*/stat"):
        gone.unlink()
    stat = f"cpu  1 1 1 1\ncpu{CPU} {busy} 0 0 999 7 0 0 0 0 0\nprocs_running {running}\n"
    (root / "proc/stat").write_text(stat)
    for pid, (parent, state, ticks, reaped) in processes.items():
        (root / f"proc/{pid}").mkdir(exist_ok=True)
        fields = [state, str(parent), "0", str(pid), *["0"] * 7, str(ticks), "0", str(reaped), "0", "20", "0", "1", "0"]
        name = DETACHED if pid >= 20 else "a (b) c"
        (root / f"proc/{pid}/stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_a_child_that_ended_still_counts_as_the_jobs_own(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.core.machine.host_load.os.sched_getaffinity", lambda pid: {CPU})
    monkeypatch.setattr("headway.core.machine.host_load.os.cpu_count", lambda: 1)
    clock = [100.0]
    monkeypatch.setattr("headway.core.machine.host_load.time.perf_counter", lambda: clock[0])
    sampler = LoadSampler(10, root=tmp_path)
    # In each second: the rank (11) computes 20 ticks, its worker (12) 30 until it is reaped, a stranger (13) 40, and
    # what the rank has detached (20, 21) 10 each until it ends.
    tree = [
        {10: (1, "S", 0, 0), 11: (10, "R", 20, 0), 12: (11, "S", 30, 0), 13: (1, "R", 40, 0), 20: (1, "R", 10, 0)},
        {10: (1, "S", 0, 0), 11: (10, "R", 40, 60), 13: (1, "R", 80, 0), 20: (1, "R", 20, 0), 21: (20, "R", 10, 0)},
        {10: (1, "S", 0, 0), 11: (10, "S", 60, 60), 13: (1, "R", 120, 0)},
    ]
    for second, processes in enumerate(tree):
        busy = (20 + 40) * (second + 1) + 30 * min(second + 1, 2) + (10, 30, 30)[second]
        proc(tmp_path, busy * TICKS // 100, processes, sum(row[1] == "R" for row in processes.values()))
        clock[0] += 1.0
        sampler.look()
    load = sampler.between()

    assert load.readings == 3
    assert load.other_cores == pytest.approx(0.4)
    assert load.other_sessions == pytest.approx(1.0)
    assert load.own_cores == pytest.approx((50 + 20 + 20) / 2 / 100)
    assert load.other_runnable == pytest.approx(1.0)


def test_a_thread_of_the_job_that_changes_within_a_look_is_nobody_elses_in_the_mean(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.core.machine.host_load.os.cpu_count", lambda: 1)
    monkeypatch.setattr("headway.core.machine.host_load.os.sched_getaffinity", lambda pid: {CPU})
    clock = [100.0]
    monkeypatch.setattr("headway.core.machine.host_load.time.perf_counter", lambda: clock[0])
    sampler = LoadSampler(10, root=tmp_path)
    for second in range(9):  # it slept when the host counted and runs when the job counts, and then the other way round
        state, running = ("R", 0) if second % 2 else ("S", 1)
        proc(tmp_path, 50 * second * TICKS // 100, {10: (1, state, 50 * second, 0)}, running)
        clock[0] += 1.0
        sampler.look()

    assert sampler.between().other_runnable == pytest.approx(0.0)
    assert sampler.between().demand == pytest.approx(0.0)


def test_a_look_at_this_host_gives_figures_within_what_it_has():
    load = load_beside(seconds=0.1)

    assert load.readings == 2
    assert 0.0 <= load.other_cores <= load.cores + 0.5
    assert 0.0 < load.cores_available <= load.cores


def test_a_host_that_tells_nothing_has_no_load(tmp_path):
    load = load_beside(seconds=0.0, root=tmp_path)

    assert (load.readings, load.other_cores, load.cores_available) == (0, 0.0, float(len(os.sched_getaffinity(0))))


@given(
    busy=st.lists(st.sampled_from([None, 0.0, 0.01, 0.5, 1.0]), min_size=2, max_size=600), memory=st.integers(1, 10**12)
)
def test_spans_of_a_device_have_the_mean_of_what_it_told_and_its_highest_memory(busy, memory):
    readings = [{"utilization_fraction": x, "memory_bytes": memory + at, "power_w": None} for at, x in enumerate(busy)]
    at_s = [float(second + 1) for second in range(len(busy))]
    series = DeviceSeries.of(5, at_s, {DeviceGauges(index=1): readings}, num_spans=50)

    if not any(busy):
        assert series is None or not any(series.devices[0].utilization_fraction)
        return
    device = series.devices[0]
    assert len(series.end_s) <= 50
    assert series.end_s[-1] == len(busy)
    assert device.memory_bytes[-1] == max(device.memory_bytes) == memory + len(busy) - 1
    assert (device.clock_hz, device.power_w) == ((), ())
    told = [x for x in device.utilization_fraction if x is not None]
    assert min(x for x in busy if x is not None) - 1e-4 <= sum(told) / len(told) <= max(filter(None, busy)) + 1e-4
    assert DeviceSeries.from_facts({"device_series": msgspec.to_builtins(series)}) == series


def driver(count: int, **replaced):
    """Return a module like pynvml for `count` devices, of which one of them is idle and does not tell its power."""
    nvml = SimpleNamespace(NVMLError=type("NVMLError", (Exception,), {}), NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0)

    def power_mw(handle):
        if handle == 1:
            raise nvml.NVMLError
        return 350_000

    answers = {
        "Init": None, "DeviceGetCount": count, "DeviceGetEnforcedPowerLimit": 700_000, "DeviceGetTemperature": 61,
        "DeviceGetMaxClockInfo": 1980, "DeviceGetClockInfo": 1500, "DeviceGetName": "NVIDIA H100",
        "DeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=20 << 30),
    }  # fmt: skip
    for name, value in answers.items():
        setattr(nvml, f"nvml{name}", lambda *_, value=value: value)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetPowerUsage = power_mw
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=0 if handle == 0 else 40)
    for name, value in replaced.items():
        setattr(nvml, name, value)
    return nvml


def watched(monkeypatch, nvml, visible=None, patience_s=20.0):
    """Return what a watch of a moment says, and what problems it had."""
    monkeypatch.setattr(device_watch, "pynvml", nvml)
    monkeypatch.setattr(device_watch, "SAMPLE_S", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    watch = device_watch.DeviceWatch((problems := Problems()).add)
    deadline = time.monotonic() + patience_s
    while watch.series() is None and not problems.lines() and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.stop()
    series = watch.series()
    return series and msgspec.to_builtins(series), problems.lines()


def test_devices_that_worked_are_followed_with_what_their_driver_tells(monkeypatch):
    series, problems = watched(monkeypatch, driver(3))

    assert problems == []
    assert [(row["index"], row["name"], row["power_limit_w"]) for row in series["devices"]] == [
        (1, "NVIDIA H100", 700.0), (2, "NVIDIA H100", 700.0),
    ]  # fmt: skip
    silent, telling = series["devices"]
    assert (silent["power_w"], set(telling["power_w"])) == ((), {350.0})
    assert set(telling["utilization_fraction"]) == {0.4}
    assert (telling["memory_bytes"][0], telling["clock_hz"][0], telling["temperature_c"][0]) == (20 << 30, 1.5e9, 61)
    assert [row["index"] for row in watched(monkeypatch, driver(3), "2,0")[0]["devices"]] == [2]


def test_a_driver_that_does_not_answer_is_silent_and_one_that_breaks_is_a_problem(monkeypatch):
    silent = driver(1)

    def fails():
        raise silent.NVMLError

    silent.nvmlInit = fails

    assert watched(monkeypatch, silent, patience_s=0.1) == (None, [])
    assert "what the devices did" in watched(monkeypatch, driver(1, nvmlDeviceGetCount=lambda: 1 / 0))[1][0]
