"""Every file is recognised by its content, and every damage is named."""

import gzip
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.trace.events.content import PIECE_BYTES, Content
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.readers import chakra
from headway.trace.readers.formats import READERS, WRITERS, describe, open_any, recognise, save_any
from tests.paths import GOLDEN, shared
from tests.runs_made import RunMaker, write_folder
from tests.traces_made import profile, span, traces

PROFILE = profile([span("aten::mm", 1.5, 2)], distributedInfo={"rank": 3})
TRACE = Trace.from_columns({"start_ns": [7], "duration_ns": [1], "kind": [KIND["COLL"]]}, names=["a"], name=[0])


@given(data=st.binary(max_size=300), members=st.integers(1, 3))
def test_gzip_streams_unpack_to_what_was_packed(data, members, tmp_path_factory):
    path = tmp_path_factory.mktemp("gz") / "a"
    path.write_bytes(gzip.compress(data) * members)

    assert Content(path).data == data * members


def test_pieces_are_bounded_and_complete(tmp_path):
    data = np.random.default_rng(0).integers(0, 3, 5 * PIECE_BYTES // 2, dtype=np.uint8).tobytes()
    (tmp_path / "a").write_bytes(gzip.compress(data, 1))

    pieces = list(Content(tmp_path / "a"))

    assert max(map(len, pieces)) <= PIECE_BYTES
    assert b"".join(pieces) == data


def test_a_word_across_two_pieces_is_found(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (PIECE_BYTES - 3) + b"needle" + b"y" * 9)

    assert Content(tmp_path / "a").holds(b"straw", b"needle")
    assert not Content(tmp_path / "a").holds(b"needles")


def files(tmp_path) -> dict[str, bytes]:
    """Return one small file of each kind that is a single file."""
    TRACE.save(tmp_path / "t.parquet")
    TRACE.save(tmp_path / "t.json")
    dump = json.loads((GOLDEN / "flight_rank_0.json").read_text())
    return {
        "headway": (tmp_path / "t.parquet").read_bytes(),
        "headway-chrome": (tmp_path / "t.json").read_bytes(),
        "chrome": PROFILE,
        "flight-json": (GOLDEN / "flight_rank_0.json").read_bytes(),
        "flight-pickle": pickle.dumps(dump, protocol=2),
        "chakra": b"".join(chakra.messages(TRACE, -1)),
        "torchtitan": b'{"time_us": 4, "log_type": "instant", "log_type_name": "training_start", "rank": 3}\n',
    }


@pytest.mark.parametrize("name", sorted(set(READERS) - {"run", "straggler"}))
def test_content_decides_and_the_suffix_does_not(name, tmp_path):
    path = tmp_path / "misleading.parquet.txt"
    path.write_bytes(files(tmp_path)[name])

    assert recognise(Content(path)) == name
    assert len(open_any(path)) > 0


@pytest.mark.parametrize("name", sorted(set(READERS) - {"run", "straggler", "headway"}))
def test_gzip_and_plain_give_the_same_trace(name, tmp_path):
    data = files(tmp_path)[name]
    (tmp_path / "plain_0").write_bytes(data)
    (tmp_path / "packed_0").write_bytes(gzip.compress(data))

    assert open_any(tmp_path / "plain_0") == open_any(tmp_path / "packed_0")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", sorted(set(WRITERS) - {".straggler.parquet", ".et", ".pftrace", ".perfetto-trace"}))
@settings(max_examples=25)
@given(trace=traces())
def test_what_is_saved_under_a_suffix_is_recognised(suffix, trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / f"a{suffix}"
    save_any(trace, path)

    assert len(open_any(path)) == len(trace)


def test_a_run_folder_opens_as_its_last_attempt_with_all_ranks(tmp_path):
    made = RunMaker(ranks=2, steps=4, fetch_ns=1_000_000).make()
    path = write_folder(made, tmp_path / "run")

    trace = Trace.open(path)

    assert recognise(Content(path)) == "run"
    assert len(trace) == len(made.trace)
    assert set(trace.events["rank"].tolist()) == set(made.trace.events["rank"].tolist())


def test_an_operation_trace_survives_its_own_suffix(tmp_path):
    trace = Trace.open(shared("straggler/trace-SE.parquet"))
    trace.save(tmp_path / "a.straggler.parquet")

    assert recognise(Content(tmp_path / "a.straggler.parquet")) == "straggler"
    assert len(Trace.open(tmp_path / "a.straggler.parquet")) == len(trace)


def test_an_unknown_suffix_lists_the_known_ones(tmp_path):
    with pytest.raises(
        InputError, match=r"a\.csv names no format.*End it with one of: \.et, \.json, \.json\.gz, \.parquet"
    ):
        save_any(TRACE, tmp_path / "a.csv")


def test_a_folder_of_traces_is_merged(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_bytes(profile([span("a", 1, 2)], distributedInfo={"rank": rank}))
    (tmp_path / "notes.txt").write_text("not a trace")

    assert open_any(tmp_path).events["rank"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", r"it starts with the bytes b'hello'.*Kineto or Chrome JSON.*Flight Recorder"),
        (
            b'{"a": 1}',
            r"is JSON that starts with '\{\"a\": 1\}' and has no 'traceEvents'.*Chrome JSON.*Flight Recorder",
        ),
        (b"", "it is empty. Write or copy the file again"),
        (b"PAR1junk", "it is damaged or truncated Parquet. Write or copy the file again"),
    ],
)
def test_an_unknown_file_is_described_and_a_damaged_one_wants_to_be_written_again(content, message, tmp_path):
    (tmp_path / "a").write_bytes(content)

    with pytest.raises(FormatError, match=message):
        open_any(tmp_path / "a")


def test_foreign_parquet_is_described_by_its_columns(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "a.parquet")

    with pytest.raises(FormatError, match="Parquet with the columns x, y"):
        open_any(tmp_path / "a.parquet")


def test_an_empty_folder_and_a_missing_path_say_so(tmp_path):
    with pytest.raises(FormatError, match="is no run and holds no trace file"):
        open_any(tmp_path)
    with pytest.raises(InputError, match=r"gone does not exist\. Check the path"):
        open_any(tmp_path / "gone")


def test_gzip_that_is_cut_tells_the_byte_and_damaged_gzip_about_where(tmp_path):
    path = tmp_path / "a.json.gz"
    packed = bytearray(gzip.compress(profile([span(f"op {i}", i, 1) for i in range(2000)])))
    path.write_bytes(packed[:-100])
    with pytest.raises(FormatError, match=rf"truncated gzip: it ends at byte {len(packed) - 100} inside a stream"):
        open_any(path)

    packed[-5] ^= 0xFF  # In the checksum of the stream.
    path.write_bytes(packed)
    with pytest.raises(FormatError, match=r"damaged gzip before byte \d+ .*Copy the file again"):
        open_any(path)


@settings(max_examples=40)
@given(trace=traces(wide=False))
def test_the_description_is_json_and_its_kinds_add_up(trace):
    info = json.loads(json.dumps(describe(trace)))

    assert info["events"] == len(trace) == sum(kind["events"] for kind in info["kinds"].values())
    assert sum(kind["duration_ns"] for kind in info["kinds"].values()) == int(trace.events["duration_ns"].sum())


def test_the_description_names_ranks_steps_lanes_and_the_longest():
    trace = Trace.from_columns(
        {"rank": [0, 1, 1], "step": [-1, 4, 5], "duration_ns": [10, 30, 30], "name": [1, 0, 0]}, names=["mm", "add"]
    )

    info = describe(trace)

    assert (info["ranks"], info["steps"], info["lanes"]) == ([0, 1], [4, 5], ["main"])
    assert list(info["longest"].items()) == [
        ("mm", {"events": 2, "duration_ns": 60}),
        ("add", {"events": 1, "duration_ns": 10}),
    ]
