"""The commit: whole or not at all, also when the power goes, also when two want it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.core.errors import DamageError, HeadwayError, InputError
from headway.storage.checks.verification import verify
from headway.storage.commit import StepTakenError, commit, committed, recover, remove
from headway.storage.draft import finish_rank, is_stale, open_draft, ranks_done, wait_for_ranks
from headway.storage.manifest import COMMIT, MANIFEST, METADATA, CommitRecord, read_record
from tests.checkpoints import rows_of, some_state, unsynced, write_checkpoint, write_rank
from tests.spawn import run_threads

State = dict[str, bytes]
"""A folder's files: path -> content; an empty folder is `path/`."""


class Disk:
    """Watches what is done to a folder, and says what each kind of crash would leave of it at that moment.

    A file's content is durable once its descriptor was fsynced, an entry once its folder was; nothing else is.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.crashes = root, []
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._held: list[int] = []  # so that no inode number is used twice
        self._remember(root)
        for name in ("mkdir", "fsync", "replace", "rename", "unlink"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable) -> Callable:
        def act(*args, **kwargs):
            self.crashes.append((name, args, self.running(), self.synced(), self.renamed()))
            answer = real(*args, **kwargs)
            if name == "fsync":
                self._remember(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            return answer

        return act

    def _remember(self, path: Path) -> None:
        inode = path.stat().st_ino
        self._held.append(os.open(path, os.O_RDONLY))
        if path.is_dir():
            self._entries[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._contents[inode] = path.read_bytes()

    def running(self) -> State:
        """The process dies, the machine goes on."""
        return {os.path.relpath(path, self.root): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def synced(self) -> State:
        """The power goes, and only what was synced is there."""
        found: State = {}

        def below(inode: int, prefix: str) -> None:
            for name, child in self._entries.get(inode, {}).items():
                if child in self._contents:
                    found[prefix + name] = self._contents[child]
                elif child in self._entries:
                    below(child, f"{prefix}{name}/")

        below(self.root.stat().st_ino, "")
        return found

    def renamed(self) -> State:
        """The power goes; every entry made it to the disk, but of the files only what was synced."""
        return {
            os.path.relpath(path, self.root): self._contents.get(path.stat().st_ino, b"")
            for path in self.root.rglob("*")
            if path.is_file()
        }

    def close(self) -> None:
        for handle in self._held:
            os.close(handle)


def laid_out(state: State, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in state.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def quick():
    """Nothing but `watched`, which is made before, needs fsync."""
    with unsynced():
        yield


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A save of step 2 beside a committed step 1, watched operation by operation."""
    root = tmp_path_factory.mktemp("watched")
    small = {"w": torch.arange(30.0).reshape(10, 3), "b": torch.ones(2)}
    write_checkpoint(root, 1, small)
    for path in [root, *root.rglob("*")]:  # step 1 is on the disk for good
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(root, monkeypatch)
        for path in (root / "step-1", *(root / "step-1").rglob("*")):
            disk._remember(path)
        write_checkpoint(root, 2, small, objects={"lr": 0.1}, sync=True)
        disk.crashes.append(("end", (), disk.running(), disk.synced(), disk.renamed()))
    yield disk
    disk.close()


@pytest.mark.parametrize("kind", ["running", "synced", "renamed"])
def test_whenever_it_stops_what_is_listed_is_whole_and_the_older_checkpoint_stands(watched, kind, tmp_path):
    at = 2 + ["running", "synced", "renamed"].index(kind)
    looked: dict[tuple, list[int]] = {}
    listed = []
    for crash in watched.crashes:
        key = tuple(sorted((name, content) for name, content in crash[at].items()))
        if key not in looked:  # many operations change nothing that this crash would show
            root = laid_out(crash[at], tmp_path / "crashed")
            assert all(verify(one.path).status == "good" for one in committed(root))
            looked[key] = [one.step for one in committed(root)]
        listed.append(looked[key])

    first = listed.index([1, 2])
    assert listed == [[1]] * first + [[1, 2]] * (len(listed) - first)
    assert len(watched.crashes) > 50


def test_after_any_crash_the_step_is_saved_again(watched, tmp_path):
    small = {"w": torch.arange(30.0).reshape(10, 3), "b": torch.ones(2)}

    for crash in watched.crashes[::9]:
        root = laid_out(crash[2], tmp_path / "crashed")
        write_checkpoint(root, 2, small, attempt="again", replace=True)
        assert [(one.step, verify(one.path).status) for one in committed(root)] == [(1, "good"), (2, "good")]


def test_of_many_writers_of_one_step_exactly_one_wins(tmp_path):
    state = {"w": torch.zeros(4)}
    drafts = []
    for number in range(6):
        draft = open_draft(tmp_path, 9, f"a{number}", rank=0)
        write_rank(draft, 0, 1, rows_of(state, 1)[0])
        drafts.append(draft)
    gate, results = threading.Barrier(len(drafts)), {}

    def race(draft) -> None:
        gate.wait()
        try:
            results[draft.attempt] = commit(draft, world_size=1)
        except StepTakenError:
            results[draft.attempt] = None

    run_threads(race, [(draft,) for draft in drafts])

    winners = [attempt for attempt, record in results.items() if record is not None]
    assert len(results) == 6
    assert len(winners) == 1
    assert read_record(tmp_path / "step-9" / COMMIT, CommitRecord).attempt == winners[0]
    assert verify(tmp_path / "step-9").status == "good"


def test_a_step_that_stands_is_not_touched_unless_it_is_to_be_replaced(tmp_path):
    path = write_checkpoint(tmp_path, 4, some_state(1), attempt="first")
    before = read_record(path / COMMIT, CommitRecord)

    with pytest.raises(StepTakenError, match=r"step-4 is committed already.*Remove it first"):
        write_checkpoint(tmp_path, 4, some_state(2), attempt="second")
    assert read_record(path / COMMIT, CommitRecord) == before

    recover(tmp_path)
    write_checkpoint(tmp_path, 4, some_state(2), attempt="third", replace=True)
    assert read_record(path / COMMIT, CommitRecord).attempt == "third"
    assert verify(path).status == "good"


def test_a_commit_that_is_asked_for_again_answers_what_it_did(tmp_path):
    draft = open_draft(tmp_path, 4, "a", rank=0)
    write_rank(draft, 0, 1, rows_of(some_state(), 1)[0])

    first = commit(draft, world_size=1)

    assert commit(draft, world_size=1) == first


def test_a_missing_rank_is_named_and_nothing_is_committed(tmp_path):
    state = rows_of(some_state(), 3)
    for rank in (0, 2):
        draft = open_draft(tmp_path, 4, "a", rank=rank)
        write_rank(draft, rank, 3, state[rank])

    assert ranks_done(draft, 3) == {0, 2}
    with pytest.raises(HeadwayError, match=r"step 4 is not committed: of 3 ranks 1 \(1\) did not finish"):
        commit(draft, world_size=3, deadline_s=0.05)
    assert committed(tmp_path) == []


def test_a_draft_that_vanishes_ends_the_wait(tmp_path):
    draft = open_draft(tmp_path, 4, "a", rank=0)
    shutil.rmtree(draft.path)

    with pytest.raises(DamageError, match="was removed while ranks wrote it"):
        wait_for_ranks(draft, 1, deadline_s=60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].pop(0), r"pieces of the tensor 'model.weight' are not the whole.*\[20:40, 0:33\]"),
        (lambda parts: parts[1].append(parts[0][0]), r"tensor 'model.weight' are not the whole.*boxes 0, 2.*rank 1's"),
        (
            lambda parts: parts[1].__setitem__(0, (parts[1][0][0], parts[1][0][1].double(), *parts[1][0][2:])),
            r"ranks differ on the tensor 'model.weight': rank 1: float64 .*; rank 0: float32 \[40, 33\]",
        ),
    ],
    ids=["a gap", "an overlap", "two dtypes"],
)
def test_what_is_not_the_whole_state_is_refused_and_named(change, message, tmp_path):
    parts = rows_of(some_state(), 2)
    change(parts)
    for rank in range(2):
        draft = open_draft(tmp_path, 4, "a", rank=rank)
        write_rank(draft, rank, 2, parts[rank])

    with pytest.raises(InputError, match=message):
        commit(draft, world_size=2)
    assert committed(tmp_path) == []


def test_replicas_that_differ_are_refused_and_named(tmp_path):
    parts = rows_of(some_state(), 2)
    for rank in range(2):
        draft = open_draft(tmp_path, 4, "a", rank=rank)
        write_rank(draft, rank, 2, parts[rank], replicas={"model.weight": f"digest-{rank}", "model.bias": "same"})

    with pytest.raises(InputError, match=r"'model.weight' was taken.*ranks 0 and 1 hold.*another name on every"):
        commit(draft, world_size=2)


def test_an_image_of_another_length_than_its_manifest_says_is_refused(tmp_path):
    draft = open_draft(tmp_path, 4, "a", rank=0)
    manifest = write_rank(draft, 0, 1, rows_of(some_state(), 1)[0])
    os.truncate(draft.path / manifest.image.name, manifest.image.num_bytes - 1)

    with pytest.raises(DamageError, match=r"__0_0.distcp of step 4 has \d+ bytes; its manifest says"):
        commit(draft, world_size=1)


def test_ranks_of_another_world_or_attempt_are_refused(tmp_path):
    draft = open_draft(tmp_path, 4, "a", rank=0)
    write_rank(draft, 0, 2, rows_of(some_state(), 2)[0])

    with pytest.raises(InputError, match=r"rank 0 wrote for step, attempt and world size \(4, 'a', 2\)"):
        commit(draft, world_size=1)


def test_names_that_cannot_be_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"attempt 'a/b' cannot be part of a folder's name"):
        open_draft(tmp_path, 4, "a/b", rank=0)
    with pytest.raises(InputError, match="step is -1"):
        open_draft(tmp_path, -1, "a", rank=0)


def rewrite(draft, **facts) -> None:
    """Change what a draft says of its writer."""
    note = draft.path / ".owner-0.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | facts))


def test_a_draft_is_stale_once_its_writer_is_dead_and_not_before(tmp_path):
    alive = open_draft(tmp_path, 1, "alive", rank=0)
    writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = open_draft(tmp_path, 2, "dead", rank=0, pid=writer.pid)
    reused = open_draft(tmp_path, 3, "reused", rank=0)
    rewrite(reused, birth="an earlier process of this number")
    far = open_draft(tmp_path, 4, "far", rank=0)
    rewrite(far, host="elsewhere")

    assert [is_stale(draft.path) for draft in (alive, dead, reused, far)] == [False, False, True, False]
    writer.kill()
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked how
    assert [is_stale(draft.path) for draft in (alive, dead, reused, far)] == [False, True, True, False]
    assert is_stale(far.path, age_s=-1.0)
    assert recover(tmp_path) == [dead.path, reused.path]
    writer.communicate(timeout=30)
    assert alive.path.exists()
    assert far.path.exists()


def test_a_checkpoint_that_is_removed_vanishes_first(tmp_path, monkeypatch):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, {"w": torch.zeros(4)}, world_size=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed right after the rename
    remove(committed(tmp_path)[-1])

    assert [one.step for one in committed(tmp_path)] == [1]
    monkeypatch.undo()
    assert [path.suffix for path in recover(tmp_path)] == [".trash"]


def test_stock_checkpoints_are_listed_and_other_folders_are_not(tmp_path):
    for name in ("step-3", "step-x", "stepp-4", ".step-5.a.draft", "step-6"):
        (tmp_path / name).mkdir()
        if name != "step-6":
            (tmp_path / name / METADATA).touch()

    assert [one.step for one in committed(tmp_path)] == [3]
    assert not committed(tmp_path)[0].ours
    assert committed(tmp_path / "nothing") == []


def test_a_checkpoint_that_has_lost_its_record_is_listed_and_not_passed_over(tmp_path):
    write_checkpoint(tmp_path, 1, some_state())
    path = write_checkpoint(tmp_path, 2, some_state())
    for name in (METADATA, COMMIT, COMMIT + ".copy"):
        (path / name).unlink()

    assert [(one.step, one.ours) for one in committed(tmp_path)] == [(1, True), (2, True)]
    assert verify(tmp_path).status == "lost"
    shutil.rmtree(path)
    (path / "rank-3").mkdir(parents=True)
    assert [one.step for one in committed(tmp_path)] == [1]


def test_a_file_has_no_checkpoints_under_it_and_says_so(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")

    with pytest.raises(InputError, match=r"model\.pt is a file; checkpoints lie in a folder"):
        committed(tmp_path / "model.pt")


def test_a_rank_without_an_image_is_done_with_its_manifest(tmp_path):
    parts = rows_of({"w": torch.zeros(1, 2)}, 2)
    for rank in range(2):
        draft = open_draft(tmp_path, 4, "a", rank=rank)
        manifest = write_rank(draft, rank, 2, parts[rank])
    assert manifest.image is None
    assert [entry.name for entry in commit(draft, world_size=2).files if "rank-1" in entry.name] == [
        f"rank-1/{MANIFEST}"
    ]
    with pytest.raises(InputError, match="rank 1 has an image or digests, not both"):
        finish_rank(draft, manifest, object())


def test_a_save_that_starts_again_forgets_what_it_had(tmp_path):
    draft = open_draft(tmp_path, 4, "a", rank=0)
    write_rank(draft, 0, 1, rows_of(some_state(), 1)[0])

    again = open_draft(tmp_path, 4, "a", rank=0)

    assert ranks_done(again, 1) == set()
    assert time.time() - again.path.stat().st_mtime < 60
