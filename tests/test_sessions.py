"""Clustering by session: the same rows, each session in one piece, in time order inside."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.core.rng import stream
from headway.data.sessions import BATCH, cluster_parquet, session_order, sessions_per_batch
from tests.paths import ROOT, python_path


def log(num_rows: int = 600, num_sessions: int = 40) -> pa.Table:
    """A log as it is written: sessions interleaved, in time order, each row with the id list of its session."""
    rng = stream(1, "log")
    session = rng.integers(0, num_sessions, num_rows)
    lists = [rng.integers(0, 1 << 40, 20) for _ in range(num_sessions)]
    return pa.table({
        "session": [f"user {number}" for number in session],
        "time": rng.permutation(num_rows),
        "row": np.arange(num_rows),
        "ids": [lists[number] for number in session],
        "label": pa.array(rng.random(num_rows) < 0.1),
    }).replace_schema_metadata({"made by": "a test"})  # fmt: skip


def runs(values: list) -> int:
    return 1 + sum(a != b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("memory_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize(("time", "shuffle"), [(None, None), ("time", None), ("time", 7)])
def test_every_row_is_there_once_and_each_session_in_one_piece_in_order(tmp_path, time, shuffle, memory_bytes):
    pq.write_table(log(), tmp_path / "in.parquet", row_group_size=100)

    done = cluster_parquet(
        tmp_path / "in.parquet", tmp_path / "out.parquet", time=time, shuffle=shuffle, memory_bytes=memory_bytes
    )

    after = pq.read_table(tmp_path / "out.parquet")
    assert after.sort_by("row").equals(pq.read_table(tmp_path / "in.parquet"), check_metadata=True)
    assert runs(after["session"].to_pylist()) == done.num_sessions == 40
    keys = list(zip(after["session"].to_pylist(), after[time or "row"].to_pylist(), strict=True))
    assert all(a[0] != b[0] or a[1] < b[1] for a, b in itertools.pairwise(keys))
    first_seen = list(dict.fromkeys(log()["session"].to_pylist()))
    assert (list(dict.fromkeys(after["session"].to_pylist())) == first_seen) == (shuffle is None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_lists_are_written_without_a_dictionary_and_the_figures_are_those_of_the_files(tmp_path):
    pq.write_table(log(), tmp_path / "in.parquet")

    done = cluster_parquet(tmp_path / "in.parquet", tmp_path / "out.parquet", batch_size=30)

    group = pq.ParquetFile(tmp_path / "out.parquet").metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    assert not any("DICTIONARY" in coding for coding in encodings["ids.list.element"])
    assert any("DICTIONARY" in coding for coding in encodings["session"])
    assert done.sessions_per_batch_before == sessions_per_batch(log()["session"].to_numpy(), 30) > 15
    assert done.sessions_per_batch_after < 4
    assert done.bytes_after == (tmp_path / "out.parquet").stat().st_size < done.bytes_before
    assert done.rows_per_session == 15


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 99), st.integers(0, 3))
def test_a_shuffle_of_sessions_holds_every_row_once_and_leaves_sessions_whole(rows, seed, epoch):
    order = session_order(rows, seed, epoch)

    assert sorted(order.tolist()) == list(range(len(rows)))
    assert not rows or runs(np.asarray(rows)[order].tolist()) == len(set(rows))
    within = {session: [row for row in order.tolist() if rows[row] == session] for session in rows}
    assert all(found == sorted(found) for found in within.values())


def test_sessions_come_in_another_order_each_epoch():
    rows = np.repeat(np.arange(50), 4)

    assert (session_order(rows, 1, 0) != session_order(rows, 1, 1)).any()
    assert (session_order(rows, 1, 0) == session_order(rows, 1, 0)).all()


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 9))
def test_sessions_per_batch_is_the_mean_that_it_says(rows, size):
    sets = [set(rows[start : start + size]) for start in range(0, len(rows), size)]

    assert sessions_per_batch(rows, size) == pytest.approx(np.mean([len(s) for s in sets]) if sets else 0)


def test_an_empty_table_stays_one(tmp_path):
    pq.write_table(log().slice(0, 0), tmp_path / "in.parquet")

    done = cluster_parquet(tmp_path / "in.parquet", tmp_path / "out.parquet", time="time", memory_bytes=1)

    assert (done.num_rows, done.num_sessions, done.rows_per_session) == (0, 0, 0)
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "in.parquet"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": "sesion"}, InputError, "no column 'sesion'. Choose one of: session, time, row, ids, label"),
        ({"by": "ids"}, InputError, "column 'ids' is list.*no order"),
        ({"time": "hole"}, InputError, "no column 'hole'"),
        ({"batch_size": 0}, InputError, "batch_size is 0"),
        ({"target": "in.parquet"}, InputError, "is the file that is read"),
        ({"source": "gone.parquet"}, InputError, "there is no file"),
        ({"source": "text.parquet"}, FormatError, "cannot be read as Parquet"),
        ({"source": "null.parquet"}, InputError, "column 'session' is empty in 1 rows"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_no_file(tmp_path, options, error, message):
    pq.write_table(log(), tmp_path / "in.parquet")
    pq.write_table(pa.table({"session": [1, None]}), tmp_path / "null.parquet")
    (tmp_path / "text.parquet").write_text("no table")
    given_options = {"source": "in.parquet", "target": "out.parquet", **options}
    source, target = (tmp_path / given_options.pop(name) for name in ("source", "target"))

    with pytest.raises(error, match=message):
        cluster_parquet(source, target, **given_options)
    assert not (tmp_path / "out.parquet").exists()
    assert pq.read_table(tmp_path / "in.parquet").num_rows == 600


def test_the_command_clusters_and_prints_one_object(tmp_path):
    pq.write_table(log(), tmp_path / "in.parquet")
    command = ["data", "cluster", "in.parquet", "out.parquet", "--by", "session", "--time", "time", "--json"]
    env = {"PYTHONPATH": python_path(ROOT)}

    done = subprocess.run(
        [sys.executable, "-m", "headway.cli", *command], cwd=tmp_path, env=env, capture_output=True, text=True
    )

    answer = json.loads(done.stdout)
    assert answer["schema"] == "headway.data.cluster/1"
    assert answer["num_sessions"] == 40
    assert runs(pq.read_table(tmp_path / "out.parquet")["session"].to_pylist()) == 40
    assert answer["batch_size"] == BATCH
