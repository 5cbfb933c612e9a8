"""Fetching: verified before use, damage named or mended, and no byte of a damaged block where elements go."""

import os

import numpy as np
import pytest

from headway.checkpoint.layout.fetch import LocalFiles, RangeFetcher, fetch
from headway.checkpoint.layout.reads import Shard, plan_reads
from headway.checkpoint.layout.stored import BucketFiles
from headway.core.errors import DamageError
from headway.storage.boxes import Box, whole
from headway.storage.digests import digest_of
from headway.storage.manifest import Piece
from headway.storage.stores import LocalStore
from tests.checkpoints import MemoryFiles

ROWS, WIDTH = 3000, 1024
START = 5000
"""Where the elements begin: not at a block's edge."""


@pytest.fixture
def values():
    return np.random.default_rng(1).integers(0, 2**31, (ROWS, WIDTH), dtype=np.int32)


@pytest.fixture
def content(values):
    return bytearray(START) + values.tobytes() + bytes(777)


def planned(box):
    size = ROWS * WIDTH * 4
    piece = Piece("w", "int32", (ROWS, WIDTH), (0, 0), (ROWS, WIDTH), "a", START - 64, size + 64, START, size, 0)
    return plan_reads([Shard("w", (ROWS, WIDTH), "int32", box)], {"w": [piece]})


def read_with(fetcher, box, *, flat):
    """Fetch a box into zeros; with `flat` by windows into their own place, else through arrays."""
    found = np.zeros(box.lengths, np.int32)

    def place(transfer, elements):
        found[transfer.box.within(box)] = elements.view(np.int32)

    def room(transfer):
        part = found[transfer.box.within(box)]
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None

    fetcher.flat = room if flat else None
    fetch(planned(box).reads, fetcher, place, num_threads=2)
    return found


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("box", [whole((ROWS, WIDTH)), Box((100, 0), (7, WIDTH)), Box((5, 3), (400, 9))], ids=str)
@pytest.mark.parametrize("kind", ["memory", "local", "store"])
def test_any_place_gives_the_elements(tmp_path, values, content, flat, verified, box, kind):
    (tmp_path / "a").write_bytes(content)
    files = {
        "memory": MemoryFiles({"a": content}),
        "local": LocalFiles(tmp_path),
        "store": BucketFiles(LocalStore(tmp_path)),
    }
    written = digest_of(content)
    fetcher = RangeFetcher(files[kind], (lambda name: written) if verified else None)

    found = read_with(fetcher, box, flat=flat)

    assert (found == values[box.within(whole((ROWS, WIDTH)))]).all()
    assert bool(fetcher.total.hashed_bytes) == verified
    files["local"].close()


def test_a_part_is_verified_by_the_blocks_it_touches_only(content):
    written = digest_of(content)
    fetcher = RangeFetcher(MemoryFiles({"a": content}), lambda name: written)

    read_with(fetcher, Box((1000, 0), (256, WIDTH)), flat=True)

    assert 0 < fetcher.total.hashed_bytes - 256 * WIDTH * 4 <= 2 * written.block_bytes


@pytest.mark.parametrize("flat", [True, False])
def test_a_flipped_bit_is_named_and_its_block_reaches_no_element(values, content, flat):
    written = digest_of(content)
    at = START + 2000 * WIDTH * 4 + 5
    content[at] ^= 4
    fetcher = RangeFetcher(MemoryFiles({"a": content}), lambda name: written)
    block = at // written.block_bytes * written.block_bytes
    found = np.zeros((ROWS, WIDTH), np.int32)

    def place(transfer, elements):
        found[transfer.box.within(whole(found.shape))] = elements.view(np.int32)

    fetcher.flat = (lambda t: found[t.box.within(whole(found.shape))].reshape(-1).view(np.uint8)) if flat else None
    with pytest.raises(DamageError, match=rf"a is damaged at bytes {block}\.\.{block + written.block_bytes}, in w"):
        fetch(planned(whole((ROWS, WIDTH))).reads, fetcher, place, num_threads=1)

    touched = found.reshape(-1).view(np.uint8)[block - START : block - START + written.block_bytes]
    assert not touched.any()


def test_a_flip_where_nothing_is_read_is_left_alone(values, content):
    written = digest_of(content)
    content[-1] ^= 1
    fetcher = RangeFetcher(MemoryFiles({"a": content}), lambda name: written)

    assert (read_with(fetcher, Box((0, 0), (2, WIDTH)), flat=True) == values[:2]).all()


@pytest.mark.parametrize("lost", ["flip", "short", "missing"])
def test_a_damaged_block_is_rebuilt_where_parity_can(tmp_path, values, content, lost):
    whole_file, written = bytes(content), digest_of(content)
    content[START + 100] ^= 1
    if lost != "missing":
        (tmp_path / "a").write_bytes(content if lost == "flip" else content[: START + 5])
    asked = []

    def mend(name, start, stop):
        asked.append((name, start, stop))
        return whole_file[start:stop]

    fetcher = RangeFetcher(LocalFiles(tmp_path), lambda name: written, mend=mend)

    found = read_with(fetcher, Box((0, 0), (2, WIDTH)), flat=True)

    assert (found == values[:2]).all()
    assert fetcher.total.mended[0] == ("a", START // 4096 * 4096, "w")
    assert len(asked) == (1 if lost == "flip" else 3)


def test_parity_that_rebuilds_something_else_is_not_believed(content):
    written = digest_of(content)
    content[START] ^= 1
    fetcher = RangeFetcher(MemoryFiles({"a": content}), lambda name: written, mend=lambda name, a, b: bytes(b - a))

    with pytest.raises(DamageError, match="the block's digest differs"):
        read_with(fetcher, Box((0, 0), (1, WIDTH)), flat=True)


def test_missing_and_short_files_are_damage_with_the_byte_named(tmp_path, content):
    box = whole((ROWS, WIDTH))
    for files in (LocalFiles(tmp_path), BucketFiles(LocalStore(tmp_path))):
        with pytest.raises(DamageError, match=r"a is missing\. Run: headway ckpt repair"):
            read_with(RangeFetcher(files), box, flat=True)
    with pytest.raises(DamageError, match=r"a is not in memory"):
        read_with(RangeFetcher(MemoryFiles({})), box, flat=True)
    (tmp_path / "a").write_bytes(content[:9000])
    for files in (LocalFiles(tmp_path), BucketFiles(LocalStore(tmp_path)), MemoryFiles({"a": content[:9000]})):
        with pytest.raises(DamageError, match="ends at byte 9000; bytes up to"):
            read_with(RangeFetcher(files), box, flat=False)


def test_a_file_that_cannot_be_read_is_damage_too(tmp_path):
    os.mkdir(tmp_path / "a")

    with pytest.raises(DamageError, match="a cannot be read at byte"):
        read_with(RangeFetcher(LocalFiles(tmp_path)), Box((0, 0), (1, WIDTH)), flat=True)
