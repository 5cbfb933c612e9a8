"""Clock alignment over ranks: injected offsets and drifts are found, causality holds, the raw times stay."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticJob, generate
from headway.core.errors import CycleError, InputError
from headway.ledger.booking.rows import rows_by_rank
from headway.ledger.operations.compute_factors import meetings_of
from headway.sim.observed import observe
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import KIND
from headway.trace.sync.alignment import align
from headway.trace.sync.causality import violations
from headway.trace.sync.clocks import common_ns, is_mapped, on_common_clock
from headway.trace.sync.meetings import match
from headway.verbs.runs.trace import align as verb
from tests.clocks_made import MS, US, Maker, S, Wrong, one_group, pipeline, stepped, three_axes
from tests.refusals import refused
from tests.traces_made import profile, span

seeds = st.integers(0, 30)


def small(seed: int, *, ranks: int = 5, work_ns: int = 100 * US) -> Trace:
    return one_group(seed, ranks=ranks, meetings=12, span_s=2.0, work_ns=work_ns)[0]


def still_violated(trace: Trace) -> int:
    """Return the violations of what `trace` says of its clocks, from its file's point of view."""
    start, end = common_ns(trace)
    met = match(trace)
    return violations(met, start[met.row], end[met.row])[0]


@given(seed=seeds)
@settings(max_examples=10)
def test_shifting_raw_clocks_shifts_what_is_found_and_nothing_else(seed):
    trace = small(seed)
    shift = np.random.default_rng(seed).integers(-(10**17), 10**17, 5)
    moved = replace(trace, events={**trace.events, "start_ns": trace.events["start_ns"] + shift[trace.events["rank"]]})
    before, after = align(trace), align(moved)

    assert (after.theta_ns - before.theta_ns).tolist() == np.repeat((shift[0] - shift)[:, None], 2, axis=1).tolist()
    assert after.residual_us.tolist() == before.residual_us.tolist()


@given(seed=seeds)
@settings(max_examples=10)
def test_neither_the_order_of_rows_nor_the_names_of_ranks_matter(seed):
    rng = np.random.default_rng(seed)
    trace = Wrong.draw(rng, 5).spoil(small(seed))
    names = np.r_[0, 1 + rng.permutation(4)]  # The first rank stays the reference.
    other = replace(
        trace,
        events={**trace.events, "rank": (3 * names[trace.events["rank"]]).astype(np.int32)},
        ranks={int(3 * names[rank]): known for rank, known in trace.ranks.items()},
    )
    found = align(trace)

    assert align(trace.where(rng.permutation(len(trace)))).theta_ns.tolist() == found.theta_ns.tolist()
    assert np.abs(align(other).theta_ns[names] - found.theta_ns).max() <= 2


@given(seed=seeds, work_us=st.sampled_from([0, 1, 5, 100]))
@settings(max_examples=20)
def test_no_violation_is_left_even_by_collectives_that_take_no_time(seed, work_us):
    trace = small(seed, work_ns=work_us * US)
    wrong = Wrong.draw(np.random.default_rng(seed), 5)
    found = align(wrong.spoil(trace))

    assert still_violated(trace) == 0
    assert found.violations == 0
    assert still_violated(found.apply(wrong.spoil(trace))) == 0


@given(seed=seeds)
@settings(max_examples=10)
def test_ranks_of_one_host_read_one_clock(seed):
    trace = small(seed, ranks=6)
    hosts = [0, 0, 1, 1, 2, 2]
    ranks = {rank: {"host": f"h{hosts[rank]}"} for rank in range(6)}
    three = Wrong.draw(np.random.default_rng(seed), 3)
    wrong = Wrong(three.offset_ns[hosts], three.drift[hosts])
    found = align(wrong.spoil(replace(trace, ranks=ranks)))

    assert found.theta_ns[0::2].tolist() == found.theta_ns[1::2].tolist()
    assert wrong.error_ns(found.apply(replace(trace, ranks=ranks)), np.array([S])).max() < 50 * US


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", [one_group, three_axes, pipeline])
def test_50_ms_and_20_ppm_over_60_s_are_recovered_within_50_us(make, seed):
    """D3: the bar is the larger of 50 us and twice the median collective; 50 us are kept."""
    trace, _ = make(seed)
    wrong = Wrong.draw(np.random.default_rng(1000 + seed), len(trace.ranks))
    spoiled = wrong.spoil(trace)
    found = align(spoiled)
    aligned = found.apply(spoiled)

    assert found.violations_before > len(trace) // 5
    assert found.violations == still_violated(aligned) == 0
    assert wrong.error_ns(aligned, np.linspace(0, 60 * S, 61).astype(np.int64)).max() <= 50 * US


def one_pair(seed: int) -> tuple[Trace, list[int]]:
    return one_group(seed, ranks=2)


@pytest.mark.parametrize("by_ns", [500 * US, -500 * US, 100 * MS, 3600 * S])
@pytest.mark.parametrize(("make", "rank"), [(one_pair, 1), (pipeline, 3)])
def test_a_clock_that_was_set_in_mid_run_is_refused_with_where_and_how_far(make, rank, by_ns):
    trace, _ = make(4)
    spoiled = stepped(Wrong.draw(np.random.default_rng(4), len(trace.ranks)).spoil(trace), rank, 37 * S, by_ns)

    with pytest.raises(
        InputError, match=rf"clock of rank {rank} was set while it recorded.* 50 us are allowed.*between"
    ) as told:
        align(spoiled)
    after_s, jump_us = re.search(r"about (\S+) s after.* jumps by (\S+) us", str(told.value)).groups()
    assert float(after_s) == pytest.approx(37, abs=5)
    assert float(jump_us) == pytest.approx(by_ns / US, rel=0.1)
    assert align(spoiled, tolerate=True).drift_ppm.shape == (len(trace.ranks),)


def test_a_drift_that_changes_in_mid_run_is_refused():
    trace, _ = one_group(5, ranks=6)
    start = trace.events["start_ns"] + np.rint(
        20e-6 * np.maximum(trace.events["start_ns"] - 30 * S, 0) * (trace.events["rank"] == 2)
    ).astype(np.int64)

    with pytest.raises(InputError, match=r"rank 2 .* its drift changed.*drifts by \+(19|2\d)\.\d ppm more"):
        align(replace(trace, events={**trace.events, "start_ns": start}))


def test_ends_that_are_late_together_are_no_step_where_that_would_break_the_order():
    """A rank that leaves 20 calls 400 us late, and comes in time: no clock is to blame, none is set."""
    trace, _ = one_group(2, ranks=4)
    late = (trace.events["rank"] == 2) & (trace.events["seq"] >= 100) & (trace.events["seq"] < 120)
    found = align(replace(trace, events={**trace.events, "duration_ns": trace.events["duration_ns"] + 400 * US * late}))

    assert found.violations == 0
    assert np.abs(found.theta_ns[:, 0]).max() < 50 * US


def test_the_raw_times_stay_and_a_file_keeps_them_apart(tmp_path):
    trace = Wrong.draw(np.random.default_rng(1), 5).spoil(small(1))
    aligned = align(trace).apply(trace)
    aligned.save(tmp_path / "a.parquet")
    back = Trace.open(tmp_path / "a.parquet")

    assert back.events["start_ns"].tolist() == trace.events["start_ns"].tolist()
    assert back.ranks == aligned.ranks
    assert still_violated(back) == 0
    assert not is_mapped(on_common_clock(back))
    assert on_common_clock(back).events["start_ns"].tolist() == common_ns(aligned)[0].tolist()


def test_the_ledgers_rows_are_on_the_common_clock():
    trace = Wrong.draw(np.random.default_rng(2), 5).spoil(small(2))
    aligned = align(trace).apply(trace)
    start, end = common_ns(aligned)

    for rank, rows in rows_by_rank(aligned).items():
        mine = aligned.events["rank"] == rank
        assert sorted(rows.start_ns.tolist()) == sorted(start[mine].tolist())
        assert sorted(rows.end_ns.tolist()) == sorted(end[mine].tolist())


def test_aligning_again_changes_nothing():
    trace = Wrong.draw(np.random.default_rng(3), 5).spoil(small(3))
    once = align(trace).apply(trace)

    assert align(once).apply(once).ranks == once.ranks
    assert align(once).violations_before == 0


def test_profiler_files_of_several_ranks_are_aligned(tmp_path):
    """Two files of gloo ranks, one clock 7 ms ahead: calls are counted through within steps."""
    rng = np.random.default_rng(4)
    arrive = np.arange(8)[:, None] * 5000 + rng.integers(0, 900, (8, 2))
    done = arrive.max(axis=1) + 400
    paths = []
    for rank, ahead_us in ((0, 0), (1, 7000)):
        events = [
            span(
                "gloo:all_reduce", int(a + ahead_us), int(d - a + rng.integers(0, 9)), lane=(1, 2),
                cat="user_annotation",
            )
            for a, d in zip(arrive[:, rank], done, strict=True)
        ]  # fmt: skip
        step = span("ProfilerStep#3", ahead_us - 100, 60_000, cat="user_annotation")
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_bytes(profile([step, *events], distributedInfo={"rank": rank, "world_size": 2}))
    trace = Trace.open(paths)
    found = align(trace)

    assert found.num_meetings == 8
    assert found.theta_ns[1, 0] == pytest.approx(-7 * MS, abs=10 * US)
    assert (found.violations_before, found.violations) == (8, 0)


def test_an_operation_trace_is_aligned_by_its_own_dependencies():
    made = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=3), seed=2).trace
    shift = np.array([0, 3, -2, 1]) * S
    moved = replace(made, events={**made.events, "start_ns": made.events["start_ns"] + shift[made.events["rank"]]})
    found = align(moved, drift=False, meetings=meetings_of(moved))

    assert found.theta_ns[:, 0] == pytest.approx(-shift, abs=2 * MS)
    assert found.violations_before > 0
    assert found.violations == 0


def contradiction() -> Trace:
    """Return two collectives that no offset can both satisfy, by 40 us in all."""
    columns = {
        "rank": [0, 1, 0, 1], "seq": [0, 0, 1, 1], "group": [0] * 4, "name": [0] * 4, "corr": [0] * 4,
        "start_ns": [0, 20 * US, MS + 20 * US, MS], "duration_ns": [0, 0, 0, 0],
    }  # fmt: skip
    return Trace.from_columns(columns, names=["comm.collective"], ranks={0: {}, 1: {}})


def test_an_order_that_no_clocks_fulfil_is_refused_with_the_calls():
    with pytest.raises(
        CycleError,
        match=r"19\.7\d\d us short.*rank [01] ends comm.collective \(group 0 seq [01]\) before.*host names.*--tolerate",
    ):
        align(contradiction())


def test_on_request_the_estimate_is_taken_and_what_contradicts_it_is_counted():
    found = align(contradiction(), tolerate=True)

    assert found.violations >= 1
    assert 19.7 <= found.shortfall_us <= 40.001


def test_waits_written_for_their_calls_are_refused_and_do_not_move_the_estimate():
    """A twentieth of the calls is told by a late wait: its start contradicts the others, and no clock is to blame."""
    trace, _ = one_group(3, ranks=32, meetings=60)
    rng = np.random.default_rng(1)
    late = rng.random(len(trace)) < 0.05
    end = trace.events["start_ns"] + trace.events["duration_ns"]
    start = np.where(late, end + rng.integers(0, 3 * MS, len(trace)), trace.events["start_ns"])
    duration = np.where(late, 1000, end - start)
    wrong = Wrong.draw(rng, 32)
    spoiled = wrong.spoil(replace(trace, events={**trace.events, "start_ns": start, "duration_ns": duration}))
    found = align(spoiled, tolerate=True)

    with pytest.raises(CycleError):
        align(spoiled)
    assert found.violations > 0
    assert wrong.error_ns(found.apply(spoiled), np.array([0, 60 * S])).max() < 100 * US


def test_a_rank_without_events_is_told():
    trace = small(1)

    with pytest.raises(InputError, match=r"rank 7 has no events.*Add its trace"):
        align(replace(trace, ranks={**trace.ranks, 7: {}}))


def test_a_rank_that_meets_nobody_is_told():
    maker = Maker(np.random.default_rng(1))
    maker.collective(0, 0, np.arange(2), 0, late_ns=10, work_ns=10)
    maker.collective(1, 0, np.arange(2, 4), 0, late_ns=10, work_ns=10)

    with pytest.raises(InputError, match=r"rank 2 does not share any collective or message with rank 0.*\(2 of 4"):
        align(maker.trace())


test_a_trace_without_ranks_is_told = refused((lambda: align(Trace.from_columns({})), "no event of a rank"))


def test_mixed_units_are_told():
    trace = small(1)
    slow = trace.events["rank"] == 2
    events = {
        **trace.events,
        **{c: np.where(slow, trace.events[c] // 1000, trace.events[c]) for c in ("start_ns", "duration_ns")},
    }

    with pytest.raises(InputError, match=r"runs \S+ times faster than that of rank 2"):
        align(replace(trace, events=events))


@pytest.mark.parametrize("suffix", ["parquet", "json.gz"])
def test_the_verb_writes_an_aligned_trace_and_says_what_it_found(tmp_path, capsys, suffix):
    trace = Wrong.draw(np.random.default_rng(6), 5).spoil(small(6))
    trace.save(tmp_path / "raw.parquet")
    code = verb(tmp_path / "raw.parquet", tmp_path / f"out.{suffix}", json=True)
    answer = json.loads(capsys.readouterr().out)
    back = Trace.open(tmp_path / f"out.{suffix}")

    assert code == 0
    assert answer["schema"] == "headway.trace-align/1"
    assert answer["violations"] == 0 < answer["violations_before"]
    assert [row["rank"] for row in answer["ranks"]] == [0, 1, 2, 3, 4]
    assert is_mapped(back) is (suffix == "parquet")
    assert still_violated(back) == 0


def test_the_screen_of_the_verb_names_offset_drift_residual_and_violations(tmp_path, capsys):
    trace = Wrong(np.array([0, 5 * MS, 0]), np.array([0, 0, 20e-6])).spoil(one_group(1, ranks=3, meetings=60)[0])
    trace.save(tmp_path / "raw.parquet")
    verb(tmp_path / "raw.parquet", tmp_path / "out.parquet")
    text = " ".join(capsys.readouterr().out.split())

    assert re.search(r"rank +offset +drift +residual +moved", text)
    assert re.search(r"1 +-5(\.0\d)? ms +[+-]0\.\d+ ppm +\d", text)
    assert re.search(r"2 +\S+ [un]s +-(20|19\.\d|20\.\d) ppm", text)
    assert "0 after" in text
    assert "keep every order" not in text


def test_clocks_that_drift_cannot_be_aligned_by_offsets_alone():
    trace = Wrong(np.array([0, 5 * MS, 0]), np.array([0, 0, 20e-6])).spoil(one_group(1, ranks=3, meetings=60)[0])

    with pytest.raises(CycleError, match=r"no offsets of the clocks fulfil .* Let clocks drift"):
        align(trace, drift=False)


def test_a_dag_of_aligned_profiler_rows_lets_ranks_meet():
    """Raw clocks 5 s apart contradict every meeting; aligned ones let all of them be points of the Dag."""
    meeting = replace(small(7, ranks=2), names=("gloo:all_reduce", "gloo:send", "gloo:recv"))
    work = Trace.from_columns(
        {"rank": [0, 1], "start_ns": [-MS, -MS], "duration_ns": [9, 9], "kind": [KIND["COMPUTE"]] * 2, "name": [0, 0]},
        names=["mm"],
    )
    trace = concat([meeting, work])
    shift = 5 * S * trace.events["rank"].astype(np.int64)
    moved = replace(trace, events={**trace.events, "start_ns": trace.events["start_ns"] + shift})
    meets = [observe(each).edges["collective"] for each in (moved, align(moved).apply(moved))]

    assert meets == [0, len(meeting)]


def test_the_screen_says_when_the_clocks_as_recorded_were_good_enough(tmp_path, capsys):
    small(1).save(tmp_path / "raw.parquet")
    verb(tmp_path / "raw.parquet", tmp_path / "out.parquet")

    assert "The clocks as recorded agree already" in " ".join(capsys.readouterr().out.split())
