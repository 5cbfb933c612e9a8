"""Scrub and repair offline and beside writers: what is believed, what is put back, what a report says."""

import math
import os

import numpy as np
import pytest

from headway.cli import main
from headway.core.errors import InputError
from headway.storage.regions.file import RegionFile
from headway.storage.regions.layout import sidecar_of
from headway.storage.regions.protected import ProtectedRegion
from headway.storage.regions.scrub import inspect, nothing_dirty, scrub
from tests.launching import code_and_json

PAGE = 4096


@pytest.fixture
def path(tmp_path):
    """Return the file of a closed region of 24 random pages."""
    path = tmp_path / "state"
    path.write_bytes(np.random.default_rng(4).bytes(24 * PAGE))
    ProtectedRegion(path, period_s=math.inf).close()
    return path


def flip(path, *pages: int, byte: int = 9) -> None:
    with open(path, "r+b", buffering=0) as file:
        for page in pages:
            old = os.pread(file.fileno(), 1, page * PAGE + byte)
            os.pwrite(file.fileno(), bytes([old[0] ^ 1]), page * PAGE + byte)


@pytest.mark.parametrize("seed", range(5))
def test_flips_in_different_stripes_all_come_back(path, seed):
    before, rng = path.read_bytes(), np.random.default_rng(seed)
    pages = sorted(int(4 * stripe + rng.integers(4)) for stripe in rng.permutation(6)[:4])
    flip(path, *pages, byte=int(rng.integers(PAGE)))

    found = inspect(path)
    assert (found.status, found.report.corrupt.tolist()) == ("repairable", pages)
    mended = inspect(path, repair=True)
    assert (mended.status, mended.report.repaired.tolist()) == ("good", pages)
    assert path.read_bytes() == before
    assert inspect(path).status == "good"


def test_two_in_a_stripe_are_lost_the_others_repaired_and_the_lost_ones_untouched(path):
    before = path.read_bytes()
    flip(path, 1, 2, 9)
    damaged = path.read_bytes()
    report = inspect(path, repair=True).report

    assert (report.status, report.unrepairable.tolist(), report.repaired.tolist()) == ("lost", [1, 2], [9])
    assert path.read_bytes() == damaged[: 4 * PAGE] + before[4 * PAGE :]


@pytest.mark.parametrize("section", ["checksums", "parity"])
def test_damage_of_the_sidecar_is_repaired_and_no_page_is_accused(path, section):
    before = path.read_bytes()
    guard = sidecar_of(path).read_bytes()
    _, table, parity, _ = inspect(path).geometry.places()
    flip_at = (table + 8 * 13) if section == "checksums" else parity + 2 * PAGE + 5
    sidecar_of(path).write_bytes(guard[:flip_at] + bytes([guard[flip_at] ^ 8]) + guard[flip_at + 1 :])

    found = inspect(path)
    assert (found.status, found.report.corrupt.size, found.report.corrupt_sidecar.tolist()) == ("repairable", 0, [2])
    assert inspect(path, repair=True).status == "good"
    assert (inspect(path).status, path.read_bytes()) == ("good", before)
    assert sidecar_of(path).read_bytes() == guard


def test_a_store_while_a_page_is_read_is_no_damage(path):
    file, answers = RegionFile(path), iter([False, True])
    flip(path, 6)

    def dirty(first: int, end: int) -> np.ndarray:
        """Page 6 is clean before it is read, dirty after."""
        pages = nothing_dirty(first, end)
        pages[6 - first] = next(answers, True)
        return pages

    report = scrub(file, dirty, repair=True)
    file.close()

    assert (report.status, report.corrupt.size, report.skipped_pages) == ("good", 0, 1)


def test_parity_of_a_stripe_that_becomes_dirty_before_the_repair_is_not_used(path):
    file, asked = RegionFile(path), []
    flip(path, 6)
    damaged = path.read_bytes()

    def dirty(first: int, end: int) -> np.ndarray:
        """Page 7 becomes dirty once its stripe mate has been judged."""
        asked.append((first, end))
        pages = nothing_dirty(first, end)
        pages[7 - first] = len(asked) > 2
        return pages

    report = scrub(file, dirty, repair=True)
    file.close()

    assert (report.status, report.unrepairable.tolist()) == ("lost", [6])
    assert path.read_bytes() == damaged


def test_a_medium_that_does_not_take_the_repair_is_reported(path, monkeypatch):
    flip(path, 6)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: len(data))

    assert inspect(path, repair=True).report.unrepairable.tolist() == [6]


def copy_of_an_open_region(path, tmp_path):
    """Return the file of a region whose process died after a store to page 3."""
    copy = tmp_path / "crashed"
    with ProtectedRegion(path, period_s=math.inf) as region:
        region.write(3 * PAGE, b"unfinished")
        copy.write_bytes(path.read_bytes())
        sidecar_of(copy).write_bytes(sidecar_of(path).read_bytes())
    return copy


def test_a_region_that_was_not_closed_is_looked_at_and_never_repaired(path, tmp_path):
    copy = copy_of_an_open_region(path, tmp_path)
    found = inspect(copy)

    assert (found.status, found.was_closed, found.report.corrupt.tolist()) == ("unclean", False, [3])
    with pytest.raises(InputError, match=r"was not closed.*Open it as a ProtectedRegion"):
        inspect(copy, repair=True)


@pytest.mark.parametrize("missing", ["data", "sidecar"])
def test_a_missing_file_is_named(path, missing):
    (path if missing == "data" else sidecar_of(path)).unlink()

    with pytest.raises(InputError, match=r"cannot be opened: No such file.*FILE\.guard"):
        inspect(path)


def command(*arguments: object) -> tuple[int, dict]:
    return code_and_json("storage", *arguments, "--json")


def test_the_command_finds_repairs_and_exits_accordingly(path, tmp_path):
    before = path.read_bytes()
    assert command("region", path)[0] == 0
    flip(path, 7)
    code, answer = command("region", path)
    assert (code, answer["status"], answer["schema"]) == (3, "repairable", "headway.storage.region/1")
    assert answer["damaged"] == [{"page": 7, "offset_bytes": 7 * PAGE}]
    code, answer = command("region", path, "--repair", "--rate-mb-s", "1000")
    assert (code, answer["status"], answer["repaired"], answer["damaged"]) == (0, "good", [7], [])
    assert path.read_bytes() == before
    flip(path, 4, 5)
    code, answer = command("region", path, "--repair")
    assert (code, answer["status"], answer["unrepairable"]) == (3, "lost", [4, 5])
    code, answer = command("region", copy_of_an_open_region(path, tmp_path))
    assert (code, answer["status"], answer["damaged"]) == (3, "unclean", [])
    assert [row["page"] for row in answer["unverified"]] == [3, 4, 5]
    assert command("region", tmp_path / "none")[0] == 2
    assert command("region", path, "--rate-mb-s", "0")[0] == 2


def test_the_command_shows_pages_and_what_to_do(path, capsys):
    flip(path, 7)
    with pytest.raises(SystemExit):
        main(["storage", "region", str(path)])
    shown = " ".join(capsys.readouterr().out.split())

    assert "24 pages in stripes of 4 + 1" in shown
    assert "28672" in shown
    assert "Run it again with --repair." in shown


def test_the_command_says_which_back_ends_work_here():
    code, answer = command("backends")

    assert (code, answer["schema"]) == (0, "headway.storage.backends/1")
    assert [row["name"] for row in answer["backends"]] == ["pagemap_scan", "explicit", "rehash"]
    assert answer["auto"] in ("pagemap_scan", "rehash")
    assert all(row["works"] == (row["reason"] == "") for row in answer["backends"])
