"""Headway's own Parquet: what is read is what was written."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.trace.events import parquet
from headway.trace.events.trace import COLUMNS, Trace
from tests.traces_made import traces


@pytest.mark.slow
@given(trace=traces())
def test_reading_gives_back_what_was_written(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    parquet.write(trace, path)

    back = parquet.read(path)

    assert back == trace
    assert {column: values.dtype for column, values in back.events.items()} == {
        column: np.dtype(dtype) for column, (dtype, _) in COLUMNS.items()
    }


def test_an_event_takes_about_ten_bytes(tmp_path):
    rng = np.random.default_rng(0)
    n = 100_000
    trace = Trace.from_columns(
        {
            "rank": np.full(n, 3), "step": np.arange(n) // 50, "kind": rng.integers(0, 10, n),
            "name": rng.integers(0, 60, n), "lane": rng.integers(0, 4, n),
            "start_ns": 10**18 + np.cumsum(rng.integers(500, 40_000, n)),
            "duration_ns": rng.lognormal(9, 1.5, n).astype(np.int64), "group": rng.integers(-1, 3, n),
            "seq": np.arange(n) // 3, "corr": np.arange(n) // 2,
        },
        names=[f"op {i}" for i in range(60)],
        lanes=["main", "stream 7", "stream 20", "loader/0"],
    )  # fmt: skip

    trace.save(tmp_path / "a.parquet")

    assert (tmp_path / "a.parquet").stat().st_size <= 12 * n


def test_other_tools_can_open_the_columns(tmp_path):
    Trace.from_columns({"start_ns": [3, 4]}).save(tmp_path / "a.parquet")

    table = pq.read_table(tmp_path / "a.parquet")

    assert table.column_names == list(COLUMNS)
    assert table["start_ns"].to_pylist() == [3, 4]


def test_numpy_values_in_the_tables_become_plain_ones(tmp_path):
    trace = Trace.from_columns({}, meta={"sizes": np.arange(3), "world_size": np.int64(4), "tp": (1, 2)})
    trace.save(tmp_path / "a.parquet")

    assert parquet.read(tmp_path / "a.parquet").meta == {"sizes": [0, 1, 2], "world_size": 4, "tp": [1, 2]}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"a": {1: "x"}}, r"meta\.a has the key 1.*Write it as '1'"),
        ({"a": [object()]}, r"meta\.a\[0\] is a object.*Keep to text"),
    ],
)
def test_a_table_that_json_cannot_hold_is_refused_and_leaves_no_file(meta, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Trace.from_columns({}, meta=meta).save(tmp_path / "a.parquet")

    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SCHEMA", "headway.trace/9")
    Trace.from_columns({}).save(tmp_path / "a.parquet")
    monkeypatch.undo()

    with pytest.raises(FormatError, match=r"schema 'headway\.trace/9'; this version reads 'headway\.trace/1'.*Open it"):
        Trace.open(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-50], lambda data: data[: len(data) // 2] + b"\xff\0" + data[len(data) // 2 + 2 :]]
)
def test_a_truncated_file_and_flipped_bytes_in_the_data_are_found(damage, tmp_path):
    path = tmp_path / "a.parquet"
    Trace.from_columns({"start_ns": np.random.default_rng(0).integers(0, 2**60, 5000)}).save(path)
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        parquet.read(path)


def test_foreign_parquet_is_named_as_such(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")

    assert not parquet.is_ours(tmp_path / "a.parquet")
    assert parquet.columns_of(tmp_path / "a.parquet") == ("x",)
    with pytest.raises(FormatError, match="not a headway trace"):
        parquet.read(tmp_path / "a.parquet")


def test_a_missing_folder_says_so(tmp_path):
    with pytest.raises(InputError, match=r"folder .*gone does not exist\. Create it"):
        Trace.from_columns({}).save(tmp_path / "gone" / "a.parquet")


def test_a_writer_killed_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.parquet"
    old = Trace.from_columns({"start_ns": [7]})
    old.save(path)
    code = textwrap.dedent(
        """
        import os, signal, sys
        from headway.core.files.safe_files import whole_file
        with whole_file(sys.argv[1]) as draft:
            draft.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )

    ended = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ}, check=False)

    assert ended.returncode == -signal.SIGKILL
    assert Trace.open(path) == old


@given(data=st.data(), n=st.integers(1, 9))
def test_listed_edges_survive_and_others_are_not_invented(data, n, tmp_path_factory):
    path = tmp_path_factory.mktemp("edges") / "a.parquet"
    ends = st.lists(st.integers(0, n - 1), min_size=3, max_size=3)
    trace = Trace.from_columns({"start_ns": np.arange(n)}, edges=[data.draw(ends), data.draw(ends)])
    trace.save(path)

    assert Trace.open(path) == trace
    assert Trace.from_columns({"start_ns": np.arange(n)}) != trace
