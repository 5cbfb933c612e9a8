"""The export for Perfetto: what is written is valid, and comes back as it was."""

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.kineto_names import FORWARD
from headway.trace.readers import chrome
from headway.trace.readers.chrome import arrows
from tests.paths import shared
from tests.traces_made import traces


@pytest.mark.slow
@settings(max_examples=60)
@given(trace=traces(), packed=st.booleans())
def test_reading_gives_back_every_column(trace, packed, tmp_path_factory):
    path = tmp_path_factory.mktemp("chrome") / ("a.json.gz" if packed else "a.json")
    trace.save(path)

    back = Trace.open(path)

    for column in set(COLUMNS) - {"name", "rank"}:
        assert back.events[column].tolist() == trace.events[column].tolist(), column
    assert back.events["rank"].tolist() == np.maximum(trace.events["rank"], -1).tolist()
    assert [back.name_of(row) for row in range(len(back))] == [trace.name_of(row) for row in range(len(trace))]
    assert (back.lanes, back.groups, back.ranks, back.meta) == (trace.lanes, trace.groups, trace.ranks, trace.meta)


@settings(max_examples=40)
@given(trace=traces(wide=False), ideal=st.none() | traces(wide=False))
def test_the_file_is_valid_json_with_paired_arrows_and_named_tracks(trace, ideal, tmp_path_factory):
    path = tmp_path_factory.mktemp("chrome") / "a.json"
    chrome.write(trace, path, ideal=ideal)

    events = json.loads(path.read_text())["traceEvents"]

    phases = Counter(event["ph"] for event in events)
    assert phases["X"] == len(trace) + (len(ideal) if ideal is not None else 0)
    assert phases["s"] == phases["f"] == len({event["id"] for event in events if event["ph"] in "sf"})
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert len(Trace.open(path)) == len(trace)


def two_ranks() -> Trace:
    """Return a launch with its kernel on rank 0, and a collective that rank 1 comes to last."""
    return Trace.from_columns(
        {
            "rank": [0, 0, 0, 1], "kind": [KIND["HOST"], KIND["COMPUTE"], KIND["COLL"], KIND["COLL"]],
            "lane": [0, 1, 1, 1], "start_ns": [1000, 2000, 4000, 6500], "duration_ns": [500, 1500, 4000, 1500],
            "corr": [7, 7, -1, -1], "group": [-1, -1, 0, 0], "seq": [-1, -1, 3, 3],
        },
        lanes=["main", "stream 7"],
        names=["launch", "kernel", "all_reduce"],
        name=[0, 1, 2, 2],
    )  # fmt: skip


def test_arrows_go_from_launch_to_kernel_and_from_the_last_rank_to_the_others():
    found = [(a.name, a.source, a.target, a.leave_ns, a.arrive_ns) for a in arrows(two_ranks())]

    assert found == [("launch", 0, 1, 1000, 2000), ("collective", 3, 2, 6500, 6500)]


def test_arrows_link_forward_to_backward_and_send_to_receive():
    trace = Trace.from_columns(
        {
            "rank": [0, 0, 0, 1, 1], "kind": [KIND[kind] for kind in ("HOST", "HOST", "SEND", "RECV", "RECV")],
            "start_ns": [50, 10, 100, 90, 95], "duration_ns": [5, 5, 20, 40, 9],
            "corr": [FORWARD + 1, FORWARD + 1, -1, -1, -1], "group": [-1, -1, 0, 0, 0], "seq": [-1, -1, 4, 4, 4],
            "peer": [-1, -1, 1, 0, 5],
        }
    )  # fmt: skip

    assert [(a.name, a.source, a.target, a.leave_ns, a.arrive_ns) for a in arrows(trace)] == [
        ("backward", 1, 0, 10, 50),
        ("message", 2, 3, 100, 100),
    ]


def test_codes_of_the_recorder_are_no_links():
    """The recorder keeps codes (an optimizer, a generation) in `corr`: equal ones draw nothing."""
    trace = Trace.from_columns({"corr": [0, 0, 0], "kind": [KIND["OPTIM"], KIND["HOST"], KIND["DATA"]]})

    assert arrows(trace) == []


def test_each_rank_is_a_track_group_with_its_ideal_right_below(tmp_path):
    chrome.write(two_ranks(), tmp_path / "a.json", ideal=two_ranks())

    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]

    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [titles[pid] for pid in sorted(titles, key=lambda pid: order[pid])] == [
        "rank 0", "rank 0, ideal", "rank 1", "rank 1, ideal",
    ]  # fmt: skip


def test_times_are_small_exact_decimals_from_the_first_event(tmp_path):
    trace = Trace.from_columns({"start_ns": [10**18, 10**18 + 1_234_567], "duration_ns": [1, 20]})
    trace.save(tmp_path / "a.json")

    document = json.loads((tmp_path / "a.json").read_text(), parse_float=str)

    assert document["baseTimeNanoseconds"] == 10**18
    assert [e["ts"] for e in document["traceEvents"] if e["ph"] == "X"] == ["0.000", "1234.567"]


def test_a_window_keeps_what_overlaps_it(tmp_path):
    chrome.write(two_ranks(), tmp_path / "a.json", window_ns=(3000, 4500))

    assert sorted(Trace.open(tmp_path / "a.json").events["start_ns"].tolist()) == [2000, 4000]


def test_an_empty_window_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(InputError, match=r"no event lies in \[90000, 99000\).*spans \[1000, 8000\).*Move the window"):
        chrome.write(two_ranks(), tmp_path / "a.json", window_ns=(90_000, 99_000))

    assert list(tmp_path.iterdir()) == []


def test_a_number_that_json_lacks_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"number JSON lacks.*Write None"):
        Trace.from_columns({}, meta={"a": float("nan")}).save(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-30], "is damaged within its"),
        (
            lambda data: data.replace(b"headway.chrome/1", b"headway.chrome/9"),
            "schema 'headway.chrome/9'.*this version",
        ),
        (lambda data: data.replace(b'"ts":0.000', b'"ts":"x"'), "is not a time in microseconds"),
        (lambda data: data.replace(b'"X","name":"', b'"X","name":"\xf1'), r"is damaged within its.*Export it again"),
    ],
)
def test_damage_is_named(change, message, tmp_path):
    two_ranks().save(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(change((tmp_path / "a.json").read_bytes()))

    with pytest.raises(FormatError, match=message):
        Trace.open(tmp_path / "a.json")


def test_equal_traces_give_equal_bytes(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        two_ranks().save(tmp_path / name)

    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_writer_killed_half_way_leaves_the_old_file_valid(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    two_ranks().save(path)
    code = textwrap.dedent(
        """
        import os, signal, sys
        from headway.trace.readers import chrome
        from headway.trace.events.trace import Trace

        def rows(*arguments, write=chrome._rows):
            for number, row in enumerate(write(*arguments)):
                if number == 500:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield row

        chrome._rows = rows
        Trace.from_columns({"start_ns": range(1000)}).save(sys.argv[1])
        """
    )

    ended = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ}, check=False)

    assert ended.returncode == -signal.SIGKILL
    data = path.read_bytes()
    assert len(json.loads(gzip.decompress(data) if suffix.endswith("gz") else data)["traceEvents"]) > 4
    assert len(Trace.open(path)) == len(two_ranks())


@pytest.mark.parametrize("name", ["nccl_data", "rocm_mi250", "cuda_event_sync"])
def test_a_profile_survives_the_journey(name, tmp_path: Path):
    trace = Trace.open(shared(f"kineto/{name}.json.gz"))
    trace.save(tmp_path / "a.json.gz")

    back = Trace.open(tmp_path / "a.json.gz")

    assert all(back.events[c].tolist() == trace.events[c].tolist() for c in COLUMNS if c != "name")
    assert [back.name_of(row) for row in range(len(back))] == [trace.name_of(row) for row in range(len(trace))]
