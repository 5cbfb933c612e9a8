"""Opening a checkpoint: ours and stock DCP's, small files from their copies, what is no checkpoint."""

import io
import shutil
import warnings

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from headway.checkpoint.layout.fetch import aligned_buffer
from headway.checkpoint.layout.stored import open_stored
from headway.checkpoint.restores.restore import restore_into
from headway.checkpoint.restores.restore_targets import unpack
from headway.core.errors import DamageError, FormatError
from headway.storage.formats.dcp import Chunk, StoredTensor
from headway.storage.stores import LocalStore
from tests.checkpoints import flip, write_checkpoint
from tests.layouts_made import write

STATE = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}, "step": 3}


@pytest.fixture
def ours(tmp_path):
    return write(STATE, tmp_path, 12)


@pytest.fixture
def stock(tmp_path):
    warnings.simplefilter("ignore")
    dcp.save(STATE, checkpoint_id=tmp_path / "step-9", no_dist=True)
    return tmp_path / "step-9"


def elements(stored, fqn):
    piece = stored.pieces(fqn)[0]
    return bytes(
        stored.span(piece.file, piece.payload_offset, piece.payload_offset + piece.payload_bytes, aligned_buffer)
    )


def test_ours_and_stocks_say_the_same_and_hold_the_elements_where_they_say(ours, stock):
    told = []
    for folder in (ours, stock):
        stored = open_stored(folder)
        told.append((stored.tensors, set(stored.objects), stored.paths))
        assert elements(stored, "model.w") == STATE["model"]["w"].numpy().tobytes()
        stored.close()

    assert told[0] == told[1]
    assert told[0][0] == {"model.w": ((2, 3), "float32"), "model.b": ((4,), "int64")}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_the_metadata_of_stock_dcp_may_take_goes_by_the_whole_checkpoint(tmp_path, monkeypatch):
    dcp.save({f"w{number}": torch.ones(2000) for number in range(50)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    monkeypatch.setattr("headway.core.files.safe_files.FREE_BYTES", 0)  # as if there were a million tensors

    assert len(open_stored(tmp_path / "step-1").tensors) == 50
    monkeypatch.setattr("headway.core.files.safe_files.PER_BYTE", 0)
    with pytest.raises(FormatError, match="asks for more room"):
        open_stored(tmp_path / "step-1")


def test_a_step_comes_from_the_record_or_from_the_folders_name(ours, stock, tmp_path):
    shutil.copytree(stock, tmp_path / "other")

    assert [(open_stored(p).step, open_stored(p).ours) for p in (ours, stock, tmp_path / "other")] == [
        (12, True), (9, False), (None, False),
    ]  # fmt: skip


def test_a_store_rooted_at_the_checkpoint_is_as_good_as_a_folder(ours):
    stored = open_stored(LocalStore(ours))

    assert stored.source == "remote"
    assert elements(stored, "model.b") == STATE["model"]["b"].numpy().tobytes()


@pytest.mark.parametrize("name", ["commit.json", "rank-0/manifest.json", "rank-0/digests.bin"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_small_file_that_is_damaged_is_taken_from_elsewhere(ours, name, how):
    path = ours / name
    flip(path, path.stat().st_size // 2, 8) if how == "flipped" else path.unlink()
    state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, "step": 0}

    report = restore_into(ours, state)

    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert report.hashed_bytes > 0


def test_a_small_file_that_is_whole_nowhere_is_damage(ours):
    (ours / "rank-0" / "manifest.json").unlink()
    (ours / "rank-0" / "manifest.json.copy").unlink()

    with pytest.raises(DamageError, match=r"manifest\.json is missing, and no copy of it is whole"):
        open_stored(ours)

    assert set(open_stored(ours, trust=False).tensors) == {"model.w", "model.b"}


def test_a_commit_record_is_taken_from_another_rank_rather_than_from_metadata_alone(ours):
    copies = ours / "rank-1" / "copies"
    copies.mkdir(parents=True)
    (ours / "commit.json").rename(copies / "commit.json")
    (ours / "commit.json.copy").unlink()
    assert open_stored(ours).ours
    (ours / ".metadata").unlink()

    stored = open_stored(ours)
    assert (stored.ours, stored.step) == (True, 12)
    assert elements(stored, "model.w") == STATE["model"]["w"].numpy().tobytes()


def test_a_file_is_no_checkpoint_and_says_how_it_becomes_one(tmp_path):
    torch.save(STATE, tmp_path / "model.pt")

    with pytest.raises(FormatError, match=r"model\.pt is a file, and a checkpoint is a folder.*headway ckpt import"):
        open_stored(tmp_path / "model.pt")


def test_what_is_no_checkpoint_says_what_one_holds(tmp_path):
    with pytest.raises(FormatError, match=r"no checkpoint: it holds neither commit\.json nor \.metadata"):
        open_stored(tmp_path)


def test_a_transposed_record_is_unpacked_or_named_where_torch_is_not(tmp_path):
    warnings.simplefilter("ignore")
    turned = {"w": torch.arange(12.0).view(3, 4).t()}
    dcp.save(turned, checkpoint_id=tmp_path / "t", no_dist=True)

    with pytest.raises(FormatError, match=r"in another form than row by row\. Read it where torch is"):
        open_stored(tmp_path / "t").pieces("w")

    stored = open_stored(tmp_path / "t", unpack=unpack)
    assert elements(stored, "w") == turned["w"].contiguous().numpy().tobytes()


def test_an_unpacked_record_of_another_shape_is_refused():
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    chunk = Chunk("a", 0, 0, (), (0,), (2,))
    with pytest.raises(DamageError, match="a at byte 0 is no tensor that torch can read"):
        unpack(file.getvalue()[:-40], StoredTensor("float32", (3,), (chunk,)), chunk)
    with pytest.raises(FormatError, match=r"holds float32 \[3\]; the metadata says float32 \[2\]"):
        unpack(file.getvalue(), StoredTensor("float32", (2,), (chunk,)), chunk)


def test_a_truncated_file_of_stocks_is_damage(stock):
    data = stock / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-700])
    state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, "step": 0}

    with pytest.raises(DamageError, match=r"__0_0\.distcp ends at byte"):
        restore_into(stock, state)


def test_checksums_tell_of_two_tensors_whether_they_are_alike_where_they_can(tmp_path):
    weight = torch.randn(40, 33)
    other = weight.clone()
    other[20, 20] += 1
    parts = {"a": weight, "b": weight.clone(), "c": other, "d": weight[:39], "e": torch.zeros(40, 33)}
    stored = open_stored(write_checkpoint(tmp_path, 1, parts, world_size=3))
    whole = open_stored(write_checkpoint(tmp_path, 2, {"a": weight}, world_size=1))

    assert [stored.is_alike("a", name) for name in "abcde"] == [True, True, False, False, False]
    # In rows or whole, with the same elements or others: as long as pieces are rows.
    stored._pieces["w"] = whole.pieces("a")
    stored.tensors["w"] = stored.tensors["a"]
    assert [stored.is_alike("w", name) for name in "abce"] == [True, True, False, False]
    stored._pieces["w"] = [msgspec.structs.replace(piece, crc32=0) for piece in whole.pieces("a")]
    assert [stored.is_alike("w", name) for name in "ad"] == [None, False]
