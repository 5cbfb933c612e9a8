"""Repair: bit for bit, only what is damaged, and again after a crash."""

import os
import shutil

import numpy as np
import pytest

from headway.core.errors import DamageError, FormatError, InputError
from headway.storage.checks import repair as module
from headway.storage.checks.repair import repair
from headway.storage.checks.verification import verify
from headway.storage.manifest import read_record
from headway.storage.redundancy.parity_files import ParityFacts
from tests import redundant
from tests.launching import headway_here, json_of, refusal
from tests.redundant import content, flip, lose, protected, put_back

no_fsync, checkpoint, copy = redundant.no_fsync, redundant.checkpoint, redundant.copy


@pytest.mark.parametrize("ranks", [(0, 1), (0, 3), (1, 2), (2, 5), (0, 5)])
def test_two_lost_directories_come_back_bit_for_bit(copy, ranks):
    """Five of the fifteen pairs; `headway bench repair_drill` takes all."""
    good = content(copy)
    lose(copy, *ranks)

    done = repair(copy)

    assert (done.status, done.exit_code) == ("repaired", 0)
    assert content(copy) == good


@pytest.mark.parametrize("seed", range(3))
def test_ten_flips_are_undone_and_nothing_else_is_written(copy, seed):
    rng = np.random.default_rng(seed)
    good = content(copy)
    names = [str(name) for name in rng.choice(sorted(good), 10, replace=False)]
    for name in names:
        flip(copy, name, int(rng.integers(len(good[name]))), int(rng.integers(8)))
    others = {name: os.stat(copy / name).st_mtime_ns for name in good if name not in names}

    assert repair(copy).status == "repaired"
    assert content(copy) == good
    assert repair(copy).status == "good"
    touched = {name for name, at in others.items() if os.stat(copy / name).st_mtime_ns != at}
    assert all(name.endswith(("parity.json", "parity.bin")) for name in touched)
    assert {name.split("/")[0] for name in touched} <= {name.split("/")[0] for name in names if "parity" in name}


def test_one_lost_directory_and_a_flip_per_stripe_are_undone(copy):
    good = content(copy)
    facts = read_record(copy / "rank-0" / "parity.json", ParityFacts)
    lose(copy, 2)
    for stripe in range(6):
        rank, segment = next(place for place in facts.stripes.data(stripe) if place[0] != 2)
        name = f"rank-{rank}/__{rank}_0.distcp"
        flip(copy, name, min(segment * facts.segment_bytes + 4096 * stripe, len(good[name]) - 1))

    assert repair(copy).status == "repaired"
    assert content(copy) == good


def test_two_lost_directories_and_a_flip_that_needs_them_are_lost_and_named(copy):
    facts = read_record(copy / "rank-0" / "parity.json", ParityFacts)
    (one, _), (two, _), (rank, segment) = facts.stripes.data(0)[:3]
    lose(copy, one, two)
    flip(copy, f"rank-{rank}/__{rank}_0.distcp", segment * facts.segment_bytes)
    before = content(copy)

    done = repair(copy)

    assert (done.status, done.exit_code) == ("lost", 3)
    assert {lost.rank for lost in done.missing} == {one, two, rank}
    assert {lost.num_bytes for lost in done.missing if lost.tensor == "model.weight"} == {4096}
    assert content(copy) == before


@pytest.mark.parametrize("ranks", [(0, 1, 2), (3, 4, 5), (0, 2, 4)])
def test_three_lost_directories_are_lost_and_named(copy, ranks):
    lose(copy, *ranks)

    done = repair(copy)

    assert done.status == "lost"
    assert {lost.rank for lost in done.missing} == {*ranks}
    assert {lost.tensor for lost in done.missing} >= {"model.weight", "model.bias", "loader"}


def test_longer_shorter_and_renamed_files_are_undone(copy):
    good = content(copy)
    with open(copy / "rank-1/__1_0.distcp", "ab") as file:
        file.write(b"more")
    os.truncate(copy / "rank-2/__2_0.distcp", 5000)
    os.rename(copy / "rank-3/digests.bin", copy / "rank-3/old")
    (copy / "rank-4/manifest.json").write_bytes(b"")

    repair(copy)

    assert {name: data for name, data in content(copy).items() if name != "rank-3/old"} == good


def test_a_small_file_is_repaired_without_any_parity(tmp_path):
    path = protected(tmp_path, "none", world_size=2)
    good = content(path)
    for name in ("rank-0/digests.bin", "rank-1/manifest.json", ".metadata", "commit.json"):
        flip(path, name, len(good[name]) // 2)

    assert repair(path).status == "repaired"
    assert content(path) == good
    flip(path, "rank-1/__1_0.distcp", 4500)
    assert repair(path).status == "lost"


@pytest.mark.parametrize(("redundancy", "world_size"), [("xor", 3), ("8+2", 1), ("+2", 2), ("3+2", 5), ("2+1", 7)])
def test_every_scheme_repairs_as_many_rows_as_it_has_parities(tmp_path, redundancy, world_size):
    path = protected(tmp_path, redundancy, world_size=world_size, rows=1200)
    good = content(path)
    facts = read_record(path / "rank-0" / "parity.json", ParityFacts)
    for stripe in range(world_size):
        for rank, segment in facts.stripes.data(stripe)[: facts.m]:
            name = f"rank-{rank}/__{rank}_0.distcp"
            if segment * facts.segment_bytes < len(good[name]):
                flip(path, name, segment * facts.segment_bytes)

    assert repair(path).status == "repaired"
    assert content(path) == good


def test_a_crash_at_any_step_leaves_it_repairable(tmp_path, monkeypatch):
    """Stop after each rename in turn: what stands is good or damaged as before, and the next repair finishes."""
    copy = protected(tmp_path, world_size=3, rows=300)
    good = content(copy)
    lose(copy, 0)
    flip(copy, "rank-2/__2_0.distcp", 4100)
    damaged = content(copy)
    rename, steps = os.replace, 0

    class StoppedError(Exception):
        pass

    def stopping(left):
        def replace(source, target):
            nonlocal left
            if not left:
                raise StoppedError
            left -= 1
            rename(source, target)

        return replace

    while True:
        put_back(copy, damaged)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stopping(steps))
            try:
                repair(copy)
            except StoppedError:
                pass
            else:
                break
        assert verify(copy).status in ("repairable", "good")  # good: all but the parity of the lost rank
        now = content(copy)
        assert all(now[name] in (good.get(name), damaged.get(name)) for name in now)
        if steps % 4 == 0:
            assert repair(copy).status == "repaired"
            assert content(copy) == good
        steps += 1

    assert steps > 10
    assert content(copy) == good


def test_nothing_is_put_in_place_that_is_not_what_was_saved(copy, monkeypatch):
    """Parity that is not of these data (its own digests hold): the rebuilt image differs from the commit's root."""
    flip(copy, "rank-3/__3_0.distcp", 4100)
    monkeypatch.setattr(module, "read_at", lambda path, start, out: out.fill(1))
    before = content(copy)

    with pytest.raises(DamageError, match="not what was saved; it was not put in place"):
        repair(copy)

    assert content(copy) == before


def test_the_command_repairs_and_says_so(copy):
    good = content(copy)
    lose(copy, 4)

    planned = json_of("ckpt", "repair", copy, "--dry-run", "--json", code=3)
    text = headway_here("ckpt", "repair", copy.parent).stdout
    again = json_of("ckpt", "repair", copy, "--json")

    assert (planned["schema"], planned["status"]) == ("headway.ckpt.repair/1", "repairable")
    assert "rank-4/__4_0.distcp" in planned["files"]
    assert "rank-4/__4_0.distcp" in text
    assert "bit for bit" in text
    assert (again["status"], again["files"], again["redundancy"]["scheme"]) == ("good", [], "4+2")
    assert content(copy) == good


def test_of_a_run_the_newest_checkpoint_is_repaired_also_when_its_record_is_lost(tmp_path):
    protected(tmp_path, "xor", world_size=2, rows=60, step=9)
    newest = protected(tmp_path, "xor", world_size=2, rows=60, step=10)
    good = content(newest)
    lose(newest, 0)

    assert "step-10" in "".join(headway_here("ckpt", "repair", tmp_path).stdout.split())  # a long path is wrapped
    assert content(newest) == good


def test_the_command_names_what_is_lost(copy):
    lose(copy, 1, 3, 5)

    done = headway_here("ckpt", "repair", copy)

    assert done.returncode == 3
    assert "lost of ranks 1, 3, 5" in done.stdout
    assert "model.weight rows 500.." in done.stdout


def test_bad_input_is_told(tmp_path):
    with pytest.raises(FormatError, match="no commit record"):
        repair(tmp_path)
    assert "Name the folder of a checkpoint" in refusal("ckpt", "repair", tmp_path / "missing")


@pytest.mark.parametrize("name", ["rank-3", "rank-3/__3_0.distcp", "rank-3/manifest.json"])
def test_what_lies_in_the_place_of_a_folder_or_file_is_named_and_not_removed(copy, tmp_path, name):
    good = content(copy)
    aside = shutil.move(copy / name, tmp_path / "aside")
    if os.path.isdir(aside):
        (copy / name).write_bytes(b"")
    else:
        (copy / name).mkdir()

    assert verify(copy).status == "repairable"
    with pytest.raises(InputError, match=f"{name} is .*what is rebuilt goes there"):
        repair(copy)
    os.rename(copy / name, tmp_path / "moved away")
    assert repair(copy).status == "repaired"
    assert content(copy) == good
