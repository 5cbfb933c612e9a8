"""The files of a protected region: any loss that parity covers comes back, headers survive torn writes, bad sizes."""

import itertools
import os

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DamageError, FormatError, InputError
from headway.storage.regions.file import RegionFile, create
from headway.storage.regions.layout import ALIGN_BYTES, Geometry, read_header, sidecar_of

PAGE = 4096


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a region of random bytes and opens its files."""
    opened = []

    def make(pages: int = 22, *, page: int = PAGE, stripe: int = 4, parity: int = 1) -> RegionFile:
        path = tmp_path / f"state-{len(opened)}"
        path.write_bytes(np.random.default_rng(pages).bytes(pages * page))
        create(path, Geometry(pages * page, page, stripe, parity))
        opened.append(RegionFile(path))
        return opened[-1]

    yield make
    for file in opened:
        file.close()


def flip(file: RegionFile, page: int, byte: int = 7) -> None:
    offset = page * file.geometry.page + byte
    os.pwrite(file.fd, bytes([os.pread(file.fd, 1, offset)[0] ^ 0x10]), offset)


def wrong_pages(file: RegionFile) -> np.ndarray:
    return np.concatenate([wrong for _, wrong in file.examine(np.arange(file.geometry.num_stripes))])


@pytest.mark.parametrize(("stripe", "parity"), [(1, 1), (3, 1), (4, 1), (4, 2), (6, 3)])
def test_every_loss_that_the_parity_covers_is_rebuilt_bit_for_bit(made, stripe, parity):
    file = made(stripe * 3 - (stripe > 1), stripe=stripe, parity=parity)
    before = file.path.read_bytes()
    parity_before = file.parity.copy()
    for number in range(1, parity + 1):
        for lost in itertools.combinations(range(stripe + parity), number):
            for index in lost:
                if index < stripe:
                    flip(file, stripe + index)
                else:
                    file.parity[1, index - stripe] ^= 1
            wrong = wrong_pages(file)

            assert np.flatnonzero(wrong[1]).tolist() == list(lost)
            assert not wrong[[0, 2]].any()
            whole = file.rebuilt(1, wrong[1])
            file.put_back(1, whole)
            assert file.path.read_bytes() == before
            assert np.array_equal(file.parity, parity_before)
            assert not wrong_pages(file).any()


@pytest.mark.parametrize(("stripe", "parity"), [(4, 1), (4, 2)])
def test_one_loss_more_than_there_is_parity_is_not_rebuilt(made, stripe, parity):
    file = made(stripe=stripe, parity=parity)
    for index in range(parity + 1):
        flip(file, index)

    assert file.rebuilt(0, wrong_pages(file)[0]) is None


def test_checksums_are_xxh3_of_pages_and_parity_is_their_xor(made):
    file = made(10)
    data = np.frombuffer(file.path.read_bytes() + bytes(2 * PAGE), np.uint8).reshape(3, 4, PAGE)

    expected = [xxhash.xxh3_64_intdigest(page) for page in data.reshape(-1, PAGE)[:10]]
    assert file.table[:, :4].reshape(-1)[:10].tolist() == expected
    assert np.array_equal(file.parity[:, 0], np.bitwise_xor.reduce(data, axis=1))
    assert file.table[:, 4].tolist() == [xxhash.xxh3_64_intdigest(page) for page in file.parity[:, 0]]


@given(data=st.data())
def test_refreshing_the_changed_pages_makes_everything_match_again(tmp_path_factory, data):
    pages, stripe, parity = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    path = tmp_path_factory.mktemp("region") / "state"
    create(path, Geometry(pages * PAGE, PAGE, stripe, parity))
    changed = sorted(data.draw(st.sets(st.integers(0, pages - 1))))
    file = RegionFile(path)
    for page in changed:
        flip(file, page)

    assert np.flatnonzero(wrong_pages(file)[:, :stripe].reshape(-1)).tolist() == changed
    assert file.refresh(np.array(changed, np.int64)) == len({page // stripe for page in changed})
    assert not wrong_pages(file).any()
    file.close()


@pytest.mark.parametrize("entry", range(6))
def test_a_damaged_checksum_is_told_from_a_damaged_page(made, entry):
    file = made()
    before = file.path.read_bytes()
    file.table[2, entry] ^= 1
    wrong = wrong_pages(file)

    assert wrong[2, -1]
    assert wrong[2].sum() == 1 + (entry < 5)
    file.put_back(2, file.rebuilt(2, wrong[2]))
    assert not wrong_pages(file).any()
    assert file.path.read_bytes() == before


def test_a_damaged_checksum_beside_a_damaged_page_is_not_believed(made):
    file = made()
    file.table[2, 1] ^= 1
    flip(file, 10)

    assert file.rebuilt(2, wrong_pages(file)[2]) is None


def test_a_pass_over_a_damaged_row_of_checksums_does_not_make_it_look_right(made):
    file = made()
    file.table[2, 1] ^= 1
    file.refresh(np.array([8]))

    assert np.flatnonzero(wrong_pages(file)[2]).tolist() == [1, 5]


def test_a_page_whose_flip_went_into_the_parity_is_lost_and_stays_accused(made):
    file = made()
    flip(file, 9)
    file.refresh(np.array([8]))  # a stripe mate was written: the new parity holds the flip
    wrong = wrong_pages(file)

    assert np.flatnonzero(wrong[2]).tolist() == [1]
    assert file.rebuilt(2, wrong[2]) is None


def test_only_the_bytes_that_differ_are_written_back(made, monkeypatch):
    file, writes = made(), []
    flip(file, 5, byte=100)
    flip(file, 5, byte=103)
    wrong = wrong_pages(file)
    whole = file.rebuilt(1, wrong[1])
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: writes.append((len(data), offset)))
    file.put_back(1, whole)

    assert writes == [(4, 5 * PAGE + 100)]


def test_more_stripes_than_one_batch_holds_are_all_read(made):
    file = made(1500)
    for page in (0, 700, 1499):
        flip(file, page)

    assert np.flatnonzero(wrong_pages(file)[:, :4].reshape(-1)).tolist() == [0, 700, 1499]
    assert file.refresh(np.array([0, 700, 1499])) == 3
    assert not wrong_pages(file).any()


def test_headers_are_written_in_turn_and_the_newest_counts(made):
    file = made()
    path = sidecar_of(file.path)
    for epoch in range(1, 5):
        before = path.read_bytes()[: 2 * ALIGN_BYTES]
        file.set_header(is_open=bool(epoch % 2), epoch=epoch)
        after = path.read_bytes()[: 2 * ALIGN_BYTES]
        halves = [before[i : i + ALIGN_BYTES] == after[i : i + ALIGN_BYTES] for i in (0, ALIGN_BYTES)]

        assert sorted(halves) == [False, True]
        assert (read_header(path).epoch, read_header(path).is_open) == (epoch, bool(epoch % 2))


@pytest.mark.parametrize("torn", [0, 1])
def test_a_region_with_one_damaged_header_counts_as_left_open(made, torn):
    file = made()
    path = sidecar_of(file.path)
    file.set_header(is_open=False, epoch=3)
    with path.open("r+b") as sidecar:
        sidecar.seek(torn * ALIGN_BYTES + 20)
        sidecar.write(b"\xff")

    assert read_header(path).is_open
    assert read_header(path).geometry == file.geometry


def test_two_damaged_headers_are_no_sidecar(made):
    file = made()
    with sidecar_of(file.path).open("r+b") as sidecar:
        sidecar.write(b"x" * 2 * ALIGN_BYTES)

    with pytest.raises(FormatError, match=r"no sidecar.*Remove it"):
        read_header(sidecar_of(file.path))


def test_an_old_sidecar_is_decoded_with_the_code_it_was_made_with(made, monkeypatch):
    file = made(stripe=4, parity=2)
    before, path = file.path.read_bytes(), file.path
    flip(file, 4)
    flip(file, 6)
    file.close()
    monkeypatch.setattr("headway.storage.redundancy.erasure.cauchy", lambda k, m, w: np.ones((m, k), np.uint8))
    file = RegionFile(path)
    wrong = wrong_pages(file)
    file.put_back(1, file.rebuilt(1, wrong[1]))
    file.close()

    assert path.read_bytes() == before


@pytest.mark.parametrize("which", ["data", "sidecar"])
def test_a_file_of_another_length_is_damage_and_never_a_signal(made, which):
    file = made()
    path = file.path if which == "data" else sidecar_of(file.path)
    os.truncate(path, path.stat().st_size - PAGE)

    with pytest.raises(DamageError, match=r"somebody cut or extended it.*SIGBUS"):
        file.check_sizes()
    if which == "data":
        with pytest.raises(DamageError, match="somebody cut or extended it"):
            file.refresh(np.array([21]))
    file.close()
    with pytest.raises(DamageError, match="somebody cut or extended it"):
        RegionFile(file.path)


def test_a_second_writer_is_refused_and_readers_share(made):
    file = made()
    with pytest.raises(InputError, match=r"open as a protected region already.*Close it there"):
        RegionFile(file.path)
    file.close()
    readers = [RegionFile(file.path, writable=False) for _ in range(2)]
    with pytest.raises(InputError, match="open as a protected region already"):
        RegionFile(file.path)
    for reader in readers:
        reader.close()


def test_a_creation_that_fails_leaves_no_sidecar(tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(b"x" * PAGE)
    monkeypatch.setattr(RegionFile, "refresh", lambda self, pages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        create(path, Geometry(PAGE))

    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"x" * PAGE
