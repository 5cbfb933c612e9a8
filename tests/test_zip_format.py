"""Archives of torch.save: every bit of them is held to something."""

import io
import mmap
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.storage.formats.zip_files import entries, faults, has_checksums, is_zip
from tests.checkpoints import record_of

SMALL = record_of({"a": torch.arange(40.0), "b": torch.zeros(3, dtype=torch.int8), "none": torch.zeros(0, 4)})


def test_any_single_flipped_bit_of_a_torch_save_file_is_found():
    missed = []
    data = bytearray(SMALL)
    for at in range(len(data)):
        bit = 1 << at % 8
        data[at] ^= bit
        if not any(True for _ in faults(data)):
            missed.append(at)
        data[at] ^= bit

    assert not missed
    assert not list(faults(data))


@given(at=st.integers(0, len(SMALL) - 1), bit=st.integers(0, 7))
def test_a_fault_says_where(at, bit):
    data = bytearray(SMALL)
    data[at] ^= 1 << bit
    payloads = {entry.name: (entry.payload_offset, entry.num_bytes) for entry in entries(SMALL, "x.pt")}
    hit = next((name for name, (start, size) in payloads.items() if start <= at < start + size), None)

    found = list(faults(data))

    if hit is not None:
        assert [(fault.what, fault.entry) for fault in found] == [("payload", hit)]
    else:
        assert all(fault.what != "payload" or fault.entry for fault in found)


@given(cut=st.integers(1, len(SMALL)))
def test_an_archive_cut_short_is_found(cut):
    assert list(faults(SMALL[:-cut]))


def test_entries_are_those_of_the_standard_library():
    with zipfile.ZipFile(io.BytesIO(SMALL)) as archive:
        told = [(info.filename, info.header_offset, info.file_size, info.CRC) for info in archive.infolist()]

    found = entries(SMALL, "x.pt")

    assert [(entry.name, entry.offset, entry.num_bytes, entry.crc32) for entry in found] == told
    assert is_zip(SMALL)
    assert SMALL[found[0].payload_offset :].startswith(b"\x80\x02")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_other_writers_are_held_to_their_crcs(method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("m/data.pkl", b"headway" * 100)
        archive.writestr("m/data/0", bytes(1000))
    data = bytearray(file.getvalue())
    entry = entries(data, "x.pt")[0]

    assert not list(faults(data))
    data[entry.payload_offset + entry.stored_bytes // 2] ^= 1
    assert [(fault.what, fault.entry) for fault in faults(data)] == [("payload", "m/data.pkl")]


def test_an_archive_without_crcs_is_told_apart_from_a_damaged_one():
    torch.serialization.set_crc32_options(False)
    try:
        data = record_of(torch.arange(100.0))
    finally:
        torch.serialization.set_crc32_options(True)

    assert not has_checksums(entries(data, "x.pt"))
    assert not list(faults(data))


def test_an_archive_of_more_than_4_gib_is_read_in_its_wide_form(tmp_path):
    path = tmp_path / "large.pt"
    with torch.serialization.skip_data():
        torch.save([torch.empty(2**30 + 9), torch.empty(5)], path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = list(entries(data, "large.pt"))
        strange = list(faults(data, payloads=False))

    assert [entry.num_bytes for entry in found if "/data/" in entry.name] == [4 * (2**30 + 9), 20]
    assert strange == []


def test_what_is_no_archive_is_said():
    with pytest.raises(FormatError, match=r"x.pt is no whole zip archive: its end is missing.*headway ckpt verify"):
        entries(b"PK\x03\x04" + bytes(100), "x.pt")
    assert list(faults(b""))
