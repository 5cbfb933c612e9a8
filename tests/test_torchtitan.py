"""torchtitan's JSONL: pairs become spans, in whatever order the lines stand; what is unbalanced is named."""

import gzip
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.ledger.answers.ledger import Ledger
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.readers.torchtitan import parse

START_US = 1_709_500_000_000_000


def line(side: str, name: str, time_us: int, seq: int, **more: object) -> dict[str, object]:
    """Return one record as torchtitan 0.3 writes it, its other fields included."""
    fields = {
        "delta_ms": 0.1, "tid": 7, "rank": 0, "global_rank": 0, "local_rank": 0, "source": "training",
        "host_name": "h0", "pid": 7, "step": 1, "relative_step": 1, "time": time_us // 10**6, "time_us": time_us,
        "log_type": "event", "log_type_name": f"{name}_{side}", "event_name": None, "caller": "trainer.py:1:step",
        "seq_id": seq, "message": "",
    }  # fmt: skip
    return fields | more


def scalar(name: str, value: float, time_us: int, seq: int, **more: object) -> dict[str, object]:
    """Return the record of a scalar."""
    fields = {"log_type": "instant", "log_type_name": "metric_value", "event_name": name, "value": value}
    return line("", "", time_us, seq, **fields, **more)


Span = tuple[str, int, int, int]
"""Name, start in us, end in us, step."""


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Span], list[dict[str, object]]]:
    """Random properly nested spans, and their records in the order in which they were written."""
    spans: list[Span] = []
    records: list[dict[str, object]] = []
    clock = START_US

    def run_some(depth: int) -> None:
        nonlocal clock
        for _ in range(draw(st.integers(0, 3))):
            clock += draw(st.integers(0, 50))
            name, step = draw(st.sampled_from(["fwd_bwd", "Optimizer", "gc_collect"])), draw(st.integers(1, 4))
            begin = clock
            records.append(line("start", name, begin, len(records), step=step))
            if depth < 3:
                run_some(depth + 1)
            clock += draw(st.integers(0, 50))
            records.append(line("end", name, clock, len(records), step=step, value=1.0))
            spans.append((name, begin, clock, step))

    run_some(0)
    return spans, records


def encode(found: list[dict[str, object]]) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in found]


@given(job=jobs(), seed=st.integers(0, 99))
def test_every_pair_becomes_a_span_whatever_the_order_of_lines(job, seed):
    spans, records = job
    lines = encode(records)
    random.Random(seed).shuffle(lines)

    trace = parse(lines, "a.jsonl")

    found = [
        (trace.name_of(i), int(start), int(start + duration), int(step))
        for i, (start, duration, step) in enumerate(
            zip(*(trace.events[c].tolist() for c in ("start_ns", "duration_ns", "step")), strict=True)
        )
    ]
    assert sorted(found) == sorted((name, begin * 1000, end * 1000, step) for name, begin, end, step in spans)
    assert "open" not in trace.meta


def test_kinds_ranks_lanes_and_depths_are_told(tmp_path):
    for rank in (0, 3):
        who = {"rank": rank, "pid": 40 + rank}
        rows = [
            line("start", "train_step", START_US, 0, **who), line("start", "fwd_bwd", START_US + 5, 1, **who),
            line("end", "fwd_bwd", START_US + 9, 2, **who), line("end", "train_step", START_US + 20, 3, **who),
            line("start", "save_checkpoint", START_US + 6, 4, tid=99, **who),
            line("end", "save_checkpoint", START_US + 7, 5, tid=99, **who),
            scalar("loss", 2.5, START_US + 8, 6, **who),
            line("start", "rollout", START_US + 1, 7, task_name="Task-1", **who),
            line("end", "rollout", START_US + 3, 8, task_name="Task-1", **who),
        ]  # fmt: skip
        (tmp_path / f"training.global_rank_{rank}.jsonl").write_bytes(b"".join(encode(rows)))

    trace = Trace.open(tmp_path)

    assert sorted(trace.ranks) == [0, 3]
    assert set(trace.lanes) == {"main", "thread 99", "Task-1"}
    mine = trace.select(ranks=[3])
    told = {mine.name_of(i): int(mine.events["kind"][i]) for i in range(len(mine))}
    assert told == {
        "train_step": KIND["HOST"], "fwd_bwd": KIND["COMPUTE"], "save_checkpoint": KIND["CKPT"], "loss": KIND["MARK"],
        "rollout": KIND["HOST"],
    }  # fmt: skip
    assert {mine.name_of(i): int(mine.events["depth"][i]) for i in range(len(mine))}["fwd_bwd"] == 1


def test_gzip_and_plain_give_the_same_trace(tmp_path):
    data = b"".join(encode([line("start", "a", START_US, 0), line("end", "a", START_US + 4, 1)]))
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))

    assert Trace.open(tmp_path / "a.jsonl") == Trace.open(tmp_path / "b.jsonl.gz")


def test_a_span_that_the_end_of_the_job_cut_is_kept_open_and_counted():
    rows = [line("start", "train_step", START_US, 0), line("start", "fwd_bwd", START_US + 10, 1)]
    rows += [line("end", "fwd_bwd", START_US + 30, 2)]

    trace = parse(encode(rows), "a.jsonl")

    assert trace.meta["open"] == 1
    assert trace.events["duration_ns"].tolist() == [30_000, 20_000]


def test_an_end_without_a_start_names_the_span_and_the_step():
    with pytest.raises(
        FormatError, match=r"'fwd_bwd' ends in step 12 \(record 4\) but never starts. Give the whole file"
    ):
        parse(encode([line("end", "fwd_bwd", START_US, 4, step=12)]), "a.jsonl")


def test_a_last_line_that_was_cut_is_left_out_with_a_warning(caplog):
    lines = encode(
        [line("start", "a", START_US, 0), line("end", "a", START_US + 4, 1), line("start", "b", START_US, 2)]
    )

    trace = parse([*lines[:2], lines[2][:40]], "a.jsonl")

    assert (len(trace), trace.meta["truncated_bytes"]) == (1, 40)
    assert "ends inside a record" in caplog.text


def test_a_byte_that_is_no_utf_8_is_damage_too():
    lines = encode([line("start", "a", START_US, 0), line("end", "a", START_US + 4, 1)])

    with pytest.raises(FormatError, match=r"the line at byte 0 is damaged: .*utf-8"):
        parse([lines[0].replace(b"a_start", b"\xf1_start"), lines[1]], "a.jsonl")


def test_a_line_in_the_middle_that_is_damaged_tells_the_byte():
    lines = encode([line("start", "a", START_US, 0), line("end", "a", START_US + 4, 1)])

    with pytest.raises(FormatError, match=rf"the line at byte {len(lines[0])} is damaged"):
        parse([lines[0], b'{"time_us": 3,\n', lines[1]], "a.jsonl")
    with pytest.raises(FormatError, match=rf"the line at byte {len(lines[0])} is no record.*missing required field"):
        parse([lines[0], b'{"rank": 3}\n', lines[1]], "a.jsonl")


def test_a_loss_that_is_no_number_does_not_stop_the_reading():
    scalar = line(
        "", "", START_US, 0, log_type="instant", log_type_name="metric_value", event_name="loss", value=float("nan")
    )

    assert len(parse(encode([scalar]), "a.jsonl")) == 1


def test_a_clock_that_was_set_back_gives_way_to_the_measured_value():
    rows = [line("start", "a", START_US, 0), line("end", "a", START_US - 500, 1, value=2.5)]

    assert parse(encode(rows), "a.jsonl").events["duration_ns"].tolist() == [2_500_000]
    with pytest.raises(FormatError, match="ends before it starts in step 1"):
        parse(encode([rows[0], {k: v for k, v in rows[1].items() if k != "value"}]), "a.jsonl")


def test_the_ledger_of_such_a_job_is_its_spans_even_if_one_is_called_step():
    rows, now = [], START_US
    for step in range(5):
        rows.append(line("start", "step", now, len(rows), step=step))
        for name, us in (("fetching_batch", 300), ("fwd_bwd", 600), ("Optimizer", 100)):
            rows.append(line("start", name, now, len(rows), step=step))
            now += us
            rows.append(line("end", name, now, len(rows), step=step))
        rows.append(line("end", "step", now, len(rows), step=step))

    ledger = Ledger.of(parse(encode(rows), "a.jsonl"))

    assert ledger.steps == 5
    assert ledger.ledger_ns["input"] == 5 * 300_000
    assert ledger.ledger_ns["useful"] == 5 * 700_000
