"""Digests of stored bytes: blocks, roots, CRCs that combine."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DamageError, FormatError, InputError, UnknownNameError
from headway.storage import digests
from headway.storage.digests import (
    DIGESTS,
    LARGE_FILE_BYTES,
    Digester,
    block_bytes_for,
    block_digests,
    crc32,
    crc32_combine,
    damaged_blocks,
    digest_of,
    merkle_root,
    pack_digests,
    tree_root,
    unpack_digests,
)

texts = st.binary(max_size=3000)

INSTALLED = [name for name in DIGESTS if name != "blake3" or digests.blake3 is not None]
"""blake3 is an extra."""


@given(parts=st.lists(texts, max_size=6), block_bytes=st.integers(1, 700))
def test_a_digester_gives_what_whole_buffers_give_however_the_bytes_are_cut(parts, block_bytes):
    digester, crcs = Digester(block_bytes), []
    for part in parts:
        digester.update(part)
        crcs.append(digester.take_crc32())

    whole = b"".join(parts)
    assert crcs == [zlib.crc32(part) for part in parts]
    assert digester.finish().root == digest_of(whole, block_bytes).root
    assert digester.finish().digests.tolist() == block_digests(whole, block_bytes).tolist()


@given(first=texts, second=texts)
def test_combined_crcs_are_zlibs_over_the_concatenation(first, second):
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_crc_combines_over_a_length_that_nobody_could_hash():
    half, whole = 1 << 40, 1 << 41

    assert crc32_combine(digests.crc32_shift(5, half), 0, half) == digests.crc32_shift(5, whole)


@pytest.mark.parametrize("name", INSTALLED)
@given(data=st.binary(min_size=1, max_size=2000), at=st.integers(0), bit=st.integers(0, 7))
def test_one_flipped_bit_changes_one_block_and_the_root(name, data, at, bit):
    written = digest_of(data, 256, digest=name)
    flipped = bytearray(data)
    flipped[at % len(data)] ^= 1 << bit

    assert damaged_blocks(flipped, written) == [at % len(data) // 256]
    assert digest_of(flipped, 256, digest=name).root != written.root
    assert damaged_blocks(data, written) == []


@given(data=st.binary(min_size=1, max_size=5000), start=st.integers(0, 5000), length=st.integers(0, 5000))
def test_a_range_is_verified_by_the_blocks_it_touches_and_no_others(data, start, length):
    written = digest_of(data, 64)
    start = min(start, len(data))
    stop = min(start + length, len(data))

    first, last = written.covering(start, stop)

    assert first <= start <= stop <= last <= len(data)
    assert last - first <= stop - start + 2 * 64
    assert damaged_blocks(data[first:last], written, start=first) == []


@given(data=texts, block_bytes=st.integers(1, 5000))
def test_a_file_of_digests_comes_back_as_it_was(data, block_bytes):
    written = digest_of(data, block_bytes)

    back = unpack_digests(pack_digests(written))

    assert (back.num_bytes, back.block_bytes, back.digest) == (written.num_bytes, written.block_bytes, written.digest)
    assert back.digests.tolist() == written.digests.tolist()


def test_the_digests_are_xxh3_of_each_block():
    data = bytes(range(256)) * 40

    assert block_digests(data, 4096).tolist() == [
        xxhash.xxh3_64_intdigest(data[start : start + 4096]) for start in range(0, len(data), 4096)
    ]


def test_crc32_is_zips_whichever_package_gives_it():
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926


def test_blocks_are_small_below_64_mib_and_large_from_there():
    assert block_bytes_for(0) == block_bytes_for(LARGE_FILE_BYTES - 1) == 4096
    assert block_bytes_for(LARGE_FILE_BYTES) == 65536


def test_a_root_tells_lengths_and_block_sizes_apart():
    none = np.array([], dtype=np.uint64)

    roots = {merkle_root(none, 0, 4096), merkle_root(none, 0, 65536), merkle_root(none, 1, 4096)}

    assert len(roots) == 3


def test_the_root_of_a_checkpoint_does_not_depend_on_the_order_of_its_files():
    files = [("b", 2, "x"), ("a", 1, "y")]

    assert tree_root(files) == tree_root(reversed(files))
    assert tree_root(files) != tree_root([("b", 2, "y"), ("a", 1, "x")])


def test_a_flip_anywhere_in_a_file_of_digests_is_found():
    packed = pack_digests(digest_of(bytes(9000)))

    for at in range(len(packed)):
        broken = bytearray(packed)
        broken[at] ^= 4
        with pytest.raises((DamageError, FormatError), match=r"digests.bin"):
            unpack_digests(bytes(broken))


def test_bad_input_is_told_with_its_value_and_its_remedy(monkeypatch):
    with pytest.raises(UnknownNameError, match="Did you mean 'xxh3_64'"):
        digest_of(b"x", digest="xxh3")
    with pytest.raises(InputError, match=r"block_bytes is 0.*Use block_bytes_for"):
        Digester(0)
    with pytest.raises(InputError, match=r"bytes 3..12 do not lie in a file of 10"):
        digest_of(bytes(10)).covering(3, 12)
    with pytest.raises(InputError, match=r"are not whole blocks.*covering"):
        damaged_blocks(bytes(10), digest_of(bytes(300), 64), start=64)
    with pytest.raises(InputError, match=r"second_bytes is -1"):
        crc32_combine(1, 2, -1)
    monkeypatch.setattr(digests, "blake3", None)
    with pytest.raises(InputError, match=r"blake3, which is not installed. Install headway\[integrity\]"):
        digest_of(b"x", digest="blake3")


def test_without_the_extras_zlib_takes_over():
    code = "import sys; sys.modules.update(dict.fromkeys(['isal', 'isal.isal_zlib', 'blake3'])); "
    code += "from headway.storage.digests import crc32, digest_of; "
    code += "print(crc32(b'123456789') == 0xCBF43926, digest_of(b'x').root)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert answer.stdout.split() == ["True", digest_of(b"x").root], answer.stderr
