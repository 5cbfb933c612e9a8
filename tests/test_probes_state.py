"""State probes: saves, loads, syncs and renames, with what lies between them; nothing counted twice."""

import io
import os
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headway.runtime.recorder.probes import ProcessSaves
from tests.datasets import Sized
from tests.recorded import recording, rows

MS = 1_000_000


class Slow(io.FileIO):
    """A file whose flush takes 5 ms."""

    def flush(self):
        time.sleep(0.005)
        super().flush()


def test_a_save_and_its_load_are_recorded_with_their_bytes(tmp_path):
    with recording(tmp_path / "run"):
        torch.save({"w": torch.ones(1000)}, tmp_path / "w.pt")
        loaded = torch.load(tmp_path / "w.pt")
    found = rows(tmp_path / "run")

    assert loaded["w"].sum() == 1000
    size = (tmp_path / "w.pt").stat().st_size
    assert [row["a"] for row in found["checkpoint.save"] + found["checkpoint.load"]] == [size, size]


def test_flush_sync_close_and_rename_of_a_save_are_counted_with_no_gap(tmp_path):
    with recording(tmp_path / "run"):
        with Slow(tmp_path / "w.tmp", "wb") as file:
            torch.save({"w": torch.ones(1000)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp_path / "w.tmp", tmp_path / "w.pt")
    found = rows(tmp_path / "run")
    (save,), (sync,), (rename,) = (found[f"checkpoint.{name}"] for name in ("save", "sync", "rename"))

    assert save["start_ns"] + save["duration_ns"] == sync["start_ns"]
    assert sync["start_ns"] + sync["duration_ns"] == rename["start_ns"]
    assert sync["duration_ns"] >= 5 * MS
    assert torch.load(tmp_path / "w.pt")["w"].sum() == 1000


def test_syncs_and_renames_of_other_files_are_no_checkpoint(tmp_path):
    with recording(tmp_path / "run"), (tmp_path / "log").open("w") as log:
        os.fsync(log.fileno())
        torch.save(1, tmp_path / "w.pt")
        os.fsync(log.fileno())
        (tmp_path / "other").write_text("text")
        os.rename(tmp_path / "other", tmp_path / "another")
        os.rename(tmp_path / "w.pt", tmp_path / "kept.pt")
    found = rows(tmp_path / "run")

    assert len(found["checkpoint.rename"]) == 1
    assert "checkpoint.sync" not in found


def test_a_saved_file_and_its_folder_may_be_synced_through_any_descriptor(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with recording(tmp_path / "run"):
        torch.save(1, tmp_path / "link" / "w.pt")
        with (tmp_path / "w.pt").open("rb") as file:
            os.fsync(file.fileno())
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    (save,), (first, _) = (rows(tmp_path / "run")[f"checkpoint.{name}"] for name in ("save", "sync"))

    assert first["start_ns"] == save["start_ns"] + save["duration_ns"]


def test_a_step_between_save_and_sync_breaks_the_chain():
    saves = ProcessSaves()
    saves.saved("/a", 3, end_ns=10, steps=1)

    assert saves.since(descriptor=3, start_ns=20, steps=1) == 10
    assert saves.since(descriptor=3, start_ns=20, steps=2) == 20
    assert saves.since(descriptor=3, start_ns=10**11, steps=1) == 10**11
    assert saves.knows("/a")
    assert not saves.knows("/")


def test_only_the_outermost_save_is_recorded(tmp_path):
    with recording(tmp_path / "run"):
        dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        target = {"w": torch.zeros(100)}
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = rows(tmp_path / "run")
    mine = [row for row in found["checkpoint.save"] if row["lane"] == 0]

    assert target["w"].sum() == 100
    assert len(mine) == 1
    assert mine[0]["a"] >= 400
    assert len([row for row in found["checkpoint.load"] if row["lane"] == 0]) == 1


def test_what_a_dataset_loads_is_input_and_no_checkpoint(tmp_path):
    class Files(Sized):
        size = 4

        def __getitem__(self, index):
            return torch.load(tmp_path / "example.pt")

    torch.save(torch.ones(2), tmp_path / "example.pt")
    with recording(tmp_path / "run"):
        for _ in torch.utils.data.DataLoader(Files(), batch_size=2):
            pass

    assert "checkpoint.load" not in rows(tmp_path / "run")


def test_safetensors_are_seen(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    with recording(tmp_path / "run"):
        safetensors.save_file({"w": torch.ones(10)}, str(tmp_path / "w.safetensors"))
        assert safetensors.load_file(str(tmp_path / "w.safetensors"))["w"].sum() == 10
    found = rows(tmp_path / "run")

    assert found["checkpoint.save"][0]["a"] == (tmp_path / "w.safetensors").stat().st_size
    assert len(found["checkpoint.load"]) == 1


def test_a_save_that_fails_raises_what_it_raised_before(tmp_path):
    with recording(tmp_path / "run"):
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(1, tmp_path / "missing" / "w.pt")
        torch.save(1, tmp_path / "w.pt")

    assert len(rows(tmp_path / "run")["checkpoint.save"]) == 1


def test_a_file_object_of_the_users_own_is_only_asked_for_its_descriptor(tmp_path):
    class Odd:
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += bytes(data)
            return len(data)

        def flush(self):
            pass

        def fileno(self):
            raise LookupError("no descriptor here")

        def tell(self):
            raise AssertionError("not to be asked")

    odd = Odd()
    with recording(tmp_path / "run"):
        torch.save(torch.ones(3), odd, _use_new_zipfile_serialization=True)

    assert torch.load(io.BytesIO(odd.data)).sum() == 3
    assert len(rows(tmp_path / "run")["checkpoint.save"]) == 1
