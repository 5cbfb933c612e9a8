"""Power of a site: closed forms, laws of smoothing and storage, the search against a grid, what is refused."""

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.power_search import grid_search, job_wave, random_spec
from headway.core.errors import FormatError, InputError, UnknownNameError
from headway.power import GridSpec, PowerModel, check, optimise, smooth, store
from headway.power.advise import PowerCosts
from headway.power.apply import fill_gaps
from headway.power.smoothing import fill, of_run, slowed
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import Recorder
from tests.launching import alive, code_and_json, refusal, wait_for
from tests.oracles import smoothed, stored
from tests.paths import ROOT
from tests.refusals import refused
from tests.remedy_context import apply

WIDE = GridSpec(ramp_w_per_s=1e9, range_w=1e9, window_s=10.0, band_hz=(0.05, 20.0))
"""Limits that nothing of the tests breaks."""


def square(period_s, duty, low, high, *, length_s=400.0, step_s=0.01):
    """Return a square wave: high for `duty` of each period."""
    phase = np.arange(round(length_s / step_s)) * step_s % period_s
    return np.where(phase < duty * period_s - 1e-9, high, low)


def trapezoid(period_s, edge_s, low, high, *, length_s=400.0, step_s=0.01):
    """Return a wave that is high for half a period, with edges of `edge_s`."""
    phase = np.arange(round(length_s / step_s)) * step_s % period_s
    up, down = np.clip(phase / edge_s, 0, 1), np.clip((phase - period_s / 2) / edge_s, 0, 1)
    return low + (high - low) * (up - down)


def harmonics(period_s, amplitude_of, band_hz):
    """Return the energy of a wave's harmonics inside of a band, by its Fourier series."""
    numbers = range(1, 4000)
    return sum(amplitude_of(n) ** 2 / 2 for n in numbers if band_hz[0] <= n / period_s <= band_hz[1])


@pytest.mark.parametrize(("period_s", "duty"), [(4.0, 0.8), (2.0, 0.5), (5.0, 0.3)])
def test_a_square_wave_has_the_band_of_its_fourier_series(period_s, duty):
    wave, band_hz = square(period_s, duty, 300.0, 700.0), (0.1, 2.6)
    found = check(wave, 0.01, GridSpec(1e9, 1e9, 20.0, band_hz))
    in_band = harmonics(period_s, lambda n: 2 * 400 / (n * math.pi) * math.sin(n * math.pi * duty), band_hz)

    assert found.band_rms_w == pytest.approx(math.sqrt(in_band), rel=0.01)
    assert found.band_share == pytest.approx(in_band / (400**2 * duty * (1 - duty)), rel=0.01)
    assert found.peak_hz == pytest.approx(1 / period_s, rel=0.01)
    assert (found.ramp_w_per_s, found.range_w) == (400.0, 400.0)


@pytest.mark.parametrize("step_s", [0.01, 0.013])
def test_a_trapezoid_has_the_ramp_of_its_edges(step_s):
    wave, band_hz = trapezoid(8.0, 2.5, 200.0, 700.0, step_s=step_s), (0.05, 3.0)
    found = check(wave, step_s, GridSpec(1e9, 1e9, 1.0, band_hz))

    def amplitude(n):
        """Return that of the n-th harmonic: a square wave's, smoothed over the edge."""
        return 2 * 500 / (n * math.pi) * abs(math.sin(n * math.pi / 2)) * abs(np.sinc(n * 2.5 / 8))

    assert found.ramp_w_per_s == pytest.approx(500 / 2.5, rel=0.01)
    assert found.range_w == pytest.approx(500 / 2.5, rel=0.01)
    assert found.band_rms_w == pytest.approx(math.sqrt(harmonics(8.0, amplitude, band_hz)), rel=0.01)
    assert found.peak_hz == pytest.approx(1 / 8, rel=0.01)


def test_frequencies_of_equal_energy_have_a_peak_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1e-9, 1.0, 1e9):
            for size in (16, 50, 500):
                found = check(
                    np.where(np.arange(size) == size // 2, scale, 0.0),
                    0.02 * 500 / size,
                    replace(WIDE, band_hz=(0.05, 0.5)),
                )
                assert math.isfinite(found.peak_hz)


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_stretching_time_divides_frequencies_and_ramps(factor):
    wave, spec = trapezoid(6.0, 2.4, 100.0, 900.0), GridSpec(1e9, 1e9, 10.0, (0.1, 2.0))
    slow = GridSpec(1e9, 1e9, 10.0 * factor, (0.1 / factor, 2.0 / factor))
    before, after = check(wave, 0.01, spec), check(wave, 0.01 * factor, slow)

    assert after.peak_hz * factor == pytest.approx(before.peak_hz, rel=1e-9)
    assert after.band_rms_w == pytest.approx(before.band_rms_w, rel=1e-9)
    assert after.range_w == before.range_w


@given(st.integers(0, 10**9), st.floats(0.02, 3.0))
def test_the_range_is_the_largest_over_all_windows(seed, window_s):
    power = np.random.default_rng(seed).uniform(0, 100, 300)
    size = round(window_s / 0.01) + 1
    expected = max(np.ptp(power[i : i + size]) for i in range(max(300 - size + 1, 1)))

    assert check(power, 0.01, GridSpec(1e9, 1e9, window_s, (1.0, 20.0))).range_w == expected


def waves(count):
    """Yield random waveforms: steps, noise and idle times, with their steps in time."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        levels = rng.uniform(0, 1000, rng.integers(1, 12)) * (rng.random() < 0.8 or rng.random())
        power = np.repeat(levels, rng.integers(1, 40, len(levels)))
        yield rng, np.maximum(power + rng.normal(0, rng.choice([0, 30]), len(power)), 0.0), rng.choice([0.01, 0.1, 1.0])


def test_smoothing_stays_within_its_ramps_and_balances_energy_on_2000_waveforms():
    for rng, power, step_s in waves(2000):
        floor_w, up, down = rng.uniform(0, 900), rng.uniform(10, 9000), rng.uniform(10, 9000)
        hold_s = float(rng.choice([0.0, 0.3, math.inf]))
        output, lost, added_j = smooth(
            power, step_s, floor_w=floor_w, up_w_per_s=up, down_w_per_s=down, hold_s=hold_s, tdp_w=1000.0
        )
        change = np.diff(output)

        assert change.max(initial=0) <= up * step_s * (1 + 1e-12) + 1e-9
        assert change.min(initial=0) >= -down * step_s * (1 + 1e-12) - 1e-9
        asked_j = power.sum() * step_s
        assert output.sum() * step_s == pytest.approx(asked_j * (1 - lost) + added_j, rel=1e-9, abs=1e-9)
        again, lost_again, added_again = smooth(output, step_s, up_w_per_s=up, down_w_per_s=down)
        assert (again == output).all()
        assert (lost_again, added_again) == (0.0, 0.0)


def test_a_battery_stays_within_its_limits_and_balances_energy_on_2000_waveforms():
    for rng, power, step_s in waves(2000):
        capacity_j, limit_w, efficiency = rng.uniform(1, 3000), rng.uniform(1, 900), float(rng.choice([1.0, 0.9]))
        grid, charge = store(
            power, step_s, capacity_j=capacity_j, power_limit_w=limit_w, tau_s=rng.uniform(0.01, 60),
            efficiency=efficiency,
        )  # fmt: skip
        flow = grid - power

        assert grid.min() >= -1e-9
        assert np.abs(flow).max() <= limit_w + 1e-9
        assert 0 <= charge.min() <= charge.max() <= capacity_j
        stored_j = (np.maximum(flow, 0) * efficiency - np.maximum(-flow, 0) / efficiency).sum() * step_s
        scale = capacity_j + np.abs(flow).sum() * step_s
        assert charge[-1] - capacity_j / 2 == pytest.approx(stored_j, abs=1e-9 * scale)


def test_the_kernels_do_what_plain_python_does():
    for rng, power, step_s in list(waves(40)):
        floor_w, up, hold_s = rng.uniform(0, 900), rng.uniform(10, 9000), float(rng.choice([0.0, 0.3]))
        output, _, _ = smooth(power, step_s, floor_w=floor_w, up_w_per_s=up, hold_s=hold_s)
        grid, charge = store(power, step_s, capacity_j=500.0, power_limit_w=200.0, tau_s=3.0, efficiency=0.9)

        assert output.tolist() == smoothed(power.tolist(), step_s, floor_w, up, math.inf, hold_s)
        assert (grid.tolist(), charge.tolist()) == stored(power.tolist(), step_s, 500.0, 200.0, 3.0, 0.9)


@given(st.integers(20, 90), st.integers(50, 400))
def test_a_ramp_costs_half_of_what_it_lacks(low, rise):
    """From low to full power in R seconds, work lacks R (1 - low) / 2 seconds, which are made up for at full power."""
    wave, ramp_s = np.array([float(low)] * 100 + [100.0] * 1000), rise / 100
    rate = (100 - low) / ramp_s
    factor = slowed(wave, 0.01, up_w_per_s=rate, down_w_per_s=rate)

    assert (factor - 1) * len(wave) * 0.01 == pytest.approx(ramp_s * (1 - low / 100) / 2, abs=0.02)
    assert slowed(wave, 0.01, up_w_per_s=1e9, down_w_per_s=rate) == 1.0
    if low > 50:  # a device counts as in use above half of the floor
        assert slowed(wave, 0.01, floor_w=100.0, up_w_per_s=rate, down_w_per_s=rate) == 1.0


@given(st.floats(0.1, 0.9), st.floats(0.05, 0.89), st.floats(0.0, 1.0))
def test_a_floor_costs_what_its_closed_form_says(duty, low, raised):
    floor = low + raised * (1 - low)
    wave = square(1.0, round(duty, 2), 1000 * low, 1000.0, length_s=100.0)
    _, lost, added_j = smooth(wave, 0.01, floor_w=1000 * floor)
    duty = round(duty, 2)

    assert lost == 0.0
    assert added_j / (wave.sum() * 0.01) == pytest.approx((1 - duty) * (floor - low) / (duty + (1 - duty) * low))


def test_a_floor_of_90_percent_adds_10_5_percent_where_the_low_level_is_43_4_percent():
    """The level is fitted to the published 10.5 %, which does not name its own."""
    wave = square(4.0, 0.8, 434.0, 1000.0)
    _, _, added_j = smooth(wave, 0.01, floor_w=900.0)

    assert added_j / (wave.sum() * 0.01) == pytest.approx(0.105, abs=0.0005)


def test_the_model_rounds_corners_with_its_time_constant_and_draws_the_weights():
    model = PowerModel(100.0, 700.0, {"compute": 1.0, "comm": 0.35}, 0.03)
    power = model.synth([0, 10**9], [10**9, 2 * 10**9], ["compute", "comm"], step_s=0.001)

    assert power.dtype == np.float32
    assert power[500] == pytest.approx(700.0)
    assert power[-1] == pytest.approx(100 + 600 * 0.35)
    assert power[999 + 30] == pytest.approx(310 + 390 * math.exp(-1), rel=0.02)
    both = PowerModel(100.0, 700.0, [1.0, 0.35], 0.0).synth([0, 5 * 10**6], [10**7, 10**7], [1, 0])
    assert both.tolist() == pytest.approx([100 + 600 * (0.35 * 0.5 + 0.5)])


def test_a_site_is_the_sum_of_its_ranks_with_their_skew():
    names = ["step", "comm.wait", "process"]
    rows = [(rank, 0, step * 10**9 + rank * 5 * 10**8, 10**9) for rank in (0, 1) for step in range(4)]
    rows += [(rank, 1, step * 10**9 + rank * 5 * 10**8 + 5 * 10**8, 5 * 10**8) for rank in (0, 1) for step in range(4)]
    columns = {key: [row[i] for row in rows] for i, key in ((0, "rank"), (2, "start_ns"), (3, "duration_ns"))}
    trace = Trace.from_columns(columns, name=[row[1] for row in rows], names=names, lanes=["main"])
    model = PowerModel(100.0, 700.0, tau_s=0.0)
    wave = of_run(trace, model, devices=20, step_s=0.1)

    assert len(wave.power_w) == 45
    assert wave.power_w[20] == pytest.approx(10 * (700 + 310))
    assert wave.power_w[:5].tolist() == pytest.approx([10 * (700 + 100)] * 5)
    assert "each stands for 10 devices" in wave.basis
    with pytest.raises(InputError, match=r"1 device for 2 ranks"):
        of_run(trace, model, devices=1)


def test_a_run_on_an_accelerator_is_at_work_by_its_device_events():
    columns = {"rank": [0] * 3, "start_ns": [0, 0, 5 * 10**8], "duration_ns": [10**9, 2 * 10**8, 10**8]}
    lanes, names = ["main", "device"], ["step", "device.work"]
    trace = Trace.from_columns({**columns, "lane": [0, 1, 1]}, name=[0, 1, 1], names=names, lanes=lanes)
    wave = of_run(trace, PowerModel(100.0, 700.0, tau_s=0.0), devices=1, step_s=0.1, overhead_fraction=0.1)

    assert wave.power_w.tolist() == pytest.approx([770, 770, 170, 170, 170, 770, 170, 170, 170, 170])


def test_a_recorded_run_is_checked_for_the_devices_that_its_ranks_stand_for():
    terms = (ROOT / "tests" / "golden" / "runs" / "before", "--spec", "moderate")
    code, found = verb("check", *terms, "--device", "H100-SXM5-80GB", "--devices", 20000, "--step-s", 0.005)

    assert code in (0, 3)
    assert found["schema"] == "headway.power-check/1"
    assert 20000 * 70 <= found["mean_w"] <= 20000 * 700
    assert "each stands for" in found["basis"]
    assert "unknown device 'cpu'" in refusal("power", "check", *map(str, terms))


def test_a_filler_waits_and_then_fills():
    power = np.array([9.0, 1, 1, 1, 1, 9, 1, 9])
    output, added_j = fill(power, 1.0, level_w=5.0, on_after_s=2.0)

    assert output.tolist() == [9, 1, 1, 5, 5, 9, 1, 9]
    assert added_j == 8.0


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_as_cheap_as_a_grid(seed):
    """The benchmark power_search takes 20 specifications and 2,500 points each."""
    rng = np.random.default_rng(seed)
    wave = job_wave(rng, length_s=100.0, step_s=0.05)
    spec, limit_j = random_spec(rng, wave), float(rng.choice([math.inf, 30.0]))
    found = optimise(wave, 0.05, spec, allowed=("floor", "battery"), costs=PowerCosts(), max_storage_j=limit_j)
    best = grid_search(wave, 0.05, spec, size=10, max_storage_j=limit_j)

    assert found.feasible or not best.feasible
    if best.feasible:
        assert found.cost_usd <= 1.05 * best.cost_usd
    assert found.least_storage_j <= 1.05 * best.least_storage_j


def test_a_plan_that_cannot_hold_names_the_least_storage():
    wave, spec = square(4.0, 0.8, 100.0, 700.0, length_s=100.0), GridSpec(50.0, 200.0, 30.0, (0.1, 5.0), 10.0)
    found = optimise(wave, 0.01, spec, allowed=("battery",), max_storage_j=10.0)
    enough = optimise(wave, 0.01, spec, allowed=("battery",), max_storage_j=found.least_storage_j)
    nothing = optimise(wave, 0.01, spec, allowed=())

    assert not found.feasible
    assert 10.0 < found.least_storage_j < math.inf
    assert enough.feasible
    grid, _ = store(wave, 0.01, capacity_j=enough.capacity_j, power_limit_w=enough.power_limit_w, tau_s=enough.tau_s)
    assert check(grid, 0.01, spec).ok
    assert (nothing.feasible, nothing.least_storage_j) == (False, math.inf)


def cpu_s(pid):
    """Return the CPU time that a process has had; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0


@pytest.fixture
def rank(tmp_path):
    """A stand-in for a rank: a recorder with its ring, and what a remedy gets."""
    recorder = Recorder(str(tmp_path))
    context = SimpleNamespace(allow="", undos=[], probes=SimpleNamespace(recorder=recorder))
    yield recorder, context
    for undo in context.undos:
        undo()


def test_a_filler_works_while_its_rank_waits_and_only_then(rank):
    recorder, context = rank
    made = apply(fill_gaps, {"on_after_s": 0.01, "off_within_s": 0.005, "level": 1.0}, context)
    pid = made.facts["pid"]
    recorder.page.opened(SPANS["checkpoint.save"].code, time.perf_counter_ns())
    worked = wait_for(lambda: cpu_s(pid) > 0.1)
    recorder.page.closed()
    time.sleep(0.1)
    before = cpu_s(pid)
    time.sleep(0.5)
    resting_s = cpu_s(pid) - before
    recorder.page.opened(SPANS["forward"].code, time.perf_counter_ns())
    time.sleep(0.3)

    assert worked
    assert resting_s < 0.1
    assert cpu_s(pid) - before < 0.15
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # it is no child of the rank: a script that waits for its children has none
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not alive(pid))
    context.undos[0]()  # ending what has ended is no error


def test_a_filler_ends_with_its_rank(tmp_path):
    code = (
        "import sys; from types import SimpleNamespace as N\n"
        "from headway.trace.rings.ring import Recorder; from headway.power.remedies import FillerParameters\n"
        "from headway.power.apply import fill_gaps\n"
        "context = N(undos=[], probes=N(recorder=Recorder(sys.argv[1])))\n"
        "print(fill_gaps(FillerParameters(), context).facts['pid'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)

    assert wait_for(lambda: not alive(int(done.stdout)))


def test_a_filler_is_refused_on_an_accelerator_and_with_levels_that_make_no_sense(rank, monkeypatch):
    monkeypatch.setattr("headway.power.apply.device_type", lambda: "NVIDIA H100")

    assert "fillers are for cores" in apply(fill_gaps, {}, rank[1]).reason
    with pytest.raises(InputError, match=r"level of power.filler is 1\.5; it must be a number above 0, 1 at most"):
        apply(fill_gaps, {"level": 1.5}, rank[1])


def verb(*words):
    """Return the exit code of `headway power`, and its JSON."""
    return code_and_json("power", *words, "--json")


def test_a_file_is_checked_planned_and_exported(tmp_path):
    np.savez(tmp_path / "site.npz", power_w=square(4.0, 0.8, 300.0, 700.0, length_s=60.0), step_s=0.01)
    (tmp_path / "utility.toml").write_text(
        "ramp_w_per_s = 100\nrange_w = 300\nwindow_s = 30\nband_hz = [0.2, 5]\nband_rms_w = 50\n"
    )
    terms = (tmp_path / "site.npz", "--spec", tmp_path / "utility.toml")
    code, checked = verb("check", *terms)
    planned_code, planned = verb("plan", *terms, "--use", "floor,ramps,battery", "-o", tmp_path / "plan.json")
    floor_code, _ = verb("plan", *terms, "--use", "floor,ramps", "-o", tmp_path / "floor.json")
    _, exported = verb("export", tmp_path / "floor.json")

    assert (code, checked["ok"]) == (3, False)
    assert checked["violations"][0] == {"limit": "ramp_w_per_s", "value": 400.0, "allowed": 100.0}
    assert (planned_code, floor_code, planned["feasible"]) == (0, 0, True)
    assert {row["kind"] for row in planned["mitigations"]} <= {"floor", "ramps", "battery"}
    assert exported["settings"][0]["parameter"] in ("PERCENT_TMP_FLOOR", "RAMP_UP_RATE")
    assert exported["script"].startswith("import pynvml")
    battery = next(row for row in planned["mitigations"] if row["kind"] == "battery")
    _, others = verb("export", tmp_path / "plan.json")
    assert f"A battery of {battery['capacity_j'] / 3.6e6:,.4g} kWh" in others["others"][-1]
    (tmp_path / "coarse.toml").write_text("ramp_w_per_s = 100\nrange_w = 300\nwindow_s = 30\nband_hz = [0.2, 500]\n")
    assert "at most 0.001 s shows it" in refusal(
        "power", "check", str(tmp_path / "site.npz"), "--spec", str(tmp_path / "coarse.toml")
    )


test_values_that_make_no_sense_are_one_error = refused(
    (lambda: check([1.0] * 999, 0.1, WIDE), r"too coarse for 20 Hz: at most 0\.025 s shows it"),
    (lambda: check([1.0, -2.0] * 200, 0.01, WIDE), r"power is -2\.0 W at sample 1"),
    (lambda: check([1.0, math.nan] * 200, 0.01, WIDE), r"power is nan W at sample 1"),
    (lambda: check([1.0] * 20, 0.01, WIDE), r"the record is 0\.2 s long"),
    (lambda: GridSpec(1.0, 1.0, 1.0, (2.0, 2.0)), r"band_hz is \[2\.0, 2\.0\]"),
    (lambda: GridSpec(0.0, 1.0, 1.0, (1.0, 2.0)), r"ramp_w_per_s is 0\.0"),
    (lambda: smooth([1.0], 1.0, floor_w=800.0, tdp_w=700.0), r"floor is 800 W and the TDP 700 W"),
    (lambda: smooth([1.0], 1.0, up_w_per_s=0.0), r"pass ramps > 0"),
    (lambda: store([1.0], 1.0, capacity_j=0.0, power_limit_w=1.0, tau_s=1.0), r"capacity_j is 0\.0"),
    (lambda: optimise([1.0] * 200, 0.01, WIDE, allowed=("flor",)), r"Did you mean 'floor'"),
    (lambda: PowerModel(800.0, 700.0), r"pass 0 <= idle <= TDP"),
    (lambda: PowerModel(1.0, 2.0).synth([0], [1], ["computes"]), r"computes has no weight"),
    (lambda: GridSpec.read("no.toml"), r"no\.toml does not exist"),
)


def test_a_device_without_a_row_and_files_of_other_things_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"unknown device 'H100x'\. Did you mean"):
        PowerModel.of("H100x")
    path = tmp_path / "spec.toml"
    path.write_text("ramp_w_per_s = 1\nrange = 3\n")
    with pytest.raises(FormatError, match=r"unknown key 'range'\. Did you mean 'range_w'"):
        GridSpec.read(path)
    (tmp_path / "x.npz").write_text("no")
    assert code_and_json("power", "check", tmp_path / "x.npz", "--spec", "strict")[0] == 2
