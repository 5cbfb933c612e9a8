"""Two ledgers side by side."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.machine.host_load import HostLoad
from headway.ledger.answers.compare import compare, steps_per_s, whole_speedup
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from tests.runs_made import MS, RunMaker

BASE = RunMaker(steps=20, fetch_ns=2 * MS)
SLOWER = {
    "input": replace(BASE, fetch_ns=5 * MS),
    "useful": replace(BASE, compute_ns=9 * MS),
    "comm": replace(BASE, comm_ns=4 * MS),
    "checkpoint": replace(BASE, save_ns=3 * MS),
    "host": replace(BASE, logging_ns=3 * MS),
    "straggler": replace(BASE, compute_ns=lambda rank, step: (5 + 4 * (rank == 1)) * MS),
}
LATE = replace(BASE, startup_ns=3000 * MS)


def ledger(maker: RunMaker) -> Ledger:
    return Ledger.of(maker.make())


@pytest.mark.slow
@given(st.integers(1, 30), st.integers(1, 30))
def test_the_same_job_run_longer_is_no_regression(first, second):
    found = compare(ledger(replace(BASE, steps=first)), ledger(replace(BASE, steps=second)), 0.3)

    assert found.exit_code == 0
    assert not found.slower


def test_a_run_compared_with_itself_has_no_deltas():
    found = compare(ledger(BASE), ledger(BASE))

    assert [change.bucket for change in found.changes] == list(BUCKETS)
    assert {change.delta_s for change in found.changes} == {0.0}
    assert (found.speedup, found.regressions, found.exit_code) == (1.0, [], 0)


@pytest.mark.parametrize("bucket", SLOWER)
def test_the_bucket_that_grew_is_named_and_the_gate_closes(bucket):
    found = compare(ledger(BASE), ledger(SLOWER[bucket]))

    regressed = {change.bucket for change in found.changes if change.regressed}
    assert bucket in regressed
    assert regressed <= {bucket, "useful"}  # a slow rank computes more and the others wait for it
    assert found.exit_code == 3
    assert any(line.startswith(bucket) for line in found.regressions)
    assert found.slower
    assert found.notes == ()


def test_start_up_is_noted_and_closes_the_gate_for_whole_runs_only():
    steps, whole = compare(ledger(BASE), ledger(LATE)), compare(ledger(BASE), ledger(LATE), whole=True)
    change = next(change for change in steps.changes if change.bucket == "startup")

    assert (steps.exit_code, steps.regressions, steps.slower) == (0, [], False)
    assert change.per == "run"
    assert change.delta_s > 1
    assert [note.split()[0] for note in steps.notes] == ["startup"]
    assert "--whole" in steps.notes[0]
    assert (whole.exit_code, whole.notes) == (3, ())
    assert [line.split()[0] for line in whole.regressions] == ["startup"]


def test_the_first_step_decides_nothing():
    slow_start = replace(BASE, compute_ns=lambda rank, step: (5 + 200 * (step == 0)) * MS)
    base = replace(BASE, compute_ns=5 * MS)

    assert compare(ledger(base), ledger(slow_start)).exit_code == 0
    assert compare(ledger(base), ledger(slow_start), whole=True).exit_code == 3


def test_goodput_in_steps_is_the_useful_share_of_their_time():
    found = compare(ledger(BASE), ledger(SLOWER["input"]))
    useful, lost = next(c for c in found.changes if c.bucket == "useful"), found.step_goodput
    total_s = [sum(getattr(c, side) for c in found.changes if c.per == "step") for side in ("before_s", "after_s")]

    assert lost == pytest.approx((useful.before_s / total_s[0], useful.after_s / total_s[1]))
    assert lost[0] > lost[1]


@pytest.mark.parametrize("bucket", SLOWER)
def test_getting_faster_is_no_regression(bucket):
    found = compare(ledger(SLOWER[bucket]), ledger(BASE))

    assert found.exit_code == 0
    assert found.speedup >= 1.0


def test_deltas_are_seconds_per_step_and_device():
    found = compare(ledger(BASE), ledger(SLOWER["input"]))

    change = next(change for change in found.changes if change.bucket == "input")
    assert change.delta_s == pytest.approx(0.003)
    assert found.steps_per_s[0] / found.steps_per_s[1] == pytest.approx(1 / found.speedup)


def test_json_names_its_schema_and_the_exit_code():
    found = compare(ledger(BASE), ledger(SLOWER["input"])).to_json()

    assert found["schema"] == "headway.compare/1"
    assert found["exit_code"] == 3
    assert [row["bucket"] for row in found["changes"]] == list(BUCKETS)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.1])
def test_a_threshold_that_is_no_fraction_is_refused(threshold):
    with pytest.raises(InputError, match=r"threshold is .*between 0 and 1.*Pass 0.05"):
        compare(ledger(BASE), ledger(BASE), threshold)


def test_a_run_without_steps_cannot_be_compared():
    made = BASE.make()
    empty = Ledger.of(replace(made, trace=made.trace.where(made.trace.named("process"))))

    with pytest.raises(InputError, match=r"second run has no complete step.*Record a longer one"):
        compare(ledger(BASE), empty)


def noisy(seed, factor=1.0, steps=200):
    """A ledger whose steps differ from each other by 15 %, those of ten in a row alike; `factor` of the usual time."""
    rng = np.random.default_rng(seed)
    drift = np.repeat(rng.normal(0, 0.05, -(-steps // 10)), 10)[:steps]
    ns = (5 * MS * factor * np.exp(rng.normal(0, 0.15, steps) + drift)).astype(int)
    return ledger(replace(BASE, steps=steps, compute_ns=lambda rank, step: int(ns[step])))


@pytest.mark.parametrize("pair", range(10))
def test_equal_runs_are_told_apart_by_no_noise_and_a_true_change_of_a_fifth_is_found(pair):
    equal, slower = compare(noisy(pair), noisy(100 + pair)), compare(noisy(pair), noisy(100 + pair, 1.4))

    assert (equal.verdict, equal.exit_code) == ("not resolved", 0)
    assert equal.interval[0] < 1 < equal.interval[1]
    assert (slower.verdict, slower.exit_code) == ("slower", 3)


def load(other, own=0.0):
    return HostLoad(cores=2, cores_available=2.0, other_cores=other, own_cores=own, readings=9)


def test_what_other_load_explains_is_inconclusive_and_closes_no_gate():
    before, after = ledger(BASE), ledger(SLOWER["useful"])
    found = compare(before, after, loads=(load(0.0), load(0.9)))

    assert (found.verdict, found.exit_code, found.regressions) == ("inconclusive", 0, [])
    assert found.inconclusive == "other processes wanted 0.90 cores beside the second run, 0.00 beside the first"
    assert compare(after, before, loads=(load(0.9), load(0.0))).verdict == "inconclusive"
    # Slower beside less load, or faster beside more, is the runs' own.
    assert compare(before, after, loads=(load(0.9), load(0.0))).exit_code == 3
    assert compare(after, before, loads=(load(0.0), load(0.9))).verdict == "faster"
    assert compare(before, after, loads=(load(0.1), load(0.0))).exit_code == 3
    # On a full host a difference may come from how the processes took turns.
    full = load(1.5, own=1.0)
    assert compare(before, after, loads=(full, full)).verdict == "inconclusive"
    assert compare(before, after, loads=(None, load(0.9))).exit_code == 3


def test_runs_of_other_models_are_not_judged_by_each_other():
    before, after = ledger(BASE), ledger(SLOWER["useful"])
    found = compare(before, after, parameters=(1000, 2000))

    assert (found.verdict, found.exit_code, found.regressions) == ("inconclusive", 0, [])
    assert "trains 2,000 parameters, the first 1,000" in found.inconclusive
    assert compare(before, after, parameters=(1000, 1001)).exit_code == 3
    assert compare(before, after, parameters=(0, 2000)).exit_code == 3


def test_too_few_steps_are_not_resolved():
    found = compare(ledger(replace(BASE, steps=3)), ledger(replace(SLOWER["useful"], steps=3)))

    assert (found.verdict, found.interval, found.exit_code) == ("not resolved", None, 0)


def test_what_a_remedy_costs_in_the_first_step_counts_over_all_steps():
    before = ledger(replace(BASE, steps=20))
    starts = ledger(replace(BASE, steps=30, fetch_ns=lambda rank, step: 80 * MS if step == 0 else 0))

    assert steps_per_s(starts) > 1.2 * steps_per_s(before)
    assert whole_speedup(before, starts) < 1 < compare(before, starts).speedup


@pytest.mark.slow
@given(st.integers(20, 150), st.booleans())
def test_a_run_with_a_window_is_as_fast_as_the_same_without(opened, stays):
    """The steps under the profiler take twice as long; where its library stays, those behind it a fifth longer."""
    steps = np.arange(200)
    plain = noisy(0)
    kept = (steps < opened) | ((steps > opened + 2) & (not stays))
    longer = np.where(kept, 1.0, np.where(steps > opened + 2, 1.2, 2.0))
    walls = (plain.step_wall_ns * longer).astype(np.int64)
    windowed = replace(plain, step_wall_ns=walls, undisturbed=kept)

    assert compare(windowed, plain).verdict == "not resolved"
    assert compare(plain, windowed).verdict == "not resolved"
    assert whole_speedup(windowed, plain) == pytest.approx(1.0)
