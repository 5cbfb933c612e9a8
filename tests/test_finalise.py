"""Finalising: every record becomes one row, in its step; loads are partitioned; what is lost is counted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.finalise import facts, finalise, finalise_attempt
from headway.trace import parquet
from headway.trace.assemble import build, by_rank
from headway.trace.loads import CHILDREN, Loads
from headway.trace.records import RECORD_DTYPE
from headway.trace.ring import LOADER
from headway.trace.spool import pack, recorded, stems, unpack
from headway.trace.steps import cycles, step_bounds, step_of
from headway.trace.trace import Trace
from headway.trace.vocabulary import KIND, SPANS
from tests.rings_made import Process


def built(run: Path, rank: int = 0) -> Trace:
    """Return the trace of one rank without writing it."""
    return build(by_rank(stems(run / "rings"))[rank], rank=rank, attempt=0, run=run)


def rows(trace: Trace, name: str) -> list[tuple[int, int]]:
    """Return (start, duration) of the rows of one name."""
    mask = trace.named(name)
    return list(zip(trace.events["start_ns"][mask].tolist(), trace.events["duration_ns"][mask].tolist(), strict=True))


@given(
    optimizers=st.integers(1, 4),
    repeats=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    steps=st.integers(1, 12),
)
def test_a_fixed_cycle_of_updates_makes_one_step_each(optimizers, repeats, steps):
    # The first optimizer stands once in a cycle: where it repeats, the next step begins.
    cycle = [index for index in range(optimizers) for _ in range(repeats[index] if index else 1)]
    found = cycles(np.array(cycle * steps, np.int64))

    expected = [len(cycle) * (k + 1) - 1 for k in range(steps)]
    assert found.tolist() == (expected if steps > 1 or len(set(cycle)) == len(cycle) else found.tolist())


@given(st.lists(st.integers(0, 3), max_size=40))
def test_step_ends_are_rising_and_within_the_updates(optimizer):
    found = cycles(np.array(optimizer, np.int64)).tolist()

    assert found == sorted(set(found))
    assert not found or 0 <= found[0] <= found[-1] < len(optimizer)


@pytest.mark.parametrize(
    ("updates", "ends"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([0, 1, 0, 1], [1, 3]),
        ([0, 1, 1, 0, 1, 1], [2, 5]),
        ([0, 1, 0], [1]),  # killed between the two updates: the last step is not complete
        ([0, 0, 1, 1, 1], [0, 2, 3, 4]),  # a second phase with an optimizer of its own
        ([], []),
    ],
)
def test_a_step_ends_when_the_first_optimizer_repeats(updates, ends):
    assert cycles(np.array(updates, np.int64)).tolist() == ends


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=1, max_size=20))
def test_the_parts_of_a_load_and_its_collections_add_up_to_it(loads):
    columns = [np.array(column, np.int64) for column in zip(*loads, strict=True)]
    parts = Loads.parts_of(*columns)

    assert all((part >= 0).all() for part in parts)
    assert (sum(parts) + np.clip(columns[4], 0, columns[0]) == columns[0]).all()


def test_every_record_is_a_row_with_its_columns_and_its_step(tmp_path):
    process = Process(tmp_path)
    process.train(3)
    process.write("checkpoint.save", 7_000, 4096, 0)
    trace = built(tmp_path)

    assert trace.meta["num_steps"] == 3
    assert trace.events["step"][trace.named("optimizer.step")].tolist() == [0, 1, 2]
    waits = trace.named("input.next")
    assert trace.events["step"][waits].tolist() == [0, 1, 2]
    assert trace.events["seq"][waits].tolist() == [0, 1, 2]
    save = trace.where(trace.named("checkpoint.save"))
    assert (save.events["step"][0], save.events["bytes"][0], save.events["kind"][0]) == (3, 4096, KIND["CKPT"])


def test_step_marks_reach_from_update_to_update_and_the_first_from_the_first_wait(tmp_path):
    process = Process(tmp_path)
    begin = process.now_ns
    process.train(2, step_ns=1_000_000)
    marks = rows(built(tmp_path), "step")

    assert marks == [(begin, 1_050_000), (begin + 1_050_000, 1_000_000)]


def test_a_load_in_the_main_process_lies_in_its_wait_and_its_children_in_it(tmp_path):
    process = Process(tmp_path)
    start = process.now_ns
    process.write("input.load", 1_000_000, 0, 0, -1, 64, start_ns=start + 1000)
    process.write("input.parts", 0, 600_000, 100_000, 200_000, 0, start_ns=start + 1000)
    process.write("input.next", 1_002_000, 0, 0, -1, 0, start_ns=start)
    trace = built(tmp_path)
    depth = {trace.name_of(i): int(trace.events["depth"][i]) for i in range(len(trace))}
    durations = {name: rows(trace, name)[0][1] for name in CHILDREN}

    assert (depth["input.next"], depth["input.load"], depth["input.prep"]) == (0, 1, 2)
    assert list(durations.values()) == [300_000, 100_000, 400_000, 200_000]
    assert rows(trace, "input.fetch")[0][0] == start + 1000
    assert not trace.named("input.parts").any()


def test_children_leave_the_time_of_a_collection_free(tmp_path):
    process = Process(tmp_path)
    start = process.now_ns
    process.write("host.gc", 100_000, 2, 5, start_ns=start + 250_000)
    process.write("input.load", 1_000_000, 0, 0, -1, 64, start_ns=start)
    process.write("input.parts", 0, 700_000, 0, 0, 100_000, start_ns=start)
    trace = built(tmp_path)

    assert rows(trace, "input.fetch") == [(start, 250_000), (start + 350_000, 50_000)]
    assert rows(trace, "input.prep") == [(start + 400_000, 600_000)]


def test_short_loads_that_were_not_measured_get_the_shares_of_those_that_were(tmp_path):
    process = Process(tmp_path)
    for index in range(4):
        start = process.write("input.load", 1000, 0, index, -1, 8)
        if index == 0:
            process.write("input.parts", 0, 600, 0, 100, 0, start_ns=start)
    trace = built(tmp_path)

    assert [d for _, d in rows(trace, "input.fetch")] == [400] * 4
    assert [d for _, d in rows(trace, "input.collate")] == [100] * 4


def test_loads_of_workers_are_lanes_of_their_rank_and_know_their_iterator(tmp_path):
    main = Process(tmp_path)
    worker = Process(tmp_path, role=LOADER)
    worker.recorder.set_worker(1)
    pid = stems(tmp_path / "rings")[0].name.partition("-p")[2]
    for life, iterator in enumerate((7, 8)):
        main.write("input.worker", 0, 3, iterator, 1, int(pid.split("-")[0]))
        worker.write("input.load", 500_000, life, 0, 1, 64)
    trace = built(tmp_path)
    loads = trace.where(trace.named("input.load"))

    assert [trace.lanes[lane] for lane in loads.events["lane"]] == ["loader/1", "loader/1"]
    assert loads.events["group"].tolist() == [3, 3]
    assert loads.events["corr"].tolist() == [7, 8]
    assert loads.events["depth"].tolist() == [0, 0]


def test_overwritten_records_are_one_row_with_their_count(tmp_path):
    process = Process(tmp_path, capacity=16)
    for _ in range(100):
        process.write("host.logging", 10, 20)
    trace = built(tmp_path)
    lost = trace.where(trace.named("dropped"))

    assert int(lost.events["bytes"].sum()) + int(trace.named("host.logging").sum()) == 100
    assert trace.meta["dropped"] == int(lost.events["bytes"].sum()) > 0


def test_the_process_row_covers_everything_on_its_lane(tmp_path):
    process = Process(tmp_path)
    process.train(2)
    process.recorder.close()
    trace = built(tmp_path)
    (start, duration), others = rows(trace, "process")[0], trace.where(~trace.named("process"))

    assert start <= others.span_ns[0]
    assert start + duration >= others.span_ns[1]


def test_finalising_writes_one_file_per_rank_and_attempt_and_removes_the_rings(tmp_path):
    for attempt in (0, 1):
        for rank in (0, 1):
            Process(tmp_path, rank=rank, attempt=attempt).train(2)
    expected = {f"a{a}-r{r}.parquet" for a in (0, 1) for r in (0, 1)}

    assert {path.name for path in finalise(tmp_path)} == expected
    assert list((tmp_path / "rings").iterdir()) == []
    assert parquet.read(tmp_path / "events" / "a1-r1.parquet").events["rank"].tolist()[0] == 1
    assert finalise(tmp_path) == []


def test_one_rank_under_another_launcher_leaves_its_peers_rings_alone(tmp_path):
    for rank in (0, 1):
        Process(tmp_path, rank=rank).train(1)

    assert [path.name for path in finalise_attempt(tmp_path, 0, rank=1)] == ["a0-r1.parquet"]
    assert len(stems(tmp_path / "rings")) == 1


def test_the_facts_of_a_run_come_from_what_the_ranks_wrote(tmp_path):
    Process(tmp_path).train(10)
    finalise(tmp_path)
    for part, content in (("loaders", {"0": {"num_workers": 2}}), ("applied", [{"name": "host.gc"}])):
        (tmp_path / part).mkdir()
        (tmp_path / part / "r0.json").write_text(json.dumps(content))
    found = facts(tmp_path)

    assert found["loaders"] == {"0": {"num_workers": 2}}
    assert found["applied"] == [{"name": "host.gc"}]
    assert found["bytes_per_step"] == round((tmp_path / "events/a0-r0.parquet").stat().st_size / 10, 1)


def test_a_sealed_piece_is_what_was_packed_and_much_smaller():
    rng = np.random.default_rng(0)
    records = np.zeros(10_000, RECORD_DTYPE)
    records["number"] = np.arange(1, 10_001)
    records["start_ns"] = np.cumsum(rng.integers(1, 100_000, 10_000)) + 10**15
    records["duration_ns"] = rng.integers(1, 50_000, 10_000)
    records["code"] = rng.choice([span.code for span in SPANS.values()], 10_000)
    packed = pack(records)

    assert (unpack(packed) == records).all()
    assert len(packed) < records.nbytes / 6


def test_a_ring_without_a_header_is_left_out(tmp_path):
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "a0-r0-p1.ring").write_bytes(b"")

    assert recorded(tmp_path / "rings" / "a0-r0-p1") is None
    assert finalise(tmp_path) == []


def test_moments_before_between_and_behind_the_steps():
    bounds = step_bounds(np.array([0, 0]), np.array([10, 30]), np.array([5, 5]), first_ns=None)

    assert bounds.tolist() == [10, 15, 35]
    assert step_of(np.array([9, 10, 14, 15, 35]), bounds).tolist() == [-1, 0, 0, 1, 2]
    assert step_of(np.array([3]), np.empty(0, np.int64)).tolist() == [-1]


def test_the_work_of_finalising_grows_with_the_records_not_with_their_square(tmp_path):
    spent = []
    for n in (50_000, 200_000):
        run = tmp_path / str(n)
        records = np.zeros(n, RECORD_DTYPE)
        records["number"] = np.arange(1, n + 1)
        records["start_ns"] = np.arange(n) * 1000 + 10**12
        records["duration_ns"] = 900
        records["code"] = np.tile([SPANS["input.next"].code, SPANS["optimizer.step"].code], n // 2)
        Process(run)
        stem = stems(run / "rings")[0]
        stem.with_name(stem.name + ".00000.sealed").write_bytes(pack(records))
        before = time.process_time()
        finalise(run)
        spent.append(time.process_time() - before)

        assert len(parquet.read(run / "events" / "a0-r0.parquet")) == n + n // 2 + 1
    assert spent[1] < 10 * max(spent[0], 0.05)
