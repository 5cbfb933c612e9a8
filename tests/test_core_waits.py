"""A starved host: time in which training was ready to compute and had no core is a line of its own, and a cause."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks._other_load import spinning
from headway.core.machine.host_load import HostLoad
from headway.core.machine.thread_samples import ThreadSamples, code_of
from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.compare import compare
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.core_waits import Marks, without_core
from headway.ledger.booking.rows import RankRows
from headway.ledger.buckets import SUB_CODE
from headway.sim.recorded.recording import Recording
from headway.sim.whatif import Prediction
from headway.trace.events.intervals import Pieces
from headway.trace.events.trace import concat
from headway.why.verdict import verdict
from tests.paths import ROOT
from tests.runs_made import MS, Made, Rows, RunMaker

STEPS = 200


def starved(share: float, *, known: bool = True) -> Made:
    """Make a run whose marks say that its thread had no core for `share` of its compute."""
    made = RunMaker(ranks=1, steps=STEPS, prep_ns=2 * MS, cpu_wait_ns=MS, compute_ns=30 * MS, iter_ns=0).make()
    lane = Recording.from_trace(made.trace, max_steps=STEPS).lanes[0]
    rows = Rows(0)
    for step in range(0, STEPS + 1, 8):
        waited = int(share * 30.5 * MS * step) + step * MS
        rows.add("host.cpu", int(lane.step_end_ns[step]), 0, corr=0, seq=waited if known else -1, bytes=0, step=step)
    return replace(made, trace=concat([made.trace, rows.trace()]))


@pytest.mark.slow
@given(st.floats(0, 0.9))
def test_waiting_for_a_core_is_taken_out_of_what_the_thread_computed(share):
    made = starved(share)
    ledger, quiet = Ledger.of(made), Ledger.of(starved(0.0, known=False))

    assert ledger.sub_ns.get("host.cpu_wait", 0) == pytest.approx(share * 30.5 * MS * STEPS, rel=0.03, abs=2 * MS)
    assert ledger.total_ns == quiet.total_ns == sum(ledger.sub_ns.values())
    assert ledger.sub_ns["input.cpu_wait"] == quiet.sub_ns["input.cpu_wait"]  # known by itself
    assert "host.cpu_wait" not in quiet.sub_ns or quiet.sub_ns["host.cpu_wait"] == 0


def answer(ledger: Ledger) -> dict[str, object]:
    return {**ledger.to_json(), "causes": [cause.to_json() for cause in find_causes(ledger)]}


def test_it_leads_where_it_lost_most_and_names_who_had_the_cores():
    ledger = Ledger.of(starved(0.6))
    names = (("python3 other.py (pid 77)", 1.5),)
    load = HostLoad(cores=2, cores_available=2, other_cores=1.5, other_runnable=2.0, other_names=names, readings=9)
    busy = replace(ledger, facts=structs.replace(ledger.facts, host_load=load, cores=2))
    crowded = replace(ledger, facts=structs.replace(ledger.facts, threads={0: 8}, cores=2))

    assert "waiting for a CPU core" in verdict(answer(busy)).sentence
    assert "python3 other.py (pid 77) 1.50" in find_causes(busy)[0].evidence
    first = find_causes(crowded)[0]
    assert "8 threads each share 2 cores" in first.evidence
    assert first.script == "torch.set_num_threads(2)"


@pytest.mark.parametrize(("gain", "script"), [(1.5, "torch.set_num_threads(2)"), (0.9, "")])
def test_fewer_threads_are_a_line_with_what_they_win_and_none_where_they_lose(gain, script):
    ledger = Ledger.of(starved(0.6))
    crowded = replace(ledger, facts=structs.replace(ledger.facts, threads={0: 8}, cores=2))

    def predict(edits):
        return Prediction(0.03, 0.03 / gain, (0.9 * gain, 1.1 * gain), tuple(edits))

    first = next(cause for cause in find_causes(crowded, predict=predict) if cause.cause == "host.cpu_wait")

    assert first.script == script
    assert first.predicted_speedup == (pytest.approx(gain) if script else None)
    assert not first.at_most


def test_a_gain_on_an_unlike_host_is_inconclusive():
    before, after = Ledger.of(starved(0.6)), Ledger.of(starved(0.0))
    loads = (
        HostLoad(cores=2, cores_available=2, other_cores=2.0, readings=9),
        HostLoad(cores=2, cores_available=2, readings=9),
    )
    faster = replace(after, step_wall_ns=np.asarray(after.step_wall_ns) // 2)

    assert compare(before, faster, loads=loads).verdict == "inconclusive"
    assert compare(before, faster).verdict == "faster"


@pytest.mark.parametrize(("one_thread_ms", "left_ms"), [(np.inf, 2 + 4), (3.0, 3)])
def test_waits_in_turns_leave_each_stretch_what_the_fastest_of_its_kind_computes(one_thread_ms, left_ms):
    steps = 10
    forward, backward = np.full(steps, 20 * MS), np.full(steps, 40 * MS)
    forward[3], backward[6] = 2 * MS, 4 * MS  # nobody took the cores there
    ns = np.column_stack([forward, backward]).reshape(-1)
    borders = np.concatenate([[0], np.cumsum(ns)])
    rows = RankRows(0, *(np.zeros(0, np.int64) for _ in range(4)), {})
    ends = np.array([0, borders[-1]])
    marked = Marks(ends, np.array([0, ns.sum() // 2]), ends, np.full(2, np.nan))
    sub = np.tile([SUB_CODE["useful.forward"], SUB_CODE["useful.backward"]], steps)

    pieces = Pieces(borders[:-1], borders[1:], np.zeros(2 * steps, np.int64))
    waited = without_core(rows, marked, pieces, sub, np.arange(2 * steps) // 2, np.full(steps + 2, one_thread_ms * MS))

    assert (ns - waited).sum() == pytest.approx(steps * left_ms * MS, rel=0.01)


@pytest.mark.parametrize(("waited_ms", "most_ms", "left_ms"), [(300, 600, 30), (300, 400, 200), (590, 600, 30)])
def test_what_samples_say_was_computed_is_left_as_far_as_marks_allow(waited_ms, most_ms, left_ms):
    ends = np.array([0, 600 * MS])
    marked = Marks(ends, np.array([0, waited_ms * MS]), np.array([0, most_ms * MS]), np.array([0.0, 30 * MS]))
    rows = RankRows(0, *(np.zeros(0, np.int64) for _ in range(4)), {})
    pieces = Pieces(np.arange(6) * 100 * MS, (np.arange(6) + 1) * 100 * MS, np.zeros(6, np.int64))

    waited = without_core(rows, marked, pieces, np.full(6, SUB_CODE["useful.forward"]), np.arange(6) + 1, np.zeros(8))

    assert (600 * MS - waited.sum()) == pytest.approx(left_ms * MS, rel=0.01)


POOL = """
import os, sys, time, torch
cores = sorted(os.sched_getaffinity(0))[:int(sys.argv[1])]
os.sched_setaffinity(0, cores)
torch.set_num_threads(2)
from headway.runtime.script import run_delay
pool, x = run_delay.PoolDelay(), torch.randn(600, 600)
def waited():
    return pool.with_pool(time.thread_time_ns(), run_delay.read_delay(run_delay.open_schedstat()))[0]
first, began, computed = waited(), time.monotonic(), time.thread_time()
while time.monotonic() - began < 3:
    for _ in range(8): x @ x
    last = waited()
print((last - first) / 1e9, time.monotonic() - began, time.thread_time() - computed)
"""


def waits_of_a_pool(cores: int) -> list[float]:
    """Return the seconds that a pool of two threads waited, took, and had a core in its calling thread."""
    command = [sys.executable, "-c", POOL, str(cores)]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_threads_of_a_pool_that_share_one_core_are_waited_for():
    waited_s, took_s, _ = waits_of_a_pool(cores=1)

    assert 0.2 < waited_s / took_s < 1.0


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a pool of two needs two cores")
def test_spinning_for_a_thread_without_a_core_is_not_computing():
    samples()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])  # of what starts from here, too
    try:
        with spinning(2.0):
            waited_s, took_s, on_core_s = waits_of_a_pool(cores=2)
    finally:
        os.sched_setaffinity(0, cores)

    assert 0 < took_s - waited_s < 0.85 * on_core_s


def samples() -> ThreadSamples:
    """Return samples of this thread, where the kernel gives any."""
    try:
        return ThreadSamples()
    except OSError as cause:
        pytest.skip(f"the kernel gives no samples: {cause}")


def test_samples_tell_which_code_a_thread_runs():
    sampled = samples()
    ends = time.thread_time() + 0.3
    while time.thread_time() < ends:
        hashlib.sha256(bytes(1 << 22)).digest()
    addresses, behind = sampled.addresses(), sampled.addresses()

    spans = code_of(("libcrypto", "_sha"))
    inside = [begin <= address < end for address in addresses for begin, end in spans]
    assert len(addresses) > 30
    assert sum(inside) > len(addresses) / 2
    assert len(behind) < 3  # those were taken
