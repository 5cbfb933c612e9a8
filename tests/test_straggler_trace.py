"""Reader and writer of published operation traces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
from headway.core.errors import FormatError, InputError
from headway.trace.events.trace import Trace
from headway.trace.readers.straggler import OPTYPES, REQUIRED, Sizes, operations, read, sizes_of, write
from tests.paths import shared

JOB = SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2)


@pytest.fixture
def made() -> Trace:
    return generate(JOB, seed=1, faults=[SyntheticFault("worker", 1.5)]).trace


def changed(path: Path, column: str, values: pa.Array | None) -> Path:
    """Write the file again with one column replaced, or dropped."""
    table = pq.read_table(path)
    at = table.column_names.index(column)
    table = table.remove_column(at) if values is None else table.set_column(at, column, values)
    pq.write_table(table, path)
    return path


@settings(max_examples=30)
@given(
    times=st.lists(
        st.tuples(st.integers(-(10**15), 10**15), st.integers(0, 10**14), st.sampled_from(sorted(OPTYPES))), max_size=20
    )
)
def test_what_is_written_is_read_to_one_nanosecond(times, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.parquet"
    start, duration, optypes = zip(*times, strict=True) if times else ((), (), ())
    trace = operations(
        {"rank": [0] * len(times), "seq": range(len(times)), "start_ns": start, "duration_ns": duration},
        optypes=optypes,
        coordinates={0: (0, 0)},
    )
    write(trace, path)
    back = read(path)

    for column in ("start_ns", "duration_ns"):
        # 10**15 ns are 11 days: float64 seconds hold them to 1 ns.
        assert np.abs(back.events[column] - trace.events[column]).max(initial=0) <= 1
    assert [back.name_of(i) for i in range(len(back))] == list(optypes)


def test_every_column_and_table_survives(made, tmp_path):
    write(made, tmp_path / "trace.parquet")
    back = read(tmp_path / "trace.parquet")

    for column, values in made.events.items():
        if column != "name":
            assert np.array_equal(back.events[column], values), column
    assert [back.name_of(i) for i in range(len(back))] == [made.name_of(i) for i in range(len(made))]
    assert back.ranks == made.ranks
    assert back.lanes == made.lanes
    assert sizes_of(back) == sizes_of(made)


@pytest.mark.parametrize("coded", [True, False], ids=["dictionary", "text"])
def test_a_file_in_several_row_groups_is_read_whole(coded, made, tmp_path):
    """Each group may bring a dictionary of its own; types may also be plain text."""
    write(made, tmp_path / "one.parquet")
    table = pq.read_table(tmp_path / "one.parquet")
    if not coded:
        text = table["optype"].cast(pa.string())
        table = table.set_column(table.column_names.index("optype"), "optype", text)
    parts = [table.slice(0, 40), table.slice(40)]
    if coded:
        parts = [part.set_column(part.column_names.index("optype"), "optype",
                                 part["optype"].cast(pa.string()).dictionary_encode()) for part in parts]  # fmt: skip
    with pq.ParquetWriter(tmp_path / "many.parquet", parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    back = read(tmp_path / "many.parquet")

    assert [back.name_of(i) for i in range(len(back))] == [made.name_of(i) for i in range(len(made))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AR", "SE"])
def test_a_published_file_survives_reading_and_writing(name, tmp_path):
    source = shared(f"straggler/trace-{name}.parquet")
    write(read(source), tmp_path / "copy.parquet")
    theirs, ours = pq.read_table(source), pq.read_table(tmp_path / "copy.parquet")

    assert set(ours.column_names) == set(theirs.column_names)
    for column in ("start_ts", "duration"):
        assert ours[column].type == pa.float32()
        apart = np.abs(ours[column].to_numpy().astype(float) - theirs[column].to_numpy().astype(float))
        assert apart.max() <= 1e-9
    for column in sorted(set(theirs.column_names) - {"start_ts", "duration"}):
        assert ours[column].to_pylist() == theirs[column].to_pylist(), column


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_a_published_time_is_read_to_one_nanosecond(name):
    source = shared(f"straggler/trace-{name}.parquet")
    trace, table = read(source), pq.read_table(source)

    for ours, theirs in (("start_ns", "start_ts"), ("duration_ns", "duration")):
        exact = table[theirs].to_numpy().astype(np.longdouble) * 10**9
        assert np.abs(trace.events[ours] - exact).max() <= 0.5


def test_sizes_come_from_the_meta_file_beside_the_trace():
    sizes = sizes_of(read(shared("straggler/trace-AR.parquet")))

    assert sizes == Sizes(dp_size=4, pp_size=4, tp_size=4, world_size=64, trial_name="AR")


def test_sizes_come_from_the_rows_when_no_file_tells_them(made):
    bare = replace(made, meta={"source": "straggler"})

    assert sizes_of(bare) == Sizes(dp_size=2, pp_size=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_size: [1", r"meta-x\.yaml is no YAML that headway reads"),
        ("dp_size: 2", "'dp_size' and 'pp_size' are required"),
    ],
)
def test_a_meta_file_without_sizes_is_refused(text, message, made, tmp_path):
    write(replace(made, meta={}), tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text(text)

    with pytest.raises(FormatError, match=message):
        read(tmp_path / "trace-x.parquet")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        *((column, None, f"lacks the column '{column}'") for column in REQUIRED),
        ("rank", np.int8(0), "A rank has one place"),
        ("rank", "a", "not integers"),
        ("duration", "1", "not seconds"),
    ],
)
def test_a_column_that_is_missing_or_of_another_type_is_named(column, value, message, made, tmp_path):
    write(made, tmp_path / "t.parquet")

    with pytest.raises(FormatError, match=message):
        read(changed(tmp_path / "t.parquet", column, None if value is None else pa.array([value] * len(made))))


@pytest.mark.parametrize(
    ("column", "bad", "message"),
    [
        ("duration", float("nan"), r"duration of row 3 .* is nan.*[Dd]rop the row"),
        ("duration", -1.0, r"duration of row 3 .* is -1\.0.*[Dd]rop the row"),
        ("start_ts", float("inf"), r"start_ts of row 3 .* is inf"),
        ("start_ts", None, "has 1 empty cells in 'start_ts'"),
    ],
)
def test_a_time_that_is_none_is_refused_with_its_row(column, bad, message, made, tmp_path):
    write(made, tmp_path / "t.parquet")
    values = pq.read_table(tmp_path / "t.parquet")[column].to_pylist()
    values[3] = bad

    with pytest.raises(FormatError, match=message):
        read(changed(tmp_path / "t.parquet", column, pa.array(values, pa.float64())))


def test_what_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "t.parquet").write_text("no")

    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        read(tmp_path / "t.parquet")


def test_a_trace_without_coordinates_cannot_be_written(made, tmp_path):
    with pytest.raises(InputError, match="rank 0 has no 'dp' and 'pp' coordinates"):
        write(replace(made, ranks={}), tmp_path / "t.parquet")


def test_an_operation_without_a_type_cannot_be_written(tmp_path):
    trace = Trace.from_columns({"rank": [0]}, ranks={0: {"dp": 0, "pp": 0}})

    with pytest.raises(InputError, match="has no operation type"):
        write(trace, tmp_path / "t.parquet")


@pytest.mark.parametrize("bad", [0, -1, 2.5])
def test_sizes_that_are_none_are_refused(bad):
    with pytest.raises(InputError, match="dp_size is"):
        Sizes(dp_size=bad, pp_size=1)
