"""Restoring from a damaged checkpoint with parity: right values, the report says so, the files stay as they are."""

import shutil

import pytest
import torch

from headway.checkpoint import restore_into
from headway.checkpoint.layout.stored import ParityRepair
from headway.core.errors import DamageError
from headway.storage.commit import commit
from headway.storage.manifest import MANIFEST, RankManifest, read_record
from headway.storage.redundancy.parity import encode_rank
from tests.checkpoints import flip
from tests.layouts_made import write_part

WORLD = 4


def state():
    return {"w": torch.arange(400_000, dtype=torch.float32).view(1000, 400), "b": torch.arange(9)}


@pytest.fixture
def folder(tmp_path):
    for rank in range(WORLD):
        draft = write_part(state(), tmp_path, 1, rank=rank, world_size=WORLD)
    commit(draft, world_size=WORLD, redundancy="+2")
    for rank in range(WORLD):
        encode_rank(draft.target, rank)
    return draft.target


def restored(folder):
    mine = {"w": torch.zeros(1000, 400), "b": torch.zeros(9, dtype=torch.int64)}
    report = restore_into(folder, mine)
    assert torch.equal(mine["w"], state()["w"])
    assert torch.equal(mine["b"], state()["b"])
    return report


def flipped(folder, rank):
    piece = read_record(folder / f"rank-{rank}" / MANIFEST, RankManifest).pieces[0]
    path = folder / piece.file
    flip(path, piece.payload_offset + 1000)
    return path, path.read_bytes()


def test_whole_files_are_read_as_they_are(folder):
    assert restored(folder).source == "local"


def test_a_flipped_bit_is_mended_in_memory_and_left_on_disk(folder):
    path, damaged = flipped(folder, 1)

    report = restored(folder)

    assert report.source == "parity"
    assert report.repaired[0].startswith("rank-1/__1_0.distcp at byte ")
    assert report.repaired[0].endswith("(w)")
    assert path.read_bytes() == damaged


def test_two_rank_directories_may_be_lost(folder):
    for rank in (0, 2):
        shutil.rmtree(folder / f"rank-{rank}")

    assert restored(folder).source == "parity"


def test_more_than_the_parity_bears_is_damage(folder):
    for rank in (0, 2):
        shutil.rmtree(folder / f"rank-{rank}")
    flipped(folder, 1)

    with pytest.raises(DamageError, match="rank-"):
        restored(folder)


def test_a_file_of_no_image_and_a_folder_of_no_checkpoint_are_not_mended(folder, tmp_path):
    assert ParityRepair(folder)("rank-0/manifest.json", 0, 10) is None
    assert ParityRepair(tmp_path)("rank-0/__0_0.distcp", 0, 10) is None
