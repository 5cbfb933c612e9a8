"""Rings lie on this host, each host touches its own alone, and a ring that somebody has mapped is never shortened."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headway.core.machine.host import Mount, place_of
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.run_folder.drain import Drainer
from headway.runtime.run_folder.finalise import finalise
from headway.runtime.run_folder.problems import Problems
from headway.trace.recording.runs import Run
from headway.trace.rings import records, ring_folders
from tests.paths import ROOT, python_path
from tests.rings_made import Process

MOUNTINFO = r"""22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
31 22 0:26 / /home rw - nfs4 server:/home rw,vers=4.2
32 31 0:27 / /home/local\040disk rw - xfs /dev/sdb1 rw
33 22 0:28 / /mnt rw - ext4 /dev/sdc1 rw
34 22 0:29 / /mnt rw - fuse.gcsfuse bucket rw
35 22 0:30 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
"""

SCRIPT = """
import os, sys, time
import torch
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(30):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(2.5 if step == 15 and "pause" in sys.argv else 0.01)
if "fail first" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(1)
print("mapped", sorted({line.split()[-1] for line in open("/proc/self/maps") if ".ring" in line}))
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_local"),
    [
        ("/etc", "ext4", True),
        ("/home/me/runs", "nfs4", False),
        ("/home/local disk/runs", "xfs", True),
        ("/homely", "ext4", True),
        ("/mnt/x", "fuse.gcsfuse", False),  # the later mount hides the earlier one
        ("/scratch", "lustre", False),
    ],
)
def test_a_path_lies_on_the_deepest_and_latest_mount_above_it(tmp_path, path, kind, is_local):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTINFO)

    place = place_of(Path(path), tmp_path)

    assert (place.kind, place.is_local) == (kind, is_local)


def test_without_a_list_of_mounts_everything_counts_as_local(tmp_path):
    assert place_of(tmp_path, tmp_path / "no such root").is_local


def test_a_ring_that_is_retired_stays_mapped_and_its_name_stays_taken(tmp_path):
    process = Process(tmp_path)
    process.train(2)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    drainer.drain()
    (ring,) = drainer._followed.values()
    ring.retire()

    process.train(50)  # a store into a mapping that was cut short would end this process

    assert Path(process.recorder.path).stat().st_size == 0
    assert records.stems(tmp_path / "rings")


def test_what_a_ring_held_is_kept_when_somebody_removes_it_while_the_job_runs(tmp_path):
    process = Process(tmp_path)
    process.train(4)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    drainer.drain()
    process.train(3)
    os.unlink(process.recorder.path)  # as a session manager does when its user logs out
    drainer.stop()
    (stem,) = records.stems(tmp_path / "rings")

    assert records.recorded(stem).dropped == 0
    assert len(finalise(tmp_path)) == 1


@pytest.fixture
def far_folder(tmp_path, monkeypatch):
    """A run folder that passes for one on NFS, and a folder of this host's memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    far = Mount("nfs4", ring_folders.place_of(tmp_path).top)
    monkeypatch.setattr(ring_folders, "place_of", lambda path: far if "run" in path.parts else place_of(path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory))
    return tmp_path / "run", memory


@pytest.mark.slow
def test_on_a_network_file_system_rings_are_mapped_in_memory_and_given_back(far_folder, tmp_path, capfd, monkeypatch):
    folder, memory = far_folder
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    options = LaunchOptions(out=folder, quiet=True, windows=0, max_restarts=1, nproc_per_node=1)
    ended = launch(options, ["train.py", "fail first"])

    assert ended.code == 0
    assert f"mapped ['{memory}/headway-rings-" in capfd.readouterr().out
    assert [part.meta["num_steps"] for part in Run.open(folder).attempts()] == [30, 30]
    assert not list(memory.iterdir())
    assert not list((folder / "rings").iterdir())


@pytest.mark.parametrize("is_held", [True, False])
def test_what_no_launcher_holds_and_no_run_leads_to_is_removed_by_the_next_run(is_held, far_folder, monkeypatch):
    monkeypatch.setattr(ring_folders, "NEW_S", -1.0)
    folder, memory = far_folder
    ring_folders.make(folder)
    (kept,) = memory.iterdir()
    shutil.rmtree(folder)  # or another container does not see it
    if not is_held:
        os.close(ring_folders._HELD.pop())
    ring_folders.make(folder, host=1)

    assert kept.exists() == is_held
    assert len(list(memory.iterdir())) == 1 + is_held


def test_launchers_of_one_host_share_its_memory(far_folder):
    folder, memory = far_folder
    first, second = ring_folders.make(folder, 0), ring_folders.make(folder, 0)
    Process(folder).recorder.close()
    (ring_folders.live_folder(first) / "a0-r0-p1.ring").touch()
    ring_folders.leave(second)  # the other one's ring is still there

    assert first == second
    assert len(list(memory.iterdir())) == 1
    assert records.stems(first)[0].name == "a0-r0-p1"


def steps_of(folder: Path) -> dict[int, int]:
    trace = Run.open(folder).trace
    steps = trace.where(trace.named("step"))
    return dict(Counter(steps.events["rank"].tolist()))


def can_make_namespaces() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="process namespaces need the right to make them")
def test_two_hosts_that_do_not_see_each_others_processes_share_a_run_folder(tmp_path):
    """Each of them takes the other's live rings for those of processes that are gone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    hosts = [
        subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c",
             f"for i in $(seq {300 * rank}); do (:); done; exec {sys.executable} -m headway.cli run --nnodes 2 "
             f"--node-rank {rank} --master-addr 127.0.0.1 --master-port {port} --out shared --windows 0 --quiet "
             "-- train.py pause"],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [host.communicate(timeout=120)[0] for host in hosts]

    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert steps_of(tmp_path / "shared") == {0: 30, 1: 30}
    assert not list((tmp_path / "shared").glob("hosts/*/rings/*"))
    assert json.loads((tmp_path / "shared" / "run.json").read_text())["exit"]["class"] == "ok"


def test_a_folder_of_rings_that_cannot_be_looked_at_stops_no_launcher(tmp_path):
    rings = tmp_path / ("rings" * 60)  # any error of the system serves: this name is too long
    problems = Problems()
    drainer = Drainer(rings, problems, attempt=0, budget_bytes=1 << 20)
    drainer.stop()

    assert len(problems.lines()) <= 1
