"""A rank's part of a save, the commit, and how a save that cannot be is given up."""

import os
from pathlib import Path

import msgspec
import pytest

from headway.checkpoint.agent import saving
from headway.checkpoint.agent.messages import Hello, Layout, Persist
from headway.core.errors import HeadwayError, InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.commit import committed
from headway.storage.draft import Draft, abandon, finish_rank
from headway.storage.manifest import MANIFEST, RankManifest, read_record


def hello(root, rank=0, world_size=1, **facts):
    return Hello(root=str(root), attempt="a", rank=rank, world_size=world_size, **facts)


def part(told, step=7, attempt="a", data=b"data"):
    """Write a rank's part; return its draft."""
    save = Persist(step=step, attempt=attempt, number=0, num_bytes=len(data), begun_ns=0)
    return saving.persist_rank(told, Layout(()), save, bytearray(data), RateLimiter())[0]


def test_a_save_is_committed_once_all_ranks_are_done_and_never_before(tmp_path):
    first, second = hello(tmp_path, 0, 2), hello(tmp_path, 1, 2)

    draft = part(first)
    assert saving.commit_if_ready(first, draft) is None
    assert saving.outcome(second, draft) is None
    part(second)
    record = saving.commit_if_ready(first, draft)

    assert record is not None
    assert saving.outcome(second, draft) == record == saving.commit_if_ready(first, draft)
    assert [entry.step for entry in committed(tmp_path)] == [7]


def test_a_part_that_stands_is_not_written_again(tmp_path):
    told = hello(tmp_path, 0, 2)
    draft = part(told)
    image = draft.rank_path(0) / "__0_0.distcp"
    before = os.stat(image)

    again = part(told, data=b"else")

    assert again == draft
    assert (os.stat(image).st_ino, image.read_bytes()) == (before.st_ino, b"data")


def test_a_rank_that_will_never_be_done_ends_the_save_for_all(tmp_path):
    first, second = hello(tmp_path, 0, 2), hello(tmp_path, 1, 2)
    draft = part(first)
    saving.mark_orphans(second)

    with pytest.raises(HeadwayError, match=r"rank 1 could not write its part.*still stands") as error:
        saving.commit_if_ready(first, draft)
    saving.give_up(draft, str(error.value))
    with pytest.raises(HeadwayError, match=r"rank 0 gave it up: step 7 is not committed: rank 1"):
        saving.outcome(second, draft)
    saving.sweep({draft})
    with pytest.raises(HeadwayError, match=r"its draft .* is gone. Save again"):
        saving.outcome(second, draft)


def test_who_looks_while_the_reason_is_written_waits_for_all_of_it(tmp_path, monkeypatch):
    second = hello(tmp_path, 1, 2)
    draft, seen = part(second), []
    write = Path.write_text

    def written(path, text):
        path.touch()
        seen.append(saving.outcome(second, draft))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", written)
    saving.give_up(draft, "InputError: ranks differ")

    assert seen == [None]
    with pytest.raises(HeadwayError, match="rank 0 gave it up: InputError: ranks differ"):
        saving.outcome(second, draft)


def test_an_orphan_does_not_disown_what_it_has_written(tmp_path):
    told = hello(tmp_path, 1, 2)
    draft = part(told)

    saving.mark_orphans(told)

    assert saving.marked_gone(draft, {0, 1}) == set()


def test_a_save_that_was_superseded_before_a_slow_rank_looked_counts_as_committed(tmp_path):
    told = hello(tmp_path, 0, 1, keep_last=1)
    slow = Draft(tmp_path, 7, "a")
    for step in (7, 8):
        saving.commit_if_ready(told, part(told, step))
    saving.prune(told, 8)

    assert [entry.step for entry in committed(tmp_path)] == [8]
    assert saving.outcome(told, slow).step == 8


@pytest.mark.parametrize(
    ("started_unix_s", "attempt", "replaces"),
    [(0.0, "a-2", True), (0.0, "b", False), (4e9, "b", True)],
    ids=["this attempt's own", "another job's", "of before this attempt"],
)
def test_a_step_is_replaced_by_whoever_goes_on_from_before_it_and_by_nobody_else(
    tmp_path, started_unix_s, attempt, replaces
):
    first = hello(tmp_path)
    saving.commit_if_ready(first, part(first))
    name = attempt.partition("-")[0]
    second = Hello(root=str(tmp_path), attempt=name, rank=0, world_size=1, started_unix_s=started_unix_s)
    draft = part(second, attempt=attempt, data=b"new")

    if not replaces:
        with pytest.raises(InputError, match=r"committed already"):
            saving.commit_if_ready(second, draft)
        return
    assert saving.commit_if_ready(second, draft).attempt == attempt
    assert (tmp_path / "step-7" / "rank-0" / "__0_0.distcp").read_bytes() == b"new"


def test_a_stock_checkpoint_in_the_way_is_never_replaced(tmp_path):
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / ".metadata").write_bytes(b"stock")
    told = hello(tmp_path, started_unix_s=4e9)

    with pytest.raises(InputError, match=r"committed already"):
        saving.commit_if_ready(told, part(told))


def test_only_our_own_checkpoints_up_to_the_newest_step_are_pruned(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(b"stock")
    told = hello(tmp_path, keep_last=1)
    for step in (2, 3, 9):
        saving.commit_if_ready(told, part(told, step))

    saving.prune(told, 3)

    assert [entry.step for entry in committed(tmp_path)] == [1, 3, 9]


def test_a_part_of_a_draft_that_was_given_up_meanwhile_is_an_error_and_makes_no_draft(tmp_path):
    draft = part(hello(tmp_path, rank=0, world_size=2))
    manifest = read_record(draft.rank_path(0) / MANIFEST, RankManifest)
    abandon(draft)

    with pytest.raises(InputError, match="does not exist"):
        finish_rank(draft, msgspec.structs.replace(manifest, image=None), None)
    assert not draft.path.exists()
