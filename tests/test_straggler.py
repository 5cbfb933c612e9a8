"""Straggler what-if analysis: laws, published numbers, and the trace behind them."""

import gzip
import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
from headway.core.errors import InputError
from headway.ledger.operations.compute_factors import aligned
from headway.ledger.operations.straggler import StragglerReport, analyse, ideal_trace, root_causes
from headway.ledger.operations.whatif_groups import launch_delays
from headway.trace.events.trace import Trace
from headway.trace.readers import straggler
from headway.trace.readers.straggler import Sizes
from tests.paths import shared

jobs = st.builds(
    lambda dp, pp, overlap: SyntheticJob(dp=dp, pp=pp, num_microbatches=4, num_steps=3, overlap_dp=overlap, noise=0.3),
    dp=st.integers(1, 3),
    pp=st.integers(1, 3),
    overlap=st.booleans(),
)
seeds = st.integers(0, 99)


def rows(trace: Trace, **columns: Any) -> Trace:
    """Return `trace` with other columns."""
    return replace(trace, events={**trace.events, **columns})


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Return path -> number (or null) of nested JSON."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in numbers(inner, f"{path}/{key}").items()}
    return {path: value}


# Laws


@given(job=jobs, seed=seeds)
@settings(max_examples=10)
def test_permuting_rows_changes_nothing(job, seed):
    trace = generate(job, seed=seed).trace
    order = np.random.default_rng(seed).permutation(len(trace))

    assert analyse(trace.where(order)).to_json() == analyse(trace).to_json()


@given(job=jobs, seed=seeds)
@settings(max_examples=10)
def test_relabelling_ranks_relabels_the_result(job, seed):
    """Ranks get other numbers and DP ranks change places; every slowdown moves with its DP rank."""
    trace = generate(job, seed=seed).trace
    places = np.random.default_rng(seed).permutation(job.dp)
    ranks = {7 + 3 * r: {"dp": int(places[k["dp"]]), "pp": k["pp"]} for r, k in trace.ranks.items()}
    other = replace(rows(trace, rank=(7 + 3 * trace.events["rank"]).astype(np.int32)), ranks=ranks)
    ours, theirs = analyse(trace), analyse(other)

    assert theirs.slowdown == pytest.approx(ours.slowdown, rel=1e-12)
    for dp in range(job.dp):
        assert theirs.by["dp"][str(places[dp])] == pytest.approx(ours.by["dp"][str(dp)], rel=1e-12)


@given(job=jobs, seed=seeds, shift=st.integers(-(10**12), 10**12))
@settings(max_examples=10)
def test_shifting_a_rank_whose_offset_is_known_changes_nothing(job, seed, shift):
    trace = generate(job, seed=seed).trace
    start = trace.events["start_ns"] + np.where(trace.events["rank"] == 0, shift, 0)
    ranks = {r: {**k, "offset_ns": -shift if r == 0 else 0} for r, k in trace.ranks.items()}

    assert analyse(replace(rows(trace, start_ns=start), ranks=ranks)).to_json() == analyse(trace).to_json()


@given(job=jobs.filter(lambda job: job.dp * job.pp > 1), seed=seeds)
@settings(max_examples=10)
def test_shifted_clocks_are_found_and_do_not_change_the_slowdown(job, seed):
    trace = generate(job, seed=seed).trace
    shift = np.random.default_rng(seed).integers(10**9, 10**10, size=job.devices) * np.where(
        np.arange(job.devices) % 2, 1, -1
    )
    moved = rows(trace, start_ns=trace.events["start_ns"] + shift[trace.events["rank"]])

    assert analyse(moved).slowdown == pytest.approx(analyse(trace).slowdown, rel=5e-3)


def test_clocks_that_agree_are_left_alone():
    trace = generate(SyntheticJob(), seed=3).trace

    assert aligned(trace) is trace


def test_shifted_clocks_are_reported(caplog):
    trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=3), seed=3).trace
    moved = rows(trace, start_ns=trace.events["start_ns"] + np.where(trace.events["rank"] == 3, 10**9, 0))

    with caplog.at_level(logging.WARNING):
        found = aligned(moved)
    assert "clocks of 1 of 4 ranks stand apart" in caplog.text
    assert found.ranks[3]["offset_ns"] == pytest.approx(-(10**9), abs=10**6)


@given(job=jobs)
@settings(max_examples=10)
def test_equal_durations_per_type_mean_no_slowdown(job):
    report = analyse(generate(replace(job, noise=0.0), seed=0).trace)

    assert report.slowdown == pytest.approx(1.0, abs=1e-9)
    assert all(value == pytest.approx(1.0, abs=1e-9) for kind in report.by.values() for value in kind.values())
    assert report.fidelity == pytest.approx(1.0, abs=1e-9)
    assert not root_causes(report)


@given(job=jobs, seed=seeds)
@settings(max_examples=10)
def test_the_parts_of_a_report_agree_with_each_other(job, seed):
    report = analyse(generate(job, seed=seed).trace)
    whatif = report.whatif
    base, ideal = whatif.step_s(whatif.observed_s), whatif.step_s(whatif.ideal_s)

    assert report.slowdown == pytest.approx(base.mean() / ideal.mean(), rel=1e-12)
    assert report.waste == pytest.approx(1 - 1 / report.slowdown)
    assert report.heat.shape == (job.dp, job.pp)
    for name, value in report.by["worker"].items():
        dp, pp = name.split("/")
        assert value == min(report.by["dp"][dp], report.by["pp"][pp]) == report.heat[int(dp), int(pp)]
    assert list(report.step_slowdown.values()) == sorted(report.step_slowdown.values(), reverse=True)


def test_launch_delays_are_taken_apart_when_they_matter():
    """The replay without delays wins what the host took; the groups that were delayed carry it."""
    job = SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=4, launch_s=0.03)
    made = generate(job, seed=1)
    report = analyse(made.trace)
    without = generate(replace(job, launch_s=0.0), seed=1)

    assert report.detail["step_t_nodelay"] == pytest.approx(
        {str(i): t / 1e9 for i, t in enumerate(without.step_ns)}, rel=1e-9
    )
    assert report.launch_share == pytest.approx(1 - without.step_ns.sum() / made.step_ns.sum())
    by_type = report.detail["launch_decompose_by_optype"]
    assert next(iter(by_type)) in {"forward-compute", "backward-compute"}
    assert by_type["optimizer"] == pytest.approx(1.0, abs=1e-6)
    assert "first-op" in by_type
    per_step = report.detail["launch_decompose_by_stage_per_step"]
    assert set(per_step) == {"0", "1", "2", "3"}


def test_keeping_all_launch_delays_gives_the_observed_step_back():
    made = generate(SyntheticJob(dp=2, pp=3, num_microbatches=6, num_steps=3, launch_s=0.05), seed=4)
    whatif = analyse(made.trace).whatif
    delay = launch_delays(whatif.table, whatif.order)
    times = whatif.delayed_by(np.zeros(delay.shape, dtype=np.int64), delay)

    assert times[:, 0] == pytest.approx(made.step_ns / 1e9, rel=1e-12)
    assert times[:, 1] == pytest.approx(times[:, 0], rel=1e-12)
    assert times[:, 2] == pytest.approx(whatif.step_s(whatif.observed_s), rel=1e-12)


def test_a_saved_trace_gives_the_same_report(tmp_path):
    trace = generate(
        SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=3), seed=5, faults=[SyntheticFault("gc", 8.0)]
    ).trace
    straggler.write(trace, tmp_path / "published.parquet")
    trace.save(tmp_path / "own.parquet")
    expected = numbers(analyse(trace).to_json())

    for name in ("published", "own"):
        found = numbers(analyse(Trace.open(tmp_path / f"{name}.parquet")).to_json())
        assert found.keys() == expected.keys()
        assert all(found[k] == v or found[k] == pytest.approx(v, rel=1e-7) for k, v in expected.items()), name


# Published numbers


@pytest.fixture(scope="module", params=["AR", "SE"])
def published(request) -> tuple[str, Trace, StragglerReport]:
    trace = straggler.read(shared(f"straggler/trace-{request.param}.parquet"))
    return request.param, trace, analyse(trace)


@pytest.mark.parametrize("kind", ["result", "ms", "mw"])
def test_every_published_number_comes_out(published, kind):
    name, _, report = published
    detail = report.detail if kind == "result" else report.detail[kind]
    expected = numbers(json.loads(shared(f"straggler/{kind}-{name}.json").read_text()))
    found = numbers(detail)

    assert len(expected) > (100 if kind == "result" else 5)
    for path, value in expected.items():
        if isinstance(value, float):
            assert found[path] == pytest.approx(value, rel=1e-6), path
        else:
            assert path not in found or found[path] == value, path
            assert path in found or value is None, path


def test_the_numbers_do_not_need_the_meta_file(published):
    _, trace, report = published
    bare = replace(trace, meta={k: v for k, v in trace.meta.items() if k != "sizes"})

    assert analyse(bare).detail["mw"] == report.detail["mw"]


def test_float32_traces_need_float32_ends(published):
    """Ends formed in float64 move a transfer of 1 ms by up to 2 us: the published numbers then miss 1e-6."""
    name, trace, _ = published
    wide = replace(trace, meta={**trace.meta, "seconds": "float64"})
    result = json.loads(shared(f"straggler/result-{name}.json").read_text())
    error = abs(analyse(wide).detail["step_t_nodelay"]["16"] / result["step_t_nodelay"]["16"] - 1)

    assert 1e-9 < error < 1e-3


def test_the_published_causes_come_first(published):
    name, _, report = published
    causes = root_causes(report)
    names = [cause.cause for cause in causes]

    assert names[0] == {"AR": "straggler.worker", "SE": "straggler.sequence"}[name]
    assert report.sequence.imbalanced == (name == "SE")
    if name == "AR":
        assert "dp 0 / pp 0" in causes[0].where
        assert report.M_W >= 0.95
        assert report.sequence.r == pytest.approx(0.900, abs=1e-3)
        assert report.sequence.cv == pytest.approx(0.017, abs=1e-3)
    else:
        assert names.index("straggler.last_stage") > 0
        assert report.M_S > 0.5
        assert report.sequence.r == pytest.approx(0.993, abs=1e-3)
        assert report.sequence.cv == pytest.approx(0.219, abs=1e-3)


@pytest.mark.slow
def test_the_ideal_timeline_is_the_published_one():
    """Start of transfer, duration and end of each of the 107,328 operations."""
    trace = straggler.read(shared("straggler/trace-SE.parquet"))
    report = analyse(trace)
    events = [
        e
        for e in json.loads(gzip.decompress(shared("straggler/ideal-timeline-SE.json.gz").read_bytes()))
        if e["ph"] == "X"
    ]
    table = report.whatif.table
    _, end_s = report.whatif.ideal_times()
    begin: dict[int, float] = {}
    for event in events:
        step = event["args"]["step"]
        begin[step] = min(begin.get(step, np.inf), event["ts"])
    op_of = {(table.optype_of(op), int(table.seq[op]), int(table.stage[op])): op for op in range(table.shape[2])}
    stage_of = {int(rank): p for row in table.rank for p, rank in enumerate(row)}
    step_of = {int(step): i for i, step in enumerate(table.steps)}

    assert len(events) == len(trace)
    where = [
        (step_of[e["args"]["step"]], e["pid"], op_of[e["name"], e["args"]["seq_id"], stage_of[e["tid"] // 5]])
        for e in events
    ]
    at = tuple(np.array(where).T)
    end_us = np.array([e["ts"] + e["dur"] - begin[e["args"]["step"]] for e in events])
    spent_us = np.array([e["dur"] for e in events])
    assert np.abs(end_s[at] * 1e6 - end_us).max() < 1e-2
    assert np.abs(report.whatif.ideal_s[at] * 1e6 - spent_us).max() < 1e-2


def test_the_ideal_trace_keeps_rows_and_takes_the_ideal_time(published):
    _, trace, report = published
    ideal = ideal_trace(trace, report)

    assert len(ideal) == len(trace)
    again = analyse(ideal)
    assert again.detail["step_t_base"] == pytest.approx(report.detail["step_t_noblk"], rel=1e-6)
    assert again.slowdown == pytest.approx(1.0, abs=1e-6)


# Bad input


@pytest.mark.parametrize(("sizes", "name"), [((3, 2, 1), "dp_size"), ((2, 3, 1), "pp_size"), ((2, 2, 2), "vpp_size")])
def test_sizes_that_contradict_the_rows_are_refused(sizes, name):
    trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=0).trace

    with pytest.raises(InputError, match=rf"{name} is 3 but the rows show 2|{name} is 2 but the rows show 1"):
        analyse(trace, sizes=Sizes(*sizes))


def test_a_trace_that_is_no_operation_trace_is_refused():
    trace = Trace.from_columns({"rank": [0, 0], "start_ns": [0, 1]}, names=["matmul"], name=[0, 0])

    with pytest.raises(InputError, match="so this is no operation trace"):
        analyse(trace)


def test_the_json_has_text_keys_and_plain_numbers():
    report = analyse(generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=0).trace)
    again = json.loads(json.dumps(report.to_json(), allow_nan=False))

    assert set(again) == {"slowdown", "waste", "M_W", "M_S", "by", "step_slowdown", "detail"}
    assert again == report.to_json()
