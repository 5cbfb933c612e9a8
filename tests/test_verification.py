"""Verification: every flip in what matters is found, with file and tensor; nothing good is accused."""

import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.core.errors import FormatError, InputError
from headway.storage.checks.verification import verify, verify_store
from headway.storage.formats.dcp import read_metadata
from headway.storage.manifest import COMMIT, METADATA, CommitRecord, Piece, RankManifest, encode, read_record
from tests.checkpoints import Caller, some_state, write_checkpoint

NO_CHECKSUM = ".metadata has no checksum: it was held to the records and to what torch writes"


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ours"), 5, some_state(), objects={"lr": 0.1})


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stock") / "c"
    state = {
        "model": {"w": torch.randn(64, 50), "b": torch.randn(64)},
        "opt": {"step": 3, "m": torch.zeros(9).bfloat16(), "e": torch.zeros(0, 2)},
    }
    dcp.save(state, checkpoint_id=path)
    return path


class Broken:
    """A file that is changed for a moment."""

    def __init__(self, path: Path, content: bytes | None) -> None:
        self.path, self.content, self.good = path, content, path.read_bytes()

    def __enter__(self) -> None:
        self.path.unlink()
        if self.content is not None:
            self.path.write_bytes(self.content)

    def __exit__(self, *failure: object) -> None:
        self.path.write_bytes(self.good)


def flipped(path: Path, at: int, bit: int = 0) -> Broken:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    return Broken(path, bytes(content))


def pieces_of(checkpoint: Path, rank: int) -> tuple[Piece, ...]:
    return read_record(checkpoint / f"rank-{rank}" / "manifest.json", RankManifest).pieces


FILES = [
    ".metadata", "commit.json", "commit.json.copy", "rank-0/__0_0.distcp", "rank-0/digests.bin", "rank-0/manifest.json",
    "rank-0/manifest.json.copy", "rank-1/__1_0.distcp", "rank-1/digests.bin", "rank-1/manifest.json",
    "rank-1/manifest.json.copy",
]  # fmt: skip


def test_a_good_checkpoint_is_good_and_all_of_it_was_checked(ours):
    report = verify(ours)

    sizes = {str(path.relative_to(ours)): path.stat().st_size for path in ours.rglob("*") if path.is_file()}
    assert sorted(sizes) == FILES
    assert (report.status, report.damaged, report.notes, report.format) == ("good", (), (), "headway")
    assert (report.checked_bytes, report.unchecked_bytes) == (sum(sizes.values()), 0)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flip_in_any_file_is_found_at_its_place(ours, name, place, bit):
    at = int(place * (ours / name).stat().st_size)

    with flipped(ours / name, at, bit):
        report = verify(ours)

    assert {damage.file for damage in report.damaged} == {name}
    assert all(d.offset_bytes <= at and (not d.num_bytes or at < d.offset_bytes + d.num_bytes) for d in report.damaged)
    assert report.status == ("lost" if name.endswith(".distcp") else "repairable")


def test_a_flip_in_the_elements_names_the_tensor(ours):
    for rank in range(2):
        for piece in pieces_of(ours, rank):
            if piece.payload_bytes:
                with flipped(ours / piece.file, piece.payload_offset + piece.payload_bytes - 1):
                    report = verify(ours)
                assert [(d.file, d.tensor) for d in report.damaged] == [(piece.file, piece.fqn)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [None, b"", b"x" * 50, "half"], ids=["missing", "empty", "short", "half"])
def test_a_file_that_is_missing_or_cut_short_is_found(ours, name, content):
    if content == "half":
        content = (ours / name).read_bytes()[: (ours / name).stat().st_size // 2]
    with Broken(ours / name, content):
        report = verify(ours)

    if content is None and name.endswith(".copy"):
        assert report.status == "good"  # a twin is for the other's sake
    else:
        assert {damage.file for damage in report.damaged} == {name}
        assert report.status == ("lost" if name.endswith(".distcp") else "repairable")


def test_a_missing_image_names_all_that_it_held(ours):
    with Broken(ours / "rank-1/__1_0.distcp", None):
        report = verify(ours)

    assert {d.tensor for d in report.damaged} == {piece.fqn for piece in pieces_of(ours, 1)} | {"lr"}
    assert {d.what for d in report.damaged} == {"missing"}


def test_bytes_behind_an_image_are_found_and_extra_files_are_only_noted(ours, tmp_path):
    path = shutil.copytree(ours, tmp_path / "c")
    (path / "rank-0" / "notes.txt").write_text("hello")
    with open(path / "rank-0" / "__0_0.distcp", "ab") as file:
        file.write(b"more")

    report = verify(path)

    assert [(d.what, d.num_bytes) for d in report.damaged] == [("extra", 4)]
    assert report.notes == ("not part of the checkpoint: rank-0/notes.txt",)


def test_a_flip_is_still_placed_when_the_digests_are_lost_too(ours, tmp_path):
    path = shutil.copytree(ours, tmp_path / "c")
    (path / "rank-0" / "digests.bin").unlink()
    piece = pieces_of(path, 0)[0]

    with flipped(path / piece.file, piece.payload_offset):
        report = verify(path)

    assert {(d.file, d.tensor, d.what) for d in report.damaged} == {
        ("rank-0/digests.bin", None, "missing"), (piece.file, piece.fqn, "payload"),
    }  # fmt: skip
    assert report.status == "lost"
    assert verify(path).status == "repairable"


def test_a_commit_record_and_its_twin_both_gone_is_lost(ours, tmp_path):
    path = shutil.copytree(ours, tmp_path / "c")
    (path / COMMIT).unlink()
    (path / (COMMIT + ".copy")).unlink()

    report = verify(path)

    assert (report.status, [d.file for d in report.damaged]) == ("lost", [COMMIT])


def test_a_shallow_look_reads_no_elements(ours):
    piece = pieces_of(ours, 0)[0]
    with flipped(ours / piece.file, piece.payload_offset):
        report = verify(ours, deep=False)

    assert report.status == "good"
    assert report.checked_bytes < verify(ours).checked_bytes


def test_stock_checkpoints_are_checked_byte_by_byte(stock):
    """IN1 in small: any flip in a stock .distcp is found, and the tensor is named."""
    path = stock / "__0_0.distcp"
    records = list(read_metadata((stock / METADATA).read_bytes()).records())
    draw = random.Random(7)

    for at in draw.sample(range(path.stat().st_size), 60):
        owner = next(fqn for fqn, r in records if r.record_offset <= at < r.record_offset + r.record_bytes)
        with flipped(path, at, draw.randrange(8)):
            report = verify(stock)
        assert report.status == "lost"
        assert {(d.file, d.tensor) for d in report.damaged} == {("__0_0.distcp", owner)}
    assert verify(stock).status == "good"


def test_stock_metadata_that_is_broken_or_lies_is_found(stock):
    data = (stock / METADATA).read_bytes()
    lies = {
        b"float32": b"float64", b"model.b": b"model.c", b"__0_0.distcp": b"__0_1.distcp",
    }  # fmt: skip

    for old, new in lies.items():
        with Broken(stock / METADATA, data.replace(old, new)):
            assert verify(stock).status == "lost", old
    with Broken(stock / METADATA, data[:100]):
        report = verify(stock)
    assert [(d.file, d.what) for d in report.damaged] == [(METADATA, "pickle")]


def test_stock_files_missing_cut_short_or_longer_are_told_apart(stock):
    path = stock / "__0_0.distcp"
    good = path.read_bytes()

    with Broken(path, None):
        assert {d.what for d in verify(stock).damaged} == {"missing"}
    with Broken(path, good[:-10]):
        assert {d.what for d in verify(stock).damaged} == {"truncated"}
    with Broken(path, good + b"tail"):
        report = verify(stock)
    assert report.status == "good"
    assert report.notes == (NO_CHECKSUM, "__0_0.distcp has 4 bytes behind its last record")


def test_a_torch_save_file_names_the_tensor_that_is_damaged(tmp_path):
    path = tmp_path / "model.pt"
    state = {"first.weight": torch.ones(100), "second.weight": torch.arange(100.0)}
    torch.save(state, path)
    at = path.read_bytes().index(state["second.weight"].numpy().tobytes())

    assert verify(path).status == "good"
    with flipped(path, at + 8):
        report = verify(path)
    assert (report.status, report.format) == ("lost", "torch.save")
    assert [(d.file, d.tensor, d.offset_bytes) for d in report.damaged] == [("model.pt", "second.weight", at)]
    for cut in (1, 30, 900):
        with Broken(path, path.read_bytes()[:-cut]):
            assert verify(path).status == "lost"
    with Broken(path, b""):
        assert verify(path).status == "lost"


@pytest.mark.slow
def test_any_flip_in_a_torch_save_file_is_found(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(20.0), "none": torch.zeros(0, 2)}, path)

    for at in range(path.stat().st_size):
        with flipped(path, at, at % 8):
            assert verify(path).status == "lost", at


def test_formats_without_checksums_are_said_to_be_unchecked(tmp_path):
    save_file({"w": torch.arange(6.0)}, tmp_path / "m.safetensors")
    torch.save({"w": torch.arange(6.0)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    for name in ("m.safetensors", "old.pt"):
        report = verify(tmp_path / name)
        assert (report.status, report.unchecked_bytes) == ("good", 24)
        assert "no checksum" in report.notes[0]
        with Broken(tmp_path / name, (tmp_path / name).read_bytes()[:-1]):
            assert verify(tmp_path / name).status == "lost"


def test_a_folder_of_safetensors_has_all_that_its_index_names(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}'
    )

    report = verify(tmp_path)

    assert [(d.file, d.tensor, d.what) for d in report.damaged] == [
        ("model-2.safetensors", "b", "missing"), ("model-2.safetensors", "c", "missing"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_file_that_lacks_a_tensor_of_its_index_is_damaged(tmp_path, kind):
    for number, name in enumerate("aa", 1):  # the second is a copy of the first
        if kind == "bin":
            torch.save({name: torch.zeros(2)}, tmp_path / f"model-{number}.bin")
        else:
            save_file({name: torch.zeros(2)}, tmp_path / f"model-{number}.safetensors")
    index = tmp_path / f"model.{kind}.index.json"
    index.write_text(f'{{"weight_map": {{"a": "model-1.{kind}", "b": "model-2.{kind}"}}}}')

    for place in (tmp_path, index):
        assert [(d.file, d.tensor) for d in verify(place).damaged] == [(f"model-2.{kind}", "b")]
    index.write_text(f'{{"weight_map": {{"a": "model-1.{kind}"}}}}')
    assert [verify(place).status for place in (tmp_path, index)] == ["good", "good"]


def test_what_loading_would_run_is_noted_and_changes_nothing_else(tmp_path):
    state = {"w": torch.zeros(2), "e": Caller()}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    own = write_checkpoint(tmp_path / "own", 1, {"w": state["w"]}, objects={"e": state["e"], "lr": 0.1})
    call = f"{os.name}.system"

    notes = {path: verify(path).notes[:1] for path in (tmp_path / "new.pt", tmp_path / "old.pt", tmp_path / "dcp", own)}

    assert [verify(path).status for path in notes] == ["good"] * 4
    assert [note for (note,) in notes.values()] == [
        f"loading new.pt with weights_only=False runs {call}", f"loading old.pt with weights_only=False runs {call}",
        f"'e': dcp.load runs {call}", f"'e': restoring it runs {call}",
    ]  # fmt: skip


def test_a_file_cut_short_and_an_empty_one_are_said_to_be(tmp_path):
    torch.save({"w": torch.zeros(100)}, tmp_path / "x.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:700])
    for name in ("empty.pt", "empty.safetensors"):
        (tmp_path / name).touch()

    assert "was cut short, or is still being written" in verify(tmp_path / "cut.pt").notes[0]
    assert [verify(tmp_path / f"empty.{form}").notes for form in ("pt", "safetensors")] == [
        ("empty.pt is empty",), ("empty.safetensors is empty",),
    ]  # fmt: skip
    assert verify(tmp_path / "empty.pt").status == "lost"


def test_what_is_no_checkpoint_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / ".step-5.a.draft").mkdir()

    folder, file = verify(tmp_path), verify(tmp_path / "notes.txt")

    assert [folder.status, file.status] == ["not_a_checkpoint"] * 2
    assert folder.exit_code == 2
    assert folder.notes == ("there is only a save that was never committed",)
    with pytest.raises(InputError, match=r"there is nothing at .*nowhere. Name the folder"):
        verify(tmp_path / "nowhere")


def test_a_checkpoint_of_a_newer_headway_is_not_called_damaged(ours, tmp_path):
    path = shutil.copytree(ours, tmp_path / "c")
    newer = msgspec.structs.replace(read_record(path / COMMIT, CommitRecord), schema="headway.ckpt.commit/9")
    for name in (COMMIT, COMMIT + ".copy"):
        (path / name).write_bytes(encode(newer))

    with pytest.raises(FormatError, match=r"schema 'headway.ckpt.commit/9'.*Install a newer one"):
        verify(path)


def test_parts_of_a_checkpoint_and_drafts_are_not_taken_for_one(stock, ours, tmp_path):
    for part in (stock / METADATA, stock / "__0_0.distcp", ours / COMMIT, ours / "rank-0" / "__0_0.distcp"):
        with pytest.raises(InputError, match=r"is a part of a distributed checkpoint. Name the folder"):
            verify(part)
    draft = shutil.copytree(ours, tmp_path / ".step-5.a.draft")
    assert verify(draft).status == "not_a_checkpoint"


def test_stock_files_without_their_metadata_are_damage_not_nothing(stock, tmp_path):
    path = shutil.copytree(stock, tmp_path / "c")
    (path / METADATA).unlink()

    report = verify(path)

    assert (report.status, [(d.file, d.what) for d in report.damaged]) == ("lost", [(METADATA, "missing")])


def test_the_public_name_is_the_function_whatever_was_imported_before():
    code = "import headway.storage.checks.verification, headway.storage; print(callable(headway.storage.verify))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert answer.stdout.strip() == "True"


def test_a_store_that_is_no_folder_is_verified_the_same(ours, stock):
    class Bucket:
        """Bytes under names, as an object store has them."""

        place = "bucket"

        def __init__(self, path: Path) -> None:
            self._files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}

        def read(self, name, start=0, stop=None):
            if name not in self._files:
                raise FileNotFoundError(name)
            return self._files[name][start:stop]

        def list(self, prefix=""):
            return {name: len(data) for name, data in sorted(self._files.items()) if name.startswith(prefix)}

    for path in (ours, stock):
        report = verify_store(Bucket(path))
        assert (report.status, report.checked_bytes) == ("good", verify(path).checked_bytes)
    piece = pieces_of(ours, 0)[0]
    with flipped(ours / piece.file, piece.payload_offset):
        assert [d.tensor for d in verify_store(Bucket(ours)).damaged] == [piece.fqn]


def test_records_that_an_extension_transformed_are_unchecked(stock, tmp_path):
    path = shutil.copytree(stock, tmp_path / "c")
    whole = pickle.loads((path / METADATA).read_bytes())
    for info in whole.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (path / METADATA).write_bytes(pickle.dumps(whole))

    report = verify(path)

    sizes = [(path / name).stat().st_size for name in ("__0_0.distcp", METADATA)]
    assert (report.status, report.unchecked_bytes) == ("good", sum(sizes))


def test_a_record_that_is_another_tensor_than_the_metadata_says_is_found(stock, tmp_path):
    path = shutil.copytree(stock, tmp_path / "c")
    whole = pickle.loads((path / METADATA).read_bytes())
    names = {index.fqn: index for index in whole.storage_data}
    first, second = names["model.w"], names["model.b"]
    storage = whole.storage_data
    storage[first], storage[second] = storage[second], storage[first]
    (path / METADATA).write_bytes(pickle.dumps(whole))

    assert {(d.tensor, d.what) for d in verify(path).damaged} == {("model.w", "facts"), ("model.b", "facts")}


def test_stock_checkpoints_of_ranks_that_did_not_talk_are_checked_too(tmp_path):
    for rank in range(2):  # what `dcp.save(..., use_collectives=False)` leaves: metadata per rank
        dcp.save({"w": torch.full((50,), float(rank))}, checkpoint_id=tmp_path / f"{rank}")
        whole = pickle.loads((tmp_path / f"{rank}" / METADATA).read_bytes())
        for info in whole.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"__{rank}.metadata").write_bytes(pickle.dumps(whole))
        shutil.copy(tmp_path / f"{rank}" / "__0_0.distcp", tmp_path / "c" / f"__{rank}_0.distcp")

    report = verify(tmp_path / "c")

    assert (report.status, report.notes) == ("good", (NO_CHECKSUM,))
    with flipped(tmp_path / "c" / "__1_0.distcp", 700):
        assert {(d.file, d.tensor) for d in verify(tmp_path / "c").damaged} == {("__1_0.distcp", "w")}
    with Broken(tmp_path / "c" / "__0.metadata", b"x"):
        assert {d.file for d in verify(tmp_path / "c").damaged} == {"__0.metadata"}


def test_a_flip_in_stock_metadata_is_found_or_its_bytes_are_counted_as_unchecked(tmp_path):
    state = {"model": {"w": torch.arange(8.0), "b": torch.ones(3).bfloat16()}, "opt": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    path = tmp_path / "c" / METADATA
    good = path.read_bytes()
    names = {b"torch.strided": "pickle", b"_MEM_FORMAT_ENCODING": "pickle", b"_StorageInfo": "pickle"}

    for word, what in names.items():
        with Broken(path, good.replace(word, word[:-1] + bytes([word[-1] ^ 1]))):
            assert {d.what for d in verify(tmp_path / "c").damaged} == {what}
    parts = [at for at in range(len(good)) if good.startswith(b"\x05model", at)]
    with Broken(
        path, good[: parts[-1] + 1] + b"lodel" + good[parts[-1] + 6 :]
    ):  # the key that names of the model share
        assert {d.what for d in verify(tmp_path / "c").damaged} == {"name"}
    for at in range(0, len(good), 10):
        with Broken(path, good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]):
            report = verify(tmp_path / "c")
        assert report.status == "lost" or report.unchecked_bytes >= len(good)
