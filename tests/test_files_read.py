"""A file that changed since a batch was read from it is found, also where its times do not tell."""

import os
import sqlite3
import time
from contextlib import closing

import numpy as np

from headway.data.guard.files_read import FilesRead, changed, noted, written_since


def test_a_database_that_is_opened_by_its_uri_is_noted_by_its_path(tmp_path):
    path, files = tmp_path / "a b.db", FilesRead()
    with closing(sqlite3.connect(path)) as base:
        base.execute("create table rows (x)")
        for uri in (f"file:{path}?mode=ro", f"file://localhost{tmp_path}/a%20b.db", f"file://{path}#top"):
            with files.noting() as noted, closing(sqlite3.connect(uri, uri=True)):
                pass
            before = changed(noted)
            base.execute(f"insert into rows values ('{uri}')")
            base.commit()
            assert before is None
            assert changed(noted) == str(path)


def test_a_file_that_is_mapped_for_writing_is_never_trusted_and_one_mapped_for_reading_is(tmp_path):
    path, files = tmp_path / "data", FilesRead()
    path.write_bytes(bytes(64))
    time.sleep(0.03)
    with files.noting() as noted:
        np.memmap(path, np.uint8, "r")
    before = changed(noted), written_since(noted, time.time_ns())
    mapped = np.memmap(path, np.uint8, "r+")
    mapped[0] = 1
    with files.noting() as again:
        np.memmap(path, np.uint8, "r")

    assert before == (None, None)
    assert changed(noted) == changed(again) == written_since(again, time.time_ns() + 10**9) == str(path)


def test_what_is_noted_inside_is_noted_outside_too(tmp_path):
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    files = FilesRead()
    with files.noting() as outer:
        with files.noting() as inner:
            (tmp_path / "one").read_text()
        (tmp_path / "two").read_text()

    assert [*inner] == [str(tmp_path / "one")]
    assert [*outer] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_a_link_that_is_set_anew_is_a_change_wherever_it_leads(tmp_path):
    link, target = tmp_path / "current", tmp_path / "1"
    link.symlink_to("1")
    dangling = noted(str(link))
    target.write_text("")
    led, file = noted(str(link)), noted(str(target))
    link.unlink()
    os.link(target, link)  # the file itself, under the link's name

    assert len({dangling, led, file}) == 3
    assert changed({str(link): led}) == str(link)
    assert noted(str(link)) == noted(str(target))
    assert written_since({str(link): dangling}, dangling[5]) == str(link)
