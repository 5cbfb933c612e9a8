"""Manifests and commit records: what is written comes back, what was touched is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DamageError, FormatError
from headway.storage.manifest import (
    CommitRecord,
    FileEntry,
    Piece,
    RankManifest,
    StoredObject,
    decode,
    encode,
    image_name,
    merged_objects,
)

names = st.text(min_size=1, max_size=30)
sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
pieces = st.builds(
    Piece, fqn=names, dtype=st.sampled_from(["float32", "bool"]), shape=sizes, offsets=sizes, lengths=sizes,
    file=names, record_offset=st.integers(0, 2**50), record_bytes=st.integers(0, 2**50),
    payload_offset=st.integers(0, 2**50), payload_bytes=st.integers(0, 2**50), crc32=st.integers(0, 2**32 - 1),
)  # fmt: skip
manifests = st.builds(
    RankManifest, step=st.integers(0, 2**40), attempt=names, rank=st.integers(0, 9), world_size=st.integers(1, 9),
    image=st.none(), pieces=st.lists(pieces, max_size=3).map(tuple), replicas=st.dictionaries(names, names, max_size=3),
    paths=st.dictionaries(names, st.lists(names | st.integers(0, 99), max_size=3).map(tuple), max_size=3),
)  # fmt: skip


@given(manifest=manifests)
def test_a_manifest_comes_back_as_it_was_and_is_plain_json(manifest):
    data = encode(manifest)

    assert decode(data, RankManifest, "manifest.json") == manifest
    told = json.loads(data)
    assert (told["step"], len(told["pieces"])) == (manifest.step, len(manifest.pieces))
    assert data.splitlines()[-1].startswith(b'"checksum":"xxh3_128:')


def test_a_flip_anywhere_is_damage_or_no_record_at_all():
    data = encode(CommitRecord(step=3, attempt="a", world_size=2, files=(FileEntry("x", 1, 4096, "00", 0),)))

    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1
        with pytest.raises((DamageError, FormatError)):
            decode(bytes(broken), CommitRecord, "commit.json")


@pytest.mark.parametrize("cut", [1, 10, 60, 200])
def test_a_record_cut_short_is_damage(cut):
    data = encode(CommitRecord(step=3, attempt="a", world_size=2))

    with pytest.raises((DamageError, FormatError), match=r"commit\.json"):
        decode(data[:-cut], CommitRecord, "commit.json")


def test_a_record_of_another_kind_or_version_says_so():
    with pytest.raises(FormatError, match=r"written by another version of headway"):
        decode(encode(CommitRecord(step=3, attempt="a", world_size=2)), RankManifest, "manifest.json")
    with pytest.raises(FormatError, match=r"has the schema 'headway.ckpt.commit/9'.*Install a newer one"):
        decode(
            encode(CommitRecord(step=3, attempt="a", world_size=2, schema="headway.ckpt.commit/9")), CommitRecord, "c"
        )
    with pytest.raises(FormatError, match=r"is no CommitRecord of headway's"):
        decode(b"hello", CommitRecord, "c")


def manifest(rank: int, world_size: int, *objects: tuple[str, int]) -> RankManifest:
    stored = tuple(StoredObject(fqn, rank, image_name(rank), 0, 10, crc) for fqn, crc in objects)
    return RankManifest(1, "a", rank, world_size, None, objects=stored)


def test_objects_are_one_only_where_all_ranks_wrote_the_same_bytes():
    told = merged_objects([manifest(1, 2, ("a", 5), ("b", 5), ("c", 5)), manifest(0, 2, ("a", 5), ("b", 6))])

    assert {fqn: sorted(entries, key=str) for fqn, entries in told.items()} == {"a": [None], "b": [0, 1], "c": [1]}
    assert told["a"][None].file == image_name(0)
