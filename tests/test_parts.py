"""Parts: the same rows and codes as the whole trace, a rank at a time; and the same answers from them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking import arrivals
from headway.ledger.booking.rows import RankAccount
from headway.ledger.buckets import SUBS
from headway.sim.recorded.program import Program
from headway.trace.events import parquet
from headway.trace.events.parts import Parts
from headway.trace.events.trace import COLUMNS, Trace, concat
from headway.trace.readers.formats import describe, open_parts
from headway.trace.recording.runs import Run
from tests.paths import shared
from tests.refusals import refused
from tests.runs_made import MS, RunMaker, cut_short, joined, write_folder
from tests.traces_made import traces


@settings(max_examples=25)
@given(files=st.lists(traces(wide=False), min_size=1, max_size=3), size=st.sampled_from([1, 2, 1000]))
def test_parts_of_files_are_the_ranks_of_the_joined_trace(files, size, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    before, parquet.ROW_GROUP = parquet.ROW_GROUP, size
    paths = [folder / f"{number}.parquet" for number in range(len(files))]
    for path, trace in zip(paths, files, strict=True):
        parquet.write(trace, path)
    parquet.ROW_GROUP = before
    whole = concat(files)

    parts = Parts.of_files(paths)

    assert parts.whole() == whole
    assert list(parts.numbers) == np.unique(whole.events["rank"]).tolist()
    for rank, part, twin in zip(parts.numbers, parts, Parts.of(whole), strict=True):
        assert part == twin == whole.where(whole.events["rank"] == rank)


@settings(max_examples=40)
@given(trace=traces(wide=False), kept=st.sets(st.integers(-1, 5)))
def test_a_choice_of_ranks_keeps_their_rows_and_the_tables(trace, kept):
    parts = Parts.of(trace).select(kept)

    assert parts.whole() == trace.select(ranks=kept)
    assert set(parts.numbers) == kept & set(trace.events["rank"].tolist())


@settings(max_examples=30)
@given(trace=traces(wide=False))
def test_columns_that_are_not_asked_for_are_unknown_and_take_no_memory(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "a.parquet"
    parquet.write(trace, path)

    part = Parts.of_files([path]).read(columns=["start_ns"])

    assert part.events["start_ns"].tolist() == trace.events["start_ns"].tolist()
    assert part.events["bytes"].strides == (0,)
    assert part.events["peer"].tolist() == [COLUMNS["peer"][1]] * len(trace)


@settings(max_examples=30)
@given(trace=traces(wide=False))
def test_the_description_of_parts_is_that_of_the_trace(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "a.parquet"
    parquet.write(trace, path)

    assert describe(Parts.of_files([path])) == describe(trace)


def whole_answer(ledger: Ledger) -> dict[str, object]:
    """Return every number of a ledger."""
    return {
        "json": ledger.to_json(causes=find_causes(ledger)),
        "by_rank": {rank: dict(row) for rank, row in ledger.by_rank_ns.items()},
        "steps": ledger.step_ns.tolist(),
        "walls": ledger.step_wall_ns.tolist(),
        "lateness": repr(ledger.lateness),
        "spans": {name: repr(facts) for name, facts in ledger.spans.items()},
    }


MAKERS = {
    "ranks that wait for each other": RunMaker(ranks=3, steps=12, num_workers=2, fetch_ns=8 * MS, prep_ns=2 * MS,
                                               logging_ns=lambda rank, step: MS * (step % 3 == rank)),
    "collections in the main process": RunMaker(ranks=2, steps=9, fetch_ns=MS,
                                                gc_ns=lambda rank, step: MS * (step == 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_the_ledger_streamed_from_files_is_the_one_in_memory(name, tmp_path):
    made = MAKERS[name].make()
    folder = write_folder(made, tmp_path / "run")

    in_memory, streamed = Ledger.of(made), Ledger.of(Run.open(folder))
    bare, bare_streamed = Ledger.of(Trace.open(folder)), Ledger.of(open_parts([folder]))

    assert whole_answer(streamed) == whole_answer(in_memory)
    assert whole_answer(bare_streamed) == whole_answer(bare)


def test_so_it_is_over_attempts(tmp_path):
    first = RunMaker(ranks=2, steps=12, save_ns=lambda rank, step: 20 * MS * (step % 3 == 1)).make()
    at_ns = int(first.meta["end_ns"]) - 30 * MS
    second = RunMaker(ranks=2, steps=8, start_ns=at_ns, attempt=1, load_ns=5 * MS).make()
    made = joined(cut_short(first, at_ns), second)
    folder = write_folder(made, tmp_path / "run")

    assert whole_answer(Ledger.of(Run.open(folder))) == whole_answer(Ledger.of(made))


@pytest.mark.parametrize("together", [7, arrivals.TOGETHER])
def test_so_it_is_for_profiler_traces(together, tmp_path, monkeypatch):
    traces = [Trace.open(shared(f"kineto/sampled_rank-{rank}.json.gz")) for rank in (0, 1)]
    for rank, trace in enumerate(traces):
        parquet.write(trace, tmp_path / f"r{rank}.parquet")

    in_memory = whole_answer(Ledger.of(traces))
    monkeypatch.setattr(arrivals, "TOGETHER", together)

    assert whole_answer(Ledger.of(open_parts([tmp_path]))) == in_memory


def test_so_is_the_program(tmp_path):
    made = MAKERS["ranks that wait for each other"].make()
    folder = write_folder(made, tmp_path / "run")

    streamed = Program.from_run(Run.open(folder))
    in_memory = Program.from_trace(made.trace, json.loads((folder / "run.json").read_text()))

    assert streamed.predict(["workers=4"]) == in_memory.predict(["workers=4"])
    assert streamed.fidelity == in_memory.fidelity


test_no_file_at_all_is_refused = refused((lambda: Parts.of_files([]), "the list is empty"))


@st.composite
def calls(draw: st.DrawFn) -> Trace:
    """Random collectives and messages of three ranks inside two steps each."""
    table: list[tuple[int, str, int, int, int, int, int]] = []
    for rank in range(3):
        table.append((rank, "process", 0, 1000, -1, -1, -1))
        table += [(rank, "step", 100 + 400 * step, 400, -1, -1, -1) for step in range(2)]
        for _ in range(draw(st.integers(0, 6))):
            name = draw(st.sampled_from(["comm.wait", "comm.collective", "comm.send", "comm.recv"]))
            start, length = draw(st.integers(100, 800)), draw(st.integers(0, 90))
            ids = (draw(st.integers(0, 1)), draw(st.integers(-1, 3)), draw(st.integers(-1, 2)))
            table.append((rank, name, start, length, *ids))
    names = list(dict.fromkeys(row[1] for row in table))
    keys = ("rank", "name", "start_ns", "duration_ns", "group", "seq", "peer")
    columns = dict(zip(keys, zip(*table, strict=True), strict=True))
    return Trace.from_columns({**columns, "name": [names.index(name) for name in columns["name"]]}, names=names)


@pytest.mark.slow
@settings(max_examples=25)
@given(trace=calls(), together=st.integers(1, 4))
def test_matching_calls_a_few_at_a_time_changes_nothing(trace, together):
    whole = whole_answer(Ledger.of(trace))
    before, arrivals.TOGETHER = arrivals.TOGETHER, together
    few = whole_answer(Ledger.of(trace))
    arrivals.TOGETHER = before

    assert few == whole


AMOUNT = st.tuples(st.integers(0, len(SUBS) - 1), st.integers(0, 9), st.integers(0, 2**40))


@given(amounts=st.lists(AMOUNT, max_size=30))
def test_a_packed_sheet_holds_what_was_booked(amounts):
    sheet, twin = RankAccount.blank(8), np.zeros((len(SUBS), 10), np.int64)
    for line, column, amount in amounts:
        sheet.book(SUBS[line], column, amount)
        twin[line, column] += amount
        sheet.pack()

    assert sheet.totals().tolist() == twin.sum(axis=1).tolist()
    assert sheet.ns.tolist() == twin.tolist()
