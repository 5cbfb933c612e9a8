"""The small files of a checkpoint come back from wherever they are whole."""

import shutil
from pathlib import Path

import pytest

from headway.storage.commit import commit_record, digests_of, manifests_of, read_guarded, rebuild
from headway.storage.manifest import COMMIT, METADATA
from headway.storage.stores import LocalStore
from tests.checkpoints import some_state, write_checkpoint

SIDECARS = [
    METADATA, COMMIT, "commit.json.copy", "rank-0/manifest.json", "rank-1/manifest.json.copy", "rank-1/digests.bin",
]  # fmt: skip


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ours"), 5, some_state(), objects={"lr": 0.1})


@pytest.fixture
def path(ours, tmp_path) -> Path:
    return shutil.copytree(ours, tmp_path / "c")


@pytest.mark.parametrize("name", SIDECARS)
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_any_one_sidecar_is_rebuilt_bit_by_bit(path, name, damage):
    good = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes(bytes([good[0] ^ 1]) + good[1:])
    store = LocalStore(path)

    assert rebuild(store, commit_record(store), name) == good


def test_digests_are_not_derived_from_an_image_that_is_damaged_too(path):
    image = path / "rank-1" / "__1_0.distcp"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    (path / "rank-1" / "digests.bin").unlink()
    store = LocalStore(path)

    assert rebuild(store, commit_record(store), "rank-1/digests.bin") is None


def test_metadata_needs_the_manifests_of_all_ranks(path):
    for name in (METADATA, "rank-0/manifest.json", "rank-0/manifest.json.copy"):
        (path / name).unlink()
    store = LocalStore(path)
    record = commit_record(store)

    assert rebuild(store, record, METADATA) is None
    assert rebuild(store, record, "rank-0/manifest.json") is None
    assert set(manifests_of(store, record)) == {1}


def test_copies_at_other_ranks_stand_in_for_a_lost_directory(path):
    store = LocalStore(path)
    for name in (COMMIT, METADATA, "rank-0/manifest.json", "rank-0/digests.bin"):
        target = path / "rank-1" / "copies" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path / name, target)
    before = digests_of(store, commit_record(store), 0)
    shutil.rmtree(path / "rank-0")
    for name in (COMMIT, COMMIT + ".copy", METADATA):
        (path / name).unlink()

    record = commit_record(store)

    assert record.step == 5
    assert set(manifests_of(store, record)) == {0, 1}
    assert digests_of(store, record, 0).root == before.root
    assert read_guarded(store, record, METADATA) is not None


def test_what_no_commit_wrote_cannot_be_rebuilt(path):
    store = LocalStore(path)

    assert rebuild(store, commit_record(store), "rank-0/__0_0.distcp") is None
    assert rebuild(store, commit_record(store), "notes.txt") is None
    assert read_guarded(store, commit_record(store), "notes.txt") is None
