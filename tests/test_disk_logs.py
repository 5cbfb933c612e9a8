"""Failure logs of real disks: what is read is what stands there, and what cannot be true is refused with its line."""

import itertools

import pytest

from headway.core.errors import FormatError, InputError
from headway.lab.failure_logs import Totals, read_lifetimes, read_totals, renamed, windows
from tests.paths import shared
from tests.refusals import refused

HEAD = "model,size,n_unique,drive_days,failed\n"
DRIVES = "model,capacity_bytes,min_date,max_date,first_fail\n"


def written(path, text):
    path.write_text(text)
    return path


def test_names_of_one_model_written_in_two_ways_are_one_model(tmp_path):
    path = written(tmp_path / "t.csv", HEAD + "WDC  X1,4 TB,10,100,1\nwdc x1,4 TB,5,50,0\n")

    assert read_totals(path) == {"wdc x1": Totals("wdc x1", 4e12, 15.0, 150.0, 1.0)}


def test_a_window_is_the_difference_of_two_dates_and_lasts_as_long_as_the_steadiest_model_lived():
    before = {"a": Totals("a", 4e12, 2000, 50_000, 10), "gone": Totals("gone", 4e12, 2000, 9_000, 2)}
    after = {"a": Totals("a", 4e12, 2000, 230_000, 25), "gone": before["gone"], "new": Totals("new", 4e12, 50, 500, 1)}
    found = {window.model: window for window in windows(before, after)}

    assert set(found) == {"a", "new"}
    assert (found["a"].days, found["a"].failures, found["a"].num_disks) == (90, 15, 2000)
    assert found["new"].failures == 1


def test_the_lives_of_drives_count_from_the_first_day_of_the_log(tmp_path):
    rows = '"A",4e12,2013-04-10,2013-12-31,\n"A",4e12,2013-04-12,2013-05-01,2013-05-01\n'
    log = read_lifetimes(written(tmp_path / "d.csv", DRIVES + rows))

    assert (log.models, log.num_days) == (("A",), 266)
    assert (log.first.tolist(), log.last.tolist(), log.failed.tolist()) == ([0, 2], [265, 21], [False, True])


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (read_totals, "model,size\n", "no column n_unique. Write a header with"),
        (read_totals, HEAD + "a,4 TB,10,-5,1\n", r"line 2: drive_days has '-5'"),
        (read_totals, HEAD + "a,4 TB,10,100,11\n", "line 2: 11 failures of 10 disks"),
        (read_totals, HEAD + "a,4 TB,many,100,1\n", "n_unique has 'many'"),
        (read_totals, HEAD + "a,4 TB,10\n", ":2 has fewer columns"),
        (read_lifetimes, DRIVES, "holds no drive"),
        (read_lifetimes, DRIVES + "A,4e12,2013-12-31,2013-04-10,\n", "line 2: last seen 2013-04-10, first seen later"),
        (read_lifetimes, DRIVES + "A,4e12,2013-04-10,2013-12-30,2013-12-31\n", "failed 2013-12-31, last seen before"),
        (read_lifetimes, DRIVES + "A,4e12,yesterday,2013-04-10,\n", "Write dates as"),
    ],
)
def test_totals_and_lifetimes_that_cannot_be_true_are_refused(tmp_path, read, text, says):
    with pytest.raises(FormatError, match=says):
        read(written(tmp_path / "t.csv", text))


SERIALS = "serial_number," + DRIVES


def test_drives_that_go_on_under_another_name_by_their_serial_numbers_are_of_one_model(tmp_path):
    rows = "s1,Hitachi X,4e12,2013-04-10,2013-06-01,\ns2,Hitachi X,4e12,2013-04-11,2013-05-01,2013-05-01\n"
    rows += "s1,HGST X,4e12,2013-06-02,2013-12-31,\ns1,Other,8e12,2013-04-10,2013-12-31,\n"
    log = read_lifetimes(written(tmp_path / "d.csv", SERIALS + rows))

    assert (log.models, log.model.tolist()) == (("HGST X", "Other"), [0, 0, 1])
    assert (log.first.tolist(), log.last.tolist()) == ([0, 1, 0], [265, 21, 265])
    assert log.failed.tolist() == [False, True, False]


def test_one_drive_in_two_rows_at_once_is_refused(tmp_path):
    rows = "s1,A,4e12,2013-04-10,2013-06-01,\ns1,A,4e12,2013-06-01,2013-12-31,\n"

    with pytest.raises(FormatError, match="line 3: drive s1 is in line 2 at that time"):
        read_lifetimes(written(tmp_path / "d.csv", SERIALS + rows))


def test_a_model_that_ends_as_another_begins_is_asked_for(tmp_path):
    old, new = "Hitachi X,4e12,2013-04-10,2013-06-01,\n" * 200, "HGST X,4e12,2013-06-02,2013-12-31,\n" * 200
    path = written(tmp_path / "d.csv", DRIVES + old + new)

    with pytest.raises(InputError, match=r"200 drives of Hitachi X .*as 200 of HGST X.*--same 'Hitachi X=HGST X'"):
        read_lifetimes(path)
    assert read_lifetimes(path, {"Hitachi X": "HGST X"}).models == ("HGST X",)
    assert read_lifetimes(path, {"HGST X": "HGST X"}).models == ("Hitachi X", "HGST X")
    later = written(tmp_path / "e.csv", DRIVES + old + new.replace("2013-06-02", "2013-06-12"))
    assert read_lifetimes(later).models == ("Hitachi X", "HGST X")


def test_totals_only_rise_and_a_missing_file_is_said_so(tmp_path):
    after = {"a": Totals("a", 4e12, 2000, 50_000, 10)}
    before = {"a": Totals("a", 4e12, 2000, 60_000, 10)}

    with pytest.raises(InputError, match=r"a: -10000 disk-days.*Give the older log first"):
        windows(before, after)
    with pytest.raises(InputError, match="no model of 1000 disks lived"):
        windows(after, after)
    with pytest.raises(InputError, match="cannot read"):
        read_totals(tmp_path / "none.csv")


def test_the_public_logs_are_as_large_as_published():
    drives = read_lifetimes(shared("disks/backblaze_2013_drives.csv"))
    dates = [read_totals(shared(f"disks/backblaze_{date}.csv")) for date in ("2021-10", "2021-11", "2022-09")]
    st4 = [{w.model: w for w in windows(a, b)}["st4000dm000"] for a, b in itertools.pairwise(dates)]

    assert (len(drives.model), int(drives.failed.sum())) == (29_072, 724)
    assert [round(36_500 * window.failures / window.disk_days, 1) for window in st4] == [1.8, 2.7]


STEADY = Totals("a", 8e12, 2000, 50_000, 10)
OLD, NEW = Totals("hitachi x", 4e12, 2000, 900_000, 100), Totals("hgst x", 4e12, 2000, 1_080_000, 125)
LATER = {"a": Totals("a", 8e12, 2000, 230_000, 25), "hgst x": NEW}


test_more_disk_days_than_disks_can_live_are_a_model_that_was_renamed = refused(
    ({"a": STEADY, "hitachi x": OLD}, r"hgst x: 2000 disks .* 540 each, in a window of 90 days.*--same 'hitachi x="),
    ({"a": STEADY}, r"hgst x: 2000 disks .* 540 each.*Pass --same OLD=NEW"),
    ({"a": STEADY, "old y": Totals("old y", 4e12, 2000, 9_000, 0)}, r"540 each.*likely 'old y'"),
    by=lambda before: windows(before, LATER),
)


def test_a_new_name_of_a_model_that_is_gone_is_asked_for():
    young = Totals("hgst x", 4e12, 2000, 100_000, 20)

    with pytest.raises(InputError, match=r"hitachi x is in the older log alone.*pass --same 'hitachi x=hgst x'"):
        windows({"a": STEADY, "hitachi x": Totals("hitachi x", 4e12, 2000, 9_000, 2)}, {**LATER, "hgst x": young})


def test_a_model_that_is_said_to_be_renamed_counts_from_where_it_was():
    before = renamed({"a": STEADY, "hitachi x": OLD}, {"Hitachi X": "HGST X"})

    found = {window.model: window for window in windows(before, LATER)}

    assert (found["hgst x"].disk_days, found["hgst x"].failures) == (180_000, 25)
