"""`headway trace`: slices and formats from end to end."""

import json

import numpy as np
import pytest

from headway.cli import dispatch
from headway.core.errors import FormatError, InputError
from headway.trace.events.trace import Trace
from headway.trace.sync.clocks import common_ns, is_mapped
from tests.paths import ROOT, shared
from tests.test_perfetto import Viewer

BEFORE = ROOT / "tests" / "golden" / "runs" / "before"


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    """Call the command as `main` does and return its JSON object."""
    assert dispatch([*map(str, arguments), "--json"], None) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_every_option_of_a_slice_cuts_and_they_add_up(tmp_path, capsys):
    whole = Trace.open(BEFORE)
    target = tmp_path / "w.parquet"
    options = ["--steps", "4:9", "--lanes", "ma*", "--names", "*.step", "--kinds", "optim,mark", "--between", "0:900s"]
    found = answer(capsys, "trace", "export", BEFORE, target, *options)

    events = Trace.open(target).events
    main = [code for code, lane in enumerate(whole.lanes) if lane == "main"]
    mask = (
        np.isin(whole.events["step"], range(4, 9)) & whole.named("optimizer.step") & np.isin(whole.events["lane"], main)
    )

    assert found["events"] == int(mask.sum()) > 0
    assert events["start_ns"].tolist() == whole.events["start_ns"][mask].tolist()


def test_a_stretch_of_time_counts_from_the_first_event(tmp_path, capsys):
    whole = Trace.open(BEFORE)
    low = whole.span_ns[0]
    answer(capsys, "trace", "export", BEFORE, tmp_path / "w.parquet", "--between", "100ms:150ms")

    events = Trace.open(tmp_path / "w.parquet").events

    assert (events["start_ns"] < low + 150_000_000).all()
    assert (events["start_ns"] + events["duration_ns"] >= low + 100_000_000).all()


def test_nothing_in_a_slice_says_what_was_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"lies in names nobody\* and kinds COLL. `headway trace info"):
        dispatch(
            ["trace", "export", str(BEFORE), str(tmp_path / "w.json"), "--names", "nobody*", "--kinds", "COLL"], None
        )


def test_a_run_goes_out_as_perfetto_packets_rank_by_rank(tmp_path, capsys):
    found = answer(capsys, "trace", "export", BEFORE, tmp_path / "run.pftrace")

    assert found["events"] == len(Viewer(tmp_path / "run.pftrace").rows) == len(Trace.open(BEFORE))


def test_a_profile_goes_out_as_chakra_with_its_dependencies_and_comes_back(tmp_path, capsys):
    source = shared("kineto/cuda_event_sync.json.gz")
    answer(capsys, "trace", "export", source, tmp_path / "w.et")
    answer(capsys, "trace", "import", tmp_path / "w.et", tmp_path / "back.parquet")

    back, whole = Trace.open(tmp_path / "back.parquet"), Trace.open(source)

    assert [path.name for path in tmp_path.glob("*.et")] == ["w.0.et"]
    assert back.events["start_ns"].tolist() == whole.events["start_ns"].tolist()
    assert back.edges.shape[1] > 10


def test_what_a_chakra_file_lists_survives_the_way_through_our_own(tmp_path, capsys):
    answer(capsys, "trace", "export", shared("kineto/cuda_event_sync.json.gz"), tmp_path / "w.et")
    answer(capsys, "trace", "import", tmp_path / "w.et", tmp_path / "back.parquet")
    answer(capsys, "trace", "export", tmp_path / "back.parquet", tmp_path / "again.et")

    assert Trace.open(tmp_path / "again.et").edges.tolist() == Trace.open(tmp_path / "w.et").edges.tolist()


def test_a_folder_of_parquet_files_is_described_and_explained_as_one(tmp_path, capsys):
    whole = Trace.open(BEFORE)
    for rank in np.unique(whole.events["rank"]).tolist():
        whole.select(ranks=[rank]).save(tmp_path / f"r{rank}.parquet")

    info = answer(capsys, "trace", "info", tmp_path)
    why = answer(capsys, "why", tmp_path)

    assert info["events"] == len(whole)
    assert sum(why["ledger_ns"].values()) == why["devices"] * why["wall_ns"]


@pytest.mark.parametrize("suffix", [".json.gz", ".pftrace", ".parquet"])
def test_aligned_clocks_are_applied_where_a_format_has_no_room_for_them(tmp_path, capsys, suffix):
    rows = {"rank": [0, 1], "start_ns": [100, 5_100], "duration_ns": [10, 10], "name": [0, 0], "lane": [0, 0]}
    trace = Trace.from_columns(rows, names=["add"], lanes=["main"], ranks={0: {}, 1: {"offset_ns": -5_000}})
    trace.save(tmp_path / "aligned.parquet")
    target = tmp_path / f"out{suffix}"
    answer(capsys, "trace", "export", tmp_path / "aligned.parquet", target)

    if suffix == ".pftrace":
        begins = [row[2] for row in Viewer(target).rows]
    else:
        back = Trace.open(target)
        begins = common_ns(back)[0].tolist()
        assert is_mapped(back) is (suffix == ".parquet")
    assert len(begins) == 2
    assert len(set(begins)) == 1


@pytest.mark.parametrize("verb", ["import", "export", "align"])
def test_what_is_read_is_never_written_over(tmp_path, verb):
    source = tmp_path / "a.parquet"
    Trace.open(BEFORE).save(source)
    held = source.read_bytes()

    for read in (source, tmp_path):
        with pytest.raises(InputError, match=r"a\.parquet is what is read.*Name another file"):
            dispatch(["trace", verb, str(read), str(source)], None)
    assert source.read_bytes() == held


@pytest.mark.parametrize("verb", ["import", "export", "align"])
def test_what_a_run_recorded_is_never_written_over(tmp_path, verb):
    """`headway trace align A B` with two recorded windows names the second one as the target."""
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "windows").mkdir()
    windows = [tmp_path / "run" / "windows" / f"r{rank}-w0.parquet" for rank in range(2)]
    for rank, window in enumerate(windows):
        Trace.from_columns({"start_ns": [rank], "rank": [rank]}).save(window)
    held = windows[1].read_bytes()

    with pytest.raises(InputError, match=r"r1-w0\.parquet is a file of the run run.*Name another file"):
        dispatch(["trace", verb, *map(str, windows)], None)
    assert windows[1].read_bytes() == held


def test_one_rank_alone_has_nothing_to_be_aligned_with(tmp_path):
    Trace.from_columns({"start_ns": [1], "rank": [3]}).save(tmp_path / "a.parquet")

    with pytest.raises(InputError, match=r"holds rank 3 only.*files of all ranks into one folder"):
        dispatch(["trace", "align", str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], None)
    assert not (tmp_path / "b.parquet").exists()


def test_perfettos_protobuf_is_told_to_be_written_only(tmp_path, capsys):
    answer(capsys, "trace", "export", BEFORE, tmp_path / "w.pftrace", "--steps", "4:5")

    with pytest.raises(FormatError, match=r"Perfetto's protobuf, which headway only writes. Give one of"):
        Trace.open(tmp_path / "w.pftrace")
