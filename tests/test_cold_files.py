"""Files made cold: out of the page cache once per pass, and only what the dataset reads."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from headway.data.bytes.account import usage
from headway.data.stalls.torch_resident import ColdFiles, drop, open_files

READ = os.O_RDONLY | os.O_CLOEXEC


@pytest.fixture
def files(tmp_path):
    return ColdFiles(str(tmp_path / "run"), [True])


def written(tmp_path, name="data.bin", size=1 << 20):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def test_a_dropped_file_is_read_from_storage_again(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if kind in {"tmpfs", "ramfs"}:
        pytest.skip(f"{tmp_path} lies on {kind}, which is memory")
    path = written(tmp_path)
    path.read_bytes()
    before = usage()["read_bytes"]
    path.read_bytes()
    cached = usage()["read_bytes"]
    dropped = drop(str(path))
    path.read_bytes()

    assert dropped
    assert cached == before
    assert usage()["read_bytes"] - cached >= 1 << 20


def test_a_file_is_dropped_once_per_pass(tmp_path, files):
    path = str(written(tmp_path))
    begin_pass = files.around_fetcher(lambda fetcher: None)
    counts = []
    for _ in range(2):
        begin_pass(files_fetcher := type("Fetcher", (), {})())
        for _ in range(3):
            files.opened("open", (path, "r", READ))
        counts.append(files.num_dropped())

    assert counts[1] - counts[0] == 1
    assert not files_fetcher.headway_fetched


def test_what_dropping_costs_the_training_thread_is_not_counted_for_workers(tmp_path, files):
    files.opened("open", (str(written(tmp_path)), "r", READ))

    assert (files.num_dropped(), files.dropping_s()) == (1, 0.0)


def test_a_workers_drops_are_counted_with_what_they_cost(tmp_path, files, monkeypatch):
    monkeypatch.setattr("headway.data.stalls.torch_resident.get_worker_info", lambda: SimpleNamespace(id=1))
    files.opened("open", (str(written(tmp_path)), "r", READ))

    assert files.num_dropped() == 1
    assert 0 < files.dropping_s() < 5


@pytest.mark.parametrize(
    ("event", "path", "flags"),
    [
        ("os.listdir", "data.bin", READ), ("open", "data.bin", os.O_WRONLY | os.O_CREAT),
        ("open", "data.bin", os.O_RDWR), ("open", "no such file", READ), ("open", ".", READ),
        ("open", "run/plan.json", READ), ("open", 0, READ),
    ],
)  # fmt: skip
def test_what_is_not_read_by_the_dataset_is_left_alone(tmp_path, monkeypatch, files, event, path, flags):
    written(tmp_path)
    written(tmp_path, "run/plan.json")
    monkeypatch.chdir(tmp_path)
    files.opened(event, (path, "r", flags))

    assert files.num_dropped() == 0


def test_files_opened_outside_the_dataset_are_left_alone(tmp_path):
    files = ColdFiles(str(tmp_path / "run"), [False])
    files.opened("open", (str(written(tmp_path)), "r", READ))

    assert files.num_dropped() == 0


def test_what_c_code_holds_open_is_found_by_its_descriptor_and_its_mapping(tmp_path):
    import mmap

    held, mapped, own = (written(tmp_path, name) for name in ("held", "mapped", "own"))
    with held.open("rb"), mapped.open("rb") as file, own.open("r+b"):
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.close()
        found = open_files()
        view.close()

    assert {str(held), str(mapped)} <= found
    assert str(own) not in found
    assert not [path for path in found if ".so" in path]


def test_usage_of_children_is_counted_while_they_run_and_after():
    before = usage()["cpu_s"]
    subprocess.run(["python3", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)

    assert usage()["cpu_s"] - before >= 0.25
