"""Runs of several attempts: what a failure costs, and what is done again."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.runs.attempts import kept_steps
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import SCHEMA
from headway.why.explanation import explain
from tests.rings_made import Process
from tests.runs_made import MS, NAMES, Made, RunMaker, cut_short, joined

SAVING = RunMaker(ranks=2, steps=20, save_ns=lambda rank, step: 6 * MS * (step in (5, 12)))


def failed_at(maker: RunMaker, step: int, **second):
    """Return two attempts: the first dies as its step `step` begins, the second runs to the end."""
    made = maker.make()
    rows = made.trace.where(made.trace.named("step")).events
    at = int(rows["start_ns"][rows["step"] == step].max()) + MS
    first = cut_short(made, at)
    again = replace(maker, start_ns=at, attempt=1, **second).make()
    return first, again, joined(first, again)


@pytest.mark.parametrize(("steps", "says"), [(None, "the one after it left no events"), (0, "holds all 2 attempts")])
def test_what_a_launcher_that_was_killed_after_a_restart_left_is_told_of_both_attempts(steps, says, tmp_path):
    first = Process(tmp_path)
    first.train(20)
    if steps is not None:
        again = Process(tmp_path, attempt=1)
        again.now_ns = first.now_ns + 50 * MS
        again.train(steps)
    facts = {"schema": SCHEMA, "run_id": "x", "attempt": 0, "exit": None, "start_ns": first.recorder._clock[0],
             "realtime_ns": 0, "end_ns": None}  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(facts))
    incident = {"attempt": 0, "step": 20, "evidence": "rank 0: exit code 1, RuntimeError: boom", "action": "restart"}
    incident |= {f"{name}_ns": first.now_ns for name in ("detected", "located", "down", "decided", "first_step")}
    (tmp_path / "incidents.json").write_text(json.dumps({"incidents": [incident]}))

    why = explain([tmp_path]).to_json()
    (note,) = (text for text in why["notes"] if text.startswith("Attempt 0 ended"))

    assert "at step 20 (rank 0: exit code 1, RuntimeError: boom)" in note
    assert says in note
    assert note.endswith(f"headway fault incidents {tmp_path}.")
    if steps is not None:
        assert why["verdict"]["sentence"].startswith("No step of the last attempt was recorded")
        assert "work lost in failed attempts" in why["verdict"]["sentence"]


@given(st.lists(st.none() | st.integers(0, 30), max_size=4), st.integers(0, 20), st.booleans())
def test_kept_steps_are_those_before_the_oldest_last_save(saved, num_steps, resumed):
    kept = kept_steps(saved, num_steps=num_steps, resumed=resumed)

    known = [step for step in saved if step is not None]
    assert 0 <= kept <= num_steps
    assert kept == (min([*known, num_steps]) if known and resumed else 0)


@pytest.mark.parametrize(("step", "kept"), [(8, 5), (15, 12), (4, 0)])
def test_compute_after_the_last_save_is_rework_when_the_next_attempt_loads_it(step, kept):
    first, again, run = failed_at(SAVING, step, load_ns=9 * MS, steps=20 - kept)

    ledger = Ledger.of(run)

    step_ns = SAVING.compute_ns + SAVING.optimizer_ns
    lost = (step - kept) * 2
    assert ledger.steps == 20
    assert ledger.sub_ns["rework.steps"] == lost * step_ns
    assert ledger.ledger_ns["useful"] == 2 * (kept + 20 - kept) * step_ns
    assert sum(ledger.ledger_ns.values()) == 2 * ledger.wall_ns
    assert ledger.wall_ns == again.meta["end_ns"] - first.meta["start_ns"]


def test_an_attempt_that_ends_in_its_set_up_does_not_take_the_steps_before_it_for_lost():
    first, _, _ = failed_at(SAVING, 8)
    at = first.meta["end_ns"]
    middle = cut_short(replace(SAVING, start_ns=at, attempt=1).make(), at + MS)
    last = replace(SAVING, start_ns=at + 2 * MS, attempt=2, load_ns=9 * MS, steps=15).make()
    ledger = Ledger.of(joined(joined(first, middle), last))

    assert ledger.steps == 20
    assert ledger.sub_ns["rework.steps"] == 2 * 3 * (SAVING.compute_ns + SAVING.optimizer_ns)


def test_everything_is_rework_when_the_next_attempt_starts_from_nothing():
    _, again, run = failed_at(SAVING, 15)

    ledger = Ledger.of(run)

    assert ledger.steps == 20
    assert ledger.ledger_ns["useful"] == again.truth_ns["useful"]


def test_a_later_attempts_start_up_is_restart_and_the_first_ones_is_not():
    first, again, run = failed_at(SAVING, 8, load_ns=9 * MS)

    ledger = Ledger.of(run)

    truth = {sub: ns for sub, ns in again.sub_truth_ns.items() if sub.startswith("restart")}
    found = {sub: ns for sub, ns in ledger.sub_ns.items() if sub.startswith("restart") and sub != "restart.down"}
    assert found == truth
    assert ledger.ledger_ns["startup"] == first.truth_ns["startup"]
    assert ledger.ledger_ns["unknown"] == 0


def test_the_unfinished_step_of_a_failed_attempt_is_rework_or_the_way_to_the_next():
    first, _, run = failed_at(SAVING, 8, load_ns=9 * MS)

    ledger = Ledger.of(run)

    # Each rank was 1 ms into step 8, of which next(loader) was recorded.
    assert ledger.sub_ns["restart.down"] + ledger.sub_ns.get("rework.partial", 0) == 2 * (MS - MS // 10)
    assert first.meta["exit"]["code"] == 137


def test_a_rank_that_is_absent_from_an_attempt_was_idle():
    first, _, run = failed_at(SAVING, 8)
    smaller = replace(run, earlier=(first.trace.select(ranks=[0]),))

    ledger = Ledger.of(smaller)

    assert ledger.sub_ns["idle.absent"] == int(np.diff(np.array([first.meta["start_ns"], first.meta["end_ns"]]))[0])
    assert sum(ledger.ledger_ns.values()) == 2 * ledger.wall_ns


def test_a_rank_whose_exit_code_nobody_took_ended_as_well_as_its_run():
    made = RunMaker(ranks=2, steps=10).make()
    spawned = [{**row, "exit_code": None if row["rank"] else 0} for row in made.meta["ranks"]]
    ended_well = Ledger.of(replace(made, meta={**made.meta, "ranks": spawned}))
    failed = {**made.meta["exit"], "code": 1, "class": "user"}
    ended_badly = Ledger.of(replace(made, meta={**made.meta, "ranks": spawned, "exit": failed}))

    assert ended_well.to_json()["ledger_ns"] == Ledger.of(made).to_json()["ledger_ns"]
    assert ended_badly.to_json()["ledger_ns"]["unknown"] > 0


def test_more_failures_lose_more():
    goodputs = []
    for step in (19, 14, 9):
        _, _, run = failed_at(SAVING, step)
        goodputs.append((Ledger.of(run).goodput, Ledger.of(run).ledger_ns["rework"]))
    whole = Ledger.of(SAVING.make())

    assert all(goodput < whole.goodput for goodput, _ in goodputs)
    assert [rework for _, rework in goodputs] == sorted((rework for _, rework in goodputs), reverse=True)


row = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 2), "name": st.integers(0, len(NAMES) - 1), "lane": st.integers(0, 2),
        "start_ns": st.integers(-50, 200), "duration_ns": st.integers(0, 80), "group": st.integers(-1, 1),
        "seq": st.integers(-1, 2), "peer": st.integers(-1, 2), "corr": st.integers(-1, 1),
    }
)  # fmt: skip


@st.composite
def anything(draw):
    """Rows without rhyme or reason: any names, anywhere, on any lane."""
    rows = draw(st.lists(row, min_size=1, max_size=20))
    columns = {key: [entry[key] for entry in rows] for key in rows[0]}
    return Trace.from_columns(columns, names=NAMES, lanes=("main", "loader/0", "thread/x"))


@pytest.mark.slow
@given(
    st.lists(anything(), min_size=1, max_size=3),
    st.sampled_from([{}, {"start_ns": 1}, {"start_ns": 1, "end_ns": 150}, {"end_ns": 500}]),
    st.lists(
        st.fixed_dictionaries({"rank": st.integers(0, 3), "exit_code": st.sampled_from([None, 0, 1, -9])}), max_size=2
    ),
    st.randoms(),
)
@settings(max_examples=150)
def test_whatever_was_recorded_every_nanosecond_is_booked_once_and_row_order_is_nothing(traces, times, ranks, random):
    meta = {**times, "ranks": ranks}
    order = list(range(len(traces[-1])))
    random.shuffle(order)

    run = Made(traces[-1], meta, {}, {}, {}, earlier=tuple(traces[:-1]))
    ledger = Ledger.of(run)
    again = Ledger.of(replace(run, trace=traces[-1].where(np.array(order))))

    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
    assert all(ns >= 0 for ns in ledger.sub_ns.values())
    assert again.sub_ns == ledger.sub_ns
    assert again.by_rank_ns == ledger.by_rank_ns
    assert find_causes(ledger) == find_causes(again)
